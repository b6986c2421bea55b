"""The prefix index: the tree of block sequences that were sent, so probably stand in the cache.

A path from a root is a sent sequence; there is a root for each system text. Nodes hold *runs* of
blocks (a radix tree), and children are found by their first block, whatever the fan-out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from ctxreuse.context.blocks import BlockKey, id_size, ids_size
from ctxreuse.context.lru_map import PartSize

RequestId: TypeAlias = str | int | bytes
"""What names a request; bytes are a request of another planner."""

Root: TypeAlias = tuple[bytes | None, bool]
"""What a root is named after: the system text, and whether blocks have labels."""

_REQUESTS_A_NODE = 4
_VISITS = 256  # children looked at; then the search only goes down the heaviest
_STEPS = 1 << 16
_STEPS_A_BLOCK = 16
_STEPS_A_BATCH = 1 << 20
_STALE_LEAVES = 64
_KEEPERS = 8


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
    """Size of all indexes of a planner together."""

    nodes: int = 0  # without roots
    tokens: int = 0
    requests: int = 0
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)
    limits_reached: Mapping[str, int] = field(default_factory=dict, compare=False)


class Point:
    """What is known of the prefix that ends at a node, where a cache keeps only some prefixes."""

    __slots__ = ("blocks", "could_until", "keepers", "seen", "sightings", "until")

    def __init__(self, blocks: int, sightings: int = 0, seen: float = -inf) -> None:
        self.blocks = blocks
        self.sightings = sightings  # how often it came while it would have lived
        self.seen = seen
        self.until = self.could_until = -inf
        self.keepers: dict[RequestId, float] = {}  # the latest that wrote or read it: until when

    def keep(self, request_id: RequestId, until: float) -> None:
        """Note a request that has a mark here: it has written what it did not find."""
        self.keepers[request_id] = until
        if len(self.keepers) > _KEEPERS:
            del self.keepers[next(iter(self.keepers))]
        self.until = max(self.until, until)

    def take_back(self, request_id: RequestId) -> None:
        """Note that a request was not sent, or that the cache has lost it."""
        if self.keepers.pop(request_id, None) is not None:
            self.until = max(self.keepers.values(), default=-inf)


class Node:
    """A run of blocks; of a root, or a later turn of a conversation, `edge` is no block."""

    __slots__ = (
        *("children", "edge", "ends", "last", "parent", "place", "point", "run", "uses", "weights"),
    )

    def __init__(
        self,
        parent: Node | None,
        edge: Hashable,  # its place among its parent's children; a later turn's is equal to none
        run: tuple[BlockKey, ...],
        weights: tuple[int, ...],
        uses: int,  # requests that passed it
        last: int,  # when that was; of what stands below, noted only once nothing does
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.run = run
        self.weights = weights
        self.uses = uses
        self.last = last
        # the requests that end here, which garbage collections pass over; not over a set
        self.ends: dict[RequestId, None] | None = None
        self.place = 0  # what stands for it and for these: all can move in one step
        self.point: Point | None = None
        self.children: dict[Hashable, Node] = _NO_CHILDREN

    @property
    def opens_turn(self) -> bool:
        """Whether a later turn of a conversation begins here, where no other context may go on."""
        return type(self.edge) is object


_NO_CHILDREN: dict[Hashable, Node] = {}
"""Of every leaf; never changed."""


class Inserted(NamedTuple):
    """The node where a sequence ended, and how many blocks were there before."""

    end: Node
    blocks_before: int


class Match(NamedTuple):
    """The best cached path for a context."""

    path: tuple[BlockKey, ...] = ()
    weight: int = 0
    worth: float = 0
    limits: tuple[str, ...] = ()  # the names of the bounds that were reached


Worth: TypeAlias = Callable[[Node, int, int, int], tuple[float, int]]
"""From a node, blocks of its run, their path's weight, and what is kept above, to its worth and
what is kept there."""


class SearchBudget:
    """What searches for the requests of one batch and one tenant may compare together."""

    def __init__(self) -> None:
        self.left = _STEPS_A_BATCH


class PrefixIndex:
    """The tree of what one tenant has sent; not locked, its owner does that.

    Invariants: no two children of a node begin with the same block, later turns apart; `tokens` is
    the sum of all weights; nodes, tokens and request ids stay within their bounds, by evicting the
    least recently used leaves, last blocks first, as engines do.
    """

    def __init__(self, capacity_tokens: int | None = None, max_nodes: int = 40_000) -> None:
        self.max_nodes = max_nodes
        self._most_tokens = inf if capacity_tokens is None else capacity_tokens
        # a heap by last use, of numbers alone, which garbage collections pass over; some are stale
        self._leaves: list[tuple[int, int]] = []
        self._places: dict[int, Node] = {}  # by the numbers there
        self._number = 0  # the last one given
        self.roots: dict[Hashable, Node] = {}
        self.node_count = self.block_count = self.tokens = 0
        self._ends: dict[RequestId, int] = {}  # the nodes where they end; the oldest first
        self.ids_size = 0  # a long id counts several times

    @property
    def request_count(self) -> int:
        """How many request ids are remembered."""
        return len(self._ends)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._ends

    def insert(
        self,
        root: Hashable,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        request_id: RequestId | None,
        now: int,
    ) -> Inserted:
        """Record that a block sequence was sent."""
        node, path = self.roots.get(root) or self._new_root(root, now), tuple(path)
        done, size = 0, len(path)
        while done < size:
            child = node.children.get(path[done])
            if child is None:
                break
            run = child.run
            common = len(run)
            if common > 1 and run != path[done : done + common]:
                common = common_blocks(run, path[done : done + common])
                child = self._split(child, common)
            node = child
            node.uses += 1
            done += common
        before = done
        if done < size:
            node = self._grow(node, path[done], path[done:], weights[done:], now)
        return self._ended(node, before, request_id, now)

    def extend(
        self,
        end: int,
        root: Hashable,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        request_id: RequestId,
        now: int,
    ) -> Inserted:
        """Record a later turn of a conversation: blocks behind everything that a place ends."""
        node = self._places.get(end) or self.roots.get(root) or self._new_root(root, now)
        if path:
            node = self._grow(node, object(), tuple(path), weights, now)
        return self._ended(node, 0, request_id, now)

    def evict(self, request_id: RequestId) -> int | None:
        """Forget a request (ContextPilot section 4.1), not what others sent; return what leaves."""
        node = self._forget_end(request_id)
        return None if node is None else self._prune(node)

    def trim(self, request_id: RequestId, blocks: int) -> int | None:
        """Keep the first blocks of a request only; return what left, None if it is not known."""
        end = self.end_of(request_id)
        if end is None:
            return None
        turn = [end]
        while turn[-1].parent is not None and not turn[-1].opens_turn:
            turn.append(turn[-1].parent)
        for node in reversed(turn):
            length = len(node.run)
            if blocks < length:
                return self._cut(node, blocks)
            blocks -= length
        return 0

    def oldest_use(self) -> int | None:
        """Return when the least recently used leaf was used; None for an empty index."""
        leaf = self._oldest_leaf()
        return None if leaf is None else leaf.last

    def oldest_queued(self) -> int | None:
        """Return a time before which no leaf was used last; None where there is none."""
        leaves = self._leaves
        return leaves[0][0] if leaves else None

    def evict_oldest(self, tokens: float) -> int:
        """Shorten the least recently used leaf, from its end, by at least `tokens` if it can."""
        leaf = self._oldest_leaf()
        if leaf is None:
            return 0
        keep, gone = len(leaf.run), 0
        while keep and gone < tokens:
            keep -= 1
            gone += leaf.weights[keep]
        return self._cut(leaf, keep) if keep < len(leaf.run) else 0

    def forget_oldest_request(self) -> None:
        """Forget the id that was remembered first; there must be one. What it sent stays."""
        node = self._forget_end(next(iter(self._ends)))
        if node is not None and node.parent is None:
            self._prune(node)

    def search(
        self,
        root: Hashable,
        context: Mapping[BlockKey, int],
        budget: SearchBudget | None = None,
        first: BlockKey | None = None,
        worth: Worth | None = None,
    ) -> Match:
        """Return the path worth most, by default the longest, of blocks of a context only."""
        top = self.roots.get(root)
        if top is None:
            return Match()
        most_worth: float = 0
        best_weight = best_uses = 0
        best: tuple[Node, int] | None = None
        rank: dict[BlockKey, int] = {}  # filled where paths tie
        size, visits, is_greedy = len(context), 0, False
        own = _STEPS_A_BLOCK * size
        most = steps = own + (_STEPS if budget is None else min(_STEPS, budget.left))
        stack = [(0, top, 0 if worth is None else worth(top, 0, 0, 0)[1])]
        while stack and steps >= 0:
            above, node, over = stack.pop()
            children = node.children
            if len(children) > size:
                steps -= size
                found = [children[key] for key in context if key in children]
            else:
                steps -= len(children)
                found = [child for key, child in children.items() if key in context]
            if first is not None and node is top:
                found = [child for child in found if child.edge == first]
            visits += len(found)
            complete: list[tuple[int, Node, int]] = []
            for child in found:
                weight, matched, run = above, 0, child.run
                for key in run:
                    share = context.get(key)
                    if share is None:
                        break
                    weight += share
                    matched += 1
                steps -= matched
                value, kept = (weight, 0) if worth is None else worth(child, matched, weight, over)
                if value >= most_worth:  # seldom
                    uses = child.uses
                    better = value > most_worth or uses > best_uses
                    if not better and uses == best_uses and best is not None:
                        rank = rank or {key: place for place, key in enumerate(context)}
                        better = _ranks_before(child, best[0], rank)
                    if better:
                        most_worth, best_uses, best = value, uses, (child, matched)
                        best_weight = weight
                if matched == len(run) and child.children:
                    complete.append((weight, child, kept))
                if steps < 0:
                    break
            if complete:
                complete.sort(key=itemgetter(0))
                if visits > _VISITS:
                    is_greedy = is_greedy or len(stack) + len(complete) > 1
                    stack = complete[-1:]
                else:
                    stack += complete  # the heaviest on top: depth first, greedy first
        if budget is not None:
            budget.left = max(0, budget.left + own - (most - steps))
        limits = ("cached_paths",) * (steps < 0) + ("greedy_paths",) * is_greedy
        return Match(() if best is None else _path_to(*best), best_weight, most_worth, limits)

    def sent_prefix(self, root: Hashable, path: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of a path were sent before, in this order."""
        return max((done for _, done, _ in self.passed(root, path)), default=0)

    def passed(self, root: Hashable, path: Sequence[BlockKey]) -> Iterator[tuple[Node, int, bool]]:
        """Yield the nodes on a path, how many of its blocks are passed, and if all of the node."""
        node, done = self.roots.get(root), 0
        while node is not None:
            is_whole = True
            for key in node.run:
                is_whole = done < len(path) and path[done] == key
                if not is_whole:
                    break
                done += 1
            yield node, done, is_whole
            node = node.children.get(path[done]) if is_whole and done < len(path) else None

    def nodes_to(self, end: Node, cuts: Iterable[int] = ()) -> list[tuple[int, Node]]:
        """Return the nodes down to an end, each with the blocks before its end; cut at `cuts`."""
        below, node = list[Node](), end
        while node.parent is not None:
            below.append(node)
            node = node.parent
        nodes, done = [(0, node)], 0
        for node in reversed(below):
            for cut in cuts:
                if done < cut < done + len(node.run):
                    nodes.append((cut, self._split(node, cut - done)))
                    done = cut
            done += len(node.run)
            nodes.append((done, node))
        return nodes

    def end_of(self, request_id: RequestId) -> Node | None:
        """Return the node where a request ends; None where it is not known."""
        return self._places.get(self._ends.get(request_id, 0))

    def _new_root(self, root: Hashable, now: int) -> Node:
        node = self.roots[root] = Node(None, root, (), (), 0, now)
        return node

    def _grow(
        self,
        parent: Node,
        edge: Hashable,
        run: tuple[BlockKey, ...],
        weights: Sequence[int],
        now: int,
    ) -> Node:
        node = Node(parent, edge, run, tuple(weights), 1, now)
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[edge] = node
        self.node_count += 1
        self.block_count += len(run)
        self.tokens += sum(node.weights)
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node's run in two; return the upper part, which is new."""
        parent, edge = node.parent, node.edge
        assert parent is not None, "a root has no run"
        upper = Node(parent, edge, node.run[:length], node.weights[:length], node.uses, node.last)
        parent.children[edge] = upper
        upper.point = _shortened(node, len(node.run) - length)
        node.run, node.weights = node.run[length:], node.weights[length:]
        node.parent, node.edge = upper, node.run[0]
        upper.children = {node.edge: node}
        self.node_count += 1
        return upper

    def _ended(self, node: Node, before: int, request_id: RequestId | None, now: int) -> Inserted:
        """Note that a request ends at a node, and keep the bounds."""
        node.last = now
        self._note_leaf(node)
        if request_id is not None:
            if request_id in self._ends:
                earlier = self._forget_end(request_id)
                if earlier is not None and earlier is not node and earlier.parent is None:
                    self._prune(earlier)
            if node.ends is None:
                node.ends = {}
            node.ends[request_id] = None
            self._ends[request_id] = node.place
            self.ids_size += ids_size((request_id,))
        while self.ids_size > _REQUESTS_A_NODE * self.max_nodes:
            self.forget_oldest_request()
        while self.node_count > self.max_nodes:
            self.evict_oldest(inf)
        while self.tokens > self._most_tokens:
            self.evict_oldest(self.tokens - self._most_tokens)
        return Inserted(node, before)

    def _forget_end(self, request_id: RequestId) -> Node | None:
        """Forget a request's id; return where it ended, None if it is not known."""
        node = self.end_of(request_id)
        if node is None or node.ends is None:
            return None
        self.ids_size -= id_size(request_id)
        del self._ends[request_id], node.ends[request_id]
        node.ends = node.ends or None
        return node

    def _prune(self, node: Node) -> int:
        """Take out a node, and those above it, as far as nothing stands or ends there."""
        gone = 0
        while not node.children and node.ends is None:
            parent = node.parent
            if parent is None:
                if self.roots.get(node.edge) is node:
                    del self.roots[node.edge]
                    self._places.pop(node.place, None)
                return gone
            gone += self._unlink(node)
            parent.last = max(parent.last, node.last)
            node = parent
        self._note_leaf(node)
        return gone

    def _cut(self, node: Node, keep: int) -> int:
        """Take out all behind the first `keep` blocks of a node; return the tokens that leave."""
        if keep:
            holder, tops = node, list(node.children.values())
            gone = sum(node.weights[keep:])
            self.tokens -= gone
            self.block_count -= len(node.run) - keep
            node.point = _shortened(node, len(node.run) - keep)
            node.run, node.weights = node.run[:keep], node.weights[:keep]
        else:
            assert node.parent is not None, "a root has no run"
            holder, tops, gone = node.parent, [node], 0
        is_kept = holder.parent is not None
        stack = [(top, is_kept and not top.opens_turn) for top in tops]
        while stack:
            one, is_same_turn = stack.pop()
            stack += [(two, is_same_turn and not two.opens_turn) for two in one.children.values()]
            holder.last = max(holder.last, one.last)
            if one.ends is not None:
                self._move_ends(one, holder if is_same_turn else None)
            gone += self._unlink(one)
            one.children = _NO_CHILDREN
        if holder.parent is None:
            self._prune(holder)
        else:
            self._note_leaf(holder)
        return gone

    def _move_ends(self, node: Node, holder: Node | None) -> None:
        """Let the requests that end at a node end at another one; None forgets them."""
        moved, node.ends = node.ends, None
        assert moved is not None
        if holder is None:
            for request_id in moved:
                del self._ends[request_id]
                self.ids_size -= id_size(request_id)
            return
        fewer, more = moved, holder.ends or {}
        if len(more) < len(fewer):
            fewer, more = more, fewer
            self._places.pop(holder.place, None)
            holder.place, node.place = node.place, 0
            self._places[holder.place] = holder
        more |= fewer
        self._ends.update(dict.fromkeys(fewer, holder.place))
        holder.ends = more

    def _unlink(self, node: Node) -> int:
        """Take a node out of its parent's children; return its tokens."""
        parent, tokens = node.parent, sum(node.weights)
        assert parent is not None, "a root goes in another way"
        if parent.children.pop(node.edge, None) is not None and not parent.children:
            parent.children = _NO_CHILDREN
        node.parent = None
        self._places.pop(node.place, None)
        self.node_count -= 1
        self.block_count -= len(node.run)
        self.tokens -= tokens
        return tokens

    def _note_leaf(self, node: Node) -> None:
        """Give a node a place, and queue it for eviction if nothing stands below it."""
        if not node.place:
            node.place = self._number = self._number + 1
            self._places[node.place] = node
        if node.children or node.parent is None:
            return
        if len(self._leaves) > _STALE_LEAVES + 2 * self.node_count:
            leaves = (one for one in self._places.values() if one.parent and not one.children)
            self._leaves = [(one.last, one.place) for one in leaves]
            heapify(self._leaves)
        heappush(self._leaves, (node.last, node.place))

    def _oldest_leaf(self) -> Node | None:
        while self._leaves:
            last, place = self._leaves[0]
            if (node := self._places.get(place)) and node.last == last and not node.children:
                return node
            heappop(self._leaves)  # it was used since, or has gone
        return None


