"""The frameworks that `ctxreuse record` listens to: entry points of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import EntryPoint, entry_points
from typing import TypeAlias

from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.traces.recording import TraceRecorder

RECORDERS = "ctxreuse.recorders"

Recording: TypeAlias = Callable[[TraceRecorder], AbstractContextManager[object]]


def registered() -> dict[str, EntryPoint]:
    """Return the entry points by name, sorted."""
    found = sorted(entry_points(group=RECORDERS), key=lambda one: one.name)
    return {one.name: one for one in found}


def installed(entry: EntryPoint) -> Recording | None:
    """Load an entry point; None where its framework is missing, and not broken."""
    try:
        loaded: Recording = entry.load()
    except MissingExtraError as error:  # each integration says so itself
        if isinstance(error.__cause__, ModuleNotFoundError):
            return None
        raise
    return loaded
