"""The search of the context index: which sent sequence covers most of a new context.

Depth first, the heaviest child first: exact up to 256 nodes, greedy from there on. So the work does
not grow with the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.index.nodes import NodeTree, path_to

_VISITS = 256
_STEPS = 1 << 16
_STEPS_A_BLOCK = 16
_STEPS_A_BATCH = 1 << 20


class Match(NamedTuple):
    """The best cached path for a context."""

    path: tuple[BlockKey, ...]
    weight: int
    is_cut_short: bool = False  # the search ended at its bound
    is_greedy: bool = False  # it was not exact

    def note_limits(self, note_limit: Callable[[str], object]) -> None:
        """Call a function with the name of each bound that was reached."""
        if self.is_cut_short:
            note_limit("cached_paths")
        if self.is_greedy:
            note_limit("greedy_paths")


class SearchBudget:
    """What the searches of one batch and tenant may compare: linear in the batch."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _STEPS_A_BATCH


def heaviest_path(
    tree: NodeTree,
    root: int,
    context: Mapping[BlockKey, int],
    budget: SearchBudget | None = None,
    first: BlockKey | None = None,
) -> Match:
    """Return the path of most weight that uses only blocks of the context.

    Among equal weights the path that more requests share wins, then the one with the better ranks.
    `first` is the block that the path begins with; None is any.
    """
    best_gain = best_uses = 0
    best_end: tuple[int, int] | None = None
    rank: dict[Hashable, int] = {}  # of the blocks, filled where paths tie
    size = len(context)
    visits = 0
    is_greedy = False
    own = _STEPS_A_BLOCK * size
    most = steps = own + (_STEPS if budget is None else min(_STEPS, budget.left))
    runs, uses, opens_turn = tree.runs, tree.uses, tree.opens_turn
    first_children, following = tree.first_children, tree.next_siblings
    edges, wanted = tree.edges, set(map(hash, context))
    stack = [(0, root)]
    while stack and steps >= 0:
        weight, node = stack.pop()
        child = first_children[node]
        if child < 0:
            table = tree.wide[node]
            if len(table) > size:
                steps -= size
                found = [table[key] for key in context if key in table]
            else:
                steps -= len(table)
                found = [child for key, child in table.items() if key in context]
        else:
            found = []
            while child:
                steps -= 1
                if edges[child] in wanted and runs[child][0] in context and not opens_turn[child]:
                    found.append(child)
                child = following[child]
        if first is not None and node == root:
            found = [child for child in found if runs[child][0] == first]
        visits += len(found)
        complete: list[tuple[int, int]] = []
        branches: tuple[int, int] | None = None
        for child in found:
            gain, matched, run = weight, 0, runs[child]
            for key in run:
                share = context.get(key)
                if share is None:
                    break
                gain += share
                matched += 1
            steps -= matched
            if gain >= best_gain:  # seldom; what is read of a node lies in many places of memory
                used = uses[child]
                better = gain > best_gain or used > best_uses
                if not better and used == best_uses and best_end is not None:
                    rank = rank or {key: position for position, key in enumerate(context)}
                    if tree.parents[best_end[0]] == node:
                        ours, other = child, best_end[0]
                    else:  # looked up once for all children, however many tie
                        branches = branches or _branches(tree, node, best_end[0])
                        ours, other = branches[0] or child, branches[1]
                    better = rank[runs[ours][0]] < rank[runs[other][0]]
                if better:
                    best_gain, best_uses, best_end = gain, used, (child, matched)
            if matched == len(run) and first_children[child]:
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
    return Match(path_to(tree, *best_end), best_gain, is_cut_short, is_greedy)


def _branches(tree: NodeTree, node: int, best: int) -> tuple[int, int]:
    """Return the nodes at which the paths to two nodes part; 0 for a node above the other."""
    parents = tree.parents
    above: dict[int, int] = {}
    branch, parent = best, parents[best]
    while parent:
        above[parent] = branch
        branch, parent = parent, parents[parent]
    ours = 0
    while node not in above and parents[node]:
        ours, node = node, parents[node]
    return ours, above.get(node, best)


def sent_prefix(tree: NodeTree, root: int, path: Sequence[BlockKey]) -> int:
    """Return how many leading blocks of a path were sent before, in this order."""
    done, node = 0, root
    while done < len(path):
        child = tree.child(node, path[done])
        if not child:
            break
        for key in tree.runs[child]:
            if done == len(path) or path[done] != key:
                return done
            done += 1
        node = child
    return done
