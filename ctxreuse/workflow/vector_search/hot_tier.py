"""Keeps the clusters that are searched most in faster memory (HedraRAG, section 4.4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.context.checks import checked_integer, checked_kind, checked_share
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.workflow.vector_search.ivf import IVFIndex, integers, require_faiss

_ID_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class BuiltTier:
    """A set of clusters that was copied and waits to be swapped in."""

    copies: Mapping[int, Any]
    serve: Callable[[], None]  # has the index search these copies from now on


@dataclass(slots=True)
class TierCounters:
    """What a tier has done."""

    codes: int = 0  # vectors that were compared, for all pairs of query and cluster
    hot_codes: int = 0  # those in clusters that the tier held
    swaps: int = 0


class ClusterTier(ABC):
    """Chooses the clusters of a tier by how often they are searched, and exchanges them.

    The workflow engine notes each sub-stage. When a rebuild is `due`, it calls `build` in a
    background thread and then `swap`; a scan ends with the set that it began with. Until the last
    one has, both sets are in memory; in RAM, clusters that stayed only once.

    Args:
        index: The index whose clusters are held.
        capacity_bytes: Size limit of one set of copies: vectors and 8 bytes for each id.
        every: Sub-stages from one rebuild to the next; the paper's 50.
        decay: The share of the counts that remains after a rebuild, from 0 (forget all) to 1.
    """

    def __init__(
        self, index: IVFIndex, capacity_bytes: int, *, every: int = 50, decay: float = 0.5
    ) -> None:
        checked_kind("index", index, IVFIndex, "an IVFIndex")
        checked_integer("capacity_bytes", capacity_bytes)
        checked_integer("every", every, 1)
        self.counters = TierCounters()
        self.index = index
        self._capacity_bytes = capacity_bytes
        self._every = every
        self._decay = checked_share("decay", decay)
        self._accesses = np.zeros(index.nlist)
        self._is_held = np.zeros(index.nlist, dtype=np.bool_)
        self._serving: BuiltTier = BuiltTier(MappingProxyType({}), lambda: None)
        self._since_build = 0
        self._counting = ForkSafeLock()
        self._building = ForkSafeLock()

    @property
    def clusters(self) -> tuple[int, ...]:
        """The clusters that the tier holds, in ascending order."""
        return tuple(sorted(self._serving.copies))

    def note(self, clusters: npt.NDArray[np.int64]) -> None:
        """Count one sub-stage: the cluster of each pair, as given to `IVFIndex.scan`."""
        known = integers(clusters, "clusters", -1, self.index.nlist - 1)
        accesses = np.bincount(known[known >= 0], minlength=self.index.nlist)
        codes = accesses * self.index.cluster_sizes
        with self._counting:
            self._accesses += accesses
            self._since_build += 1
            self.counters.codes += int(codes.sum())
            self.counters.hot_codes += int(codes[self._is_held].sum())

    def due(self) -> bool:
        """Return whether it is time to build; false again as soon as a build has begun."""
        return self._since_build >= self._every

    def build(self) -> BuiltTier:
        """Return a copy of the clusters that are searched most, for `swap`; in any thread."""
        with self._building:
            with self._counting:
                accesses = self._accesses.copy()
                self._accesses *= self._decay
                self._since_build = 0
            # cost and bytes both grow with the vectors: a byte gains the number of accesses
            sizes = self.index.cluster_sizes * (self.index.code_size + _ID_BYTES)
            order = np.argsort(-accesses, kind="stable")
            chosen, used = [], 0
            for cluster in order[accesses[order] > 0].tolist():
                size = int(sizes[cluster])
                if 0 < size <= self._capacity_bytes - used:
                    chosen.append(cluster)
                    used += size
            present = self._serving.copies
            copies, serve = self._ready(
                {
                    cluster: present[cluster] if cluster in present else self._copy(cluster)
                    for cluster in sorted(chosen)
                }
            )
            return BuiltTier(MappingProxyType(copies), serve)

    def swap(self, built: BuiltTier) -> None:
        """Search from now on in the set that `build` returned."""
        if built.copies.keys() == self._serving.copies.keys():
            return
        built.serve()
        is_held = np.zeros(self.index.nlist, dtype=np.bool_)
        is_held[list(built.copies)] = True
        with self._counting:
            self._is_held = is_held
            self._serving = built
            self.counters.swaps += 1

    @abstractmethod
    def _copy(self, cluster: int) -> Any:
        """Return a copy of a cluster in the tier's memory."""

    @abstractmethod
    def _ready(self, copies: dict[int, Any]) -> tuple[dict[int, Any], Callable[[], None]]:
        """Return copies (given in ascending order) as they are kept, and what has them searched."""


class HotTier(ClusterTier):
    """The tier in RAM, over an index that was read with `IVFIndex.read(path, memory_map=True)`.

    A scan through many cold clusters pushes the hot ones out of the system's cache, not out of
    this.
    """

    def _copy(self, cluster: int) -> Any:
        faiss = require_faiss()
        copy = faiss.ArrayInvertedLists(1, self.index.code_size)
        ids, codes = self.index.ids_of(cluster), self.index.codes_of(cluster)
        copy.add_entries(0, len(ids), faiss.swig_ptr(ids), faiss.swig_ptr(codes))
        return copy

    def _ready(self, copies: dict[int, Any]) -> tuple[dict[int, Any], Callable[[], None]]:
        """Stack the copies and what lies between them into lists for all clusters."""
        if not copies:
            return copies, lambda: self.index.serve_from(None)
        faiss = require_faiss()
        cold = self.index.faiss_lists
        parts = []
        for before, cluster in pairwise([-1, *copies, self.index.nlist]):
            if before in copies:
                parts.append(copies[before])
            if before + 1 < cluster:
                parts.append(faiss.SliceInvertedLists(cold, before + 1, cluster))
        pointers = faiss.InvertedListsPtrVector()
        for part in parts:
            pointers.push_back(part)
        lists = faiss.VStackInvertedLists(len(parts), pointers.data())
        lists.parts = parts  # faiss keeps bare pointers to them
        return copies, lambda: self.index.serve_from(lists)
