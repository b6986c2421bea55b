"""Leader first: requests wait until the one that writes their shared prefix answers, or fails."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from threading import Event, get_ident
from typing import Any, NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.memory.prefix_index import common_blocks
from ctxreuse.pipeline.ordered_release import OrderedQueue, Slot, TaskWaiter, in_event_loop
from ctxreuse.planning.plan import Plan
from ctxreuse.rules.answers import kept_lengths

LONGEST_WAIT_S = 3.0
"""A hosted model has mostly begun to answer by then; a longer wait costs more than a read."""
_LONGEST_PRIME_S = 30.0
_MOST_ROOTS = 1_000
_MOST_LEADERS = 16
_MOST_WRITTEN = 20_000


def leaders(plans: Sequence[Plan]) -> list[int | None]:
    """Return for each plan the earliest one before it whose prefix it shares longest, or None."""
    roots: dict[Hashable, Any] = {}  # of prefixes: which plan had it first, and how it goes on
    last_turn: dict[Hashable, int] = {}
    found: list[int | None] = []
    for position, plan in enumerate(plans):
        request = plan.request
        conversation: Hashable = None
        if request.conversation_id is not None:
            conversation = request.tenant, type(request.conversation_id), request.conversation_id
        leader = last_turn.get(conversation)
        if not request.history:
            root = request.tenant, request.system
            first, below = roots.setdefault(root, (position, {}))
            leader = first if request.system else None
            for block in plan.blocks:
                first, below = below.setdefault(block.key, (position, {}))
                leader = first if first < position else leader
            leader = None if leader == position else leader
        if conversation is not None:
            last_turn[conversation] = position
        found.append(leader)
    return found


class PrefixUse(NamedTuple):
    """What a first turn reads and writes in a cache whose followers hit after the first token."""

    root: Hashable  # whose system text it stands behind
    keys: tuple[BlockKey, ...]
    lengths: tuple[int, ...]  # that it reads, in blocks, ascending; 0 is the system text
    primes: tuple[int, ...] | None = None  # what it writes, where that is not all of these

    @classmethod
    def of(cls, plan: Plan, waits: bool | None = None, *, primed: bool = False) -> PrefixUse | None:
        """Return what a plan does; None for other caches, later turns, and plans made by hand."""
        cache, request, logged = plan.cache, plan.request, plan.logged
        if waits is None:
            waits = primed or cache.follower_hits == "first_token"
        if not waits or request.history or logged is None:
            return None
        prompt, keys = logged.prompt, logged.prompt.keys
        root = prompt.tenant, prompt.system, plan.is_labelled
        if primed:
            return cls(root, keys, tuple(range(1, len(keys) + 1)), plan.primes)
        least = 0 if request.system else cache.least_tokens
        return cls(root, keys, kept_lengths(cache, plan.marks, logged.prompt.tokens, least))

    def names(self) -> dict[int, int]:
        """Return what stands for each prefix that it writes in this process, by its length."""
        named, name = {0: hash(self.root)}, hash(self.root)
        for number, key in enumerate(self.keys, start=1):
            name = hash((name, key))
            named[number] = name
        written = self.lengths if self.primes is None else self.primes
        return {length: named[length] for length in written if length in named}

    def reads(self, leader: PrefixUse, written: Collection[int]) -> bool:
        """Return whether it reads a prefix that another one writes."""
        common = common_blocks(self.keys, leader.keys)
        return any(length <= common and length in self.lengths for length in written)


def leaders_needed(plans: Sequence[Plan]) -> list[int | None]:
    """Return the leaders of requests that hit only once a first token or a prime has come."""
    needed = [one.cache.follower_hits == "first_token" or bool(one.primes) for one in plans]
    if not any(needed):
        return [None] * len(plans)
    found = leaders(plans)
    for position, leader in enumerate(found):  # that of a leader which nobody waits for is known
        if leader is not None and not needed[leader]:
            found[position] = found[leader]
    return found


class CallInFlight:
    """A call from when it is about to be sent until it begins to be answered, or fails."""

    def __init__(
        self,
        use: PrefixUse,
        writes: Collection[int],
        leader: CallInFlight | None,
        began: Callable[[PrefixUse], object],
    ) -> None:
        self.use = use
        self.writes = writes
        self._leader = leader
        self._began = began
        longest = LONGEST_WAIT_S if use.primes is None else _LONGEST_PRIME_S
        self._until = time.monotonic() + longest
        self._owner: object = None
        self._followers: OrderedQueue[None, None] = OrderedQueue(places=0)

    @property
    def is_over(self) -> bool:
        """Whether followers need not wait any more."""
        return self._followers.places > 0 or self._seconds_left <= 0

    @property
    def _seconds_left(self) -> float:
        return min(_LONGEST_PRIME_S, self._until - time.monotonic())

    def begin(self) -> None:
        """Let the followers go, for it begins to be answered. May be repeated, by any thread."""
        if not self._followers.places:
            self._began(self.use)
            self.give_up()

    def give_up(self) -> None:
        """Let the followers go, for it will not be answered, if it has not begun."""
        with self._followers.lock:
            self._followers.places = math.inf
        self._followers.release()

    async def wait(self, *, blocks: bool = False) -> None:
        """Wait until the leader has begun; not for long, nor does it block event loops."""
        owner = get_ident() if blocks else asyncio.current_task()
        leader = None if blocks and in_event_loop() else self._waits_for(owner)
        if leader is None:
            return
        slot = Slot(leader._followers, None)
        leader._followers.line_up([slot])
        try:
            if blocks:
                slot.attach((woken := Event()).set)
                woken.wait(leader._seconds_left)
            else:
                await TaskWaiter(slot).wait(leader._seconds_left)
        finally:
            slot.leave()

    def _waits_for(self, owner: object) -> CallInFlight | None:
        """Return the leader if it is still to be waited for, and has not made this very call."""
        self._owner = owner
        leader = self._leader
        if leader is None or leader.is_over or leader._owner == owner:
            return None
        return leader


def calls_of_batch(plans: Sequence[Plan]) -> list[CallInFlight]:
    """Return the calls of a batch that is planned for primes, in the order of its plans."""
    calls: list[CallInFlight] = []
    for plan, at in zip(plans, leaders_needed(plans), strict=True):
        use = PrefixUse((), (), (), plan.primes)
        leader = None if at is None else calls[at]
        calls.append(CallInFlight(use, plan.primes, leader, lambda _: None))
        calls[-1]._until = math.inf  # it may begin much later, but before its followers
    return calls


class CallsInFlight:
    """Finds leaders of calls that run at once; who waits leads nobody: no circles. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._leaders: LRUMap[Hashable, tuple[CallInFlight, ...]] = LRUMap(_MOST_ROOTS)
        self._written: LRUMap[int, bool] = LRUMap(_MOST_WRITTEN)

    def enter(self, use: PrefixUse) -> CallInFlight:
        """Return a call that is about to be sent."""
        names = use.names()
        with self._lock:
            writes = [length for length, name in names.items() if name not in self._written]
            known = self._leaders.get(use.root) or ()
            leaders = tuple(one for one in known if not one.is_over)[-_MOST_LEADERS:]
            leader = next((one for one in leaders if use.reads(one.use, one.writes)), None)
            call = CallInFlight(use, writes, leader, self._note_written)
            if writes and leader is None:
                leaders = (*leaders, call)
            if leaders or known:
                self._leaders.put(use.root, leaders)
        return call

    def _note_written(self, use: PrefixUse) -> None:
        names = use.names()
        with self._lock:
            for name in names.values():
                self._written.put(name, True)
