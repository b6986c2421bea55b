"""A simulator of hosted caches that keep a prefix only up to the marks that a prompt carries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import NamedTuple

from ctxreuse.context.blocks import encoded
from ctxreuse.context.checks import (
    checked_each,
    checked_integer,
    checked_kind,
    checked_number,
)
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_profile import CacheProfile, TimeToLive


class PromptPiece(NamedTuple):
    """A content part of a prompt, as a cache sees it.

    Attributes:
        content: What stands there; equal texts are equal content.
        tokens: Its length in tokens.
        is_marked: Whether the prefix that ends with it is to be kept.
        life: The name of the time to live of what is written here; None is the profile's own.
    """

    content: str
    tokens: int
    is_marked: bool = False
    life: str | None = None


def checked_pieces(pieces: Iterable[PromptPiece], key: str) -> list[PromptPiece]:
    """Return the content parts of a prompt as a list."""
    checked_kind("key", key, str, "a string")
    prompt = checked_each("pieces", pieces, PromptPiece, "a PromptPiece")
    for one in prompt:
        checked_kind("a piece's content", one.content, str, "a string")
        checked_integer("a piece's tokens", one.tokens)
        checked_kind("a piece's life", one.life, (str, NoneType), "the name of one, or None")
    return prompt


class BreakpointCache:
    """What a hosted cache with marks serves and charges.

    The prefix that ends with a marked part is written, if it is long enough; the longest living
    prefix that ends at a mark, or as far before it as the provider looks back, is read. Of too many
    marks the latest count. Requests with different keys share nothing.

    Args:
        profile: The rules; one with marks.
        marks_end: Whether the provider itself marks the end of each prompt, as one of the marks.

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

        self._unread = UnreadWrites()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def never_read(self) -> int:
        """Tokens that were written and that no later prompt has read so far."""
        return self._unread.tokens

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
        prompt = checked_pieces(pieces, key)
        self._sweep(now)
        prefixes, ends = prefixes_of(prompt, key)
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
            self._unread.read(prefixes[1 : hit + 1])
        reached, written = ends[hit], dict[str, int]()
        for mark in kept:
            if ends[mark] < profile.least_tokens:
                continue
            life = self._life(prompt[mark - 1])
            self._entries[prefixes[mark]] = _Entry(life, _end(now, life))
            if ends[mark] > reached:
                written[life.name] = written.get(life.name, 0) + ends[mark] - reached
                self._unread.wrote(prefixes[mark], ends[mark] - reached)
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
        self._unread.forget(name for name, one in self._entries.items() if not one.lives(now))
        self._entries = {name: one for name, one in self._entries.items() if one.lives(now)}


@dataclass(slots=True)
class _Entry:
    """A prefix that is kept."""

    life: TimeToLive
    ends_at: float | None

    def lives(self, now: float) -> bool:
        return self.ends_at is None or now < self.ends_at


class UnreadWrites:
    """Counts what was written and never read."""

    def __init__(self) -> None:
        self.tokens = 0
        self._of: dict[bytes, int] = {}

    def wrote(self, prefix: bytes, tokens: int) -> None:
        """Count tokens that end a prefix; what was written there before is never read any more."""
        self._of[prefix] = tokens
        self.tokens += tokens

    def read(self, prefixes: Iterable[bytes]) -> None:
        """Take note that a prompt has read what ends these prefixes."""
        for prefix in prefixes:
            self.tokens -= self._of.pop(prefix, 0)

    def forget(self, prefixes: Iterable[bytes]) -> None:
        """Take note that these prefixes can be read no more."""
        for prefix in prefixes:
            self._of.pop(prefix, None)


def _end(now: float, life: TimeToLive) -> float | None:
    return None if life.seconds is None else now + life.seconds


def prefixes_of(prompt: Sequence[PromptPiece], key: str) -> tuple[list[bytes], list[int]]:
    """Return a hash of each prefix, the empty one first, and where it ends in tokens."""
    whole = hashlib.blake2b(encoded(key), digest_size=16)
    hashes, ends = [whole.digest()], [0]
    for piece in prompt:
        content = encoded(piece.content)
        whole.update(len(content).to_bytes(8, "big") + content)
        hashes.append(whole.digest())
        ends.append(ends[-1] + piece.tokens)
    return hashes, ends
