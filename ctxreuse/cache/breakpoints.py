"""A simulator of hosted caches that keep a prefix only up to the marks that a prompt carries.

A prompt is a list of content parts, some of them marked. What is written is the prefix that ends
with a marked part, if it is long enough; it lives for a time that begins anew whenever it is read
or written again. What is read is the longest living prefix that ends at a mark, or at one of the
parts before it as far as the provider looks back. All numbers come from a `CacheProfile`; time is
an argument.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ctxreuse.context.blocks import encoded
from ctxreuse.context.cache_profile import CacheProfile, TimeToLive
from ctxreuse.context.checks import checked_kind, checked_number
from ctxreuse.errors import InvalidRequestError, describe


class PromptPiece(NamedTuple):
    """A content part of a prompt, as a cache sees it.

    Attributes:
        content: What stands there; equal texts are equal content.
        tokens: Its length in tokens.
        is_marked: Whether the prefix that ends with it is to be kept.
        life: The time to live of what is written here, by its name; None is the profile's own.
    """

    content: str
    tokens: int
    is_marked: bool = False
    life: str | None = None


@dataclass(frozen=True, slots=True)
class BilledTokens:
    """The tokens of prompts by what is paid for them.

    Attributes:
        uncached: Neither read nor written.
        read: Read from the cache.
        written: Written into it, by time to live.

    Example:
        >>> both = BilledTokens(10, 90) + BilledTokens(0, 0, {"5m": 100})
        >>> both.prompt_tokens, both.written
        (200, {'5m': 100})
    """

    uncached: int = 0
    read: int = 0
    written: Mapping[str, int] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompts."""
        return self.uncached + self.read + self.written_tokens

    @property
    def written_tokens(self) -> int:
        """Tokens written, of all times to live."""
        return sum(self.written.values())

    def __add__(self, other: BilledTokens) -> BilledTokens:
        written = dict(self.written)
        for life, tokens in other.written.items():
            written[life] = written.get(life, 0) + tokens
        return BilledTokens(self.uncached + other.uncached, self.read + other.read, written)

    def bill(self, profile: CacheProfile) -> float:
        """Return what the prompts cost, in uncached tokens.

        Raises:
            InvalidRequestError: the profile has no such time to live.
        """
        factors = {one.name: one.write_factor for one in profile.times_to_live}
        if not factors.keys() >= self.written.keys():
            raise InvalidRequestError(
                f"{describe(profile.name)} has times to live {sorted(factors)}, and tokens were "
                f"written for {sorted(self.written)}; take the profile that they were written for"
            )
        paid = sum(factors[life] * tokens for life, tokens in self.written.items())
        return self.uncached + profile.read_factor * self.read + paid


