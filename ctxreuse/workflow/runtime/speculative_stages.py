"""What a run has started before it is due: one generation and one search at most.

A speculation goes one stage deep. Nothing outside sees it until it is committed, and no run fails
because of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ctxreuse.serving.aio.concurrency import BackgroundTasks
from ctxreuse.workflow.errors import StateKeyError
from ctxreuse.workflow.graph.nodes import Generation, Retrieval
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.runtime.generations import GenerationAnswer, GenerationRequest
from ctxreuse.workflow.runtime.measurements import Outcome, Span
from ctxreuse.workflow.runtime.services import RunContext, Services
from ctxreuse.workflow.vector_search.executor import SearchExecutor
from ctxreuse.workflow.vector_search.handle import NEVER, SearchHandle, SearchRecord

_FREE_TOKENS = 1_000
"""Tokens that may be wasted before the share of wasted tokens is looked at."""


@dataclass(slots=True, eq=False)
class LaunchedGeneration:
    """A generation that was launched from a preview.

    Attributes:
        node: The generation's node.
        visit: Which visit of it.
        answer: What the model says.
        began_s: When it was launched.
    """

    node: str
    visit: int
    answer: GenerationAnswer
    began_s: float


class SpeculativeGeneration:
    """The speculative generation of a run (HedraRAG, section 4.3).

    It is committed only to a request that equals its own, byte for byte.

    Args:
        services: What all runs share.
        context: The run.
        background: Closes the streams of wrong speculations.

    Attributes:
        ids: The preview that the generation under way rests on; None if none is.
    """

    def __init__(
        self, services: Services, context: RunContext, background: BackgroundTasks
    ) -> None:
        self._services = services
        self._context = context
        self._background = background
        self.ids: tuple[int, ...] | None = None
        self._launched: LaunchedGeneration | None = None

    def launch(self, node: Generation, state: State, ids: tuple[int, ...]) -> bool:
        """Start a generation, unless too many are under way or too much has been wasted.

        Args:
            node: The generation.
            state: What is expected to be known then.
            ids: The preview that the expectation rests on.

        Returns:
            Whether it was started.
        """
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
        self._launched = LaunchedGeneration(node.name, visit, answer, services.clock())
        self.ids = ids
        return True

    def commit(self, node: str, visit: int, request: GenerationRequest) -> GenerationAnswer | None:
        """Return the speculative answer if it is to this very request; else drop it."""
        launched = self._launched
        if launched is None:
            return None
        if (
            (launched.node, launched.visit) != (node, visit)
            or launched.answer.request != request
            or launched.answer.has_failed
        ):
            self.drop()
            return None
        self._launched = self.ids = None
        self._services.speculation.committed += 1
        self._note(launched, "committed")
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
        self._note(launched, "wasted")

    def _note(self, launched: LaunchedGeneration, outcome: Outcome) -> None:
        self._services.timeline.append(
            Span(
                run=self._context.number,
                workflow=self._context.workflow,
                node=launched.node,
                visit=launched.visit,
                kind="generation",
                began_s=launched.began_s,
                ended_s=self._services.clock(),
                outcome=outcome,
            )
        )


class SpeculativeRetrieval:
    """The speculative search of a run, begun before the generation that writes its query has ended.

    Its result is used only if the query turns out to be the very text that it searched for;
    otherwise it tells the real search where to look first (HedraRAG, section 4.3).

    Args:
        services: What all runs share.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._begun: tuple[str, SearchExecutor, SearchHandle] | None = None

    def begin(
        self, node: Retrieval, state: State, executor: SearchExecutor, record: SearchRecord | None
    ) -> None:
        """Search with what is expected to be the query, or to be near it.

        Args:
            node: The retrieval that will come.
            state: What is expected to be known then.
            executor: Runs its searches.
            record: The last search.
        """
        scheduler = executor.scheduler
        if len(scheduler) >= self._services.options.max_retrievals or not scheduler.has_time:
            return
        try:
            text = node.query.render_text(state)
        except StateKeyError:
            return  # the real search will say so
        if self._begun is not None:
            record = self._record(*self._begun[1:]) or record
            self.drop()
        self._services.speculation.searches += 1
        self._begun = (node.name, executor, executor.begin(text, node.k, NEVER, record))

    def take(self, node: Retrieval, text: str) -> tuple[SearchHandle | None, SearchRecord | None]:
        """Return the search for a query if it is under way, else where to look first.

        Args:
            node: The retrieval that begins.
            text: Its query.

        Returns:
            The search, which the caller goes on with, and the record of another one.
        """
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
            record = self._record(executor, search)
            counters.hints += record is not None
        self.drop()
        return None, record

    def drop(self) -> None:
        """Stop the search, if one is under way."""
        if self._begun is not None:
            _, executor, search = self._begun
            executor.cancel(search)
            self._begun = None

    @staticmethod
    def _record(executor: SearchExecutor, search: SearchHandle) -> SearchRecord | None:
        return search.record_of(executor.progress(search).best)
