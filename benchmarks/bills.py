"""Input bills of hosted caches on public retrieval traces, beside what a sketch reaches.

A bill is what the prompts' input tokens cost, as a multiple of the same prompts uncached; of the
prompts only system text and blocks count. The cache keeps what a prompt marks, at most 4 marks,
from 1,024 tokens on; writing costs 1.25, reading 0.1. The marks are replayed by rules that stand
here and nowhere else, so nothing that the planner expects counts.

    python benchmarks/bills.py              # in the order of the traces, nothing expires
    python benchmarks/bills.py --orders     # also in random order, and with a life of 5 minutes
                                            # where a request comes every ten seconds

Reads the folder named by CTXREUSE_DATA, as `hit_ratio.py` does, or made-up questions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from rich.console import Console

from ctxreuse import BatchPlan, CacheRules, ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.measure.traces.trace_files import TraceRequest
from shared import data_folder, new_parser, new_table, read_named_trace

_SYSTEM_WORD = "rule "
_SECONDS_APART = 10.0
_FIVE_MINUTES = "anthropic(life=5m)"
_NO_EXPIRY = "openai"


@dataclass(frozen=True, slots=True)
class Row:
    """A trace, the tokens of a system text before it, and what the sketch reaches on it."""

    trace: str
    system_tokens: int
    sketch_online: float
    sketch_batch: float

    @property
    def name(self) -> str:
        """The trace and the system text, for the table."""
        return self.trace + (f" +{self.system_tokens:,}" if self.system_tokens else "")


ROWS = (
    Row("mtrag_k5", 0, 0.96, 0.72),
    Row("mtrag_k10", 0, 0.96, 0.66),
    Row("mtrag_k10", 1_000, 0.81, 0.54),
    Row("locomo_k100", 0, 0.82, 0.57),
    Row("xquad_k15", 0, 0.91, 0.68),
    Row("xquad_k5", 0, 1.00, 0.99),
)
_COMPARED = 5  # prompts of the last row are shorter than what is kept


def replayed_bill(
    plans: Iterable[Plan],
    times: Iterable[float],
    tokens: Mapping[str, int],
    profile: CacheRules,
    lifetime: float,
) -> float:
    """Return the bill of marked prompts, as a multiple of the same prompts uncached.

    They are sent in this order, at times in seconds; `lifetime` is how many seconds an entry
    lives after it was last written or read.
    """
    until: dict[tuple[object, ...], float] = {}
    bill = uncached = 0.0
    for plan, now in zip(plans, times, strict=True):
        texts = [plan.request.system or "", *(block.text for block in plan.blocks)]
        lengths = [sum(tokens[text] for text in texts[: end + 1]) for end in range(len(texts))]
        assert len(plan.marks) <= profile.marks, "more marks than allowed"
        assert list(plan.marks) == sorted(set(plan.marks)), "marks out of order"
        assert not plan.marks or plan.marks[-1] < len(texts), "a mark behind the end"
        read = 0
        for mark in plan.marks:
            if until.get(tuple(texts[: mark + 1]), -math.inf) > now:
                read = lengths[mark]
        written = read
        for mark in plan.marks:
            is_long = lengths[mark] >= profile.minimum
            if lengths[mark] == read or (is_long and lengths[mark] > read):
                until[tuple(texts[: mark + 1])] = now + lifetime
                written = max(written, lengths[mark])
        bill += profile.read_factor * read + profile.write_factor * (written - read)
        bill += lengths[-1] - written
        uncached += lengths[-1]
    return bill / uncached


def _requests(
    row: Row, trace: Sequence[TraceRequest]
) -> tuple[list[ContextRequest], dict[str, int], Callable[[str], int]]:
    """Return the requests of a row, the tokens of all texts, and a counter that knows them."""
    system = _SYSTEM_WORD * row.system_tokens or None
    tokens = {system or "": row.system_tokens}
    requests = []
    for traced in trace:
        blocks: list[ContextBlock] = list(traced.blocks)
        tokens.update((block.text, block.tokens or 0) for block in blocks)
        requests.append(ContextRequest(blocks, query=traced.query, system=system))
    return requests, tokens, lambda text: tokens.get(text, 0)


def _online(
    row: Row, trace: Sequence[TraceRequest], cache: str, apart: float
) -> tuple[float, float]:
    """Return the bill where requests arrive one by one, and the milliseconds of a plan."""
    requests, tokens, counter = _requests(row, trace)
    planner = ReusePlanner(cache=cache, token_counter=counter)
    times = [number * apart for number in range(len(requests))]
    lifetime = (planner.cache.lifetime or math.inf) if apart else math.inf
    began = time.perf_counter()
    plans = [
        planner.plan(one, now=now if apart else None)
        for one, now in zip(requests, times, strict=True)
    ]
    milliseconds = (time.perf_counter() - began) * 1_000 / len(requests)
    return replayed_bill(plans, times, tokens, planner.cache, lifetime), milliseconds


def _batch(row: Row, trace: Sequence[TraceRequest]) -> tuple[float, float]:
    """Return the bill where all requests are known together, and the milliseconds of each."""
    requests, tokens, counter = _requests(row, trace)
    planner = ReusePlanner(cache=_NO_EXPIRY, token_counter=counter)
    began = time.perf_counter()
    batch: BatchPlan = planner.plan_batch(requests)
    milliseconds = (time.perf_counter() - began) * 1_000 / len(requests)
    times = [0.0] * len(requests)
    return replayed_bill(batch.plans, times, tokens, planner.cache, math.inf), milliseconds


def _as_retrieved(row: Row, trace: Sequence[TraceRequest]) -> float:
    """Return the bill in the retriever's order, with marks."""
    requests, tokens, counter = _requests(row, trace)
    planner = ReusePlanner(cache=_NO_EXPIRY, token_counter=counter)
    plans = [planner.plan(one, "none") for one in requests]
    return replayed_bill(plans, [0.0] * len(plans), tokens, planner.cache, math.inf)


