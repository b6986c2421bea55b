"""The context index: the tree of block sequences that were sent, so probably stand in the cache.

A path from a root is a block sequence that was sent; there is a root for each system text, since
that text comes first in the prompt. Nodes hold *runs* of blocks (a radix tree): most contexts end
in a long tail that nothing shares, which costs one node instead of one a block.

Children are found by their first block. The papers' descent (ContextPilot Algorithm 1) compares
with every child of a node instead; `ordering.paper.paper_order` does that, for
`strategy="paper"`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, id_size
from ctxreuse.context.lru_map import PartSize

_REQUESTS_A_NODE = 4
_STEPS = 64


class Node:
    """A run of blocks behind the run of the parent.

    A plain class with slots: a hundred thousand contexts make some two hundred thousand of these.
    """

    __slots__ = (
        "children",
        "edge",
        "is_queued",
        "last_use",
        "parent",
        "request_ids",
        "run",
        "uses",
        "weights",
    )

    def __init__(
        self,
        parent: Node | None,
        edge: Hashable,
        run: tuple[BlockKey, ...],
        weights: tuple[int, ...],
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.run = run
        self.weights = weights
        self.children: dict[Hashable, Node] = {}
        self.request_ids: dict[str | int, None] = {}
        self.uses = 0
        self.last_use = 0
        self.is_queued = False  # whether the index's heap has an entry of it


def opens_turn(node: Node) -> bool:
    """Return whether a later turn of a conversation begins here."""
    return node.parent is not None and node.edge != node.run[0]


def path_to(node: Node, matched: int) -> tuple[BlockKey, ...]:
    """Return the blocks from the root to the `matched`-th block of the node's run."""
    runs = [node.run[:matched]]
    above = node.parent
    while above is not None:
        runs.append(above.run)
        above = above.parent
    runs.reverse()
    return tuple(chain.from_iterable(runs))


class Inserted(NamedTuple):
    """Where a sequence ended, and how many of its blocks were there before."""

    node: Node
    blocks_before: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction did.

    Attributes:
        requests: How many of the given request ids were known.
        tokens: Block tokens that left the index.
        unknown: The given request ids that the index does not hold (any more).
    """

    requests: int = 0
    tokens: int = 0
    unknown: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Size of an index or, of a planner, of all its indexes together.

    Attributes:
        nodes: Tree nodes, roots left out.
        tokens: Block tokens held; of a planner without those that a busy tenant has still to lose.
        requests: Request ids remembered.
        parts: Of a planner, every part of its state that grows with traffic, by the names in
            `ctxreuse.planning.tenants.Bounds`; empty for one index.
        limits_reached: Of a planner, how often a search since its start ended at the bound on its
            work, by what was looked for: "cached_paths", the best beginning for a request, and
            "greedy_paths", the same beyond 256 nodes; "continuations", an order behind it;
            "paper_orders", the papers' order; "shown_blocks", blocks in a history; "overlaps",
            texts that a block may repeat. A plan is right all the same, but may reuse less. Where a
            number grows, requests have thousands of blocks that tie, or histories repeat labels a
            great many times: send fewer blocks in a request, or find out who sends such texts.
    """

    nodes: int = 0
    tokens: int = 0
    requests: int = 0
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)
    limits_reached: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def cut_short(self) -> int:
        """How often any search since the start ended at the bound on its work."""
        return sum(self.limits_reached.values())


