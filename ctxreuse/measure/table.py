"""Tables, made once from rows and columns: what terminals and pages show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias, TypeVar

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Table:
    """A table; a row of one cell is a heading, and columns of numbers are aligned to the right."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_text: bool = False

    @classmethod
    def of(
        cls,
        title: str,
        groups: Mapping[str, Iterable[_Row]],
        columns: Mapping[str, Callable[[_Row], str]],
        *,
        is_text: bool = False,
    ) -> Self:
        """Return a table of groups; those that hold something stand under headings, if not ""."""
        table: list[tuple[str, ...]] = []
        for heading, rows in groups.items():
            cells = [tuple(cell(row) for cell in columns.values()) for row in rows]
            table += [(heading,)] if heading and cells else []
            table += cells
        return cls(title, tuple(columns), tuple(table), is_text)


def shortened(text: str, most: int = 60) -> str:
    """Return the beginning of a text, if it has more than so many characters."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


Shown: TypeAlias = str | Table  # a line of text, or a table
