"""What ctxreuse saves on a real vLLM server: hit ratio, prefilled tokens, time to first token.

Run with `make bench-vllm`. Every policy sends the same requests one after the other, under a
`cache_salt` of its own, so that it finds an empty cache. Each request generates one token.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from runs import FEWEST_TURNS, Policy, Run, Workload, run_policy, whole_conversations
from server import (
    ServerInfo,
    argument_parser,
    check_data,
    describe_server,
    progress_bar,
    read_named_trace,
    warm_up,
)

AS_RETRIEVED = Policy("as retrieved", "none")
PAPER = Policy("papers' order, online", "paper")
ONLINE = Policy("ctxreuse, online", "reuse")
BATCH = Policy("ctxreuse, batch", "reuse", batch=True)
DEDUPLICATED = Policy("ctxreuse, online, de-duplicated", "reuse", deduplicate=True)
INDEPENDENT = (AS_RETRIEVED, PAPER, ONLINE, BATCH)
CONVERSATIONS = (AS_RETRIEVED, PAPER, ONLINE, DEDUPLICATED)

LEAST_BATCH_GAIN = 5.0
LEAST_FEWER_TOKENS = 0.25
MOST_TIME_OFF = 0.15


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a run should show.

    Attributes:
        text: What was measured, and what was expected.
        is_met: Whether it is so; None where nothing in particular was expected.
    """

    text: str
    is_met: bool | None


@dataclass(frozen=True, slots=True)
class Measurement:
    """All policies on one workload.

    Attributes:
        runs: One for each policy.
        load: How many processes ran on this machine at a time, at the busiest.
    """

    runs: tuple[Run, ...]
    load: float

    @property
    def is_disturbed(self) -> bool:
        """Whether more ran than the server, if it is on this machine: alone it loads 1.4 a core."""
        return self.load > 1.5 * (os.cpu_count() or 1)


