"""A simulator of hosted caches: with marks, or keeping the beginning of each prompt unasked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import NoneType
from typing import NamedTuple

from ctxreuse.context.blocks import encoded
from ctxreuse.context.checks import checked_each, checked_integer, checked_kind, checked_number
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.rules.answers import places
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import CacheRules, TimeToLive


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


class ProviderCache:
    """What a hosted cache serves and charges; pieces are equal or share nothing.

    The longest living prefix that the profile's rules look up is read. What is long enough is
    written: with marks, the prefix that ends with a marked part, and of too many marks the latest
    count; without marks, the whole prompt. There nothing counts as written where writing costs no
    more than computing. Requests with different keys share nothing. Where a provider itself marks
    the end of each prompt, mark its last piece.

    Args:
        profile: The rules.

    Attributes:
        never_read: Tokens that were written and that no later prompt has read so far.

    Example:
        >>> from ctxreuse import cache_profile
        >>> cache = ProviderCache(cache_profile("anthropic"))
        >>> document = PromptPiece("document", 2_000, is_marked=True)
        >>> cache.serve([document, PromptPiece("Why?", 2)], now=0.0)
        BilledTokens(uncached=2, read=0, written={'5m': 2000})
        >>> cache.serve([document, PromptPiece("How?", 2)], now=299.0).read
        2000
    """

    def __init__(self, profile: CacheRules) -> None:
        self._profile = checked_kind("profile", profile, CacheRules, "CacheRules")
        self._lives = {one.name: one for one in profile.times_to_live}
        self._entries: dict[bytes, _Entry] = {}
        self._swept_at = 0.0
        self.never_read = 0

    def __len__(self) -> int:
        return len(self._entries)

    def serve(self, pieces: Iterable[PromptPiece], *, now: float, key: str = "") -> BilledTokens:
        """Run one prompt; what it writes can be read by the next one.

        Args:
            pieces: The prompt.
            now: Seconds, of any clock; not before those of an earlier call.
            key: The request's `prompt_cache_key`, or whatever routes it.

        Raises:
            InvalidRequestError: a time to live that the profile lacks.
        """
        checked_number("now", now)
        checked_kind("key", key, str, "a string")
        prompt = checked_each("pieces", pieces, PromptPiece, "a PromptPiece")
        for one in prompt:
            checked_kind("a piece's content", one.content, str, "a string")
            checked_integer("a piece's tokens", one.tokens)
            checked_kind("a piece's life", one.life, (str, NoneType), "the name of one, or None")
        self._sweep(now)
        prefixes, ends = _prefixes_of(prompt, key)
        profile, marks = self._profile, [n for n, one in enumerate(prompt, 1) if one.is_marked]
        known = [self._entries.get(prefix) for prefix in prefixes]
        met = max((n for n, one in enumerate(known) if one is not None), default=0)
        ranges, kept_at = places(profile, marks, len(prompt), met)
        looked_up = chain.from_iterable(ranges)
        hit = max((n for n in looked_up if (kept := known[n]) and kept.ends_at > now), default=0)
        for entry in filter(None, known[1 : hit + 1]):
            self.never_read -= entry.unread
            entry.unread = 0
        if last := known[hit]:
            last.ends_at = now + last.life_s
        reached = read = profile.readable(ends[hit])
        written: dict[str, int] = {}
        for place in kept_at:
            if ends[place] < profile.least_tokens:
                continue
            life, end = self._life(prompt[place - 1]), profile.readable(ends[place])
            entry = self._entries.setdefault(prefixes[place], _Entry())
            entry.life_s = math.inf if life.seconds is None else life.seconds
            entry.ends_at = now + entry.life_s
            if end > reached and profile.counts_writes:
                entry.unread, reached = end - reached, end
                written[life.name] = written.get(life.name, 0) + entry.unread
                self.never_read += entry.unread
        if not profile.serves_all:
            for prefix in prefixes[1:]:  # met, if not kept
                self._entries.setdefault(prefix, _Entry())
        return BilledTokens(ends[-1] - reached, read, written)

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
        if shortest is not None and now >= self._swept_at + shortest:
            self._swept_at = now
            self._entries = {name: one for name, one in self._entries.items() if one.ends_at > now}


@dataclass(slots=True)
class _Entry:
    life_s: float = 0.0
    ends_at: float = 0.0
    unread: int = 0  # tokens that were written here and that nobody has read


def _prefixes_of(prompt: Sequence[PromptPiece], key: str) -> tuple[list[bytes], list[int]]:
    """Return a hash of each prefix, the empty one first, and where it ends in tokens."""
    whole = hashlib.blake2b(encoded(key), digest_size=16)
    hashes, ends = [whole.digest()], [0]
    for piece in prompt:
        content = encoded(piece.content)
        whole.update(len(content).to_bytes(8, "big") + content)
        hashes.append(whole.digest())
        ends.append(ends[-1] + piece.tokens)
    return hashes, ends
