"""The execution order of a batch, of planned contexts or of prompts that are only known as texts.

Depth-first over the prefix tree of the batch: requests that share a prefix run back to back, so
even a small cache keeps it. The papers' Algorithm 5 (ContextPilot section 5.4, RAGBoost) stands
beside it for comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_GRAIN = 64
"""Characters; about one engine block of 16 tokens. Shorter common beginnings save nothing."""


def depth_first_order(sequences: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the positions of the sequences in depth-first order of their prefix tree.

    At each node the sequences that end there come first, then its branches, larger ones first;
    branches of equal size in the order of their earliest sequence. Shared prefixes stand together
    at every depth.

    Args:
        sequences: For each request its blocks in the order in which they will be sent.

    Returns:
        A permutation of `range(len(sequences))`.
    """
    order: list[int] = []
    stack: list[tuple[list[int], int]] = [(list(range(len(sequences))), 0)]
    while stack:
        group, depth = stack.pop()
        if len(group) == 1:
            order += group
            continue
        branches: dict[Hashable, list[int]] = {}
        for position in group:
            sequence = sequences[position]
            if len(sequence) > depth:
                branches.setdefault(sequence[depth], []).append(position)
            else:
                order.append(position)
        ordered = sorted(branches.values(), key=len, reverse=True)  # stable
        stack += [(branch, depth + 1) for branch in reversed(ordered)]
    return order


def paper_schedule(search_paths: Sequence[Sequence[int]]) -> list[int]:
    """Return the execution order of ContextPilot's Algorithm 5.

    Requests are grouped by the first element of their search path, longer paths run first within
    a group, larger groups first. Ties keep the input order.

    Args:
        search_paths: For each request the child positions from the root to its node.

    Returns:
        A permutation of `range(len(search_paths))`.
    """
    groups: dict[int | None, list[int]] = {}
    for position, path in enumerate(search_paths):
        groups.setdefault(path[0] if path else None, []).append(position)
    for group in groups.values():
        group.sort(key=lambda position: len(search_paths[position]), reverse=True)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [position for group in ordered for position in group]


@dataclass(slots=True)
class _Group:
    """Prompts that share `depth` grains."""

    depth: int
    arrival: int
    size: int = 1
    prompt: int | None = None
    members: list[_Group] = field(default_factory=list)

    def add(self, member: _Group) -> None:
        if not self.members:
            self.size, self.arrival = 0, member.arrival
        self.members.append(member)
        self.size += member.size
        self.arrival = min(self.arrival, member.arrival)


def prefix_order(prompts: Sequence[str]) -> list[int]:
    """Return positions such that prompts with a long common beginning stand next to each other.

    Larger groups go first, then what arrived first; a prompt that another one continues goes before
    it. Prompts that share less than 64 characters keep the order in which they arrived.

    Args:
        prompts: Whole prompts as text.

    Returns:
        A permutation of `range(len(prompts))`.
    """
    if len(prompts) < 2:
        return list(range(len(prompts)))
    by_text = sorted(range(len(prompts)), key=lambda position: (prompts[position], position))
    shared = [_shared_grains(prompts[one], prompts[other]) for one, other in pairwise(by_text)]
    return _depth_first(_tree(prompts, by_text, [*shared, 0]))


def _shared_grains(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other)) // _GRAIN
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * _GRAIN, middle * _GRAIN
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low


def _tree(prompts: Sequence[str], by_text: Sequence[int], shared: Sequence[int]) -> _Group:
    """Build the tree of common beginnings from the sorted prompts and what neighbours share."""
    open_groups = [_Group(0, 0)]
    for position, depth in zip(by_text, shared, strict=True):
        done = _Group(len(prompts[position]) // _GRAIN, position, prompt=position)
        # close every group that the next prompt does not belong to
        while open_groups[-1].depth > depth:
            group = open_groups.pop()
            group.add(done)
            done = group
        if open_groups[-1].depth == depth:
            open_groups[-1].add(done)
        else:
            group = _Group(depth, position)
            group.add(done)
            open_groups.append(group)
    return open_groups[0]


def _depth_first(root: _Group) -> list[int]:
    order: list[int] = []
    stack = [root]
    while stack:
        group = stack.pop()
        if group.prompt is not None:
            order.append(group.prompt)
            continue

        def turn(member: _Group, depth: int = group.depth) -> tuple[bool, int, int]:
            continued = member.prompt is not None and 0 < member.depth <= depth
            return (not continued, -member.size, member.arrival)

        stack.extend(sorted(group.members, key=turn, reverse=True))
    return order
