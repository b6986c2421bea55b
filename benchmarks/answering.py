"""Asking a server questions, with the blocks shown in one way or another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from uuid import uuid4

from runs import fits
from server import ServerInfo

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.errors import EngineError
from ctxreuse.evaluation.traces import TraceRequest
from ctxreuse.planner import Strategy
from ctxreuse.plans import Plan
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
    server: ServerInfo,
    questions: Questions,
    policy: Policy,
    concurrency: int,
    advance: Callable[[], object],
) -> Answers:
    """Return the answers under a policy.

    All first turns are asked, then all second ones, and so on, so that the plans do not hang on
    which answer comes first. The first turns are planned as one batch. A conversation with a turn
    that is not answered ends there.

    Args:
        server: Who is asked.
        questions: What is asked.
        policy: How the blocks are shown.
        concurrency: Requests at a time.
        advance: Called once a question that was asked.
    """
    planner = ReusePlanner(deduplicate=policy.deduplicate)
    answers = Answers(policy)
    async with EngineClient(server.base_url, server.model, planner=planner) as client:
        asker = _Asker(client, server, questions.answer_tokens, answers, concurrency, advance)
        going_on = [_Conversation(turns) for turns in questions.conversations]
        while going_on:
            requests = [conversation.request() for conversation in going_on]
            if all(not request.history for request in requests):
                plans = list(planner.plan_batch(requests, policy.strategy).in_input_order())
            else:
                plans = [planner.plan(request, policy.strategy) for request in requests]
            if not policy.annotate:
                plans = [replace(plan, order_annotation=None) for plan in plans]
            texts = await asyncio.gather(*map(asker.answer, plans))
            for conversation, plan, text in zip(going_on, plans, texts, strict=True):
                conversation.record(plan, text)
            going_on = [conversation for conversation in going_on if conversation.goes_on]
    return answers


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


class _Asker:
    """Sends plans, a few at a time, and notes the answers."""

    def __init__(
        self,
        client: EngineClient,
        server: ServerInfo,
        answer_tokens: int,
        answers: Answers,
        concurrency: int,
        advance: Callable[[], object],
    ) -> None:
        self._client = client
        self._server = server
        self._answer_tokens = answer_tokens
        self._answers = answers
        self._slots = asyncio.Semaphore(concurrency)
        self._advance = advance
        self._salt = uuid4().hex

    async def answer(self, plan: Plan) -> str | None:
        """Return the model's answer; None if there is none."""
        async with self._slots:
            try:
                context, room = self._server.context_tokens, self._answer_tokens
                if not await fits(self._client, plan, context, room):
                    self._answers.failures["longer than the model's context"] += 1
                    return None
                completion = await self._client.complete(
                    plan, cache_salt=self._salt, max_tokens=room, temperature=0
                )
            except EngineError as error:
                self._answers.failures[str(error)] += 1
                return None
            finally:
                self._advance()
        self._answers.texts[plan.request_id] = completion.text
        if plan.blocks != tuple(plan.request.unique_blocks.values()):
            self._answers.changed.add(plan.request_id)
        return completion.text
