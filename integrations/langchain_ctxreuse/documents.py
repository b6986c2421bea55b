"""Documents in their planned order: what the retriever and the compressor share.

A planned document is a copy that carries its rank, label and plan in its metadata; the retriever's
own documents are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_core.documents import Document

from ctxreuse.arranging import (
    METADATA_KEY,
    AnnotationMode,
    Arranged,
    Arranger,
    Placed,
    Retrieved,
    appended_annotation,
    plan_metadata,
)
from ctxreuse.blocks import ContextBlock, text_digest
from ctxreuse.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner
from ctxreuse.plans import Plan
from ctxreuse.prompts import SentBlock
from ctxreuse.request_scope import RequestScope

PlanMetadata: TypeAlias = Mapping[str, Any]
"""A plan as a document's metadata holds it; see `ctxreuse.arranging.plan_metadata`."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a planned document says of itself.

    Attributes:
        rank: Its position as retrieved, from 0.
        label: Its label, such as "[Doc_1]".
        plan: The plan that it is part of.
        overlap: What its rendering leaves out, if its beginning repeats an earlier block's end.
    """

    rank: int
    label: str
    plan: PlanMetadata
    overlap: Overlap | None = None


@dataclass(frozen=True, slots=True)
class Overlap:
    """The beginning of a document that stands at the end of an earlier one.

    Attributes:
        characters: How many characters.
        label: Under which label they stand.
        digest: Of these characters, in hexadecimal, for a user may change the document later.
    """

    characters: int
    label: str
    digest: str

    def stands_in(self, text: str) -> bool:
        """Return whether a text still begins with these characters."""
        return text_digest(text[: self.characters]).hex() == self.digest


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What one query retrieved.

    Attributes:
        documents: The documents, best first.
        query: The query.
        scope: Whose request it is.
    """

    documents: Sequence[Document]
    query: str
    scope: RequestScope


class DocumentArranger:
    """Puts documents into their planned order; a fault of ours lets them through as retrieved.

    Args:
        planner: Plans the contexts.
        annotation: Where annotations go.
        component: The adapter's name, for the log.

    Raises:
        InvalidRequestError: If the planner or the annotation mode is none.
    """

    def __init__(self, planner: ReusePlanner, annotation: AnnotationMode, component: str) -> None:
        self._arranger = Arranger(planner, document_block, annotation, component)
        self._annotation = annotation
        self._fail_open = FailOpen(component)

    @property
    def faults(self) -> int:
        """How often documents went through as retrieved."""
        return self._arranger.faults + self._fail_open.faults

    def arrange(self, retrieval: Retrieval) -> list[Document]:
        """Return what one query retrieved in its planned order."""
        return self.arrange_batch([retrieval])[0]

    def arrange_batch(self, retrievals: Sequence[Retrieval]) -> list[list[Document]]:
        """Return what some queries retrieved, planned together, each in its planned order.

        Returns:
            The documents of each query, in the order given.
        """
        return self._fail_open.attempt(
            lambda: self._arrange_batch(retrievals),
            lambda: [list(retrieval.documents) for retrieval in retrievals],
        )

    def _arrange_batch(self, retrievals: Sequence[Retrieval]) -> list[list[Document]]:
        arranged: list[list[Document]] = [list(one.documents) for one in retrievals]
        positions: list[int] = []
        batch: list[Retrieved[Document]] = []
        for position, retrieval in enumerate(retrievals):
            unplanned = without_plan(retrieval.documents)
            if unplanned is not None:
                positions.append(position)
                batch.append(Retrieved(unplanned, retrieval.query, retrieval.scope))
        for position, one in zip(positions, self._arranger.arrange_batch(batch), strict=True):
            if one.plan is not None:
                arranged[position] = self._marked(one, one.plan)
        return arranged

    def _marked(self, arranged: Arranged[Document], plan: Plan) -> list[Document]:
        """Return copies that carry their plan, the annotation behind them."""
        said = plan_metadata(plan)
        if self._annotation == "off":
            said["order_annotation"] = None
        overlaps = {
            part.label: Overlap(
                part.repeated,
                part.repeats,
                text_digest(part.block.text[: part.repeated]).hex(),
            )
            for part in plan.parts
            if isinstance(part, SentBlock) and part.repeated
        }
        documents = [_marked_copy(one, said, overlaps) for one in arranged.placed]
        annotation = arranged.annotation
        if not documents and self._annotation == "metadata":
            annotation = appended_annotation(plan, [])  # no document is left to carry it
        if annotation is not None:
            documents.append(_annotation_document(annotation, said, documents))
        return documents


def document_block(document: Document) -> ContextBlock:
    """Return a document as a context block."""
    if document.id is None:
        return ContextBlock(text=document.page_content)
    return ContextBlock(id=document.id, text=document.page_content)


