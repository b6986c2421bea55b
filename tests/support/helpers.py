"""What the tests of the modules share: blocks named by one letter, and a look inside the index.

In these tests the block key of "a" is `b"a"`, and a context is written as a word: "abc".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from ctxreuse.adapters.context_search import FoundContext
from ctxreuse.adapters.rendered_contexts import ContextRegistry, context_registry
from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.flat_arrays import HashedNumbers
from ctxreuse.index import radix_tree
from ctxreuse.index.nodes import NodeTree
from ctxreuse.index.path_search import heaviest_path
from ctxreuse.index.radix_tree import ContextIndex, Evicted, Inserted
from ctxreuse.index.removal import Removal
from ctxreuse.index.request_ends import RequestEnds

LETTERS = "abcde"
words = st.lists(st.sampled_from(LETTERS), unique=True).map("".join)
some_words = st.lists(words, max_size=8)
letter_weights = st.fixed_dictionaries({letter: st.integers(1, 4) for letter in LETTERS + "x"})


def contexts_in(
    text: str, registry: ContextRegistry | None = None, tenant: str = ""
) -> list[FoundContext]:
    """Return the contexts that a registry, the shared one for None, finds in a text."""
    pieces = context_registry(registry).parse(text, tenant).pieces
    assert "".join(one if isinstance(one, str) else one.text for one in pieces) == text
    return [piece for piece in pieces if isinstance(piece, FoundContext)]


def prefixes(letters: str) -> list[str]:
    return [letters[:end] for end in range(1, len(letters) + 1)]


def weight_of(letters: str, weights: Mapping[str, int]) -> int:
    return sum(weights[letter] for letter in letters)


def keys(word: Iterable[str]) -> list[BlockKey]:
    return [BlockKey(letter.encode()) for letter in word]


def word(path: Iterable[BlockKey]) -> str:
    return b"".join(path).decode()


def context(letters: str, weights: Mapping[str, int] | None = None) -> dict[BlockKey, int]:
    """Return a context of the letters; without weights each block weighs 1."""
    return dict(zip(keys(letters), weights_of(letters, weights), strict=True))


def weights_of(letters: str, weights: Mapping[str, int] | None = None) -> list[int]:
    return [1 if weights is None else weights[letter] for letter in letters]


def tree_weight(orders: Iterable[Sequence[int]], weights: Sequence[int]) -> int:
    """Return what the prefix tree of the orders weighs: the tokens that an engine prefills."""
    prefixes = {tuple(order[:end]) for order in orders for end in range(1, len(order) + 1)}
    return sum(weights[prefix[-1]] for prefix in prefixes)


class NamedEnds(RequestEnds):
    """The same, and the ids themselves, which the index does not keep."""

    __slots__ = ("name_of",)

    def __init__(self, tree: NodeTree) -> None:
        super().__init__(tree)
        self.name_of: dict[int, str | int | bytes] = {}  # by number, the oldest first

    def put(self, request_id: str | int | bytes, node: int) -> int:
        before = super().put(request_id, node)
        self.name_of[self._find(request_id)] = request_id
        return before

    def _forget(self, number: int) -> int:
        del self.name_of[number]
        return super()._forget(number)

    def ids(self) -> list[str | int | bytes]:
        """Return all ids, the oldest first."""
        return list(self.name_of.values())


radix_tree.RequestEnds = NamedEnds  # in all tests that import this
radix_tree._NO_REQUESTS = NamedEnds(NodeTree())


class Sender:
    """An index with a clock that ticks at every request."""

    def __init__(self, *words: str, weights: Mapping[str, int] | None = None, **bounds: int):
        self.index = ContextIndex(**bounds)
        self.now = 0
        self._weights = weights
        for number, letters in enumerate(words):
            self.send(letters, number)

    def send(self, letters: str, request_id: str | int, system: str | None = None) -> Inserted:
        """Insert a request's blocks; the requests of the constructor have the ids 0, 1, ..."""
        self.now += 1
        weights = weights_of(letters, self._weights)
        inserted = self.index.insert(system, keys(letters), weights, request_id, self.now)
        tidied(self.index)
        return inserted

    def extend(
        self, end: int, letters: str, request_id: str | int, system: str | None = None
    ) -> Inserted:
        """Insert a later turn behind the end of one before."""
        self.now += 1
        weights = weights_of(letters, self._weights)
        inserted = self.index.extend(end, system, keys(letters), weights, request_id, self.now)
        tidied(self.index)
        return inserted

    def evict(self, request_ids: Iterable[str | int]) -> Evicted:
        """Evict requests, one after the other."""
        removals = {one: tidied(self.index, self.index.evict(one)) for one in request_ids}
        known = [removal for removal in removals.values() if removal is not None]
        unknown = tuple(one for one, removal in removals.items() if removal is None)
        return Evicted(len(known), sum(removal.tokens for removal in known), unknown)

    def trim(self, request_id: str | int, blocks: int) -> Evicted:
        """Keep the first blocks of a request only."""
        removal = tidied(self.index, self.index.trim(request_id, blocks))
        return Evicted(0, 0, (request_id,)) if removal is None else Evicted(1, removal.tokens, ())

    def search(self, letters: str, system: str | None = None) -> tuple[str, int]:
        index = self.index
        match = heaviest_path(index.tree, index.root(system), context(letters, self._weights))
        return word(match.path), match.weight


