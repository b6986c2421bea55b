"""Pictures of trees and matrices, for light and for dark pages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

GREY, ORANGE, BLUE, GREEN, RED = "#8c8c8c", "#e0a030", "#3f8fd2", "#2a9d5c", "#c44e52"


def draw_tree(axes: Axes, sequences: Mapping[str, Sequence[Hashable]], title: str = "") -> int:
    """Draw the prefix tree of what was sent, from left to right; return how many blocks it has.

    Args:
        axes: Where to draw.
        sequences: For each request, by its name, the blocks in the order in which they were sent.
        title: What is shown.
    """
    children: dict[tuple[Hashable, ...], list[tuple[Hashable, ...]]] = {(): []}
    ending: dict[tuple[Hashable, ...], list[str]] = {}
    for name, blocks in sequences.items():
        for size in range(1, len(blocks) + 1):
            path = tuple(blocks[:size])
            if path not in children:
                children[path] = []
                children[path[:-1]].append(path)
        ending.setdefault(tuple(blocks), []).append(name)
    height: dict[tuple[Hashable, ...], float] = {}
    rows = 0

    def place(path: tuple[Hashable, ...]) -> float:
        nonlocal rows
        if children[path]:
            below = [place(child) for child in children[path]]
            height[path] = (below[0] + below[-1]) / 2
        else:
            height[path], rows = float(rows), rows + 1
        return height[path]

    place(())
    for path, y in height.items():
        x = len(path)
        if path:
            axes.plot([x - 1, x], [height[path[:-1]], y], color=GREY, linewidth=1, zorder=1)
        shared = sum(tuple(blocks[:x]) == path for blocks in sequences.values())
        colour = GREY if not path else BLUE if shared > 1 else "white"
        axes.scatter([x], [y], s=320 if path else 60, color=colour, edgecolors=GREY, zorder=2)
        ink = "white" if path and shared > 1 else "black"
        axes.text(x, y, str(path[-1]) if path else "", ha="center", va="center", color=ink)
        axes.text(x + 0.22, y, "  ".join(ending.get(path, ())), va="center", fontsize=8)
    deepest = max(len(path) for path in children)
    axes.set(xlim=(-0.3, deepest + 0.9), ylim=(rows - 0.4, -0.6))
    axes.axis("off")
    axes.set_title(title)
    return len(children) - 1


def draw_matrix(
    axes: Axes, values: npt.NDArray[Any], names: Sequence[str] = (), title: str = "", form: str = ""
) -> Any:
    """Draw a square matrix, dark where values are small.

    Args:
        axes: Where to draw.
        values: The matrix, of numbers from 0 to 1.
        names: Of rows and columns.
        title: What is shown.
        form: How to write a value into its field; empty writes none.

    Returns:
        The image, for a colour bar.
    """
    # few colours and no smoothing keep the files of large ones small
    colours = plt.get_cmap("viridis", 11)
    image = axes.imshow(values, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.spines[:].set_visible(False)
    axes.set_title(title)
    if form:
        for row, column in np.ndindex(values.shape):
            value = values[row, column]
            ink = "black" if value > 0.6 else "white"
            axes.text(column, row, format(value, form), ha="center", va="center", color=ink)
    return image
