"""Groups of requests of one batch that share a prefix, so that one engine computes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
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
    order: list[int] = []
    room = most
    while waiting:
        fitting = [size for size in waiting if size <= room < most]
        # the next group begins a batch; where none fits, it fills this one and goes on in the next
        size = max(fitting) if fitting else min(waiting, key=lambda one: waiting[one][0])
        order.append(waiting[size].popleft())
        if not waiting[size]:
            del waiting[size]
        room = (room - size - 1) % most + 1
    return order
