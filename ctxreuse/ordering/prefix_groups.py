"""Groups of requests that share a prefix, each within one of the batches that they are sent in.

A client that sends a batch to one of several engines has the prefix of a group computed by each
engine that gets a part of it. So groups are cut from the prefix tree such that each fits into a
batch, and put into an order in which few of them stand across the end of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence


def prefix_groups(sequences: Sequence[Sequence[Hashable]], most: int) -> list[int]:
    """Cut requests that stand in depth-first order of their prefix tree into groups.

    A group is a subtree that fits; where the requests of one node alone are too many, as many of
    them as fit.

    Args:
        sequences: For each request what its prompt begins with, in the order in which they run.
            Requests without any, and those of different first entries, share nothing.
        most: How many requests a group holds at most.

    Returns:
        The number of requests of each group, in order; together all of them.
    """
    sizes: list[int] = []
    stack = [(0, len(sequences), 0)]
    while stack:
        start, end, depth = stack.pop()
        if depth and end - start <= most:
            sizes.append(end - start)
            continue
        parts = []
        while start < end:
            sequence = sequences[start]
            is_end = len(sequence) <= depth
            after = start + 1
            while (
                after < end
                and (len(sequences[after]) <= depth) == is_end
                and (is_end or sequences[after][depth] == sequence[depth])
            ):
                after += 1
            if is_end:
                step = most if depth else 1
                parts += [
                    (at, min(at + step, after), depth + 1) for at in range(start, after, step)
                ]
            else:
                parts.append((start, after, depth + 1))
            start = after
        stack += reversed(parts)
    return sizes


def batch_order(sizes: Sequence[int], most: int) -> list[int]:
    """Return an order of groups in which few of them stand across the end of a batch.

    A group that does not fit into what is left of a batch waits, and the largest that fits goes
    before it. Where none fits, the next one is cut.

    Args:
        sizes: The number of requests of each group, from 1 to `most`.
        most: How many requests are sent in a batch.

    Returns:
        A permutation of `range(len(sizes))`.
    """
    waiting: dict[int, deque[int]] = {}
    for group, size in enumerate(sizes):
        waiting.setdefault(size, deque()).append(group)
    sizes_waiting = sum(1 << size for size in waiting)
    is_taken = [False] * len(sizes)
    order: list[int] = []
    room, first = most, 0
    while len(order) < len(sizes):
        while is_taken[first]:
            first += 1
        size = sizes[first]
        if size > room:
            fitting = (sizes_waiting & ((1 << room + 1) - 1)).bit_length() - 1
            size = fitting if fitting > 0 else size
        group = waiting[size].popleft()
        if not waiting[size]:
            sizes_waiting ^= 1 << size
        is_taken[group] = True
        order.append(group)
        room = room - size if size < room else room - size + most
    return order
