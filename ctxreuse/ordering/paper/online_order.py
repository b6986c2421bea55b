"""The papers' order of one arriving context: ContextPilot's Algorithms 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctxreuse.context.blocks import BlockKey
from ctxreuse.index.radix_tree import Node
from ctxreuse.ordering.paper.context_distance import context_distance


def paper_order(context: Mapping[BlockKey, int], root: Node, alpha: float) -> list[BlockKey]:
    """Order a context as ContextPilot does: Algorithm 1 finds a node, Algorithm 2 uses its prefix.

    Where the paper leaves a choice, this takes what saves more:

    - A node's blocks that the context lacks cannot be put in front (Algorithm 2 on a leaf match
      would inject them), so only children whose first block is in the context are candidates, and
      a node counts only as far as its run consists of blocks of the context.
    - Algorithm 1 returns a leaf where the text stops above it; stopping inside its run covers both.
    - Children at equal distance: the one that more requests share, then the older one. (The
      paper's C6 ties C3 and C4, which two requests share.)

    Args:
        context: Block -> weight, in the retriever's order.
        root: The root of the request's system text.
        alpha: Weight of the ranks in the distance.

    Returns:
        A permutation of the context's keys.
    """
    retrieved = list(context)
    prefix: list[BlockKey] = []
    node = root
    while True:
        closest: tuple[float, int] | None = None
        chosen: Node | None = None
        for child in node.children.values():
            if not child.run or child.edge not in context:
                continue
            distance = context_distance(retrieved, prefix + list(child.run), alpha)
            if closest is None or (distance, -child.uses) < closest:
                closest, chosen = (distance, -child.uses), child
        if chosen is None:
            break
        matched = _leading(chosen.run, context)
        prefix += matched
        if len(matched) < len(chosen.run):
            break
        node = chosen
    taken = set(prefix)
    return prefix + [key for key in retrieved if key not in taken]


def _leading(run: Sequence[BlockKey], context: Mapping[BlockKey, int]) -> list[BlockKey]:
    leading: list[BlockKey] = []
    for key in run:
        if key not in context:
            break
        leading.append(key)
    return leading
