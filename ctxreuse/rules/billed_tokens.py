"""The tokens of prompts by what is paid for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ctxreuse.context.checks import checked_kind
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.rules.cache_rules import CacheRules


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

    def bill(self, profile: CacheRules) -> float:
        """Return what the prompts cost, in uncached tokens.

        Raises:
            InvalidRequestError: wrong type, or the profile has no such time to live.
        """
        checked_kind("profile", profile, CacheRules, "CacheRules")
        factors = {one.name: one.write_factor for one in profile.times_to_live}
        if not factors.keys() >= self.written.keys():
            raise InvalidRequestError(
                f"{describe(profile.name)} has times to live {sorted(factors)}, and tokens were "
                f"written for {sorted(self.written)}; take the profile that they were written for"
            )
        paid = sum(factors[life] * tokens for life, tokens in self.written.items())
        return self.uncached + profile.read_factor * self.read + paid


def billed_if_sent(
    rules: CacheRules, front: int, tokens: Sequence[int], ends: Sequence[int], read: int
) -> BilledTokens:
    """Return what system text and blocks come to, kept after `ends` and read up to `read`."""
    sums = list(accumulate(tokens, initial=front))
    found = sums[read] if read >= 0 else 0
    kept = max((sums[end] for end in ends if sums[end] >= rules.least_tokens), default=0)
    written = {rules.time_to_live.name: kept - found} if kept > found else {}
    return BilledTokens(sums[-1] - max(found, kept), found, written)
