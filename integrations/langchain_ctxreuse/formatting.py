"""Documents as the text that a prompt shows."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from ctxreuse.adapters.formatting import format_documents
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse.documents.document_plans import planned_document


def format_context(
    documents: Sequence[Document],
    templates: Templates = DEFAULT_TEMPLATES,
    registry: ContextRegistry | None = None,
) -> str:
    r"""Return documents as text for a prompt: labels, blocks, annotations.

    Documents in the order of one plan are shown as that plan says, even if some of them were
    removed since. Any others are shown in the order given, labels counted from 1; a
    `ReuseChatModel` that finds the text in a prompt plans it. `retriever | format_context` works.

    Args:
        documents: Documents of a `ReuseRetriever`, a `ReuseCompressor` or any other retriever.
        templates: The words around them; pass the planner's if they are not the default.
        registry: Where the text is remembered, for a `ReuseChatModel` that has the same registry;
            None takes the one of this process.

    Raises:
        InvalidRequestError: wrong type.

    Example:
        >>> format_context([Document("first text"), Document("second text")])
        '[Doc_1] first text\n\n[Doc_2] second text'
    """
    if not isinstance(documents, Sequence) or isinstance(documents, (str, bytes)):
        raise InvalidRequestError(
            f"format_context takes a list of Documents, not {type(documents).__name__}; "
            "pass what a retriever returns"
        )
    others = {type(one).__name__ for one in documents if not isinstance(one, Document)}
    if others:
        raise InvalidRequestError(
            f"format_context takes a list of Documents, not one with {', '.join(sorted(others))} "
            "in it; put Document(page_content=...) into it"
        )
    return format_documents([planned_document(one) for one in documents], templates, registry)
