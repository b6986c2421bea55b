"""Documents in their planned order, and as text: what the retriever and the compressor share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from ctxreuse.adapters.document_planner import (
    AnnotationMode,
    MetadataPlanner,
    checked_annotation,
    shared_names,
)
from ctxreuse.adapters.environment import default_planner
from ctxreuse.adapters.formatting import cited_positions, format_documents
from ctxreuse.adapters.plan_metadata import (
    METADATA_KEY,
    PlannedDocument,
    marked,
    ranked_positions,
    retrievers_order,
    unmarked,
)
from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.fixed_settings import split_settings
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planner import ReusePlanner
from langchain_ctxreuse.scope import tenant_from_config


class DocumentPlanningFields(BaseModel):
    """The fields of a component that plans documents, and what they make.

    They are set when it is made, or for a copy: `component.model_copy(update={"planner": ...})`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    planner: ReusePlanner = Field(default_factory=default_planner, repr=False, frozen=True)
    annotation: AnnotationMode = Field(default="append", frozen=True)
    _documents: LangChainDocumentPlanner = PrivateAttr()

    _check_planner = field_validator("planner", mode="before")(planner_or_new)
    _check_annotation = field_validator("annotation", mode="before")(checked_annotation)

    def model_post_init(self, context: Any, /) -> None:
        """Build what plans the documents."""
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
        if update and not update.keys().isdisjoint(("planner", "annotation")):
            copy._build()
        return copy

    def _build(self) -> None:
        name = type(self).__name__
        self._documents = LangChainDocumentPlanner(self.planner, self.annotation, name)

    @property
    def faults(self) -> int:
        """How often planning has failed and documents went through as they came."""
        return self._documents.faults


class LangChainDocumentPlanner(MetadataPlanner[Document]):
    """Puts documents into their planned order; if planning fails they go through as retrieved."""

    def __init__(self, planner: ReusePlanner, annotation: AnnotationMode, component: str) -> None:
        super().__init__(
            planner,
            annotation,
            component,
            block_of=document_block,
            without_plan=without_plan,
            carrying=carrying,
            annotation_item=_annotation_document,
            appends=True,
        )


def format_context(
    documents: Sequence[Document],
    templates: Templates = DEFAULT_TEMPLATES,
    registry: ContextRegistry | None = None,
) -> str:
    r"""Return documents as text for a prompt: labels, blocks, annotations.

    Documents in the order of one plan are shown as that plan says, even if some were removed since.
    Any others are shown in the order given; a `ReuseChatModel` plans the text in one prompt of the
    same tenant. Format the documents for each prompt anew.

    Args:
        documents: Documents of a `ReuseRetriever`, a `ReuseCompressor` or any other retriever.
        templates: The words around them; pass the planner's if they are not the default.
        registry: Where the text is remembered, for a `ReuseChatModel` that has the same registry;
            None takes the one of this process.

    Example:
        >>> format_context([Document("first text"), Document("second text")])
        '[EWUW] first text\n\n[GYJD] second text'
    """
    given = _checked_documents(documents, "format_context")
    return format_documents(given, templates, registry, tenant_from_config())


def cited_documents(
    answer: str | BaseMessage,
    documents: Sequence[Document],
    templates: Templates = DEFAULT_TEMPLATES,
) -> list[Document]:
    """Return the documents that an answer cites by their labels, in its order.

    Where two documents have the same label, both are returned.

    Args:
        answer: The answer of a model that was shown `format_context(documents)`.
        documents: The documents, those of earlier turns included.
        templates: The words around them, as for `format_context`.

    Example:
        >>> documents = [Document("first text"), Document("second text")]
        >>> cited_documents("It is so [GYJD].", documents)
        [Document(metadata={}, page_content='second text')]
    """
    given = _checked_documents(documents, "cited_documents")
    text = str(answer.text) if isinstance(answer, BaseMessage) else answer
    return [documents[n] for n in cited_positions(text, given, templates)]


def by_rank(documents: Sequence[Document]) -> list[Document]:
    """Return documents best first, without the annotation behind them: `by_rank(documents)[:3]`.

    Documents that were moved since they were planned keep their order.

    Args:
        documents: Documents, planned or not.
    """
    given = _checked_documents(documents, "by_rank")
    return [documents[position] for position in ranked_positions(given)]


def _checked_documents(documents: object, taker: str) -> list[PlannedDocument]:
    """Return documents as ones that may carry a plan."""
    if not isinstance(documents, Sequence) or isinstance(documents, (str, bytes)):
        raise InvalidRequestError(
            f"{taker} takes a list of Documents, not {type(documents).__name__}; "
            "pass what a retriever returns"
        )
    others = {type(one).__name__ for one in documents if not isinstance(one, Document)}
    if others:
        raise InvalidRequestError(
            f"{taker} takes a list of Documents, not one with {', '.join(sorted(others))} "
            "in it; put Document(page_content=...) into it"
        )
    return [planned_document(one) for one in documents]


def document_block(document: Document) -> ContextBlock:
    """Return a document as a context block."""
    return planned_document(document).block


def planned_document(document: Document) -> PlannedDocument:
    """Return a document as one that may carry a plan."""
    # without an id, the block's is derived from its text
    block = ContextBlock(id=document.id, text=document.page_content)  # type: ignore[arg-type]
    return PlannedDocument(block, document.metadata)


def without_plan(
    documents: Sequence[Document], scope: RequestScope | None = None
) -> list[Document] | None:
    """Return documents as they were before an earlier plan, so that plans never nest."""
    order = retrievers_order([planned_document(one) for one in documents], scope)
    return None if order is None else [_without_metadata(documents[position]) for position in order]


def _without_metadata(document: Document) -> Document:
    if METADATA_KEY not in document.metadata:
        return document
    return document.model_copy(update={"metadata": unmarked(document.metadata)})


def carrying(document: Document, carried: Mapping[str, Any]) -> Document:
    """Return a copy with plan metadata: its rank and label, and the plan if it is a part of one."""
    return document.model_copy(update={"metadata": marked(document.metadata, carried)})


def _annotation_document(
    text: str, carried: Mapping[str, Any], documents: Sequence[Document]
) -> Document:
    """Return the annotation behind documents as a document."""
    shared = shared_names(document.metadata for document in documents)
    return Document(page_content=text, metadata={**shared, METADATA_KEY: carried})
