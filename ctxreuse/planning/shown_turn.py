"""A turn on its way through a planner, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctxreuse.context.blocks import BlockId, BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.rendering import Notice, Reference, SentBlock, Templates, TurnPart
from ctxreuse.memory.conversations import EMPTY_HISTORY, History
from ctxreuse.memory.names import Ranks
from ctxreuse.memory.prefix_index import Root


class PreparedRequest(NamedTuple):
    """A request with the sizes of its blocks and, of an open turn, what its history shows."""

    request: ContextRequest
    tenant: str  # as `IndexNames` names it
    tokens: Mapping[BlockKey, int]
    weights: Mapping[BlockKey, int]  # at least 1 each, in the retriever's order
    named: Mapping[BlockKey, int]  # the same, by the names that the index has for the blocks
    front_tokens: int  # in front of the blocks; 0 where the cache has no minimum
    root: Root  # what its root in the index is named after; whether it shows labels
    blocks: Mapping[BlockKey, ContextBlock]
    history: History = EMPTY_HISTORY
    shown: Mapping[BlockKey, str] = {}  # blocks to leave out, with their labels there, or ""
    outdated: Sequence[str] = ()  # labels of what no longer holds, and is not yet said
    withdrawn: Sequence[str] = ()  # words on those without a label

    def order(self, ranks: Ranks) -> list[BlockKey]:
        """Return the blocks in an order."""
        keys = list(self.weights)
        return [keys[rank] for rank in ranks]


def shown_parts(
    turn: PreparedRequest, ranks: Ranks, templates: Templates
) -> tuple[tuple[TurnPart, ...], dict[str, BlockId]]:
    """Return the parts of a turn in its order, and the labels in its prompt."""
    shown, order = turn.shown, turn.order(ranks)
    label_of = {key: templates.label_of(turn.blocks[key]) for key in order if key not in shown}
    parts: list[TurnPart] = [Notice("", words) for words in turn.withdrawn]
    labels = dict(turn.history.labels)
    replaced: dict[BlockId, list[str]] = {}
    if turn.outdated:
        replaced = {block.id: [] for block in turn.blocks.values()}
        for old in turn.outdated:
            if labels[old] in replaced:
                replaced[labels[old]].append(old)
            else:
                parts.append(Notice(old, templates.outdated_annotation(old, None)))
    left_out = [key for key in order if key in shown]
    first = {shown[key]: key for key in reversed(left_out) if shown[key]}
    named = [key for key in left_out if first.get(shown[key]) == key]  # each label once
    locations = templates.location_annotations([shown[key] for key in named])
    words_of = dict(zip(named, locations, strict=True))
    if templates.has_location_line:  # it stands behind the blocks
        order = [*label_of, *left_out]
    for key in order:
        block, label = turn.blocks[key], label_of.get(key)
        earlier = replaced.pop(block.id, ())
        if label is not None and label in earlier:  # it is named after its id
            parts.append(Notice(label, templates.outdated_annotation(label)))
        if label is None:
            parts.append(Reference(shown[key], block.id, words_of.get(key, "")))
        else:
            parts.append(SentBlock(label, block))
            labels[label] = block.id
        for old in earlier:
            new = label or shown[key] if turn.root[1] else shown.get(key)
            if old != label:
                parts.append(Notice(old, templates.outdated_annotation(old, new or None)))
    return tuple(parts), labels
