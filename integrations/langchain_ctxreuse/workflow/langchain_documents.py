"""Documents that a workflow has found, as LangChain documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from langchain_core.documents import Document

from ctxreuse.adapters.plan_metadata import copied
from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.workflow.graph.state import Documents, documents_in

DocumentOf: TypeAlias = Callable[[BlockId], Document]
"""From a block's id to the document that it was made from."""

SCORE = "score"


def as_documents(
    blocks: Documents,
    scores: Sequence[float] | None = None,
    document_of: DocumentOf | None = None,
) -> list[Document]:
    """Return blocks as documents, in their order.

    Each has the block's id and text or, with `document_of`, is a copy of the document of that id.
    Its metadata holds the score, unless it already has a "score".

    Args:
        blocks: The blocks.
        scores: How near each is, the higher the nearer; None adds none.
        document_of: The documents that the blocks were made from; called with the block's id, even
            if that is no string.

    Raises:
        InvalidRequestError: `document_of` returns something else.
    """
    known = [None] * len(blocks) if scores is None else scores
    return [
        _scored(_document(block, document_of), score)
        for block, score in zip(blocks, known, strict=True)
    ]


def with_documents(value: Any, document_of: DocumentOf | None = None) -> Any:
    """Return a value of a workflow's state with documents as LangChain's."""
    blocks = documents_in(value)
    return value if blocks is None else as_documents(blocks, None, document_of)


def checked_document_of(document_of: object) -> object:
    """Return the function, or None.

    Raises:
        InvalidRequestError: wrong type.
    """
    if document_of is not None and not callable(document_of):
        raise InvalidRequestError(
            f"document_of must be a function from a block's id to a Document, "
            f"not {describe(document_of)}; of a dict pass its __getitem__"
        )
    return document_of


def _document(block: ContextBlock, document_of: DocumentOf | None) -> Document:
    if document_of is None:
        return Document(id=str(block.id), page_content=block.text)
    document = document_of(block.id)
    if not isinstance(document, Document):
        raise InvalidRequestError(
            f"document_of must return a Document, not {type(document).__name__}"
        )
    return document


def _scored(document: Document, score: float | None) -> Document:
    metadata = copied(document.metadata)
    if score is not None:
        metadata.setdefault(SCORE, score)
    return document.model_copy(update={"metadata": metadata})
