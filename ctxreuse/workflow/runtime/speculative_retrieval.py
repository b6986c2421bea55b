"""Searches that begin before the generation that writes their query has ended.

What they find is used only if the query turns out to be the very text that they searched for;
otherwise they tell the real search where to look first (HedraRAG, section 4.3, speculative
retrieval).
"""

from __future__ import annotations

from dataclasses import dataclass

from ctxreuse.workflow.errors import StateKeyError
from ctxreuse.workflow.graph.nodes import Retrieval
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.runtime.services import Services
from ctxreuse.workflow.vector_search.pending_search import NEVER, SearchHandle
from ctxreuse.workflow.vector_search.search_lane import SearchExecutor
from ctxreuse.workflow.vector_search.sessions import SearchRecord


@dataclass(slots=True, eq=False)
class _Guess:
    node: str
    lane: SearchExecutor
    pending: SearchHandle


class SpeculativeRetrieval:
    """The speculative retrieval of a run: at most one at a time.

    Args:
        services: What all runs share.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._current: _Guess | None = None

    def begin(
        self, node: Retrieval, state: State, lane: SearchExecutor, record: SearchRecord | None
    ) -> None:
        """Search with what is expected to be the query, or to be near it.

        Args:
            node: The retrieval that will come.
            state: What is expected to be known then.
            lane: Where it will be run.
            record: The last search.
        """
        if len(lane) >= self._services.options.max_retrievals or not lane.has_time:
            return
        try:
            text = node.query.render_text(state)
        except StateKeyError:
            return  # the real search will say so
        if self._current is not None:
            record = lane.snapshot(self._current.pending) or record
            self.drop()
        self._services.speculation.searches += 1
        self._current = _Guess(node.name, lane, lane.begin(text, node.k, NEVER, record))

    def take(self, node: Retrieval, text: str) -> tuple[SearchHandle | None, SearchRecord | None]:
        """Return the search for a query if it is under way, else where to look first.

        Args:
            node: The retrieval that begins.
            text: Its query.

        Returns:
            The search, which the caller goes on with, and the record of another one.
        """
        guess = self._current
        if guess is None or guess.node != node.name:
            self.drop()
            return None, None
        counters = self._services.speculation
        if guess.pending.text == text and not guess.pending.has_failed:
            self._current = None
            counters.searches_committed += 1
            return guess.pending, None
        record = guess.lane.snapshot(guess.pending)
        if record is not None:
            counters.hints += 1
        self.drop()
        return None, record

    def drop(self) -> None:
        """Stop the search, if there is one."""
        guess, self._current = self._current, None
        if guess is not None:
            guess.lane.cancel(guess.pending)
