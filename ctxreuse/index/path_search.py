"""The search of the context index: which sequence that was sent covers most of a new context."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.index.nodes import Node, path_to

_VISITS = 256
_STEPS = 1 << 16
_STEPS_A_BLOCK = 16
_STEPS_A_BATCH = 1 << 20


class Match(NamedTuple):
    """The best cached path for a context.

    Attributes:
        path: Its blocks, from the root on.
        weight: Their weight.
        is_cut_short: Whether the search ended at its bound, so that a better path may exist.
        is_greedy: Whether it went on with the heaviest path from its 256th node on, so that a
            better one may exist.
    """

    path: tuple[BlockKey, ...]
    weight: int
    is_cut_short: bool = False
    is_greedy: bool = False

    def note_limits(self, note_limit: Callable[[str], object]) -> None:
        """Call a function with the name of each bound that was reached."""
        if self.is_cut_short:
            note_limit("cached_paths")
        if self.is_greedy:
            note_limit("greedy_paths")


class SearchBudget:
    """What searches for the requests of one batch and one tenant may compare together.

    Each search has 16 blocks for each block of its context; what it leaves of these, and a million
    more, all may use. So their work is linear in the batch, and ordinary requests take far less.

    Attributes:
        left: Blocks that the next search may compare beyond its own.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _STEPS_A_BATCH


def heaviest_path(
    root: Node, context: Mapping[BlockKey, int], budget: SearchBudget | None = None
) -> Match:
    """Return the path of most weight that uses only blocks of the context.

    Among equal weights the path that more requests share wins, then the one whose blocks the
    retriever ranked higher. The search is exact up to 256 nodes and
    continues greedily from there, so its work does not grow with the tree. It compares at most
    65,536 blocks and 16 for each block of the context (and one path more), however many long paths
    tie, and then returns the best path found by then; searches of one budget share another bound.

    Args:
        root: Where the path starts.
        context: Block -> weight, in the retriever's order.
        budget: What this and other searches may compare together; None is this one alone.
    """
    best: tuple[int, int] = (0, 0)
    best_end: tuple[Node, int] | None = None
    rank: dict[Hashable, int] = {}  # of the blocks, filled where paths tie
    size = len(context)
    visits = 0
    is_greedy = False
    own = _STEPS_A_BLOCK * size
    most = steps = own + (_STEPS if budget is None else min(_STEPS, budget.left))
    stack = [(0, root)]
    while stack and steps >= 0:
        weight, node = stack.pop()
        children = node.children
        if len(children) > size:
            steps -= size
            found = [children[key] for key in context if key in children]
        else:
            steps -= len(children)
            found = [child for edge, child in children.items() if edge in context]
        visits += len(found)
        complete: list[tuple[int, Node]] = []
        branches: tuple[Node | None, Node] | None = None
        for child in found:
            gain, matched = weight, 0
            for key in child.run:
                share = context.get(key)
                if share is None:
                    break
                gain += share
                matched += 1
            steps -= matched
            score = (gain, child.uses)
            better = score > best
            if score == best and best_end is not None:
                rank = rank or {key: position for position, key in enumerate(context)}
                if best_end[0].parent is node:
                    ours, other = child, best_end[0]
                else:  # looked up once for all children, however many tie
                    branches = branches or _branches(node, best_end[0])
                    ours, other = branches[0] or child, branches[1]
                better = rank[ours.edge] < rank[other.edge]
            if better:
                best, best_end = score, (child, matched)
            if child.children and matched == len(child.run):
                complete.append((gain, child))
            if steps < 0:
                break
        if complete:
            complete.sort(key=itemgetter(0))
            if visits > _VISITS:
                is_greedy = is_greedy or len(stack) + len(complete) > 1
                stack = complete[-1:]
            else:
                stack += complete  # the heaviest on top: depth first, greedy first
    is_cut_short = steps < 0
    if budget is not None:
        budget.left = max(0, budget.left + own - (most - steps))
    if best_end is None:
        return Match((), 0, is_cut_short, is_greedy)
    return Match(path_to(*best_end), best[0], is_cut_short, is_greedy)


def _branches(node: Node, best: Node) -> tuple[Node | None, Node]:
    """Return the nodes with which the paths to two nodes part; None for a node above the other."""
    above: dict[Node, Node] = {}
    branch, parent = best, best.parent
    while parent is not None:
        above[parent] = branch
        branch, parent = parent, parent.parent
    ours: Node | None = None
    while node not in above and node.parent is not None:
        ours, node = node, node.parent
    return ours, above.get(node, best)


def sent_prefix(root: Node, path: Sequence[BlockKey]) -> int:
    """Return how many leading blocks of a path were sent before, in this order.

    Args:
        root: Where the path starts.
        path: Blocks in the order in which they would be sent.
    """
    done, node = 0, root
    while done < len(path):
        child = node.children.get(path[done])
        if child is None:
            break
        for key in child.run:
            if done == len(path) or path[done] != key:
                return done
            done += 1
        node = child
    return done
