"""A search that somebody waits for, from the text to the result."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from ctxreuse.workflow.history import Integers, SearchRecord
from ctxreuse.workflow.scan_queue import Best, Search

NEVER = float("inf")
"""When the result of a search is due that only prepares another one."""


class PendingSearch:
    """A search that has been asked for.

    Args:
        text: The query.
        k: How many results.
        due: When its result is needed; the least is served first.
        record: The last search of its session.
        on_progress: Called when a part of it has been done, but not all.
        kept: How many results are kept, for its record.
        pause_at: As the attribute.

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
        on_progress: Callable[[PendingSearch], None] | None,
        kept: int,
        pause_at: float = 0.0,
    ) -> None:
        self.text = text
        self.k = k
        self.kept = kept
        self.record = record
        self.on_progress = on_progress
        self.ended: asyncio.Future[Best] = asyncio.get_running_loop().create_future()
        # a search that only prepares another one may fail unheard
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.search: Search | None = None
        self.local: Integers | None = None
        self._due = due
        self._pause_at = pause_at

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
    def pause_at(self) -> float:
        """After which part of it, from 0 to 1, a sub-stage ends, so that its owner can look."""
        return self._pause_at

    @pause_at.setter
    def pause_at(self, pause_at: float) -> None:
        self._pause_at = pause_at
        if self.search is not None:
            self.search.pause_at = self.clusters_before_pause(self.search)

    def clusters_before_pause(self, search: Search) -> int:
        """Return how many clusters of a search that is, rounded up."""
        return math.ceil(self._pause_at * len(search.clusters))

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a result."""
        ended = self.ended
        return ended.done() and (ended.cancelled() or ended.exception() is not None)
