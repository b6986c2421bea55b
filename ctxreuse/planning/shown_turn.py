"""What a turn shows: its blocks, references and words, worked out when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

from ctxreuse.context.blocks import BlockId, BlockKey
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.context.rendering import (
    Notice,
    Reference,
    SentBlock,
    Templates,
    TurnPart,
    replace_overlaps,
)
from ctxreuse.memory.names import Ranks
from ctxreuse.planning.turns import PreparedRequest


class _Shown(NamedTuple):
    """The parts of a turn, the labels in its prompt, and whether an overlap was left in."""

    parts: tuple[TurnPart, ...]
    labels: Mapping[str, BlockId]
    is_cut_short: bool


@dataclass(frozen=True)
class ShownTurn:
    """A turn in its order, with the words around its blocks.

    Attributes:
        turn: The turn.
        ranks: Its order, left-out blocks included.
        templates: The words around the blocks.
        annotates: Whether a first turn says how its blocks rank.
        trims_overlaps: Whether blocks lose a beginning that ends an earlier one.
        words: Other words on the order than its own; None for none.
        given: Other parts than its own.
    """

    turn: PreparedRequest
    ranks: Ranks
    templates: Templates
    annotates: bool = True
    trims_overlaps: bool = False
    words: str | EllipsisType | None = ...
    given: tuple[TurnPart, ...] | None = None

    @property
    def parts(self) -> tuple[TurnPart, ...]:
        """Sent blocks, references and notices, in order."""
        return self._shown.parts if self.given is None else self.given

    @property
    def labels(self) -> Mapping[str, BlockId]:
        """Label -> block id, for every label in the prompt, earlier turns included."""
        return self._shown.labels if self.turn.is_labelled else self.turn.history.labels

    @property
    def is_cut_short(self) -> bool:
        """Whether the search for overlaps ended at its bound."""
        return self._shown.is_cut_short

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
        best = list(self.turn.weights)[: self.templates.most_ranked]
        return self.templates.order_annotation([self._label_of[key] for key in best])

    @cached_property
    def _label_of(self) -> dict[BlockKey, str]:
        """The labels of the blocks that are sent, in the order in which they stand."""
        turn = self.turn
        sent = [key for key in turn.order(self.ranks) if key not in turn.shown]
        labels = self.templates.block_labels(turn.ordinals)
        return dict(zip(sent, labels, strict=True))

    @cached_property
    def _shown(self) -> _Shown:
        turn, templates, label_of = self.turn, self.templates, self._label_of
        shown = turn.shown
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
        order = turn.order(self.ranks)
        left_out = [key for key in order if key in shown]
        named = [key for key in left_out if shown[key]]
        locations = templates.location_annotations([shown[key] for key in named])
        words_of = dict(zip(named, locations, strict=True))
        if templates.has_location_line:  # it stands behind the blocks
            order = [*label_of, *left_out]
        for key in order:
            block, label = turn.blocks[key], label_of.get(key)
            if label is None:
                parts.append(Reference(shown[key], block.id, words_of.get(key, "")))
            else:
                parts.append(SentBlock(label, block))
                labels[label] = block.id
            for old in replaced.pop(block.id, ()):
                new = label or shown[key] if turn.is_labelled else shown.get(key)
                parts.append(Notice(old, templates.outdated_annotation(old, new or None)))
        is_cut_short = False
        if self.trims_overlaps:
            parts, is_cut_short = replace_overlaps(parts, turn.history.texts)
        return _Shown(tuple(parts), labels, is_cut_short)
