"""JSON lines, arrays and TREC runs, with errors that name file and line."""

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

LARGEST = 10**100 - 1  # in a file: sums, quotients and pictures of such numbers stay finite

_NO_TRACE = (
    "; for logs of prompts, run the application under `ctxreuse record`, or give its prompts to "
    "PromptRecorder; for queries, give the retriever's TREC run"
)
_BEGINNING = 500  # characters, in which a line of a run has its first two columns


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
            if name in self.fields:
                self.fail(f"field {name!r} is {describe(value)}; it must be {wanted}")
            if self.fields.keys() >= {"hash_ids", "input_length"}:
                self.fail("a trace in Mooncake's format has no texts; `ctxreuse simulate` reads it")
            hint = _NO_TRACE if name == "request_id" else ""
            self.fail(f"field {name!r} is missing; it must be {wanted}{hint}")
        return value

    def natural(self, name: str, default: Any = ...) -> Any:
        """Return a field that is an integer from 0; see `get`."""
        return self.amount(name, default, (int,))

    def amount(self, name: str, default: Any = ..., kinds: tuple[type, ...] = (int, float)) -> Any:
        """Return a field that is a time or a price; see `get`."""
        value = self.get(name, kinds, default)
        if value is not None and not 0 <= value <= LARGEST:  # NaN is refused, too
            kind = "an integer" if kinds == (int,) else "a number"
            self.fail(
                f"field {name!r} is {describe(value)}; it must be {kind} from 0, with at most 100 "
                "digits"
            )
        return value

    def ids(self, name: str) -> list[str | int]:
        """Return a field that is a list of block ids."""
        values = self.get(name, (list,))
        for value in values:
            if type(value) not in (str, int):
                self.fail(f"field {name!r} holds {describe(value)}; ids are strings or integers")
        return list(values)

    def marks(self, name: str, blocks: int) -> tuple[int, ...] | None:
        """Return a field that says after how many of some blocks marks stand; None without it."""
        if self.fields.get(name) is None:
            return None
        marks = self.get(name, (list,))
        is_counted = all(type(one) is int and 0 <= one <= blocks for one in marks)
        if not is_counted or marks != sorted(set(marks)):
            self.fail(f"field {name!r} must hold integers from 0 to {blocks}, ascending")
        return tuple(marks)


def read_lines(path: str) -> Iterator[JsonLine]:
    """Yield the objects of a file; see `lines_of`."""
    checked_kind("path", path, (str, os.PathLike), 'a path, or "-"')
    name = "standard input" if path == STANDARD_STREAM else path
    with file_errors(name, "read"):
        # bytes, so that a broken character is this line's fault and not the file's
        stream = sys.stdin.buffer if path == STANDARD_STREAM else open(path, "rb")  # noqa: SIM115
        with stream:
            yield from lines_of(bounded_lines(stream, name), name)


def lines_of(stream: Iterable[bytes], name: str) -> Iterator[JsonLine]:
    """Yield JSON objects, one a line or in arrays, or a TREC run's queries, documents by rank."""
    queries: dict[str, dict[int, str]] = {}
    for number, line in enumerate(stream, start=1):
        place = f"{name}:{number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 (byte {error.start}); convert the file"
            raise InputFileError(f"{place}: {problem}") from None
        if text[:_BEGINNING].split()[1:2] == ["Q0"]:
            _add_ranked(queries, place, text)
        elif text:
            yield from _objects(name, number, text)
    for query, ranked in queries.items():
        blocks = [ranked[rank] for rank in sorted(ranked)]
        place = f"{name}: query {describe(query)}"
        yield JsonLine(place, {"request_id": query, "blocks": blocks})


def _add_ranked(queries: dict[str, dict[int, str]], place: str, text: str) -> None:
    match text.split():
        case [query, _, document, rank, _, _] if rank.isdecimal() and len(rank) < 10:
            if queries.setdefault(query, {}).setdefault(int(rank), document) == document:
                return
            problem = f"query {describe(query)} has rank {rank} twice; rank each document"
        case _:
            problem = "broken line of a TREC run; it must be 'query Q0 document rank score tag'"
    raise InputFileError(f"{place}: {problem}")


def _objects(name: str, number: int, text: str) -> Iterator[JsonLine]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = describe(error)
        if isinstance(error, json.JSONDecodeError):
            reason, number = error.msg, number + error.lineno - 1  # of an array of several lines
        raise InputFileError(
            f"{name}:{number}: broken JSON ({reason}); each line must be one complete JSON object, "
            "or the file an array of them"
        ) from None
    is_array = isinstance(value, list)
    for at, one in enumerate(value if is_array else [value]):
        place = f"{name}:{number}" + f"[{at}]" * is_array
        if not isinstance(one, dict):
            raise InputFileError(f"{place}: {describe(one)} is no JSON object")
        yield JsonLine(place, one)


def write_lines(path: str, objects: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON objects, one a line: all of them, or none if anything fails."""
    text = "".join(json.dumps(entry) + "\n" for entry in objects)
    if path == STANDARD_STREAM:
        with file_errors("standard output", "written"):
            sys.stdout.write(text)
            sys.stdout.flush()
    else:
        write_text(path, text)
