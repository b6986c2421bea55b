"""Documents as text for a prompt, and in planned order: what retriever and compressor share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.document_turn import ItemKind, shared_names
from ctxreuse.pipeline.formatting import checked_items, cited_items, joined_forms, own_labels
from ctxreuse.pipeline.known_texts import Form
from langchain_ctxreuse.documents.run_documents import document_forms, run_documents, seen_forms
from langchain_ctxreuse.scope import tenant_from_config

Label: TypeAlias = str | Callable[[Document], object]
"""A document's own label: the name of a field of its metadata, or a function."""

_REMEDIES = ("Documents", "Document(page_content=...)")


def format_context(
    documents: Sequence[Document],
    document_prompt: BasePromptTemplate[str] | str | None = None,
    separator: str = "\n\n",
    *,
    labels: bool = False,
    label: Label | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
) -> str:
    r"""Return documents as text for a prompt: the `format_docs` of an application, known to us.

    What `document_prompt` puts around a document moves with it where a `ReuseChatModel` plans.

    Args:
        documents: Documents of any retriever.
        document_prompt: How each is shown: a string with `{page_content}` and names of metadata,
            or a prompt template. None shows the text alone.
        separator: What stands between each two.
        labels: Whether each stands under a label, for answers that cite it, and for later turns
            that leave it out; each document is shown once.
        label: A label of the application's own instead: the name of a field of the metadata, or a
            function from a document to a number, an id, a title.
        templates: The words around labels; pass the planner's if they are not the default.

    Raises:
        InvalidRequestError: wrong type, or a document that lacks what is to be shown of it.

    Example:
        >>> documents = [Document("first text", metadata={"n": 1}), Document("second text")]
        >>> format_context(documents)
        'first text\n\nsecond text'
        >>> format_context(documents, labels=True)
        '[EWUW] first text\n\n[GYJD] second text'
        >>> format_context(documents[:1], "Number {n}: {page_content}")
        'Number 1: first text'
    """
    given = checked_items(documents, Document, "format_context", _REMEDIES)
    return joined_forms(
        document_forms(given, _shown_by(document_prompt, given)),
        [one.page_content for one in given],
        separator,
        tenant_from_config(),
        templates,
        labels=labels,
        own_labels=own_labels(given, label),
        ids=[one.id for one in given],
        root=run_documents().run_of(None).root,
    )


def cited_documents(
    answer: str | BaseMessage,
    documents: Sequence[Document],
    document_prompt: BasePromptTemplate[str] | str | None = None,
    *,
    label: Label | None = None,
    templates: Templates = DEFAULT_TEMPLATES,
) -> list[Document]:
    """Return the documents that an answer cites by their labels, in its order.

    Where two documents have the same label, both are returned.

    Args:
        answer: The answer of a model that was shown `format_context(documents, labels=True)`.
        documents: The documents, those of earlier turns included.
        document_prompt: As for `format_context`.
        label: As for `format_context`.
        templates: As for `format_context`.

    Example:
        >>> documents = [Document("first text"), Document("second text")]
        >>> cited_documents("It is so [GYJD].", documents)
        [Document(metadata={}, page_content='second text')]
    """
    given = checked_items(documents, Document, "cited_documents", _REMEDIES)
    text = str(answer.text) if isinstance(answer, BaseMessage) else answer
    ids = [one.id for one in given]
    return cited_items(text, given, label, _shown_by(document_prompt, given), ids, templates)


def _shown_by(
    prompt: BasePromptTemplate[str] | str | None, documents: Sequence[Document]
) -> list[str]:
    if prompt is None:
        return [one.page_content for one in documents]
    try:
        if isinstance(prompt, str):
            prompt = PromptTemplate.from_template(prompt)
            if "page_content" not in prompt.input_variables:
                raise ValueError("add {page_content}, or pass a PromptTemplate to show no texts")
        checked_kind(
            "it", prompt, BasePromptTemplate, "a prompt template, or a string with {page_content}"
        )
        for place, one in enumerate(documents):
            if lacks := {*prompt.input_variables} - {"page_content", *one.metadata}:
                named = f"documents[{place}]" + (f", id {one.id!r:.60}," if one.id else "")
                raise ValueError(
                    f"{named} has no {', '.join(sorted(lacks))} in its metadata; put it there, or "
                    "leave it out of the prompt"
                )
        return [format_document(one, prompt) for one in documents]
    except ValueError as error:
        raise InvalidRequestError(f"document_prompt: {error}") from error


def _annotation_document(text: str, documents: Sequence[Document]) -> Document:
    return Document(text, metadata=shared_names([one.metadata for one in documents]))


# functions by name, for what has them is copied and pickled
def _block(document: Document) -> ContextBlock:
    return ContextBlock(text=document.page_content)


def _all_forms(documents: Sequence[Document]) -> list[list[Form]]:
    return [seen_forms(documents)]


DOCUMENTS = ItemKind(_block, _all_forms, _annotation_document, followed=seen_forms)
