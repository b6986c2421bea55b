"""Groups of requests of one batch that share a prefix, so that one engine computes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby


def prefix_groups(sequences: Sequence[Sequence[Hashable]], most: int) -> list[int]:
    """Return the sizes of groups, subtrees that fit, of sequences in depth-first order."""
    sizes: list[int] = []
    stack = [(0, len(sequences), 0)]
    while stack:
        start, end, depth = stack.pop()
        if depth and end - start <= most:
            sizes.append(end - start)
            continue
        parts = []
        for key, run in groupby(one[depth : depth + 1] for one in sequences[start:end]):
            after = start + len(list(run))
            step = after - start
            if not key:  # they end here
                step = most if depth else 1
            parts += [(at, min(at + step, after), depth + 1) for at in range(start, after, step)]
            start = after
        stack += reversed(parts)
    return sizes


def batch_order(sizes: Sequence[int], most: int) -> list[int]:
    """Return an order of groups in which few of them stand across the end of a batch."""
    waiting: dict[int, deque[int]] = {}
    for group, size in enumerate(sizes):
        waiting.setdefault(size, deque()).append(group)

    def take(size: int) -> int:
        group = waiting[size].popleft()
        if not waiting[size]:
            del waiting[size]
        return group

    order: list[int] = []
    room = most
    while waiting:
        # it begins a batch, or fills the one before and goes on in the next
        first = min(groups[0] for groups in waiting.values())
        order.append(take(sizes[first]))
        room = (room - sizes[first] - 1) % most + 1
        if room < most:
            counts = {size: len(groups) for size, groups in waiting.items()}
            chosen = sorted(take(size) for size in _filling(counts, room))
            order += chosen
            room = room - sum(sizes[group] for group in chosen) or most
    return order


def _filling(counts: Mapping[int, int], room: int) -> list[int]:
    """Return sizes that fill a room best, few of them small, of the groups that there are."""
    sizes = sorted((size for size in counts if size <= room), reverse=True)
    sums = [1]  # for each number of sizes the sums that the largest make, as bits
    for size in sizes:
        reached = sums[-1]
        for _ in range(min(counts[size], room // size)):
            reached |= reached << size
        sums.append(reached & ((2 << room) - 1))
    left = sums[-1].bit_length() - 1
    chosen = []
    for number in range(len(sizes) - 1, -1, -1):
        while not sums[number] >> left & 1:
            chosen.append(sizes[number])
            left -= sizes[number]
    return chosen
