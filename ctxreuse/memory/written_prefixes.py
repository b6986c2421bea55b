"""What a tenant has written into a cache with marks, and what it is likely to ask for again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.memory.write_ledger import WriteLedger
from ctxreuse.rules.marks import Markable, MarkPrices, marks_of_arrival

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
_LATEST = 256
"""So many prompts with marks, the latest, can be taken back."""
_CLOCKS_APART = 30.0
"""Seconds that the clocks of processes that share what they have sent may be apart."""


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
    """A node: a run of blocks, all of which came equally often."""

    __slots__ = (
        *("blocks", "children", "could_until", "parent", "run", "seen", "sightings"),
        *("tokens", "until"),
    )

    def __init__(
        self, parent: _Prefix | None, run: tuple[BlockKey, ...], blocks: int, tokens: int
    ) -> None:
        self.parent = parent
        self.run = run
        self.blocks = blocks
        self.tokens = tokens
        self.sightings = 0
        self.seen = -math.inf
        self.until = self.could_until = -math.inf
        self.children: dict[BlockKey, _Prefix] = {}


class _Contained(NamedTuple):
    """A prefix that holds blocks of a context only."""

    node: _Prefix
    blocks: int
    tokens: int
    read: int
    could: int

    def path(self) -> tuple[BlockKey, ...]:
        """Return its blocks."""
        return _path_to(self.node)[: self.blocks]


class Beginning(NamedTuple):
    """How an arriving context may begin."""

    path: tuple[BlockKey, ...]
    gain: float


class _SeenPrefix(NamedTuple):
    """A prefix of what is sent: how often it came before while it would have lived."""

    blocks: int
    tokens: int
    sightings: int


class _End(NamedTuple):
    """Where a prefix ends."""

    blocks: int
    tokens: int


class _Looked(NamedTuple):
    """What is known of a path."""

    places: list[_SeenPrefix]
    read: _End
    could: _End

    @property
    def tokens(self) -> int:
        """All its tokens."""
        return self.places[-1].tokens


@dataclass(slots=True)
class _Touched:
    """A node that a prompt has written or read, and until when it lived before."""

    node: _Prefix
    until: float


class Marked(NamedTuple):
    """What a prompt marks."""

    marks: tuple[int, ...]
    read: int
    written: int


class WrittenPrefixes:
    """The prefixes that a tenant has sent and written, by what the prompts begin with."""

    def __init__(self, prices: MarkPrices) -> None:
        self._prices = prices
        self.saving = prices.saving
        self._roots: dict[Hashable, _Prefix] = {}
        self._leaves: OrderedDict[_Prefix, Hashable] = OrderedDict()  # least recently used first
        self._again = _Again()
        self._ledger = WriteLedger(prices.premium, prices.saving)
        self._latest: OrderedDict[Hashable, list[_Touched]] = OrderedDict()
        self.block_count = 0

    def written_path(
        self,
        root: Hashable,
        context: Mapping[BlockKey, int],
        now: float | None,
        first: BlockKey | None = None,
    ) -> tuple[BlockKey, ...]:
        """Return the longest path of a context that can be read."""
        best: _Contained | None = None
        for one in self._contained(root, context, now, first):
            if one.read == one.tokens and (best is None or one.read > best.read):
                best = one
        return () if best is None else best.path()

    def beginning(
        self,
        root: Hashable,
        context: Mapping[BlockKey, int],
        now: float | None,
        first: BlockKey | None = None,
    ) -> Beginning:
        """Return the path, of those that came before, that gains most: read, or written now."""
        best, most, gain = None, 0.0, 0.0
        prices = self._prices
        for one in self._contained(root, context, now, first):
            node, tokens = one.node, one.tokens
            if tokens < prices.minimum:
                continue
            # as if nothing limited writing: that orders what will be written once it may be
            could = max(one.read, one.could)
            value = prices.saving * could
            if self._lives(node.seen + (prices.lifetime or math.inf), now):
                again = self._again.probability(node.sightings + 1, one.blocks)
                value += max(0.0, (tokens - could) * prices.gain(again))
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
        """Return the marks of a prompt that is about to be sent."""
        looked = self._look(root, system_tokens, path, weights, now)
        return self._marked(looked.places, looked.read, self._ledger.most(looked.tokens))

    def _marked(self, places: Sequence[_SeenPrefix], read: _End, most: float) -> Marked:
        """Return the marks of a prompt."""
        prices, behind = self._prices, []
        for place in places:
            if read.tokens < place.tokens <= read.tokens + most and place.tokens >= prices.minimum:
                again = self._again.probability(place.sightings + 1, place.blocks)
                behind.append(Markable(place.blocks, place.tokens, again))
        open_ = prices.marks - (read.tokens > 0)
        marks = marks_of_arrival(behind, read.tokens, open_, prices)
        written = 0
        if marks:
            written = next(one.tokens for one in behind if one.blocks == marks[-1]) - read.tokens
        return Marked((read.blocks,) * (read.tokens > 0) + marks, read.tokens, written)

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
        name: Hashable = None,
    ) -> None:
        """Record that a prompt was sent with marks."""
        minimum, lifetime = self._prices.minimum, self._prices.lifetime
        looked = self._look(root, system_tokens, path, weights, now)
        read = looked.read if looked.read.blocks in marks else _End(0, 0)
        could = tuple(marks)  # a batch knows what is read again: nothing limits it
        if learns:
            unlimited = self._marked(looked.places, looked.could, math.inf)
            self._ledger.note_unlimited(unlimited.read, unlimited.written)
            could = unlimited.marks
            for place in looked.places:
                if place.sightings:
                    self._again.note(place.sightings, place.blocks, came_again=True)
                self._again.note(place.sightings + 1, place.blocks, came_again=False)
        until = math.inf if now is None or lifetime is None else now + lifetime
        seen = math.inf if now is None else now
        node = self._root_for(root, system_tokens)
        deepest = read.tokens
        kept: list[_Touched] = []
        ends = [(0, node)]
        done = 0
        for end in sorted({*marks, *could, len(path)}):
            while done < end:
                node, added = self._step(node, path, weights, done, end)
                done += added
                ends.append((done, node))
        for blocks, node in ends:
            if not self._lives(node.seen + (lifetime or math.inf), now):
                node.sightings = 0
            node.sightings += 1
            node.seen = seen
            if blocks in could and node.tokens >= minimum:
                node.could_until = max(node.could_until, until)
            if blocks in marks and node.tokens >= max(read.tokens, minimum):
                kept.append(_Touched(node, node.until))
                node.until = max(node.until, until)
                deepest = max(deepest, node.tokens)
        if kept and name is not None:
            self._note_latest(name, kept)
        self._ledger.note(looked.tokens, read.tokens, deepest - read.tokens)
        if not node.children:
            self._leaves[node] = root
            self._leaves.move_to_end(node)

    def _note_latest(self, name: Hashable, kept: list[_Touched]) -> None:
        self.block_count += name not in self._latest
        self._latest[name] = kept
        self._latest.move_to_end(name)
        if len(self._latest) > _LATEST:
            self._forget_latest()

    def _forget_latest(self) -> None:
        """Forget what the oldest of the prompts has kept that can be taken back."""
        self._latest.popitem(last=False)
        self.block_count -= 1

    def take_back(self, name: Hashable, blocks: int = -1) -> None:
        """Expect nothing of what a prompt has written: not sent, or lost by the cache."""
        kept = self._latest.get(name)
        if kept is None:
            return
        names = list(self._latest)
        later = [self._latest[one] for one in names[names.index(name) + 1 :]]
        for one in kept:
            if one.node.blocks > blocks:
                node = one.node
                following = next((k for other in later for k in other if k.node is node), None)
                if following is None:
                    node.until = one.until
                else:  # it has written what it did not find
                    following.until = one.until
        left = [one for one in kept if one.node.blocks <= blocks]
        if left:
            self._latest[name] = left
        else:
            del self._latest[name]
            self.block_count -= 1

    def readable(self, root: Hashable, path: Sequence[BlockKey], now: float | None) -> int:
        """Return how many of a path's first blocks end the longest prefix that can be read."""
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
        """Return how many of a path's first blocks end what a prompt with these marks reads."""
        blocks = self.readable(root, path, now)
        for mark in reversed(marks):
            if mark == blocks or (mark < blocks and self.readable(root, path[:mark], now) == mark):
                return mark
        return -1

    def forget_oldest(self) -> None:
        """Forget the leaf that was used least recently, if there is one."""
        if self._latest:
            self._forget_latest()
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
        self,
        root: Hashable,
        context: Mapping[BlockKey, int],
        now: float | None,
        first: BlockKey | None,
    ) -> Iterator[_Contained]:
        """Yield the prefixes that hold blocks of a context only, the longest of each run."""
        top = self._roots.get(root)
        if top is None:
            return
        visits, steps = 0, _STEPS
        stack = [_Contained(top, 0, top.tokens, 0, 0)]
        while stack:
            one = stack.pop()
            node, read, could = one.node, one.read, one.could
            is_whole = one.blocks == node.blocks
            if is_whole and self._lives(node.until, now):
                read = node.tokens
            if is_whole and self._lives(node.could_until, now):
                could = node.tokens
            yield one._replace(read=read, could=could)
            visits += 1
            if not is_whole:
                continue
            children = node.children
            steps -= min(len(children), len(context))
            if len(children) > len(context):
                found = [children[key] for key in context if key in children]
            else:
                found = [child for key, child in children.items() if key in context]
            if first is not None and node is top:
                found = [child for child in found if child.run[0] == first]
            following = []
            for child in found:
                blocks, tokens = node.blocks, node.tokens
                for key in child.run:
                    if key not in context:
                        break
                    blocks += 1
                    tokens += context[key]
                steps -= blocks - node.blocks
                following.append(_Contained(child, blocks, tokens, read, could))
            if steps < 0:
                return
            if visits > _VISITS:
                following = sorted(following, key=attrgetter("tokens"))[-1:]
                stack.clear()
            stack += following

    def _look(
        self,
        root: Hashable,
        system_tokens: int,
        path: Sequence[BlockKey],
        weights: Sequence[int],
        now: float | None,
    ) -> _Looked:
        """Return what is known of a path."""
        lifetime = self._prices.lifetime or math.inf
        places: list[_SeenPrefix] = []
        read = could = _End(0, 0)
        done = sightings = 0
        node = self._roots.get(root)
        if node is not None:
            system_tokens = node.tokens  # as counted at first: estimates are learnt meanwhile
            read, could = self._ends(node, read, could, now)
            if self._lives(node.seen + lifetime, now):
                sightings = node.sightings
        tokens = [system_tokens]
        for weight in weights:
            tokens.append(tokens[-1] + weight)
        places.append(_SeenPrefix(0, system_tokens, sightings))
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
                _SeenPrefix(blocks, tokens[blocks], sightings)
                for blocks in range(before + 1, done + 1)
                if blocks == done or _length_class(blocks) != _length_class(blocks + 1)
            ]
            if child is not None and common == len(run):
                read, could = self._ends(child, read, could, now)
                node = child
            else:
                node = None
        return _Looked(places, read, could)

    def _ends(self, node: _Prefix, read: _End, could: _End, now: float | None) -> tuple[_End, _End]:
        """Return the ends of what can and of what could be read, once a node is passed."""
        end = _End(node.blocks, node.tokens)
        lives = self._lives(node.until, now), self._lives(node.could_until, now)
        return end if lives[0] else read, end if lives[1] else could

    def _lives(self, until: float, now: float | None) -> bool:
        """Return whether something that ends at a time has not ended yet."""
        if now is None:
            return until > -math.inf
        lifetime = self._prices.lifetime
        if lifetime is None or until == math.inf:
            return until > now
        return now < until <= now + lifetime + _CLOCKS_APART


def _path_to(node: _Prefix) -> tuple[BlockKey, ...]:
    runs = []
    above: _Prefix | None = node
    while above is not None:
        runs.append(above.run)
        above = above.parent
    return tuple(key for run in reversed(runs) for key in run)
