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
