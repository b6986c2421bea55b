"""Leader first: requests wait for the one that writes the prefix that they share.

An engine that keeps a prompt's prefix only once it answers would compute it for each of several
requests that are sent together. The first of them leads; the others are sent when it has begun to
answer, or has failed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import Event, get_ident
from typing import Any, NamedTuple

from ctxreuse.adapters.ordered_release import OrderedQueue, Slot, TaskWaiter, in_event_loop
from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.planning.plan import Plan

LONGEST_WAIT_S = 3.0
"""A hosted model has mostly begun to answer by then, and who waits longer loses more than a read.

A call that is not streamed does not tell when it has.
"""
_MOST_ROOTS = 1_000
_MOST_LEADERS = 16


class LeaderFirst:
    """Lines up the slots of a batch: those that lead at once, the others when theirs lets them go.

    Args:
        queue: Where they wait.
        slots: The slots, in the order in which to send them.
        leaders: For each the position of its leader, which stands before it; None without one.
    """

    def __init__(
        self,
        queue: OrderedQueue[Any, Any],
        slots: Sequence[Slot[Any, Any]],
        leaders: Sequence[int | None],
    ) -> None:
        self._queue, self._slots = queue, slots
        self._followers: dict[Slot[Any, Any] | None, list[int]] = defaultdict(list)
        for position, leader in enumerate(leaders):
            self._followers[None if leader is None else slots[leader]].append(position)
        self.release(None)

    def release(self, leader: Slot[Any, Any] | None) -> None:
        """Let the requests start that follow a leader, once."""
        for position in self._followers.pop(leader, ()):
            self._queue.line_up([self._slots[position]], first=position)


def leaders(plans: Sequence[Plan | None]) -> list[int | None]:
    """Return for each plan the position of the earlier one with which it shares the longest prefix.

    Of several the earliest leads. A prefix is a system text and leading blocks or, of a later turn,
    what the turn before it has sent. None says that it shares nothing with an earlier one.

    Args:
        plans: In the order in which they are sent; None for a request without a plan.
    """
    roots: dict[Hashable, _PrefixNode] = {}
    last_turn: dict[Hashable, int] = {}
    found: list[int | None] = []
    for position, plan in enumerate(plans):
        if plan is None:
            found.append(None)
            continue
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


@dataclass(slots=True)
class _PrefixNode:
    """A prefix: which plan had it first, and how it goes on."""

    first: int
    children: dict[Hashable, _PrefixNode] = field(default_factory=dict)


def leaders_needed(plans: Sequence[Plan | None]) -> list[int | None]:
    """Return the leaders of requests whose cache lets followers hit after the first token only."""
    if any(plan is not None and plan.cache.follower_hits == "first_token" for plan in plans):
        return leaders(plans)
    return [None] * len(plans)


class PrefixUse(NamedTuple):
    """What a first turn reads and writes in a cache whose followers hit after the first token.

    Attributes:
        root: Whose system text it stands behind.
        keys: Its blocks, in order.
        marks: After how many of them a mark stands; None for a cache without marks.
        writes: How long the prefixes are that it writes, in blocks; ascending.
    """

    root: Hashable
    keys: tuple[BlockKey, ...]
    marks: tuple[int, ...] | None
    writes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, waits: bool | None = None) -> PrefixUse | None:
        """Return what a plan does; None for other caches, later turns, and plans made by hand.

        Args:
            plan: The plan.
            waits: Whether followers wait; None does what the cache needs.
        """
        cache, request, logged = plan.cache, plan.request, plan.logged
        if waits is None:
            waits = cache.follower_hits == "first_token"
        if not waits or request.history or logged is None:
            return None
        ends = [0]
        for tokens in logged.prompt.tokens:
            ends.append(ends[-1] + tokens)
        marks = plan.marks if cache.has_marks else None
        expected = plan.expected_cached_tokens
        places = range(1, len(ends)) if marks is None else marks
        least = 0 if cache.has_marks or request.system else cache.least_tokens
        writes = [n for n in places if n < len(ends) and ends[n] > expected and ends[n] >= least]
        if 0 in places and not expected:
            writes.insert(0, 0)
        root = request.tenant, request.system, plan.is_labelled
        return cls(root, logged.prompt.keys, marks, tuple(writes))

    def reads_from(self, leader: PrefixUse) -> bool:
        """Return whether it can read what another one is about to write."""
        common = 0
        for key, other in zip(self.keys, leader.keys, strict=False):
            if key != other:
                break
            common += 1
        return any(
            length <= common and (self.marks is None or length in self.marks)
            for length in leader.writes
        )


class CallInFlight:
    """A call from when it is about to be sent until it begins to be answered, or fails.

    Args:
        use: What it reads and writes.
        leader: The call that it waits for; None without one.
    """

    def __init__(self, use: PrefixUse, leader: CallInFlight | None = None) -> None:
        self.use = use
        self._leader = leader
        self._until = time.monotonic() + LONGEST_WAIT_S
        self._owner: object = None
        self._followers: OrderedQueue[None, None] = OrderedQueue(places=0)

    @property
    def has_begun(self) -> bool:
        """Whether followers need not wait any more."""
        return self._followers.places > 0 or self._seconds_left <= 0

    @property
    def _seconds_left(self) -> float:
        return self._until - time.monotonic()

    def begin(self) -> None:
        """Let the followers go. May be repeated, by any thread."""
        with self._followers.lock:
            self._followers.places = math.inf
        self._followers.release()

    def wait(self) -> None:
        """Wait in this thread until the leader has begun; not for long, nor in an event loop."""
        leader = None if in_event_loop() else self._waits_for(get_ident())
        if leader is None:
            return
        slot, woken = leader._line_up(), Event()
        try:
            slot.attach(woken.set)
            woken.wait(leader._seconds_left)
        finally:
            slot.leave()

    async def await_(self) -> None:
        """Wait in this task as `wait` does."""
        leader = self._waits_for(asyncio.current_task())
        if leader is None:
            return
        slot = leader._line_up()
        try:
            await TaskWaiter(slot).wait(leader._seconds_left)
        finally:
            slot.leave()

    def _waits_for(self, owner: object) -> CallInFlight | None:
        """Return the leader if it is still to be waited for.

        Not where it cannot go on while this call waits, because it has made this call.

        Args:
            owner: The thread or the task that makes this call.
        """
        self._owner = owner
        leader = self._leader
        if leader is None or leader.has_begun or leader._owner == owner:
            return None
        return leader

    def _line_up(self) -> Slot[None, None]:
        slot = Slot(self._followers, None)
        self._followers.line_up([slot])
        return slot


class CallsInFlight:
    """Finds the leaders of single calls that run at the same time; threads and tasks may share it.

    A call waits for the first one before it that is about to write a prefix which both share, once,
    and never for one that is sent later: so nobody waits in a circle. Nobody waits for what was
    written before. At most 1,000 system texts, and the latest 16 leaders of each, are remembered.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        # by root: the leaders, and whether the system text itself was written
        self._leaders: LRUMap[Hashable, tuple[tuple[CallInFlight, ...], bool]] = LRUMap(_MOST_ROOTS)

    def enter(self, use: PrefixUse) -> CallInFlight:
        """Return a call that is about to be sent.

        Args:
            use: What it reads and writes.
        """
        with self._lock:
            known, is_root_written = self._leaders.get(use.root) or ((), False)
            is_root_written |= any(one.has_begun and 0 in one.use.writes for one in known)
            leaders = tuple(one for one in known if not one.has_begun)[-_MOST_LEADERS:]
            if is_root_written and use.writes[:1] == (0,):
                use = use._replace(writes=use.writes[1:])
            leader = next((one for one in leaders if use.reads_from(one.use)), None)
            call = CallInFlight(use, leader)
            if use.writes and leader is None:
                leaders = (*leaders, call)
            if leaders or is_root_written:
                self._leaders.put(use.root, (leaders, is_root_written))
        return call
