"""Retrieved documents as the text that a prompt shows, whether they carry a plan or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from ctxreuse.adapters.plan_metadata import (
    DocumentPosition,
    PlannedDocument,
    left_out_words,
    positions_as_planned,
)
from ctxreuse.adapters.rendered_contexts import ContextRegistry, context_registry
from ctxreuse.context.blocks import ContextBlock, text_digest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import Part, Reference, SentBlock, render_turn
from ctxreuse.context.templates import Templates


def format_documents(
    documents: Sequence[PlannedDocument],
    templates: Templates,
    registry: ContextRegistry | None = None,
) -> str:
    """Return documents as text for a prompt: labels, blocks, annotations.

    Documents that one plan put into order are shown as that plan says, also where some of them were
    taken away since. Any others are shown in the order given, labels counted from 1; a model
    wrapper that meets the text plans it then.

    Args:
        documents: The documents, in order.
        templates: The words around them.
        registry: Where the text is remembered; None takes the one of this process.

    Raises:
        InvalidRequestError: wrong type.
    """
    checked_kind("templates", templates, Templates, "Templates")
    remembered = context_registry(registry)
    shown = [one for one in documents if not one.is_annotation]
    blocks = [one.block for one in shown]
    places = positions_as_planned(shown)
    if places is not None and _each_label_has_one_text(places, blocks):
        text = _render_as_planned(places, blocks, templates)
        remembered.remember_planned(text)
        return text
    given = [remembered.render(blocks, templates)] if blocks else []
    return templates.separator.join([*given, *left_out_words(documents)])


def _each_label_has_one_text(
    places: Sequence[DocumentPosition], blocks: Sequence[ContextBlock]
) -> bool:
    text_of = {place.label: block.text for place, block in zip(places, blocks, strict=True)}
    return all(
        text_of[place.label] == block.text for place, block in zip(places, blocks, strict=True)
    )


def _render_as_planned(
    places: Sequence[DocumentPosition], blocks: Sequence[ContextBlock], templates: Templates
) -> str:
    """Return blocks with labels, location annotations and order annotation as their plan says."""
    plan = places[0].plan
    at: dict[str, tuple[DocumentPosition, ContextBlock]] = {}
    for place, block in zip(places, blocks, strict=True):
        at.setdefault(place.label, (place, block))
    block_at = {label: block for label, (_, block) in at.items()}
    missing = {part[0] for part in plan["parts"] if len(part) == 2} - set(at)
    parts: list[Part] = []
    for part in plan["parts"]:
        if len(part) == 3:
            parts.append(Reference(*part))
        elif part[0] in at:
            parts.append(_sent(*at[part[0]], block_at, missing))
    order = plan.get("order_annotation")
    if order is not None and missing:
        order = _order_of_the_rest([place for place, _ in at.values()], templates)
    return render_turn(parts, order, "", templates)


def _sent(
    place: DocumentPosition, block: ContextBlock, at: Mapping[str, ContextBlock], missing: Set[str]
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


def _order_of_the_rest(places: Iterable[DocumentPosition], templates: Templates) -> str | None:
    """Return the ranking of what was not taken away, or None where it is the order shown."""
    shown = list(places)
    labels = [place.label for place in shown]
    ranked = [place.label for place in sorted(shown, key=lambda place: place.rank)]
    return None if ranked == labels else templates.order_annotation(ranked)
