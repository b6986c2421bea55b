"""ContextPilot's Equation 1 and Algorithms 1, 2, 4 and 5, as printed: `strategy="paper"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.fork_safety import importing_late
from ctxreuse.errors import BatchTooLargeError
from ctxreuse.memory.prefix_index import Node
from ctxreuse.policy.view import Arrangement, Policy, View

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_CONTEXTS = 20_000
"""Average linkage holds all pairs: 20,000 distinct contexts take 1.6 GB."""

_STEPS = 1 << 18
_STEPS_A_BLOCK = 16


def pairwise_distances(
    contexts: Sequence[Sequence[int]], alpha: float = 0.001
) -> npt.NDArray[np.float64]:
    """Return Equation 1 for all pairs, as scipy's `linkage` takes it: n * (n - 1) / 2 in row order.

    Only pairs that share a block are looked at, row by row; all others are at 1.
    """
    with importing_late:
        import numpy as np  # only known batches under the papers' strategy need it

    n = len(contexts)
    sizes = np.array([len(context) for context in contexts], dtype=np.int64)
    holders: dict[int, list[tuple[int, int]]] = {}  # of each block, with its rank there
    for row, context in enumerate(contexts):
        for rank, block in enumerate(context):
            holders.setdefault(block, []).append((row, rank))
    later = {block: np.array(pairs).T for block, pairs in holders.items()}
    distances, begin = np.ones(n * (n - 1) // 2), 0
    for row, context in enumerate(contexts):
        for block in context:
            later[block] = later[block][:, 1:]
        begin += n - row - 1
        if not context:
            continue
        rows, ranks = np.concatenate([later[block] for block in context], axis=1)
        own = np.repeat(np.arange(len(context)), [later[block].shape[1] for block in context])
        shared, moved = np.bincount(rows), np.bincount(rows, weights=np.abs(ranks - own))
        near = np.flatnonzero(shared)
        s, m = shared[near], moved[near]
        apart = 1 - s / np.maximum(sizes[row], sizes[near]) + alpha * m / s
        distances[begin - n + near] = apart
    return distances


class Paper(Policy):
    """ContextPilot's order and schedule."""

    name = "paper"

    def __init__(self, alpha: float = 0.001) -> None:
        self._alpha = alpha  # weighs ranks in the distance (Equation 1)

    def order(self, view: View) -> Sequence[BlockKey]:
        """Return the order of Algorithms 1 and 2."""
        order, is_cut_short = view.ask_index(
            lambda root: paper_order(view.weights, root, self._alpha)
        )
        if is_cut_short:
            view.note_limit("paper_orders")
        return order

    def arrange(self, views: Sequence[View]) -> Arrangement:
        """Return the orders of Algorithm 4 and the schedule of Algorithm 5."""
        numbers: dict[BlockKey, int] = {}
        contexts = [
            [numbers.setdefault(key, len(numbers)) for key in view.weights] for view in views
        ]
        keys = list(numbers)
        aligned, paths = paper_orders(contexts, self._alpha)
        orders = [[keys[number] for number in order] for order in aligned]
        return Arrangement(orders, paper_schedule(paths))


def paper_order(
    context: Mapping[BlockKey, int], root: Node | None, alpha: float
) -> tuple[list[BlockKey], bool]:
    """Order a context as ContextPilot does: Algorithm 1 finds a node, Algorithm 2 uses its prefix.

    Blocks that the context lacks are not put in front. Of children at equal distance the one that
    more requests share wins, then the older. Return, too, whether the work ended at its bound.
    """
    rank = {block: number for number, block in enumerate(context)}
    prefix: list[BlockKey] = []
    moved = 0  # the sum of the rank differences of the prefix, all of whose blocks are shared
    node = root
    steps = _STEPS + _STEPS_A_BLOCK * len(rank)
    while node is not None:
        steps -= len(node.children)
        if steps < 0:
            break
        candidates = [child for key, child in node.children.items() if key in context]
        steps -= sum([len(child.run) for child in candidates])
        if not candidates or steps < 0:
            break
        node = min(
            candidates,
            key=lambda child: (
                _distance_below(rank, len(prefix), moved, child.run, alpha),
                -child.uses,
            ),
        )
        matched = list(takewhile(context.__contains__, node.run))
        moved += sum(abs(rank[block] - place) for place, block in enumerate(matched, len(prefix)))
        prefix += matched
        if len(matched) < len(node.run):
            break
    return list(dict.fromkeys([*prefix, *context])), steps < 0


