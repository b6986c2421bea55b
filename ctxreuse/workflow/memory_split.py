"""Division of GPU memory between the KV cache and the hot clusters (HedraRAG, section 4.4).

A larger KV cache runs more generations at a time, a larger tier searches more clusters on the GPU.
A run needs both, so the slower of the two decides (Equation 2):

    argmax over KV_size of min{T_G(KV_size, rps_G), T_R(rps_R)}

As printed, T_R does not depend on KV_size; here it depends on the bytes that remain. The paper
writes both as throughputs of stages; here both count runs, which may have several stages of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ctxreuse.context.checks import checked_integer, checked_kind, checked_number, checked_positive
from ctxreuse.errors import InvalidRequestError, describe


@dataclass(frozen=True, slots=True, eq=False)
class ThroughputTable:
    """Measured throughput of a kind of stage, over memory and load, interpolated in between.

    Values beyond them are those of the nearest.

    Args:
        memory_bytes: (m,) sizes that were measured, ascending.
        arriving: (a,) stages that arrived in a second, ascending.
        completed: (m, a) stages that were completed in a second at that load.
    """

    memory_bytes: Sequence[float]
    arriving: Sequence[float]
    completed: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        _ascending(self.memory_bytes, "memory_bytes")
        _ascending(self.arriving, "arriving")
        shape = (len(self.memory_bytes), len(self.arriving))
        table = _numbers(self.completed)
        if table.shape != shape:
            raise InvalidRequestError(
                f"completed must hold {shape[0]} rows (one a memory size) of {shape[1]} numbers "
                "(one an arrival rate)"
            )
        if not (np.isfinite(table) & (table >= 0)).all():
            raise InvalidRequestError("completed must hold finite numbers from 0")

    def over_memory(self, arriving: float) -> npt.NDArray[np.float64]:
        """Return the throughput at each measured memory size: (m,) stages a second."""
        checked_number("arriving", arriving)
        rows = np.asarray(self.completed, dtype=np.float64)
        return np.array([np.interp(arriving, self.arriving, row) for row in rows])


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """How to divide a GPU's memory."""

    kv_bytes: int
    hot_bytes: int  # the capacity of a `GpuTier`
    generation: float  # runs a second that the generations would allow
    retrieval: float  # runs a second that the retrievals would allow
    throughput: float  # the smaller of the two


def split_memory(
    total_bytes: int,
    generation: ThroughputTable,
    retrieval: ThroughputTable,
    *,
    arriving_runs: float,
    generations_per_run: float = 1.0,
    retrievals_per_run: float = 1.0,
    least_kv_bytes: int = 0,
) -> MemorySplit:
    """Return the split with the largest throughput: Equation 2 of HedraRAG.

    Args:
        total_bytes: Memory for the KV cache and the hot clusters together.
        generation: Measured over sizes of the KV cache.
        retrieval: Measured over sizes of the hot tier; with one row where it does not matter.
        arriving_runs: Runs that arrive in a second.
        generations_per_run: Generation stages of a run, on average.
        retrievals_per_run: Retrieval stages of a run, on average.
        least_kv_bytes: The memory that the LLM server needs for its longest request.

    Returns:
        Of equally good splits the one with the largest KV cache.
    """
    checked_integer("total_bytes", total_bytes)
    if type(least_kv_bytes) is not int or not 0 <= least_kv_bytes <= total_bytes:
        raise InvalidRequestError(
            f"least_kv_bytes must be an integer from 0 to {total_bytes} (total_bytes), "
            f"not {describe(least_kv_bytes)}"
        )
    for name, table in (("generation", generation), ("retrieval", retrieval)):
        checked_kind(name, table, ThroughputTable, "a ThroughputTable")
    checked_positive("arriving_runs", arriving_runs)
    checked_positive("generations_per_run", generations_per_run)
    checked_positive("retrievals_per_run", retrievals_per_run)

    generated = generation.over_memory(arriving_runs * generations_per_run) / generations_per_run
    retrieved = retrieval.over_memory(arriving_runs * retrievals_per_run) / retrievals_per_run

    def split_at(kv_bytes: int) -> MemorySplit:
        hot_bytes = total_bytes - kv_bytes
        runs_generated = float(np.interp(kv_bytes, generation.memory_bytes, generated))
        runs_retrieved = float(np.interp(hot_bytes, retrieval.memory_bytes, retrieved))
        least = min(runs_generated, runs_retrieved)
        return MemorySplit(kv_bytes, hot_bytes, runs_generated, runs_retrieved, least)

    knots = {least_kv_bytes, total_bytes}
    knots |= {round(size) for size in generation.memory_bytes}
    knots |= {total_bytes - round(size) for size in retrieval.memory_bytes}
    ends = [split_at(size) for size in sorted(knots) if least_kv_bytes <= size <= total_bytes]
    crossings = [split_at(size) for low, high in pairwise(ends) for size in _crossing(low, high)]
    return max(ends + crossings, key=lambda split: (split.throughput, split.kv_bytes))


def _crossing(low: MemorySplit, high: MemorySplit) -> tuple[int, ...]:
    """Return the whole sizes around the one at which both throughputs are equal, if any is."""
    before, after = low.generation - low.retrieval, high.generation - high.retrieval
    if before * after >= 0:
        return ()
    share = before / (before - after)
    size = low.kv_bytes + int(share * (high.kv_bytes - low.kv_bytes))
    return (size, min(size + 1, high.kv_bytes))


def _ascending(numbers: Sequence[float], name: str) -> None:
    array = _numbers(numbers)
    if array.ndim != 1 or not array.size or not (np.isfinite(array) & (array >= 0)).all():
        raise InvalidRequestError(f"{name} must hold finite numbers from 0, at least one")
    if (np.diff(array) <= 0).any():
        raise InvalidRequestError(f"{name} must be in ascending order, each number once")


def _numbers(values: object) -> npt.NDArray[np.float64]:
    """Return values as an array, without dimensions if they are not all numbers, or rows differ."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array(0.0)
