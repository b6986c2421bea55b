"""A report: results as one HTML file that needs no network, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ctxreuse.context.checks import checked_each, checked_kind
from ctxreuse.context.files import make_folder, write_text
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.html_page import HtmlPage
from ctxreuse.measure.replay.explain_plan import REMEDIES
from ctxreuse.measure.report.charts import charts
from ctxreuse.measure.results.bill import Bill
from ctxreuse.measure.results.results import Results
from ctxreuse.measure.results.tables import bill_lines, tables
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.measure.table import Table
from ctxreuse.rules.cache_rules import profile_spec

_PAGE = HtmlPage(
    "ctxreuse.measure.report", "report.html.j2", feature="an HTML report", extra="report"
)


def check_report() -> None:
    """Raise MissingExtraError where what a report needs is not installed."""
    try:
        for package in ("jinja2", "matplotlib"):
            import_module(package)
    except ImportError as error:
        raise MissingExtraError("a report", "report") from error


def page(results: Results, more: Sequence[Table] = ()) -> str:
    """Return results, and more tables, as an HTML page that holds all it shows."""
    _check_results(results)
    bill = Bill.of(results)
    return _PAGE.render(
        results=results,
        verdict=verdict(results),
        bill_lines=[] if bill is None else list(bill_lines(bill)),
        cache=None if bill is None else profile_spec(bill.cache),
        charts=charts(results),
        tables=[*tables(results), *checked_each("more", more, Table, "a Table")],
        remedies=REMEDIES,
    )


def write_report(results: Results, path: str | Path) -> None:
    """Write the page of `page`."""
    write_text(path, page(results))


def write_pictures(results: Results, folder: str | Path) -> list[Path]:
    """Write the report's charts as PNG files; return their paths."""
    _check_results(results)
    make_folder(folder)
    paths = {Path(folder) / f"{chart.name}.png": chart for chart in charts(results)}
    for path, chart in paths.items():
        chart.write(path)
    return list(paths)


def _check_results(results: object) -> None:
    checked_kind("results", results, Results, "Results; measure_savings returns them")
