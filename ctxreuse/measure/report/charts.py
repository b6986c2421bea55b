"""A report's charts by matplotlib: as SVG in the colours of its page, and as PNG files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from ctxreuse.cache import CacheUsage
from ctxreuse.context.files import written_file
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.html_page import legible
from ctxreuse.measure.replay.explain_plan import TreeNode
from ctxreuse.measure.replay.policies import AS_SENT, TODAY
from ctxreuse.measure.replay.run_result import RunResult
from ctxreuse.measure.results.results_file import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#123456"
"""Placeholder for the page's text colour."""

_SIZES = {False: (5.6, 3.8), True: (9.4, 3.4)}
"""In inches, of usual and of wide charts."""

_FONT_SIZE, _LABEL_SIZE = 10.0, 9.0
_LINE_SHARE = 0.058
"""The height of a line of labels, as a share of the axes'."""

_SAME = 0.008
"""Lines that are nowhere further apart, as a share of the axes' height, are one to the eye."""

_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
"""Settings of text and lines."""

_MARKED: dict[str, Any] = {"marker": "o", "markersize": 3.5}

_BLUE = (0.25, 0.56, 0.82)
_DEEPEST = 5
_LETTERS = 120
"""Letters that fit the width of the tree."""

_LONGEST_NAME = 32


class PolicyStyle(NamedTuple):
    """How a chart shows a policy."""

    colour: str
    dashes: tuple[float, ...] = ()


POLICY_STYLES = {
    "as retrieved": PolicyStyle("#8c8c8c"),
    "as sent today": PolicyStyle("#5c6f96", (9, 2, 2, 2)),
    "papers' order, online": PolicyStyle("#d98c00", (5, 2)),
    "papers' order, batch": PolicyStyle("#c2452d", (5, 2, 1, 2)),
    "ctxreuse, online": PolicyStyle("#2f86d6", (14, 1.5)),
    "ctxreuse, batch": PolicyStyle("#1fa06a", (8, 2)),
    "as retrieved, de-duplicated": PolicyStyle("#a07850", (3, 1.5)),
}
"""A policy's style in every chart."""

OTHER_STYLES = (
    PolicyStyle("#7d7aff", (3, 3)),
    PolicyStyle("#6f9a1f", (10, 3, 2, 3)),
    PolicyStyle("#a259c4", (1, 1.5)),
    PolicyStyle("#2fa3a8", (2, 1)),
    PolicyStyle("#a89600", (6, 1.5, 1, 1.5, 1, 1.5)),
    PolicyStyle("#e0679a", (4, 1)),
    PolicyStyle("#93407c", (4, 1, 1, 1)),
)
"""For policies that not every report has, in turn."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of some results."""

    name: str
    title: str
    words: str
    draw: Callable[[Axes], None]
    is_wide: bool = False
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
            figure = Figure(figsize=_SIZES[self.is_wide], layout="constrained")
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
    runs = _shown(results, results.part())
    return [
        *_over_time([run for run in runs if run.capacity_tokens is None]),
        *_over_sizes(runs),
        *([_tree_chart(results.tree)] if results.tree.children else []),
    ]


def _over_time(unlimited: Sequence[RunResult]) -> Iterator[Chart]:
    if not unlimited:
        return
    yield Chart(
        "hit-ratio",
        "Hit ratio over the run",
        "Prompt tokens served from the prefix cache, of all so far.",
        lambda axes: _draw_over_time(
            axes, unlimited, lambda usage: usage.hit_ratio, ylabel="hit ratio", ylim=(0, 1)
        ),
    )
    if unlimited[0].bill is not None:
        return  # what a provider computes, and how fast, is not known
    yield Chart(
        "prefilled",
        "Tokens computed so far",
        "What is left for the engine to compute: the lower, the better.",
        lambda axes: _draw_over_time(
            axes,
            unlimited,
            lambda usage: usage.prefilled_tokens / 1_000,
            ylabel="thousand tokens",
            ylim=(0, None),
        ),
    )


def _over_sizes(runs: Sequence[RunResult]) -> Iterator[Chart]:
    if len({run.capacity_tokens for run in runs}) > 1:
        yield Chart(
            "cache-size",
            "Hit ratio and cache size",
            "An engine's cache is never unlimited; vLLM says at its start how many tokens it "
            "holds.",
            lambda axes: _draw_cache_sizes(axes, runs),
        )


