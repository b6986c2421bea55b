"""What a workflow engine has done: in numbers, and stage by stage over time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ctxreuse.context.checks import checked_choice, checked_kind
from ctxreuse.context.files import written_file
from ctxreuse.context.lru_map import PartSize
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.workflow.vector_search.scheduler import SearchCounters


@dataclass(slots=True)
class SpeculationCounters:
    """The gains and costs of speculation."""

    retrievals: int = 0  # before a generation, so that one could be launched
    launched: int = 0  # generations, before their retrieval had ended
    committed: int = 0  # how many of them were right
    wasted_tokens: int = 0
    wasted_prompts: int = 0
    generated_tokens: int = 0  # of all generations that were not wasted
    searches: int = 0  # that began with a part of a generation's text
    searches_committed: int = 0  # for the final text
    hints: int = 0  # others that told the real search where to scan first


@dataclass(frozen=True, slots=True)
class WorkflowMetrics:
    """What a workflow engine has done since it was made."""

    runs: int
    finished: int
    failed: int
    cancelled: int
    waiting: int  # for a slot
    in_flight: int
    generations: int  # speculative ones included
    searches: SearchCounters  # of all step-wise retrievers together
    speculation: SpeculationCounters
    planning_failures: int  # prompts with the documents as retrieved
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)


Outcome: TypeAlias = Literal["done", "committed", "wasted", "failed", "cancelled"]
"""How a stage ended; "committed" and "wasted" are ends of a speculation."""

_COLOURS = {"generation": "#4c72b0", "retrieval": "#dd8452", "function": "#8c8c8c"}
_HATCHES: dict[Outcome, str] = {"committed": "////", "wasted": "xxxx"}
_MOST_RUNS = 60
_ROW_INCHES = 0.28


@dataclass(frozen=True, slots=True)
class Span:
    """A stage, from its beginning to its end."""

    run: int  # its number, from 1
    workflow: str
    node: str
    visit: int
    kind: str  # "generation", "retrieval" or "function"
    began_s: float  # seconds of the engine's clock
    ended_s: float
    outcome: Outcome


Timeline: TypeAlias = deque[Span]
"""The latest stages of a workflow engine."""


def draw_timeline(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Draw the latest stages of a workflow engine."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("drawing a timeline", "workflow") from error
    known = list(timeline)
    if not known:
        raise InvalidRequestError("the engine has run nothing yet: there is no timeline to draw")
    runs = sorted({span.run for span in known})[-_MOST_RUNS:]
    spans = [span for span in known if span.run >= runs[0]]
    row_of = {run: row for row, run in enumerate(runs)}
    began = min(span.began_s for span in spans)
    checked_kind("path", path, (str, PathLike), "a path")
    picture = Path(path)
    picture = picture if picture.suffix else picture.with_name(f"{picture.name}.png")
    figure = Figure(figsize=(11, 1.6 + _ROW_INCHES * len(runs)), layout="constrained")
    kinds_of_pictures = list(figure.canvas.get_supported_filetypes())
    checked_choice("kind of picture", picture.suffix[1:].lower(), kinds_of_pictures)
    axes = figure.subplots()
    legend: dict[str, Any] = {}
    for span in spans:
        is_speculative = span.outcome in _HATCHES
        legend[f"{span.kind}, {span.outcome}"] = axes.barh(
            row_of[span.run] + (0.22 if is_speculative else -0.11),
            span.ended_s - span.began_s,
            left=span.began_s - began,
            height=0.22 if is_speculative else 0.44,
            color="white" if is_speculative else _COLOURS[span.kind],
            edgecolor=_COLOURS[span.kind] if span.outcome in ("done", "committed") else "#c44e52",
            hatch=_HATCHES.get(span.outcome),
            linewidth=0.6,
        )
    name_of = {span.run: span.workflow for span in spans}
    axes.set_yticks(range(len(runs)), [f"{name_of[run]} {run}" for run in runs], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    names = [*legend.values()], [*legend]
    figure.legend(*names, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    with written_file(picture) as file:
        figure.savefig(file, format=picture.suffix[1:], dpi=150)
