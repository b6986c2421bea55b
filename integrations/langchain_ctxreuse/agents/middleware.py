"""An agent middleware: retrieved context keeps its position, and is shown once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langchain_core.retrievers import RetrieverLike
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from ctxreuse.context.blocks import BlockKey, ContextRequest, Message, text_digest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.copies import FixedSettings
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.rendering import render_block
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.pipeline.context_finder import contexts_in
from ctxreuse.pipeline.document_turn import best_first
from ctxreuse.pipeline.engine_options import added_cache_fields, planner_for, planning_time
from ctxreuse.pipeline.formatting import labelled_block
from ctxreuse.pipeline.known_texts import Form, known_texts
from ctxreuse.pipeline.ordered_release import run_here
from ctxreuse.pipeline.prompt_turn import message_key, result_edit, with_breakpoints
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.planning.prompt_records import Edit, ShownTexts, Slice
from ctxreuse.rules.cache_marks import mark_value, marks_in
from langchain_ctxreuse.agents.planned_messages import (
    PlannedText,
    ResultPiece,
    behind_context,
    first_unplanned,
    message_keys,
    newest_question,
    pieces_between,
    result_pieces,
    sent_messages,
    with_edit,
)
from langchain_ctxreuse.documents.document_components import retrieved_documents
from langchain_ctxreuse.documents.document_plans import format_context
from langchain_ctxreuse.documents.run_documents import follow_runs, run_documents
from langchain_ctxreuse.messages import (
    TextPart,
    mark_field_for,
    prompt_texts,
    role_of,
    text_parts,
    with_marks,
)
from langchain_ctxreuse.scope import history_as_openai, scope_from_config, tenant_from_config

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
    from langchain.agents.middleware.types import ContextT, ResponseT
    from langgraph.runtime import Runtime
except ImportError as error:
    raise MissingExtraError("ReuseMiddleware", "langchain") from error


_Planned = TypeVar("_Planned", bound=BaseMessage)
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
    state holds what the tools said; only what the model gets has labels, and points to blocks that
    an earlier message of the same call shows.

    A tool result is planned if it is certain which pieces of its text are retrieved: its artifact
    is a list of Documents whose texts stand in it, or it is the result of a Mem0 search, or comes
    from one of `tools`, or is what a retriever returned in the same run, joined with
    `document_separator`. Any other stays as it is, and so do artifacts. A result keeps its order.

    Put it last, behind middleware that removes messages or takes another model: what it sends is
    what the model gets. `config["configurable"]` names conversation (`thread_id`) and `tenant`.

    Args:
        planner: Plans the contexts; None takes the one of this process.
        retriever: Retrieves context for each new user message, which then is blocks, annotation,
            question; any retriever, or runnable from a string to documents. Its errors are raised.
        tools: Tools, or their names, whose plain text is blocks with `document_separator` between.
        document_separator: The text between two documents in a tool result.
        find_retrieved: Whether results are planned that a retriever returned in the same run.
    """

    def __init__(
        self,
        *,
        planner: ReusePlanner | None = None,
        retriever: RetrieverLike | None = None,
        tools: Iterable[str | BaseTool] | None = None,
        document_separator: str = "\n\n",
        find_retrieved: bool = True,
    ) -> None:
        super().__init__()
        self._planner = planner_for(planner)
        self._is_shadow = self._planner.mode == "shadow"  # all is sent as given
        self._templates = self._planner.templates
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
        # what tells its edits from those of middleware that plans other results
        settings = document_separator, sorted(self._split_tools), find_retrieved
        self._way = text_digest(repr(settings))
        if find_retrieved:
            follow_runs()
        self._fail_open = FailOpen(
            type(self).__name__, "messages go through as they are", tell=self._planner.note_failure
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
        return run_here(self._with_context(state["messages"], "invoke"))

    async def abefore_agent(
        self, state: AgentState[ResponseT], runtime: Runtime[ContextT]
    ) -> dict[str, Any] | None:
        """`before_agent`, awaited."""
        return await self._with_context(state["messages"], "ainvoke")

    def before_model(
        self, state: AgentState[ResponseT], runtime: Runtime[ContextT]
    ) -> dict[str, Any] | None:
        """Plan the tool results that no model has seen, in their order."""
        # not where each tool ends: tools run in parallel, and labels have to count on
        planned = self._planned_results(state["messages"])
        return {"messages": list(planned.values())} if planned else None

    def wrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], ModelResponse[ResponseT]],
    ) -> ModelResponse[ResponseT] | AIMessage:
        """Send planned messages as they were planned."""
        return handler(self._as_sent(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[ContextT],
        handler: Callable[[ModelRequest[ContextT]], Awaitable[ModelResponse[ResponseT]]],
    ) -> ModelResponse[ResponseT] | AIMessage:
        """`wrap_model_call`, awaited."""
        return await handler(self._as_sent(request))

    async def _with_context(
        self, messages: Sequence[AnyMessage], method: str
    ) -> dict[str, Any] | None:
        position = newest_question(messages)
        if self._retriever is None or position is None:
            return None
        question = messages[position]
        found = getattr(self._retriever, method)(str(question.text))
        documents = retrieved_documents(found if method == "invoke" else await found)
        if not documents:
            return None
        # a tool result that ended the last run stands before the question, so it is planned first
        planned = self._planned_results(messages)
        shown = [planned.get(number, one) for number, one in enumerate(messages)]
        message = self._fail_open.attempt(
            lambda: self._planned_question(shown, position, documents),
            lambda: behind_context(question, format_context(documents), self._templates.separator),
        )
        return {"messages": [*planned.values(), message]}

    def _planned_question(
        self, messages: Sequence[AnyMessage], position: int, documents: Sequence[Document]
    ) -> AnyMessage:
        question, templates = messages[position], self._templates
        texts = [one.page_content for one in documents]
        root = run_documents().run_of(None).root
        ranked = best_first(documents, texts, tenant_from_config(), self._planner, root)
        blocks = [labelled_block(Form(one.page_content), one.id, templates) for one in ranked]
        history = self._history(messages[:position])
        plan = self._plan(blocks, str(question.text), history, _scope(messages))
        shown: dict[BlockKey, tuple[Slice]] = {}
        whole: list[str] = []
        end = 0
        for key, block in plan.request.unique_blocks.items():
            label = templates.label_of(block)
            labelled = render_block(label, block.text, templates)
            whole.append(block.text if self._is_shadow else labelled)
            end += len(whole[-1])
            behind = end - len(templates.after_text)
            shown[key] = (Slice(behind - len(block.text), behind),)
            end += len(templates.separator)
        context = templates.separator.join(whole)
        message = behind_context(question, context, templates.separator)
        text = text_parts(message)[0]
        edit = result_edit(text.text, shown, plan, Slice(0, len(context)))
        said = {"question": question.content} if text.part is None else {}
        name = message_keys([*messages[:position], message], self._way)[-1]
        return self._with_edit(message, name, text, edit, **said)

    def _planned_results(self, messages: Sequence[AnyMessage]) -> dict[int, AnyMessage]:
        """Return the new tool results that hold blocks, planned, by position."""
        return self._fail_open.attempt(lambda: self._results_planned_in_order(messages), dict)

    def _results_planned_in_order(self, messages: Sequence[AnyMessage]) -> dict[int, AnyMessage]:
        first = first_unplanned(messages)
        holding = (
            (position, pieces)
            for position, message in enumerate(messages[first:], start=first)
            if isinstance(message, ToolMessage) and (pieces := self._pieces_of(message))
        )
        found = dict(islice(holding, _MOST_RESULTS))
        self._count(messages[first:], len(found))
        planned: dict[int, AnyMessage] = {}
        if not found:
            return planned
        if len(found) == _MOST_RESULTS and next(holding, None):
            _log_too_many()
        scope = _scope(messages)
        before, keys = ShownTexts(), message_keys(messages, self._way)
        history = self._history(messages[:first], before)
        for position, message in enumerate(messages[first:], start=first):
            shown = message
            if isinstance(message, ToolMessage) and position in found:
                its = found[position]
                try:
                    # it stands behind its question, where no order helps
                    plan = self._plan([one.block for one in its], "", history, scope, "none")
                    [text] = text_parts(message)
                    cut = {one.block.key: one.shown for one in its}
                    region = Slice(its[0].place.start, its[-1].place.end)
                    edit = result_edit(text.text, cut, plan, region)
                    shown = self._with_edit(message, keys[position], text, edit)
                except Exception as error:
                    self._fail_open.note(error)
                planned[position] = shown
            history += self._history([shown], before)
        return planned

    def _count(self, messages: Iterable[AnyMessage], planned: int) -> None:
        """Count new results, those that say anything."""
        said = sum(
            one.status != "error" and any(text.strip() for text, _ in text_parts(one))
            for one in messages
            if isinstance(one, ToolMessage)
        )
        with self._lock:
            self._counts["planned"] += planned
            self._counts["without_documents"] += max(0, said - planned)
            is_silent = not self._counts["planned"] and self._retriever is None
            is_silent &= self._counts["without_documents"] >= _SILENT_RESULTS
        if is_silent:
            _log_nothing_planned()

    def _pieces_of(self, message: ToolMessage) -> list[ResultPiece] | None:
        parts = text_parts(message)
        if message.status == "error" or message.id is None or len(parts) != 1:
            return None  # of several parts, which shows the artifact is not known
        text, tenant = parts[0].text, tenant_from_config()
        root = run_documents().run_of(None).root
        found = contexts_in(
            known_texts(), tenant, text, root, rendered_only=not self._finds_retrieved
        )
        contexts, spans = ((), ()) if found is None else (found.contexts, found.spans)
        whole = next((c for c in contexts if c.start == 0 and c.end == len(text)), None)
        if whole is not None and whole.is_labelled:
            return [
                ResultPiece(block, (Slice(start, start + len(block.text)),), Slice(*span[:2]))
                for block, span in zip(whole.blocks, whole.spans, strict=True)
                for start in [text.rindex(block.text, *span[:2])]  # behind its label
            ]
        splits = message.name in self._split_tools
        pieces = result_pieces(message.artifact, text, self._separator, splits)
        if pieces is None:  # what a retriever returned may stand there without an artifact
            pieces = pieces_between(text, [(one.start, one.end) for one in spans], self._separator)
        return pieces

    def _with_edit(
        self, message: _Planned, key: bytes, text: TextPart, edit: Edit, **said: Any
    ) -> _Planned:
        """Return a message with its edit, which is known without it, too, from now on."""
        edit = Edit() if self._is_shadow else edit
        self._planner.note_edit(tenant_from_config(), [key], edit.encoded())
        return with_edit(message, text, edit, **said)

    def _edit_of(self, key: bytes) -> Edit | None:
        return Edit.decoded(self._planner.edit_of(tenant_from_config(), key))

    def _plan(
        self,
        blocks: Sequence[Any],
        query: str,
        history: Sequence[Message],
        scope: RequestScope,
        strategy: Strategy = "reuse",
    ) -> Plan:
        request = ContextRequest(
            blocks,
            query,
            history=history,
            conversation_id=scope.conversation_id,
            tenant=scope.tenant or "",
            labels=None if self._is_shadow else True,  # what is sent points to them
        )
        return self._planner.plan(request, strategy, **planning_time(self._planner))

    def _history(
        self, messages: Sequence[AnyMessage], before: ShownTexts | None = None
    ) -> list[Message]:
        """Return messages as the model will see them, behind those before."""
        sent, _ = sent_messages(messages, self._templates, before, self._way, self._edit_of)
        return history_as_openai(sent)

    def _as_sent(self, request: ModelRequest[ContextT]) -> ModelRequest[ContextT]:
        try:
            sent, planned = sent_messages(
                request.messages, self._templates, way=self._way, edit_of=self._edit_of
            )
            if not planned:
                return request
            tenant = tenant_from_config()
            for number, one in planned.items():
                key = message_key(role_of(sent[number]), one.text.text)
                known_texts().add_planned(tenant, key, one.edit._replace(pieces=None))
            if self._is_shadow:  # what was planned goes out as the state has it
                return request
            if not self._planner.cache.marks:
                return request.override(messages=sent)  # type: ignore[arg-type]
            opening = [] if request.system_message is None else [request.system_message]
            return self._with_marks(request, [*opening, *sent], planned, len(opening))
        except Exception as error:
            self._fail_open.note(error)
            return request

    def _with_marks(
        self,
        request: ModelRequest[ContextT],
        messages: Sequence[BaseMessage],
        planned: dict[int, PlannedText],
        opening: int,
    ) -> ModelRequest[ContextT]:
        """Return a request with marks; those of other middleware count."""
        profile, settings, model = self._planner.cache, request.model_settings, request.model
        field = mark_field_for(model, profile)
        tools = [getattr(tool, "extras", None) or {} for tool in request.tools]
        own = sum(1 for one in messages for _ in marks_in({"content": one.content}))
        spare = profile.marks - own
        if field == "cache_control" and not settings.get("cache_control") and spare > 0:
            # middleware behind this one may still mark the end, the system text and the tools
            mark = {"cache_control": mark_value("cache_control")}
            settings, tools = {**settings, **mark}, [*tools, *[mark] * min(2, spare - 1)]
        texts = prompt_texts(messages, {})
        places = {(n + opening, one.text.part): one.edit for n, one in planned.items()}
        edits = [None if one is None else places.get(one) for one in texts.positions]
        roles = [one.role for one in texts.parts]
        sent = [one.text for one in texts.parts]
        parts = with_breakpoints(roles, sent, edits, may_go_on=True)
        told = {**(getattr(model, "model_kwargs", None) or {}), **settings}
        marked, _ = with_marks(messages, texts, parts, profile, model, tools, told)
        groups = [one.edit.group for one in planned.values() if one.edit.group][:1]
        body = settings.get("extra_body") or getattr(model, "extra_body", None) or {}
        if added := added_cache_fields({**told, **body}, groups, profile, ""):
            settings = {**settings, "extra_body": {**added, **body}}
        return request.override(
            system_message=marked[0] if opening else None,  # type: ignore[arg-type]
            messages=marked[opening:],  # type: ignore[arg-type]
            model_settings=settings,
        )


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
