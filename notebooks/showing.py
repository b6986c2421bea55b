"""What the notebooks show results with: a table, and pictures for light and for dark pages."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
from IPython.display import Markdown

from ctxreuse.cache import CacheUsage

BEFORE, AFTER, OTHER = "#8c8c8c", "#3f8fd2", "#2a9d5c"
"""Colours: as it was, with ctxreuse, with ctxreuse in another way."""

_INK = "#7d7d7d"  # as far from white as from black
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")


def prepare_pictures() -> None:
    """Have matplotlib draw without a background, in colours that white and black pages take."""
    mpl.rcParams.update(dict.fromkeys(_INKED, _INK))
    mpl.rcParams.update(
        {
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.figsize": (7.5, 3.2),
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
        }
    )


def before_and_after(measured: Mapping[str, CacheUsage]) -> Markdown:
    """Return a table of what the engine counted.

    Args:
        measured: The tokens of each way; the first is what the others are compared with.
    """
    lines = ["| | prompt tokens | cached | hit ratio | to compute | to before |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    first = next(iter(measured.values())).prefilled_tokens
    lines += [
        f"| {name} | {usage.prompt_tokens:,} | {usage.cached_tokens:,} | {usage.hit_ratio:.3f} "
        f"| {usage.prefilled_tokens:,} | {usage.prefilled_tokens / first:.2f} |"
        for name, usage in measured.items()
    ]
    return Markdown("\n".join(lines))


def each_before_and_after(pairs: Mapping[str, tuple[CacheUsage, CacheUsage]]) -> Markdown:
    """Return a table with a row for each way of asking.

    Args:
        pairs: What the engine counted as it was, and with ctxreuse.
    """
    lines = [
        "| | prompt tokens | ctxreuse | hit ratio | ctxreuse | to compute | ctxreuse | to before |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {name} | {old.prompt_tokens:,} | {new.prompt_tokens:,} | {old.hit_ratio:.3f} "
        f"| **{new.hit_ratio:.3f}** | {old.prefilled_tokens:,} | {new.prefilled_tokens:,} "
        f"| **{new.prefilled_tokens / old.prefilled_tokens:.2f}** |"
        for name, (old, new) in pairs.items()
    ]
    return Markdown("\n".join(lines))