def tidied(index: ContextIndex, removal: Removal | None = None) -> Removal | None:
    """Return what an index takes out once it is out, and the index within its bounds."""
    while index.is_removing or index.needs_tidying:
        index.tidy()
    assert removal is None or removal.is_done
    return removal


@dataclass(eq=False)
class Node:
    """A node of an index as it is now, as an object.

    `edge` is the first block; of a later turn ("turn", number), of a root the system text.
    """

    number: int
    parent: Node | None
    edge: Hashable
    run: tuple[BlockKey, ...]
    weights: list[int]
    uses: int
    last_use: int
    children: dict[Hashable, Node] = field(default_factory=dict)
    ids: list[str | int | bytes] = field(default_factory=list)


def nodes_of(index: ContextIndex) -> list[Node]:
    """Return every node, roots included, parents first."""
    tree = index.tree
    nodes: list[Node] = []

    def add(number: int, parent: Node | None, edge: Hashable) -> None:
        run, weights = tree.runs[number], list(tree.weights(number))
        uses, last_use = tree.uses[number], tree.last_uses[number]
        nodes.append(Node(number, parent, edge, run, weights, uses, last_use))

    for system, root in index._roots.items():
        add(root, None, system)
    for node in nodes:  # grows
        for child in tree.children(node.number):
            turn = ("turn", child) if tree.opens_turn[child] else None
            add(child, node, turn or tree.runs[child][0])
            assert nodes[-1].edge not in node.children
            node.children[nodes[-1].edge] = nodes[-1]
    by_number = {node.number: node for node in nodes}
    for request_id in index._requests.ids():
        end = index._requests.end(request_id)
        by_number[end].ids.append(request_id)
    return nodes


def shape(index: ContextIndex) -> dict[str, list[str | int | bytes]]:
    """Return the request ids at each node, by the words on its path; "|" opens a later turn."""
    nodes = {}
    for node in nodes_of(index):
        steps = []
        above: Node | None = node
        while above is not None and above.parent is not None:
            steps.append(("|" if isinstance(above.edge, tuple) else "") + word(above.run))
            above = above.parent
        if steps or node.ids:
            nodes[".".join(reversed(steps))] = node.ids
    return nodes


def held(index: ContextIndex) -> set[str]:
    """Return every block sequence that the index holds, from a root on."""
    paths: dict[Node | None, str] = {None: ""}
    for node in nodes_of(index):  # parents first
        paths[node] = paths[node.parent] + word(node.run)
    return {path[:end] for path in paths.values() for end in range(1, len(path) + 1)}


