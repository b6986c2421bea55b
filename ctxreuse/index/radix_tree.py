"""The context index: the tree of block sequences that were sent, so probably stand in the cache.

A path from a root is a sent sequence; there is a root for each system text. Nodes hold *runs* of
blocks (a radix tree), and children are found by their first block; the papers' descent
(ContextPilot Algorithm 1) is `ordering.paper.paper_order`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.lru_map import PartSize
from ctxreuse.index.leaf_queue import LeafQueue
from ctxreuse.index.nodes import NodeTree
from ctxreuse.index.removal import Removal
from ctxreuse.index.request_ends import RequestEnds, RequestId

_REQUESTS_A_NODE = 4
_STEPS = 128
_LEAVES = 32
_STEPS_UP = 4_096
_SMALL = 50
"""Nodes that are freed at once: hundreds of tenants may be forgotten in one call."""

_NO_REQUESTS = RequestEnds(NodeTree())
"""Of any index whose requests have no ids."""


class Inserted(NamedTuple):
    """The name of the node where a sequence ended, and how many blocks were there before."""

    end: int
    blocks_before: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction did.

    Attributes:
        requests: How many of the given request ids were known.
        tokens: Block tokens that left the index.
        unknown: The given request ids that the index does not hold.
    """

    requests: int = 0
    tokens: int = 0
    unknown: tuple[RequestId, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Size of an index or, of a planner, of all its indexes together."""

    nodes: int = 0  # without roots
    tokens: int = 0  # of blocks
    requests: int = 0  # ids that are remembered
    # of a planner: all that grows with traffic, named as in `planning.tenants.Bounds`
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)
    # of a planner: searches that ended at their bound, so that a plan may reuse less
    limits_reached: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def cut_short(self) -> int:
        """How often any search since the start ended at the bound on its work."""
        return sum(self.limits_reached.values())


def root_of(system: bytes | None, is_labelled: bool) -> bytes | None:
    """Return the name of a root; prompts with labels share no block with those without."""
    if not is_labelled:
        return system
    return b"labelled" if system is None else system + b" labelled"


class ContextIndex:
    """The tree of sent block sequences of one tenant.

    No two children of a node begin with the same block, later turns apart. `capacity_tokens` and
    `max_nodes` bound it, by evicting the least recently used leaves, last blocks first, as engines
    do. Each call takes a bounded number of steps beside those for its arguments; `tidy` does the
    rest. A weight is a block's tokens, at least 1.
    """

    def __init__(self, capacity_tokens: int | None = None, max_nodes: int = 500_000) -> None:
        self.max_nodes = max_nodes
        self._most_tokens = math.inf if capacity_tokens is None else capacity_tokens
        self._removal: Removal | None = None
        self._dropped: tuple[Iterator[None], ...] = ()
        self._start_with(NodeTree())

    def _start_with(self, tree: NodeTree) -> None:
        self.tree = tree
        self._births_before = tree.births
        self._roots: dict[Hashable, int] = {}
        self._systems: dict[int, Hashable] = {}  # of the roots
        self._requests = _NO_REQUESTS
        self._leaves = LeafQueue(tree)

    def statistics(self) -> IndexStatistics:
        """Return the size of the index."""
        return IndexStatistics(self.node_count, self.tokens, self.request_count)

    @property
    def node_count(self) -> int:
        """How many nodes it has, roots left out."""
        return self.tree.node_count

    @property
    def has_been_used(self) -> bool:
        """Whether anything was ever inserted."""
        return self.tree.births != 0

    @property
    def block_count(self) -> int:
        """How many blocks the runs of its nodes hold together."""
        return self.tree.block_count

    @property
    def tokens(self) -> int:
        """The weight of these blocks."""
        return self.tree.tokens

    @property
    def request_count(self) -> int:
        """How many request ids are remembered."""
        return self._requests.number

    def root(self, system: Hashable) -> int:
        """Return the root in `tree` for a system text; 0 if nothing was sent with it."""
        return self._roots.get(system, 0)

    def __contains__(self, request_id: RequestId) -> bool:
        """Return whether a request of this id is remembered."""
        return request_id in self._requests

    def holds(self, end: int) -> bool:
        """Return whether a node, named as in `Inserted`, is still part of the tree."""
        node = self.tree.named(end)
        if not node or self._removal is None:
            return node != 0
        for _ in range(_STEPS_UP):
            if self._removal.has_cut_off(node, self.tree):
                return False
            node = self.tree.parents[node]
            if not node:
                return True
        return False  # below more nodes than that, it counts as taken out

    def insert(
        self,
        system: Hashable,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        request_id: RequestId | None,
        now: int,
    ) -> Inserted:
        """Record that a block sequence was sent."""
        tree, path = self.tree, tuple(path)
        node = self._root_for(system)
        done, size = 0, len(path)
        first_children, wide, uses, runs = tree.first_children, tree.wide, tree.uses, tree.runs
        while done < size:
            child = first_children[node]
            if child < 0:
                child = wide[node].get(path[done], 0)
            elif child:
                child = tree.child(node, path[done])
            if not child:
                break
            run = runs[child]
            common = len(run)
            if common > 1 and run != path[done : done + common]:
                common = _common(run, path[done : done + common])
                child, runs = tree.split(child, common), tree.runs  # a larger array, maybe
            node = child
            uses[node] += 1
            done += common
        before = done
        if done < size:
            self._leaves.remove(node)
            node = tree.grow(node, path[done:], weights[done:], now)
        else:
            tree.last_uses[node] = now  # those above have it once nothing stands below them
        inserted = Inserted(tree.name(node), before)
        self._end_request(node, request_id)
        return inserted

    def extend(
        self,
        end: int,
        system: Hashable,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        request_id: RequestId,
        now: int,
    ) -> Inserted:
        """Record a later turn behind an end; no other context may continue there."""
        tree = self.tree
        node = tree.named(end) if self.holds(end) else self._root_for(system)
        if path:
            self._leaves.remove(node)
            node = tree.grow(node, path, weights, now, opens_turn=True)
        else:
            tree.last_uses[node] = now
        inserted = Inserted(tree.name(node), 0)
        self._end_request(node, request_id)
        return inserted

    @property
    def is_removing(self) -> bool:
        """Whether something is being taken out; `evict` and `trim` have to wait for that."""
        return self._removal is not None

    @property
    def needs_tidying(self) -> bool:
        """Whether leaves have to go by their age, or are going: nobody waits for that."""
        removal = self._removal  # whoever asks may not hold the lock
        if removal is not None:
            return removal.is_by_age
        tree = self.tree
        return tree.node_count > self.max_nodes or tree.tokens > self._most_tokens

    def tidy(self) -> bool:
        """Go on taking out what was cut off or is over the bounds; return whether more has to."""
        tree = self.tree
        if self._removal is not None:
            self._go_on()
        elif not self._roots:
            if tree.births > self._births_before:  # gives back what all that has been took
                self._start_anew()
            return False
        elif tree.node_count <= self.max_nodes and tree.tokens <= self._most_tokens:
            return False  # as nearly always
        for _ in range(_LEAVES):
            if not self.needs_tidying:
                return False
            if self.node_count > self.max_nodes:
                self.evict_oldest_leaf()
            else:
                self.evict_oldest(self.tokens - self._most_tokens)
        return self.needs_tidying

    def clear(self) -> int:
        """Forget all that was sent; return its tokens. See `take_dropped`."""
        tokens, removal = self.tokens, self._removal
        if removal is not None:
            self._removal, removal.is_done = None, True
        self._start_anew()
        return tokens

    def take_dropped(self) -> tuple[Iterator[None], ...]:
        """Return what frees, a little at each of its steps, the memory of what was forgotten."""
        dropped, self._dropped = self._dropped, ()
        return dropped

    def _start_anew(self) -> None:
        tree, leaves = self.tree, self._leaves
        if tree.births - self._births_before > _SMALL:
            self._dropped += (chain(tree.drop(), leaves.drop()),)
        self._start_with(NodeTree(tree.births))

    def evict(self, request_id: RequestId) -> Removal | None:
        """Begin to forget a request that the engine dropped (ContextPilot 4.1); `tidy` goes on."""
        node = self._requests.forget(request_id)
        return self._begin(Removal(node, goes_up=True)) if node else None

    def trim(self, request_id: RequestId, blocks: int) -> Removal | None:
        """Keep only a request's first blocks, and cut what others sent behind; `tidy` goes on."""
        tree, node = self.tree, self._requests.end(request_id)
        if not node:
            return None
        turn = [node]
        while tree.parents[node] and not tree.opens_turn[node]:
            node = tree.parents[node]
            turn.append(node)
        for node in reversed(turn):
            length = len(tree.runs[node])
            if blocks < length:
                return self._begin(self._cut(node, blocks))
            blocks -= length
        nothing = Removal(turn[0])
        nothing.is_done = True
        return nothing

    def oldest_use(self) -> int | None:
        """Return when the oldest leaf was used, or an earlier time; None for an empty index."""
        oldest = self._leaves.oldest_use()
        if oldest is None and self._removal is not None:
            return self.tree.last_uses[self._removal.end]  # may be a leaf then
        return oldest

    def evict_oldest(self, tokens: float) -> int:
        """Shorten the oldest leaf by at least `tokens`; return what left within some steps."""
        removal = self._removal
        if removal is not None:
            self._go_on()
            return removal.tokens if removal.is_by_age and removal.is_done else 0
        leaf = self._leaves.oldest()
        if not leaf:
            return 0
        weights = self.tree.weights(leaf)
        keep, gone = len(weights), 0
        while keep and gone < tokens:
            keep -= 1
            gone += weights[keep]
        return self.tree.shorten(leaf, keep) if keep else self._remove_leaf(leaf)

    def evict_oldest_leaf(self) -> None:
        """Take out the least recently used leaf, if there is one."""
        if self._removal is not None:
            self._go_on()
        elif leaf := self._leaves.oldest():
            self._remove_leaf(leaf)

    def forget_oldest_request(self) -> None:
        """Forget the id that was remembered first; the blocks that it sent stay."""
        if end := self._requests.forget_oldest():
            self._note_leaf(end)

    def _begin(self, removal: Removal) -> Removal:
        assert self._removal is None, "one thing is taken out at a time"
        self._removal = removal
        self._go_on()
        return removal

    def _cut(self, node: int, keep: int) -> Removal:
        """Shorten a node's run to `keep` blocks and cut off all below; with 0, cut off the node."""
        tree = self.tree
        if keep:
            removal = Removal(node, tree.cut_children(node), tree.births)
            removal.tokens = tree.shorten(node, keep)
            return removal
        tree.unlink(node)
        return Removal(tree.parents[node], {node: node})

    def _remove_leaf(self, leaf: int) -> int:
        """Take a leaf out; return its tokens, or 0 if there is more to do."""
        removal = self._cut(leaf, 0)
        removal.is_by_age = True
        return removal.tokens if self._begin(removal).is_done else 0

    def _go_on(self) -> None:
        """Go on with what is being taken out, for some steps."""
        removal = self._removal
        assert removal is not None
        for _ in range(_STEPS):
            if removal.tops or removal.path:
                self._free_next(removal)
            elif self._has_bare_end(removal):
                self._go_up(removal)
            if not (removal.tops or removal.path or self._has_bare_end(removal)):
                self._removal, removal.is_done = None, True
                self._note_leaf(removal.end)
                return

    def _has_bare_end(self, removal: Removal) -> bool:
        """Return whether the end of what is taken out goes, too."""
        end = removal.end
        return removal.goes_up and self.tree.is_leaf(end) and not self.tree.ends[end]

    def _free_next(self, removal: Removal) -> None:
        """Take one step in a subtree that was cut off: a node down, an id, or a node freed."""
        tree, end = self.tree, removal.end
        if not removal.path:
            _, top = removal.tops.popitem()
            removal.path.append((top, tree.parents[end] != 0 and not tree.opens_turn[top]))
            return
        node, is_same_turn = removal.path[-1]
        if tree.first_children[node]:
            child = tree.pop_child(node)
            removal.path.append((child, is_same_turn and not tree.opens_turn[child]))
        elif not tree.ends[node]:
            removal.path.pop()
            removal.tokens += self._free(node)
            if node == removal.only:
                removal.only = 0  # the number may be another node's soon
        elif is_same_turn:
            self._requests.move(node, end)
        else:
            self._requests.forget_one_at(node)

    def _go_up(self, removal: Removal) -> None:
        end = removal.end
        removal.end = self.tree.parents[end]
        self.tree.unlink(end)
        removal.tokens += self._free(end)

    def _root_for(self, system: Hashable) -> int:
        """Return the root for a system text, a new one if there is none."""
        root = self._roots.get(system)
        if root is None:
            root = self._roots[system] = self.tree.new_root()
            self._systems[root] = system
        return root

    def _end_request(self, node: int, request_id: RequestId | None) -> None:
        requests = self._requests
        if request_id is not None:
            if requests is _NO_REQUESTS:
                requests = self._requests = RequestEnds(self.tree)
            earlier = requests.put(request_id, node)
            if earlier:
                self._note_leaf(earlier)
            if requests.number > _REQUESTS_A_NODE * self.max_nodes:
                self.forget_oldest_request()
        if self.tree.is_leaf(node):
            self._leaves.use(node)
        else:
            self._note_leaf(node)
        if self._removal is not None or self.needs_tidying:
            self.tidy()

    def _note_leaf(self, node: int) -> None:
        """Queue a node for eviction if it has become a leaf; drop a root that holds nothing."""
        tree, removal = self.tree, self._removal
        if tree.first_children[node] or (removal is not None and removal.end == node):
            return  # the end is looked at when all behind it is freed, which may be used later
        if tree.parents[node]:
            if not tree.queued[node]:
                self._leaves.add(node)
            return
        if not tree.ends[node] and node in self._systems:
            del self._roots[self._systems.pop(node)]
            tree.free(node)

    def _free(self, node: int) -> int:
        """Free a node below which nothing stands; return its tokens."""
        tree = self.tree
        # what stands below was used with all before it: noted only here, because a conversation of
        # thousands of turns would be walked up at each of them
        parent = tree.parents[node]
        tree.last_uses[parent] = max(tree.last_uses[parent], tree.last_uses[node])
        self._leaves.remove(node)
        return tree.free(node)


def _common(run: Sequence[BlockKey], path: Sequence[BlockKey]) -> int:
    """Return how many blocks two sequences begin with alike."""
    common = 0
    for one, other in zip(run, path, strict=False):
        if one != other:
            break
        common += 1
    return common
