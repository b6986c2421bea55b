"""A search that somebody waits for, from the text to the result."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

from ctxreuse.workflow.vector_search.scan_queue import TopK, VectorSearch
from ctxreuse.workflow.vector_search.sessions import Integers, SearchRecord

NEVER = float("inf")
"""When the result of a search is due that only prepares another one."""


class PreviewSchedule(NamedTuple):
    """When the owner of a search wishes to look at what has been found.

    Attributes:
        first: After which part of it, from 0 to 1.
        every: After which further part each time; 0 leaves it to the batches.
    """

    first: float = 0.0
    every: float = 0.0


ANY_TIME = PreviewSchedule()
"""Whenever a batch of it has ended anyway."""


class SearchHandle:
    """A search that has been asked for.

    Args:
        text: The query.
        k: How many results.
        due: When its result is needed; the least is served first.
        record: The last search of its session.
        on_progress: Called when a part of it has been done, but not all.
        kept: How many results are kept, for its record.
        looks: When `on_progress` should be called: a sub-stage ends there.

    Attributes:
        local: What of the last search's results is nearest to the new query, best first: a guess
            that costs nothing. None until the query is embedded, or without a last search.
    """

    def __init__(
        self,
        text: str,
        k: int,
        due: float,
        record: SearchRecord | None,
        on_progress: Callable[[SearchHandle], None] | None,
        kept: int,
        looks: PreviewSchedule = ANY_TIME,
    ) -> None:
        self.text = text
        self.k = k
        self.kept = kept
        self.record = record
        self.on_progress = on_progress
        self.ended: asyncio.Future[TopK] = asyncio.get_running_loop().create_future()
        # a search that only prepares another one may fail unheard
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.search: VectorSearch | None = None
        self.local: Integers | None = None
        self._due = due
        self._looks = looks

    @property
    def due(self) -> float:
        """When its result is needed."""
        return self._due

    @due.setter
    def due(self, due: float) -> None:
        self._due = due
        if self.search is not None:
            self.search.due = due

    @property
    def looks(self) -> PreviewSchedule:
        """When its owner wishes to look: a sub-stage ends there."""
        return self._looks

    @looks.setter
    def looks(self, looks: PreviewSchedule) -> None:
        self._looks = looks
        if self.search is not None:
            self.set_pauses(self.search)

    def set_pauses(self, search: VectorSearch) -> None:
        """Have the batches of its search end where its owner wishes to look."""
        clusters = len(search.clusters)
        search.pause_at = math.ceil(self._looks.first * clusters)
        search.pause_every = math.ceil(self._looks.every * clusters)

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a result."""
        ended = self.ended
        return ended.done() and (ended.cancelled() or ended.exception() is not None)
