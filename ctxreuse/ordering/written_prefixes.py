"""What a tenant has written into a cache with marks, and what it is likely to ask for again.

A tree of the block sequences that were sent, as the context index is; but it knows for each prefix
until when it can be read, and how often it came while it would have lived. From that it learns how
likely a prefix comes again that came once, twice, or more often: by how many blocks it has, because
long prefixes seldom do. That does not depend on what was written.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.ordering.marks import Markable, MarkPrices, marks_of_arrival

_VISITS = 256
_STEPS = 1 << 16
_MOST_SIGHTINGS = 4  # that are told apart
_EXACT = 12  # so many blocks each count apart, longer prefixes by their logarithm
_A_DOUBLING = 4
_MOST_COUNTED = 4_096
_BEFORE_ANY = {1: 0.0}  # a prefix that came once comes again with this probability; unless learnt
_BEFORE_ANY_LATER = 0.4
_WEIGHT_OF_THAT = 3.0
_WEIGHT_OF_ALL = 8.0
_CAUTION = 0.7
_A_TOKEN_SEEN = 0.1  # what a token that came before is worth, though it cannot be read yet
_DEBT = 8_192
"""Tokens: what may be paid for writing before as much is saved by reading."""
_FORGETTING = 0.99
"""What stays of such a debt with each prompt: what one kind of traffic lost, another may gain."""


def _length_class(blocks: int) -> int:
    if blocks <= _EXACT:
        return blocks
    return _EXACT + int(_A_DOUBLING * math.log2(blocks / _EXACT))


class _Again:
    """How often prefixes came again, by how often they had come and how long they are."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], list[float]] = {}

    def note(self, sightings: int, blocks: int, came_again: bool) -> None:
        """Count a prefix that came for the n-th time; or, if it `came_again`, once more."""
        for state in self._states(sightings, blocks):
            counts = self._counts.setdefault(state, [0.0, 0.0])
            counts[came_again] += 1
            if counts[0] > _MOST_COUNTED:
                counts[:] = counts[0] / 2, counts[1] / 2

    def probability(self, sightings: int, blocks: int) -> float:
        """Return how likely such a prefix comes again, on the careful side."""
        state, of_all = self._states(sightings, blocks)
        trials, hits = self._counts.get(of_all, (0.0, 0.0))
        first = _BEFORE_ANY.get(of_all[0], _BEFORE_ANY_LATER)
        average = (hits + _WEIGHT_OF_THAT * first) / (trials + _WEIGHT_OF_THAT)
        trials, hits = self._counts.get(state, (0.0, 0.0))
        number = trials + _WEIGHT_OF_ALL
        again = min((hits + _WEIGHT_OF_ALL * average) / number, 1.0)
        return max(0.0, again - _CAUTION * math.sqrt(again * (1 - again) / number))

    @staticmethod
    def _states(sightings: int, blocks: int) -> tuple[tuple[int, int], tuple[int, int]]:
        sightings = min(sightings, _MOST_SIGHTINGS)
        return (sightings, _length_class(blocks)), (sightings, -1)


class _Prefix:
    """A node: a run of blocks, all of which came equally often.

    `blocks` and `tokens` are counted up to its end; `until` says when what is written up to its end
    can be read no more.
    """

    __slots__ = ("blocks", "children", "parent", "run", "seen", "sightings", "tokens", "until")

    def __init__(
        self, parent: _Prefix | None, run: tuple[BlockKey, ...], blocks: int, tokens: int
    ) -> None:
        self.parent = parent
        self.run = run
        self.blocks = blocks
        self.tokens = tokens
        self.sightings = 0
        self.seen = -math.inf
        self.until = -math.inf
        self.children: dict[BlockKey, _Prefix] = {}


class _Contained(NamedTuple):
    """A prefix that holds blocks of a context only.

    Attributes:
        node: The node in whose run it ends.
        blocks: Its blocks.
        tokens: Its tokens.
        read: How many of these can be read.
    """

    node: _Prefix
    blocks: int
    tokens: int
    read: int

    def path(self) -> tuple[BlockKey, ...]:
        """Return its blocks."""
        return _path_to(self.node)[: self.blocks]


