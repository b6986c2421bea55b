"""What an answer says of its tokens, each counted once, and of misses, in any provider's words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ctxreuse.context.checks import reported_count
from ctxreuse.context.tokens import well_formed

_LONGEST_TERM = 60
_LIFE_FIELDS = {"ephemeral_5m_input_tokens": "5m", "ephemeral_1h_input_tokens": "1h"}
_READ = (
    "cached_tokens",  # OpenAI, engines, LiteLLM: in details
    "cache_read_input_tokens",  # Anthropic; LiteLLM, too
    "cacheReadInputTokens",  # Bedrock
    "prompt_cache_hit_tokens",  # DeepSeek
    "cached_content_token_count",  # Gemini, and over REST
    "cachedContentTokenCount",
    "cache_read",  # LangChain
)
_WRITTEN = (
    "cache_write_tokens",
    "created_cache_tokens",
    "cache_creation_tokens",
    "cache_creation_input_tokens",
    "cacheWriteInputTokens",
    "cache_creation",  # LangChain; an object of Anthropic's is no count
)
_DETAILS = ("prompt_tokens_details", "input_tokens_details", "input_token_details")
_BESIDE = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation")
_NAMINGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("prompt_tokens", "completion_tokens", ()),
    ("prompt_token_count", "candidates_token_count", ()),
    ("promptTokenCount", "candidatesTokenCount", ()),
    ("inputTokens", "outputTokens", ("cacheReadInputTokens", "cacheWriteInputTokens")),
    ("input_tokens", "output_tokens", _BESIDE),
)
"""A prompt's tokens, its answer's, and what is told beside the prompt's."""
_USAGE = ("usage", "usage_metadata", "usageMetadata", "token_usage")


class ReportedTokens(NamedTuple):
    """What an engine reports of an answer; None is unknown."""

    prompt_tokens: int | None = None  # read and written ones included
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    written_tokens: Mapping[str, int] | None = None  # by time to live; "" where that is not said

    def with_more(self, other: ReportedTokens, *, adds_up: bool) -> ReportedTokens:
        """Return what two parts of an answer say, each of itself alone or of all so far."""
        # a part that tells the whole prompt again tells all so far, also where others add up
        is_again = 0 < (self.prompt_tokens or 0) <= (other.prompt_tokens or 0)
        join = sum if adds_up and not is_again else max
        own, more = self.written_tokens, other.written_tokens
        both = {**(own or {}), **(more or {})}
        if own and more:
            both = {life: join((own.get(life, 0), more.get(life, 0))) for life in both}
        return ReportedTokens(
            _of_both(self.prompt_tokens, other.prompt_tokens, join),
            _of_both(self.cached_tokens, other.cached_tokens, join),
            _of_both(self.completion_tokens, other.completion_tokens, join),
            None if own is more is None else both,
        )


def usage_in(answer: object) -> ReportedTokens | None:
    """Return what the usage in a provider's answer says; None if there is none."""
    for name in _USAGE:
        if (usage := reported_field(answer, name)) is not None:
            return usage_of(usage)
    return None


def usage_of(usage: object) -> ReportedTokens | None:
    """Return what an answer's usage says; None if it says nothing of the prompt."""
    places = (*(reported_field(usage, name) for name in _DETAILS), usage)
    for named, completion, beside in _NAMINGS:
        if (prompt := _first((usage,), named)) is None:
            continue
        read = _first(places, *_READ)
        places = (reported_field(usage, "cache_creation"), *places)
        total = _first(places, *_WRITTEN)
        written = {life: _first(places, name) or 0 for name, life in _LIFE_FIELDS.items()}
        written[""] = max(0, (total or 0) - sum(written.values()))
        if any(reported_field(usage, name) is not None for name in beside):
            prompt += (read or 0) + sum(written.values())
        known = {life: tokens for life, tokens in written.items() if tokens}
        is_told = known or total is not None
        return ReportedTokens(
            prompt, read, _first((usage,), completion), known if is_told else None
        )
    return None


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