class ContextIndex:
    """The tree of sent block sequences of one tenant.

    Invariants: a child's edge is its run's first block, or a mark that no context holds (a later
    turn stands behind its history, where no other context can follow); no two children of a node
    share an edge; `tokens` is the sum of all weights; memory is bounded by `capacity_tokens` and
    `max_nodes`, by evicting the least recently used leaves, last blocks first, as engines do. Its
    owner bounds what grows within the nodes (`block_count`, `request_size`).

    A weight is a block's tokens, at least 1: a block without text still costs its label.

    Args:
        capacity_tokens: What the engine's cache holds; None where the engine reports evictions.
        max_nodes: Bound on memory, whatever the capacity; four times as many request ids are
            remembered.

    Attributes:
        node_count: How many nodes it has, roots left out.
        block_count: How many blocks the runs of its nodes hold together.
        tokens: The weight of these blocks.
        request_size: The sizes (`id_size`) of the request ids remembered.
    """

    def __init__(self, capacity_tokens: int | None = None, max_nodes: int = 500_000) -> None:
        self.capacity_tokens = capacity_tokens
        self.max_nodes = max_nodes
        self._roots: dict[Hashable, Node] = {}
        self._by_request: OrderedDict[str | int, Node] = OrderedDict()
        self.tokens = 0
        self.node_count = 0
        self.block_count = 0
        self.request_size = 0
        # A heap of every node that has become a leaf, one entry each, by a time not after its last
        # use: entries are brought up to date, a few at a time, as they come to the top.
        self._leaves: list[tuple[int, int, Node]] = []
        self._numbers = 0  # given to turns and heap entries, to decide between equal last uses

    def statistics(self) -> IndexStatistics:
        """Return the size of the index."""
        return IndexStatistics(self.node_count, self.tokens, self.request_count)

    @property
    def request_count(self) -> int:
        """How many request ids are remembered."""
        return len(self._by_request)

    def root(self, system: Hashable) -> Node:
        """Return the root for a system text; a new one is kept once something is sent with it."""
        return self._roots.get(system) or Node(None, system, (), ())

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request of this id is remembered."""
        return request_id in self._by_request

    def holds(self, node: Node) -> bool:
        """Return whether the node is still part of the tree."""
        return node.parent is not None or self._roots.get(node.edge) is node

    def insert(
        self,
        root: Node,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        request_id: str | int,
        now: int,
    ) -> Inserted:
        """Record that a block sequence was sent.

        Args:
            root: The root of its system text.
            path: The blocks in the order in which they were sent.
            weights: Each block's weight.
            request_id: For eviction by request.
            now: A clock that never goes back.
        """
        node = root = self._roots.setdefault(root.edge, root)
        done, size = 0, len(path)
        root.last_use = now
        while done < size:
            child = node.children.get(path[done])
            if child is None:
                break
            common = 1
            for key in child.run[1:]:
                if done + common == size or path[done + common] != key:
                    break
                common += 1
            if common < len(child.run):
                child = self._split(child, common)
            node = child
            node.uses += 1
            node.last_use = now
            done += common
        before = done
        if done < size:
            node = self._grow(node, path[done], tuple(path[done:]), tuple(weights[done:]), now)
        self._end_request(node, request_id)
        return Inserted(node, before)

    def extend(
        self,
        node: Node,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        request_id: str | int,
        now: int,
    ) -> Inserted:
        """Record a later turn of a conversation: blocks behind everything that `node` ends.

        Between the two stand a question and an answer, so no other context may continue here.
        """
        if node.parent is None:
            node = self._roots.setdefault(node.edge, node)
        node.last_use = now
        if path:
            mark = ("turn", self._next_number())
            node = self._grow(node, mark, tuple(path), tuple(weights), now)
        self._end_request(node, request_id)
        return Inserted(node, 0)

    def evict(self, request_ids: Iterable[str | int]) -> Evicted:
        """Forget requests that the engine dropped (ContextPilot section 4.1).

        A node goes when neither a request ends in it nor another path leads through it; parents
        left empty go with it.
        """
        known, before = 0, self.tokens
        unknown = []
        for request_id in request_ids:
            node = self._forget_request(request_id)
            if node is None:
                unknown.append(request_id)
                continue
            known += 1
            while node.parent is not None and not node.children and not node.request_ids:
                parent = node.parent
                self._remove(node)
                node = parent
            self._note_leaf(node)
        return Evicted(known, before - self.tokens, tuple(unknown))

    def trim(self, request_id: str | int, blocks: int) -> Evicted:
        """Keep only the first blocks that a request sent; change nothing if it sent no more.

        What other requests sent from the first lost block on goes, too: the same blocks under the
        same labels are the same tokens, so an engine that lacks them can serve nothing behind them.
        What is left of all these requests ends at the cut; those of which nothing is left are
        forgotten.

        Args:
            request_id: The request; of a later turn, only its own blocks count.
            blocks: How many of its blocks stay, from 0.
        """
        end = self._by_request.get(request_id)
        if end is None:
            return Evicted(0, 0, (request_id,))
        turn = [end]
        while turn[-1].parent is not None and not opens_turn(turn[-1]):
            turn.append(turn[-1].parent)
        before = self.tokens
        for node in reversed(turn):
            if blocks < len(node.run):
                self._cut(node, blocks)
                break
            blocks -= len(node.run)
        return Evicted(1, before - self.tokens, ())

    def oldest_use(self) -> int | None:
        """Return when the least recently used leaf was used; None for an empty index.

        It may be an earlier time where very many leaves were used since this was asked last.
        """
        self._oldest_leaf()
        return self._leaves[0][0] if self._leaves else None

    def evict_oldest(self, tokens: int) -> int:
        """Shorten the least recently used leaf, from its end, by at least `tokens` if it can.

        Returns:
            The tokens that left; 0 for an empty index, or where very many leaves were used since it
            was found last: a call takes a bounded number of steps, and the next one goes on.
        """
        leaf = self._oldest_leaf()
        if leaf is None:
            return 0
        keep, gone = len(leaf.run), 0
        while keep and gone < tokens:
            keep -= 1
            gone += leaf.weights[keep]
        self._cut(leaf, keep)
        return gone

    def evict_oldest_leaf(self) -> None:
        """Take out the least recently used leaf, if there is one."""
        self.evict_oldest(self.tokens)

    def forget_oldest_request(self) -> None:
        """Forget the id that was remembered first; what the request sent stays."""
        if self._by_request:
            end = self._forget_request(next(iter(self._by_request)))
            assert end is not None
            self._note_leaf(end)

    def nodes(self) -> Iterator[Node]:
        """Yield every node, roots included, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _cut(self, node: Node, keep: int) -> None:
        """Shorten a node's run to `keep` blocks, and remove all below it; without any, itself."""
        parent = node.parent
        assert parent is not None
        if keep:
            end = node
            below = [(child, not opens_turn(child)) for child in node.children.values()]
        else:
            end = parent
            below = [(node, end.parent is not None and not opens_turn(node))]
        for above, is_same_turn in below:  # grows; parents come first
            below += [
                (child, is_same_turn and not opens_turn(child)) for child in above.children.values()
            ]
        for gone, is_same_turn in below:
            if is_same_turn:
                end.request_ids.update(gone.request_ids)
                self._by_request.update(dict.fromkeys(gone.request_ids, end))
                gone.request_ids = {}
        for gone, _ in reversed(below):
            self._remove(gone)
        if keep:
            self.tokens -= sum(node.weights[keep:])
            self.block_count -= len(node.run) - keep
            node.run, node.weights = node.run[:keep], node.weights[:keep]
        self._note_leaf(end)

    def _grow(
        self,
        parent: Node,
        edge: Hashable,
        run: tuple[BlockKey, ...],
        weights: tuple[int, ...],
        now: int,
    ) -> Node:
        node = Node(parent, edge, run, weights)
        node.uses = 1
        node.last_use = now
        parent.children[edge] = node
        self.node_count += 1
        self.block_count += len(run)
        self.tokens += sum(weights)
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node's run in two; the node itself stays the lower part, where requests end."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.edge, node.run[:length], node.weights[:length])
        upper.uses, upper.last_use = node.uses, node.last_use
        parent.children[node.edge] = upper
        node.run, node.weights = node.run[length:], node.weights[length:]
        node.edge, node.parent = node.run[0], upper
        upper.children[node.edge] = node
        self.node_count += 1
        return upper

    def _end_request(self, node: Node, request_id: str | int) -> None:
        earlier = self._forget_request(request_id) if request_id in self._by_request else None
        self._by_request[request_id] = node
        self.request_size += id_size(request_id)
        node.request_ids[request_id] = None
        if earlier is not None:
            self._note_leaf(earlier)
        if len(self._by_request) > _REQUESTS_A_NODE * self.max_nodes:
            self.forget_oldest_request()
        self._note_leaf(node)
        while self.node_count > self.max_nodes:
            self.evict_oldest_leaf()
        if self.capacity_tokens is not None:
            while self.tokens > self.capacity_tokens:
                self.evict_oldest(self.tokens - self.capacity_tokens)

    def _forget_request(self, request_id: str | int) -> Node | None:
        """Forget a request id; return the node where the request ended, if it was known."""
        node = self._by_request.pop(request_id, None)
        if node is not None:
            del node.request_ids[request_id]
            self.request_size -= id_size(request_id)
        return node

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _note_leaf(self, node: Node) -> None:
        """Queue a node for eviction if it has become a leaf; drop a root that holds nothing."""
        if node.children:
            return
        if node.parent is None:
            if not node.request_ids and self._roots.get(node.edge) is node:
                del self._roots[node.edge]
            return
        if node.is_queued:
            return
        node.is_queued = True
        heapq.heappush(self._leaves, (node.last_use, self._next_number(), node))
        if len(self._leaves) > 64 + 4 * self.node_count:  # most are of nodes that are gone
            for *_, gone in self._leaves:
                gone.is_queued = False
            leaves = [one for one in self.nodes() if one.parent is not None and not one.children]
            self._leaves = [(leaf.last_use, self._next_number(), leaf) for leaf in leaves]
            heapq.heapify(self._leaves)
            for leaf in leaves:
                leaf.is_queued = True

    def _oldest_leaf(self) -> Node | None:
        """Return the leaf whose last use is longest ago; None if it is not found in a few steps."""
        leaves, steps = self._leaves, 0
        while leaves and steps < _STEPS:
            last_use, _, node = leaves[0]
            if node.parent is None or node.children:
                heapq.heappop(leaves)
                node.is_queued = False
            elif node.last_use == last_use:
                return node
            else:
                heapq.heapreplace(leaves, (node.last_use, self._next_number(), node))
            steps += 1
        return None

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        assert not node.children
        # what stands below was used with all before it: noted only here, because a conversation of
        # thousands of turns would be walked up at each of them
        node.parent.last_use = max(node.parent.last_use, node.last_use)
        del node.parent.children[node.edge]
        node.parent = None
        self.node_count -= 1
        self.block_count -= len(node.run)
        self.tokens -= sum(node.weights)
        for request_id in list(node.request_ids):
            self._forget_request(request_id)
        node.run = node.weights = ()  # a conversation that ended here may hold the node for long
