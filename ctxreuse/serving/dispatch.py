"""Sending a batch in the scheduled order, with the answers in the caller's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ctxreuse.adapters.ordered_release import OrderedQueue, Slot
from ctxreuse.context.checks import check_function, checked_integer, checked_kind
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import EngineError, InvalidRequestError, MissingExtraError, describe
from ctxreuse.planning.plan import BatchPlan, Plan
from ctxreuse.serving.aio.concurrency import all_in_order
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
    leader_first: bool | None = None,
    progress: Progress | None = None,
    **params: Any,
) -> list[Outcome]:
    """Send plans to an engine and wait for all answers.

    The requests start in the order of the plans, at most `concurrency` of them at a time; a failed
    one does not stop the others. A cancelled dispatch cancels them all, and the planner is told
    which were not answered.

    An engine finds a prompt's beginning in its cache once the blocks are registered. vLLM registers
    them when it schedules the request that computes them, so that followers in the same step hit.
    For engines that register them later, `leader_first` holds a request back until the first token
    has come of its leader: the earlier request with which it shares most leading blocks, the first
    one of its system text, or the turn before it. Requests with other leaders overtake it.

    Args:
        client: Where to send them.
        plans: A batch plan, or plans in the order in which to send them.
        concurrency: How many requests run at a time.
        leader_first: Whether followers wait for their leader's first token; None does what the
            plans' cache needs: hosted caches do, vLLM's does not.
        progress: Called whenever a request has ended.
        **params: As in `EngineClient.complete`.

    Returns:
        One outcome a request, in the order of the batch's input, or of the plans.

    Raises:
        InvalidRequestError: wrong type or out of range.
    """
    sequence = plans.plans if isinstance(plans, BatchPlan) else plans
    checked_kind("client", client, EngineClient, "an EngineClient")
    if isinstance(sequence, (str, bytes)) or not isinstance(sequence, Sequence):
        raise InvalidRequestError(f"plans must be a BatchPlan or a list, not {describe(plans)}")
    for plan in sequence:
        checked_kind("a plan", plan, Plan, "a Plan")
    checked_integer("concurrency", concurrency, 1)
    check_function("progress", progress)
    if leader_first is None:
        leader_first = any(plan.cache.follower_hits == "first_token" for plan in sequence)
    batch = _Batch(client, sequence, OrderedQueue(concurrency), progress, params)
    outcomes = await batch.send(leaders(sequence) if leader_first else [None] * len(sequence))
    if isinstance(plans, BatchPlan):
        by_position = dict(zip(plans.order, outcomes, strict=True))
        outcomes = [by_position[position] for position in range(len(outcomes))]
    return outcomes


def leaders(plans: Sequence[Plan]) -> list[int | None]:
    """Return for each plan the position of the earlier one with which it shares the longest prefix.

    Of several the earliest leads. A prefix is a system text and leading blocks or, of a later turn,
    what the turn before it has sent. None says that it shares nothing with an earlier one.

    Args:
        plans: In the order in which they are sent.
    """
    roots: dict[Hashable, _PrefixNode] = {}
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
            root = roots.setdefault((request.tenant, request.system), _PrefixNode(position))
            leader = root.first if request.system else None
            node = root
            for block in plan.blocks:
                below = node.children.setdefault(block.key, _PrefixNode(position))
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
        InvalidRequestError: wrong type.
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


@dataclass(slots=True)
class _PrefixNode:
    """A prefix: which plan had it first, and how it goes on."""

    first: int
    children: dict[Hashable, _PrefixNode] = field(default_factory=dict)


@dataclass
class _Batch:
    """The requests of one batch; each waits for those before it, and maybe for its leader."""

    client: EngineClient
    plans: Sequence[Plan]
    queue: OrderedQueue[int, None]
    progress: Progress | None
    params: dict[str, Any]

    def __post_init__(self) -> None:
        self._slots = [Slot(self.queue, position) for position in range(len(self.plans))]
        self._followers: dict[int | None, list[int]] = defaultdict(list)
        self._outcomes: dict[int, Outcome] = {}

    async def send(self, leaders: Sequence[int | None]) -> list[Outcome]:
        """Send all requests; if that is cancelled or fails, cancel those that run."""
        for position, leader in enumerate(leaders):
            self._followers[leader].append(position)
        self._release_followers(None)
        try:
            return await all_in_order(self._slots, self._send)
        finally:
            for position, plan in enumerate(self.plans):
                if position not in self._outcomes:
                    self.client.forget(plan)

    async def _send(self, slot: Slot[int, None]) -> Outcome:
        position = slot.item
        plan = self.plans[position]
        let_go = partial(self._release_followers, position)
        try:
            completion = await self.client.complete(plan, on_first_token=let_go, **self.params)
            outcome = Outcome(plan, completion)
        except EngineError as error:
            outcome = Outcome(plan, error=error)
        self._outcomes[position] = outcome
        let_go()
        if self.progress is not None:
            self.progress(len(self._outcomes), len(self.plans))
        return outcome

    def _release_followers(self, leader: int | None) -> None:
        """Let the requests start that follow a leader, once."""
        for position in self._followers.pop(leader, ()):
            self.queue.line_up([self._slots[position]], first=position)
