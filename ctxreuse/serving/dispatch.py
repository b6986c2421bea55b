"""Sending a batch: in the scheduled order, so many at a time, the answers in the caller's order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError, describe
from ctxreuse.planning.plan import BatchPlan, Plan
from ctxreuse.serving.client.completion import Completion
from ctxreuse.serving.client.engine_client import EngineClient

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the number of requests that have ended, and of all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request: either an answer or an error.

    Attributes:
        plan: What was sent.
        completion: The answer; None if the request failed.
        error: Why it failed; None if it was answered.
    """

    plan: Plan
    completion: Completion | None = None
    error: EngineError | None = None


async def dispatch(
    client: EngineClient,
    plans: BatchPlan | Sequence[Plan],
    *,
    concurrency: int = 8,
    leader_first: bool = False,
    progress: Progress | None = None,
    **params: Any,
) -> list[Outcome]:
    """Send plans to an engine and wait for all answers.

    The requests start in the order of the plans, at most `concurrency` of them at a time; a failed
    one does not stop the others. A cancelled dispatch cancels them all, and the planner hears of
    those that were not answered.

    An engine finds a prompt's beginning in its cache once the blocks are registered. vLLM registers
    them when it schedules the request that computes them, so that followers in the same step hit.
    For engines that register them later, `leader_first` holds a request back until the first token
    has come of its leader: the earlier request with which it shares most leading blocks, the first
    one of its system text, or the turn before it. Requests with other leaders overtake it.

    Args:
        client: Where to send them.
        plans: A batch plan, or plans in the order in which to send them.
        concurrency: How many requests are under way at a time.
        leader_first: Whether followers wait for their leader's first token.
        progress: Called whenever a request has ended.
        **params: As in `EngineClient.complete`.

    Returns:
        One outcome a request, in the order of the batch's input, or of the plans.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
    """
    sequence = plans.plans if isinstance(plans, BatchPlan) else plans
    _check(client, sequence, concurrency)
    jobs = [_Job(plan) for plan in sequence]
    if leader_first:
        for job, leader in zip(jobs, leaders(sequence), strict=True):
            job.leader = None if leader is None else jobs[leader]
    await _Dispatch(client, jobs, progress, params).run(concurrency)
    outcomes = [job.outcome for job in jobs if job.outcome is not None]
    assert len(outcomes) == len(jobs)
    if isinstance(plans, BatchPlan):
        by_position = dict(zip(plans.order, outcomes, strict=True))
        outcomes = [by_position[position] for position in range(len(outcomes))]
    return outcomes


def leaders(plans: Sequence[Plan]) -> list[int | None]:
    """Return for each plan the position of the earlier one with which it shares the longest prefix.

    Of several the earliest leads. A prefix is a system text and leading blocks, or, for a later
    turn, what the conversation's turn before it has sent. None shares nothing with any.

    Args:
        plans: In the order in which they are sent.
    """
    roots: dict[Hashable, _Node] = {}
    last_turn: dict[Hashable, int] = {}
    found: list[int | None] = []
    for position, plan in enumerate(plans):
        request = plan.request
        conversation: Hashable = None
        if request.conversation_id is not None:
            kind = type(request.conversation_id)
            conversation = (request.tenant, kind, request.conversation_id)
        leader = last_turn.get(conversation)
        if not request.history:
            root = roots.setdefault((request.tenant, request.system), _Node(position))
            leader = root.first if request.system else None
            node = root
            for block in plan.blocks:
                below = node.children.setdefault(block.key, _Node(position))
                leader = below.first if below.first < position else leader
                node = below
            leader = None if leader == position else leader
        if conversation is not None:
            last_turn[conversation] = position
        found.append(leader)
    return found


@contextmanager
def progress_bar(description: str = "requests") -> Iterator[Progress]:
    """Show a progress bar on the terminal as long as the block runs.

    Args:
        description: What stands before the bar.

    Yields:
        What `dispatch` takes as `progress`.

    Raises:
        MissingExtraError: rich is not installed.
    """
    try:
        from rich.progress import Progress as Bar
    except ImportError as error:
        raise MissingExtraError("progress_bar", "cli") from error

    with Bar() as bar:
        task = bar.add_task(description, total=None)
        yield lambda ended, total: bar.update(task, completed=ended, total=total)


@dataclass(slots=True)
class _Node:
    """A prefix: which plan had it first, and how it goes on."""

    first: int
    children: dict[Hashable, _Node] = field(default_factory=dict)


class _Job:
    """One request of a batch; its followers may start once its first token has come."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.leader: _Job | None = None
        self.leads_no_more = False
        self.outcome: Outcome | None = None

    @property
    def is_ready(self) -> bool:
        return self.leader is None or self.leader.leads_no_more


class _Dispatch:
    """The requests of one batch, and the workers that send them."""

    def __init__(
        self,
        client: EngineClient,
        jobs: Sequence[_Job],
        progress: Progress | None,
        params: dict[str, Any],
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._pending = deque(jobs)
        self._progress = progress
        self._params = params
        self._news = asyncio.Event()
        self._ended = 0

    async def run(self, concurrency: int) -> None:
        """Send all requests; if that is cancelled or fails, cancel what is under way."""
        workers = [
            asyncio.ensure_future(self._work()) for _ in range(min(concurrency, len(self._jobs)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for job in self._jobs:
                if job.outcome is None:
                    self._client.forget(job.plan)

    async def _work(self) -> None:
        while (job := await self._next()) is not None:
            try:
                completion = await self._client.complete(
                    job.plan, on_first_token=partial(self._release, job), **self._params
                )
                job.outcome = Outcome(job.plan, completion)
            except EngineError as error:
                job.outcome = Outcome(job.plan, error=error)
            self._release(job)
            self._ended += 1
            if self._progress is not None:
                self._progress(self._ended, len(self._jobs))

    async def _next(self) -> _Job | None:
        """Return the first request that may start; wait until there is one."""
        while self._pending:
            for position, job in enumerate(self._pending):
                if job.is_ready:
                    del self._pending[position]
                    return job
            self._news.clear()
            await self._news.wait()
        return None

    def _release(self, leader: _Job) -> None:
        leader.leads_no_more = True
        self._news.set()


def _check(client: object, plans: object, concurrency: object) -> None:
    if not isinstance(client, EngineClient):
        raise InvalidRequestError(f"client must be an EngineClient, not {describe(client)}")
    if isinstance(plans, (str, bytes)) or not isinstance(plans, Sequence):
        raise InvalidRequestError(f"plans must be a BatchPlan or a list, not {describe(plans)}")
    for plan in plans:
        if not isinstance(plan, Plan):
            raise InvalidRequestError(f"a plan must be a Plan, not {describe(plan)}")
    if not isinstance(concurrency, int) or concurrency < 1:
        raise InvalidRequestError(
            f"concurrency must be an integer from 1, not {describe(concurrency)}"
        )
