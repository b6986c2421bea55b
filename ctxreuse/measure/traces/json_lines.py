"""JSON lines, with errors that name file and line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import bounded_lines, file_errors, write_text
from ctxreuse.errors import InputFileError, describe

STANDARD_STREAM = "-"

LARGEST = 10**100 - 1
"""The largest count in a file: sums, quotients and pictures of such numbers stay finite."""


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A JSON object and its position: file and line."""

    place: str
    fields: Mapping[str, Any]

    def fail(self, problem: str) -> NoReturn:
        """Raise an error about this line."""
        raise InputFileError(f"{self.place}: {problem}")

    def get(self, name: str, kinds: tuple[type, ...], default: Any = ...) -> Any:
        """Return a field's value."""
        value = self.fields.get(name)
        if value is None and default is not ...:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            problem = "is missing" if name not in self.fields else f"is {describe(value)}"
            self.fail(f"field {name!r} {problem}; it must be {wanted}")
        return value

    def count(self, name: str, default: Any = ...) -> Any:
        """Return a field that is an integer; see `get`."""
        value = self.get(name, (int,), default)
        if value is not None and abs(value) > LARGEST:
            self.fail(f"field {name!r} is {describe(value)}; it must have at most 100 digits")
        return value

    def natural(self, name: str, default: Any = ...) -> Any:
        """Return a field that is an integer from 0; see `get`."""
        value = self.count(name, default)
        if value is not None and value < 0:
            self.fail(f"field {name!r} must be an integer from 0")
        return value

    def time_ms(self, name: str, default: Any = ...) -> Any:
        """Return a field that is a point in time, in milliseconds; see `get`."""
        value = self.get(name, (int, float), default)
        if value is not None and not 0 <= value <= LARGEST:  # NaN is refused, too
            self.fail(f"field {name!r} is {describe(value)}; it must be milliseconds from 0")
        return value

    def ids(self, name: str) -> list[str | int]:
        """Return a field that is a list of block ids."""
        values = self.get(name, (list,))
        for value in values:
            if not isinstance(value, (str, int)) or isinstance(value, bool):
                self.fail(f"field {name!r} holds {describe(value)}; ids are strings or integers")
        return list(values)

    def marks(self, name: str, blocks: int) -> tuple[int, ...] | None:
        """Return a field that says after how many of some blocks marks stand; None without it."""
        if self.fields.get(name) is None:
            return None
        marks = self.get(name, (list,))
        for mark in marks:
            if not isinstance(mark, int) or isinstance(mark, bool) or mark < 0:
                self.fail(f"field {name!r} must hold integers from 0")
        if marks != sorted(set(marks)):
            self.fail(f"field {name!r} must be ascending")
        if marks and marks[-1] > blocks:
            self.fail(f"field {name!r} must not count more blocks than the line has")
        return tuple(marks)


def read_lines(path: str) -> Iterator[JsonLine]:
    """Yield the JSON objects of a file, one a line; blank lines are skipped."""
    checked_kind("path", path, (str, os.PathLike), 'a path, or "-"')
    name = "standard input" if path == STANDARD_STREAM else path
    with file_errors(name, "read"):
        # bytes, so that a broken character is this line's fault and not the file's
        stream = sys.stdin.buffer if path == STANDARD_STREAM else open(path, "rb")  # noqa: SIM115
        with stream:
            yield from lines_of(bounded_lines(stream, name), name)


def lines_of(stream: Iterable[bytes], name: str) -> Iterator[JsonLine]:
    """Yield the JSON objects of an open file, one a line."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            yield JsonLine(f"{name}:{number}", _parse(f"{name}:{number}", line))


def _parse(place: str, line: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputFileError(f"{place}: not UTF-8 (byte {error.start}); convert the file") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else describe(error)
        raise InputFileError(
            f"{place}: broken JSON ({reason}); each line must be one complete JSON object"
        ) from None
    if not isinstance(value, dict):
        raise InputFileError(f"{place}: {describe(value)} is no JSON object")
    return value


def write_lines(path: str, objects: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON objects, one a line: all of them, or none if anything fails."""
    text = "".join(json.dumps(entry) + "\n" for entry in objects)
    if path == STANDARD_STREAM:
        with file_errors("standard output", "written"):
            sys.stdout.write(text)
            sys.stdout.flush()
    else:
        write_text(path, text)
