"""An agent middleware: retrieved context keeps its position, and is shown once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.retrievers import RetrieverLike
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from ctxreuse.adapters.clock import planning_time
from ctxreuse.adapters.context_search import FoundContext, Piece
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.adapters.rendered_contexts import ContextRegistry, Sighting, context_registry
from ctxreuse.context.blocks import ContextBlock, ContextRequest, Message, encoded
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fixed_settings import FixedSettings
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from langchain_ctxreuse.agents.marked_messages import is_cut, with_cuts
from langchain_ctxreuse.agents.planned_messages import (
    UserQuestion,
    first_unplanned,
    newest_question,
    planned_result,
    repeated_blocks,
)
from langchain_ctxreuse.agents.sent_messages import PointingStep, sent_message
from langchain_ctxreuse.agents.tool_results import (
    FoundBlocks,
    blocks_in,
    joined_documents,
    rendered_blocks,
)
from langchain_ctxreuse.documents.document_components import checked_documents
from langchain_ctxreuse.documents.document_plans import (
    carrying,
    document_block,
    format_context,
    without_plan,
)
from langchain_ctxreuse.documents.run_documents import follow_runs, run_documents
from langchain_ctxreuse.messages import text_parts
from langchain_ctxreuse.scope import history_as_openai, scope_from_config, tenant_from_config

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
    from langchain.agents.middleware.types import ContextT, ResponseT
    from langgraph.runtime import Runtime
except ImportError as error:
    raise MissingExtraError("ReuseMiddleware", "langchain") from error


_MOST_RESULTS = 64
"""Each plan reads all that stands before it."""
_SILENT_RESULTS = 20
"""So many results without documents, and none with any, are worth a line in the log."""

_log = logging.getLogger("ctxreuse")


@dataclass(frozen=True, slots=True)
class ResultStatistics:
    """What became of the results of an agent's tools."""

    planned: int = 0
    without_documents: int = 0  # sent as they are


