"""Public data sets, read as their authors publish them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from ctxreuse.context.checks import checked_choice, checked_integer, checked_kind
from ctxreuse.context.files import file_errors
from ctxreuse.errors import InputFileError, InvalidRequestError, describe
from public_data.datasets.dataset import Dataset, Passage, Question
from public_data.datasets.jsonl_folder import load_jsonl
from public_data.datasets.locomo import load_locomo
from public_data.datasets.mtrag import load_mtrag
from public_data.datasets.multihop_rag import load_multihop_rag

__all__ = ["LOADERS", "Dataset", "Loader", "Passage", "Question", "load"]

Loader: TypeAlias = Callable[[Path, int], Dataset]
"""From the path of the files, and the length of a passage in tokens, to the data set."""

LOADERS: Mapping[str, Loader] = MappingProxyType(
    {
        "multihop-rag": load_multihop_rag,
        "mtrag": load_mtrag,
        "locomo": load_locomo,
        "jsonl": load_jsonl,
    }
)

_Entry = TypeVar("_Entry", Passage, Question)


def load(name: str, path: str | Path, *, chunk_tokens: int = 512) -> Dataset:
    """Load a data set."""
    loader = LOADERS[checked_choice("data set", name, list(LOADERS))]
    if isinstance(chunk_tokens, bool):
        raise InvalidRequestError("chunk_tokens must be an integer from 1, not a bool")
    checked_integer("chunk_tokens", chunk_tokens, 1)
    checked_kind("path", path, (str, os.PathLike), "a path")
    with file_errors(path, "read"):  # a name that the file system refuses
        loaded = loader(Path(path), chunk_tokens)
    return Dataset(
        loaded.name,
        _distinct(path, "passage", loaded.passages),
        _distinct(path, "question", loaded.questions),
        loaded.notes,
    )


def _distinct(path: str | Path, kind: str, entries: Iterable[_Entry]) -> tuple[_Entry, ...]:
    distinct: dict[str, _Entry] = {}
    for entry in entries:
        if distinct.setdefault(entry.id, entry) != entry:
            raise InputFileError(
                f"{path}: {kind} {describe(entry.id)} is there twice, and not the same; "
                f"give every {kind} its own id"
            )
    if not distinct:
        raise InputFileError(f"{path}: holds no {kind}s; check that its files are complete")
    return tuple(distinct.values())
