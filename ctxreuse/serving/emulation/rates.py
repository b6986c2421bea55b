"""How fast an emulated engine is: about as a model of 8 billion parameters on one H100."""

from __future__ import annotations

from dataclasses import dataclass

from ctxreuse.context.checks import checked_number
from ctxreuse.errors import InvalidRequestError

NOTE_TOKENS = 96
"""Tokens of an emulated agent's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """What a step of an engine with continuous batching takes."""

    prefill_tokens_per_s: float = 10_000.0
    decode_step_s: float = 0.010  # a step in which requests get a token each
    decode_step_per_request_s: float = 0.000_15  # what each of them adds

    def __post_init__(self) -> None:
        for name in self.__slots__:
            checked_number(name, getattr(self, name))
        if not self.prefill_tokens_per_s:
            raise InvalidRequestError("prefill_tokens_per_s must be more than 0")

    def step_s(self, prefilled_tokens: int, decoding: int) -> float:
        """Return how many seconds a step takes."""
        prefill = prefilled_tokens / self.prefill_tokens_per_s
        if not decoding:
            return prefill
        return prefill + self.decode_step_s + self.decode_step_per_request_s * decoding


COMMON_RATES = EngineRates()
"""The rates of every benchmark of this project."""
