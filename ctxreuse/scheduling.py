"""The execution order of a batch.

Depth-first over the tree of a known batch: requests that share a prefix run back to back, so even a
small cache keeps it. The papers' Algorithm 5 stands beside it for comparison.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


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
