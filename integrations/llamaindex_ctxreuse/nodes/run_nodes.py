"""What retrievers and postprocessors returned, by the outermost call: prompts may show it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import BoundArguments
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import (
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    TextNode,
)

from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.scope import current_scope
from ctxreuse.pipeline.document_turn import RETRIEVALS, RetrievedItems, best_first
from ctxreuse.pipeline.known_texts import Form, known_texts
from ctxreuse.planner import ReusePlanner

_MOST_CALLS = 20_000
_log = logging.getLogger("ctxreuse")
_REGISTERING = ForkSafeLock()


class AnnotationNode(TextNode):
    """Stands behind nodes in planned order, and says which are best."""


def node_forms(nodes: Sequence[NodeWithScore], texts: Sequence[str] | None = None) -> list[Form]:
    """Return nodes as they are shown, those that follow each other in a document known as such."""
    texts = [""] * len(nodes) if texts is None else texts
    following = [one.node.relationships.get(NodeRelationship.NEXT) for one in nodes]
    return [
        Form(text, None, one.node_id, getattr(follower, "node_id", None))
        for one, text, follower in zip(nodes, texts, following, strict=True)
    ]


def seen_forms(
    nodes: Sequence[NodeWithScore], metadata_mode: MetadataMode = MetadataMode.LLM
) -> list[list[Form]]:
    """Return nodes as prompts show them: with metadata, as synthesizers do, and without."""
    modes = dict.fromkeys((metadata_mode, MetadataMode.LLM, MetadataMode.NONE))
    return [
        [
            one._replace(kind=mode.value)
            for one in node_forms(nodes, [one.get_content(mode) for one in nodes])
        ]
        for mode in modes
    ]


def without_annotations(nodes: Sequence[NodeWithScore]) -> list[NodeWithScore]:
    """Return nodes without the annotations that earlier plans put behind them."""
    return [one for one in nodes if not isinstance(getattr(one, "node", None), AnnotationNode)]


@dataclass(slots=True, eq=False)
class BegunCall:
    """A call that LlamaIndex has begun."""

    id: str
    instance: object
    parent: BegunCall | None
    root: str  # the outermost call around it
    gives_nodes: bool  # whether it is one of a retriever, or of what works on its nodes
    about: Any = None  # what a handler keeps of it, and of those inside of it

    @property
    def method(self) -> str:
        """The method's name, of an id such as "VectorIndexRetriever.retrieve-<uuid>"."""
        return self.id.split("-", 1)[0].rpartition(".")[2]

    def outwards(self) -> Iterator[BegunCall]:
        """Yield this call and those around it."""
        call: BegunCall | None = self
        while call is not None:
            yield call
            call = call.parent


class OpenCalls(BaseSpanHandler[BaseSpan]):
    """Sees which calls go on inside of which; lock-free: the collector may end any."""

    _calls: dict[str, BegunCall] = PrivateAttr(default_factory=dict)

    def span_enter(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any | None = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note a call and the one around it."""
        around = self._calls.get(parent_id or "")
        root, about = (id_, None) if around is None else (around.root, around.about)
        gives_nodes = isinstance(instance, BaseRetriever | BaseNodePostprocessor)
        begun = self._calls[id_] = BegunCall(id_, instance, around, root, gives_nodes, about)
        self._begin(begun, bound_args.arguments)
        if len(self._calls) > _MOST_CALLS:
            oldest, *_newer = self._calls  # in one step, as threads share them
            self.span_drop(oldest)  # LlamaIndex never told of its end

    def span_exit(
        self,
        id_: str,
        bound_args: BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at what a call returned, and forget it."""
        over = self._calls.get(id_)
        self.span_drop(id_)
        if over is not None:
            self._end(over, bound_args.arguments, result)

    def span_drop(self, id_: str, *args: Any, **kwargs: Any) -> None:
        """Forget a call."""
        RETRIEVALS.pop(id_, None)
        self._calls.pop(id_, None)

    def new_span(self, *args: Any, **kwargs: Any) -> None:
        """Keep no spans."""

    prepare_to_exit_span = prepare_to_drop_span = new_span

    def _begin(self, call: BegunCall, arguments: Mapping[str, Any]) -> None:
        """Look at a call that begins."""

    def _end(self, call: BegunCall, arguments: Mapping[str, Any], result: object) -> None:
        """Look at a call that has ended well."""


class _RunHandler(OpenCalls):
    """Sees what calls return, and changes nothing of it."""

    _fail_open: FailOpen = PrivateAttr(
        default_factory=lambda: FailOpen("ReuseLLM", "retrieved nodes are not found in prompts")
    )

    def under_way(self) -> list[BegunCall]:
        """Return the calls under way, the innermost first, of which the handler was told."""
        call = self._calls.get(active_span_id.get() or "")
        return [] if call is None else list(call.outwards())

    def _begin(self, call: BegunCall, arguments: Mapping[str, Any]) -> None:
        if call.gives_nodes:
            RETRIEVALS[call.id] = current_scope().tenant or ""

    def _end(self, call: BegunCall, arguments: Mapping[str, Any], result: object) -> None:
        if not call.gives_nodes or not isinstance(result, list):
            return
        _, *around = call.outwards()
        if any(one.gives_nodes for one in around):  # that is to return them
            return
        try:
            if all(isinstance(one, NodeWithScore) for one in result):
                forms = seen_forms(without_annotations(result))
                known_texts().add_seen(current_scope().tenant or "", forms, call.root)
        except Exception as error:
            self._fail_open.note(error)


_HANDLER = _RunHandler()


def follow_runs() -> None:
    """See what runs retrieve, from now on; asking again changes nothing."""
    dispatcher = get_dispatcher()
    with _REGISTERING:
        if not any(one is _HANDLER for one in dispatcher.span_handlers):
            dispatcher.add_span_handler(_HANDLER)


def run_parts() -> dict[str, PartSize]:
    """Return how much of what is bounded is remembered of runs that go on."""
    return {"calls": PartSize(len(_HANDLER._calls), _MOST_CALLS)}


def root_of_call() -> str | None:
    """Return the outermost call around the one at hand; None outside of any."""
    calls = _HANDLER.under_way()
    return calls[0].root if calls else None


def retrieved_items(
    nodes: Sequence[NodeWithScore], query: QueryBundle | None
) -> RetrievedItems[NodeWithScore]:
    """Return what the call at hand has retrieved; it, and those around it, wait for no more."""
    for one in _HANDLER.under_way():
        RETRIEVALS.pop(one.id, None)
    given = without_annotations(nodes) if isinstance(nodes, list) else nodes
    asked = "" if query is None else query.query_str
    return RetrievedItems(given, asked, current_scope(), root_of_call())


def as_retrieved(
    nodes: Sequence[NodeWithScore], planner: ReusePlanner | None
) -> list[NodeWithScore]:
    """Return nodes best first, as before a plan of ours, which one of this planner replaces."""
    given = without_annotations(nodes)
    texts = [one.get_content(MetadataMode.NONE) for one in given]
    return best_first(given, texts, current_scope().tenant or "", planner, root_of_call())


def is_fused() -> bool:
    """Return whether the retriever at hand retrieves for one that fuses results; say so once."""
    for call in _HANDLER.under_way():
        if isinstance(call.instance, QueryFusionRetriever):
            _log_fused()
            return True
        if not isinstance(call.instance, BaseRetriever):
            break
    return False


@cache
def _log_fused() -> None:
    _log.warning(
        "a ReuseRetriever inside of a QueryFusionRetriever returns the nodes as retrieved, because "
        "the other one would take a planned order for a ranking; wrap the outermost retriever"
    )
