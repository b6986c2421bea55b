"""Retrieved documents as the text that a prompt shows, with or without a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from string import punctuation
from typing import NamedTuple

from ctxreuse.adapters.context_cuts import ContextCut
from ctxreuse.adapters.issued_plans import SEARCHED_TEXTS
from ctxreuse.adapters.plan_metadata import (
    METADATA_KEY,
    DocumentPosition,
    PlannedDocument,
    believed,
    left_out_words,
    missing_labels,
    position_of,
    positions_as_planned,
    prefix_shown,
)
from ctxreuse.adapters.rendered_contexts import ContextRegistry, context_registry
from ctxreuse.context.blocks import ContextBlock, distinct_texts, text_digest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.content_parts import turn_parts
from ctxreuse.context.rendering import Reference, SentBlock, Templates, TurnPart, render_turn


def format_documents(
    documents: Sequence[PlannedDocument],
    templates: Templates,
    registry: ContextRegistry | None = None,
    tenant: str | None = None,
) -> str:
    """Return documents as text for a prompt: labels, blocks, annotations."""
    checked_kind("templates", templates, Templates, "Templates")
    rendered, tenant = context_registry(registry), tenant or ""
    if not any(METADATA_KEY in one.metadata for one in documents):
        blocks = [one.block for one in documents]
        text = _render_as_searched(blocks, templates, tenant)
        if text is None:  # no plan has met them
            return rendered.render(blocks, templates, tenant)
        rendered.remember_planned(text, tenant)
        return text
    given = believed(documents)
    shown = [one for one in given if not one.is_annotation]
    blocks = [one.block for one in shown]
    positions = positions_as_planned(shown)
    shown_as_planned = None
    if positions is not None:
        shown_as_planned = _render_as_planned(positions, blocks, templates)
    if shown_as_planned is not None:
        text, cut = shown_as_planned
        rendered.remember_planned(text, tenant, cut)
        return text
    words = left_out_words(given)
    if not words:
        return rendered.render(blocks, templates, tenant)
    texts = [rendered.render(blocks, templates, tenant)] if blocks else []
    return templates.separator.join([*texts, *words])


_BRACKETS = re.compile(r"[\[(][^\[\]()\n]{1,400}[\])]")
_NAME = re.compile(r"[\w.-]+")


class PlanWords(NamedTuple):
    """What is said of planned documents that a prompt shows without labels."""

    left_out: tuple[str, ...] = ()
    ranking: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """All that is to be said."""
        return self.left_out if self.ranking is None else (*self.left_out, self.ranking)


def words_of(documents: Sequence[PlannedDocument], templates: Templates) -> PlanWords:
    """Return what is to be said behind documents that a prompt shows in this order."""
    given = believed(documents)
    if any(one.is_annotation for one in given):
        return PlanWords()  # it says so itself
    positions = positions_as_planned(given)
    ranking = None
    if positions is not None and _order_annotation(positions, templates) is not None:
        ranking = unlabelled_ranking([one.rank for one in positions], templates)
    return PlanWords(tuple(left_out_words(given)), ranking)


def unlabelled_ranking(ranks: Sequence[int], templates: Templates) -> str:
    """Return the ranking of documents that stand before it in this order."""
    places = sorted(range(len(ranks)), key=ranks.__getitem__)
    return templates.order_annotation([str(place + 1) for place in places])


def cited_positions(
    text: str, documents: Sequence[PlannedDocument], templates: Templates
) -> list[int]:
    """Return the positions of the documents that an answer cites, in the order of its labels."""
    checked_kind("text", text, str, "an answer's text")
    checked_kind("templates", templates, Templates, "Templates")
    at: dict[str, list[int]] = {}
    for position, one in enumerate(believed(documents)):
        if not one.is_annotation:
            labels = {templates.label_of(one.block)}
            planned = position_of(one.metadata)
            if planned is not None:  # a text that was changed since stands under its old label
                labels.add(planned.label)
            for label in labels:
                at.setdefault(label, []).append(position)
    cited = _cited(text.replace("\\_", "_"), at)  # as Markdown has it
    return list(dict.fromkeys(position for label in cited for position in at[label]))


def _cited(text: str, labels: Iterable[str]) -> list[str]:
    """Return the labels that a text names, whole or several in one pair of brackets."""
    named: dict[str, int] = {}  # in brackets
    for bracket in _BRACKETS.finditer(text):
        for name in _NAME.finditer(text, *bracket.span()):
            named.setdefault(name[0], name.start())
    first: dict[str, int] = {}
    for label in labels:
        left, right = (r"\b" if re.match(r"\w", end) else "" for end in (label[:1], label[-1:]))
        whole = re.search(f"{left}{re.escape(label)}{right}", text)
        places = [] if whole is None else [whole.start()]
        places += [named[one] for one in [label.strip(punctuation)] if one in named]
        if places:
            first[label] = min(places)
    return sorted(first, key=first.__getitem__)


def _render_as_searched(
    blocks: Sequence[ContextBlock], templates: Templates, tenant: str
) -> str | None:
    """Return blocks with the ranking of the search whose plan gave their texts this order."""
    shown = distinct_texts(blocks)
    ranks = SEARCHED_TEXTS.ranks(tenant, [block.digest for block in shown])
    if ranks is None or templates.is_ranked(sorted(ranks), ranks):
        return None
    labels = list(map(templates.label_of, shown))
    parts = [SentBlock(label, block) for label, block in zip(labels, shown, strict=True)]
    ranking = [label for _, label in sorted(zip(ranks, labels, strict=True))]
    return render_turn(parts, templates.order_annotation(ranking), "", templates)


def _render_as_planned(
    positions: Sequence[DocumentPosition], blocks: Sequence[ContextBlock], templates: Templates
) -> tuple[str, ContextCut | None] | None:
    """Return blocks with labels, location annotations and order annotation as their plan says."""
    plan = positions[0].plan
    at: dict[str, tuple[DocumentPosition, ContextBlock]] = {}
    for position, block in zip(positions, blocks, strict=True):
        if at.setdefault(position.label, (position, block))[1].text != block.text:
            return None
    block_at = {label: block for label, (_, block) in at.items()}
    missing = missing_labels(positions)
    parts: list[TurnPart] = []
    for part in plan["parts"]:
        if len(part) == 3:
            parts.append(Reference(*part))
        elif part[0] in at:
            parts.append(_sent(*at[part[0]], block_at, missing))
    order = _order_annotation(positions, templates)
    prefix = prefix_shown(positions)
    cut = None
    if prefix is not None:
        cut = ContextCut.of_parts(turn_parts(parts, order, "", templates, prefix.marks), prefix)
    return render_turn(parts, order, "", templates), cut


def _order_annotation(positions: Sequence[DocumentPosition], templates: Templates) -> str | None:
    """Return the ranking of documents that stand as planned, in words; None if that is it."""
    order: str | None = positions[0].plan.get("order_annotation")
    if order is None or not missing_labels(positions):
        return order
    rank_of: dict[str, int] = {}
    for one in positions:
        rank_of.setdefault(one.label, one.rank)
    ranked = sorted(rank_of, key=rank_of.__getitem__)
    if templates.is_ranked(ranked, list(rank_of)):
        return None
    return templates.order_annotation(ranked)


def _sent(
    position: DocumentPosition,
    block: ContextBlock,
    at: Mapping[str, ContextBlock],
    missing: Set[str],
) -> SentBlock:
    """Return a block as a part, without its beginning if an earlier block really shows it."""
    overlap = position.overlap
    if overlap is None or overlap.label in missing:
        return SentBlock(position.label, block)
    repeated = block.text[: overlap.characters]
    earlier = at.get(overlap.label)  # None where the history shows it
    if text_digest(repeated).hex() != overlap.digest or not (
        earlier is None or earlier.text.endswith(repeated)
    ):
        return SentBlock(position.label, block)
    return SentBlock(position.label, block, overlap.characters, overlap.label)
