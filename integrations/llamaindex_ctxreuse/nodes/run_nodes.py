"""The nodes that a run, a call and all calls in it, retrieved: for a model to find in prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore

from ctxreuse.adapters.context_cuts import PlannedTexts
from ctxreuse.adapters.document_planner import RETRIEVALS
from ctxreuse.adapters.plan_metadata import METADATA_KEY, planned_texts
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.scope import current_scope
from llamaindex_ctxreuse.nodes.node_plans import node_block, planned_documents
from llamaindex_ctxreuse.nodes.span_listener import SpanListener

_MOST_CALLS = 20_000
_MOST_LISTS = 32
_MOST_NODES = 10_000
_streamed: ContextVar[_NodeList | None] = ContextVar("ctxreuse_streamed_nodes", default=None)
"""The nodes that the stream shows which is being read: its model is called when its run is over."""


class _NodeList:
    """Nodes in the order in which a prompt may show them."""

    def __init__(self, tenant: str | None, nodes: Sequence[NodeWithScore]) -> None:
        self.tenant = tenant
        self.scored = nodes
        self.nodes = [one.node for one in nodes]
        scores = [one.score for one in nodes if one.score is not None]
        self.is_ranked = scores == sorted(scores, reverse=True)

    @cached_property
    def with_metadata(self) -> tuple[ContextBlock, ...]:
        """The nodes as response synthesizers show them."""
        return tuple(node_block(node, MetadataMode.LLM) for node in self.nodes)

    @cached_property
    def without_metadata(self) -> tuple[ContextBlock, ...]:
        """The nodes as `get_content()` returns them."""
        return tuple(node_block(node, MetadataMode.NONE) for node in self.nodes)

    @cached_property
    def planned(self) -> PlannedTexts | None:
        """The nodes for a cache with marks or keys, if a plan has put them into their order."""
        if not any(METADATA_KEY in node.metadata for node in self.nodes):
            return None
        return planned_texts(planned_documents(self.scored))

    @property
    def is_of_a_document(self) -> bool:
        """Whether two of them follow each other in a document, which a prompt may show as such."""
        pairs = zip(self.nodes, self.nodes[1:], strict=False)
        return any(
            (following := one.next_node) is not None and following.node_id == other.node_id
            for one, other in pairs
        )


class _RunLists:
    """What one run has retrieved."""

    def __init__(self) -> None:
        # (tenant, node id) -> whether a plan has put it into its place
        self._is_planned: dict[tuple[str | None, str], bool] = {}
        self.lists: deque[_NodeList] = deque(maxlen=_MOST_LISTS)

    def note(self, shown: _NodeList, *, is_retrieved: bool) -> None:
        """Note nodes that a retriever, or what works on its nodes, has returned."""
        for node in shown.nodes:
            key = shown.tenant, node.node_id
            if METADATA_KEY in node.metadata:
                self._is_planned[key] = True
            elif is_retrieved:
                self._is_planned.setdefault(key, False)
        _forget_oldest(self._is_planned, _MOST_NODES)

    def may_show(self, shown: _NodeList) -> bool:
        """Return whether the run's tenant has retrieved all of these nodes, and none is planned."""
        is_ranking = shown.is_ranked and shown.tenant == current_scope().tenant
        return is_ranking and all(
            self._is_planned.get((shown.tenant, node.node_id)) is False
            and METADATA_KEY not in node.metadata
            for node in shown.nodes
        )

    def end(self) -> None:
        """Forget all."""
        self._is_planned.clear()
        self.lists.clear()


@dataclass(slots=True)
class _BegunCall:
    """A call that LlamaIndex has begun."""

    id: str
    run: _RunLists
    instance: object
    parent: _BegunCall | None
    synthesized: _NodeList | None = None
    is_retrieval: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_retrieval = isinstance(self.instance, BaseRetriever)

    def end(self) -> None:
        """Forget the run if this is the outermost call of it."""
        if self.parent is None:
            self.run.end()

    def outwards(self) -> Iterator[_BegunCall]:
        """Yield this call and those around it."""
        call: _BegunCall | None = self
        while call is not None:
            yield call
            call = call.parent


class _RunHandler(SpanListener):
    """Keeps what runs retrieve until they end; lock-free: the collector may end a call anywhere."""

    _calls: dict[str, _BegunCall] = PrivateAttr(default_factory=dict)
    _fail_open: FailOpen = PrivateAttr(
        default_factory=lambda: FailOpen("ReuseLLM", "retrieved nodes are not found in prompts")
    )

    @property
    def parts(self) -> dict[str, PartSize]:
        """How many calls are remembered, and how many may be."""
        return {"calls": PartSize(len(self._calls), _MOST_CALLS)}

    def current(self) -> _BegunCall | None:
        """Return the innermost call under way, if the handler was told of it."""
        return self._calls.get(active_span_id.get() or "")

    def entered(self, call: str, around: str, instance: object, arguments: dict[str, Any]) -> None:
        """Note a call, and the nodes that a response synthesizer is to show."""
        parent = self._calls.get(around)
        begun = _BegunCall(call, _RunLists() if parent is None else parent.run, instance, parent)
        nodes = arguments.get("nodes")
        if isinstance(instance, BaseSynthesizer) and _are_nodes(nodes):
            begun.synthesized = _NodeList(current_scope().tenant, nodes)
        if isinstance(instance, BaseRetriever | BaseNodePostprocessor):
            RETRIEVALS.begin(call, current_scope().tenant or "")
        self._calls[call] = begun
        for forgotten in _forget_oldest(self._calls, _MOST_CALLS):
            RETRIEVALS.end(forgotten)  # LlamaIndex never told of its end

    def ended(self, call: str, result: object) -> None:
        """Note what was retrieved; forget the call, and with the outermost one the run."""
        RETRIEVALS.end(call)
        over = self._calls.pop(call, None)
        if over is not None:
            self._fail_open.attempt(lambda: _note(over, result), lambda: None)
            over.end()

    def failed(self, call: str) -> None:
        """Forget a call."""
        RETRIEVALS.end(call)
        over = self._calls.pop(call, None)
        if over is not None:
            over.end()


