"""A retriever around another one, which plans what that retrieves."""

from __future__ import annotations

import asyncio

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from ctxreuse.adapters.document_planner import AnnotationMode
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from llamaindex_ctxreuse.llm.own_planner import OWN_PLANNER, given_or_own
from llamaindex_ctxreuse.nodes.node_plans import NodePlanner

_ARRANGED_ON_THE_LOOP = 200


class ReuseRetriever(BaseRetriever):
    """Returns what another retriever retrieves in the order that the prefix cache serves best.

    The retriever inside is called as a user would, so its own events show the nodes as retrieved
    and the events of this one show them as planned. Its errors are not caught. Node ids, scores and
    texts are kept; no node is lost; a planning fault lets them through as retrieved.
    `ctxreuse.request_context` says tenant, conversation and history.

    Args:
        retriever: Any retriever.
        planner: Plans the contexts; an own one if it is left out.
        annotation: "append" puts the annotation behind the nodes as one more node, so that an
            unchanged query engine shows it; "metadata" keeps it in the metadata, for
            `format_context`, and for engines that give each node a call or a citation of its own
            (refine, accumulate, citations); "off" drops it.
        metadata_mode: Which metadata is part of a node's text where the prompt shows it.
        callback_manager: Where events go; to that of the retriever inside if it is left out.

    Raises:
        InvalidRequestError: If the retriever, the planner, the annotation mode or the metadata mode
            is none.

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
        planner: ReusePlanner = OWN_PLANNER,
        annotation: AnnotationMode = "append",
        metadata_mode: MetadataMode = MetadataMode.LLM,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._retriever = checked_retriever(retriever)
        self._arranger = NodePlanner(
            given_or_own(planner), annotation, metadata_mode, type(self).__name__
        )
        # one that does not call its base class's __init__ has none
        inside = getattr(retriever, "callback_manager", None)
        super().__init__(callback_manager=callback_manager or inside)

    @property
    def retriever(self) -> BaseRetriever:
        """The retriever inside."""
        return self._retriever

    @property
    def faults(self) -> int:
        """How often planning has failed and nodes went through as retrieved."""
        return self._arranger.faults

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._arranged(self._retriever.retrieve(query_bundle), query_bundle)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        if len(nodes) > _ARRANGED_ON_THE_LOOP:
            return await asyncio.to_thread(self._arranged, nodes, query_bundle)
        return self._arranged(nodes, query_bundle)

    def _arranged(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle
    ) -> list[NodeWithScore]:
        return self._arranger.arrange(nodes, query_bundle.query_str, current_scope())


def checked_retriever(retriever: object) -> BaseRetriever:
    """Return the retriever if it is one.

    Raises:
        InvalidRequestError: If it is none.
    """
    if not isinstance(retriever, BaseRetriever):
        raise InvalidRequestError(
            f"retriever must be a LlamaIndex BaseRetriever, not {describe(retriever)}; "
            "an index gives one with as_retriever()"
        )
    return retriever
