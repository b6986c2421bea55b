"""How many tokens each part of a prompt may have, so that no prompt is longer than the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chain_of_agents.prompts import NOTE_SEPARATOR, ChainPrompts
from ctxreuse.context.rendering import render_block
from ctxreuse.context.templates import Templates
from ctxreuse.errors import InvalidRequestError

DEFAULT_WINDOW_TOKENS = 8_192
"""What a model is taken to hold that does not say; as in the Chain-of-Agents paper."""

_LEAST_SEGMENT_TOKENS = 32
_MARKUP_TOKENS = 64
"""What chat templates and annotations may add."""
_MESSAGE_TOKENS = 8
"""What a chat template may add to each message of a history."""
_HIGH_NUMBER = 9_999
_QUESTION_TOKENS = 256
_ESTIMATE_MARGIN = 0.75
"""Share of a window that is used where tokens are only estimated."""
_CUT = " ..."


@dataclass(frozen=True, slots=True)
class Budget:
    """The bounds of one question's prompts, in tokens.

    Attributes:
        window: The prompt with its answer.
        segment: What a worker reads in one call.
        notes: What the manager reads.
        label: What each document of a segment but the first adds besides its text.
        location: What pointing to a document adds, in a conversation.
        note: What each note adds besides its text.
    """

    window: int
    segment: int
    notes: int
    label: int
    location: int
    note: int

    def most_notes(self) -> int:
        """Return how many notes the manager can be shown so that half of what it reads is notes."""
        return max(1, self.notes // (2 * max(1, self.note)))


def budget_of(
    question: str,
    window: int,
    is_counted: bool,
    prompts: ChainPrompts,
    templates: Templates,
    count_tokens: Callable[[str], int],
    note_tokens: int,
    answer_tokens: int,
    segment_tokens: int | None,
) -> Budget:
    """Return the bounds of a question's prompts.

    A segment's bound is the same for all questions of usual length, so that a long document is
    always cut at the same places.

    Args:
        question: The question.
        window: What the model holds.
        is_counted: Whether tokens are counted as the model does, not estimated.
        prompts: The words around everything.
        templates: The words around documents.
        count_tokens: From a text to its length.
        note_tokens: The longest note.
        answer_tokens: The longest answer of the manager.
        segment_tokens: The longest segment that is wanted; None takes what there is room for.

    Raises:
        InvalidRequestError: If there is no room for a segment.
    """
    usable = window if is_counted else int(window * _ESTIMATE_MARGIN)
    asked = _QUESTION_TOKENS
    while asked < count_tokens(question):
        asked *= 2
    label = templates.block_label(_HIGH_NUMBER)
    labelled = render_block(label, "", templates) + templates.separator
    label_tokens = count_tokens(labelled + templates.order_separator + label)
    query = max(count_tokens(prompts.first), count_tokens(prompts.next))
    worker = count_tokens(prompts.worker) + query + 2 * note_tokens
    manager = count_tokens(prompts.manager + prompts.final + prompts.no_notes) + answer_tokens
    segment = usable - worker - asked - _MARKUP_TOKENS - label_tokens
    notes = usable - manager - asked - _MARKUP_TOKENS
    if segment < _LEAST_SEGMENT_TOKENS or notes < _LEAST_SEGMENT_TOKENS:
        raise InvalidRequestError(
            f"a model with room for {window} tokens has none for a segment, beside instructions, "
            f"a question of {count_tokens(question)} tokens, notes of {note_tokens} and an answer "
            f"of {answer_tokens}; ask a shorter question, or lower note_tokens or answer_tokens"
        )
    return Budget(
        window=usable,
        segment=min(segment, segment_tokens or segment),
        notes=notes,
        label=label_tokens,
        location=count_tokens(templates.location_annotation(label) + templates.separator),
        note=count_tokens(prompts.note_shown(_HIGH_NUMBER, "") + NOTE_SEPARATOR),
    )


def history_tokens(history: Iterable[Mapping[str, Any]], count_tokens: Callable[[str], int]) -> int:
    """Return the length of a history's messages."""
    return sum(count_tokens(message["content"]) + _MESSAGE_TOKENS for message in history)


def clipped(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return a text, cut at its end if it is longer than so many tokens."""
    if count_tokens(text) <= tokens:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(text[:middle] + _CUT) <= tokens:
            low = middle
        else:
            high = middle - 1
    return text[:low].rstrip() + _CUT


def clipped_together(
    texts: Sequence[str], tokens: int, count_tokens: Callable[[str], int]
) -> list[str]:
    """Return texts cut so that all together have at most so many tokens; the longest are cut."""
    lengths = [count_tokens(text) for text in texts]
    left, most = tokens, tokens
    for rank, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - rank)
        if length > share:
            most = share
            break
        left -= length
    return [clipped(text, most, count_tokens) for text in texts]