def _tree_chart(tree: TreeNode) -> Chart:
    boxes = list(_boxes(tree, 0.0, 0, max(1, tree.sent_tokens)))
    return Chart(
        "tree",
        "What was sent, as a prefix tree",
        "Each row is a block further into the prompt. The width is the share of all block tokens "
        "whose prompts begin like this; the number says how many these are. The darker, the more "
        "often served after it was computed once; pale boxes are many small ones.",
        lambda axes: _draw_tree(axes, boxes),
        is_wide=True,
        hovers={
            f"box-{number}": f"{box.node.label or box.node.name} ({box.node.name}): "
            f"{box.node.requests:,} requests, {box.node.sent_tokens:,} tokens"
            for number, box in enumerate(boxes)
            if box.node is not None
        },
    )


def _shown(results: Results, runs: Sequence[RunResult]) -> list[RunResult]:
    """Return as retrieved, and the others with de-duplication, where there are conversations."""
    if not results.trace.conversations:
        return list(runs)
    deduplicated = [run for run in runs if run.deduplicated]
    if not deduplicated:
        return list(runs)
    as_it_is = (TODAY.name, AS_SENT.name)
    plain = [run for run in runs if run.policy in as_it_is and not run.deduplicated]
    return plain + [
        replace(run, policy=f"{run.policy}, de-duplicated") if run.policy == AS_SENT.name else run
        for run in deduplicated
    ]


@dataclass(frozen=True, slots=True)
class _Line:
    """A policy's line."""

    run: RunResult
    style: PolicyStyle
    xs: Sequence[float]
    ys: Sequence[float]


def _style(run: RunResult, number: int) -> PolicyStyle:
    return POLICY_STYLES.get(run.policy) or OTHER_STYLES[number % len(OTHER_STYLES)]


def _drawn(style: PolicyStyle, run: RunResult) -> dict[str, Any]:
    is_ours = run.strategy == "reuse"  # it is not hidden where lines meet
    return {
        "color": style.colour,
        "linestyle": (0, style.dashes) if style.dashes else "-",
        "linewidth": 2.2 if is_ours else 1.6,
        "zorder": 3 if is_ours else 2,
    }


def _draw_lines(axes: Axes, lines: Sequence[_Line], **more: Any) -> None:
    """Draw lines that have something to show, each with its policy's name at its end."""
    shown = [line for line in lines if line.ys]
    for line in shown:
        axes.plot(line.xs, line.ys, **_drawn(line.style, line.run), **more)
    low, high = axes.get_ylim()
    together: list[list[_Line]] = []
    for line in shown:
        same = (one for one in together if _are_one(one[0], line, _SAME * (high - low)))
        found = next(same, None)
        if found is None:
            together.append([line])
        else:
            found.append(line)
    ends = [((lines[0].ys[-1] - low) / ((high - low) or 1), lines) for lines in together]
    _label_ends(axes, sorted(ends, key=lambda end: -end[0]))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _are_one(one: _Line, other: _Line, most: float) -> bool:
    return list(one.xs) == list(other.xs) and all(
        abs(a - b) <= most for a, b in zip(one.ys, other.ys, strict=True)
    )


def _label_ends(axes: Axes, ends: Sequence[tuple[float, Sequence[_Line]]]) -> None:
    """Write names beside the ends of lines, the highest first, none over another."""
    heights = [_LINE_SHARE * len(lines) for _, lines in ends]
    places: list[float] = []
    top = 1.1
    for (end, _), height in zip(ends, heights, strict=True):
        places.append(min(end, top - height / 2))
        top = places[-1] - height / 2
    bottom = -0.1
    for number in reversed(range(len(places))):  # push up what has gone below the axes
        places[number] = max(places[number], bottom + heights[number] / 2)
        bottom = places[number] + heights[number] / 2
    for (end, lines), place in zip(ends, places, strict=True):
        drawn = {**_drawn(lines[0].style, lines[0].run), "linewidth": 1.4}
        axes.plot((1.01, 1.08), (end, place), transform=axes.transAxes, clip_on=False, **drawn)
        axes.text(
            1.09,
            place,
            _names(lines),
            transform=axes.transAxes,
            va="center",
            fontsize=_LABEL_SIZE,
            linespacing=1.05,
            parse_math=False,  # a dollar sign would begin a formula
        )


