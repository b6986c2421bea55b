"""The papers' tree for a known batch: Algorithm 4 as printed, for `strategy="paper"`.

Equation 1 distances, average linkage, node content = intersection, top-down prefix alignment
(ContextPilot appendix D). It exists to reproduce the papers and to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctxreuse.errors import BatchTooLargeError
from ctxreuse.ordering.paper.context_distance import pairwise_distances

MAX_CONTEXTS = 20_000
"""Average linkage holds all pairs: 20,000 distinct contexts take 1.6 GB."""


@dataclass(frozen=True, slots=True)
class AlignedContexts:
    """The reordered contexts of a batch, and where each stands in the tree.

    Attributes:
        orders: For each context a permutation of it.
        search_paths: For each context the child positions from the root to its leaf.
    """

    orders: list[list[int]]
    search_paths: list[list[int]]


def paper_orders(contexts: Sequence[Sequence[int]], alpha: float) -> AlignedContexts:
    """Order the contexts of a batch as ContextPilot's Algorithm 4 does.

    Contexts of the same blocks share a leaf (line 7), whatever their order. The blocks within a
    node stand in the order of its first context; the paper sorts them, which is the same to a
    prefix cache.

    Args:
        contexts: For each context its blocks as numbers, best first, without repeats.
        alpha: Weight of the ranks in Equation 1.

    Raises:
        BatchTooLargeError: there are more distinct contexts than a matrix of pairs can hold.
    """
    leaf_of: dict[frozenset[int], int] = {}
    leaves: list[Sequence[int]] = []
    positions: list[int] = []
    for context in contexts:
        leaf = leaf_of.setdefault(frozenset(context), len(leaves))
        if leaf == len(leaves):
            leaves.append(context)
        positions.append(leaf)
    if len(leaves) > MAX_CONTEXTS:
        raise BatchTooLargeError(
            f"strategy 'paper' compares all pairs and takes at most {MAX_CONTEXTS} distinct "
            f"contexts, not {len(leaves)}; split the batch or use strategy 'reuse'"
        )
    content, children = _linkage_tree(leaves, alpha)
    orders, paths = _aligned(leaves, content, children)
    return AlignedContexts(
        [list(orders[leaf]) for leaf in positions], [list(paths[leaf]) for leaf in positions]
    )


def _linkage_tree(
    leaves: list[Sequence[int]], alpha: float
) -> tuple[list[frozenset[int]], list[list[int]]]:
    """Return each node's content and children; leaves first, the root last (its content empty)."""
    content = [frozenset(leaf) for leaf in leaves]
    children: list[list[int]] = [[] for _ in leaves]
    tops = dict.fromkeys(range(len(leaves)))
    if len(leaves) > 1:
        # imported here: scipy.cluster takes half a second that nothing else needs
        from scipy.cluster.hierarchy import linkage

        for one, two, _, _ in linkage(pairwise_distances(leaves, alpha), method="average"):
            pair = [int(one), int(two)]
            tops[len(content)] = None
            content.append(content[pair[0]] & content[pair[1]])
            children.append(pair)
            for child in pair:
                del tops[child]
    content.append(frozenset())
    children.append(list(tops))
    return content, children


def _aligned(
    leaves: list[Sequence[int]], content: list[frozenset[int]], children: list[list[int]]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Align every node with its parent from the top down (lines 16 to 23)."""
    first_leaf = list(range(len(leaves))) + [0] * (len(content) - len(leaves))
    for node in range(len(leaves), len(content) - 1):
        first_leaf[node] = min(first_leaf[child] for child in children[node])
    root = len(content) - 1
    orders: dict[int, list[int]] = {}
    paths: dict[int, list[int]] = {}
    stack: list[tuple[int, list[int], list[int]]] = [(root, [], [])]
    while stack:
        node, order, path = stack.pop()
        for position, child in enumerate(
            _without_empty(children[node], content, len(leaves), children)
        ):
            placed = set(order)
            aligned = order + [
                block
                for block in leaves[first_leaf[child]]
                if block in content[child] and block not in placed
            ]
            if child < len(leaves):
                orders[child], paths[child] = aligned, [*path, position]
            else:
                stack.append((child, aligned, [*path, position]))
    return orders, paths


def _without_empty(
    nodes: list[int], content: list[frozenset[int]], leaves: int, children: list[list[int]]
) -> list[int]:
    """Return the nodes, internal ones without content replaced by what is below them (line 16)."""
    kept: list[int] = []
    stack = nodes[::-1]
    while stack:
        node = stack.pop()
        if node >= leaves and not content[node]:
            stack += children[node][::-1]
        else:
            kept.append(node)
    return kept
