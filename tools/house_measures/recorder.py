"""Which functions of product code a call enters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

INNER_MODEL = (
    "ctxreuse/serving/emulation/",
    "ctxreuse/cache/simulator.py",
    "ctxreuse/workflow/models/emulated_llm.py",
)
"""Where the code of the emulated engine begins with."""


class Size(NamedTuple):
    """How much of the product code a journey goes through."""

    functions: int
    files: int
    calls: int  # repeated entries included


class Stop(NamedTuple):
    """A function that a journey enters."""

    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


class Entries(NamedTuple):
    """How often a function was entered: by the call, and by threads that stood before it."""

    own: int
    standing: int


@dataclass(frozen=True, slots=True)
class Trip:
    """One run of a journey: what was entered, in order of first entry."""

    stops: Mapping[Stop, Entries]

    @property
    def size(self) -> Size:
        """Without the inner model, and without the threads that stood before the call."""
        own = {stop: one.own for stop, one in self.stops.items() if one.own}
        return _size(
            {stop: calls for stop, calls in own.items() if not stop.file.startswith(INNER_MODEL)}
        )

    @property
    def whole_size(self) -> Size:
        """With both."""
        return _size({stop: sum(entries) for stop, entries in self.stops.items()})


def _size(calls: Mapping[Stop, int]) -> Size:
    return Size(len(calls), len({stop.file for stop in calls}), sum(calls.values()))


class Recorder:
    """Notes which functions of product code are entered while it is told to.

    Made before the objects that are measured: a thread is seen only if it began after that.
    """

    def __init__(self, root: Path, folders: Iterable[str]) -> None:
        self._prefix = f"{root}/"
        self._folders = tuple(f"{root / folder}/" for folder in folders)
        self._standing: set[int | None] = set()
        self._entered: dict[CodeType, Entries] | None = None
        self._recorded: dict[CodeType, Entries] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread, and those that begin from now on."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note what is entered in here."""
        here = threading.get_ident()
        self._standing = {one.ident for one in threading.enumerate()} - {here}
        self._entered = {}
        try:
            yield
        finally:
            self._recorded, self._entered = self._entered, None

    def trip(self) -> Trip:
        """Return what was noted last."""
        stops: dict[Stop, Entries] = {}
        for code, entries in self._recorded.items():
            stop = Stop(code.co_filename.removeprefix(self._prefix), code.co_qualname)
            before = stops.get(stop, Entries(0, 0))
            stops[stop] = Entries(before.own + entries.own, before.standing + entries.standing)
        return Trip(stops)

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        entered, code = self._entered, frame.f_code
        if event != "call" or entered is None or not code.co_filename.startswith(self._folders):
            return
        name = code.co_name
        if not (name.startswith("<") or (name.startswith("__") and name.endswith("__"))):
            own, standing = entered.get(code, (0, 0))
            is_standing = threading.get_ident() in self._standing
            entered[code] = Entries(own + (not is_standing), standing + is_standing)
