"""Generations that start before their retrieval has ended (HedraRAG, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ctxreuse.serving.aio.background_tasks import BackgroundTasks
from ctxreuse.workflow.errors import StateKeyError
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.found_documents import Documents
from ctxreuse.workflow.graph.nodes import Generation, Retrieval
from ctxreuse.workflow.graph.state import State
from ctxreuse.workflow.runtime.generations import GenerationAnswer, GenerationRequest
from ctxreuse.workflow.runtime.run_context import RunContext
from ctxreuse.workflow.runtime.services import Services
from ctxreuse.workflow.runtime.speculation import PreviewStability
from ctxreuse.workflow.runtime.timeline import Outcome, Span
from ctxreuse.workflow.vector_search.pending_search import PreviewSchedule, SearchHandle
from ctxreuse.workflow.vector_search.scan_queue import TopK
from ctxreuse.workflow.vector_search.search_lane import SearchExecutor
from ctxreuse.workflow.vector_search.sessions import Integers, SearchRecord

_STABLE_SHARE = 0.125
"""The rule "stable" launches once a preview has stayed the same for this part of a search."""

_LOOK_AGAIN = 0.125
"""After which part of a search to look again when it was too early."""

_MOST_LAUNCHES = 2
"""Launches of a generation from one retrieval: each wrong one has its prompt computed in vain."""

_FREE_TOKENS = 1_000
"""Tokens that may be wasted before the share of wasted tokens is looked at."""


@dataclass(slots=True, eq=False)
class _Speculation:
    """A generation that was launched from a preview.

    Attributes:
        node: The generation's node.
        visit: Which visit of it.
        ids: The preview.
        answer: What the model says.
        began: When it was launched.
    """

    node: str
    visit: int
    ids: tuple[int, ...]
    answer: GenerationAnswer
    began: float


class SpeculativeAnswers:
    """The speculative generation of a run: at most one at a time, one stage deep.

    It is committed only to a request that equals its own, byte for byte; until then nothing outside
    sees it. A run does not fail for it.

    Args:
        services: What all runs share.
        graph: The run's graph.
        context: Whose run it is.
        chores: Where streams are closed that turned out wrong.
    """

    def __init__(
        self, services: Services, graph: Graph, context: RunContext, chores: BackgroundTasks
    ) -> None:
        self._services = services
        self._graph = graph
        self._context = context
        self._chores = chores
        self._current: _Speculation | None = None

    def follow(
        self, node: Retrieval, state: State, lane: SearchExecutor
    ) -> SpeculativeFollower | None:
        """Return who watches a retrieval for the generation behind it; None if nobody should.

        Args:
            node: The retrieval, which runs alone.
            state: What is known when it begins.
            lane: Where it is run.
        """
        if self._services.options.speculation == "off":
            return None
        follower = self._graph.next_generation(node.name, state)
        if follower is None:
            return None
        self._services.speculation.retrievals += 1
        return SpeculativeFollower(self, self._services, self._graph, node, follower, state, lane)

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The preview that the current speculation is based on; None where there is none."""
        return None if self._current is None else self._current.ids

    def launch(self, node: Generation, state: State, ids: tuple[int, ...]) -> bool:
        """Start a generation, unless too much is going on or has been wasted.

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
        self._current = _Speculation(node.name, visit, ids, answer, services.clock())
        return True

    def committed(
        self, node: str, visit: int, request: GenerationRequest
    ) -> GenerationAnswer | None:
        """Return the speculative answer if it is to this very request; else it is dropped."""
        speculation = self._current
        if speculation is None:
            return None
        if (
            (speculation.node, speculation.visit) != (node, visit)
            or speculation.answer.request != request
            or speculation.answer.has_failed
        ):
            self.drop()
            return None
        self._current = None
        self._services.speculation.committed += 1
        self._note(speculation, "committed")
        return speculation.answer

    def drop(self) -> None:
        """Stop the speculation, if there is one."""
        speculation, self._current = self._current, None
        if speculation is not None:
            self._chores.do(self._waste(speculation))

    async def _waste(self, speculation: _Speculation) -> None:
        await speculation.answer.cancel()
        counters = self._services.speculation
        counters.wasted_prompts += 1
        counters.wasted_tokens += speculation.answer.tokens
        self._note(speculation, "wasted")

    def _note(self, speculation: _Speculation, outcome: Outcome) -> None:
        services = self._services
        services.timeline.add(
            Span(
                run=self._context.number,
                workflow=self._graph.name,
                node=speculation.node,
                visit=speculation.visit,
                kind="generation",
                began_s=speculation.began,
                ended_s=services.clock(),
                outcome=outcome,
            )
        )


class SpeculativeFollower:
    """Watches a retrieval, and launches the generation behind it from a preview.

    Made by `SpeculativeAnswers.follow`.
    """

    def __init__(
        self,
        answers: SpeculativeAnswers,
        services: Services,
        graph: Graph,
        node: Retrieval,
        follower: Generation,
        state: State,
        lane: SearchExecutor,
    ) -> None:
        self._answers = answers
        self._services = services
        self._node = node
        self._follower = follower
        self._state = state
        self._lane = lane
        self._rule = services.options.speculation
        self._key = (graph.name, node.name)
        self._usual = services.statistics.generations((graph.name, follower.name))
        self._arrived = services.clock()
        self._launches = 0

    def looks(self, record: SearchRecord | None) -> PreviewSchedule:
        """Return when to look at a search.

        Args:
            record: The last search, if it has one.
        """
        if self._rule == "stable":
            return PreviewSchedule(_STABLE_SHARE, every=_STABLE_SHARE)
        return PreviewSchedule(self._finality(record).launch_at())

    def consider(self, pending: SearchHandle) -> None:
        """Launch from what has been found so far, or drop what was launched from something else.

        It never raises: a search does not fail, nor do those beside it, for what is only expected.
        """
        self._services.speculating.attempt(lambda: self._consider(pending), self._answers.drop)

    def _consider(self, pending: SearchHandle) -> None:
        ids = self._preview(pending)
        preview = None if ids is None else tuple(ids.tolist())
        current = self._answers.ids
        if current is not None:
            if preview is None or current == preview or self._rule == "always":
                return
            self._answers.drop()
            pending.due = self._arrived
        if ids is None or preview is None or self._launches == _MOST_LAUNCHES:
            return
        if not self._is_time(pending):
            looks = pending.looks
            again = self._lane.progress(pending) + (looks.every or _LOOK_AGAIN)
            pending.looks = looks._replace(first=max(looks.first, again))
            return
        documents = Documents(self._lane.blocks_of(ids))
        state = self._state.overlay({self._node.output: documents})
        if self._answers.launch(self._follower, state, preview):
            self._launches += 1
            # the rest of the search is needed only when the generation ends
            pending.due = self._services.clock() + 0.5 * self._usual.seconds.value

    def end(self, pending: SearchHandle, best: TopK) -> None:
        """Learn from a retrieval that has ended; drop what was launched from something else."""
        if self._answers.ids != tuple(best.ids.tolist()):
            self._answers.drop()
        assert pending.search is not None, "it has ended"
        finality = self._finality(pending.record)
        if pending.local is not None:
            finality.observe_guess(np.array_equal(pending.local, best.ids))
        clusters = pending.search.clusters
        held = np.flatnonzero(np.isin(clusters, best.found_in))
        finality.observe((held[-1] + 1) / len(clusters) if len(held) else 0.0)

    def _preview(self, pending: SearchHandle) -> Integers | None:
        if self._rule == "always":
            return pending.local
        best = self._lane.preview(pending)
        return pending.local if best is None or not len(best.ids) else best.ids

    def _is_time(self, pending: SearchHandle) -> bool:
        if self._rule == "always":
            return True
        assert pending.search is not None, "there is a preview of it"
        if self._rule == "stable":
            unchanged = pending.search.scanned - pending.search.changed_at
            return unchanged >= _STABLE_SHARE * len(pending.search.clusters)
        finality = self._finality(pending.record)
        if not pending.search.scanned:
            return finality.is_guess_worth_it()
        return finality.is_worth_it(self._lane.progress(pending))

    def _finality(self, record: SearchRecord | None) -> PreviewStability:
        return self._services.statistics.finality(self._key, record is not None)