def _note(call: _BegunCall, result: Any) -> None:
    """Note what a call has returned: nodes, or a stream that shows some."""
    if isinstance(call.instance, BaseRetriever | BaseNodePostprocessor) and _are_nodes(result):
        _note_nodes(call, result)
    shown = call.synthesized
    if shown is None or not (call.run.may_show(shown) or shown.planned is not None):
        return
    if isinstance(result, StreamingResponse) and result.response_gen is not None:
        result.response_gen = _read(result.response_gen, shown)
    elif isinstance(result, AsyncStreamingResponse):
        result.response_gen = _aread(result.response_gen, shown)


def _note_nodes(call: _BegunCall, nodes: Sequence[NodeWithScore]) -> None:
    shown = _NodeList(current_scope().tenant, nodes)
    call.run.note(shown, is_retrieved=call.is_retrieval)
    # what a retriever takes from another one is for it to return
    is_inside = call.is_retrieval and call.parent is not None and call.parent.is_retrieval
    if not is_inside:
        call.run.lists.append(shown)


def _read(pieces: Generator[Any, None, None], shown: _NodeList) -> Generator[Any, None, None]:
    """Yield a stream; while it is read, a prompt may show nodes."""
    with closing(pieces):
        while True:
            token = _streamed.set(shown)
            try:
                piece = next(pieces)
            except StopIteration:
                return
            finally:
                _streamed.reset(token)
            yield piece


async def _aread(pieces: AsyncGenerator[Any, None], shown: _NodeList) -> AsyncGenerator[Any, None]:
    """Yield a stream as `_read` does."""
    async with aclosing(pieces):
        while True:
            token = _streamed.set(shown)
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                return
            finally:
                _streamed.reset(token)
            yield piece


_HANDLER = _RunHandler()


def follow_runs() -> None:
    """Note what runs retrieve, from now on."""
    _HANDLER.listen()


def run_parts() -> dict[str, PartSize]:
    """Return how much of what is bounded is remembered of runs that go on."""
    return _HANDLER.parts


def retrieved_in_run() -> tuple[tuple[ContextBlock, ...], ...]:
    """Return what the run at hand has retrieved and a prompt of it may show."""
    streamed = _streamed.get()
    if streamed is not None:
        is_shown = streamed.planned is None and streamed.tenant == current_scope().tenant
        return (streamed.with_metadata,) if is_shown else ()
    call = _HANDLER.current()
    if call is None:
        return ()
    run = call.run
    shown = next((one.synthesized for one in call.outwards() if one.synthesized is not None), None)
    if shown is not None:
        return (shown.with_metadata,) if run.may_show(shown) else ()
    lists = [one for one in list(run.lists) if run.may_show(one) and not one.is_of_a_document]
    blocks = [form for one in lists for form in (one.with_metadata, one.without_metadata)]
    return tuple(dict.fromkeys(blocks))


def planned_in_run() -> tuple[PlannedTexts, ...]:
    """Return the planned nodes that a prompt of the run at hand may show, for their marks."""
    tenant = current_scope().tenant
    streamed = _streamed.get()
    call = _HANDLER.current()
    calls = () if call is None else tuple(call.outwards())
    shown = [one.synthesized for one in calls if one.synthesized is not None][:1]
    if streamed is not None:
        shown = [streamed]
    elif not shown and call is not None:
        shown = list(call.run.lists)
    found = [one.planned for one in shown if one.tenant == tenant]
    return tuple(one for one in found if one is not None)


def note_retrieved() -> None:
    """Note that what the call at hand, and those around it, were to retrieve is there."""
    call = _HANDLER.current()
    for one in () if call is None else call.outwards():
        RETRIEVALS.end(one.id)


def is_fused() -> bool:
    """Return whether the retriever at hand retrieves for one that fuses several results."""
    call = _HANDLER.current()
    while call is not None and call.is_retrieval:
        if isinstance(call.instance, QueryFusionRetriever):
            return True
        call = call.parent
    return False


def _forget_oldest(entries: dict[Any, Any], most: int) -> list[Any]:
    """Forget what is too much, and return its keys."""
    keys = list(islice(entries, max(0, len(entries) - most)))
    for key in keys:
        entries.pop(key, None)
    return keys


def _are_nodes(nodes: object) -> TypeGuard[list[NodeWithScore]]:
    return isinstance(nodes, list) and all(isinstance(one, NodeWithScore) for one in nodes)
