"""The components that plan nodes: a postprocessor, and a retriever around another one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import (
    ImageNode,
    MetadataMode,
    Node,
    NodeWithScore,
    QueryBundle,
    TextNode,
)

from ctxreuse.adapters.document_planner import (
    AnnotationMode,
    MetadataPlanner,
    RetrievedItems,
    checked_annotation,
)
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import refuse_wrapped
from ctxreuse.context.fixed_settings import FixedSettings, split_settings
from ctxreuse.context.scope import current_scope
from ctxreuse.planner import ReusePlanner
from llamaindex_ctxreuse.llm.delegating_llm import pickled_state
from llamaindex_ctxreuse.nodes.node_plans import (
    annotation_node,
    checked_metadata_mode,
    checked_retriever,
    node_block,
    planned_copy,
    without_plan,
)
from llamaindex_ctxreuse.nodes.run_nodes import follow_runs, is_fused, note_retrieved
from llamaindex_ctxreuse.nodes.synthesis import PlannedNode, show_words_in_syntheses

_log = logging.getLogger("ctxreuse")


class NodePlanner(MetadataPlanner[NodeWithScore]):
    """Puts nodes into their planned order; an internal error lets them through as they came."""

    def __init__(
        self,
        planner: ReusePlanner | None,
        annotation: AnnotationMode,
        metadata_mode: MetadataMode,
        component: str,
    ) -> None:
        self._metadata_mode = checked_metadata_mode(metadata_mode)
        self._shows_words = annotation == "append"
        self._templates = planner_or_new(planner).templates
        super().__init__(
            planner,
            annotation,
            component,
            block_of=self._identity,
            without_plan=without_plan,
            carrying=self._carrying,
            annotation_item=annotation_node,
            appends=False,
        )

    def plan_nodes(self, nodes: Sequence[NodeWithScore], query: str) -> list[NodeWithScore]:
        """Return copies of the nodes in their planned order."""
        return self.plan(self._retrieved(nodes, query))

    async def aplan_nodes(self, nodes: Sequence[NodeWithScore], query: str) -> list[NodeWithScore]:
        """Do what `plan_nodes` does."""
        return await self.aplan(self._retrieved(nodes, query))

    def _retrieved(
        self, nodes: Sequence[NodeWithScore], query: str
    ) -> RetrievedItems[NodeWithScore]:
        if self._shows_words:
            show_words_in_syntheses()
        note_retrieved()
        return RetrievedItems(nodes, query, current_scope())

    def _carrying(self, scored: NodeWithScore, plan_metadata: dict[str, Any]) -> NodeWithScore:
        planned = planned_copy(scored, plan_metadata)
        return PlannedNode.of(planned, self._templates) if self._shows_words else planned

    def _identity(self, scored: NodeWithScore) -> ContextBlock:
        """Return a block that tells a node from others: its text as rendered, and its media."""
        node = scored.node
        block = node_block(node, self._metadata_mode)
        if isinstance(node, Node):
            has_media = bool(node.image_resource or node.audio_resource or node.video_resource)
        else:
            has_media = isinstance(node, ImageNode) or not isinstance(node, TextNode)
        # no text in a prompt shows an image, so no text may stand for one
        return replace(block, text=f"{block.text}\n{node.hash}") if has_media else block


class ReusePostprocessor(BaseNodePostprocessor):
    """Puts nodes into the order in which the engine's prefix cache serves most of them.

    For `node_postprocessors=[...]`, as the last one: what sorts after it undoes its order. Node
    ids, scores and texts are kept; no node is lost or added; a planning fault lets nodes through as
    they came. Scores rank the nodes, and the given order those that have none.
    `ctxreuse.request_context` says tenant, conversation and history. Queries of a tenant that are
    asked at once are planned together; none waits for others longer than 5 milliseconds.

    Args:
        planner: Plans the contexts; None makes a new one.
        annotation: "append" has an unchanged query engine say the ranking behind the nodes, where
            one prompt shows all of them. "metadata" keeps it for `format_context` alone; "off"
            drops it.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it: LLM in
            query engines and chat engines, NONE in `VectorMemoryBlock`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    planner: ReusePlanner | None = Field(
        default=None, validate_default=True, exclude=True, repr=False, frozen=True
    )
    annotation: AnnotationMode = Field(default="append", frozen=True)
    metadata_mode: MetadataMode = Field(default=MetadataMode.LLM, frozen=True)
    _nodes: NodePlanner = PrivateAttr()

    _check_planner = field_validator("planner", mode="before")(planner_or_new)
    _check_annotation = field_validator("annotation", mode="before")(checked_annotation)
    _check_metadata_mode = field_validator("metadata_mode", mode="before")(checked_metadata_mode)

    def model_post_init(self, context: Any, /) -> None:
        """Build what holds the state of a run."""
        super().model_post_init(context)
        self._build()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, in which other values of the fields take effect.

        Args:
            update: Fields to change.
            deep: Whether what it holds is copied, too.
        """
        split_settings(type(self), update or (), type(self).model_fields)
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._build()
        return copy

    def _build(self) -> None:
        self._nodes = NodePlanner(
            self.planner, self.annotation, self.metadata_mode, type(self).__name__
        )
        follow_runs()

    @classmethod
    def class_name(cls) -> str:
        """Return the name that serialized postprocessors carry."""
        return "ReusePostprocessor"

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state of a copy in another process; see `pickled_state`."""
        return pickled_state(self)

    @property
    def faults(self) -> int:
        """How often planning has failed and nodes went through as they came."""
        return self._nodes.faults

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return self._nodes.plan_nodes(nodes, "" if query_bundle is None else query_bundle.query_str)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = "" if query_bundle is None else query_bundle.query_str
        return await self._nodes.aplan_nodes(nodes, query)


