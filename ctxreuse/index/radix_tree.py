"""The context index: the tree of block sequences that were sent, so probably stand in the cache.

A path from a root is a block sequence that was sent; there is a root for each system text, since
that text comes first in the prompt. Nodes hold *runs* of blocks (a radix tree): most contexts end
in a long tail that nothing shares, which costs one node instead of one a block.

Children are found by their first block. The papers' descent (ContextPilot Algorithm 1) compares
with every child of a node instead; `ordering.paper.paper_order` does that, for
`strategy="paper"`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey, id_size
from ctxreuse.context.lru_map import PartSize
from ctxreuse.index.leaf_queue import LeafQueue
from ctxreuse.index.nodes import (
    Node,
    Removal,
    RequestGroup,
    RequestId,
    move_requests,
    opens_turn,
)

_REQUESTS_A_NODE = 4
_STEPS = 128
_LEAVES = 32
_STEPS_UP = 4_096


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
    unknown: tuple[RequestId, ...] = ()


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

    Each call takes a bounded number of steps beside those for its own arguments, because others
    wait meanwhile. What is left to do, `tidy` does: nodes that were cut off are freed by it, and
    count until then, and so do leaves over the bounds.

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
        self.max_nodes = max_nodes
        self._most_tokens = math.inf if capacity_tokens is None else capacity_tokens
        self._roots: dict[Hashable, Node] = {}
        self._by_request: OrderedDict[RequestId, RequestGroup] = OrderedDict()
        self.tokens = 0
        self.node_count = 0
        self.block_count = 0
        self.request_size = 0
        self._leaves = LeafQueue()
        self._removal: Removal | None = None
        self._turns = 0  # numbers them

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
        """Return whether the node is still part of the tree.

        While something is being taken out, one below more than 4,096 others counts as taken out.
        """
        if self._removal is None:
            return node.parent is not None or self._roots.get(node.edge) is node
        for _ in range(_STEPS_UP):
            parent = node.parent
            if parent is None:
                return self._roots.get(node.edge) is node
            if parent.children.get(node.edge) is not node:
                return False
            node = parent
        return False

    def insert(
        self,
        root: Node,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        request_id: RequestId,
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
        request_id: RequestId,
        now: int,
    ) -> Inserted:
        """Record a later turn of a conversation: blocks behind everything that `node` ends.

        Between the two stand a question and an answer, so no other context may continue here.
        """
        if node.parent is None:
            node = self._roots.setdefault(node.edge, node)
        node.last_use = now
        if path:
            self._turns += 1
            mark = ("turn", self._turns)
            node = self._grow(node, mark, tuple(path), tuple(weights), now)
        self._end_request(node, request_id)
        return Inserted(node, 0)

    @property
    def is_removing(self) -> bool:
        """Whether something is being taken out; `evict` and `trim` have to wait for that."""
        return self._removal is not None

    @property
    def needs_tidying(self) -> bool:
        """Whether leaves have to go by their age, or are going: nobody waits for that."""
        if self._removal is not None:
            return self._removal.is_by_age
        return self.node_count > self.max_nodes or self.tokens > self._most_tokens

    def tidy(self) -> bool:
        """Go on with what is being taken out, then with the least recently used over the bounds.

        Returns:
            Whether leaves have to go still.
        """
        if self._removal is not None:
            self._go_on()
        elif self.node_count <= self.max_nodes and self.tokens <= self._most_tokens:
            return False  # as nearly always
        for _ in range(_LEAVES):
            if not self.needs_tidying:
                return False
            if self.node_count > self.max_nodes:
                self.evict_oldest_leaf()
            else:
                self.evict_oldest(self.tokens - self._most_tokens)
        return self.needs_tidying

    def evict(self, request_id: RequestId) -> Removal | None:
        """Begin to forget a request that the engine dropped (ContextPilot section 4.1).

        A node goes when neither a request ends in it nor another path leads through it; parents
        left empty go with it. Nothing else is being taken out meanwhile.

        Returns:
            What `tidy` goes on with; None if there is no such request (any more).
        """
        node = self._forget_request(request_id)
        return None if node is None else self._begin(Removal(node, {}, goes_up=True))

    def trim(self, request_id: RequestId, blocks: int) -> Removal | None:
        """Keep only the first blocks that a request sent; change nothing if it sent no more.

        What other requests sent from the first lost block on goes, too: the same blocks under the
        same labels are the same tokens, so an engine that lacks them can serve nothing behind them.
        What is left of all these requests ends at the cut; those of which nothing is left are
        forgotten. Nothing else is being taken out meanwhile.

        Args:
            request_id: The request; of a later turn, only its own blocks count.
            blocks: How many of its blocks stay, from 0.

        Returns:
            As `evict`.
        """
        group = self._by_request.get(request_id)
        if group is None:
            return None
        turn = [group.end()]
        while turn[-1].parent is not None and not opens_turn(turn[-1]):
            turn.append(turn[-1].parent)
        for node in reversed(turn):
            if blocks < len(node.run):
                return self._begin(self._cut(node, blocks))
            blocks -= len(node.run)
        nothing = Removal(turn[0], {})
        nothing.is_done = True
        return nothing

    def oldest_use(self) -> int | None:
        """Return when the least recently used leaf was used; None for an empty index.

        It may be an earlier time where very many leaves were used since this was asked last.
        """
        oldest = self._leaves.oldest_use()
        if oldest is None and self._removal is not None:
            return self._removal.end.last_use  # may be a leaf then
        return oldest

    def evict_oldest(self, tokens: float) -> int:
        """Shorten the least recently used leaf, from its end, by at least `tokens` if it can.

        Returns:
            The tokens that left; 0 for an empty index, where something else is taken out first, or
            where very many leaves were used since one was found last or requests end at this one: a
            call takes a bounded number of steps, and the next one goes on.
        """
        removal = self._removal
        if removal is not None:
            self._go_on()
            return removal.tokens if removal.is_by_age and removal.is_done else 0
        leaf = self._leaves.oldest()
        if leaf is None:
            return 0
        keep, gone = len(leaf.run), 0
        while keep and gone < tokens:
            keep -= 1
            gone += leaf.weights[keep]
        return self._shorten(leaf, keep) if keep else self._remove_leaf(leaf)

    def evict_oldest_leaf(self) -> None:
        """Take out the least recently used leaf, if there is one."""
        if self._removal is not None:
            self._go_on()
        elif (leaf := self._leaves.oldest()) is not None:
            self._remove_leaf(leaf)

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

    def _begin(self, removal: Removal) -> Removal:
        assert self._removal is None, "one thing is taken out at a time"
        self._removal = removal
        self._go_on()
        return removal

    def _cut(self, node: Node, keep: int) -> Removal:
        """Shorten a node's run to `keep` blocks, and cut off all below it; without any, itself."""
        if keep:
            removal = Removal(node, node.children)
            node.children = {}
            removal.tokens = self._shorten(node, keep)
            return removal
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        return Removal(parent, {node.edge: node})

    def _remove_leaf(self, leaf: Node) -> int:
        """Take a leaf out; return its tokens, or 0 if there is more to do."""
        removal = self._cut(leaf, 0)
        removal.is_by_age = True
        return removal.tokens if self._begin(removal).is_done else 0

    def _shorten(self, node: Node, keep: int) -> int:
        """Shorten a node's run to `keep` blocks; return the tokens that leave."""
        gone = sum(node.weights[keep:])
        self.tokens -= gone
        self.block_count -= len(node.run) - keep
        node.run, node.weights = node.run[:keep], node.weights[:keep]
        return gone

    def _go_on(self) -> None:
        """Go on with what is being taken out, for some steps."""
        removal = self._removal
        assert removal is not None
        for _ in range(_STEPS):
            if removal.cut_off or removal.path:
                self._free_next(removal)
            elif removal.has_bare_end:
                self._go_up(removal)
            if not (removal.cut_off or removal.path or removal.has_bare_end):
                self._removal, removal.is_done = None, True
                self._note_leaf(removal.end)
                return

    def _free_next(self, removal: Removal) -> None:
        """Take one step in a subtree that was cut off: a node down, an id, or a node freed."""
        end = removal.end
        if not removal.path:
            _, top = removal.cut_off.popitem()
            removal.path.append((top, end.parent is not None and not opens_turn(top)))
            return
        node, is_same_turn = removal.path[-1]
        if node.children:
            _, child = node.children.popitem()
            removal.path.append((child, is_same_turn and not opens_turn(child)))
        elif node.requests is None:
            removal.path.pop()
            removal.tokens += self._free(node)
        elif is_same_turn:
            move_requests(node, end)
        else:
            request_id = node.requests.pop()
            del self._by_request[request_id]
            self.request_size -= id_size(request_id)

    def _go_up(self, removal: Removal) -> None:
        end = removal.end
        assert end.parent is not None
        removal.end = end.parent
        del end.parent.children[end.edge]
        removal.tokens += self._free(end)

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

    def _end_request(self, node: Node, request_id: RequestId) -> None:
        earlier = self._forget_request(request_id) if request_id in self._by_request else None
        group = node.requests
        if group is None:
            group = node.requests = RequestGroup(node)
        group.ids[request_id] = None
        self._by_request[request_id] = group
        self.request_size += id_size(request_id)
        if earlier is not None:
            self._note_leaf(earlier)
        if len(self._by_request) > _REQUESTS_A_NODE * self.max_nodes:
            self.forget_oldest_request()
        self._note_leaf(node)
        self.tidy()

    def _forget_request(self, request_id: RequestId) -> Node | None:
        """Forget a request id; return the node where the request ended, if it was known."""
        group = self._by_request.pop(request_id, None)
        if group is None:
            return None
        self.request_size -= id_size(request_id)
        end = group.end()
        group.discard(request_id)
        return end

    def _note_leaf(self, node: Node) -> None:
        """Queue a node for eviction if it has become a leaf; drop a root that holds nothing."""
        if node.children:
            return
        if node.parent is not None:
            if not node.is_queued:
                self._leaves.add(node, self.node_count)
        elif node.requests is None and self._roots.get(node.edge) is node:
            del self._roots[node.edge]

    def _free(self, node: Node) -> int:
        """Free a node below which nothing stands; return its tokens."""
        assert node.parent is not None
        # what stands below was used with all before it: noted only here, because a conversation of
        # thousands of turns would be walked up at each of them
        node.parent.last_use = max(node.parent.last_use, node.last_use)
        node.parent = None
        tokens = sum(node.weights)
        self.node_count -= 1
        self.block_count -= len(node.run)
        self.tokens -= tokens
        node.run = node.weights = ()  # a conversation that ended here may hold the node for long
        self._leaves.shrink(self.node_count)
        return tokens
