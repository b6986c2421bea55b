"""Records what a LlamaIndex application sends, without changing any of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import PrivateAttr

from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.measure.traces.recording import ConversationNames, TraceRecorder, document_title
from ctxreuse.pipeline.prompt_turn import PromptPart
from llamaindex_ctxreuse.llm.planned_prompts import prompt_parts, said_beside
from llamaindex_ctxreuse.nodes.node_plans import node_block, ranked, without_annotations


@dataclass(slots=True)
class _RecordedCall:
    """One call of the application: a query, a turn of a chat, a retrieval alone."""

    scope: RequestScope
    retrievals: list[tuple[str, Sequence[NodeWithScore]]] = field(default_factory=list)
    waiting: list[tuple[str, Sequence[NodeWithScore]]] = field(default_factory=list)  # unrecorded
    has_synthesized: bool = False
    source: str = ""
    requests: list[int] = field(default_factory=list)
    number: int = field(default_factory=count().__next__)


class _RecordedSpan(BaseSpan):
    """A span with the call that it is part of."""

    _call: _RecordedCall = PrivateAttr()
    _is_inside_retriever: bool = PrivateAttr(default=False)
    _is_retriever: bool = PrivateAttr(default=False)
    _begins_call: bool = PrivateAttr(default=False)
    _is_chat: bool = PrivateAttr(default=False)
    _is_inside_model: bool = PrivateAttr(default=False)
    _is_inside_query: bool = PrivateAttr(default=False)


class TraceSpanHandler(BaseSpanHandler[_RecordedSpan]):
    """Records the nodes that query and chat engines give to their synthesizer, and the prompts.

    Of a call without a synthesizer, and of an agent's run, the outermost retrievals are recorded.
    `ctxreuse.request_context` says the conversation; without it each chat engine has conversations
    of its own, a new one after `reset`. Add the handler to the dispatcher, or use `recording`.

    Args:
        recorder: Keeps the records.
    """

    _recorder: TraceRecorder = PrivateAttr()
    _names: ConversationNames = PrivateAttr()
    _of_engine: WeakKeyDictionary[Any, str] = PrivateAttr()
    _engines: int = PrivateAttr(default=0)

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._names = ConversationNames()
        self._of_engine = WeakKeyDictionary()

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name."""
        return "TraceSpanHandler"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> _RecordedSpan:
        """Begin a span; record the nodes of a synthesizer."""
        span = _RecordedSpan(id_=id_, parent_id=parent_span_id)
        parent = None if parent_span_id is None else self.open_spans.get(parent_span_id)
        is_chat = isinstance(instance, BaseChatEngine) and _method(id_) in _CHAT
        span._begins_call = parent is None or (is_chat and not parent._is_chat)
        span._is_chat = is_chat or (parent is not None and parent._is_chat)
        if parent is not None and not span._begins_call:
            span._call = parent._call
        else:
            span._call = _RecordedCall(current_scope())
        if is_chat and span._begins_call:
            named = span._call.scope.conversation_id
            own = self._conversation(instance, bound_args.arguments) if named is None else named
            span._call.scope = replace(span._call.scope, conversation_id=own)
            span._call.source = "LlamaIndex chat engines"
        elif isinstance(instance, BaseChatEngine) and _method(id_) == "reset":
            self._of_engine.pop(instance, None)
        span._is_retriever = isinstance(instance, BaseRetriever)
        if parent is not None:
            span._is_inside_retriever = parent._is_retriever or parent._is_inside_retriever
            span._is_inside_model = parent._is_inside_model
        of_query = isinstance(instance, _OF_QUERIES)
        span._is_inside_query = of_query or (parent is not None and parent._is_inside_query)
        if isinstance(instance, BaseLLM) and _method(id_) in _ASKS and not span._is_inside_model:
            span._is_inside_model = True
            if not span._is_inside_query:  # a tool or a memory has put them into the prompt
                self._record_waiting(span._call)
            self._record_prompt(bound_args.arguments, span._call)
        nodes = bound_args.arguments.get("nodes")
        if isinstance(instance, BaseSynthesizer) and _method(id_) in _SYNTHESIZE and nodes:
            self._record_shown(bound_args.arguments.get("query"), nodes, span._call)
        return span

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> _RecordedSpan | None:
        """End a span."""
        span = self.open_spans.get(id_)
        if span is None:
            return None
        is_outermost = span._is_retriever and not span._is_inside_retriever
        if is_outermost and _method(id_) in _RETRIEVE and isinstance(result, list):
            query = next(iter(bound_args.arguments.values()), "")
            if (query, result) not in span._call.retrievals:  # as a memory asks at each step
                span._call.waiting.append((query, result))
            span._call.retrievals.append((query, result))
        if span._begins_call or span.parent_id not in self.open_spans:
            if not span._call.has_synthesized:
                self._record_waiting(span._call)
            span._call.retrievals.clear()
        return span

    def prepare_to_drop_span(self, id_: str, *args: Any, **kwargs: Any) -> _RecordedSpan | None:
        """Drop a span that failed: its nodes were not sent."""
        return self.open_spans.get(id_)

    def _conversation(self, engine: Any, arguments: Mapping[str, Any]) -> str:
        """Return a name for the conversation that a call of a chat engine is a turn of."""
        history = arguments.get("chat_history")
        if history is None:
            if engine not in self._of_engine:
                self._engines += 1
                self._of_engine[engine] = f"chat-{self._engines}"
            return self._of_engine[engine]
        beginning = history[0].content if history else arguments.get("message")
        name = self._names.of(str(beginning), is_first=not history)
        self._of_engine[engine] = name  # it goes on from there
        return name

    def _record(self, query: Any, nodes: Sequence[NodeWithScore], call: _RecordedCall) -> None:
        found = without_annotations(nodes)
        best_first = [one.node for one in ranked(found)]
        request_id = self._recorder.record(
            [node_block(node, MetadataMode.LLM) for node in best_first],
            query.query_str if isinstance(query, QueryBundle) else str(query),
            conversation_id=call.scope.conversation_id,
            tenant=call.scope.tenant or "",
            titles=[document_title(node.metadata) for node in best_first],
            source=call.source or _SOURCES[call.has_synthesized],
        )
        call.requests += [] if request_id is None else [request_id]

    def _record_waiting(self, call: _RecordedCall) -> None:
        """Record the retrievals of a call that nothing has recorded yet."""
        for query, nodes in call.waiting:
            self._record(query, nodes, call)
        call.waiting.clear()

    def _record_shown(
        self, query: Any, nodes: Sequence[NodeWithScore], call: _RecordedCall
    ) -> None:
        """Record what a synthesizer gets; where that was made of nodes, as citations, those."""
        call.has_synthesized = True
        retrieved = {one.node_id for _, found in call.retrievals for one in found}
        given = {one.node_id for one in nodes} & retrieved
        if retrieved and not given:
            nodes = [one for _, found in call.waiting or call.retrievals for one in found]
        others = [one for one in call.waiting if given.isdisjoint(node.node_id for node in one[1])]
        call.waiting = others if given else []
        self._record(query, nodes, call)

    def _record_prompt(self, asked: Mapping[str, Any], call: _RecordedCall) -> None:
        told = {**(asked.get("kwargs") or {}), **asked}
        text = next(iter(asked.get("args") or ()), told.get("prompt"))  # as CustomLLM names them
        self._recorder.record_prompt(
            prompt_parts(told.get("messages") or ())
            if text is None
            else [PromptPart("user", str(text))],
            beside=said_beside(told),
            retrieved=call.requests,
            run=call.number,
            framework="llamaindex",
            scope=call.scope,
        )


@contextmanager
def recording(recorder: TraceRecorder) -> Iterator[TraceSpanHandler]:
    """Record everything that LlamaIndex sends inside, in any thread or task.

    Args:
        recorder: Keeps the records.
    """
    dispatcher = get_dispatcher()
    handler = TraceSpanHandler(recorder)
    dispatcher.add_span_handler(handler)
    try:
        yield handler
    finally:
        dispatcher.span_handlers.remove(handler)


_SOURCES = {False: "LlamaIndex retrievers", True: "LlamaIndex query engines"}
_ASKS = {
    f"{way}{name}" for way in ("", "a", "stream_", "astream_") for name in ("chat", "complete")
}
_OF_QUERIES = BaseQueryEngine, BaseNodePostprocessor, BaseSynthesizer
_CHAT = {"chat", "achat", "stream_chat", "astream_chat"}
_SYNTHESIZE = {"synthesize", "asynthesize"}
_RETRIEVE = {"retrieve", "aretrieve"}


def _method(span_id: str) -> str:
    """Return the method of a span, of an id such as "VectorIndexRetriever.retrieve-<uuid>"."""
    return span_id.split("-", 1)[0].rpartition(".")[2]
