"""Leader first: requests wait for the one that writes the prefix that they share.

An engine that keeps a prompt's prefix only once it answers would compute it for each of several
requests that are sent together. The first of them leads; the others are sent when it has begun to
answer, or has failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctxreuse.adapters.ordered_release import OrderedQueue, Slot
from ctxreuse.planning.plan import Plan


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
