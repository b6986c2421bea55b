"""Describes fields of configurations, so that a command takes them as its options."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

CACHES = (
    "The cache's rules and prices: vllm, sglang, openai, openai-before-5.6, anthropic, bedrock, "
    "gemini or deepseek, with arguments as in 'anthropic(minimum=4096, life=1h)'."
)
PRICES = (
    "Your prices, for the money saved: a JSON file with input and cached_input (for a million "
    "tokens), currency, date and source; optionally output and written_input. Or a model's name, "
    "for what the package genai-prices knows (extra prices)."
)
KEEP_BEST = "Keep the retriever's best block first, for small models: ReusePlanner(keep_best=True)."
BESIDE_TRACE = "Its blocks; corpus.jsonl beside the trace if not given."


def option(
    help: str,  # noqa: A002 - as Typer has it
    default: Any = MISSING,
    *names: str,
    secret: bool = False,
    **settings: Any,
) -> Any:
    """Return a field that a command takes as an option; `settings` are `typer.Option`'s."""
    told = {"help": help, "names": names, **settings}
    return field(default=default, repr=not secret, metadata=told)
