"""The generations and retrievals of one run, and the speculation that joins them.

A retrieval may start the generation behind it before it has ended, a generation the retrieval
behind it. It goes one stage deep: only from a node that runs alone, over an edge without a router,
into the one node behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

from ctxreuse.serving.aio.background_tasks import BackgroundTasks
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.found_documents import Documents
from ctxreuse.workflow.graph.nodes import Generation, Retrieval
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.retrievers.atomic import found_blocks
from ctxreuse.workflow.runtime.events import DocumentsFound, Emit, TextDelta
from ctxreuse.workflow.runtime.generations import GenerationRequest
from ctxreuse.workflow.runtime.run_context import RunContext
from ctxreuse.workflow.runtime.services import DEFAULT_RETRIEVER, Services
from ctxreuse.workflow.runtime.speculative_answers import SpeculativeAnswers, SpeculativeFollower
from ctxreuse.workflow.runtime.speculative_retrieval import SpeculativeRetrieval
from ctxreuse.workflow.vector_search.pending_search import ANY_TIME, SearchHandle
from ctxreuse.workflow.vector_search.search_lane import SearchExecutor
from ctxreuse.workflow.vector_search.sessions import SearchRecord

_GUESS_AT = (0.5, 0.75)
"""After which parts of a usual answer a search is begun with what has been said so far; 22 to 50 %
of an answer are as near to all of it as its nearest document is (HedraRAG, Figure 7b)."""


class Stages:
    """Runs the generations and retrievals of one run.

    Args:
        services: What all runs share.
        graph: The run's graph.
        context: Whose run it is.
        emit: Is told what happens.
    """

    def __init__(self, services: Services, graph: Graph, context: RunContext, emit: Emit) -> None:
        self._services = services
        self._graph = graph
        self._context = context
        self._emit = emit
        self._chores = BackgroundTasks(services.speculating)
        self._answers = SpeculativeAnswers(services, graph, context, self._chores)
        self._guesses = SpeculativeRetrieval(services)
        self._records: dict[str, SearchRecord] = {}
        self._remembers = graph.searches_again or context.session is not None

    async def close(self) -> None:
        """Stop whatever was started and is not needed any more, and wait for its end."""
        self._answers.drop()
        self._guesses.drop()
        await self._chores.wait()

    async def generation(self, node: Generation, state: State, visit: int, is_alone: bool) -> str:
        """Ask the model, or take the answer that is on its way already, and return its text.

        Args:
            node: The node.
            state: What is known.
            visit: Which visit of the node.
            is_alone: Whether no other node runs beside it.
        """
        services = self._services
        request = GenerationRequest.of(node, state)
        began = services.clock()
        answer = self._answers.committed(node.name, visit, request)
        if answer is None:
            answer = services.generations.begin(request, self._context.tenant)
        usual = services.statistics.generations((self._graph.name, node.name))
        guess_at = [part * usual.tokens.value for part in _GUESS_AT] if is_alone else []
        texts: list[str] = []
        tokens = 0
        try:
            async for piece in answer.pieces():
                texts.append(piece.text)
                tokens += piece.tokens
                if piece.text:
                    self._emit(TextDelta(node.name, visit, piece.text))
                if guess_at and tokens >= guess_at[0] and not answer.has_ended:
                    del guess_at[0]
                    services.speculating.attempt(
                        lambda: self._guess(node, state, "".join(texts)), self._guesses.drop
                    )
        finally:
            if not answer.has_ended:
                await answer.cancel()
        usual.seconds.add(services.clock() - began)
        usual.tokens.add(tokens)
        services.speculation.generated_tokens += tokens
        return "".join(texts)

    def _guess(self, node: Generation, state: State, said: str) -> None:
        """Search with the part of an answer that is there."""
        follower = self._graph.next_retrieval(node.name, state)
        if follower is None or not self._services.options.speculative_retrieval:
            return
        lane = self._services.lanes.get(follower.retriever or DEFAULT_RETRIEVER)
        if lane is not None:
            expected = state.overlay({node.output: said})
            self._guesses.begin(follower, expected, lane, self._last_search(follower))

    async def retrieval(
        self, node: Retrieval, state: State, visit: int, is_alone: bool
    ) -> Documents:
        """Search, and return what was found; arguments as in `generation`."""
        name = node.retriever or DEFAULT_RETRIEVER
        text = node.query.render_text(state)
        lane = self._services.lanes.get(name)
        scores = None
        if lane is None:
            found = await self._services.retrievers[name].retrieve(text, node.k)
            documents = Documents(found_blocks(found, node.k, f"retriever {name!r}"))
        else:
            follower = self._answers.follow(node, state, lane) if is_alone else None
            documents, scores = await self._search(lane, node, text, follower)
        self._emit(DocumentsFound(node.name, visit, documents, scores))
        return documents

    async def _search(
        self,
        lane: SearchExecutor,
        node: Retrieval,
        text: str,
        follower: SpeculativeFollower | None,
    ) -> tuple[Documents, tuple[float, ...]]:
        """Search step by step, and return what was found with its scores."""
        due = self._services.clock()
        on_progress = None if follower is None else _in_this_context(follower.consider)
        pending, record = self._guesses.take(node, text)
        if pending is None:
            record = record or self._last_search(node)
            pending = lane.begin(
                text,
                node.k,
                due,
                record,
                on_progress,
                is_remembered=self._remembers and self._may_prepare(lane),
                looks=ANY_TIME if follower is None else follower.looks(record),
            )
        else:
            pending.due, pending.on_progress = due, on_progress
            if follower is not None and not pending.ended.done():
                pending.looks = follower.looks(pending.record)
                follower.consider(pending)
        try:
            best = await pending.ended
            if follower is not None:
                follower.end(pending, best)
            documents = Documents(lane.blocks_of(best.ids))
            scores = tuple(lane.nearness(best).tolist())
            record = lane.snapshot(pending) if self._remembers else None
        finally:
            lane.cancel(pending)
        if record is not None:
            # at once: the next node may be a search, too
            name = node.retriever or DEFAULT_RETRIEVER
            self._keep(name, record)
            if self._may_prepare(lane):
                self._chores.do(self._add_vectors(lane, name, record))
        return documents, scores

    def _may_prepare(self, lane: SearchExecutor) -> bool:
        """Return whether what only helps the next search keeps no other one waiting."""
        return lane.has_time or self._services.options.speculation == "always"

    def _last_search(self, node: Retrieval) -> SearchRecord | None:
        name = node.retriever or DEFAULT_RETRIEVER
        if name in self._records:
            return self._records[name]
        session = self._context.session_key(name)
        return None if session is None else self._services.sessions.get(session)

    def _keep(self, name: str, record: SearchRecord) -> None:
        """Keep what a search has found for the next one of the run, or of its session."""
        self._records[name] = record
        session = self._context.session_key(name)
        if session is not None:
            self._services.sessions.put(session, record)

    async def _add_vectors(self, lane: SearchExecutor, name: str, record: SearchRecord) -> None:
        """Have the next search know at once what of a record is nearest to it."""
        complete = await lane.with_vectors(record)
        if self._records[name] is record:  # else a later search has ended meanwhile
            self._keep(name, complete)


def _in_this_context(consider: Callable[[SearchHandle], None]) -> Callable[[SearchHandle], None]:
    """Return a function with the context variables of its run, whatever run has it called.

    Searches of many runs make progress together.
    """
    context = copy_context()
    return lambda pending: context.run(consider, pending)
