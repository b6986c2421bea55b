"""What the tests of the modules share: blocks named by one letter, and a look inside the index.

In these tests the block key of "a" is `b"a"`, and a context is written as a word: "abc".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hypothesis import strategies as st

from ctxreuse.adapters.context_search import FoundContext
from ctxreuse.adapters.rendered_contexts import ContextRegistry, context_registry
from ctxreuse.context.blocks import BlockKey, id_size
from ctxreuse.index.nodes import Node
from ctxreuse.index.path_search import heaviest_path
from ctxreuse.index.radix_tree import ContextIndex, Evicted, Inserted, Removal

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
        root = self.index.root(system)
        weights = weights_of(letters, self._weights)
        inserted = self.index.insert(root, keys(letters), weights, request_id, self.now)
        tidied(self.index)
        return inserted

    def extend(self, node: Node, letters: str, request_id: str | int) -> Inserted:
        """Insert a later turn behind a node."""
        self.now += 1
        weights = weights_of(letters, self._weights)
        inserted = self.index.extend(node, keys(letters), weights, request_id, self.now)
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
        root = self.index.root(system)
        match = heaviest_path(root, context(letters, self._weights))
        return word(match.path), match.weight


def tidied(index: ContextIndex, removal: Removal | None = None) -> Removal | None:
    """Return what an index takes out once it is out, and the index within its bounds."""
    while index.is_removing or index.needs_tidying:
        index.tidy()
    assert removal is None or removal.is_done
    return removal


def ids_at(node: Node) -> list[str | int]:
    """Return the ids of the requests that end at a node."""
    groups = [] if node.requests is None else [node.requests]
    for group in groups:  # grows
        groups += group._joined or ()
    return [request_id for group in groups for request_id in group.ids]


def shape(index: ContextIndex) -> dict[str, list[str | int]]:
    """Return the request ids at each node, by the words on its path; "|" opens a later turn."""
    nodes = {}
    for node in index.nodes():
        steps = []
        above: Node | None = node
        while above is not None and above.parent is not None:
            steps.append(("|" if isinstance(above.edge, tuple) else "") + word(above.run))
            above = above.parent
        ids = ids_at(node)
        if steps or ids:
            nodes[".".join(reversed(steps))] = sorted(ids, key=list(index._by_request).index)
    return nodes


def held(index: ContextIndex) -> set[str]:
    """Return every block sequence that the index holds, from a root on."""
    paths = {}
    for node in index.nodes():  # parents first
        above = "" if node.parent is None else paths[id(node.parent)]
        paths[id(node)] = above + word(node.run)
    return {path[:end] for path in paths.values() for end in range(1, len(path) + 1)}


def check_index(index: ContextIndex) -> None:
    """Check that edges, sums, counts, parents, request map, leaf queue and bounds agree."""
    nodes = list(index.nodes())
    inner = [node for node in nodes if node.parent is not None]
    assert len({id(node) for node in nodes}) == len(nodes)
    for node in nodes:
        assert index.holds(node)
        for edge, child in node.children.items():
            assert child.parent is node
            assert child.edge == edge
    for node in inner:
        assert node.run
        assert len(node.weights) == len(node.run)
        assert node.edge == node.run[0] or isinstance(node.edge, tuple)
        assert node.uses >= 1

    ends = [(request_id, node) for node in nodes for request_id in ids_at(node)]
    assert len(dict(ends)) == len(ends)
    assert {one: group.end() for one, group in index._by_request.items()} == dict(ends)
    assert all(node.requests is None or ids_at(node) for node in nodes)
    assert index.request_size == sum(map(id_size, index._by_request))
    assert not index.is_removing

    size = index.statistics()
    assert size.nodes == len(inner) <= index.max_nodes
    assert size.requests == len(ends) <= 4 * index.max_nodes
    assert size.tokens == sum(sum(node.weights) for node in inner)
    assert size.tokens <= index._most_tokens

    entries = [*index._leaves._entries, *index._leaves._former]
    queued = {id(node): last_use for last_use, _, node in entries}
    assert len(queued) == len(entries)
    leaves = [node for node in inner if not node.children]
    assert all(queued[id(leaf)] <= leaf.last_use for leaf in leaves)
    assert all(node.is_queued == (id(node) in queued) for node in inner)
    for _ in entries[::64]:  # each time a few entries are brought up to date
        index.oldest_use()
    assert index.oldest_use() == min((leaf.last_use for leaf in leaves), default=None)
