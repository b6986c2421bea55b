"""What a planned node says of itself, in its metadata under "ctxreuse".

Such metadata is JSON and may have been anywhere since, so it is read with care.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from ctxreuse.annotations import Templates
from ctxreuse.arranging import METADATA_KEY, plan_metadata
from ctxreuse.blocks import ContextBlock, text_digest
from ctxreuse.plans import Plan
from ctxreuse.prompts import Part, Reference, SentBlock, render_turn

PlanMetadata: TypeAlias = Mapping[str, Any]
"""A plan as metadata holds it; see `ctxreuse.arranging.plan_metadata`."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """The beginning of a text that stands at the end of an earlier one.

    Attributes:
        characters: How many characters.
        label: Under which label they stand.
        digest: Of these characters, in hexadecimal, for the text may be changed later.
    """

    characters: int
    label: str
    digest: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a plan put a node.

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
class PlanMarks:
    """The marks that the nodes of one plan get. They share the plan, which may be long.

    Attributes:
        plan: The plan as metadata.
        overlaps: What renderings leave out, by label.
    """

    plan: PlanMetadata
    overlaps: Mapping[str, Overlap]

    def place(self, rank: int, label: str) -> dict[str, Any]:
        """Return what a node of the plan carries."""
        mark = {"rank": rank, "label": label, "plan": self.plan}
        if label in self.overlaps:
            mark["overlap"] = asdict(self.overlaps[label])
        return mark

    def annotation(self) -> dict[str, Any]:
        """Return what the annotation behind the nodes carries."""
        return {"annotation": True, "plan": self.plan}


def marks_of(plan: Plan, *, with_order: bool) -> PlanMarks:
    """Return the marks for a plan's nodes.

    Args:
        plan: The plan.
        with_order: Whether its order annotation is kept.
    """
    said = plan_metadata(plan)
    if not with_order:
        said["order_annotation"] = None
    overlaps = {
        part.label: Overlap(
            part.repeated, part.repeats, text_digest(part.block.text[: part.repeated]).hex()
        )
        for part in plan.parts
        if isinstance(part, SentBlock) and part.repeated
    }
    return PlanMarks(said, overlaps)


def plan_of(metadata: Mapping[str, Any]) -> PlanMetadata | None:
    """Return the plan in some metadata, or None if there is none of ours."""
    mark = metadata.get(METADATA_KEY)
    plan = mark.get("plan") if isinstance(mark, Mapping) else None
    if not isinstance(plan, Mapping) or not isinstance(plan.get("parts"), list):
        return None
    return plan


def place_of(metadata: Mapping[str, Any]) -> Place | None:
    """Return the place in some metadata, or None if there is none of ours."""
    plan = plan_of(metadata)
    if plan is None:
        return None
    mark = metadata[METADATA_KEY]
    rank, label, overlap = mark.get("rank"), mark.get("label"), mark.get("overlap")
    if not (isinstance(rank, int) and isinstance(label, str)):
        return None
    return Place(rank, label, plan, Overlap(**overlap) if isinstance(overlap, Mapping) else None)


def left_out_words(plan: PlanMetadata) -> list[str]:
    """Return a plan's location annotations."""
    return [part[2] for part in plan["parts"] if len(part) == 3]


def stand_as_planned(places: Sequence[Place]) -> bool:
    """Return whether places are of one plan and stand in its order, maybe with gaps."""
    if not places:
        return False
    plan = places[0].plan
    if any(place.plan is not plan and place.plan != plan for place in places):
        return False
    position_of = {part[0]: number for number, part in enumerate(plan["parts"])}
    positions = [position_of.get(place.label, -1) for place in places]
    return positions[0] >= 0 and positions == sorted(positions)


def render_as_planned(
    places: Sequence[Place], blocks: Sequence[ContextBlock], templates: Templates
) -> str:
    """Return blocks with labels, location annotations and order annotation as their plan says.

    Args:
        places: Places of one plan, in its order; some may be missing.
        blocks: The block at each place. One label stands for one block.
        templates: The words around them.
    """
    plan = places[0].plan
    at: dict[str, tuple[Place, ContextBlock]] = {}
    for place, block in zip(places, blocks, strict=True):
        at.setdefault(place.label, (place, block))
    block_at = {label: block for label, (_, block) in at.items()}
    missing = {part[0] for part in plan["parts"] if len(part) == 2} - set(at)
    parts: list[Part] = []
    for part in plan["parts"]:
        if len(part) == 3:
            parts.append(Reference(*part))
        elif part[0] in at:
            parts.append(_shown(*at[part[0]], block_at, missing))
    order = plan.get("order_annotation")
    if order is not None and missing:
        order = _order_of_the_rest([place for place, _ in at.values()], templates)
    return render_turn(parts, order, "", templates)


def copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists; what else they hold is shared."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [copied(one) for one in value]
    return value


def _shown(
    place: Place, block: ContextBlock, at: Mapping[str, ContextBlock], missing: Set[str]
) -> SentBlock:
    """Return a block as a part, without its beginning if that is really shown before it."""
    overlap = place.overlap
    if overlap is None or overlap.label in missing:
        return SentBlock(place.label, block)
    repeated = block.text[: overlap.characters]
    earlier = at.get(overlap.label)  # None where the history shows it
    if text_digest(repeated).hex() != overlap.digest or not (
        earlier is None or earlier.text.endswith(repeated)
    ):
        return SentBlock(place.label, block)
    return SentBlock(place.label, block, overlap.characters, overlap.label)


def _order_of_the_rest(places: Iterable[Place], templates: Templates) -> str | None:
    """Return the ranking of what was not taken away, or None where it is the order shown."""
    shown = list(places)
    labels = [place.label for place in shown]
    ranked = [place.label for place in sorted(shown, key=lambda place: place.rank)]
    return None if ranked == labels else templates.order_annotation(ranked)
