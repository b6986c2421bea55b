"""What the usage of an answer says, in the words of any provider, with each token counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ctxreuse.context.checks import reported_count

_LIFE_FIELDS = {"ephemeral_5m_input_tokens": "5m", "ephemeral_1h_input_tokens": "1h"}
_READ = (
    "cached_tokens",  # OpenAI, vLLM, SGLang, LiteLLM: in details, as the next one
    "cache_read",  # LangChain
    "cache_read_input_tokens",  # Anthropic; LiteLLM, too
    "cacheReadInputTokens",  # Bedrock
    "prompt_cache_hit_tokens",  # DeepSeek
    "cached_content_token_count",  # Gemini, and over REST
    "cachedContentTokenCount",
)
_WRITTEN = (
    "cache_write_tokens",
    "created_cache_tokens",
    "cache_creation",  # LangChain; Anthropic's object of this name is no count
    "cache_creation_tokens",
    "cache_creation_input_tokens",
    "cacheWriteInputTokens",
)


class _Form(NamedTuple):
    """How a provider names tokens; those read count in `prompt`, unless one of `parts` is told."""

    prompt: str
    completion: str
    details: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


_FORMS = (
    _Form("prompt_tokens", "completion_tokens", ("prompt_tokens_details",)),
    _Form("prompt_token_count", "candidates_token_count"),
    _Form("promptTokenCount", "candidatesTokenCount"),
    _Form("inputTokens", "outputTokens", parts=("cacheReadInputTokens", "cacheWriteInputTokens")),
    _Form(
        "input_tokens",
        "output_tokens",
        ("input_tokens_details", "input_token_details"),
        ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation"),
    ),
)
_USAGE = ("usage", "usage_metadata", "usageMetadata")


class ReportedTokens(NamedTuple):
    """What an engine reports of an answer; None is unknown."""

    prompt_tokens: int | None  # read and written ones included
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    written_tokens: Mapping[str, int] | None = None  # by time to live; "" where that is not said

    def with_more(self, other: ReportedTokens, *, adds_up: bool) -> ReportedTokens:
        """Return what two parts of an answer say, each of itself alone or of all so far."""
        join = sum if adds_up else max
        written = [one for one in (self.written_tokens, other.written_tokens) if one is not None]
        if adds_up and written:
            lives = dict.fromkeys(life for one in written for life in one)
            written = [{life: sum(one.get(life, 0) for one in written) for life in lives}]
        return ReportedTokens(
            _of_both(self.prompt_tokens, other.prompt_tokens, join),
            _of_both(self.cached_tokens, other.cached_tokens, join),
            _of_both(self.completion_tokens, other.completion_tokens, join),
            max(written, key=lambda told: sum(told.values()), default=None),
        )


def usage_in(answer: object) -> ReportedTokens | None:
    """Return what the usage in a provider's answer says; None if there is none."""
    told = (usage_of(reported_field(answer, name)) for name in _USAGE)
    return next((one for one in told if one is not None), None)


def usage_of(usage: object) -> ReportedTokens | None:
    """Return what an answer's usage says; None if it says nothing of the prompt."""
    for form in _FORMS:
        prompt = _first((usage,), form.prompt)
        if prompt is not None:
            return _in_form(usage, form, prompt)
    return None


def _in_form(usage: object, form: _Form, prompt: int) -> ReportedTokens:
    inside = [reported_field(usage, name) for name in form.details]
    places = [one for one in (*inside, usage) if one is not None]
    read = _first(places, *_READ)
    of_lives = reported_field(usage, "cache_creation")
    lives = [one for one in (of_lives, *inside) if one is not None]
    written = written_by_life(_first(places, *_WRITTEN), *lives)
    if any(reported_field(usage, name) is not None for name in form.parts):
        prompt += (read or 0) + sum((written or {}).values())
    return ReportedTokens(prompt, read, _first((usage,), form.completion), written)


def written_by_life(total: int | None, *of_lives: object) -> dict[str, int] | None:
    """Return written tokens by time to live, "" for those of none; None if nothing is told."""
    by_life = {
        life: count
        for name, life in _LIFE_FIELDS.items()
        if (count := _first(of_lives, name)) is not None
    }
    if total is None and not by_life:
        return None
    written = {**by_life, "": max(0, (total or 0) - sum(by_life.values()))}
    return {life: tokens for life, tokens in written.items() if tokens}


def _first(places: Iterable[object], *names: str) -> int | None:
    for place in places:
        for name in names:
            count = reported_count(reported_field(place, name))
            if count is not None:
                return count
    return None


def _of_both(
    one: int | None, other: int | None, joined: Callable[[tuple[int, int]], int]
) -> int | None:
    return other if one is None else one if other is None else joined((one, other))


def reported_field(value: Any, name: str) -> Any:
    """Return a field of what is an object in one library, and a dict in another; None is none."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
