"""Text that splitters repeat: the end of one chunk at the start of the next.

Off by default. A block stays whole; only its rendering replaces the repeated beginning by words
that say where it stands. What is replaced depends on the blocks before it and on nothing else, so
prompts that begin with the same blocks still begin with the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ctxreuse.context.rendering import Part, SentBlock

SHORTEST_OVERLAP = 40
"""Characters; what is shorter than this costs less than the words that replace it."""

_LONGEST_OVERLAP = 4_000
_TRIES = 20


def repeated_length(earlier: str, text: str) -> int:
    """Return how many characters at the start of a text repeat the end of an earlier one.

    Args:
        earlier: The text that stands before.
        text: The text that may begin with its end.

    Returns:
        Characters, at least `SHORTEST_OVERLAP` and fewer than the text has; else 0.
    """
    beginning = text[:SHORTEST_OVERLAP]
    if len(beginning) < SHORTEST_OVERLAP:
        return 0
    end = earlier[-_LONGEST_OVERLAP:]
    position = end.find(beginning)
    for _ in range(_TRIES):  # a text that repeats itself has very many candidates
        if position < 0:
            return 0
        length = len(end) - position
        if length < len(text) and text.startswith(end[position:]):
            return length
        position = end.find(beginning, position + 1)
    return 0


def replace_overlaps(parts: Iterable[Part], shown: Mapping[str, str]) -> list[Part]:
    """Mark the blocks whose beginning repeats the end of a block before them.

    Args:
        parts: A turn's parts in the order in which they are shown.
        shown: Label -> text of the blocks in the messages before this turn.

    Returns:
        The same parts; `SentBlock.repeated` says how many characters its rendering leaves out, and
        `SentBlock.repeats` under which label they stand.
    """
    texts = dict(shown)
    marked: list[Part] = []
    for part in parts:
        if isinstance(part, SentBlock):
            longest, label = 0, ""
            for earlier_label, earlier in texts.items():
                length = repeated_length(earlier, part.block.text)
                if length > longest:
                    longest, label = length, earlier_label
            texts[part.label] = part.block.text
            part = SentBlock(part.label, part.block, longest, label)
        marked.append(part)
    return marked
