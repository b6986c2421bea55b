"""Whether an engine needs `leader_first`: hit ratio and time of a batch sent several at a time.

vLLM registers a prompt's blocks when it schedules it, so requests of the same step find them. An
engine that registers them later serves followers from the cache only if they wait for their
leader's first token. The batch is planned once and sent three times under salts of its own: one
after the other, several at a time, and several at a time with followers that wait.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from ctxreuse import BatchPlan, ReusePlanner
from ctxreuse.cache import CacheUsage
from ctxreuse.serving import EngineClient, Outcome, dispatch
from server import ServerInfo, argument_parser, describe_server, warm_up
from shared import data_folder, read_requests


async def _send(server: ServerInfo, batch: BatchPlan, **how: int | bool) -> Sequence[Outcome]:
    async with EngineClient(server.base_url, server.model) as client:
        return await dispatch(
            client, batch, cache_salt=uuid4().hex, max_tokens=1, temperature=0, **how
        )


def _usage(outcome: Outcome) -> CacheUsage:
    answer = outcome.completion
    if answer is None or answer.prompt_tokens is None or answer.cached_tokens is None:
        raise SystemExit(f"a request failed, or its cached tokens are unknown: {outcome.error}")
    return CacheUsage(answer.prompt_tokens, answer.cached_tokens)


def main() -> int:
    """Measure and print; end with a message if a request failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=32, help="of XQuAD k=5 (default: 32)")
    parser.add_argument("--concurrency", type=int, default=4, help="at a time (default: 4)")
    options = parser.parse_args()
    data = data_folder("xquad", folder=options.data)
    server = describe_server(options.base_url, options.model)
    batch = ReusePlanner().plan_batch(read_requests(data, "xquad_k5", options.requests))
    asyncio.run(warm_up(server))
    table = Table("sent", "hit ratio", "prefilled tokens", "seconds", title="leader first")
    for name, how in (
        ("one after the other", {"concurrency": 1}),
        (f"{options.concurrency} at a time", {"concurrency": options.concurrency}),
        (
            f"{options.concurrency} at a time, leader first",
            {"concurrency": options.concurrency, "leader_first": True},
        ),
    ):
        began = time.perf_counter()
        outcomes = asyncio.run(_send(server, batch, **how))
        seconds = time.perf_counter() - began
        usage = sum(map(_usage, outcomes), CacheUsage())
        table.add_row(
            name, f"{usage.hit_ratio:.3f}", f"{usage.prefilled_tokens:,}", f"{seconds:.1f}"
        )
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
