"""Asking a server questions, with the blocks shown in one way or another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from uuid import uuid4

from server import ServerInfo

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.errors import EngineError
from ctxreuse.evaluation.traces.trace_files import TraceRequest
from ctxreuse.planner import Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.serving import EngineClient

SYSTEM = "Answer the question in as few words as possible. Use only the documents."

QuestionId: TypeAlias = str | int


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to show the blocks."""

    name: str
    strategy: Strategy = "reuse"
    annotate: bool = True
    deduplicate: bool = False


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked.

    Attributes:
        name: The data set.
        conversations: Their turns; an independent question is a conversation of one turn.
        references: Question -> right answers, where they are known.
        answer_tokens: The longest answer.
        policies: Those that are compared, as retrieved first.
    """

    name: str
    conversations: tuple[tuple[TraceRequest, ...], ...]
    references: Mapping[QuestionId, Sequence[str]]
    answer_tokens: int
    policies: tuple[Policy, ...]

    @property
    def turns(self) -> int:
        """How many questions there are."""
        return sum(map(len, self.conversations))


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model said under one policy.

    Attributes:
        policy: The policy.
        texts: Question -> answer.
        changed: Questions whose prompt showed other blocks than the retriever's, or in another
            order.
        failures: Why questions were not answered, and how many each time.
    """

    policy: Policy
    texts: dict[QuestionId, str] = field(default_factory=dict)
    changed: set[QuestionId] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)


async def ask(
    server: ServerInfo, questions: Questions, concurrency: int, advance: Callable[[], object]
) -> list[Answers]:
    """Return the answers under each policy.

    The first turns are planned as one batch; later ones stand behind their history and keep the
    retriever's order, so no plan hangs on which answer comes first. A conversation is asked to its
    end under one policy after the other, as long as the engine still has what it said before; where
    two policies send the same, the answer is the engine's to the same prompt. A conversation with a
    turn that is not answered ends there.

    Args:
        server: Who is asked.
        questions: What is asked.
        concurrency: Conversations at a time.
        advance: Called once a question and policy.

    Returns:
        The answers under each of the policies, in their order.
    """
    salt = uuid4().hex
    async with AsyncExitStack() as clients:
        askers = []
        for policy in questions.policies:
            planner = ReusePlanner(deduplicate=policy.deduplicate)
            client = EngineClient(server.base_url, server.model, planner=planner)
            await clients.enter_async_context(client)
            askers.append(
                _Asker(client, planner, server, questions.answer_tokens, Answers(policy), salt)
            )
        conversations = [list(map(_Conversation, questions.conversations)) for _ in askers]
        plans = [
            asker.first_plans(begun) for asker, begun in zip(askers, conversations, strict=True)
        ]
        slots = asyncio.Semaphore(concurrency)

        async def under_each_policy(number: int) -> None:
            async with slots:
                for asker, begun, first in zip(askers, conversations, plans, strict=True):
                    await asker.converse(begun[number], first[number])
                    for _ in questions.conversations[number]:
                        advance()

        await asyncio.gather(*map(under_each_policy, range(len(questions.conversations))))
    return [asker.answers for asker in askers]


async def fits(client: EngineClient, plan: Plan, context_tokens: int, answer_tokens: int) -> bool:
    """Return whether a prompt and its answer fit the model's context."""
    return len(await client.tokenize(plan)) + answer_tokens <= context_tokens


class _Conversation:
    """The turns of a conversation, and the messages so far."""

    def __init__(self, turns: Sequence[TraceRequest]) -> None:
        self._turns = turns
        self._next = 0
        self._history: list[dict[str, Any]] = []

    @property
    def goes_on(self) -> bool:
        """Whether there is another turn."""
        return self._next < len(self._turns)

    def request(self) -> ContextRequest:
        """Return the next turn."""
        traced = self._turns[self._next]
        is_single = len(self._turns) == 1
        return ContextRequest(
            blocks=traced.blocks,
            query=traced.query,
            system=SYSTEM,
            history=None if is_single else self._history,
            conversation_id=None if is_single else traced.conversation_id,
            request_id=traced.request_id,
        )

    def record(self, plan: Plan, text: str | None) -> None:
        """Append a turn and its answer; without one the conversation ends."""
        self._next = len(self._turns) if text is None else self._next + 1
        self._history.append({"role": "user", "content": plan.content})
        self._history.append({"role": "assistant", "content": text})


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks under one policy, and notes the answers."""

    client: EngineClient
    planner: ReusePlanner
    server: ServerInfo
    answer_tokens: int
    answers: Answers
    salt: str

    def first_plans(self, conversations: Sequence[_Conversation]) -> list[Plan]:
        """Return the plans of the first turns, planned together."""
        requests = [conversation.request() for conversation in conversations]
        planned = self.planner.plan_batch(requests, self.answers.policy.strategy)
        return [self._shown(plan) for plan in planned.in_input_order()]

    async def converse(self, conversation: _Conversation, first: Plan) -> None:
        """Ask the turns of a conversation."""
        conversation.record(first, await self._answer(first))
        while conversation.goes_on:
            planned = self.planner.plan(conversation.request(), self.answers.policy.strategy)
            plan = self._shown(planned)
            conversation.record(plan, await self._answer(plan))

    def _shown(self, plan: Plan) -> Plan:
        """Return a plan as the policy shows it."""
        return plan if self.answers.policy.annotate else replace(plan, order_annotation=None)

    async def _answer(self, plan: Plan) -> str | None:
        """Return the model's answer; None if there is none."""
        try:
            if not await fits(self.client, plan, self.server.context_tokens, self.answer_tokens):
                self.answers.failures["longer than the model's context"] += 1
                self.client.forget(plan)
                return None
            completion = await self.client.complete(
                plan, cache_salt=self.salt, max_tokens=self.answer_tokens, temperature=0
            )
        except EngineError as error:
            self.answers.failures[str(error)] += 1
            return None
        self.answers.texts[plan.request_id] = completion.text
        if plan.blocks != tuple(plan.request.unique_blocks.values()):
            self.answers.changed.add(plan.request_id)
        return completion.text
