"""`--cache` and `--prices`: the rules of a cache, and what tokens cost."""

from __future__ import annotations

import os
from datetime import date
from typing import Annotated

import typer

from ctxreuse.cli.terminal import CACHE_HELP
from ctxreuse.context.cache_profile import VLLM, CacheProfile
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.published_prices import published_prices

CacheSpec = Annotated[
    str,
    typer.Option(help=f"{CACHE_HELP} Of a provider's cache, what is shown is the bill."),
]
PricesGiven = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|MODEL",
        help="Your prices, for the money saved: a JSON file with input and cached_input (for a "
        "million tokens), currency, date and source; optionally output and written_input. Or a "
        "model's name, for what the package genai-prices knows (extra prices).",
    ),
]


def prices_given(given: str | None, cache: CacheProfile = VLLM) -> Prices | None:
    """Return the prices that a command was given, as of today where they are published ones.

    Args:
        given: A file, or a model's name; None is no prices.
        cache: The rules of the cache.

    Raises:
        InputFileError: It is no file of prices, or no model whose prices are known.
        MissingExtraError: It is a model's name, and genai-prices is not installed.
    """
    if given is None:
        return None
    if given.endswith(".json") or os.path.exists(given) or os.sep in given:
        return Prices.read(given, cache)
    return published_prices(given, date.today(), cache)
