"""Sending a batch in the scheduled order, with the answers in the caller's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ctxreuse.context.checks import check_function, checked_integer, checked_kind, checked_list
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import EngineError, MissingExtraError
from ctxreuse.pipeline.leader_first import leaders, leaders_needed
from ctxreuse.pipeline.ordered_release import OrderedQueue, Slot, TaskWaiter
from ctxreuse.planning.plan import BatchPlan, Plan
from ctxreuse.serving.aio.concurrency import all_of
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.reply import Completion

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the number of requests that have ended, and of all."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered: the plan that was sent, and the answer; `error` is None."""

    plan: Plan
    completion: Completion
    error: None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that failed: the plan that was sent, and the error; `completion` is None."""

    plan: Plan
    error: EngineError
    completion: None = None


Outcome: TypeAlias = Answered | Failed
"""What became of one request: an answer, where `error` is None, or an error."""


async def dispatch(
    client: EngineClient,
    plans: BatchPlan | Sequence[Plan],
    *,
    concurrency: int = 8,
    leader_first: bool | None = None,
    progress: Progress | None = None,
    **params: Any,
) -> list[Outcome]:
    """Send plans to an engine, in their order, and wait for all answers.

    A failed request does not stop the others; a cancelled dispatch cancels them all. A plan's
    primes are sent right before it; those that share its beginning wait for them.

    Args:
        client: Where to send them.
        plans: A batch plan, or plans in the order in which to send them.
        concurrency: How many requests run at a time.
        leader_first: Whether a request waits for the first token of the earlier request with which
            it shares most leading blocks; others overtake it. None: for hosted caches, and for
            primes.
        progress: Called with the number of ended requests and of all, whenever one has ended.
        **params: As in `EngineClient.complete`.

    Returns:
        One outcome a request, in the order of the batch's input, or of the plans.
    """
    checked_kind("client", client, EngineClient, "an EngineClient")
    given = plans.plans if isinstance(plans, BatchPlan) else plans
    sequence = checked_list("plans", given, "a BatchPlan or a list")
    for plan in sequence:
        checked_kind("a plan", plan, Plan, "a Plan")
    checked_integer("concurrency", concurrency, 1)
    check_function("progress", progress)
    batch = _Dispatch(client, sequence, OrderedQueue(concurrency), progress, params)
    if leader_first is None:
        leading = leaders_needed(sequence)
    else:
        leading = leaders(sequence) if leader_first else [None] * len(sequence)
    outcomes = await batch.send(leading)
    if isinstance(plans, BatchPlan):
        by_position = dict(zip(plans.order, outcomes, strict=True))
        outcomes = [by_position[position] for position in range(len(outcomes))]
    return outcomes


@contextmanager
def progress_bar(description: str = "requests") -> Iterator[Progress]:
    """Show a bar on the terminal as long as the block runs; yield `dispatch`'s `progress`.

    Raises:
        MissingExtraError: rich is not installed.
    """
    shown = well_formed(checked_kind("description", description, str, "a text"))
    try:
        from rich.progress import Progress as Bar
    except ImportError as error:
        raise MissingExtraError("progress_bar", "cli") from error

    with Bar() as bar:
        task = bar.add_task(shown, total=None)
        yield lambda ended, total: bar.update(task, completed=ended, total=total)


@dataclass
class _Dispatch:
    """The requests of one batch; each waits for those before it, and maybe for its leader."""

    client: EngineClient
    plans: Sequence[Plan]
    queue: OrderedQueue[int, None]
    progress: Progress | None
    params: dict[str, Any]

    def __post_init__(self) -> None:
        self._slots = [Slot(self.queue, position) for position in range(len(self.plans))]
        self._outcomes: dict[int, Outcome] = {}
        self._followers: dict[int | None, list[int]] = defaultdict(list)

    async def send(self, leaders: Sequence[int | None]) -> list[Outcome]:
        for position, leader in enumerate(leaders):
            self._followers[leader].append(position)
        self._let_go(None)
        try:
            return await all_of(map(self._send, self._slots))
        finally:
            for slot in self._slots:
                slot.leave()
                if slot.item not in self._outcomes:
                    self.client.forget(self.plans[slot.item])

    def _let_go(self, leader: int | None) -> None:
        """Line up the requests that follow a leader, once; without one, those that lead."""
        for position in self._followers.pop(leader, ()):
            self.queue.line_up([self._slots[position]], first=position)

    async def _send(self, slot: Slot[int, None]) -> Outcome:
        await TaskWaiter(slot).wait()
        position = slot.item
        plan = self.plans[position]
        let_go = partial(self._let_go, position)
        try:
            if plan.primes:
                await self.client.prime(plan, **self.params)
                let_go()
            completion = await self.client.complete(
                plan, on_first_token=let_go, leader_first=False, **self.params
            )
            outcome: Outcome = Answered(plan, completion)
        except EngineError as error:
            outcome = Failed(plan, error)
        self._outcomes[position] = outcome
        let_go()
        if self.progress is not None:
            self.progress(len(self._outcomes), len(self.plans))
        slot.leave()  # not if it fails: that would let another one start
        return outcome
