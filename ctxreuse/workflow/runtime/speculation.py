"""What a run starts before it is due: one generation and one search at most.

The first clusters often hold all of the final result. A generation that starts from a preview gains
the time of the rest of the search if the preview is final (HedraRAG, section 4.3). A speculation
goes one stage deep. Nothing outside sees it until it is committed, and no run fails because of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ctxreuse.serving.aio.concurrency import BackgroundTasks
from ctxreuse.workflow.errors import StateKeyError
from ctxreuse.workflow.graph.nodes import Generation, Retrieval
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.runtime.generations import GenerationAnswer, GenerationRequest
from ctxreuse.workflow.runtime.services import PreviewStability, RunContext, Services
from ctxreuse.workflow.vector_search.executor import SearchExecutor
from ctxreuse.workflow.vector_search.handle import NEVER, SearchHandle, SearchRecord
from ctxreuse.workflow.vector_search.top_k import TopK

_LOOK_AGAIN = 0.125
"""After which further part of a search to look again when it was too early."""

_MOST_LAUNCHES = 2
"""Launches of a generation from one retrieval: each wrong one costs the engine a prompt."""

_FREE_TOKENS = 1_000
"""Tokens that may be wasted before the share of wasted tokens is looked at."""


@dataclass(slots=True, eq=False)
class LaunchedGeneration:
    """A visit of a generation that was launched from a preview."""

    node: Generation
    visit: int
    answer: GenerationAnswer
    began_s: float


class SpeculativeGeneration:
    """A run's generation ahead (HedraRAG, section 4.3), for the very same request alone."""

    def __init__(self, context: RunContext, background: BackgroundTasks) -> None:
        self._context = context
        self._services = context.services
        self._background = background
        self.ids: tuple[int, ...] | None = None  # the preview that it rests on
        self._launched: LaunchedGeneration | None = None

    def launch(self, node: Generation, state: State, ids: tuple[int, ...]) -> bool:
        """Start a generation, unless too many are under way or too much has been wasted."""
        services = self._services
        options, counters = services.options, services.speculation
        if len(services.generations) >= options.max_generations:
            return False
        generated = _FREE_TOKENS + counters.generated_tokens
        if counters.wasted_tokens > options.max_wasted_share * generated:
            return False
        try:
            request = GenerationRequest.of(node, state)
        except StateKeyError:
            return False  # the real generation will say so
        answer = services.generations.begin(request, self._context.tenant)
        visit = state.visits(node.name) + 1
        counters.launched += 1
        self._launched = LaunchedGeneration(node, visit, answer, services.clock())
        self.ids = ids
        return True

    def commit(self, node: str, visit: int, request: GenerationRequest) -> GenerationAnswer | None:
        """Return the speculative answer if it is to this very request; else drop it."""
        launched = self._launched
        if launched is None:
            return None
        ended = launched.answer.receiving
        has_failed = ended.done() and (ended.cancelled() or ended.exception() is not None)
        is_same = (launched.node.name, launched.visit) == (node, visit)
        if not is_same or launched.answer.request != request or has_failed:
            self.drop()
            return None
        self._launched = self.ids = None
        self._services.speculation.committed += 1
        self._context.record(launched.node, launched.visit, launched.began_s, "committed")
        return launched.answer

    def drop(self) -> None:
        """Stop the generation, if one is under way."""
        launched = self._launched
        self._launched = self.ids = None
        if launched is not None:
            self._background.start(self._waste(launched))

    async def _waste(self, launched: LaunchedGeneration) -> None:
        await launched.answer.cancel()
        counters = self._services.speculation
        counters.wasted_prompts += 1
        counters.wasted_tokens += launched.answer.tokens
        self._context.record(launched.node, launched.visit, launched.began_s, "wasted")


@dataclass(slots=True, eq=False)
class EarlyLaunch:
    """Launches the generation behind one search before its end, and learns from the end."""

    context: RunContext
    ahead: SpeculativeGeneration
    retrieval: Retrieval
    generation: Generation
    state: State
    stability: PreviewStability
    due: float  # of the search, while nothing is launched
    launches: int = 0
    has_looked: bool = False

    def look(self, executor: SearchExecutor, search: SearchHandle) -> None:
        """Launch from what the search has found so far, or drop a launch that was wrong."""
        if self.has_looked and search.outcome is not None:
            return
        self.has_looked = True
        ahead, progress = self.ahead, executor.progress(search)
        is_always = self.context.services.options.speculation == "always"
        found = None if progress.best is None else progress.best.ids[: search.k]
        if is_always or found is None or not len(found):
            found = search.recalled
        if found is None:
            return
        ids = tuple(found.tolist())
        if ahead.ids is not None:
            if ids == ahead.ids or is_always:
                return
            ahead.drop()
            search.due = self.due
        if self.launches == _MOST_LAUNCHES:
            return
        if progress.best is None:
            is_time = self.stability.is_recalled_worth_it()
        else:
            is_time = self.stability.is_worth_it(progress.share)
        if not (is_time or is_always):
            search.schedule_preview(max(search.preview_at or 0.0, progress.share + _LOOK_AGAIN))
            return
        documents = executor.retriever.blocks_of(ids)
        state = self.state.overlay({self.retrieval.output: documents})
        if ahead.launch(self.generation, state, ids):
            self.launches += 1
            # the rest of the search is needed only when the generation ends
            usual_s = self.context.usual(self.generation).seconds.value
            search.due = self.context.services.clock() + 0.5 * usual_s

    def learn(self, search: SearchHandle, best: TopK) -> None:
        """Learn from a search that has ended, and drop the generation if it was wrong."""
        if self.ahead.ids != tuple(best.ids[: search.k].tolist()):
            self.ahead.drop()
        if search.recalled is not None:
            self.stability.observe_recalled(np.array_equal(search.recalled, best.ids[: search.k]))
        clusters = search.clusters
        held = np.flatnonzero(np.isin(clusters, best.found_in[: search.k]))
        self.stability.observe((held[-1] + 1) / len(clusters) if len(held) else 0.0)


class SpeculativeRetrieval:
    """A run's search ahead: used for the very same text, else it orders the real search."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._begun: tuple[str, SearchExecutor, SearchHandle] | None = None

    def begin(
        self, node: Retrieval, state: State, executor: SearchExecutor, record: SearchRecord | None
    ) -> None:
        """Search with what is expected to be the query, or to be near it."""
        scheduler = executor.scheduler
        if len(scheduler) >= self._services.options.max_retrievals or not scheduler.has_time:
            return
        try:
            text = node.query.render_text(state)
        except StateKeyError:
            return  # the real search will say so
        if self._begun is not None:
            _, earlier, search = self._begun
            record = search.record_of(earlier.progress(search).best) or record
            self.drop()
        self._services.speculation.searches += 1
        self._begun = (node.name, executor, executor.begin(text, node.k, NEVER, record))

    def take(self, node: Retrieval, text: str) -> tuple[SearchHandle | None, SearchRecord | None]:
        """Return the search for a query if it is under way, else a hint for it."""
        if self._begun is None:
            return None, None
        name, executor, search = self._begun
        record = None
        if name == node.name:
            counters = self._services.speculation
            if search.text == text and not isinstance(search.outcome, Exception):
                self._begun = None
                counters.searches_committed += 1
                return search, None
            record = search.record_of(executor.progress(search).best)
            counters.hints += record is not None
        self.drop()
        return None, record

    def drop(self) -> None:
        """Stop the search, if one is under way."""
        if self._begun is not None:
            _, executor, search = self._begun
            executor.cancel(search)
            self._begun = None
