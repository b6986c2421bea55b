"""Records what a LlamaIndex application sends, without changing any of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import PrivateAttr

from ctxreuse.context.scope import RequestScope, current_scope
from ctxreuse.evaluation.traces.recording import TraceRecorder
from llamaindex_ctxreuse.nodes.node_plans import by_rank, node_block


@dataclass(slots=True)
class _RecordedCall:
    """One call of the application: a query, a turn of a chat, a retrieval alone."""

    scope: RequestScope
    retrievals: list[tuple[str, Sequence[NodeWithScore]]] = field(default_factory=list)
    has_synthesized: bool = False


class _RecordedSpan(BaseSpan):
    """A span with the call that it is part of."""

    _call: _RecordedCall = PrivateAttr()
    _is_inside_retriever: bool = PrivateAttr(default=False)
    _is_retriever: bool = PrivateAttr(default=False)


class TraceSpanHandler(BaseSpanHandler[_RecordedSpan]):
    """Records the nodes that query and chat engines give to their response synthesizer.

    The synthesizer comes after all postprocessors. Of a call without a synthesizer, the outermost
    retrievals are recorded. `ctxreuse.request_context` says the conversation. Add the handler to
    the dispatcher, or use `recording`.

    Args:
        recorder: Keeps the records.
    """

    _recorder: TraceRecorder = PrivateAttr()

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder

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
        span._call = _RecordedCall(current_scope()) if parent is None else parent._call
        span._is_retriever = isinstance(instance, BaseRetriever)
        if parent is not None:
            span._is_inside_retriever = parent._is_retriever or parent._is_inside_retriever
        nodes = bound_args.arguments.get("nodes")
        if isinstance(instance, BaseSynthesizer) and _method(id_) in _SYNTHESIZE and nodes:
            span._call.has_synthesized = True
            self._record(bound_args.arguments.get("query"), nodes, span._call.scope)
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
            span._call.retrievals.append((query, result))
        if span.parent_id not in self.open_spans:
            if not span._call.has_synthesized:
                for query, nodes in span._call.retrievals:
                    self._record(query, nodes, span._call.scope)
            span._call.retrievals.clear()
        return span

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> _RecordedSpan | None:
        """Drop a span that failed: its nodes were not sent."""
        return self.open_spans.get(id_)

    def _record(self, query: Any, nodes: Sequence[NodeWithScore], scope: RequestScope) -> None:
        self._recorder.record(
            [node_block(one.node, MetadataMode.LLM) for one in by_rank(nodes)],
            query.query_str if isinstance(query, QueryBundle) else str(query),
            conversation_id=scope.conversation_id,
            tenant=scope.tenant or "",
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


_SYNTHESIZE = {"synthesize", "asynthesize"}
_RETRIEVE = {"retrieve", "aretrieve"}


def _method(span_id: str) -> str:
    """Return the method of a span, of an id such as "VectorIndexRetriever.retrieve-<uuid>"."""
    return span_id.split("-", 1)[0].rpartition(".")[2]
