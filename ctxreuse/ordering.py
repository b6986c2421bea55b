"""The order of one new context (online): which blocks go in front, and how the rest follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctxreuse.blocks import BlockKey
from ctxreuse.cooccurrence import Cooccurrence
from ctxreuse.distance import context_distance
from ctxreuse.index import ContextIndex, Node

ENGINE_BLOCK_TOKENS = 16
"""Engines reuse whole blocks of this many tokens; a shorter common prefix saves nothing."""


def reuse_order(
    context: Mapping[BlockKey, int], index: ContextIndex, root: Node, recent: Cooccurrence
) -> list[BlockKey]:
    """Order a context by what is cached, then by what later requests are likely to share.

    The best cached path comes first. The papers append the remaining blocks as retrieved; but their
    order is what later requests can share, so here they follow by co-occurrence. A path shorter
    than one engine block saves nothing and is no reason to move anything.

    Args:
        context: Block -> weight (tokens, at least 1), in the retriever's order.
        index: The tenant's context index.
        root: The root of the request's system text.
        recent: The tenant's recent requests.

    Returns:
        A permutation of the context's keys.
    """
    match = index.search(root, context)
    placed = match.path if match.weight >= ENGINE_BLOCK_TOKENS else ()
    if len(placed) == len(context):
        return list(placed)
    taken = set(placed)
    rest = {key: weight for key, weight in context.items() if key not in taken}
    return [*placed, *recent.continuation(placed, rest)]


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
