"""Documents as the text that a prompt shows."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from ctxreuse.adapters.formatting import format_documents
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.templates import DEFAULT_TEMPLATES, Templates
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse.documents.document_plans import planned_document


def format_context(
    documents: Sequence[Document],
    templates: Templates = DEFAULT_TEMPLATES,
    registry: ContextRegistry | None = None,
) -> str:
    r"""Return documents as text for a prompt: labels, blocks, annotations.

    Documents that one plan put into order are shown as that plan says, also where some of them were
    taken away since. Any others are shown in the order given, labels counted from 1, and a
    `ReuseChatModel` that meets the text plans it then. `retriever | format_context` works.

    Args:
        documents: Documents, as `ReuseRetriever`, `ReuseCompressor` or anyone else returns them.
        templates: The words around them; the planner's, where it has others than the default.
        registry: Where the text is remembered, for a `ReuseChatModel` that has the same registry;
            None takes the one of this process.

    Raises:
        InvalidRequestError: wrong type.

    Example:
        >>> format_context([Document("first text"), Document("second text")])
        '[Doc_1] first text\n\n[Doc_2] second text'
    """
    return format_documents(
        [planned_document(one) for one in _checked(documents)], templates, registry
    )


def _checked(documents: object) -> list[Document]:
    if isinstance(documents, Sequence) and not isinstance(documents, (str, bytes)):
        kinds = {type(one).__name__ for one in documents if not isinstance(one, Document)}
        if not kinds:
            return list(documents)
        raise InvalidRequestError(
            f"format_context takes a list of Documents, not one with {', '.join(sorted(kinds))} in "
            "it; put Document(page_content=...) into it"
        )
    raise InvalidRequestError(
        f"format_context takes a list of Documents, not {type(documents).__name__}; "
        "pass what a retriever returns"
    )
