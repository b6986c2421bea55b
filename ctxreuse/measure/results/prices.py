"""What tokens cost, from a file of the user's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from typing import Any, Final, Self

from ctxreuse.context.files import FilePath, read_whole
from ctxreuse.errors import InputFileError, MissingExtraError, describe
from ctxreuse.measure.traces.json_lines import JsonLine
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

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
    def read(cls, path: FilePath, cache: CacheRules = DEFAULT_CACHE) -> Self:
        """Read a JSON object with these fields."""
        text = read_whole(path)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputFileError(f"{path}: no JSON: {error}") from error
        return cls.of(str(path), value, cache)

    @classmethod
    def of(cls, place: str, value: Any, cache: CacheRules = DEFAULT_CACHE) -> Self:
        """Return the prices of a JSON object."""
        if not isinstance(value, dict):
            raise InputFileError(f"{place} is {describe(value)}; it must be an object")
        given, derived = dict(value), list[str]()
        line = JsonLine(place, given)
        if cache.lives and "input" in given and "cached_input" not in given:
            derived.append("cached_input")
            given["cached_input"] = cache.read_factor * line.amount("input")
        missing = [name for name in _NEEDED if name not in given]
        if missing:
            raise InputFileError(
                f"{place}: {missing[0]} is missing; prices are a JSON object such as "
                '{"input": 2.5, "cached_input": 0.25, "currency": "USD", "date": "2026-11-01", '
                '"source": "..."}, for a million tokens each'
            )
        plain, written = line.amount("input"), given.get("written_input", {})
        if not isinstance(written, dict):  # a number is for the life that is written with
            written = {cache.time_to_live.name: line.amount("written_input")}
        for one in cache.lives:
            if one.name not in written:
                derived.append(f"written_input {one.name}".rstrip())
                written = {**written, one.name: one.write_factor * plain}
        lives = JsonLine(f"{place}: written_input", written)
        return cls(
            input=plain,
            cached_input=line.amount("cached_input"),
            **{name: line.get(name, (str,)) for name in _NEEDED[2:]},
            output=line.amount("output", None),
            written_input={life: lives.amount(life) for life in written},
            derived=tuple(derived),
        )

    def as_json(self) -> dict[str, Any]:
        """Return what `of` reads: without what is not known."""
        told = {name: getattr(self, name) for name in self.__slots__}
        told |= {"written_input": dict(self.written_input), "derived": list(self.derived)}
        return {name: value for name, value in told.items() if value not in (None, {}, [])}

    def money(self, tokens: BilledTokens, output_tokens: int = 0) -> float:
        """Return what prompts and their answers cost."""
        paid = tokens.uncached * self.input + tokens.read * self.cached_input
        for life, written in tokens.written.items():
            paid += written * self.written_input[life]
        return (paid + output_tokens * (self.output or 0.0)) / 1_000_000


_PROVIDERS: Final = {
    "openai": "openai",
    "openai-before-5.6": "openai",
    "anthropic": "anthropic",
    "bedrock": "aws",
    "gemini": "google",
    "deepseek": "deepseek",
}
_PRICES: Final = {"input": "input_mtok", "cached_input": "cache_read_mtok", "output": "output_mtok"}
_WRITTEN: Final = {"1h": "cache_write_1h_mtok"}  # of other times to live: cache_write_mtok


def prices_given(given: str | Prices | None, cache: CacheRules) -> Prices | None:
    """Return the prices of a file, or those of a model's name as they are published today."""
    if given is None or isinstance(given, Prices):
        return given
    if given.endswith(".json") or os.path.exists(given) or os.sep in given:
        return Prices.read(given, cache)
    return published_prices(given, date.today(), cache)


def published_prices(model: str, day: date, cache: CacheRules = DEFAULT_CACHE) -> Prices:
    """Return a model's prices on a day, as the installed release of genai-prices knows them."""
    try:
        import genai_prices
    except ImportError as error:
        raise MissingExtraError(f"prices of the model {describe(model)}", "prices") from error
    provider = _PROVIDERS.get(cache.name)
    try:
        found = genai_prices.calc_price(
            genai_prices.Usage(input_tokens=1),
            model,
            provider_id=provider,
            genai_request_timestamp=datetime.combine(day, time(), UTC),
        )
    except LookupError as error:
        whose = f" of {provider}" if provider else ""
        raise InputFileError(
            f"{describe(model)} is no file, and genai-prices {genai_prices.__version__} knows no "
            f"such model{whose}; give a file of prices"
        ) from error
    # of those that depend on the prompt's length, the first
    prices = {name: getattr(one, "base", one) for name, one in vars(found.model_price).items()}
    known = {name: float(one) for name, one in prices.items() if one is not None}
    told: dict[str, Any] = {name: known[one] for name, one in _PRICES.items() if one in known}
    lives = {one.name: _WRITTEN.get(one.name, "cache_write_mtok") for one in cache.times_to_live}
    told |= {
        "written_input": {life: known[one] for life, one in lives.items() if one in known},
        "currency": "USD",
        "date": f"{day:%Y-%m-%d}",
        "source": f"genai-prices {genai_prices.__version__}, {found.provider.id} {found.model.id}",
    }
    return Prices.of(f"genai-prices, {found.model.id}", told, cache)