class MissReason(StrEnum):
    """Why the beginning of a prompt was not read from a cache."""

    model = "model"
    key = "key"
    tools = "tools"
    system = "system"
    messages = "messages"
    compacted = "compacted"
    expired = "expired"
    below_minimum = "below the minimum"
    never_written = "never written"


_TERMS: Final[Mapping[str, tuple[MissReason, ...]]] = MappingProxyType(
    {
        "model_changed": (MissReason.model,),
        "service_tier_changed": (MissReason.model,),
        "reasoning_effort_changed": (MissReason.model,),
        "verbosity_changed": (MissReason.model,),
        "text_format_changed": (MissReason.model,),
        "prompt_cache_key_changed": (MissReason.key,),
        "tools_changed": (MissReason.tools,),
        "system_changed": (MissReason.system,),
        "messages_changed": (MissReason.messages,),
        # OpenAI's input holds system and developer messages, too
        "input_changed": (MissReason.messages, MissReason.system),
        "context_compacted": (MissReason.compacted,),
    }
)
"""What each term of OpenAI and Anthropic may mean, the likeliest first."""

_SAME = "cache_hit"
_UNTOLD = ("unavailable", "comparison_response_not_found", "pending")


@dataclass(frozen=True, slots=True)
class ReportedMiss:
    """What a provider says of a request that it compared with an earlier one.

    Attributes:
        term: The provider's own word, such as "tools_changed".
        reasons: What it may mean, the likeliest first; empty without a difference, and where the
            provider cannot tell.
        missed_tokens: About how many tokens would have been read else; None if that is not told.
    """

    term: str
    reasons: tuple[MissReason, ...] = ()
    missed_tokens: int | None = None

    @property
    def is_same(self) -> bool:
        """Whether the two requests do not differ in front."""
        return self.term == _SAME

    def as_json(self) -> dict[str, Any]:
        """Return it as `reported_miss` reads it."""
        if self.is_same or self.term in _UNTOLD:
            return {"type": self.term}
        missed = self.missed_tokens
        told = {} if missed is None else {"cache_missed_tokens": missed}
        return {"type": "cache_miss", "reason": self.term, **told}

    def __str__(self) -> str:
        if self.is_same:
            return "no difference"
        return str(self.reasons[0]) if self.reasons else "cannot tell"


def reported_miss(response: object) -> ReportedMiss | None:
    """Return what a provider says of a miss; None if it was not asked, or the answer lacks it.

    Args:
        response: A response of OpenAI's Responses or Anthropic's Messages API, an `EngineClient`'s
            completion, or the diagnostics alone; a dict or an object.
    """
    names = "prompt_cache_diagnostics", "diagnostics", "miss"
    found = [one for name in names if (one := reported_field(response, name)) is not None]
    told = found[0] if found else response
    if isinstance(told, ReportedMiss):
        return told
    field = "cache_miss_reason"
    if field in told if isinstance(told, Mapping) else hasattr(told, field):
        reason = reported_field(told, field)
        if reason is None:  # the answer was sent before the comparison was done
            return ReportedMiss("pending")
        missed = reported_count(reported_field(reason, "cache_missed_input_tokens"))
        return _reported(reported_field(reason, "type"), missed)
    kind = reported_field(told, "type")
    if kind == "cache_miss":
        missed = reported_count(reported_field(told, "cache_missed_tokens"))
        return _reported(reported_field(told, "reason"), missed)
    known = isinstance(kind, str) and kind in (_SAME, *_UNTOLD)
    return ReportedMiss(kind) if known else None


def _reported(term: object, missed: int | None) -> ReportedMiss:
    known = well_formed(term[:_LONGEST_TERM]) if isinstance(term, str) else "unavailable"
    return ReportedMiss(known, _TERMS.get(known, ()), missed)
