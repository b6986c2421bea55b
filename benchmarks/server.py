"""What the benchmarks on a real server share: its address, what it holds."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.errors import shown_url
from ctxreuse.serving import EngineClient
from shared import new_parser

_LONGEST_PAGE = 2**24
DEFAULT_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server as it describes itself."""

    base_url: str  # its address, with `/v1`
    model: str  # the model that is asked
    context_tokens: int  # longest prompt with its answer
    cache_tokens: int | None  # what its prefix cache holds; None where it does not say


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share."""
    parser = new_parser(description)
    parser.add_argument(
        "--base-url",
        default=os.environ.get("CTXREUSE_BASE_URL") or DEFAULT_URL,
        help="a vLLM server, started with --enable-prompt-tokens-details "
        "(default: $CTXREUSE_BASE_URL, else that of `make vllm`)",
    )
    parser.add_argument("--model", help="its model (default: the first that it serves)")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of public data (default: $CTXREUSE_DATA)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def describe_server(base_url: str, model: str | None) -> ServerInfo:
    """Ask a server what it is; end with a message if it does not answer."""
    base_url = base_url.rstrip("/")
    root = base_url.removesuffix("/v1")
    try:
        served = json.loads(_get(f"{root}/v1/models"))["data"]
        metrics = PrefixCacheMetrics.parse(_get(f"{root}/metrics"))
    except OSError as error:
        sys.exit(
            f"no server answers at {shown_url(base_url)} ({error}); start one with `make vllm`, or "
            "set CTXREUSE_BASE_URL or --base-url to a vLLM server"
        )
    cards: dict[str, dict[str, Any]] = {card["id"]: card for card in served}
    name = model or next(iter(cards))
    if name not in cards:
        sys.exit(f"{shown_url(base_url)} serves {', '.join(cards)}, not {name}")
    return ServerInfo(
        base_url=f"{root}/v1",
        model=name,
        context_tokens=int(cards[name]["max_model_len"]),
        cache_tokens=metrics.capacity_tokens,
    )


async def warm_up(server: ServerInfo) -> None:
    """Send requests that are not measured, because a server's first ones are slow."""
    async with EngineClient(server.base_url, server.model) as client:
        for _ in range(2):
            await client.complete([{"role": "user", "content": "Hello. " * 200}], max_tokens=1)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read(_LONGEST_PAGE).decode())
