"""What the tests of the modules share: blocks named by one letter, and a look inside the index.

In these tests the block key of "a" is `b"a"`, and a context is written as a word: "abc".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hypothesis import strategies as st

from ctxreuse.context.blocks import BlockKey, ContextRequest
from ctxreuse.memory.prefix_index import Evicted, IndexStatistics, Inserted, Node, PrefixIndex
from ctxreuse.memory.tenants import TenantState
from ctxreuse.pipeline import context_finder
from ctxreuse.pipeline.context_finder import Context
from ctxreuse.pipeline.known_texts import known_texts
from ctxreuse.policy.view import View
from ctxreuse.rules.cache_rules import DEFAULT_CACHE

LETTERS = "abcde"
words = st.lists(st.sampled_from(LETTERS), unique=True).map("".join)
some_words = st.lists(words, max_size=8)
letter_weights = st.fixed_dictionaries({letter: st.integers(1, 4) for letter in LETTERS + "x"})


def contexts_in(text: str, tenant: str = "") -> list[Context]:
    """Return the contexts that a text shows of what this process knows."""
    found = context_finder.contexts_in(known_texts(), tenant, text)
    assert found is not None
    return list(found.contexts)


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
        self.index = PrefixIndex(**bounds)
        self.now = 0
        self._weights = weights
        for number, letters in enumerate(words):
            self.send(letters, number)

    def send(self, letters: str, request_id: str | int, system: str | None = None) -> Inserted:
        """Insert a request's blocks; the requests of the constructor have the ids 0, 1, ..."""
        self.now += 1
        weights = weights_of(letters, self._weights)
        return self.index.insert(system, keys(letters), weights, request_id, self.now)

    def extend(
        self, end: Node | None, letters: str, request_id: str | int, system: str | None = None
    ) -> Inserted:
        self.now += 1
        weights = weights_of(letters, self._weights)
        place = end.place if end else 0
        return self.index.extend(place, system, keys(letters), weights, request_id, self.now)

    def evict(self, request_ids: Iterable[str | int]) -> Evicted:
        gone = {one: self.index.evict(one) for one in request_ids}
        known = [tokens for tokens in gone.values() if tokens is not None]
        unknown = tuple(one for one, tokens in gone.items() if tokens is None)
        return Evicted(len(known), sum(known), unknown)

    def trim(self, request_id: str | int, blocks: int) -> Evicted:
        """Keep the first blocks of a request only."""
        gone = self.index.trim(request_id, blocks)
        return Evicted(0, 0, (request_id,)) if gone is None else Evicted(1, gone, ())

    def search(self, letters: str, system: str | None = None) -> tuple[str, int]:
        match = self.index.search(system, context(letters, self._weights))
        return word(match.path), match.weight


def nodes_of(index: PrefixIndex) -> list[Node]:
    nodes = list(index.roots.values())
    for node in nodes:  # grows
        nodes += node.children.values()
    return nodes


def ids_at(index: PrefixIndex, node: Node) -> list[str | int | bytes]:
    """Return the ids of the requests that end at a node, the oldest first."""
    ids = node.ends or ()
    return [one for one in index._ends if one in ids]


def shape(index: PrefixIndex) -> dict[str, list[str | int | bytes]]:
    """Return the request ids at each node, by the words on its path; "|" opens a later turn."""
    nodes = {}
    for node in nodes_of(index):
        steps, above = [], node
        while above.parent is not None:
            steps.append("|" * above.opens_turn + word(above.run))
            above = above.parent
        ids = ids_at(index, node)
        if steps or ids:
            nodes[".".join(reversed(steps))] = ids
    return nodes


def held(index: PrefixIndex) -> set[str]:
    """Return every block sequence that the index holds, from a root on."""
    paths: dict[Node | None, str] = {None: ""}
    for node in nodes_of(index):  # parents first
        paths[node] = paths[node.parent] + word(node.run)
    return {path[:end] for path in paths.values() for end in range(1, len(path) + 1)}


def size_of(index: PrefixIndex) -> IndexStatistics:
    return IndexStatistics(index.node_count, index.tokens, index.request_count)


def check_index(index: PrefixIndex) -> None:
    """Check that edges, parents, sums, counts, request ids, leaves and bounds agree."""
    nodes = nodes_of(index)
    inner = [node for node in nodes if node.parent is not None]
    for node in nodes:
        assert index._places.get(node.place, node) is node
        assert node.children or node.parent is not None or node.ends
        for edge, child in node.children.items():
            assert child.parent is node
            assert child.edge is edge
    for node in inner:
        assert node.run
        assert node.opens_turn or node.edge == node.run[0]
        assert len(node.weights) == len(node.run)
        assert node.uses >= 1

    ends = {one: node for node in nodes if node.ends for one in node.ends}
    assert {one: index._places[place] for one, place in index._ends.items()} == ends
    assert index._places == {node.place: node for node in nodes if node.place}

    size = size_of(index)
    assert size.nodes == len(inner) <= index.max_nodes
    assert size.requests == len(ends) <= 4 * index.max_nodes
    assert size.tokens == sum(sum(node.weights) for node in inner)
    assert index.block_count == sum(len(node.run) for node in inner)
    assert size.tokens <= index._most_tokens

    leaves = [node.last for node in inner if not node.children]
    assert index.oldest_use() == min(leaves, default=None)


class LetterView(View):
    """A request of letters, whose tenant has sent some words, or of which some can be read."""

    def __init__(
        self,
        letters: str,
        state: TenantState | None = None,
        weights: Mapping[str, int] | None = None,
        *,
        cached: str | None = None,
        words: int = 0,
        request: ContextRequest | None = None,
    ) -> None:
        request = request or ContextRequest([])
        super().__init__(
            state or TenantState("", None, 100),
            DEFAULT_CACHE.least_tokens,
            None,
            request,
            context(letters, weights),
            None if request.system is None else request.system.encode(),
            front_tokens=0,
            rules=DEFAULT_CACHE,
            now=None,
            words=words,
            first=None,
            missing=0,
            is_too_short=sum(context(letters, weights).values()) < DEFAULT_CACHE.least_tokens,
            note_limit=lambda name: None,
        )
        self._cached = cached

    def readable(self) -> tuple[BlockKey, ...]:
        """Return the word that was given, or what the state says."""
        return super().readable() if self._cached is None else tuple(keys(self._cached))