def main() -> int:
    """Measure and print; return 1 if a request failed."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=40, help="of each trace (default: 40)")
    parser.add_argument(
        "--only", choices=("xquad", "mtrag", "locomo"), action="append", help="this trace only"
    )
    options = parser.parse_args()
    names = options.only or ["xquad", "mtrag", "locomo"]
    data = check_data(options.data, *names)
    server = describe_server(options.base_url, options.model)
    console = Console(width=130)
    results, has_failed = [], False
    for name in names:
        workload = _workload(data, name, options.requests)
        measured = asyncio.run(_measure(server, workload))
        expectations = _expectations(workload, measured.runs)
        has_failed = has_failed or any(run.failures for run in measured.runs)
        results.append(_as_json(workload, measured, expectations))
        if not options.json:
            _print_workload(console, server, workload, measured, expectations)
    if options.json:
        print(json.dumps({"server": asdict(server), "workloads": results}, indent=2))
    return int(has_failed)


def _workload(data: Path, name: str, requests: int) -> Workload:
    match name:
        case "xquad":
            return Workload("XQuAD k=5", tuple(read_named_trace(data, name, 5)[:requests]))
        case "locomo":
            return Workload("LoCoMo k=20", tuple(read_named_trace(data, name, 20)[:requests]))
        case _:
            trace = whole_conversations(read_named_trace(data, name, 5), requests)
            return Workload("MT-RAG k=5", trace, conversations=True)


async def _measure(server: ServerInfo, workload: Workload) -> Measurement:
    """Send a workload under each policy that suits it."""
    await warm_up(server)
    runs, loads = [], [os.getloadavg()[0]]
    with progress_bar() as progress:
        for policy in CONVERSATIONS if workload.conversations else INDEPENDENT:
            task = progress.add_task(f"{workload.name}: {policy.name}", total=len(workload.trace))
            runs.append(await run_policy(server, workload, policy, partial(progress.advance, task)))
            loads.append(os.getloadavg()[0])
    return Measurement(tuple(runs), max(loads))


def _expectations(workload: Workload, runs: Sequence[Run]) -> list[Expectation]:
    by_policy = {run.policy: run for run in runs}
    plain = by_policy[AS_RETRIEVED]
    if workload.conversations:
        best = by_policy[DEDUPLICATED]
        return [_fewer_tokens(plain, best), _times_follow_tokens(plain, best)]
    best = by_policy[BATCH]
    gain = best.usage.hit_ratio / (plain.usage.hit_ratio or math.nan)
    text = f"{BATCH.name}: {gain:.1f} times the hit ratio of {AS_RETRIEVED.name}"
    is_met = None
    if workload.name == "XQuAD k=5":
        text += f" (expected: at least {LEAST_BATCH_GAIN:g} times)"
        is_met = gain >= LEAST_BATCH_GAIN
    return [Expectation(text, is_met), _times_follow_tokens(plain, best)]


def _fewer_tokens(plain: Run, best: Run) -> Expectation:
    both = plain.request_ids & best.request_ids
    sent = plain.only(both).usage.prompt_tokens
    saved = 1 - best.only(both).usage.prompt_tokens / (sent or math.nan)
    more = len(best.request_ids - plain.request_ids)
    return Expectation(
        f"{best.policy.name}: {saved:.0%} fewer prompt tokens on the {len(both)} turns that fit "
        f"either way (expected: at least {LEAST_FEWER_TOKENS:.0%}), and {more} more turns fit",
        saved >= LEAST_FEWER_TOKENS,
    )


def _times_follow_tokens(plain: Run, best: Run) -> Expectation:
    """Compare what tokens and times come to on the requests that both policies sent."""
    both = plain.request_ids & best.request_ids
    plain, best = plain.only(both), best.only(both)
    times = best.first_token_s(50) / plain.first_token_s(50)
    tokens = best.usage.prefilled_tokens / (plain.usage.prefilled_tokens or math.nan)
    off = abs(times / tokens - 1)
    return Expectation(
        f"{best.policy.name}: median time to the first token is {times:.2f} of "
        f"{plain.policy.name}, prefilled tokens are {tokens:.2f} of it: {off:.0%} apart "
        f"(expected on a quiet machine: at most {MOST_TIME_OFF:.0%})",
        off <= MOST_TIME_OFF,
    )


def _print_workload(
    console: Console,
    server: ServerInfo,
    workload: Workload,
    measured: Measurement,
    expectations: Sequence[Expectation],
) -> None:
    runs = measured.runs
    console.print(_table(server, workload, runs))
    if workload.conversations:
        conversations = len({traced.conversation_id for traced in workload.trace})
        console.print(
            f"{len(workload.trace)} turns of {conversations} conversations: the first of the trace "
            f"that have {FEWEST_TURNS} turns or more, whole, in arrival order, each turn answered "
            f"'OK.'; one stops where it no longer fits {server.context_tokens:,} tokens"
        )
        console.print("all but 'answered' is over the turns that fit as retrieved, too")
    for expectation in expectations:
        mark = {True: "[green]as expected[/]", False: "[red]not as expected[/]", None: "measured"}
        console.print(f"{mark[expectation.is_met]}: {expectation.text}")
    if measured.is_disturbed:
        console.print(
            f"[yellow]up to {measured.load:.1f} processes ran on this machine's {os.cpu_count()} "
            "processors: times are noisy[/]"
        )
    for run in runs:
        for reason, number in run.failures.items():
            console.print(f"[red]{run.policy.name}: {number} requests failed:[/] {reason}")
    needed = max(run.usage.prefilled_tokens for run in runs)
    if server.cache_tokens is not None and needed > server.cache_tokens:
        console.print(
            f"[red]a policy computed {needed:,} tokens and the cache holds "
            f"{server.cache_tokens:,}, so hits were lost: give the server a larger one[/]"
        )
    console.print()


def _table(server: ServerInfo, workload: Workload, runs: Sequence[Run]) -> Table:
    table = Table(title=f"{workload.name}, {len(workload.trace)} requests, {server.model}")
    table.add_column("policy")
    for column in (
        "\nanswered",
        "\nhit ratio",
        "prompt\ntokens",
        "\nprefilled",
        "to as\nretrieved",
        "first token, ms\nmean",
        "\np50",
        "\np95",
        "p50 to as\nretrieved",
    ):
        table.add_column(column, justify="right")
    for run in runs:
        both = run.request_ids & runs[0].request_ids
        part, plain = run.only(both), runs[0].only(both)
        tokens = part.usage.prefilled_tokens / (plain.usage.prefilled_tokens or math.nan)
        table.add_row(
            run.policy.name,
            str(len(run.measured)),
            f"{part.usage.hit_ratio:.3f}",
            f"{part.usage.prompt_tokens:,}",
            f"{part.usage.prefilled_tokens:,}",
            f"{tokens:.2f}",
            f"{part.mean_first_token_s * 1000:,.0f}",
            f"{part.first_token_s(50) * 1000:,.0f}",
            f"{part.first_token_s(95) * 1000:,.0f}",
            f"{part.first_token_s(50) / plain.first_token_s(50):.2f}",
        )
    return table


def _as_json(
    workload: Workload, measured: Measurement, expectations: Sequence[Expectation]
) -> dict[str, Any]:
    return {
        "name": workload.name,
        "requests": [traced.request_id for traced in workload.trace],
        "load": measured.load,
        "policies": [
            {
                "name": run.policy.name,
                "hit_ratio": run.usage.hit_ratio,
                "prompt_tokens": run.usage.prompt_tokens,
                "prefilled_tokens": run.usage.prefilled_tokens,
                "mean_first_token_s": run.mean_first_token_s,
                "p50_first_token_s": run.first_token_s(50),
                "p95_first_token_s": run.first_token_s(95),
                "answered": [asdict(request) for request in run.measured],
                "left_out": run.left_out,
                "failures": dict(run.failures),
            }
            for run in measured.runs
        ],
        "expectations": [asdict(expectation) for expectation in expectations],
    }


if __name__ == "__main__":
    sys.exit(main())
