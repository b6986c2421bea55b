"""Records what a LlamaIndex application sends, without changing any of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import PrivateAttr

from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.measure.traces.recording import ConversationNames, TraceRecorder, document_title
from ctxreuse.pipeline.prompt_turn import PromptPart
from llamaindex_ctxreuse.llm.planned_prompts import prompt_parts, said_beside
from llamaindex_ctxreuse.nodes.node_plans import node_block, ranked
from llamaindex_ctxreuse.nodes.run_nodes import BegunCall, OpenCalls, without_annotations


@dataclass(slots=True)
class _RecordedCall:
    """One call of the application: a query, a turn of a chat, a retrieval alone."""

    scope: RequestScope
    run: str
    retrievals: list[tuple[str, Sequence[NodeWithScore]]] = field(default_factory=list)
    waiting: list[tuple[str, Sequence[NodeWithScore]]] = field(default_factory=list)  # unrecorded
    has_synthesized: bool = False
    source: str = ""
    requests: list[int] = field(default_factory=list)


class TraceSpanHandler(OpenCalls):
    """Records the nodes that query and chat engines give to their synthesizer, and the prompts.

    Of a call without a synthesizer, and of an agent's run, the outermost retrievals are recorded.
    `ctxreuse.request_context` says the conversation; without it each chat engine has conversations
    of its own, a new one after `reset`. Add the handler to the dispatcher, or use `recording`.

    Args:
        recorder: Keeps the records.
    """

    _recorder: TraceRecorder = PrivateAttr()
    _names: ConversationNames = PrivateAttr(default_factory=ConversationNames)
    _of_engine: WeakKeyDictionary[Any, str] = PrivateAttr(default_factory=WeakKeyDictionary)
    _engines: int = PrivateAttr(default=0)

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def _begin(self, call: BegunCall, arguments: Mapping[str, Any]) -> None:
        """Record the nodes of a synthesizer, and the prompt of a model."""
        _, *around = call.outwards()
        instance, is_chat = call.instance, _is_chat(call)
        if not around or (is_chat and not any(map(_is_chat, around))):
            recorded = call.about = _RecordedCall(current_scope(), call.id)
            if is_chat:
                named = recorded.scope.conversation_id
                own = self._conversation(instance, arguments) if named is None else named
                recorded.scope = replace(recorded.scope, conversation_id=own)
                recorded.source = "LlamaIndex chat engines"
        if isinstance(instance, BaseChatEngine) and call.method == "reset":
            self._of_engine.pop(instance, None)
        if _asks(call) and not any(map(_asks, around)):
            if not any(isinstance(one.instance, _OF_QUERIES) for one in around):
                self._record_waiting(call.about)  # a tool or a memory has put them into the prompt
            self._record_prompt(arguments, call.about)
        nodes = arguments.get("nodes")
        if isinstance(instance, BaseSynthesizer) and call.method in _SYNTHESIZE and nodes:
            self._record_shown(arguments.get("query"), nodes, call.about)

    def _end(self, call: BegunCall, arguments: Mapping[str, Any], result: object) -> None:
        recorded: _RecordedCall = call.about
        retrievers = [one for one in call.outwards() if isinstance(one.instance, BaseRetriever)]
        if retrievers == [call] and call.method in _RETRIEVE and isinstance(result, list):
            query = next(iter(arguments.values()), "")
            if (query, result) not in recorded.retrievals:  # as a memory asks at each step
                recorded.waiting.append((query, result))
            recorded.retrievals.append((query, result))
        parent = call.parent
        if parent is None or parent.about is not recorded or parent.id not in self._calls:
            if not recorded.has_synthesized:
                self._record_waiting(recorded)
            recorded.retrievals.clear()

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
        best_first = [one.node for one in ranked(without_annotations(nodes))]
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
            run=call.run,
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


def _is_chat(call: BegunCall) -> bool:
    return isinstance(call.instance, BaseChatEngine) and call.method in _CHAT


def _asks(call: BegunCall) -> bool:
    return isinstance(call.instance, BaseLLM) and call.method in _ASKS
