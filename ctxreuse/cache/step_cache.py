"""A simulator of hosted caches that keep the beginning of each prompt without being asked."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ctxreuse.cache.breakpoints import PromptPiece, UnreadWrites, checked_pieces, prefixes_of
from ctxreuse.context.checks import checked_kind, checked_number
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_profile import CacheProfile


class StepCache:
    """What such a cache serves and charges; pieces are equal or share nothing.

    What a prompt has in common with an earlier one is read in steps, from a shortest length on,
    while it lives. Where writing costs no more than computing, nothing counts as written.

    Args:
        profile: The rules; one without marks.

    Raises:
        InvalidRequestError: wrong type, or a cache with marks.

    Example:
        >>> from ctxreuse import cache_profile
        >>> cache = StepCache(cache_profile("openai-before-5.6"))
        >>> document = PromptPiece("document", 2_000)
        >>> cache.serve([document, PromptPiece("Why?", 2)], now=0.0)
        BilledTokens(uncached=2002, read=0, written={})
        >>> cache.serve([document, PromptPiece("How?", 2)], now=299.0)
        BilledTokens(uncached=82, read=1920, written={})
    """

    def __init__(self, profile: CacheProfile) -> None:
        checked_kind("profile", profile, CacheProfile, "a CacheProfile")
        if profile.has_marks:
            raise InvalidRequestError(
                f"the cache {describe(profile.name)} keeps what is marked; take BreakpointCache"
            )
        self._profile = profile
        self._lives_until: dict[bytes, float] = {}
        self._swept_at = 0.0
        self._unread = UnreadWrites()

    def __len__(self) -> int:
        return len(self._lives_until)

    @property
    def never_read(self) -> int:
        """Tokens that were written, where that costs, and that no later prompt has read."""
        return self._unread.tokens

    def serve(self, pieces: Iterable[PromptPiece], *, now: float, key: str = "") -> BilledTokens:
        """Run one prompt; arguments, result and errors are those of `BreakpointCache.serve`."""
        checked_number("now", now)
        prompt = checked_pieces(pieces, key)
        self._sweep(now)
        prefixes, ends = prefixes_of(prompt, key)
        known = 0
        while known < len(prompt) and self._lives_until.get(prefixes[known + 1], -math.inf) > now:
            known += 1
        profile = self._profile
        read, kept = profile.readable(ends[known]), profile.readable(ends[-1])
        if kept:
            until = math.inf if profile.lifetime is None else now + profile.lifetime
            self._lives_until.update(dict.fromkeys(prefixes[1:], until))
        if read:
            self._unread.read(prefixes[1 : known + 1])
        written: dict[str, int] = {}
        if profile.write_factor != 1 and kept > read:
            written[profile.time_to_live.name] = kept - read
            reached = read
            for prefix, end in zip(prefixes[known + 1 :], ends[known + 1 :], strict=True):
                if min(end, kept) > reached:
                    self._unread.wrote(prefix, min(end, kept) - reached)
                    reached = min(end, kept)
        return BilledTokens(ends[-1] - read - sum(written.values()), read, written)

    def _sweep(self, now: float) -> None:
        """Drop what has expired, once a time to live."""
        if self._profile.lifetime is None or now < self._swept_at + self._profile.lifetime:
            return
        self._swept_at = now
        self._unread.forget(name for name, until in self._lives_until.items() if until <= now)
        self._lives_until = {n: until for n, until in self._lives_until.items() if until > now}
