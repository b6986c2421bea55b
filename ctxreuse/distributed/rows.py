"""Rows of a table as requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.checks import checked_kind
from ctxreuse.errors import InvalidRequestError, describe

Row: TypeAlias = Mapping[str, Any]

FIELDS = ("blocks", "query", "system", "history", "conversation_id", "tenant", "request_id")
"""What of a request stands in columns."""

_BLOCK_FIELDS = ("id", "text", "tokens")


@dataclass(frozen=True, slots=True)
class ColumnReader:
    """Reads requests from columns, by field where these have other names."""

    columns: Mapping[str, str]

    def __post_init__(self) -> None:
        checked_kind("columns", self.columns, Mapping, "a dict of field: column, or None")
        for name, column in self.columns.items():
            if name not in FIELDS:
                fields = ", ".join(map(repr, FIELDS))
                raise InvalidRequestError(
                    f"columns names the field {describe(name)}; a request has {fields}"
                )
            checked_kind(f"the column of {name!r}", column, str, "a string")

    def __call__(self, row: Row) -> ContextRequest:
        """Return a row's request."""
        fields = {}
        for name in FIELDS:
            column = self.columns.get(name, name)
            if column in row:
                fields[name] = row[column]
            elif name == "blocks" or name in self.columns:
                raise InvalidRequestError(
                    f"there is no column {column!r} with the {name} of a request; "
                    f"say which it is: columns={{{name!r}: ...}}"
                )
        for name in ("query", "tenant"):
            if name in fields and fields[name] is None:  # Arrow's null
                del fields[name]
        if isinstance(fields.get("history"), list):
            # without the keys that only other messages of the column have
            fields["history"] = [
                {name: part for name, part in one.items() if part is not None or name == "content"}
                if isinstance(one, Mapping)
                else one
                for one in fields["history"]
            ]
        return ContextRequest(_blocks(fields.pop("blocks")), **fields)


def _blocks(values: Any) -> Iterator[ContextBlock | str]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise InvalidRequestError(
            f"the blocks of a row must be a list of texts or of structs with "
            f"{', '.join(_BLOCK_FIELDS)}, not {describe(values)}"
        )
    for value in values:
        if isinstance(value, Mapping):
            if "text" not in value:
                raise InvalidRequestError(
                    f"a block must have a text; the struct has only {', '.join(map(repr, value))}"
                )
            yield ContextBlock(**{name: value[name] for name in _BLOCK_FIELDS if name in value})
        else:
            yield value
