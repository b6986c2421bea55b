"""Prices as the package genai-prices has them: a table that others keep, with no network."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime, time
from typing import Any, Final

from ctxreuse.errors import InputFileError, MissingExtraError, describe
from ctxreuse.measure.results.prices import Prices
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

_PROVIDERS: Final = {
    "openai": "openai",
    "openai-before-5.6": "openai",
    "anthropic": "anthropic",
    "bedrock": "aws",
    "gemini": "google",
    "deepseek": "deepseek",
}
_WRITTEN: Final = {"1h": "cache_write_1h_mtok"}
"""Where it has the price of writing for a time to live, if not under `cache_write_mtok`."""


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
    known = {name: _lowest(price) for name, price in vars(found.model_price).items()}
    written = {
        one.name: known.get(_WRITTEN.get(one.name, "cache_write_mtok"))
        for one in cache.times_to_live
    }
    fields: dict[str, Any] = {
        "input": known.get("input_mtok"),
        "cached_input": known.get("cache_read_mtok"),
        "output": known.get("output_mtok"),
        "written_input": {life: price for life, price in written.items() if price is not None},
        "currency": "USD",
        "date": f"{day:%Y-%m-%d}",
        "source": f"genai-prices {genai_prices.__version__}, {found.provider.id} {found.model.id}",
    }
    told = {name: value for name, value in fields.items() if value is not None}
    return Prices.of(f"genai-prices, {found.model.id}", told, cache)


def _lowest(price: Any) -> float | None:
    """Return a price, or the first of those that depend on the prompt's length."""
    base = getattr(price, "base", price)
    return None if base is None else float(base)
