"""Reads published files; errors say what is wrong and where to get the files."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxreuse.context.files import read_whole
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.traces.json_lines import JsonLine

_LFS_POINTER = b"version https://git-lfs.github.com/"


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a data set."""

    name: str
    files: str
    published: str = ""

    def missing(self, path: Path) -> InputFileError:
        """Return the error about a missing file."""
        origin = f", published at {self.published}" if self.published else ""
        return InputFileError(f"{path}: no such file; {self.name} is {self.files}{origin}")

    def find(self, *candidates: Path) -> Path:
        """Return the first path that exists."""
        for path in candidates:
            if path.exists():
                return path
        raise self.missing(candidates[0])

    def require_known(self, path: Path, named: Iterable[str], known: Collection[str]) -> None:
        """Check that questions and passages belong together."""
        names = list(named)
        if names and not any(name in known for name in names):
            raise InputFileError(
                f"{path}: nothing that it names is in the corpus, such as {describe(names[0])}; "
                "take both from the same release"
            )


def read_json(path: Path) -> Any:
    """Return the value of a JSON file."""
    data = read_whole(path)
    if data.startswith(_LFS_POINTER):
        raise InputFileError(
            f"{path}: this is a Git LFS pointer and not the file; run 'git lfs pull' in its folder"
        )
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path}: not UTF-8 (byte {error.start}); convert the file") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError) as error:
        reason = describe(error)
    raise InputFileError(f"{path}: broken JSON ({reason}); get the file again")


def record(value: Any, place: str) -> JsonLine:
    """Return a value as a JSON object."""
    if not isinstance(value, dict):
        raise InputFileError(f"{place}: {describe(value)} is no JSON object")
    return JsonLine(place, value)


def read_records(path: Path) -> list[JsonLine]:
    """Return the objects of a JSON file that holds a list of them."""
    return _records(read_json(path), str(path))


def nested(line: JsonLine, name: str) -> JsonLine:
    """Return a field that is a JSON object."""
    return record(line.fields.get(name), f"{line.place}.{name}")


def nested_records(line: JsonLine, name: str) -> list[JsonLine]:
    """Return a field that is a list of JSON objects; empty where it is missing or null."""
    return _records(line.fields.get(name), f"{line.place}.{name}")


def _records(value: Any, place: str) -> list[JsonLine]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputFileError(f"{place}: {describe(value)} is no list of JSON objects")
    return [record(entry, f"{place}[{number}]") for number, entry in enumerate(value)]


def new_name(line: JsonLine, field: str, seen: Container[str]) -> str:
    """Return a field that is a text, and that no earlier line has."""
    name = text_of(line, field)
    if name in seen:
        line.fail(f"{field} {describe(name)} was there before; get the file again")
    return name


def text_of(line: JsonLine, name: str, default: str | None = None) -> str:
    """Return a field that is a text; lone surrogates, which UTF-8 lacks, become '?'."""
    return well_formed(line.get(name, (str,), ... if default is None else default))


def texts_of(line: JsonLine, name: str) -> list[str]:
    """Return a field that is a text or a list of texts; empty where it is missing or null."""
    value = line.get(name, (str, list), [])
    if isinstance(value, str):
        return [well_formed(value)]
    for entry in value:
        if not isinstance(entry, str):
            line.fail(f"field {name!r} holds {describe(entry)}; it must hold texts")
    return [well_formed(entry) for entry in value]
