"""A document compressor that plans what it is given."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict

from langchain_ctxreuse.documents.document_plans import DocumentPlanningFields, RetrievedDocuments
from langchain_ctxreuse.scope import scope_from_config


class ReuseCompressor(DocumentPlanningFields, BaseDocumentCompressor):
    """Puts documents into the order in which the engine's prefix cache serves most of them.

    For `ContextualCompressionRetriever` and, as the last one, for `DocumentCompressorPipeline`. No
    document is lost or altered; if planning fails they go through as they came. Inside a chain or
    graph its config says tenant and conversation; a `ContextualCompressionRetriever` that is
    invoked on its own passes no config on: use `ctxreuse.request_context` there.

    Args:
        planner: Plans the contexts; None makes one.
        annotation: "append" puts the annotation behind the documents as one more Document, so that
            an unchanged "stuff" chain shows it; "metadata" keeps it in the metadata, for
            `format_context`, and for chains that call the model once a document (map-reduce,
            refine) or list their sources; "off" drops it.

    Raises:
        ValueError: wrong type, or no such annotation mode.

    Example:
        >>> from langchain_core.documents import Document
        >>> documents = [Document("first text"), Document("second text")]
        >>> planned = ReuseCompressor().compress_documents(documents, "Which?")
        >>> [document.metadata["ctxreuse"]["label"] for document in planned]
        ['[Doc_1]', '[Doc_2]']
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return copies of the documents in their planned order.

        Args:
            documents: What was retrieved, best first.
            query: The question.
            callbacks: Not used: planning calls no model.
        """
        retrieved = RetrievedDocuments(documents, query, scope_from_config(None))
        return self._documents.plan(retrieved)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return what `compress_documents` returns; planning one context takes no time to await."""
        return self.compress_documents(documents, query, callbacks)
