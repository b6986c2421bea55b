"""What terminals and reports show of results: lines of text, and tables of cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp, log
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.cache_profile import profile_spec
from ctxreuse.measure.replay.estimate import TraceSummary
from ctxreuse.measure.replay.explain_plan import ExplainedRequest
from ctxreuse.measure.replay.policies import OURS_BATCH, OURS_ONLINE, POLICIES
from ctxreuse.measure.replay.run_result import Part, RunResult
from ctxreuse.measure.replay.simulate import SizeResult
from ctxreuse.measure.results.answers import Interval, bootstrap_interval
from ctxreuse.measure.results.bill import Bill, BillRow, price_lines
from ctxreuse.measure.results.results_file import Results
from ctxreuse.measure.results.verdict import amount, verdict


class PolicyStyle(NamedTuple):
    """How a chart shows a policy: no two alike in colour, and none in line."""

    colour: str
    dashes: tuple[float, ...] = ()


POLICY_STYLES = {
    "as retrieved": PolicyStyle("#8c8c8c"),
    "as sent today": PolicyStyle("#5c6f96", (9, 2, 2, 2)),
    "papers' order, online": PolicyStyle("#d98c00", (5, 2)),
    "papers' order, batch": PolicyStyle("#c2452d", (5, 2, 1, 2)),
    "CacheWeaver, online": PolicyStyle("#a259c4", (1, 1.5)),
    "ctxreuse, online": PolicyStyle("#2f86d6", (14, 1.5)),
    "ctxreuse, batch": PolicyStyle("#1fa06a", (8, 2)),
    "as retrieved, de-duplicated": PolicyStyle("#a07850", (3, 1.5)),
    "LangChain LongContextReorder": PolicyStyle("#2fa3a8", (2, 1)),
    "LlamaIndex LongContextReorder": PolicyStyle("#a89600", (6, 1.5, 1, 1.5, 1, 1.5)),
    "contextpilot, online": PolicyStyle("#e0679a", (4, 1)),
    "contextpilot, batch": PolicyStyle("#93407c", (4, 1, 1, 1)),
}
"""A policy's style in every chart."""

OTHER_STYLES = (PolicyStyle("#7d7aff", (3, 3)), PolicyStyle("#6f9a1f", (10, 3, 2, 3)))
"""For policies that not every report has, in turn."""

_OURS = (OURS_ONLINE.name, OURS_BATCH.name)
"""This package's policies for one planner; its others are of several workers."""

_POLICY = "order of the blocks"
_DEDUPLICATED = "without what a chat shows"
_HISTORIES = "; the histories of conversations come on top"


class Good(str):
    """A cell that is good news."""

    __slots__ = ()


