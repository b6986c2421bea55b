"""A report: results as one HTML file that needs no network, and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import make_folder, write_text
from ctxreuse.measure.html_page import HtmlPage
from ctxreuse.measure.replay.explain_plan import REMEDIES
from ctxreuse.measure.replay.policies import OURS_BATCH, OURS_ONLINE, PRIMED
from ctxreuse.measure.report.charts import Chart, charts
from ctxreuse.measure.results.bill import Bill, Saving, savings_of
from ctxreuse.measure.results.results_file import CauseTotal, Miss, Results
from ctxreuse.measure.results.tables import bill_lines, bill_table, tables
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


_NAMES = {
    OURS_ONLINE.name: "As requests arrive",
    OURS_BATCH.name: "As one batch",
    PRIMED[0].name: "As requests arrive, with primes",
    PRIMED[1].name: "As one batch, with primes",
}


@dataclass(frozen=True, slots=True)
class _CauseRow:
    """What was computed again for one cause, and what to do about it."""

    total: CauseTotal
    remedy: str
    misses: Sequence[Miss]


def page(results: Results) -> str:
    """Return results as an HTML page that holds all it shows."""
    _check_results(results)
    return rendered(results)


def rendered(
    results: Results, more: Sequence[Table] = (), more_charts: Sequence[Chart] = ()
) -> str:
    """Return results, and more tables and charts, as a page."""
    said, bill = verdict(results), Bill.of(results)
    shown = None if bill is None else bill_table(bill)  # in front of the charts
    return _PAGE.render(
        results=results,
        verdict=said,
        cards=list(_cards(results, said)),
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
    """Yield what prompts cost as they are sent today and by this package; and planning."""
    saving, bill = said.saving, Bill.of(results)
    if saving is None:
        return
    rows = [
        one
        for one in savings_of(results.part(), results.cache)
        if one.run.capacity_tokens == saving.run.capacity_tokens and one.run.prompt_tokens
    ]
    ours = [one for one in rows if one.run.deduplicated == saving.run.deduplicated]
    for row in (*rows[:1], *(one for one in ours if one.run.policy in _NAMES)):
        is_first = row is rows[0]
        number, words = _number(row, bill)
        if not is_first:
            less = ("lower", "higher") if bill is not None else ("fewer", "more")
            change = f"{abs(row.share):.0%} {less[row.share < 0]}"
            words = f"{words}, input {change}" if bill is not None else f"{change} to compute"
        name = _NAMES.get(row.run.policy, row.run.policy.capitalize())
        yield _Card(name, number, words, is_good=row.share > 0)
    planning = next((one.run for one in ours if one.run.policy in _NAMES), None)
    if planning is not None:
        how = _NAMES[planning.policy].lower()
        yield _Card("Planning", f"{planning.planning_ms:.2f} ms", f"a request, {how}")


def _number(row: Saving, bill: Bill | None) -> tuple[str, str]:
    """Return what a card shows of a run, and what that is."""
    if bill is None:
        computed = row.after.uncached / row.requests
        return f"{computed:,.0f}", "prompt tokens computed a request"
    money = bill.money(row)
    if bill.prices is None or money is None:
        return f"{row.to_uncached:.2f}", "of the uncached input"
    return f"{amount(money)} {bill.prices.currency}", "per 1,000 requests"


def _causes(results: Results) -> Iterator[_CauseRow]:
    """Yield the causes for which something was computed again, each with its worst requests."""
    remedies: dict[str, str] = {cause.value: words for cause, words in REMEDIES.items()}
    for total in results.causes:
        misses = [one for one in results.misses if one.cause == total.cause]
        if total.lost_tokens or misses:
            yield _CauseRow(total, remedies.get(total.cause, ""), misses)
