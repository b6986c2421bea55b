"""Counting by digest, batch by batch; and looking up in arrays of digests."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Digests: TypeAlias = npt.NDArray[np.uint64]
Integers: TypeAlias = npt.NDArray[np.int64]
Booleans: TypeAlias = npt.NDArray[np.bool_]

NONE = -1
"""What stands for no position."""

_SUMMED_AT_ONCE = 1 << 22


class Tally:
    """Columns of numbers by digest, summed up now and then, so that memory stays small."""

    def __init__(self, *reducers: np.ufunc) -> None:
        self._reducers = reducers
        self._digests = [np.empty(0, dtype=np.uint64)]
        self._columns = [[np.empty(0, dtype=np.int64)] for _ in reducers]
        self._waiting = 0

    def add(self, digests: Digests, *columns: Integers) -> None:
        """Add a number a digest to each column."""
        self._digests.append(digests)
        for parts, column in zip(self._columns, columns, strict=True):
            parts.append(column)
        self._waiting += len(digests)
        if self._waiting > max(_SUMMED_AT_ONCE, len(self._digests[0])):
            self._sum_up()

    def digests(self) -> Digests:
        """Return the digests, sorted."""
        self._sum_up()
        return self._digests[0]

    def columns(self) -> list[Integers]:
        """Return for each column a number a digest, in the order of `digests`."""
        self._sum_up()
        return [parts[0] for parts in self._columns]

    def _sum_up(self) -> None:
        if self._waiting:
            digests = np.concatenate(self._digests)
            order = np.argsort(digests, kind="stable")
            digests = digests[order]
            starts = np.flatnonzero(np.concatenate(([True], digests[1:] != digests[:-1])))
            self._digests = [digests[starts]]
            self._columns = [
                [reducer.reduceat(np.concatenate(parts)[order], starts)]
                for reducer, parts in zip(self._reducers, self._columns, strict=True)
            ]
            self._waiting = 0


def positions(ordered: Digests, wanted: Digests) -> Integers:
    """Return where digests stand in a sorted array without repeats; -1 for those that do not."""
    if not len(ordered):
        return np.full(len(wanted), NONE)
    found = np.searchsorted(ordered, wanted)
    found[found == len(ordered)] = 0
    return np.where(ordered[found] == wanted, found, NONE)


def at(values: Integers, found: Integers, otherwise: int = NONE) -> Integers:
    """Return the values at positions, and something else for the position -1."""
    if not len(values):
        return np.full(len(found), otherwise)
    return np.where(found == NONE, otherwise, values[found])


def largest_first(rows: Integers, values: Integers, height: int, width: int) -> Integers:
    """Return the positions of the largest values of each row, the largest first, -1 behind them."""
    order = np.lexsort((-values, rows))
    starts = np.searchsorted(rows, np.arange(height))
    column = np.arange(len(rows)) - starts[rows]
    wanted = (column < width) & (values[order] >= 0)
    found = np.full((height, width), NONE)
    found[rows[wanted], column[wanted]] = order[wanted]
    return found