def _distance_below(
    rank: Mapping[BlockKey, int], above: int, moved: int, run: Sequence[BlockKey], alpha: float
) -> float:
    shared = above
    for place, block in enumerate(run, above):
        other = rank.get(block)
        if other is not None:
            shared += 1
            moved += abs(other - place)
    return 1 - shared / max(len(rank), above + len(run)) + alpha * moved / shared


def paper_orders(
    contexts: Sequence[Sequence[int]], alpha: float
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the orders of ContextPilot's Algorithm 4, and each context's path from the root."""
    leaf_of: dict[frozenset[int], int] = {}  # contexts of the same blocks share one (line 7)
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
    orders, paths = _aligned(leaves, alpha)
    return [list(orders[leaf]) for leaf in positions], [paths[leaf] for leaf in positions]


def _linkage_tree(
    leaves: list[Sequence[int]], alpha: float
) -> tuple[list[frozenset[int]], dict[int, list[int]], list[int]]:
    """Return content, children and first leaf of nodes by number: leaves first, the root last."""
    content, first_leaf = [frozenset(leaf) for leaf in leaves], list(range(len(leaves)))
    children: dict[int, list[int]] = {}  # what is below those without content in their place

    def standing(node: int) -> list[int]:
        return [node] if node < len(leaves) or content[node] else children.pop(node)

    if len(leaves) > 1:
        # imported here: scipy.cluster takes half a second that nothing else needs
        with importing_late:
            from scipy.cluster.hierarchy import linkage

        for pair in linkage(pairwise_distances(leaves, alpha), method="average")[:, :2]:
            one, two = map(int, pair)
            children[len(content)] = [*standing(one), *standing(two)]
            content.append(content[one] & content[two])
            first_leaf.append(min(first_leaf[one], first_leaf[two]))
    children[len(content)] = standing(len(content) - 1) if leaves else []
    content.append(frozenset())
    return content, children, first_leaf


def _aligned(
    leaves: list[Sequence[int]], alpha: float
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Align every node with its parent from the top down (lines 16 to 23)."""
    content, children, first_leaf = _linkage_tree(leaves, alpha)
    ranks: dict[int, dict[int, int]] = {}  # of each leaf that gives nodes their order
    orders: dict[int, list[int]] = {}
    paths: dict[int, list[int]] = {}
    stack: list[tuple[int, list[int], list[int]]] = [(len(content) - 1, [], [])]
    while stack:
        node, order, path = stack.pop()
        for position, child in enumerate(children[node]):
            leaf = first_leaf[child]
            if leaf not in ranks:
                ranks[leaf] = {block: rank for rank, block in enumerate(leaves[leaf])}
            # in the order of the first context; the paper sorts, which is the same to a cache
            # the content, not the leaf, is walked: a long leaf may give many nodes their order
            own = content[child].difference(order)
            aligned = order + sorted(own, key=ranks[leaf].__getitem__)
            if child < len(leaves):
                orders[child], paths[child] = aligned, [*path, position]
            else:
                stack.append((child, aligned, [*path, position]))
    return orders, paths


def paper_schedule(search_paths: Sequence[Sequence[int]]) -> list[int]:
    """Return the execution order of ContextPilot's Algorithm 5; ties keep the input order."""
    groups: dict[int | None, list[int]] = {}
    for position, path in enumerate(search_paths):
        groups.setdefault(path[0] if path else None, []).append(position)
    for group in groups.values():
        group.sort(key=lambda position: len(search_paths[position]), reverse=True)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [position for group in ordered for position in group]
