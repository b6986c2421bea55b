"""The charts of a report, drawn with matplotlib: as SVG for its page, and as PNG files.

In the page a chart takes the colours of the page (light, dark or print): text and lines are drawn
in one colour that stands for the page's own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ctxreuse.cache import CacheUsage
from ctxreuse.errors import MissingExtraError
from ctxreuse.evaluation.replay.explain_plan import TreeNode
from ctxreuse.evaluation.replay.policies import AS_SENT
from ctxreuse.evaluation.replay.run_result import Part, RunResult
from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.results.tables import POLICY_COLOURS
from ctxreuse.serving.emulation.rates import COMMON_RATES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#123456"
"""Placeholder for the page's text colour."""

_OTHERS = ("#a06ab4", "#6f6ab4")
"""For policies that not every report has, in turn."""

_SIZES = {False: (4.6, 3.7), True: (9.4, 3.2)}
"""In inches, of usual and of wide charts."""

_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
"""Settings of text and lines."""

_MARKED: dict[str, Any] = {"marker": "o", "markersize": 3}

_BLUE = (0.25, 0.56, 0.82)
_DEEPEST = 5
_LETTERS = 130
"""Letters that fit the width of the tree."""

_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of some results.

    Attributes:
        name: Name of its PNG file and of its place in the page.
        title: What it shows.
        words: How to read it.
        draw: Draws it.
        is_wide: Whether it needs all the width of a page.
    """

    name: str
    title: str
    words: str
    draw: Callable[[Axes], None]
    is_wide: bool = False

    def figure(self, ink: str = "black") -> Figure:
        """Return it as a figure.

        Args:
            ink: The colour of text and lines.

        Raises:
            MissingExtraError: Matplotlib is not installed.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("a report's charts", "report") from error
        style: dict[Any, Any] = dict.fromkeys((*_INKED, "grid.color"), ink)
        with rc_context(style | {"font.size": 9.0}):
            figure = Figure(figsize=_SIZES[self.is_wide], layout="constrained")
            self.draw(figure.add_subplot())
        return figure

    def svg(self) -> str:
        """Return it as SVG for a page, in the page's colours.

        Raises:
            MissingExtraError: Matplotlib is not installed.
        """
        figure = self.figure(_INK)
        from matplotlib import rc_context

        file = io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
        for size in ("width", "height"):
            svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
        # ids are the same in every chart
        svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{self.name}-", svg)
        return svg.replace("<svg", f'<svg role="img" aria-label="{self.title}"', 1)


