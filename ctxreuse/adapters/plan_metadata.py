"""The plan that a planned document carries in its metadata, written and read back.

Such metadata is JSON and may have been changed by anyone since, so it is read with care.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from ctxreuse.context.blocks import BlockId, ContextBlock, text_digest
from ctxreuse.context.rendering import Reference, SentBlock
from ctxreuse.planning.plan import Plan

METADATA_KEY = "ctxreuse"
"""An adapter's documents carry rank, label and plan in their metadata under this key."""

Metadata: TypeAlias = Mapping[str, Any]
"""The metadata of a document of some framework."""

PlanMetadata: TypeAlias = Mapping[str, Any]
"""A plan as metadata holds it; see `plan_metadata`."""


@dataclass(frozen=True, slots=True)
class PlannedDocument:
    """A document of some framework, whose metadata may say where a plan put it.

    Attributes:
        block: Its id, and its text as rendered.
        metadata: Its metadata.
    """

    block: ContextBlock
    metadata: Metadata

    @property
    def is_annotation(self) -> bool:
        """Whether it is an annotation that an adapter put behind planned documents."""
        carried = self.metadata.get(METADATA_KEY)
        digest = carried.get("annotation") if isinstance(carried, Mapping) else None
        return isinstance(digest, str) and digest == text_digest(self.block.text).hex()


@dataclass(frozen=True, slots=True)
class Overlap:
    """The beginning of a text, which repeats the end of an earlier one.

    Attributes:
        characters: Its length.
        label: The label of the earlier text.
        digest: Of these characters, in hexadecimal, because the text may be changed later.
    """

    characters: int
    label: str
    digest: str


@dataclass(frozen=True, slots=True)
class DocumentPosition:
    """Where a plan put a document.

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
class DocumentMetadata:
    """The metadata that the documents of one plan get. They share the plan, which may be long.

    Attributes:
        plan: The plan as metadata.
        overlaps: What renderings leave out, by label.
    """

    plan: PlanMetadata
    overlaps: Mapping[str, Overlap]

    def position(self, rank: int, label: str) -> dict[str, Any]:
        """Return what a document of the plan carries."""
        carried = {"rank": rank, "label": label, "plan": self.plan}
        if label in self.overlaps:
            carried["overlap"] = asdict(self.overlaps[label])
        return carried

    def annotation(self, text: str) -> dict[str, Any]:
        """Return what the annotation behind the documents carries.

        Args:
            text: Its words; a document with other words does not pass for the annotation.
        """
        return {"annotation": text_digest(text).hex(), "plan": self.plan}


def document_metadata(plan: Plan, *, with_order: bool) -> DocumentMetadata:
    """Return the metadata for a plan's documents.

    Args:
        plan: The plan.
        with_order: Whether its order annotation is kept.
    """
    carried = plan_metadata(plan)
    if not with_order:
        carried["order_annotation"] = None
    overlaps = {
        part.label: Overlap(
            part.repeated, part.repeats, text_digest(part.block.text[: part.repeated]).hex()
        )
        for part in plan.parts
        if isinstance(part, SentBlock) and part.repeated
    }
    return DocumentMetadata(carried, overlaps)


def plan_metadata(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON-compatible metadata, without any text of documents or messages.

    Returns:
        `request_id`, `blocks` (ids to send, in order), `references` (ids left out),
        `order_annotation`, `parts` (`[label, id]`, or `[label, id, words]` for one left out) and
        `expected_cached_tokens`.
    """
    return {
        "request_id": _plain(plan.request_id),
        "blocks": [_plain(block.id) for block in plan.blocks],
        "references": [_plain(block_id) for block_id in plan.references],
        "order_annotation": plan.order_annotation,
        "parts": [
            [part.label, _plain(part.id), part.annotation]
            if isinstance(part, Reference)
            else [part.label, _plain(part.block.id)]
            for part in plan.parts
        ],
        "expected_cached_tokens": int(plan.expected_cached_tokens),
    }


def plan_of(metadata: Metadata) -> PlanMetadata | None:
    """Return the plan that metadata carries, or None if it carries no valid one."""
    carried = metadata.get(METADATA_KEY)
    plan = carried.get("plan") if isinstance(carried, Mapping) else None
    if not isinstance(plan, Mapping) or not isinstance(plan.get("parts"), list):
        return None
    order = plan.get("order_annotation")
    if not (order is None or isinstance(order, str)) or not all(map(_is_part, plan["parts"])):
        return None
    return plan


def position_of(metadata: Metadata) -> DocumentPosition | None:
    """Return the position that metadata carries, or None if it carries no valid one."""
    plan = plan_of(metadata)
    if plan is None:
        return None
    carried = metadata[METADATA_KEY]
    rank, label = carried.get("rank"), carried.get("label")
    if not (isinstance(rank, int) and isinstance(label, str)):
        return None
    return DocumentPosition(rank, label, plan, _overlap(carried.get("overlap")))


def left_out_words(documents: Sequence[PlannedDocument]) -> list[str]:
    """Return the location annotations of all plans that documents carry, each once."""
    plans = [plan for one in documents if (plan := plan_of(one.metadata)) is not None]
    annotations = [part[2] for plan in plans for part in plan["parts"] if len(part) == 3]
    return list(dict.fromkeys(annotations))  # each document repeats its plan


def positions_as_planned(documents: Sequence[PlannedDocument]) -> list[DocumentPosition] | None:
    """Return the positions of documents if they stand as one plan put them, maybe with gaps."""
    positions: list[DocumentPosition] = []
    for one in documents:
        position = position_of(one.metadata)
        if position is None:
            return None
        positions.append(position)
    if not positions:
        return None
    plan = positions[0].plan
    if any(position.plan is not plan and position.plan != plan for position in positions):
        return None
    number_of = {part[0]: number for number, part in enumerate(plan["parts"])}
    numbers = [number_of.get(position.label, -1) for position in positions]
    return positions if numbers[0] >= 0 and numbers == sorted(numbers) else None


def retrievers_order(documents: Sequence[PlannedDocument]) -> list[int] | None:
    """Return the positions of documents in the order in which they were retrieved.

    So plans never nest: documents that stand as one plan put them go back to the retriever's order;
    in any other order, such as a reranker's, they stay. Annotations that an earlier plan put behind
    them are left out.

    Args:
        documents: The documents, in order.

    Returns:
        Positions in `documents`; None says that all have to stay as they are, because the earlier
        plan left out what the conversation shows and they say where it stands.
    """
    if left_out_words(documents):
        return None
    kept = [number for number, one in enumerate(documents) if not one.is_annotation]
    positions = positions_as_planned([documents[number] for number in kept])
    if positions is None:
        return kept
    ranked = sorted(zip(positions, kept, strict=True), key=lambda pair: pair[0].rank)
    return [number for _, number in ranked]


def copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists; what else they hold is shared."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value


def _is_part(part: object) -> bool:
    """Return whether this is `[label, id]` or `[label, id, words]`."""
    if not isinstance(part, (list, tuple)) or len(part) not in (2, 3):
        return False
    label, name, *words = part
    return isinstance(name, (str, int)) and all(isinstance(one, str) for one in (label, *words))


def _overlap(carried: object) -> Overlap | None:
    match carried:
        case {"characters": int(characters), "label": str(label), "digest": str(digest)}:
            return Overlap(characters, label, digest)
        case _:
            return None


def _plain(name: BlockId) -> BlockId:
    """Return an id as a JSON value; numpy's integers are not JSON numbers."""
    return name if isinstance(name, str) else int(name)
