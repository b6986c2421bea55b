"""The components that plan nodes: a postprocessor, and a retriever around another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from ctxreuse.adapters.document_planner import AnnotationMode, checked_annotation
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.planner import ReusePlanner
from llamaindex_ctxreuse.llm.delegating_llm import pickled_state
from llamaindex_ctxreuse.nodes.node_plans import (
    NodePlanner,
    checked_metadata_mode,
    checked_retriever,
)


class ReusePostprocessor(BaseNodePostprocessor):
    """Puts nodes into the order in which the engine's prefix cache serves most of them.

    For `node_postprocessors=[...]` of query engines, chat engines and `VectorMemoryBlock`. It has
    to be the last one: a postprocessor that sorts or cuts off after it (`LongContextReorder`, a
    reranker) undoes its order. Node ids, scores and texts are kept; no node is lost; a planning
    fault lets nodes through as they came. `ctxreuse.request_context` says tenant, conversation and
    history.

    Args:
        planner: Plans the contexts; None makes a new one.
        annotation: "append" puts the annotation behind the nodes as one more node, so that an
            unchanged query engine shows it; "metadata" keeps it in the metadata, for
            `format_context`, and for engines that give each node a call or a citation of its own
            (refine, accumulate, citations); "off" drops it.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it: LLM in
            query engines and chat engines, NONE in `VectorMemoryBlock`.

    Raises:
        ValueError: wrong type, or no such annotation mode or metadata mode.

    Example:
        >>> from llama_index.core.schema import TextNode
        >>> texts = ["first text", "second text"]
        >>> nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in texts]
        >>> planned = ReusePostprocessor().postprocess_nodes(nodes, query_str="Which?")
        >>> [(one.text, one.metadata["ctxreuse"]["label"]) for one in planned]
        [('first text', '[Doc_1]'), ('second text', '[Doc_2]')]
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

        Raises:
            InvalidRequestError: wrong type, or no such annotation mode or metadata mode.
        """
        copy = super().model_copy(update=update, deep=deep)
        if update:
            copy._build()
        return copy

    def _build(self) -> None:
        self._nodes = NodePlanner(
            self.planner, self.annotation, self.metadata_mode, type(self).__name__
        )

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
        return self._nodes.plan(nodes, "" if query_bundle is None else query_bundle.query_str)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = "" if query_bundle is None else query_bundle.query_str
        return await self._nodes.aplan(nodes, query)


class ReuseRetriever(BaseRetriever):
    """Returns what another retriever retrieves in the order that the prefix cache serves best.

    The retriever inside is called through its public methods, so its events show the nodes as
    retrieved and this one's events show them as planned. Its errors are not caught. Node ids,
    scores and texts are kept; no node is lost; a planning fault lets nodes through as retrieved.
    `ctxreuse.request_context` says tenant, conversation and history.

    Args:
        retriever: Any retriever.
        planner: Plans the contexts; None makes a new one.
        annotation: "append" puts the annotation behind the nodes as one more node, so that an
            unchanged query engine shows it; "metadata" keeps it in the metadata, for
            `format_context`, and for engines that give each node a call or a citation of its own
            (refine, accumulate, citations); "off" drops it.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it.
        callback_manager: Where events go; None takes that of the retriever inside.

    Raises:
        InvalidRequestError: wrong type, or no such annotation mode or metadata mode.

    Example:
        >>> from llama_index.core.schema import TextNode
        >>> class Fixed(BaseRetriever):
        ...     def _retrieve(self, query_bundle):
        ...         return [NodeWithScore(node=TextNode(text=text)) for text in ("one", "two")]
        >>> [node.text for node in ReuseRetriever(retriever=Fixed()).retrieve("Which?")]
        ['one', 'two']
    """

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
        self._planner = planner_or_new(planner)
        self._nodes = NodePlanner(self._planner, annotation, metadata_mode, type(self).__name__)
        # a retriever that does not call its base class's __init__ has none
        inside = getattr(retriever, "callback_manager", None)
        super().__init__(callback_manager=callback_manager or inside)

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
        return self._nodes.plan(self._retriever.retrieve(query_bundle), query_bundle.query_str)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        return await self._nodes.aplan(nodes, query_bundle.query_str)