class BreakpointCache:
    """What a hosted cache with marks serves and charges.

    Of more marks than a request may write, the latest count. Requests with different keys share
    nothing. Expired entries are dropped as time goes on.

    Args:
        profile: The rules; one with marks.
        marks_end: Whether the provider itself marks the end of each prompt, as today's defaults do;
            it counts as one of the marks.

    Raises:
        InvalidRequestError: wrong type, or a cache without marks.

    Example:
        >>> from ctxreuse import cache_profile
        >>> cache = BreakpointCache(cache_profile("anthropic"))
        >>> document = PromptPiece("document", 2_000, is_marked=True)
        >>> cache.serve([document, PromptPiece("Why?", 2)], now=0.0)
        BilledTokens(uncached=2, read=0, written={'5m': 2000})
        >>> cache.serve([document, PromptPiece("How?", 2)], now=299.0).read
        2000
    """

    def __init__(self, profile: CacheProfile, *, marks_end: bool = False) -> None:
        checked_kind("profile", profile, CacheProfile, "a CacheProfile")
        if not profile.has_marks:
            raise InvalidRequestError(
                f"the cache {describe(profile.name)} has no marks; PrefixCacheSimulator is for "
                "caches that keep each block"
            )
        self._profile = profile
        self._marks_end = checked_kind("marks_end", marks_end, bool, "True or False")
        self._lives = {one.name: one for one in profile.times_to_live}
        self._entries: dict[bytes, _Entry] = {}
        self._swept_at = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def serve(self, pieces: Iterable[PromptPiece], *, now: float, key: str = "") -> BilledTokens:
        """Run one prompt; what it writes can be read by the next one.

        Args:
            pieces: The prompt.
            now: Seconds, of any clock; not before those of an earlier call.
            key: The request's `prompt_cache_key`, or whatever routes it.

        Returns:
            Its tokens, by what is paid for them.

        Raises:
            InvalidRequestError: wrong type, or a time to live that the profile lacks.
        """
        checked_number("now", now)
        prompt = [checked_kind("a piece", one, PromptPiece, "a PromptPiece") for one in pieces]
        self._sweep(now)
        prefixes, ends = _prefixes(prompt, key)
        profile, marks = self._profile, [n for n, one in enumerate(prompt, 1) if one.is_marked]
        considered = marks if profile.marks_read is None else marks[-profile.marks_read :]
        kept = marks[-profile.marks :]
        if self._marks_end and prompt:
            considered = [*considered, len(prompt)]
            others = profile.marks - 1
            kept = [*(marks[-others:] if others else ()), len(prompt)]
        hit = self._longest_hit(prefixes, considered, now)
        if hit:
            entry = self._entries[prefixes[hit]]
            entry.ends_at = _end(now, entry.life)
        reached, written = ends[hit], dict[str, int]()
        for mark in kept:
            if ends[mark] < profile.least_tokens:
                continue
            life = self._life(prompt[mark - 1])
            self._entries[prefixes[mark]] = _Entry(life, _end(now, life))
            if ends[mark] > reached:
                written[life.name] = written.get(life.name, 0) + ends[mark] - reached
                reached = ends[mark]
        return BilledTokens(ends[-1] - reached, ends[hit], written)

    def _longest_hit(self, prefixes: Sequence[bytes], marks: Sequence[int], now: float) -> int:
        """Return how many pieces the longest prefix has that is read."""
        longest = 0
        for mark in marks:
            # the mark's own place is the first of those that are looked at
            for position in range(mark, max(longest, mark - max(1, self._profile.look_back)), -1):
                entry = self._entries.get(prefixes[position])
                if entry is not None and entry.lives(now):
                    longest = position
                    break
        return longest

    def _life(self, piece: PromptPiece) -> TimeToLive:
        life = self._profile.time_to_live.name if piece.life is None else piece.life
        if life not in self._lives:
            raise InvalidRequestError(
                f"{describe(self._profile.name)} has no time to live {describe(life)}; choose one "
                f"of {sorted(self._lives)}"
            )
        return self._lives[life]

    def _sweep(self, now: float) -> None:
        """Drop what has expired, once a time to live."""
        shortest = min((one.seconds for one in self._lives.values() if one.seconds), default=None)
        if shortest is None or now < self._swept_at + shortest:
            return
        self._swept_at = now
        self._entries = {name: one for name, one in self._entries.items() if one.lives(now)}


@dataclass(slots=True)
class _Entry:
    """A prefix that is kept."""

    life: TimeToLive
    ends_at: float | None

    def lives(self, now: float) -> bool:
        return self.ends_at is None or now < self.ends_at


def _end(now: float, life: TimeToLive) -> float | None:
    return None if life.seconds is None else now + life.seconds


def _prefixes(prompt: Sequence[PromptPiece], key: str) -> tuple[list[bytes], list[int]]:
    """Return a hash of each prefix, the empty one first, and where it ends in tokens."""
    whole = hashlib.blake2b(encoded(key), digest_size=16)
    hashes, ends = [whole.digest()], [0]
    for piece in prompt:
        content = encoded(piece.content)
        whole.update(len(content).to_bytes(8, "big") + content)
        hashes.append(whole.digest())
        ends.append(ends[-1] + piece.tokens)
    return hashes, ends
