"""Why a prompt was not read from a cache, in one vocabulary for planner and providers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from ctxreuse.context.checks import reported_count
from ctxreuse.context.reported_usage import reported_field
from ctxreuse.context.tokens import well_formed

_LONGEST_TERM = 60


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
_NOT_IN_REQUESTS = (MissReason.expired, MissReason.below_minimum, MissReason.never_written)
"""What a comparison of two requests cannot find: nothing in them differs."""


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

    def agrees_with(self, ours: MissReason | None) -> bool | None:
        """Return whether this fits the planner's reason; None where the provider cannot tell.

        Args:
            ours: The planner's reason; None where all that can be is read.
        """
        if self.is_same:
            return ours is None or ours in _NOT_IN_REQUESTS
        return ours in self.reasons if self.reasons else None

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
