"""Documents as the text that a prompt shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from langchain_core.documents import Document

from ctxreuse.annotations import DEFAULT_TEMPLATES, Templates
from ctxreuse.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError
from ctxreuse.prompts import Part, Reference, SentBlock, render_turn
from ctxreuse.renderings import RENDERED
from langchain_ctxreuse.documents import (
    Overlap,
    Place,
    as_planned,
    document_block,
    is_annotation,
    left_out_words,
    place_of,
    plan_of,
)


def format_context(documents: Sequence[Document], templates: Templates = DEFAULT_TEMPLATES) -> str:
    r"""Return documents as text for a prompt: labels, blocks, annotations.

    Documents that one plan put into order are shown as that plan says, also where some of them were
    taken away since. Any others are shown in the order given, labels counted from 1, and a
    `ReuseChatModel` that meets the text plans it then. `retriever | format_context` works.

    Args:
        documents: Documents, as `ReuseRetriever`, `ReuseCompressor` or anyone else returns them.
        templates: The words around them; the planner's, where it has others than the default.

    Raises:
        InvalidRequestError: If something else than Documents is given.

    Example:
        >>> format_context([Document("first text"), Document("second text")])
        '[Doc_1] first text\n\n[Doc_2] second text'
    """
    given = _checked(documents)
    shown = [document for document in given if not is_annotation(document)]
    places = [place for place in map(place_of, shown) if place is not None]
    if len(places) == len(shown) and as_planned(places):
        blocks: dict[str, ContextBlock] = {}
        for place, document in zip(places, shown, strict=True):
            blocks.setdefault(place.label, document_block(document))
        texts = [blocks[place.label].text for place in places]
        if texts == [document.page_content for document in shown]:
            text = _as_planned(places, blocks, templates)
            RENDERED.remember_planned(text)
            return text
    return _as_given(given, shown, templates)


def _as_planned(
    places: Sequence[Place], blocks: Mapping[str, ContextBlock], templates: Templates
) -> str:
    plan = places[0].plan
    overlap_of = {place.label: place.overlap for place in places}
    missing = {part[0] for part in plan["parts"] if len(part) == 2} - set(blocks)
    parts: list[Part] = []
    for part in plan["parts"]:
        if len(part) == 3:
            parts.append(Reference(*part))
        elif part[0] in blocks:
            block, overlap = blocks[part[0]], overlap_of[part[0]]
            if overlap is not None and _still_stands(overlap, block, blocks, missing):
                parts.append(SentBlock(part[0], block, overlap.characters, overlap.label))
            else:
                parts.append(SentBlock(part[0], block))
    order = plan["order_annotation"]
    if order is not None and missing:
        order = _order_of_the_rest(places, templates)
    return render_turn(parts, order, "", templates)


def _still_stands(
    overlap: Overlap, block: ContextBlock, blocks: Mapping[str, ContextBlock], missing: Set[str]
) -> bool:
    """Return whether what the rendering would leave out of a block is really shown before it."""
    if overlap.label in missing or not overlap.stands_in(block.text):
        return False
    earlier = blocks.get(overlap.label)  # None where the history shows it
    return earlier is None or earlier.text.endswith(block.text[: overlap.characters])


def _order_of_the_rest(places: Sequence[Place], templates: Templates) -> str | None:
    """Return the ranking of what was not taken away, or None where it is the order shown."""
    rank_of: dict[str, int] = {}
    for place in places:
        rank_of[place.label] = min(place.rank, rank_of.get(place.label, place.rank))
    ranked = sorted(rank_of, key=lambda label: rank_of[label])
    return None if ranked == list(rank_of) else templates.order_annotation(ranked)


def _as_given(given: Sequence[Document], shown: Sequence[Document], templates: Templates) -> str:
    text = RENDERED.render(map(document_block, shown), templates)
    plans = [plan for plan in map(plan_of, given) if plan is not None]
    words = [said for plan in plans for said in left_out_words(plan)]
    # each document repeats its plan
    return templates.separator.join([*([text] if shown else []), *dict.fromkeys(words)])


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
