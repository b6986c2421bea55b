"""What the usage of an answer says, in the words of any provider, with each token counted once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ctxreuse.context.checks import reported_count

_LIFE_FIELDS = {"ephemeral_5m_input_tokens": "5m", "ephemeral_1h_input_tokens": "1h"}
_ANTHROPIC = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation")


class ReportedTokens(NamedTuple):
    """What an engine reports of an answer; None is unknown."""

    prompt_tokens: int | None  # read and written ones included
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    written_tokens: Mapping[str, int] | None = None  # by time to live; "" where that is not said


def usage_of(usage: object) -> ReportedTokens | None:
    """Return what an answer's usage says; None if it says nothing of the prompt."""
    if usage is None:
        return None
    if any(reported_field(usage, name) is not None for name in _ANTHROPIC):
        return _of_anthropic(usage)
    prompt = _first(usage, "prompt_tokens", "input_tokens", "prompt_token_count")
    if prompt is None:
        return None
    details = reported_field(usage, "prompt_tokens_details")
    if details is None:
        details = reported_field(usage, "input_tokens_details")
    cached = _first(details, "cached_tokens")
    if cached is None:
        cached = _first(usage, "prompt_cache_hit_tokens", "cached_content_token_count")
    written = _first(details, "cache_write_tokens", "created_cache_tokens")
    return ReportedTokens(
        prompt,
        cached,
        _first(usage, "completion_tokens", "output_tokens", "candidates_token_count"),
        None if written is None else _without_zeros({"": written}),
    )


def written_by_life(total: object, of_lives: object) -> dict[str, int] | None:
    """Return written tokens by time to live, "" for those of none; None if nothing is told."""
    by_life = {
        life: count
        for name, life in _LIFE_FIELDS.items()
        if (count := reported_count(reported_field(of_lives, name))) is not None
    }
    whole = reported_count(total)
    if whole is None and not by_life:
        return None
    return _without_zeros({**by_life, "": max(0, (whole or 0) - sum(by_life.values()))})


def _of_anthropic(usage: object) -> ReportedTokens | None:
    uncached = _first(usage, "input_tokens")
    if uncached is None:
        return None
    read = _first(usage, "cache_read_input_tokens")
    created = reported_field(usage, "cache_creation_input_tokens")
    written = written_by_life(created, reported_field(usage, "cache_creation"))
    # elsewhere prompt tokens include those read and written; Anthropic's exclude both
    prompt = uncached + (read or 0) + sum((written or {}).values())
    return ReportedTokens(prompt, read, _first(usage, "output_tokens"), written)


def _first(value: object, *names: str) -> int | None:
    for name in names:
        count = reported_count(reported_field(value, name))
        if count is not None:
            return count
    return None


def reported_field(value: Any, name: str) -> Any:
    """Return a field of what is an object in one library, and a dict in another; None is none."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _without_zeros(written: Mapping[str, int]) -> dict[str, int]:
    return {life: tokens for life, tokens in written.items() if tokens}
