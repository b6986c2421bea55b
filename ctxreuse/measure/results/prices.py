"""What tokens cost, from a file of the user's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from ctxreuse.context.billed_tokens import BilledTokens
from ctxreuse.context.cache_profile import VLLM, CacheProfile
from ctxreuse.context.files import FilePath, read_whole
from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.results import stored_results as read

_MILLION = 1_000_000
_NEEDED = ("input", "cached_input", "currency", "date", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of tokens; nothing here knows any, because they change."""

    input: float
    cached_input: float
    currency: str
    date: str
    source: str
    output: float | None = None
    written_input: Mapping[str, float] = field(default_factory=dict)
    derived: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: FilePath, cache: CacheProfile = VLLM) -> Self:
        """Read a JSON object with these fields."""
        try:
            value = json.loads(read_whole(path))
        except (ValueError, RecursionError) as error:
            raise InputFileError(f"{path}: no JSON: {describe(str(error))}") from error
        return cls.of(str(path), value, cache)

    @classmethod
    def of(cls, place: str, value: Any, cache: CacheProfile = VLLM) -> Self:
        """Return the prices of a JSON object."""
        stored = read.stored_object(place, value)
        derived = list(stored.get("derived", read.each(read.text), []))
        if cache.is_hosted and "input" in stored.fields and "cached_input" not in stored.fields:
            derived.append("cached_input")
        missing = [name for name in _NEEDED if name not in (*stored.fields, *derived)]
        if missing:
            raise InputFileError(
                f"{place}: {missing[0]} is missing; prices are a JSON object such as "
                '{"input": 2.5, "cached_input": 0.25, "currency": "USD", "date": "2026-11-01", '
                '"source": "..."}, for a million tokens each'
            )
        plain = stored.get("input", read.number)
        life = cache.time_to_live.name
        written = stored.get("written_input", partial(_by_life, life), {})
        for one in cache.times_to_live if cache.is_hosted else ():
            if one.name not in written:
                derived.append(f"written_input {one.name}".rstrip())
                written[one.name] = one.write_factor * plain
        return cls(
            input=plain,
            cached_input=stored.get("cached_input", read.number, cache.read_factor * plain),
            currency=stored.get("currency", read.text),
            date=stored.get("date", read.text),
            source=stored.get("source", read.text),
            output=stored.get("output", read.optional(read.number), None),
            written_input=written,
            derived=tuple(derived),
        )

    def as_json(self) -> dict[str, Any]:
        """Return what `of` reads: without what is not known."""
        optional = {
            "output": self.output,
            "written_input": dict(self.written_input),
            "derived": list(self.derived),
        }
        needed = {name: getattr(self, name) for name in _NEEDED}
        return needed | {
            name: value for name, value in optional.items() if value not in (None, {}, [])
        }

    def money(self, tokens: BilledTokens, output_tokens: int = 0) -> float:
        """Return what prompts and their answers cost."""
        paid = tokens.uncached * self.input + tokens.read * self.cached_input
        for life, number in tokens.written.items():
            paid += number * self.written_input[life]
        return (paid + output_tokens * (self.output or 0.0)) / _MILLION


def _by_life(life: str, place: str, value: Any) -> dict[str, float]:
    """Return a price for each time to live; a number is for the one that is written with."""
    if not isinstance(value, dict):
        return {life: read.number(place, value)}
    return {name: read.number(f"{place}: {name}", price) for name, price in value.items()}