def _names(lines: Sequence[_Line]) -> str:
    """Return the names of lines that coincide, each in a row."""
    first, *others = lines
    rows = [_printable(first.run.policy, _LONGEST_NAME)]
    for line in others:
        sign = "=" if list(line.ys) == list(first.ys) else "≈"
        rows.append(f"{sign} {_printable(line.run.policy, _LONGEST_NAME)}")
    return "\n".join(rows)


def _draw_over_time(
    axes: Axes, runs: Sequence[RunResult], value: Callable[[CacheUsage], float], **settings: Any
) -> None:
    """Draw a line a run: a value of all usages so far."""
    lines = []
    for number, run in enumerate(runs):
        values = [value(usage) for usage in accumulate(run.usages)]
        lines.append(_Line(run, _style(run, number), range(1, len(values) + 1), values))
    most = max((max(line.ys, default=0) for line in lines), default=0)
    low, high = settings.pop("ylim")
    axes.set(
        xlabel="requests, in the order in which they ran",
        ylim=(low, high if high is not None else 1.05 * most or 1),
        **settings,
    )
    _draw_lines(axes, lines)


def _draw_cache_sizes(axes: Axes, runs: Sequence[RunResult]) -> None:
    sizes = sorted({run.capacity_tokens for run in runs if run.capacity_tokens is not None})
    places = {size: place for place, size in enumerate([*sizes, None])}
    plot_policies(axes, runs, lambda run: places[run.capacity_tokens])
    axes.set_xticks(list(places.values()), [*map(_short, sizes), "unlimited"])
    axes.set_xlabel("tokens that the cache holds")


def plot_policies(axes: Axes, runs: Sequence[RunResult], place: Callable[[RunResult], int]) -> None:
    """Draw a line a policy: hit ratios over the runs' places."""
    by_policy: dict[str, list[RunResult]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(run)
    lines = []
    for number, of_policy in enumerate(by_policy.values()):
        of_policy.sort(key=place)
        ratios = [run.total.hit_ratio for run in of_policy]
        first = of_policy[0]
        lines.append(_Line(first, _style(first, number), list(map(place, of_policy)), ratios))
    axes.set(ylabel="hit ratio", ylim=(0, 1))
    _draw_lines(axes, lines, **_MARKED)


class _Box(NamedTuple):
    """A box of the tree, in shares of its width; without a node it stands for many small ones."""

    left: float
    width: float
    depth: int
    node: TreeNode | None


def _boxes(node: TreeNode, left: float, depth: int, total: int) -> Iterator[_Box]:
    end = left + node.sent_tokens / total
    for child in node.children:
        width = child.sent_tokens / total
        yield _Box(left, width - min(0.0008, width / 4), depth, child)
        yield from _boxes(child, left, depth + 1, total)
        left += width
    if depth < _DEEPEST and end - left > 0.0005:
        yield _Box(left, end - left, depth, None)


def _draw_tree(axes: Axes, boxes: Sequence[_Box]) -> None:
    for number, box in enumerate(boxes):
        shade = 0.1 if box.node is None else 1 - 0.8 / max(1, box.node.requests)
        axes.barh(
            -box.depth,
            box.width,
            left=box.left,
            height=0.92,
            color=(*_BLUE, shade),
            linewidth=0,
            gid=f"box-{number}",
        )
        fitting = int(_LETTERS * box.width)
        if box.node is not None and fitting >= 5:
            name = _printable(box.node.label or box.node.name, 2 * fitting)
            lines = wrap(name, fitting, max_lines=2, placeholder="…") or [name]
            axes.text(
                box.left + box.width / 2,
                -box.depth,
                "\n".join([*lines, f"{box.node.requests:,}"]),
                ha="center",
                va="center",
                fontsize=6.5,
                parse_math=False,
            )
    axes.set(xlim=(0, 1), ylim=(-_DEEPEST + 0.5, 0.5), xlabel="share of the block tokens")
    axes.set_yticks([-depth for depth in range(_DEEPEST)], [str(n + 1) for n in range(_DEEPEST)])
    axes.set_ylabel("block of the prompt")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _printable(name: str, most: int) -> str:
    name = "".join(letter if letter.isprintable() else "?" for letter in name[: most + 1])
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _short(tokens: int) -> str:
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return str(tokens)