def check_index(index: ContextIndex) -> None:
    """Check that lists, sums, counts, parents, request map, leaf queue and bounds agree."""
    tree, nodes = index.tree, nodes_of(index)
    inner = [node for node in nodes if node.parent is not None]
    numbers = [node.number for node in nodes]
    assert len(set(numbers)) == len(numbers)
    free = followed(tree._free, tree.next_siblings)
    assert sorted([*numbers, *free]) == list(range(1, tree._used_up + 1))
    assert {root: system for system, root in index._roots.items()} == index._systems
    for node in nodes:
        assert index.holds(tree.name(node.number))
        assert tree.parents[node.number] == (node.parent.number if node.parent else 0)
        children = [child.number for child in node.children.values()]
        assert children == list(tree.children(node.number))
        by_edge = {
            one.number if isinstance(edge, tuple) else edge: one.number
            for edge, one in node.children.items()
        }
        assert tree.wide.get(node.number, by_edge) == by_edge
        assert node.number in tree.wide or len(children) <= 8
        assert node.number not in tree.wide or len(children) > 4
        assert (tree.first_children[node.number] < 0) == (node.number in tree.wide)
    assert set(tree.wide) <= set(numbers)
    for node in inner:
        assert node.run
        assert len(node.weights) == len(node.run)
        assert node.uses >= 1

    requests = index._requests
    assert Counter(one for node in nodes for one in node.ids) == Counter(requests.ids())
    assert all((tree.ends[node.number] != 0) == bool(node.ids) for node in nodes)
    check_request_ends(requests)
    assert not index.is_removing

    size = index.statistics()
    assert size.nodes == len(inner) <= index.max_nodes
    assert size.requests == requests.number <= 4 * index.max_nodes
    assert size.tokens == sum(sum(node.weights) for node in inner)
    assert index.block_count == sum(len(node.run) for node in inner)
    assert size.tokens <= index._most_tokens

    queue = index._leaves
    leaves = {node.number: node.last_use for node in inner if not node.children}
    listed = [*queue._listed]
    entries = {(one & 0xFFFF_FFFF, one >> 32) for one in [*queue._entries, *queue._former]}
    waiting = {number for number, last_use in entries if (number, last_use) in leaves.items()}
    assert {*listed} | {one for one in waiting if tree.queued[one] == 2} == set(leaves)
    assert [leaves[one] for one in listed] == sorted(leaves[one] for one in listed)
    where = {one: 1 if one in listed else 2 for one in leaves}
    assert {one: place for one, place in enumerate(tree.queued) if place} == where
    for _ in range(0, len(entries), 64):  # each time a few that are out of date go
        index.oldest_use()
    assert index.oldest_use() == min(leaves.values(), default=None)


def check_request_ends(requests: NamedEnds) -> None:
    """Check that all ids, and none that is forgotten without need, stand in order of arrival."""
    _, tops, behind, following, previous, _, older, newer = (
        dict(enumerate(requests._fields[field::8])) for field in range(8)
    )
    free = followed(requests._free, by_place(following))
    used = set(range(1, len(tops))) - {one // 8 for one in free}
    known = {number // 8 for number in requests.name_of}
    assert {number for number in used if older[number] != -1} == known
    assert requests.number == len(known)
    for number in used:
        below = [one // 8 for one in followed(behind[number], by_place(following))]
        assert all(tops[one] == 8 * number for one in below)
        assert below or number in known
        assert [0, *below][: len(below)] == [previous[one] // 8 for one in below]
    assert followed(newer[0], by_place(newer)) == [*requests.name_of]
    check_hashed_numbers(requests._hashes, known)
    assert all(requests._find(name) == number for number, name in requests.name_of.items())


def check_hashed_numbers(hashed: HashedNumbers, numbers: set[int]) -> None:
    """Check that each number, and no other, stands in the chain of its hash."""
    chains = [followed(first, hashed._next) for first in hashed._first]
    assert sorted(chain_number for chain in chains for chain_number in chain) == sorted(numbers)
    for place, chain in enumerate(chains):
        assert all(hashed._chain(hashed._hashes[number]) == place for number in chain)
    assert len(chains) == hashed._mask + 1 + hashed._halved


def by_place(field: Mapping[int, int]) -> dict[int, int]:
    """Return a field of `RequestEnds` by the numbers of the ids."""
    return {8 * one: value for one, value in field.items()}


def followed(first: int, following: Any) -> list[int]:
    """Return a list of numbers, each of which has the next one in an array; 0 ends it."""
    numbers = []
    while first:
        numbers.append(first)
        first = following[first]
    return numbers
