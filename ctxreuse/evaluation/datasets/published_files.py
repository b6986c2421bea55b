"""Published files, read with errors that say what is wrong and where to get them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError, describe
from ctxreuse.evaluation.traces.json_lines import JsonLine, file_errors

_LFS_POINTER = b"version https://git-lfs.github.com/"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a data set comes from.

    Attributes:
        name: The format's name.
        files: The files that are expected.
        published: The project that publishes them; "" if users write them.
    """

    name: str
    files: str
    published: str = ""

    def missing(self, path: Path) -> InputFileError:
        """Return the error about a file that is not there."""
        origin = f", published at {self.published}" if self.published else ""
        return InputFileError(f"{path}: no such file; {self.name} is {self.files}{origin}")

    def find(self, *candidates: Path) -> Path:
        """Return the first path that exists.

        Raises:
            InputFileError: If none does; it names the first.
        """
        for path in candidates:
            if path.exists():
                return path
        raise self.missing(candidates[0])

    def require_known(self, path: Path, named: Iterable[str], known: Collection[str]) -> None:
        """Check that questions and passages belong together.

        Args:
            path: The file of the questions.
            named: What all questions together name, such as passage ids; possibly nothing.
            known: What there is of it.

        Raises:
            InputFileError: If there is none of what is named.
        """
        first = None
        for name in named:
            if name in known:
                return
            first = name if first is None else first
        if first is not None:
            raise InputFileError(
                f"{path}: nothing that it names is in the corpus, such as {describe(first)}; "
                "take both from the same release"
            )


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        InputFileError: If it cannot be read, or only says where Git LFS keeps it.
    """
    with file_errors(path, "read"):
        data = path.read_bytes()
    refuse_pointer(path, data)
    return data


def read_utf8(path: Path) -> str:
    """Return a file's text.

    Raises:
        InputFileError: If it cannot be read, or is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path}: not UTF-8 (byte {error.start}); convert the file") from None


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raise an error if a file's beginning is that of a Git LFS pointer."""
    if beginning.startswith(_LFS_POINTER):
        raise InputFileError(
            f"{path}: this is a Git LFS pointer and not the file; run 'git lfs pull' in its folder"
        )


def read_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
        InputFileError: If it cannot be read, or is no JSON.
    """
    text = read_utf8(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg}, line {error.lineno}"
            if isinstance(error, json.JSONDecodeError)
            else describe(error)
        )
        raise InputFileError(f"{path}: broken JSON ({reason}); get the file again") from None


def read_csv(path: Path, columns: Collection[str]) -> Iterator[JsonLine]:
    """Yield the rows of a comma-separated file that begins with the columns' names.

    Args:
        path: The file.
        columns: Names that must be among them.

    Raises:
        InputFileError: If it cannot be read, a column is missing, or a row is broken.
    """
    text = read_utf8(path)
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        missing = [name for name in columns if name not in (rows.fieldnames or ())]
        if missing:
            raise InputFileError(
                f"{path}: column {missing[0]!r} is missing; the first line must name the columns "
                f"{', '.join(columns)}"
            )
        for row in rows:
            yield JsonLine(f"{path}:{rows.line_num}", row)
    except csv.Error as error:
        raise InputFileError(
            f"{path}:{rows.reader.line_num}: broken CSV ({error}); get the file again"
        ) from None


def record(value: Any, place: str) -> JsonLine:
    """Return a JSON object whose fields can be asked for.

    Args:
        value: What should be one.
        place: Where it stands, for errors.

    Raises:
        InputFileError: If it is none.
    """
    if not isinstance(value, dict):
        raise InputFileError(f"{place}: {describe(value)} is no JSON object")
    return JsonLine(place, value)


def records(value: Any, place: str) -> list[JsonLine]:
    """Return the JSON objects of a list; of null, none.

    Args:
        value: What should be such a list.
        place: Where it stands, for errors.

    Raises:
        InputFileError: If it is none.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputFileError(f"{place}: {describe(value)} is no list of JSON objects")
    return [record(entry, f"{place}[{number}]") for number, entry in enumerate(value)]


def nested(line: JsonLine, name: str) -> list[JsonLine]:
    """Return a field that is a list of JSON objects; missing or null stands for none."""
    return records(line.fields.get(name), f"{line.place}.{name}")


def text_of(line: JsonLine, name: str, default: str | None = None) -> str:
    """Return a field that is a text, with '?' for what UTF-8 has no bytes for.

    Args:
        line: The object.
        name: The field.
        default: What a missing or null field stands for; None makes it an error.

    Raises:
        InputFileError: If it is no text.
    """
    return well_formed(line.get(name, (str,), ... if default is None else default))


def texts_of(line: JsonLine, name: str) -> list[str]:
    """Return a field that is a text or a list of texts; missing or null stands for none.

    Raises:
        InputFileError: If it is neither.
    """
    value = line.get(name, (str, list), [])
    if isinstance(value, str):
        return [well_formed(value)]
    for entry in value:
        if not isinstance(entry, str):
            line.fail(f"field {name!r} holds {describe(entry)}; it must hold texts")
    return [well_formed(entry) for entry in value]
