"""A report: results as one HTML file that needs no network, and as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import make_folder, write_text, written_file
from ctxreuse.evaluation.html_page import HtmlPage
from ctxreuse.evaluation.report.charts import charts
from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.results.tables import best_of_ours, tables

_PAGE = HtmlPage(
    "ctxreuse.evaluation.report", "report.html.j2", feature="an HTML report", extra="report"
)


@dataclass(frozen=True, slots=True)
class _Card:
    """A headline number."""

    name: str
    number: str
    words: str
    is_good: bool = False


def page(results: Results) -> str:
    """Return results as an HTML page that holds everything it shows.

    Raises:
        InvalidRequestError: wrong type.
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    _check_results(results)
    return _PAGE.render(
        results=results,
        charts=charts(results),
        cards=list(_cards(results)),
        tables=list(tables(results)),
    )


def write_report(results: Results, path: str | Path) -> None:
    """Write the page of `page`.

    Raises:
        InputFileError: The file cannot be written.
        InvalidRequestError: wrong type.
        MissingExtraError: jinja2 or matplotlib is not installed.
    """
    write_text(path, page(results))


def write_pictures(results: Results, folder: str | Path) -> list[Path]:
    """Write the report's charts as PNG files; return their paths.

    Raises:
        InputFileError: A file cannot be written.
        InvalidRequestError: wrong type.
        MissingExtraError: matplotlib is not installed.
    """
    _check_results(results)
    paths = []
    make_folder(folder)
    for chart in charts(results):
        path = Path(folder) / f"{chart.name}.png"
        figure = chart.figure()
        figure.suptitle(chart.title, fontsize=10)
        with written_file(path) as file:
            figure.savefig(file, format="png", dpi=160)
        paths.append(path)
    return paths


def _check_results(results: object) -> None:
    checked_kind("results", results, Results, "Results; read them with Results.read")


def _cards(results: Results) -> Iterator[_Card]:
    unlimited = [run for run in results.part() if run.capacity_tokens is None]
    if not unlimited:
        return
    base = unlimited[0]
    before = base.total.prefilled_tokens
    yield _Card(
        "As retrieved", f"{base.total.hit_ratio:.0%}", "of the prompt tokens served from the cache"
    )
    for mode, best in best_of_ours(unlimited).items():
        name = "As requests arrive" if mode == "online" else "As one batch"
        saved = (before - best.total.prefilled_tokens) / before if before else 0.0
        change = "fewer" if saved >= 0 else "more"
        yield _Card(
            name,
            f"{abs(saved):.0%}",
            f"{change} tokens to compute; {best.total.hit_ratio:.0%} from the cache",
            is_good=saved > 0,
        )
        yield _Card("Planning", f"{best.planning_ms:.2f} ms", f"a request, {name.lower()}")