class Beginning(NamedTuple):
    """How an arriving context may begin.

    Attributes:
        path: Blocks.
        gain: What the path is expected to save, in tokens.
    """

    path: tuple[BlockKey, ...]
    gain: float


class _Place(NamedTuple):
    """A prefix of what is sent: how often it came before while it would have lived."""

    blocks: int
    tokens: int
    sightings: int


class Marked(NamedTuple):
    """What a prompt marks.

    Attributes:
        marks: The blocks before each mark, ascending.
        read: Tokens that are read.
        written: Tokens behind these that are written.
    """

    marks: tuple[int, ...]
    read: int
    written: int


class WrittenPrefixes:
    """The prefixes that a tenant has sent and written, by what the prompts begin with.

    Args:
        prices: The cache's prices.

    Attributes:
        block_count: How many blocks its nodes hold together.
    """

    def __init__(self, prices: MarkPrices) -> None:
        self._prices = prices
        self._roots: dict[Hashable, _Prefix] = {}
        self._leaves: OrderedDict[_Prefix, Hashable] = OrderedDict()  # least recently used first
        self._again = _Again()
        self._saved = 0.0
        self.block_count = 0

    def written_path(
        self, root: Hashable, context: Mapping[BlockKey, int], now: float | None
    ) -> tuple[BlockKey, ...]:
        """Return the longest path of a context that can be read.

        Args:
            root: What stands for all that comes before the blocks.
            context: Block -> weight.
            now: Seconds; None if nothing is known of the time.
        """
        best: _Contained | None = None
        for one in self._contained(root, context, now):
            if one.read == one.tokens and (best is None or one.read > best.read):
                best = one
        return () if best is None else best.path()

    def beginning(
        self, root: Hashable, context: Mapping[BlockKey, int], now: float | None
    ) -> Beginning:
        """Return the path, of those that came before, that gains most: read, or written now.

        What is shorter than the shortest prefix gains nothing.

        Args:
            root: As in `written_path`.
            context: As in `written_path`.
            now: As in `written_path`.
        """
        best, most, gain = None, 0.0, 0.0
        prices = self._prices
        for one in self._contained(root, context, now):
            node, tokens = one.node, one.tokens
            if tokens < prices.minimum:
                continue
            value = prices.saving * one.read
            if self._lives(node.seen + (prices.lifetime or math.inf), now):
                again = self._again.probability(node.sightings + 1, one.blocks)
                value += max(0.0, (tokens - one.read) * prices.gain(again))
            if value + _A_TOKEN_SEEN * tokens > most:
                best, most, gain = one, value + _A_TOKEN_SEEN * tokens, value
        return Beginning((), 0.0) if best is None else Beginning(best.path(), gain)

    def marked(
        self,
        root: Hashable,
        system_tokens: int,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        now: float | None,
    ) -> Marked:
        """Return the marks of a prompt that is about to be sent.

        Args:
            root: As in `written_path`.
            system_tokens: The tokens of what `root` stands for.
            path: Its blocks, in order.
            weights: Their tokens.
            now: As in `written_path`.
        """
        prices = self._prices
        places, read, read_blocks = self._places(root, system_tokens, path, weights, now)
        open_ = prices.marks - (read > 0)
        behind = []
        for place in places:
            if place.tokens > read and place.tokens >= prices.minimum:
                again = self._again.probability(place.sightings + 1, place.blocks)
                cost = prices.premium * (place.tokens - read)
                if cost <= self._saved + _DEBT:
                    behind.append(Markable(place.blocks, place.tokens, again))
        marks = marks_of_arrival(behind, read, open_, prices)
        written = 0
        if marks:
            written = next(one.tokens for one in behind if one.blocks == marks[-1]) - read
        return Marked(((read_blocks,) if read else ()) + marks, read, written)

    def note(
        self,
        root: Hashable,
        system_tokens: int,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        marks: Sequence[int],
        now: float | None,
        *,
        learns: bool = True,
    ) -> None:
        """Record that a prompt was sent with marks.

        Args:
            root: As in `marked`.
            system_tokens: As in `marked`.
            path: As in `marked`.
            weights: As in `marked`.
            marks: The blocks before each mark, ascending.
            now: As in `marked`.
            learns: Whether it counts for how likely prefixes come again.
        """
        prices, lifetime = self._prices, self._prices.lifetime
        places, read, read_blocks = self._places(root, system_tokens, path, weights, now)
        if read_blocks not in marks:
            read = 0
        if learns:
            for place in places:
                if place.sightings:
                    self._again.note(place.sightings, place.blocks, came_again=True)
                self._again.note(place.sightings + 1, place.blocks, came_again=False)
        until = math.inf if now is None or lifetime is None else now + lifetime
        seen = math.inf if now is None else now
        wanted = sorted({*marks, len(path)})
        node = self._root_for(root, system_tokens)
        deepest = read
        ends = [(0, node)]
        done = 0
        for end in wanted:
            while done < end:
                node, added = self._step(node, path, weights, done, end)
                done += added
                ends.append((done, node))
        for blocks, node in ends:
            if not self._lives(node.seen + (lifetime or math.inf), now):
                node.sightings = 0
            node.sightings += 1
            node.seen = seen
            if blocks in marks:
                if read and blocks == read_blocks:
                    node.until = max(node.until, until)
                elif node.tokens > read and node.tokens >= prices.minimum:
                    node.until = max(node.until, until)
                    deepest = max(deepest, node.tokens)
        if self._saved < 0:
            self._saved *= _FORGETTING
        self._saved += prices.saving * read - prices.premium * (deepest - read)
        if not node.children:
            self._leaves[node] = root
            self._leaves.move_to_end(node)

    def readable(self, root: Hashable, path: Sequence[BlockKey], now: float | None) -> int:
        """Return how many of a path's first blocks end the longest prefix that can be read.

        Args:
            root: As in `written_path`.
            path: Blocks, in order.
            now: As in `written_path`.

        Returns:
            From 0, which is what `root` stands for; -1 if nothing can be read.
        """
        node = self._roots.get(root)
        blocks = -1
        while node is not None:
            if tuple(path[node.blocks - len(node.run) : node.blocks]) != node.run:
                break
            if self._lives(node.until, now):
                blocks = node.blocks
            node = node.children.get(path[node.blocks]) if node.blocks < len(path) else None
        return blocks

    def read(
        self, root: Hashable, path: Sequence[BlockKey], marks: Sequence[int], now: float | None
    ) -> int:
        """Return how many of a path's first blocks end what a prompt with these marks reads.

        Args:
            root: As in `readable`.
            path: As in `readable`.
            marks: The blocks before each mark, ascending.
            now: As in `readable`.

        Returns:
            As `readable`.
        """
        blocks = self.readable(root, path, now)
        for mark in reversed(marks):
            if mark == blocks or (mark < blocks and self.readable(root, path[:mark], now) == mark):
                return mark
        return -1

    def forget_oldest(self) -> None:
        """Forget the leaf that was used least recently, if there is one."""
        if not self._leaves:
            return
        node, root = self._leaves.popitem(last=False)
        self.block_count -= len(node.run)
        parent = node.parent
        if parent is None:
            del self._roots[root]
            return
        del parent.children[node.run[0]]
        if not parent.children:
            self._leaves[parent] = root
            self._leaves.move_to_end(parent, last=False)

    def _root_for(self, root: Hashable, system_tokens: int) -> _Prefix:
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = _Prefix(None, (), 0, system_tokens)
        return node

    def _step(
        self, node: _Prefix, path: Sequence[BlockKey], weights: Sequence[int], done: int, end: int
    ) -> tuple[_Prefix, int]:
        """Return the next node on a path, and its blocks; it is cut or made if need be."""
        child = node.children.get(path[done])
        if child is None:
            run = tuple(path[done:end])
            child = _Prefix(node, run, done + len(run), node.tokens + sum(weights[done:end]))
            self._leaves.pop(node, None)
            node.children[run[0]] = child
            self.block_count += len(run)
            return child, len(run)
        common = 0
        for key in child.run:
            if done + common == end or path[done + common] != key:
                break
            common += 1
        if common < len(child.run):
            top = _Prefix(
                node,
                child.run[:common],
                done + common,
                node.tokens + sum(weights[done : done + common]),
            )
            top.sightings, top.seen = child.sightings, child.seen
            top.children[child.run[common]] = child
            node.children[child.run[0]] = top
            child.parent, child.run = top, child.run[common:]
            child = top
        return child, common

    def _contained(
        self, root: Hashable, context: Mapping[BlockKey, int], now: float | None
    ) -> Iterator[_Contained]:
        """Yield the prefixes that hold blocks of a context only, the longest of each run.

        The work is bounded: from the 256th node on, only the longest is followed.
        """
        top = self._roots.get(root)
        if top is None:
            return
        visits, steps = 0, _STEPS
        stack = [_Contained(top, 0, top.tokens, 0)]
        while stack:
            one = stack.pop()
            node, read = one.node, one.read
            is_whole = one.blocks == node.blocks
            if is_whole and self._lives(node.until, now):
                read = node.tokens
            yield one._replace(read=read)
            visits += 1
            if not is_whole:
                continue
            children = node.children
            steps -= min(len(children), len(context))
            if len(children) > len(context):
                found = [children[key] for key in context if key in children]
            else:
                found = [child for key, child in children.items() if key in context]
            following = []
            for child in found:
                blocks, tokens = node.blocks, node.tokens
                for key in child.run:
                    if key not in context:
                        break
                    blocks += 1
                    tokens += context[key]
                steps -= blocks - node.blocks
                following.append(_Contained(child, blocks, tokens, read))
            if steps < 0:
                return
            if visits > _VISITS:
                following = sorted(following, key=attrgetter("tokens"))[-1:]
                stack.clear()
            stack += following

    def _places(
        self,
        root: Hashable,
        system_tokens: int,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        now: float | None,
    ) -> tuple[list[_Place], int, int]:
        """Return where a path may be marked; and the tokens and blocks of it that can be read.

        Of places that are equally likely to come again only the last is one.
        """
        lifetime = self._prices.lifetime or math.inf
        places: list[_Place] = []
        read = read_blocks = done = 0
        node = self._roots.get(root)
        sightings = 0
        if node is not None:
            system_tokens = node.tokens  # as counted at first: estimates are learnt meanwhile
            if self._lives(node.until, now):
                read = node.tokens
            if self._lives(node.seen + lifetime, now):
                sightings = node.sightings
        tokens = [system_tokens]
        for weight in weights:
            tokens.append(tokens[-1] + weight)
        places.append(_Place(0, system_tokens, sightings))
        while done < len(path):
            child = None if node is None else node.children.get(path[done])
            common, sightings, run = len(path) - done, 0, child.run if child else ()
            if child is not None:
                common = 0
                for key in run:
                    if done + common == len(path) or path[done + common] != key:
                        break
                    common += 1
                if self._lives(child.seen + lifetime, now):
                    sightings = child.sightings
            before = done
            done += common
            places += [
                _Place(blocks, tokens[blocks], sightings)
                for blocks in range(before + 1, done + 1)
                if blocks == done or _length_class(blocks) != _length_class(blocks + 1)
            ]
            if child is not None and common == len(run):
                if self._lives(child.until, now):
                    read, read_blocks = child.tokens, child.blocks
                node = child
            else:
                node = None
        return places, read, read_blocks

    @staticmethod
    def _lives(until: float, now: float | None) -> bool:
        """Return whether something that ends at a time has not ended yet."""
        return until > (-math.inf if now is None else now)


def _path_to(node: _Prefix) -> tuple[BlockKey, ...]:
    runs = []
    above: _Prefix | None = node
    while above is not None:
        runs.append(above.run)
        above = above.parent
    return tuple(key for run in reversed(runs) for key in run)