class ReuseMiddleware(FixedSettings, AgentMiddleware[AgentState[ResponseT], ContextT, ResponseT]):
    """Keeps retrieved context at one position in an agent's conversation, and shows it once.

    Context, memories and tool results are labelled and planned once, before the first model call
    that shows them, and every later call replays them byte for byte, in any process. The agent's
    state holds every block in whole; only what the model gets points to blocks that an earlier
    message of the same call shows. So nothing is lost in any order of middleware.

    A tool result is planned if it is certain which pieces of its text are retrieved: its artifact
    is a list of Documents whose texts stand in it, or it is the result of a Mem0 search, or comes
    from one of `tools`, or is what a retriever returned in the same run, joined with
    `document_separator`. Any other stays as it is. The documents of an artifact come back as copies
    that carry their rank and label.

    Put it behind middleware that takes another model. `thread_id` and `tenant` in
    `config["configurable"]` name the conversation and the tenant. `trim_overlaps` changes nothing
    here.

    Args:
        planner: Plans the contexts; None makes one.
        retriever: Retrieves context for each new user message, which then is blocks, annotation,
            question; any retriever, or any runnable from a string to documents. Its errors are not
            caught.
        tools: Tools, or their names, whose plain text is blocks with `document_separator` between.
        document_separator: The text between two documents in a tool result.
        registry: Where planned texts are remembered, for a `ReuseChatModel` that has the same one;
            None takes the one of this process.
        find_retrieved: Whether results are planned that a retriever returned in the same run.
    """

    def __init__(
        self,
        *,
        planner: ReusePlanner | None = None,
        retriever: RetrieverLike | None = None,
        tools: Iterable[str | BaseTool] | None = None,
        document_separator: str = "\n\n",
        registry: ContextRegistry | None = None,
        find_retrieved: bool = True,
    ) -> None:
        super().__init__()
        self._planner = planner_or_new(planner)
        self._templates = self._planner.templates
        self._registry = context_registry(registry)
        wanted = "a LangChain retriever; pass vector_store.as_retriever(), or leave it out"
        if retriever is not None:
            checked_kind("retriever", retriever, Runnable, wanted)
        self._retriever = retriever
        self._split_tools = _tool_names(tools)
        if not isinstance(document_separator, str) or not document_separator:
            raise InvalidRequestError(
                f"document_separator must be a string that is not empty, not "
                f"{describe(document_separator)}"
            )
        self._separator = document_separator
        self._finds_retrieved = checked_kind(
            "find_retrieved", find_retrieved, bool, "True or False"
        )
        if find_retrieved:
            follow_runs()
        self._fail_open = FailOpen(
            type(self).__name__,
            "messages go through as they are",
            tell=self._planner.note_failure,
        )
        self._pointing = PointingStep(
            self._templates, self._registry, self._fail_open, self._planner.cache
        )
        self._counts = Counter[str]()
        self._lock = ForkSafeLock()

    @property
    def planner(self) -> ReusePlanner:
        """Plans the contexts; another one needs another middleware."""
        return self._planner

    @property
    def faults(self) -> int:
        """How often planning has failed and a message went through as it was."""
        return self._fail_open.faults

    @property
    def result_statistics(self) -> ResultStatistics:
        """What became of the tools' results: planned, or no documents were found in them."""
        with self._lock:
            return ResultStatistics(**self._counts)

    def before_agent(
        self, state: AgentState[ResponseT], runtime: Runtime[ContextT]
    ) -> dict[str, Any] | None:
        """Put retrieved context before the question of the newest user message, once."""
        question = newest_question(state["messages"])
        if self._retriever is None or question is None:
            return None
        documents = self._retriever.invoke(question.query)
        return self._with_context(state["messages"], question, documents)

    async def abefore_agent(
        self, state: AgentState[ResponseT], runtime: Runtime[ContextT]
    ) -> dict[str, Any] | None:
        """`before_agent`, awaited."""
        question = newest_question(state["messages"])
        if self._retriever is None or question is None:
            return None
        documents = await self._retriever.ainvoke(question.query)
        return self._with_context(state["messages"], question, documents)

    def before_model(
        self, state: AgentState[ResponseT], runtime: Runtime[ContextT]
    ) -> dict[str, Any] | None:
        """Plan the tool results that no model has seen, in their order."""
        # not where each tool ends: tools run in parallel, and labels have to count on
        planned = self._planned_results(state["messages"])
        return {"messages": list(planned.values())} if planned else None

    async def abefore_model(
        self, state: AgentState[ResponseT], runtime: Runtime[ContextT]
    ) -> dict[str, Any] | None:
        """`before_model`, awaited."""
        return self.before_model(state, runtime)

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ModelResponse[ResponseT] | AIMessage:
        """Have the model point to blocks that an earlier message of the call shows."""
        return handler(self._with_pointing(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT] | AIMessage:
        """`wrap_model_call`, awaited."""
        return await handler(self._with_pointing(request))

    def _with_context(
        self, messages: Sequence[AnyMessage], question: UserQuestion, retrieved: object
    ) -> dict[str, Any] | None:
        documents = checked_documents(retrieved)
        if not documents:
            return None
        # a tool result that ended the last run stands before the question, so it is labelled first
        planned = self._planned_results(messages)
        shown = [planned.get(position, message) for position, message in enumerate(messages)]
        texts = [document.page_content for document in documents]
        message = self._fail_open.attempt(
            lambda: self._planned_question(shown, question, documents),
            lambda: question.behind(texts, self._templates),
        )
        return {"messages": [*planned.values(), message]}

    def _planned_question(
        self, messages: Sequence[AnyMessage], question: UserQuestion, documents: Sequence[Document]
    ) -> HumanMessage:
        unplanned = without_plan(documents)
        if unplanned is None:  # an earlier plan left out what the conversation shows
            return question.behind(
                [format_context(documents, self._templates, self._registry)], self._templates
            )
        blocks = [document_block(document) for document in unplanned]
        history = self._history(messages[: question.position])
        plan = self._plan(blocks, question.text, history, _scope(messages))
        message = question.planned(plan, self._registry)
        return with_cuts(message, plan)

    def _planned_results(self, messages: Sequence[AnyMessage]) -> dict[int, AnyMessage]:
        """Return the new tool results that hold blocks, planned, by position."""
        return self._fail_open.attempt(lambda: self._results_planned_in_order(messages), dict)

    def _results_planned_in_order(self, messages: Sequence[AnyMessage]) -> dict[int, AnyMessage]:
        first = first_unplanned(messages)
        holding = (
            (position, blocks)
            for position, message in enumerate(messages[first:], start=first)
            if isinstance(message, ToolMessage) and (blocks := self._blocks_in(message)) is not None
        )
        found = dict(islice(holding, _MOST_RESULTS))
        self._count(messages[first:], len(found))
        planned: dict[int, AnyMessage] = {}
        if not found:
            return planned
        if len(found) == _MOST_RESULTS and next(holding, None) is not None:
            _log_too_many()
        scope = _scope(messages)
        history = self._history(messages[:first])
        for position, message in enumerate(messages[first:], start=first):
            shown = message
            if isinstance(message, ToolMessage) and position in found:
                shown = planned[position] = self._fail_open.attempt(
                    partial(self._planned_result, message, found[position], history, scope),
                    lambda message=message: message,  # type: ignore[misc]
                )
            history += history_as_openai([sent_message(shown, self._templates).message])
        return planned

    def _count(self, messages: Iterable[AnyMessage], planned: int) -> None:
        """Count new results, those that say anything."""
        said = [
            one
            for one in messages
            if isinstance(one, ToolMessage)
            and one.status != "error"
            and any(text.strip() for text, _ in text_parts(one))
        ]
        with self._lock:
            self._counts["planned"] += planned
            self._counts["without_documents"] += max(0, len(said) - planned)
            is_silent = not self._counts["planned"] and self._retriever is None
            is_silent &= self._counts["without_documents"] >= _SILENT_RESULTS
        if is_silent:
            _log_nothing_planned()

    def _blocks_in(self, message: ToolMessage) -> FoundBlocks | None:
        parts = text_parts(message)
        if message.status == "error" or message.id is None:
            return None
        if len(parts) != 1:  # which of them shows the artifact is not known
            return None
        text = parts[0].text
        pieces = self._registry.parse(text, tenant_from_config() or "").pieces
        if any(map(self._shows_labels, pieces)):
            return self._rendered_blocks(message, pieces)
        splits = message.name in self._split_tools
        found = blocks_in(message.artifact, text, self._separator, splits)
        if found is None and self._finds_retrieved:
            lists = run_documents().of_request(None, tenant_from_config() or "")
            found = joined_documents(lists, text, self._separator)
        return found

    def _shows_labels(self, piece: Piece) -> bool:
        label = self._templates.label_pattern
        return isinstance(piece, FoundContext) and bool(label.match(piece.text))

    def _rendered_blocks(self, message: ToolMessage, pieces: Sequence[Piece]) -> FoundBlocks | None:
        """Return the blocks of a tool result that is only what `format_context` rendered."""
        if len(pieces) != 1 or not isinstance(pieces[0], FoundContext):
            return None
        tenant, place = tenant_from_config() or "", encoded(f"tool result {message.id}")
        sighting = Sighting(pieces[0], place, 0, "new", is_tool_result=True)
        [claimed] = self._registry.claim(tenant, [sighting])
        if not isinstance(claimed, FoundContext) or not claimed.spans:
            return None
        return rendered_blocks(claimed.blocks, message.artifact)

    def _planned_result(
        self,
        message: ToolMessage,
        found: FoundBlocks,
        history: Sequence[Message],
        scope: RequestScope,
    ) -> ToolMessage:
        plan = self._plan(found.blocks, "", history, scope)
        [old] = text_parts(message)
        planned = planned_result(message, old, plan, found.before, found.after, self._registry)
        planned = with_cuts(planned, plan, found.before)
        if not found.documents:
            return planned
        label_of = plan.label_of
        artifact = [
            carrying(document, {"rank": rank, "label": label_of[found.blocks[rank].key]})
            for rank, document in enumerate(found.documents)
        ]
        return planned.model_copy(update={"artifact": artifact})

    def _plan(
        self,
        blocks: Sequence[ContextBlock],
        query: str,
        history: Sequence[Message],
        scope: RequestScope,
    ) -> Plan:
        return self._planner.plan(
            ContextRequest(
                blocks,
                query,
                history=history,
                conversation_id=scope.conversation_id,
                tenant=scope.tenant or "",
                labels=True,  # what is sent points to them
            ),
            **planning_time(self._planner),
        )

    def _history(self, messages: Sequence[AnyMessage]) -> list[Message]:
        """Return messages as the model will see them."""
        return history_as_openai(self._pointing.messages(messages))

    def _with_pointing(self, request: ModelRequest[ContextT]) -> ModelRequest[ContextT]:
        """Return a request whose model points to blocks; middleware behind may remove messages."""
        if not any(repeated_blocks(one) or is_cut(one) for one in request.messages):
            return request
        return request.override(model=self._pointing.inside(request.model))


@cache
def _log_nothing_planned() -> None:
    """Say once that a middleware finds nothing to do."""
    _log.warning(
        "ReuseMiddleware: none of the first %d tool results holds documents that can be planned; "
        "they are sent as they are. Let the tools return documents as their artifact "
        '(response_format="content_and_artifact"), or the text of format_context; or name tools '
        "whose text is documents with document_separator between: ReuseMiddleware(tools=[...], "
        "document_separator=...). result_statistics says what becomes of each result.",
        _SILENT_RESULTS,
    )


@cache
def _log_too_many() -> None:
    """Say once that results are left as they are."""
    _log.warning(
        "ReuseMiddleware: an agent has called tools with more than %d results that hold documents "
        "in one step; those behind go through as they are",
        _MOST_RESULTS,
    )


def _scope(messages: Sequence[AnyMessage]) -> RequestScope:
    """Return the scope of messages; if nothing names the conversation, its first message does."""
    scope = scope_from_config(None)
    if scope.conversation_id is None and messages:
        return scope.inside(conversation_id=messages[0].id)
    return scope


def _tool_names(tools: object) -> frozenset[str]:
    given = () if tools is None else tools
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        names = [one.name if isinstance(one, BaseTool) else one for one in given]
        if all(isinstance(name, str) for name in names):
            return frozenset(names)
    raise InvalidRequestError(
        f"tools must be a list of tools or of their names, not {describe(tools)}; "
        "pass tools=['search_docs'], or leave it out"
    )
