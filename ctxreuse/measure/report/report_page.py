"""A report: results as one HTML file that needs no network, and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import make_folder, write_text
from ctxreuse.measure.html_page import HtmlPage
from ctxreuse.measure.replay.explain_plan import REMEDIES
from ctxreuse.measure.replay.policies import OURS_BATCH, OURS_ONLINE
from ctxreuse.measure.replay.run_result import RunResult
from ctxreuse.measure.report.charts import Chart, charts
from ctxreuse.measure.results.bill import Bill
from ctxreuse.measure.results.results_file import CauseTotal, Miss, Results
from ctxreuse.measure.results.tables import best_of_ours, bill_lines, bill_table, tables
from ctxreuse.measure.results.verdict import SavingsVerdict, amount, verdict
from ctxreuse.measure.table import Table
from ctxreuse.rules.cache_rules import profile_spec

_PAGE = HtmlPage(
    "ctxreuse.measure.report", "report.html.j2", feature="an HTML report", extra="report"
)


@dataclass(frozen=True, slots=True)
class _Card:
    """A headline number."""

    name: str
    number: str
    words: str
    is_good: bool = False


@dataclass(frozen=True, slots=True)
class _CauseRow:
    """What was computed again for one cause, and what to do about it."""

    total: CauseTotal
    remedy: str
    misses: Sequence[Miss]


def page(results: Results, more: Sequence[Table] = (), more_charts: Sequence[Chart] = ()) -> str:
    """Return results, and more tables and charts, as an HTML page that holds all it shows."""
    _check_results(results)
    said, bill = verdict(results), Bill.of(results)
    shown = None if bill is None else bill_table(bill)  # in front of the charts
    return _PAGE.render(
        results=results,
        verdict=said,
        cards=list(_cards(results, said) if bill is None else _bill_cards(bill, results, said)),
        bill=shown,
        bill_lines=[] if bill is None else list(bill_lines(bill)),
        cache=None if bill is None else profile_spec(bill.cache),
        charts=[*charts(results), *more_charts],
        tables=[*(one for one in tables(results) if one != shown), *more],
        causes=list(_causes(results)),
        lossless=[one for one in results.causes if not one.lost_tokens],
    )


def write_report(results: Results, path: str | Path) -> None:
    """Write the page of `page`."""
    write_text(path, page(results))


def write_pictures(results: Results, folder: str | Path) -> list[Path]:
    """Write the report's charts as PNG files; return their paths."""
    _check_results(results)
    paths = []
    make_folder(folder)
    for chart in charts(results):
        path = Path(folder) / f"{chart.name}.png"
        chart.write(path)
        paths.append(path)
    return paths


def _check_results(results: object) -> None:
    checked_kind("results", results, Results, "Results; read them with Results.read")


def _cards(results: Results, said: SavingsVerdict) -> Iterator[_Card]:
    """Yield prompt tokens computed a request, as retrieved and by this package; and planning."""
    size = None if said.saving is None else said.saving.run.capacity_tokens
    runs = [run for run in results.part() if run.capacity_tokens == size and run.prompt_tokens]
    best = best_of_ours(runs)
    if not best:
        return
    before = _computed(runs[0])
    yield _Card("As retrieved", f"{before:,.0f}", "prompt tokens computed a request")
    for mode, run in best.items():
        name = "As requests arrive" if mode == "online" else "As one batch"
        saved = 1 - _computed(run) / before if before else 0.0
        words = f"{abs(saved):.0%} {'fewer' if saved >= 0 else 'more'} to compute"
        yield _Card(name, f"{_computed(run):,.0f}", words, is_good=saved > 0)
    mode, run = next(iter(best.items()))
    how = "as requests arrive" if mode == "online" else "as one batch"
    yield _Card("Planning", f"{run.planning_ms:.2f} ms", f"a request, {how}")


def _bill_cards(bill: Bill, results: Results, said: SavingsVerdict) -> Iterator[_Card]:
    """Yield the input bill as it is sent today and by this package; or the money, with prices."""
    deduplicated = said.saving is not None and said.saving.run.deduplicated
    names = {OURS_ONLINE.name: "As requests arrive", OURS_BATCH.name: "As one batch"}
    base = (bill.base.policy, bill.base.deduplicated)
    before = next(row for row in bill.rows if (row.run.policy, row.run.deduplicated) == base)
    for row in bill.rows:
        if row is not before and (
            row.run.policy not in names or row.run.deduplicated != deduplicated
        ):
            continue
        number, words = f"{row.to_uncached:.2f}", "of the uncached input"
        money = bill.money(row)
        if bill.prices is not None and money is not None:
            number, words = f"{amount(money)} {bill.prices.currency}", "per 1,000 requests"
        if row is not before and before.to_uncached:
            change = 1 - row.to_uncached / before.to_uncached
            words += f", input {abs(change):.0%} {'lower' if change >= 0 else 'higher'}"
        is_good = row.to_uncached < before.to_uncached
        name = names.get(row.run.policy, row.run.policy.capitalize())
        yield _Card(name, number, words, is_good)
    for run in results.part():
        if run.policy == OURS_ONLINE.name and run.deduplicated == deduplicated:
            yield _Card("Planning", f"{run.planning_ms:.2f} ms", "a request, as requests arrive")


def _computed(run: RunResult) -> float:
    """Return the prompt tokens that are computed a request."""
    return run.total.prefilled_tokens / len(run.prompt_tokens)


def _causes(results: Results) -> Iterator[_CauseRow]:
    """Yield the causes for which something was computed again, each with its worst requests."""
    remedies: dict[str, str] = {cause.value: words for cause, words in REMEDIES.items()}
    for total in results.causes:
        misses = [one for one in results.misses if one.cause == total.cause]
        if total.lost_tokens or misses:
            yield _CauseRow(total, remedies.get(total.cause, ""), misses)
