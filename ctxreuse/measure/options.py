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
KEEP_BEST = (
    "Keep the retriever's best block in front, for small models: ReusePlanner(keep_best=True)."
)
BESIDE_TRACE = "Its blocks; corpus.jsonl beside the trace if not given."


def option(
    help: str,  # noqa: A002 - as Typer has it
    default: Any = MISSING,
    *names: str,
    secret: bool = False,
    **settings: Any,
) -> Any:
    """Return a field of a dataclass that a command takes as an option.

    Args:
        help: What the command says of it.
        default: Its value where it is not given; without one it must be given.
        names: What it is called, if not as the field.
        secret: Whether it may hold a password, so that no `repr` shows it.
        settings: What else a command knows of it, as `typer.Option` takes it (`min`, `max`,
            `envvar`, `metavar`); `argument=True` for what has no name, `type` for what it is given
            as, where a field takes more.
    """
    told = {"help": help, "names": names, **settings}
    return field(default=default, repr=not secret, metadata=told)
