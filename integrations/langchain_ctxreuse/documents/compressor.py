"""A document compressor that plans what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field, PrivateAttr, field_validator

from ctxreuse.adapters.document_planner import AnnotationMode, checked_annotation
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.planner import ReusePlanner
from langchain_ctxreuse.documents.document_plans import LangChainDocumentPlanner, RetrievedDocuments
from langchain_ctxreuse.scope import scope_from_config


class ReuseCompressor(BaseDocumentCompressor):
    """Puts documents into the order in which the engine's prefix cache serves most of them.

    For `ContextualCompressionRetriever` and, as the last one, for `DocumentCompressorPipeline`. No
    document is lost or altered; a planning fault lets them through as they came. Inside a chain or
    graph its config says tenant and conversation; a `ContextualCompressionRetriever` that is
    invoked on its own hands no config on: use `ctxreuse.request_context` there.

    Args:
        planner: Plans the contexts; an own one if it is left out.
        annotation: "append" puts the annotation behind the documents as one more Document, so that
            an unchanged "stuff" chain shows it; "metadata" keeps it in the metadata, for
            `format_context`, and for chains that call the model once a document (map-reduce,
            refine) or list their sources; "off" drops it.

    Raises:
        ValueError: If the planner or the annotation mode is none.

    Example:
        >>> from langchain_core.documents import Document
        >>> documents = [Document("first text"), Document("second text")]
        >>> planned = ReuseCompressor().compress_documents(documents, "Which?")
        >>> [document.metadata["ctxreuse"]["label"] for document in planned]
        ['[Doc_1]', '[Doc_2]']
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    planner: ReusePlanner = Field(default_factory=ReusePlanner, repr=False)
    annotation: AnnotationMode = "append"
    _arranger: LangChainDocumentPlanner = PrivateAttr()

    _check_planner = field_validator("planner", mode="before")(planner_or_new)
    _check_annotation = field_validator("annotation", mode="before")(checked_annotation)

    def model_post_init(self, context: Any, /) -> None:
        """Build what holds the state of a run."""
        super().model_post_init(context)
        self._arranger = LangChainDocumentPlanner(
            self.planner, self.annotation, type(self).__name__
        )

    @property
    def faults(self) -> int:
        """How often planning has failed and documents went through as they came."""
        return self._arranger.faults

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return copies of the documents in their planned order.

        Args:
            documents: What was retrieved, best first.
            query: The question.
            callbacks: Not used: planning calls no model.
        """
        return self._arranger.arrange(RetrievedDocuments(documents, query, scope_from_config(None)))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return what `compress_documents` returns; planning one context takes no time to await."""
        return self.compress_documents(documents, query, callbacks)
