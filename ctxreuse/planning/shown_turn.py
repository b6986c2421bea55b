"""A turn on its way through a planner, and what it shows, worked out when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

from ctxreuse.context.blocks import BlockId, BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.context.rendering import (
    Notice,
    Reference,
    SentBlock,
    Templates,
    TurnPart,
)
from ctxreuse.memory.conversations import EMPTY_HISTORY, History
from ctxreuse.memory.names import IndexedContext, Ranks
from ctxreuse.memory.prefix_index import Root


class PreparedRequest(NamedTuple):
    """A request with the sizes of its blocks and, of an open turn, what its history shows."""

    request: ContextRequest
    tenant: str  # as `IndexNames` names it; so is `system`
    tokens: Mapping[BlockKey, int]
    system: bytes | None
    is_labelled: bool
    context: IndexedContext
    front_tokens: int  # in front of the blocks; 0 where the cache has no minimum
    root: Root  # what its root in the index is named after
    blocks: Mapping[BlockKey, ContextBlock] = {}
    history: History = EMPTY_HISTORY
    shown: Mapping[BlockKey, str] = {}  # blocks to leave out, with their labels there, or ""
    outdated: Mapping[str, BlockKey] = {}  # labels of what no longer holds, and is not yet said
    withdrawn: Sequence[str] = ()  # words on those without a label

    @property
    def weights(self) -> Mapping[BlockKey, int]:
        """The weight of each block, in the retriever's order."""
        return self.context.own


class _Shown(NamedTuple):
    """The parts of a turn, and the labels in its prompt."""

    parts: tuple[TurnPart, ...]
    labels: Mapping[str, BlockId]


@dataclass(frozen=True)
class ShownTurn:
    """A turn in its order, with the words around its blocks."""

    turn: PreparedRequest
    ranks: Ranks  # left-out blocks included
    templates: Templates
    annotates: bool = True  # a first turn says how its blocks rank
    words: str | EllipsisType | None = ...  # other ones on the order than its own; None is none
    given: tuple[TurnPart, ...] | None = None  # other parts than its own

    @property
    def parts(self) -> tuple[TurnPart, ...]:
        """Sent blocks, references and notices, in order."""
        return self._shown.parts if self.given is None else self.given

    @property
    def labels(self) -> Mapping[str, BlockId]:
        """Label -> block id, for every label in the prompt, earlier turns included."""
        return self._shown.labels if self.turn.is_labelled else self.turn.history.labels

    @property
    def is_reordered(self) -> bool:
        """Whether the best blocks do not stand first, which is said of a first turn."""
        best = self.templates.most_ranked  # further ones are not named
        order, retrieved = self.ranks[:best], tuple(range(len(self.ranks)))[:best]
        return self.annotates and not self.turn.request.history and order != retrieved

    @property
    def order_annotation(self) -> str | None:
        """The retriever's ranking in words; None if there is nothing to say."""
        if not isinstance(self.words, EllipsisType):
            return self.words
        if not self.is_reordered:
            return None
        best = list(self.turn.context.own)[: self.templates.most_ranked]
        if self.turn.is_labelled:
            named = [self.templates.label_of(self.turn.blocks[key]) for key in best]
        else:
            named = [str(self.sent.index(key) + 1) for key in best]
        return self.templates.order_annotation(named)

    @cached_property
    def sent(self) -> list[BlockKey]:
        """The blocks that are sent, in the order in which they stand."""
        shown = self.turn.shown
        return [key for key in self.turn.context.order(self.ranks) if key not in shown]

    @cached_property
    def _shown(self) -> _Shown:
        turn, templates, shown = self.turn, self.templates, self.turn.shown
        label_of = {key: templates.label_of(turn.blocks[key]) for key in self.sent}
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
        order = turn.context.order(self.ranks)
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
                new = label or shown[key] if turn.is_labelled else shown.get(key)
                if old != label:
                    parts.append(Notice(old, templates.outdated_annotation(old, new or None)))
        return _Shown(tuple(parts), labels)