def main() -> None:
    """Print the tables."""
    parser = new_parser(__doc__)
    parser.add_argument("--orders", action="store_true", help="other orders and a short life, too")
    parser.add_argument("--online-only", action="store_true", help="leave the batch out")
    options = parser.parse_args()
    data = data_folder("mtrag", "locomo", "xquad")
    is_public = bool(os.environ.get("CTXREUSE_DATA"))
    columns = ("trace", "as retrieved", "online", "sketch", "ms", "batch", "sketch", "to it", "ms")
    table = new_table("input bill / uncached; marks at 1.25, reads at 0.1", (), columns)
    other = new_table(
        "online in other orders; 5 min: entries live so long, a request comes every 10 seconds",
        (),
        ("trace", "random", "random", "5 min", "5 min, random"),
    )
    ratios = []
    for row in ROWS:
        trace, _ = read_named_trace(data, row.trace)
        online, online_ms = _online(row, trace, _NO_EXPIRY, 0.0)
        batch, batch_ms = (math.nan, math.nan) if options.online_only else _batch(row, trace)
        ratios.append(batch / row.sketch_batch)
        table.add_row(
            row.name,
            f"{_as_retrieved(row, trace):.3f}",
            f"{online:.3f}",
            f"{row.sketch_online:.2f}" if is_public else "-",
            f"{online_ms:.2f}",
            f"{batch:.3f}",
            f"{row.sketch_batch:.2f}" if is_public else "-",
            f"{ratios[-1]:.3f}" if is_public else "-",
            f"{batch_ms:.2f}",
        )
        if options.orders:
            shuffled = [Random(seed).sample(trace, len(trace)) for seed in (1, 2)]
            bills = [_online(row, one, _NO_EXPIRY, 0.0)[0] for one in shuffled]
            bills += [
                _online(row, one, _FIVE_MINUTES, _SECONDS_APART)[0] for one in (trace, shuffled[0])
            ]
            other.add_row(row.name, *(f"{bill:.3f}" for bill in bills))
    console = Console(width=110)
    console.print(table)
    if is_public and not options.online_only:
        mean = math.exp(sum(map(math.log, ratios[:_COMPARED])) / _COMPARED)
        console.print(f"geometric mean of batch / sketch, the first {_COMPARED} rows: {mean:.3f}")
    if options.orders:
        console.print(other)


if __name__ == "__main__":
    main()