class Bad(str):
    """A cell that is bad news."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_text: bool = False


Shown: TypeAlias = str | Table
"""A line of text, or a table."""

_Runs: TypeAlias = Sequence[RunResult]


# what the commands show


def bench_output(results: Results) -> Iterator[Shown]:
    """Yield what a terminal shows of a benchmark."""
    yield from verdict_output(results)
    yield f"{results.title}: {_in_words(results.trace)}"
    yield ", ".join(f"{name}: {value}" for name, value in results.settings)
    yield from tables(results)
    bill = Bill.of(results)
    if bill is not None:
        yield from bill_lines(bill)
    yield from results.notes


def bench_json(results: Results) -> dict[str, Any]:
    """Return a benchmark as a JSON object: what an estimate has, of all parts."""
    estimated = estimate_json(results)
    runs = [
        {"part": run.part, "k": run.k, "sessions": run.sessions, **_run_json(run)}
        for run in results.runs
    ]
    more = {"title": results.title, "settings": dict(results.settings), "notes": results.notes}
    return {**more, **estimated, "runs": runs}


def verdict_output(results: Results) -> Iterator[str]:
    """Yield the verdict on results, and an empty line."""
    yield from verdict(results).lines()
    yield ""


def estimate_output(results: Results) -> Iterator[Shown]:
    """Yield what a terminal shows of an estimate."""
    runs = results.part()
    names = {run.policy for run in runs}
    too_large = [policy.name for policy in POLICIES if policy.name not in names]
    yield from verdict_output(results)
    yield _in_words(results.trace)
    bill = Bill.of(results)
    if bill is not None:
        yield bill_table(bill)
        yield from bill_lines(bill)
        yield from results.notes
        return
    yield from results.notes
    if too_large:
        yield f"Left out, for the trace is too large for it: {'; '.join(too_large)}."
    yield _policies(runs)


def estimate_json(results: Results) -> dict[str, Any]:
    """Return an estimate as a JSON object."""
    bill = Bill.of(results)
    return {
        "verdict": verdict(results).as_json(),
        **({} if bill is None else {"bill": bill.as_json()}),
        **({"keep_best": True} if results.keep_best else {}),
        "trace": {**asdict(results.trace), "reuse_bound": round(results.trace.reuse_bound, 6)},
        "runs": [_run_json(run) for run in results.part()],
    }


def _run_json(run: RunResult) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "deduplicated": run.deduplicated,
        "capacity_tokens": run.capacity_tokens,
        "prompt_tokens": run.total.prompt_tokens,
        "cached_tokens": run.total.cached_tokens,
        "hit_ratio": round(run.total.hit_ratio, 6),
        "word_tokens": run.word_tokens,
        "planning_ms": run.planning_ms,
    }


def explanation_output(
    explained: Sequence[ExplainedRequest], worst: int, *, with_reason: bool = False
) -> Iterator[Table]:
    """Yield the causes, and the requests that lost most, as tables."""
    by_cause: dict[tuple[str, ...], list[int]] = {}
    for explanation in (one.explanation for one in explained):
        names = (explanation.cause, *([explanation.reason or "-"] if with_reason else []))
        by_cause.setdefault(names, []).append(explanation.lost_tokens)
    causes = sorted(by_cause.items(), key=lambda item: (-sum(item[1]), item[0]))
    yield Table(
        "Why requests hit or miss",
        ("cause", *(["reason"] if with_reason else []), "requests", "tokens computed again"),
        tuple((*names, f"{len(lost):,}", f"{sum(lost):,}") for names, lost in causes),
        is_text=True,
    )
    told = Counter(
        (one.explanation.reason or "-", str(one.explanation.reported), one.explanation.agrees)
        for one in explained
        if one.explanation.reported is not None
    )
    if told:
        yield Table(
            "What the provider says of them",
            ("planner", "provider", "requests", "agree"),
            tuple(
                (ours, theirs, f"{number:,}", _AGREE[agrees])
                for (ours, theirs, agrees), number in told.most_common()
            ),
            is_text=True,
        )
    losers = [one.explanation for one in explained if one.explanation.lost_tokens]
    losers.sort(key=lambda one: -one.lost_tokens)
    if worst and losers:
        yield Table(
            "Requests that lost most (`--request ID` says more)",
            ("request", "cause", "closest", "shared", "parts at", "computed again"),
            tuple(
                (
                    *map(str, (loser.request_id, loser.cause, loser.closest)),
                    f"{loser.shared_tokens:,} tokens",
                    "its end" if loser.block is None else str(loser.block),
                    f"{loser.lost_tokens:,}",
                )
                for loser in losers[:worst]
            ),
            is_text=True,
        )


_AGREE = {True: "yes", False: "no", None: "-"}


def size_output(results: Sequence[SizeResult]) -> Iterator[Shown]:
    """Yield what caches of several sizes serve of the same requests."""
    tokens = results[0].total.prompt_tokens
    yield f"{len(results[0].usages):,} requests with {tokens:,} prompt tokens"
    yield Table(
        "Hit ratio by cache size",
        ("tokens that the cache holds", "all requests", "the second half"),
        tuple(
            (
                _capacity(one.capacity_tokens),
                f"{one.total.hit_ratio:.3f}",
                f"{one.second_half.hit_ratio:.3f}",
            )
            for one in results
        ),
    )


def comparison(old: Results, new: Results) -> Iterator[Shown]:
    """Yield what has changed between two results of the same benchmark."""
    yield f"compared with ctxreuse {old.version}, {old.title}"
    before_settings = dict(_settings(old))
    for name, value in _settings(new):
        was_set = before_settings.get(name, "not said")
        if was_set != value:
            yield f"not the same setting: {name} was {was_set}, is {value}"
    before = {_key(run): run for run in old.runs}
    now = {_key(run): run for run in new.runs}
    yield from _only_in(now, before, "not measured before")
    yield from _only_in(before, now, "no longer measured")
    both = [(run, before[key]) for key, run in now.items() if key in before]
    rows = [_changed(run, earlier) for run, earlier in both if run.total != earlier.total]
    if rows:
        change = ("change", "prefilled,\ntimes before", "planning ms\nbefore", "now")
        title = "Hit ratio and prefilled tokens, before and now"
        yield Table(title, (_POLICY, "before", "now", *change), tuple(rows))
    yield f"{len(both) - len(rows)} of {len(new.runs)} runs are exactly as before"


def _only_in(
    runs: Mapping[tuple[object, ...], RunResult],
    others: Mapping[tuple[object, ...], RunResult],
    what: str,
) -> Iterator[str]:
    """Yield the parts of a benchmark, and the runs of common parts, that others lack."""
    parts = {run.part for run in others.values()}
    for part, number in Counter(run.part for run in runs.values()).items():
        if part not in parts:
            yield f"{what}: {part}, all {number:,} runs"
    for key, run in runs.items():
        if key not in others and run.part in parts:
            yield f"{what}: {_run_name(run)}"


# tables


def tables(results: Results) -> Iterator[Table]:
    """Yield the tables that results have something for."""
    policies, ablations = results.part(), results.part(Part.ablations)
    sessions = results.part(Part.sessions)
    bill = Bill.of(results)
    if any(run.first_token_s for run in policies):
        yield from _engine("What the engine reported", policies)
    elif bill is not None:
        yield bill_table(bill)
    elif policies:
        yield _policies(policies)
    if results.part(Part.k):
        yield _ks(results)
    if sessions:
        yield _sessions(sessions)
    if any(run.first_token_s for run in sessions):
        yield from _engine("Conversations at a time, as the engine reported", sessions)
    if any(run.first_token_s for run in ablations):
        yield from _engine("One idea less, as the engine reported", ablations)
    elif ablations:
        yield _ablations(ablations, policies)


def bill_table(bill: Bill) -> Table:
    """Return a bill as a table: tokens a request by price class, and the sum."""
    prices, requests = bill.prices, max(1, bill.requests)

    def tokens(number: int) -> str:
        return f"{number / requests:,.0f}"

    columns: list[tuple[str, Callable[[BillRow], str]]] = [
        ("un-\ncached", lambda row: tokens(row.tokens.uncached)),
        ("read", lambda row: tokens(row.tokens.read)),
    ]
    if bill.has_paid_writes:
        for life in bill.lives:
            name = f"written\n{life}" if len(bill.cache.times_to_live) > 1 else "written"
            written = partial(lambda life, row: tokens(row.tokens.written.get(life, 0)), life)
            columns.append((name, written))
        columns.append(("never\nread", lambda row: tokens(row.bill.never_read)))
    if bill.output_tokens is not None:
        columns.append(("out-\nput", lambda _: tokens(bill.output_tokens or 0)))
    columns.append(("input\nbill", lambda row: f"{row.to_uncached:.3f}"))
    if prices is not None:
        columns.append((f"{prices.currency} a\n1,000", lambda row: amount(row.money or 0.0)))
    table: list[tuple[str, ...]] = []
    for deduplicated, heading in enumerate(("", _DEDUPLICATED)):
        rows = [row for row in bill.rows if row.deduplicated == bool(deduplicated)]
        if heading and rows:
            table.append((heading,))
        table += [(row.name(bill), *(cell(row) for _, cell in columns)) for row in rows]
    title = f"The bill with {profile_spec(bill.cache)}: tokens a request by what is paid for them"
    return Table(title, ("", *(name for name, _ in columns)), tuple(table))


def bill_lines(bill: Bill) -> Iterator[str]:
    """Yield what the numbers of a bill are from, and when writing pays."""
    cache = bill.cache
    yield "Input bill: as a multiple of the prompts as retrieved with nothing cached."
    yield from bill.break_even()
    yield from price_lines(bill)
    yield (
        f"Rules of {cache.name} ({cache.date or 'no date'}, {cache.source or 'no source'}): "
        f"prefixes of {cache.least_tokens:,} tokens and more are kept."
    )


def demo_tables(runs: _Runs) -> Iterator[Table]:
    """Yield hit ratios, prefilled tokens and planning time: a table a cache size."""
    for size in _sizes(runs):
        yield _by_cache_size(
            f"What {_cache(size)} serves",
            [run for run in runs if run.capacity_tokens == size],
            ("without de-duplication", "with de-duplication"),
            ("hit\nratio", "prefilled", "to as\nretrieved"),
            lambda run, base: (
                f"{run.total.hit_ratio:.3f}",
                f"{run.total.prefilled_tokens:,}",
                f"{_times(run, base):.2f}",
            ),
        )


def _policies(runs: _Runs) -> Table:
    return _by_cache_size(
        "What the cache serves, and what is left to compute",
        runs,
        ("", _DEDUPLICATED),
        _REACHED,
        _reached,
        names_sizes=True,
    )


def _by_cache_size(
    title: str,
    runs: _Runs,
    headings: tuple[str, str],
    columns: tuple[str, ...],
    cells: Callable[[RunResult, RunResult], tuple[str, ...]],
    *,
    names_sizes: bool = False,
) -> Table:
    """Return a table with a row for each policy and cache size, grouped by size."""
    table: list[tuple[str, ...]] = []
    for size in _sizes(runs):
        of_size = [run for run in runs if run.capacity_tokens == size]
        cache = _cache(size) if names_sizes else ""
        plain, deduplicated = (", ".join(filter(None, (cache, one))) for one in headings)

        def rows(runs: _Runs, base: RunResult = of_size[0]) -> Iterator[tuple[str, ...]]:
            for run in runs:
                yield run.policy, *cells(run, base), f"{run.planning_ms:.3f}"

        table += _grouped(of_size, (plain, deduplicated), rows)
    return Table(title, (_POLICY, *columns, "planning\nms a\nrequest"), tuple(table))


def _grouped(
    runs: _Runs,
    headings: tuple[str, str],
    rows: Callable[[_Runs], Iterator[tuple[str, ...]]],
) -> tuple[tuple[str, ...], ...]:
    """Return rows of the runs without and of those with de-duplication, each under its heading."""
    table: list[tuple[str, ...]] = []
    for deduplicated, heading in enumerate(headings):
        of_kind = [run for run in runs if run.deduplicated == bool(deduplicated)]
        if heading and of_kind:
            table.append((heading,))
        table += rows(of_kind)
    return tuple(table)


def _ks(results: Results) -> Table:
    more = "" if results.level == "blocks" else ", of block tokens alone"
    more += "; histories come on top" if results.trace.conversations else ""
    bounds = {str(k): f"{share:.3f}" for k, share in results.bounds}
    grid = _grid("Hit ratio by blocks a request", results.part(Part.k), lambda run: str(run.k))
    last = (f"reuse bound{more}", *(bounds.get(name, "") for name in grid.head[1:]))
    return Table(grid.title, grid.head, (*grid.rows, last))


def _sessions(runs: _Runs) -> Table:
    size = runs[0].capacity_tokens
    title = f"Hit ratio by conversations at a time, with {_cache(size)}"
    return _grid(title, runs, lambda run: str(run.sessions))


def _grid(title: str, runs: _Runs, column: Callable[[RunResult], str]) -> Table:
    """Return a table with a row a policy and a column for each value."""
    columns = list(dict.fromkeys(map(column, runs)))
    rows = []
    for policy in dict.fromkeys(run.policy for run in runs):
        ratios = {column(run): run.total.hit_ratio for run in runs if run.policy == policy}
        cells = (f"{ratios[name]:.3f}" if name in ratios else "" for name in columns)
        rows.append((policy, *cells))
    return Table(title, (_POLICY, *columns), tuple(rows))


def _ablations(runs: _Runs, policies: _Runs) -> Table:
    """Return what each idea is worth."""
    base = {run.capacity_tokens: run for run in reversed(policies)}
    rows: list[tuple[str, ...]] = []
    for size in _sizes(runs):
        rows.append((_cache(size),))
        of_size = (run for run in runs if run.capacity_tokens == size)
        rows += ((run.policy, *_reached(run, base.get(size))) for run in of_size)
    return Table("One idea less", ("", *_REACHED), tuple(rows))


def _engine(title: str, runs: _Runs) -> Iterator[Table]:
    """Yield what a server reported, and how good its answers are."""
    base = runs[0]

    def table(
        title: str,
        head: tuple[str, ...],
        cells: Callable[[RunResult, RunResult], tuple[str, ...]],
    ) -> Table:
        def rows(runs: _Runs) -> Iterator[tuple[str, ...]]:
            for run in runs:
                common = set(run.request_ids) & set(base.request_ids)
                sessions = f" ({run.sessions})" if run.part == Part.sessions else ""
                yield f"{run.policy}{sessions}", *cells(run.only(common), base.only(common))

        return Table(title, (_POLICY, *head), _grouped(runs, ("", _DEDUPLICATED), rows))

    ratios = ("hit\nratio", "prefilled", "to as\nretrieved")
    times = ("first token\np50 ms", "\np95", "to as retrieved,\nrequest by request")
    yield table(title, ("requests", *ratios, *times), _usage)
    if any(run.scores for run in runs):
        scored = ("scored", "F1", "F1, change", "exact match")
        yield table("How good the answers are", scored, _scores)


# cells and words


def _times(run: RunResult, base: RunResult) -> float:
    """Return how many times the tokens of another run had to be computed."""
    before = base.total.prefilled_tokens
    return run.total.prefilled_tokens / before if before else 1.0


def _usage(run: RunResult, base: RunResult) -> tuple[str, ...]:
    if not run.first_token_s:
        return ("0", *("",) * 6)
    half, most = (run.first_token_percentile_s(share) for share in (50, 95))
    return (
        str(len(run.request_ids)),
        f"{run.total.hit_ratio:.3f}",
        f"{run.total.prefilled_tokens:,}",
        f"{_times(run, base):.2f}",
        f"{1e3 * half:,.0f}",
        f"{1e3 * most:,.0f}",
        _first_token_ratio(run, base),
    )


def _first_token_ratio(run: RunResult, base: RunResult) -> str:
    """Return how many times as long first tokens took: the geometric mean over the requests."""
    before = dict(zip(base.request_ids, base.first_token_s, strict=True))
    seconds = zip(run.request_ids, run.first_token_s, strict=True)
    pairs = [(after, before[one]) for one, after in seconds if before.get(one) and after]
    if not pairs:
        return ""
    if run == base:
        return "1.000"
    logs = bootstrap_interval([log(after / earlier) for after, earlier in pairs])
    return _interval(Interval(exp(logs.mean), exp(logs.low), exp(logs.high)))


def _scores(run: RunResult, base: RunResult) -> tuple[str, ...]:
    """Return F1, its paired change against a run of the same questions, and exact match."""
    plain = {one: f1 for one, f1, _ in base.scores}
    pairs = [(f1, plain[one]) for one, f1, _ in run.scores if one in plain]
    if not pairs:
        return "0", "", "", ""
    f1 = bootstrap_interval([f1 for f1, _ in pairs])
    change = bootstrap_interval([f1 - before for f1, before in pairs])
    return str(len(pairs)), _interval(f1), _interval(change, "+"), f"{run.mean_exact_match:.3f}"


def _changed(run: RunResult, earlier: RunResult) -> tuple[str, ...]:
    was, now = earlier.total, run.total
    change = now.hit_ratio - was.hit_ratio
    return (
        _run_name(run),
        f"{was.hit_ratio:.3f}",
        f"{now.hit_ratio:.3f}",
        (Good if change > 0 else Bad)(f"{change:+.3f}"),
        f"{now.prefilled_tokens / max(1, was.prefilled_tokens):.3f}",
        f"{earlier.planning_ms:.3f}",
        f"{run.planning_ms:.3f}",
    )


_REACHED = ("hit\nratio", "to compute,\nof as\nretrieved")


def _reached(run: RunResult, base: RunResult | None) -> tuple[str, str]:
    """Return what a run reached, as columns `_REACHED` have it."""
    return f"{run.total.hit_ratio:.3f}", "" if base is None else f"{_times(run, base):.2f}"


def _interval(interval: Interval, sign: str = "") -> str:
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _sizes(runs: _Runs) -> list[int | None]:
    """Return the cache sizes of some runs, in the order in which they come."""
    return list(dict.fromkeys(run.capacity_tokens for run in runs))


def _capacity(tokens: int | None) -> str:
    return "unlimited" if tokens is None else f"{tokens:,}"


def _cache(tokens: int | None) -> str:
    return "an unlimited cache" if tokens is None else f"a cache of {tokens:,} tokens"


def _settings(results: Results) -> tuple[tuple[str, str], ...]:
    return ("title", results.title), ("counted in", results.level), *results.settings


def _key(run: RunResult) -> tuple[object, ...]:
    return run.part, run.policy, run.deduplicated, run.capacity_tokens, run.k, run.sessions


def _run_name(run: RunResult) -> str:
    cache = "unlimited" if run.capacity_tokens is None else f"{run.capacity_tokens:,} tokens"
    sessions = "" if run.sessions is None else f", {run.sessions} at a time"
    shown = ", de-duplicated" if run.deduplicated else ""
    return f"{run.part}: {run.policy}{shown} (k={run.k}{sessions}, {cache})"


def _in_words(summary: TraceSummary) -> str:
    """Return what was replayed, in words."""
    turns = ""
    if summary.conversations:
        turns = f" ({summary.turns:,} of them turns of {summary.conversations:,} conversations)"
    return (
        f"{summary.requests:,} requests{turns} with {summary.blocks:,} different blocks and "
        f"{summary.block_tokens:,} block tokens in all. {summary.reuse_bound:.0%} of them had been "
        f"sent before: no order can have more of them served{_HISTORIES if turns else ''}."
    )


def best_of_ours(runs: _Runs) -> dict[str, RunResult]:
    """Return this package's runs that compute the fewest tokens: "online" and "offline"."""
    by_work = sorted(runs, key=lambda run: run.total.prefilled_tokens)
    best = {run.mode: run for run in reversed(by_work) if run.policy in _OURS}
    return {mode: best[mode] for mode in ("online", "offline") if mode in best}