def plan_of(document: Document) -> PlanMetadata | None:
    """Return the plan that a document carries, or None if there is none of ours."""
    mark = document.metadata.get(METADATA_KEY)
    plan = mark.get("plan") if isinstance(mark, Mapping) else None
    return plan if isinstance(plan, Mapping) and "parts" in plan else None


def place_of(document: Document) -> Place | None:
    """Return what a document says of its place, or None if it carries no plan of ours."""
    plan = plan_of(document)
    if plan is None:
        return None
    mark = document.metadata[METADATA_KEY]
    rank, label, overlap = mark.get("rank"), mark.get("label"), mark.get("overlap")
    if not (isinstance(rank, int) and isinstance(label, str)):
        return None
    return Place(rank, label, plan, None if overlap is None else Overlap(**overlap))


def is_annotation(document: Document) -> bool:
    """Return whether a document is an annotation that stood behind planned ones."""
    mark = document.metadata.get(METADATA_KEY)
    return isinstance(mark, Mapping) and mark.get("annotation") is True


def left_out_words(plan: PlanMetadata) -> list[str]:
    """Return a plan's location annotations."""
    return [part[2] for part in plan["parts"] if len(part) == 3]


def as_planned(places: Sequence[Place]) -> bool:
    """Return whether places are of one plan and stand in its order, maybe with gaps."""
    if not places or any(place.plan != places[0].plan for place in places):
        return False
    ordinals = {part[0]: number for number, part in enumerate(places[0].plan["parts"])}
    numbers = [ordinals.get(place.label, -1) for place in places]
    return min(numbers) >= 0 and numbers == sorted(numbers)


def without_plan(documents: Sequence[Document]) -> list[Document] | None:
    """Return documents as they were before an earlier plan of ours, so that plans never nest.

    None says that they have to stay as they are; see `retrievers_order`.
    """
    order = retrievers_order(documents)
    return None if order is None else [_without_mark(documents[position]) for position in order]


def retrievers_order(documents: Sequence[Document]) -> list[int] | None:
    """Return the positions of documents in the order in which they were retrieved.

    Documents that stand as one plan put them go back to the retriever's order; in any other order,
    such as a reranker's, they stay. Annotations that an earlier plan put behind them are left out.
    None says that all have to stay, since the earlier plan left out what the conversation shows and
    they say where it stands.
    """
    if any(left_out_words(plan) for plan in map(plan_of, documents) if plan is not None):
        return None
    kept = [n for n, document in enumerate(documents) if not is_annotation(document)]
    places = [place for n in kept if (place := place_of(documents[n])) is not None]
    if len(places) == len(kept) and as_planned(places):
        rank_of = {n: place.rank for n, place in zip(kept, places, strict=True)}
        kept.sort(key=lambda n: rank_of[n])
    return kept


def labelled_copy(document: Document, rank: int, label: str) -> Document:
    """Return a copy that says its rank and label, without a plan of which they are a part."""
    metadata = copied_metadata(document.metadata) | {METADATA_KEY: {"rank": rank, "label": label}}
    return document.model_copy(update={"metadata": metadata})


def copied_metadata(value: Any) -> Any:
    """Return a copy of nested dicts and lists; what else they hold is shared."""
    if isinstance(value, dict):
        return {name: copied_metadata(one) for name, one in value.items()}
    if isinstance(value, list):
        return [copied_metadata(one) for one in value]
    return value


def _without_mark(document: Document) -> Document:
    if METADATA_KEY not in document.metadata:
        return document
    metadata = {name: one for name, one in document.metadata.items() if name != METADATA_KEY}
    return document.model_copy(update={"metadata": metadata})


def _marked_copy(
    placed: Placed[Document], plan: PlanMetadata, overlaps: Mapping[str, Overlap]
) -> Document:
    mark = {"rank": placed.rank, "label": placed.label, "plan": copied_metadata(plan)}
    overlap = overlaps.get(placed.label or "")
    if overlap is not None:
        mark["overlap"] = {
            "characters": overlap.characters,
            "label": overlap.label,
            "digest": overlap.digest,
        }
    metadata = copied_metadata(placed.thing.metadata) | {METADATA_KEY: mark}
    return placed.thing.model_copy(update={"metadata": metadata})


def _annotation_document(text: str, plan: PlanMetadata, documents: Sequence[Document]) -> Document:
    """Return the annotation as a document.

    It has the metadata names that all the documents have, empty, because a prompt for documents
    that names one of them fails for a document that lacks it.
    """
    shared = set(documents[0].metadata) if documents else set()
    for document in documents:
        shared &= set(document.metadata)
    metadata: dict[str, Any] = dict.fromkeys(sorted(shared), "")
    metadata[METADATA_KEY] = {"annotation": True, "plan": copied_metadata(plan)}
    return Document(page_content=text, metadata=metadata)