def charts(results: Results) -> list[Chart]:
    """Return the charts that results have something for."""
    runs = results.part()
    return [
        *_over_time(_shown([run for run in runs if run.capacity_tokens is None])),
        *_over_settings(results, _shown(runs)),
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
    is_measured = all(run.first_token_s for run in unlimited)
    yield Chart(
        "first-token",
        "Time to first token",
        "Share of the requests that needed no more time, as measured."
        if is_measured
        else f"Share of the requests that need no more time, at "
        f"{COMMON_RATES.prefill_tokens_per_s:,.0f} tokens a second and without waiting.",
        lambda axes: _draw_first_token(axes, unlimited),
    )


def _over_settings(results: Results, runs: Sequence[RunResult]) -> Iterator[Chart]:
    over_k, over_sessions = _shown(results.part(Part.k)), results.part(Part.sessions)
    if len({run.capacity_tokens for run in runs}) > 1:
        yield Chart(
            "cache-size",
            "Hit ratio and cache size",
            "An engine's cache is never unlimited; vLLM says at its start how many tokens it "
            "holds.",
            lambda axes: _draw_cache_sizes(axes, runs),
        )
    if over_k:
        more = "; the histories of conversations come on top" if results.trace.conversations else ""
        yield Chart(
            "blocks",
            "Hit ratio and blocks a request",
            "With an unlimited cache. The dotted line is the reuse bound: the share of the block "
            f"tokens that had been sent before, in whatever place{more}.",
            lambda axes: _draw_ks(axes, over_k, results.bounds),
        )
    if over_sessions:
        yield Chart(
            "sessions",
            "Hit ratio and conversations at a time",
            "The more take turns, the longer until one's history is needed again: a cache that "
            "is too small for all of them has lost it by then.",
            lambda axes: _draw_sessions(axes, over_sessions),
        )


def _tree_chart(tree: TreeNode) -> Chart:
    return Chart(
        "tree",
        "What was sent, as a prefix tree",
        "Each row is a block further into the prompt. The width is the share of all block tokens "
        "whose prompts begin like this; the number says how many these are. The darker, the more "
        "often served after it was computed once; pale boxes are many small ones.",
        lambda axes: _draw_tree(axes, tree),
        is_wide=True,
    )


def _shown(runs: Sequence[RunResult]) -> list[RunResult]:
    """Return as retrieved, and the others with de-duplication, where there are any."""
    deduplicated = [run for run in runs if run.deduplicated]
    if not deduplicated:
        return list(runs)
    plain = [run for run in runs if run.policy == AS_SENT.name and not run.deduplicated]
    return plain + [
        replace(run, policy=f"{run.policy}, de-duplicated") if run.policy == AS_SENT.name else run
        for run in deduplicated
    ]


def _style(run: RunResult, number: int) -> dict[str, Any]:
    return {
        # a dollar sign would begin a formula
        "label": _printable(run.policy, _LONGEST_NAME).replace("$", r"\$"),
        "color": POLICY_COLOURS.get(run.policy, _OTHERS[number % len(_OTHERS)]),
        "linestyle": "--" if run.mode == "offline" else "-",
        "zorder": 3 if run.strategy == "reuse" else 2,  # ours is not hidden where lines meet
    }


def _draw_over_time(
    axes: Axes, runs: Sequence[RunResult], value: Callable[[CacheUsage], float], **settings: Any
) -> None:
    """Draw a line a run: a value of all usages so far."""
    for number, run in enumerate(runs):
        values = [value(usage) for usage in accumulate(run.usages)]
        axes.plot(range(1, len(values) + 1), values, **_style(run, number))
    axes.set(xlabel="requests, in the order in which they ran", **settings)
    _finish(axes)


def _draw_first_token(axes: Axes, runs: Sequence[RunResult]) -> None:
    for number, run in enumerate(runs):
        estimated = (COMMON_RATES.step_s(usage.prefilled_tokens, 1) for usage in run.usages)
        seconds = sorted(run.first_token_s or estimated)
        shares = [place / len(seconds) for place in range(1, len(seconds) + 1)]
        axes.step(seconds, shares, where="post", **_style(run, number))
    axes.set(xlabel="seconds", ylabel="share of the requests", xlim=(0, None), ylim=(0, 1))
    _finish(axes)


def _draw_cache_sizes(axes: Axes, runs: Sequence[RunResult]) -> None:
    sizes = sorted({run.capacity_tokens for run in runs if run.capacity_tokens is not None})
    places = {size: place for place, size in enumerate([*sizes, None])}
    _plot_policies(axes, runs, lambda run: places[run.capacity_tokens])
    axes.set_xticks(list(places.values()), [*map(_short, sizes), "unlimited"])
    axes.set_xlabel("tokens that the cache holds")


def _draw_ks(axes: Axes, runs: Sequence[RunResult], bounds: Sequence[tuple[int, float]]) -> None:
    ks, shares = [k for k, _ in bounds], [share for _, share in bounds]
    axes.plot(ks, shares, color="#8c8c8c", linestyle=":", label="reuse bound")
    _plot_policies(axes, runs, lambda run: run.k or 0)
    axes.set_xticks(sorted({run.k for run in runs if run.k is not None}))
    axes.set_xlabel("blocks a request at most")


def _draw_sessions(axes: Axes, runs: Sequence[RunResult]) -> None:
    counts = sorted({run.sessions for run in runs if run.sessions is not None})
    _plot_policies(axes, runs, lambda run: run.sessions or 0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("conversations at a time")


def _plot_policies(
    axes: Axes, runs: Sequence[RunResult], place: Callable[[RunResult], int]
) -> None:
    """Draw a line a policy: hit ratios over the runs' places."""
    by_policy: dict[str, list[RunResult]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(run)
    for number, of_policy in enumerate(by_policy.values()):
        of_policy.sort(key=place)
        ratios = [run.total.hit_ratio for run in of_policy]
        axes.plot(list(map(place, of_policy)), ratios, **_MARKED, **_style(of_policy[0], number))
    axes.set(ylabel="hit ratio", ylim=(0, 1))
    _finish(axes)


def _draw_tree(axes: Axes, root: TreeNode) -> None:
    total = max(1, root.sent_tokens)

    def box(left: float, width: float, depth: int, shade: float) -> None:
        axes.barh(-depth, width, left=left, height=0.92, color=(*_BLUE, shade), linewidth=0)

    def draw(node: TreeNode, left: float, depth: int) -> None:
        end = left + node.sent_tokens / total
        for child in node.children:
            width = child.sent_tokens / total
            gap = min(0.0008, width / 4)
            box(left, width - gap, depth, 1 - 0.8 / max(1, child.requests))
            fitting = int(_LETTERS * width)
            if fitting >= 5:
                words = f"{_printable(child.name, fitting)}\n{child.requests:,}"
                axes.text(
                    left + width / 2,
                    -depth,
                    words,
                    ha="center",
                    va="center",
                    fontsize=6,
                    parse_math=False,
                )
            draw(child, left, depth + 1)
            left += width
        if depth < _DEEPEST and end - left > 0.0005:
            box(left, end - left, depth, 0.1)  # what is too light to be shown one by one

    draw(root, 0.0, 0)
    axes.set(xlim=(0, 1), ylim=(-_DEEPEST + 0.5, 0.5), xlabel="share of the block tokens")
    axes.set_yticks([-depth for depth in range(_DEEPEST)], [str(n + 1) for n in range(_DEEPEST)])
    axes.set_ylabel("block of the prompt")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    # not among the lines, which no corner of the axes is sure to be free of
    axes.figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        fontsize=7,
        frameon=False,
    )


def _printable(name: str, most: int) -> str:
    name = "".join(letter if letter.isprintable() else "?" for letter in name[: most + 1])
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _short(tokens: int) -> str:
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return str(tokens)
