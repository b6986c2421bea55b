"""What a cache served of some prompts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Prompt tokens, and how many of them came from the prefix cache.

    Attributes:
        prompt_tokens: Tokens of the prompts.
        cached_tokens: Those served from the cache; vLLM counts them as `prefix_cache_hits`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that the engine had to compute."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that came from the cache; 0 for no tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: CacheUsage) -> CacheUsage:
        return CacheUsage(
            self.prompt_tokens + other.prompt_tokens, self.cached_tokens + other.cached_tokens
        )

    def __sub__(self, earlier: CacheUsage) -> CacheUsage:
        """Return what came after an earlier reading of the same counters."""
        return CacheUsage(
            self.prompt_tokens - earlier.prompt_tokens, self.cached_tokens - earlier.cached_tokens
        )
