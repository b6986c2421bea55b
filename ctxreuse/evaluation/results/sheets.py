"""The tables of results, for terminals and for reports alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from ctxreuse.evaluation.results.answers import Interval, bootstrap_interval
from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.results.runs import ABLATIONS_PART, K_PART, SESSIONS_PART, Run

_SHOWN = "without what a chat shows"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table.

    Attributes:
        title: What it shows.
        head: Names of the columns.
        rows: A cell a column; a row of one cell is a heading.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sheets(results: Results) -> Iterator[Sheet]:
    """Yield the tables that results have something for."""
    policies, ablations = results.part(), results.part(ABLATIONS_PART)
    sessions = results.part(SESSIONS_PART)
    if _is_measured(policies):
        yield from _engine("What the engine reported", policies)
    elif policies:
        yield policy_sheet(policies)
    if results.part(K_PART):
        yield _ks(results)
    if sessions:
        yield _sessions(sessions)
    if _is_measured(sessions):
        yield from _engine("Conversations at a time, as the engine reported", sessions)
    if _is_measured(ablations):
        yield from _engine("One idea less, as the engine reported", ablations)
    elif ablations:
        yield _ablations(ablations, policies)


def _is_measured(runs: Sequence[Run]) -> bool:
    return any(run.first_token_s for run in runs)


def policy_sheet(runs: Sequence[Run]) -> Sheet:
    """Return policies by cache size.

    Args:
        runs: Policies with and without de-duplication, each with the same cache sizes; as retrieved
            first.
    """
    capacities = list(dict.fromkeys(run.capacity_tokens for run in runs))
    table: dict[tuple[bool, str], dict[int | None, Run]] = {}
    for run in runs:
        table.setdefault((run.deduplicated, run.policy), {})[run.capacity_tokens] = run
    base = next(iter(table.values()))  # as retrieved, nothing left out
    rows: list[tuple[str, ...]] = []
    for deduplicated in (False, True):
        of_kind = [(name, row) for (kind, name), row in table.items() if kind == deduplicated]
        if deduplicated and of_kind:
            rows.append((_SHOWN,))
        for name, row in of_kind:
            cells = (_ratio_and_times(row[size], base[size]) for size in capacities)
            rows.append((name, *cells, f"{row[capacities[0]].planning_ms:.3f}"))
    return Sheet(
        "Hit ratio; prefilled tokens, as many times as retrieved; by cache size",
        ("order of the blocks", *map(_capacity, capacities), "planning\nms"),
        tuple(rows),
    )


def _ks(results: Results) -> Sheet:
    more = "" if results.level == "blocks" else ", of block tokens alone"
    more += "; histories come on top" if results.trace.conversations else ""
    bounds = {str(k): f"{share:.3f}" for k, share in results.bounds}
    runs = results.part(K_PART)
    grid = _grid("Hit ratio by blocks a request", runs, lambda run: str(run.k))
    last = (f"reuse bound{more}", *(bounds.get(name, "") for name in grid.head[1:]))
    return Sheet(grid.title, grid.head, (*grid.rows, last))


def _sessions(runs: Sequence[Run]) -> Sheet:
    size = runs[0].capacity_tokens
    cache = "an unlimited cache" if size is None else f"a cache of {size:,} tokens"
    title = f"Hit ratio by conversations at a time, with {cache}"
    return _grid(title, runs, lambda run: str(run.sessions))


def _grid(title: str, runs: Sequence[Run], column: Callable[[Run], str]) -> Sheet:
    """Return a table with a row a policy and a column for each value that was tried."""
    columns = list(dict.fromkeys(map(column, runs)))
    rows = []
    for policy in dict.fromkeys(run.policy for run in runs):
        ratios = {column(run): run.total.hit_ratio for run in runs if run.policy == policy}
        cells = (f"{ratios[name]:.3f}" if name in ratios else "" for name in columns)
        rows.append((policy, *cells))
    return Sheet(title, ("order of the blocks", *columns), tuple(rows))


def _ablations(runs: Sequence[Run], policies: Sequence[Run]) -> Sheet:
    """Return what each idea is worth.

    Args:
        runs: The policies, whole and with one idea less.
        policies: Those of the comparison; as retrieved first.
    """
    base: Mapping[int | None, Run] = {run.capacity_tokens: run for run in reversed(policies)}
    capacities = list(dict.fromkeys(run.capacity_tokens for run in runs))
    rows = []
    for policy in dict.fromkeys(run.policy for run in runs):
        by_size = {run.capacity_tokens: run for run in runs if run.policy == policy}
        cells = (_ratio_and_times(by_size[size], base.get(size)) for size in capacities)
        rows.append((policy, *cells))
    title = "One idea less: hit ratio; prefilled tokens, as many times as retrieved"
    return Sheet(title, ("", *map(_capacity, capacities)), tuple(rows))


def _engine(title: str, runs: Sequence[Run]) -> Iterator[Sheet]:
    """Yield what a server reported, and how good its answers are.

    Each row is about the requests that the first run answered, too.
    """
    base = runs[0]
    names = {
        id(run): f"{run.policy} ({run.sessions})" if run.part == SESSIONS_PART else run.policy
        for run in runs
    }

    def rows(cells: Callable[[Run, Run], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        for deduplicated in (False, True):
            of_kind = [run for run in runs if run.deduplicated == deduplicated]
            if deduplicated and of_kind:
                yield (_SHOWN,)
            for run in of_kind:
                common = set(run.request_ids) & set(base.request_ids)
                yield names[id(run)], *cells(run.only(common), base.only(common))

    head = (
        "order of the blocks",
        "requests",
        "hit\nratio",
        "prefilled",
        "to as\nretrieved",
        "first token\np50 ms",
        "\np95",
        "p50 to as\nretrieved",
    )
    yield Sheet(title, head, tuple(rows(_usage)))
    if any(run.scores for run in runs):
        scored = ("order of the blocks", "scored", "F1", "F1, change", "exact match")
        yield Sheet("How good the answers are", scored, tuple(rows(_scores)))


def _usage(run: Run, base: Run) -> tuple[str, ...]:
    if not run.first_token_s:
        return ("0", *("",) * 6)
    half, most = (percentile(run, share) for share in (50, 95))
    return (
        str(len(run.request_ids)),
        f"{run.total.hit_ratio:.3f}",
        f"{run.total.prefilled_tokens:,}",
        f"{times(run, base):.2f}",
        f"{1e3 * half:,.0f}",
        f"{1e3 * most:,.0f}",
        f"{half / percentile(base, 50):.2f}",
    )


def _scores(run: Run, base: Run) -> tuple[str, ...]:
    """Return F1, its paired change against a run of the same questions, and exact match."""
    plain = {one: f1 for one, f1, _ in base.scores}
    pairs = [(f1, plain[one]) for one, f1, _ in run.scores if one in plain]
    if not pairs:
        return "0", "", "", ""
    f1 = bootstrap_interval([f1 for f1, _ in pairs])
    change = bootstrap_interval([f1 - before for f1, before in pairs])
    return str(len(pairs)), _cell(f1), _cell(change, "+"), f"{means(run)[1]:.3f}"


def percentile(run: Run, share: float) -> float:
    """Return a percentile of an engine run's times to the first token, in seconds."""
    return float(np.percentile(run.first_token_s, share))


def means(run: Run) -> tuple[float, float]:
    """Return the mean F1 and the share of exact matches of an engine run with scored answers."""
    return fmean(f1 for _, f1, _ in run.scores), fmean(exact for *_, exact in run.scores)


def times(run: Run, base: Run) -> float:
    """Return how many times the tokens of another run had to be computed."""
    before = base.total.prefilled_tokens
    return run.total.prefilled_tokens / before if before else 1.0


def _ratio_and_times(run: Run, base: Run | None) -> str:
    ratio = f"{run.total.hit_ratio:.3f}"
    return ratio if base is None else f"{ratio}  {times(run, base):.2f}"


def _capacity(tokens: int | None) -> str:
    return "unlimited" if tokens is None else f"{tokens:,}"


def _cell(interval: Interval, sign: str = "") -> str:
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"
