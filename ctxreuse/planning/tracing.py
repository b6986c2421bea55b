"""What a planner tells those who trace requests; spans themselves are made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ctxreuse.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """An answered call of a model.

    Attributes:
        plans: The plans of the contexts in its prompt.
        prompt_tokens: Tokens of the prompt, as the engine counts them; None if it does not tell.
        cached_tokens: Those that came from the prefix cache; None is unknown.
        completion_tokens: Tokens of the answer; None if unknown.
        seconds: How long the call took; None if that was not measured.
        written_tokens: Tokens written into the cache; None is unknown.
        through: Names of the frameworks and SDKs that sent it, in one text; "" is `EngineClient`,
            None is unknown.
    """

    plans: tuple[Plan, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float | None = None
    written_tokens: int | None = None
    through: str | None = None

    @property
    def expected_cached_tokens(self) -> int:
        """Block tokens that were expected in the cache."""
        return sum(plan.expected_cached_tokens for plan in self.plans)


class HearsAnswers(Protocol):
    """Is told of answered calls."""

    def answered(self, call: AnsweredCall) -> None:
        """Note that a call was answered, just now."""


@runtime_checkable
class Tracing(HearsAnswers, Protocol):
    """Writes down what a planner does; two methods, called in the thread or task of the request.

    What they raise is counted, logged once, and changes no answer.
    """

    def planned(self, plans: Sequence[Plan], seconds: float) -> None:
        """Note that some requests were planned together, just now, and how long it took."""
