"""The components that plan nodes: a postprocessor, and a retriever around another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import ConfigDict, Field, field_validator
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from ctxreuse.context.checks import checked_kind, refuse_wrapped
from ctxreuse.context.copies import FixedSettings
from ctxreuse.pipeline.document_turn import DocumentPlanner, ItemKind
from ctxreuse.pipeline.engine_options import planner_for
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.planning_fields import PlansDocuments
from llamaindex_ctxreuse.llm.delegating_llm import pickled_state
from llamaindex_ctxreuse.nodes.node_plans import checked_metadata_mode, checked_retriever, node_kind
from llamaindex_ctxreuse.nodes.run_nodes import follow_runs, is_fused, retrieved_items


class ReusePostprocessor(PlansDocuments, BaseNodePostprocessor):
    """Puts nodes into the order in which the engine's prefix cache serves most of them.

    For `node_postprocessors=[...]`, as the last one: what sorts after it undoes its order. The
    order alone is its own: the nodes are those that came, as many as came, a repeat behind all
    others. A `ReuseLLM` around the model does the rest, and saves without it, too; this is for
    models that are not yours to wrap. What it saves is unknown to `planner.savings`.

    Scores rank the nodes, and the given order those that have none. A planning fault lets nodes
    through as they came. `ctxreuse.request_context` says the tenant. Queries of a tenant that are
    asked at once are planned together; none waits for others longer than 5 milliseconds.

    Args:
        planner: Plans the contexts; None takes the one of this process.
        annotation: Whether the ranking stands behind the nodes as one more node.
        drop_repeats: Whether nodes of the same text are returned once.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it: LLM in
            query engines and chat engines, NONE in `VectorMemoryBlock`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    metadata_mode: MetadataMode = Field(default=MetadataMode.LLM, frozen=True)

    _check_metadata_mode = field_validator("metadata_mode", mode="before")(checked_metadata_mode)

    def _item_kind(self) -> ItemKind[NodeWithScore]:
        return node_kind(self.metadata_mode)

    def _build(self) -> None:
        super()._build()
        follow_runs()

    @classmethod
    def class_name(cls) -> str:
        """Return the name that serialized postprocessors carry."""
        return "ReusePostprocessor"

    def __getstate__(self) -> dict[Any, Any]:
        return pickled_state(self)

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return self._documents.plan(retrieved_items(nodes, query_bundle))

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return await self._documents.aplan(retrieved_items(nodes, query_bundle))


class ReuseRetriever(FixedSettings, BaseRetriever):
    """Returns what another retriever retrieves in the order that the prefix cache serves best.

    The retriever inside is called through its public methods; its errors are not caught. All else
    is as for `ReusePostprocessor`. Make it the outermost retriever: inside of a
    `QueryFusionRetriever` it returns the nodes as retrieved.

    Args:
        retriever: Any retriever.
        planner: As for `ReusePostprocessor`.
        annotation: As for `ReusePostprocessor`.
        drop_repeats: As for `ReusePostprocessor`.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it.
        callback_manager: Where events go; None takes that of the retriever inside.
    """

    callback_manager: CallbackManager

    def __init__(
        self,
        retriever: BaseRetriever,
        *,
        planner: ReusePlanner | None = None,
        annotation: bool = False,
        drop_repeats: bool = False,
        metadata_mode: MetadataMode = MetadataMode.LLM,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._retriever = checked_retriever(retriever)
        refuse_wrapped("retriever", retriever, ReuseRetriever)
        self._planner = planner_for(planner)
        self._documents = DocumentPlanner(
            self._planner,
            node_kind(checked_metadata_mode(metadata_mode)),
            type(self).__name__,
            annotation=checked_kind("annotation", annotation, bool, "True or False"),
            drop_repeats=checked_kind("drop_repeats", drop_repeats, bool, "True or False"),
        )
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
        return self._documents.fail_open.faults

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        return nodes if is_fused() else self._documents.plan(retrieved_items(nodes, query_bundle))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        if is_fused():
            return nodes
        return await self._documents.aplan(retrieved_items(nodes, query_bundle))