def _path_to(node: Node, blocks: int) -> tuple[BlockKey, ...]:
    path = node.run[:blocks]
    while node.parent is not None:
        node = node.parent
        path = node.run + path
    return path


def _shortened(node: Node, blocks: int) -> Point | None:
    """Return what is known of a prefix that ends so many blocks before a node does."""
    point = node.point
    return None if point is None else Point(point.blocks - blocks, point.sightings, point.seen)


def common_blocks(run: Sequence[BlockKey], path: Sequence[BlockKey]) -> int:
    """Return how many blocks two sequences begin with alike."""
    common = 0
    for one, other in zip(run, path, strict=False):
        if one != other:
            break
        common += 1
    return common


def _ranks_before(node: Node, best: Node, rank: Mapping[BlockKey, int]) -> bool:
    """Return whether a path goes, where it parts from another one, to a better ranked block."""
    ours, theirs = list(_upwards(node)), list(_upwards(best))
    while len(ours) > 1 and len(theirs) > 1 and ours[-1] is theirs[-1]:
        ours.pop()
        theirs.pop()
    return rank[ours[-1].run[0]] < rank[theirs[-1].run[0]]


def _upwards(node: Node) -> Iterator[Node]:
    """Yield a node and those above it, roots left out."""
    while node.parent is not None:
        yield node
        node = node.parent
