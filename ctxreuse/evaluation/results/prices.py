"""What prompt tokens cost, from a file of the user's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from ctxreuse.cache import CacheUsage
from ctxreuse.context.files import FilePath, read_whole
from ctxreuse.errors import InputFileError, describe
from ctxreuse.evaluation.results import stored_results as read

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of prompt tokens; nothing here knows any, because they change.

    Attributes:
        input: Price of a million prompt tokens that are computed.
        cached_input: Price of a million prompt tokens that the cache serves.
        currency: What the prices are in, such as "USD".
        date: The day for which they hold.
        source: Where they are from.
    """

    input: float
    cached_input: float
    currency: str
    date: str
    source: str

    @classmethod
    def read(cls, path: FilePath) -> Self:
        """Read a JSON object with these fields.

        Raises:
            InputFileError: It cannot be read, or a field is missing or no price.
        """
        try:
            value = json.loads(read_whole(path))
        except (ValueError, RecursionError) as error:
            raise InputFileError(f"{path}: no JSON: {describe(str(error))}") from error
        return cls.of(str(path), value)

    @classmethod
    def of(cls, place: str, value: Any) -> Self:
        """Return the prices of a JSON object.

        Args:
            place: Where it stands, for errors.
            value: The object.

        Raises:
            InputFileError: A field is missing or no price.
        """
        stored = read.stored_object(place, value)
        missing = [name for name in cls.__slots__ if name not in stored.fields]
        if missing:
            raise InputFileError(
                f"{place}: {missing[0]} is missing; prices are a JSON object such as "
                '{"input": 2.5, "cached_input": 0.25, "currency": "USD", "date": "2026-11-01", '
                '"source": "..."}, for a million tokens each'
            )
        return cls(
            input=stored.get("input", read.number),
            cached_input=stored.get("cached_input", read.number),
            currency=stored.get("currency", read.text),
            date=stored.get("date", read.text),
            source=stored.get("source", read.text),
        )

    def of_usage(self, usage: CacheUsage) -> float:
        """Return what the prompt tokens of a usage cost."""
        computed, cached = usage.prefilled_tokens, usage.cached_tokens
        return (computed * self.input + cached * self.cached_input) / _MILLION