class ReuseRetriever(FixedSettings, BaseRetriever):
    """Returns what another retriever retrieves in the order that the prefix cache serves best.

    The retriever inside is called through its public methods; its errors are not caught. All else
    is as for `ReusePostprocessor`. Make it the outermost retriever: inside of a
    `QueryFusionRetriever` it returns the nodes as retrieved.

    Args:
        retriever: Any retriever.
        planner: As for `ReusePostprocessor`.
        annotation: As for `ReusePostprocessor`.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it.
        callback_manager: Where events go; None takes that of the retriever inside.
    """

    callback_manager: CallbackManager

    def __init__(
        self,
        retriever: BaseRetriever,
        *,
        planner: ReusePlanner | None = None,
        annotation: AnnotationMode = "append",
        metadata_mode: MetadataMode = MetadataMode.LLM,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._retriever = checked_retriever(retriever)
        refuse_wrapped("retriever", retriever, ReuseRetriever)
        self._planner = planner_or_new(planner)
        self._nodes = NodePlanner(self._planner, annotation, metadata_mode, type(self).__name__)
        # a retriever that does not call its base class's __init__ has none
        inside = getattr(retriever, "callback_manager", None)
        super().__init__(callback_manager=callback_manager or inside)
        follow_runs()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the retriever inside, such as `similarity_top_k`."""
            inside = vars(self).get("_retriever")  # none while it is made, copied or restored
            if inside is None or name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return getattr(inside, name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute of the retriever inside where it has one that this class lacks."""
            inside = vars(self).get("_retriever")
            is_own = inside is None or name in vars(self) or hasattr(type(self), name)
            if is_own or name.startswith("_") or not hasattr(inside, name):
                super().__setattr__(name, value)
            else:
                setattr(inside, name, value)

    @property
    def retriever(self) -> BaseRetriever:
        """The retriever inside."""
        return self._retriever

    @property
    def planner(self) -> ReusePlanner:
        """Plans the contexts; another one needs another retriever."""
        return self._planner

    @property
    def faults(self) -> int:
        """How often planning has failed and nodes went through as retrieved."""
        return self._nodes.faults

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        if is_fused():
            _log_fused()
            return nodes
        return self._nodes.plan_nodes(nodes, query_bundle.query_str)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        if is_fused():
            _log_fused()
            return nodes
        return await self._nodes.aplan_nodes(nodes, query_bundle.query_str)


@cache
def _log_fused() -> None:
    """Say once that a retriever inside of a fusion plans nothing."""
    _log.warning(
        "a ReuseRetriever inside of a QueryFusionRetriever returns the nodes as retrieved, because "
        "the other one would take a planned order for a ranking; wrap the outermost retriever"
    )
