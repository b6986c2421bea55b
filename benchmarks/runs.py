"""Sending a part of a trace to a server under one policy, one request after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
from server import ServerInfo

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import CacheUsage
from ctxreuse.errors import EngineError
from ctxreuse.evaluation.replay import ANSWER
from ctxreuse.evaluation.traces import TraceRequest
from ctxreuse.planner import Strategy
from ctxreuse.plans import Plan
from ctxreuse.serving import EngineClient

FEWEST_TURNS = 4
"""Of a conversation that is long enough to tell something; MT-RAG's have 4.2 on average."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to plan a trace."""

    name: str
    strategy: Strategy
    batch: bool = False
    deduplicate: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """A part of a trace.

    Attributes:
        name: Data set and blocks a request.
        trace: The requests, in arrival order.
        conversations: Whether turns stand behind the history of their conversation.
    """

    name: str
    trace: tuple[TraceRequest, ...]
    conversations: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """One answered request.

    Attributes:
        request_id: The trace's.
        usage: Prompt tokens, and how many of them the server had cached.
        first_token_s: Seconds from sending it to its first token.
    """

    request_id: str | int
    usage: CacheUsage
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """What one policy came to on one workload.

    Attributes:
        policy: The policy.
        measured: The answered requests, in the order in which they were sent.
        failures: Why requests were not answered, and how many each time.
        left_out: Turns whose conversation had stopped, since it no longer fits the model.
    """

    policy: Policy
    measured: list[Measured] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    left_out: list[str | int] = field(default_factory=list)

    @property
    def request_ids(self) -> frozenset[str | int]:
        """The answered requests."""
        return frozenset(request.request_id for request in self.measured)

    @property
    def usage(self) -> CacheUsage:
        """All answered requests together."""
        return sum((request.usage for request in self.measured), CacheUsage())

    def only(self, request_ids: frozenset[str | int]) -> Run:
        """Return the part of this run that has to do with some requests."""
        part = [request for request in self.measured if request.request_id in request_ids]
        return Run(self.policy, part)

    def first_token_s(self, percentile: float) -> float:
        """Return a percentile of the times to the first token, in seconds."""
        return float(np.percentile(self._times, percentile))

    @property
    def mean_first_token_s(self) -> float:
        """The mean time to the first token, in seconds."""
        return float(np.mean(self._times))

    @property
    def _times(self) -> list[float]:
        return [request.first_token_s for request in self.measured] or [float("nan")]


def whole_conversations(trace: Sequence[TraceRequest], requests: int) -> tuple[TraceRequest, ...]:
    """Return whole conversations, those first that began first, turns interleaved as they came.

    Only long ones: in short ones most turns have no history to speak of.

    Args:
        trace: Turns in arrival order.
        requests: How many turns there may be, all together; what would be more is passed over.
    """
    turns = Counter(traced.conversation_id for traced in trace)
    chosen: set[str | int] = set()
    for conversation, number in turns.items():  # in the order of their first turns
        if conversation is not None and FEWEST_TURNS <= number <= requests:
            chosen.add(conversation)
            requests -= number
    return tuple(traced for traced in trace if traced.conversation_id in chosen)


async def run_policy(
    server: ServerInfo, workload: Workload, policy: Policy, advance: Callable[[], object]
) -> Run:
    """Send a workload under a policy, and under a salt of its own: it finds an empty cache.

    Args:
        server: Where to.
        workload: What is sent. Each request generates one token.
        policy: How it is planned.
        advance: Called once a request.
    """
    planner = ReusePlanner(deduplicate=policy.deduplicate)
    run = Run(policy)
    async with EngineClient(server.base_url, server.model, planner=planner) as client:
        sender = _Sender(client, planner, run, uuid4().hex)
        if workload.conversations:
            await _converse(sender, workload.trace, server.context_tokens, advance)
            return run
        requests = [_request(traced, None) for traced in workload.trace]
        if policy.batch:
            for plan in planner.plan_batch(requests, policy.strategy).plans:
                await sender.send(plan)
                advance()
        else:
            for request in requests:
                await sender.send(planner.plan(request, policy.strategy))
                advance()
    return run


@dataclass(frozen=True, slots=True)
class _Sender:
    """Sends plans and notes what they cost."""

    client: EngineClient
    planner: ReusePlanner
    run: Run
    salt: str

    async def send(self, plan: Plan) -> bool:
        """Send a plan; return whether it was answered."""
        try:
            answer = await self.client.complete(
                plan, cache_salt=self.salt, max_tokens=1, temperature=0
            )
        except EngineError as error:
            self.run.failures[str(error)] += 1
            return False
        if answer.prompt_tokens is None or answer.cached_tokens is None:
            raise SystemExit(
                "the server does not say how many tokens it had cached; "
                "start it with --enable-prompt-tokens-details"
            )
        usage = CacheUsage(answer.prompt_tokens, answer.cached_tokens)
        self.run.measured.append(Measured(plan.request_id, usage, answer.time_to_first_token_s))
        return True


async def _converse(
    sender: _Sender,
    trace: Sequence[TraceRequest],
    context_tokens: int,
    advance: Callable[[], object],
) -> None:
    """Send turns behind their histories; a conversation stops where it no longer fits.

    Every turn is answered "OK." in the histories, so that all policies send the same ones.
    """
    histories: dict[object, list[dict[str, Any]]] = {}
    stopped: set[object] = set()
    for traced in trace:
        advance()
        conversation = traced.conversation_id
        if conversation in stopped:
            sender.run.left_out.append(traced.request_id)
            continue
        history = histories.setdefault(conversation, [])
        plan = sender.planner.plan(_request(traced, history), sender.run.policy.strategy)
        if not await fits(sender.client, plan, context_tokens, answer_tokens=1):
            sender.client.forget(plan)
            sender.run.left_out.append(traced.request_id)
            stopped.add(conversation)
        elif not await sender.send(plan):
            stopped.add(conversation)
        history.append({"role": "user", "content": plan.content})
        history.append({"role": "assistant", "content": ANSWER})


async def fits(client: EngineClient, plan: Plan, context_tokens: int, answer_tokens: int) -> bool:
    """Return whether a prompt and its answer fit the model's context."""
    return len(await client.tokenize(plan)) + answer_tokens <= context_tokens


def _request(traced: TraceRequest, history: list[dict[str, Any]] | None) -> ContextRequest:
    return ContextRequest(
        blocks=traced.blocks,
        query=traced.query,
        history=history,
        conversation_id=None if history is None else traced.conversation_id,
        request_id=traced.request_id,
    )
