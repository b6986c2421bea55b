"""A report: results as one HTML file that needs no network, and as pictures."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeAlias

from ctxreuse.context.checks import checked_each, checked_kind
from ctxreuse.context.files import make_folder, write_text, written_file
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.doctor.findings import printable
from ctxreuse.measure.html_page import HtmlPage, legible
from ctxreuse.measure.replay.explain_plan import REMEDIES, TREE_DEPTH, TreeNode
from ctxreuse.measure.replay.policies import AS_SENT, TODAY
from ctxreuse.measure.replay.simulate import RunResult
from ctxreuse.measure.results.bill import Bill
from ctxreuse.measure.results.results import Results
from ctxreuse.measure.results.tables import bill_lines, tables
from ctxreuse.measure.results.verdict import verdict
from ctxreuse.measure.table import Table, shortened
from ctxreuse.rules.cache_rules import profile_spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_INK = "#123456"  # placeholder for the page's text colour
_SIZE = (7.2, 3.6)  # inches
_FONT_SIZE, _LABEL_SIZE = 10.0, 9.0
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")

_DASHES = ("-", "--", "-.", ":")
_BLUE = (0.25, 0.56, 0.82)
_LETTERS = 92  # letters that fit the width of the tree
_LONGEST_NAME = 32


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of some results."""

    name: str
    title: str
    words: str
    draw: Callable[[Axes], None]
    hovers: Mapping[str, str] = field(default_factory=dict)

    def figure(self, ink: str = "black") -> Figure:
        """Return it as a figure."""
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("a report's charts", "report") from error
        style: dict[Any, Any] = dict.fromkeys((*_INKED, "grid.color"), ink)
        with rc_context(style | {"font.size": _FONT_SIZE}):
            figure = Figure(figsize=_SIZE, layout="constrained")
            self.draw(figure.add_subplot())
        return figure

    def write(self, path: Path) -> None:
        """Write it as a PNG file."""
        figure = self.figure()
        figure.suptitle(self.title, fontsize=_FONT_SIZE)
        with written_file(path) as file:
            figure.savefig(file, format="png", dpi=160)

    def svg(self) -> str:
        """Return it as SVG for a page, in the page's colours."""
        figure = self.figure(_INK)
        from matplotlib import rc_context

        file = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
        for size in ("width", "height"):
            svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
        for name, words in self.hovers.items():
            shown = escape(legible(words), quote=False)
            svg = svg.replace(f'<g id="{name}">', f'<g id="{name}"><title>{shown}</title>', 1)
        # ids are the same in every chart
        svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{self.name}-", svg)
        return svg.replace("<svg", f'<svg role="img" aria-label="{self.title}"', 1)


def charts(results: Results) -> list[Chart]:
    """Return the charts that results have something for."""
    runs = [run for run in _shown(results) if run.capacity_tokens is None]
    found, tree = list[Chart](), results.tree
    if tree.children:
        boxes = {f"box-{n}": one for n, one in enumerate(_boxes(tree, max(1, tree.sent_tokens)))}
        shown = Chart(
            "tree",
            "What was sent, as a prefix tree: block, number of prompts",
            "Each row is a block further into the prompt. A box holds the prompts that begin like "
            "this, and is as wide as their share of all block tokens. The darker it is, the more "
            "often it was served after it was computed once. Pale boxes are many small ones.",
            lambda axes: _draw_tree(axes, boxes),
            hovers={
                gid: f"{node.label or node.name} ({node.name}): {node.requests:,} requests, "
                f"{node.sent_tokens:,} tokens"
                for gid, (*_, node) in boxes.items()
                if node is not None
            },
        )
        found.append(shown)
    if runs and runs[0].written is None:  # what a provider computes is not known
        computed = Chart(
            "prefilled",
            "Tokens for the engine to compute so far: lower is better",
            "All requests up to each one together; what was cached is left out.",
            lambda axes: _draw_over_time(axes, runs),
        )
        found.insert(0, computed)
    return found


def _shown(results: Results) -> list[RunResult]:
    """Return as retrieved, and the others with de-duplication, where there are conversations."""
    runs = results.part()
    deduplicated = [run for run in runs if run.deduplicated]
    if not deduplicated:
        return runs
    as_it_is = (TODAY.name, AS_SENT.name)
    plain = [run for run in runs if run.policy in as_it_is and not run.deduplicated]
    return plain + [
        replace(run, policy=f"{run.policy}, de-duplicated") if run.policy == AS_SENT.name else run
        for run in deduplicated
    ]


def _draw_over_time(axes: Axes, runs: Sequence[RunResult]) -> None:
    drawn = []
    for number, run in enumerate(runs):
        computed = [usage.prefilled_tokens / 1_000 for usage in accumulate(run.usages)]
        is_ours = run.strategy == "reuse"  # it is not hidden where lines meet
        drawn += axes.plot(
            range(1, len(computed) + 1),
            computed,
            label=shortened(printable(run.policy), _LONGEST_NAME),
            color=f"C{number}",
            linestyle=_DASHES[number % len(_DASHES)],
            linewidth=2.2 if is_ours else 1.6,
            zorder=3 if is_ours else 2,
        )
    axes.set(xlabel="requests, in the order in which they ran", ylabel="thousand tokens")
    axes.set_ylim(bottom=0)
    legend = axes.figure.legend(
        handles=drawn, loc="outside lower center", ncols=2, fontsize=_LABEL_SIZE, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign would begin a formula
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


_Box: TypeAlias = tuple[float, float, int, TreeNode | None]
"""Left, width (shares of the tree's), depth; without a node it stands for many small ones."""


def _boxes(node: TreeNode, total: int, left: float = 0.0, depth: int = 0) -> Iterator[_Box]:
    for child in node.children:
        width = child.sent_tokens / total
        yield left, width - min(0.001, width / 4), depth, child
        yield from _boxes(child, total, left, depth + 1)
        left += width
    if node.light_tokens:
        yield left, node.light_tokens / total, depth, None


def _draw_tree(axes: Axes, boxes: Mapping[str, _Box]) -> None:
    for gid, (left, width, depth, node) in boxes.items():
        shade = 0.1 if node is None else 1 - 0.8 / max(1, node.requests)
        color = (*_BLUE, shade)
        axes.barh(-depth, width, left=left, height=0.92, color=color, linewidth=0, gid=gid)
        fitting = int(_LETTERS * width)
        if node is not None and fitting >= 5:
            name = shortened(printable(node.label or node.name), 2 * fitting)
            lines = wrap(name, fitting, max_lines=2, placeholder="…", break_long_words=False)
            lines = [shortened(line, fitting) for line in lines]
            axes.text(
                left + width / 2,
                -depth,
                "\n".join([*lines, f"{node.requests:,}"]),
                ha="center",
                va="center",
                fontsize=6.5,
                parse_math=False,
            )
    axes.set(xlim=(0, 1), ylim=(-TREE_DEPTH + 0.5, 0.5), xlabel="share of the block tokens")
    axes.set_yticks([-n for n in range(TREE_DEPTH)], [str(n + 1) for n in range(TREE_DEPTH)])
    axes.set_ylabel("block of the prompt")
    axes.spines[["top", "right", "left"]].set_visible(False)


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
