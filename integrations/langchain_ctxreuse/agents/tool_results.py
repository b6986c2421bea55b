"""Retrieved blocks inside tool results, found only where each piece certainly is one item's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from langchain_core.documents import Document

from ctxreuse.context.blocks import BlockId, ContextBlock
from ctxreuse.pipeline.memories import memories_in, memories_of
from ctxreuse.planning.prompt_records import Slice, made_of


class ResultPiece(NamedTuple):
    """A piece of a tool's result that is one item, what is shown of it, and in place of what."""

    block: ContextBlock
    shown: tuple[Slice | str, ...]
    place: Slice

    @classmethod
    def of(cls, text: str, start: int, end: int, block_id: BlockId | None = None) -> ResultPiece:
        """Return a piece that is shown as it stands."""
        block = ContextBlock(id=block_id, text=text[start:end])  # type: ignore[arg-type]
        return cls(block, (Slice(start, end),), Slice(start, end))


def result_pieces(
    artifact: Any, text: str, separator: str, splits: bool
) -> list[ResultPiece] | None:
    """Return the pieces of a tool's result, or None if it is not certain that there are any."""
    named: list[tuple[Any, str]] = [(one.id, one.page_content) for one in _documents(artifact)]
    separators = [separator]
    if not named:
        if listed := memories_in(text):
            parts = [(one.memory["id"], one.lasting) for one in listed]
            made = [(ContextBlock(id=name, text=made_of(text, own)), own) for name, own in parts]
            return [ResultPiece(*one, Slice(0, len(text))) for one in made]
        named = [(one["id"], one["memory"]) for one in memories_of(artifact)]
        separators.append("\n")
    spans = _spans(text, [content for _, content in named], separators)
    if spans is None and splits:
        spans, start = [], 0
        for piece in text.split(separator):
            if piece.strip():
                spans.append((start, start + len(piece)))
            start += len(piece) + len(separator)
        named = [(None, "")] * len(spans)
    if not spans:
        return None
    return [ResultPiece.of(text, *span, one) for span, (one, _) in zip(spans, named, strict=True)]


def pieces_between(
    text: str, found: Sequence[tuple[int, int]], separator: str
) -> list[ResultPiece] | None:
    """Return the pieces that hold one found text each; None if what stands on each differs."""
    spans = _spans(text, [text[start:end] for start, end in found], (separator,)) or []
    before = [text[at:start] for (at, _), (start, _) in zip(spans, found, strict=False)]
    behind = [text[end:at] for (_, at), (_, end) in zip(spans, found, strict=False)]
    for sides in (before, [one[::-1] for one in behind]):
        kinds = {(one[:1], one.count("\n")) for one in sides}
        if len(kinds) > 1 or (len(sides) == 1 and sides[0]):
            return None
    return [ResultPiece.of(text, *span) for span in spans] or None


def _documents(artifact: Any) -> list[Document]:
    """Return an artifact's documents; none if it holds anything else."""
    documents: list[Document] = []
    for one in artifact if isinstance(artifact, list) else ():
        if isinstance(one, Mapping) and one.get("type") == "Document":  # as checkpointers give it
            one = Document(**{name: value for name, value in one.items() if name != "type"})
        if not isinstance(one, Document):
            return []
        documents.append(one)
    return documents


def _spans(
    text: str, contents: Sequence[str], separators: Sequence[str]
) -> list[tuple[int, int]] | None:
    """Cut a text so that each piece holds one content, in order; None if that is not unique."""
    if not contents:
        return None
    spans: list[tuple[int, int]] = []
    behind = 0
    for content in contents:
        start = text.find(content, behind)
        if start < 0:
            return None
        behind = start + len(content)
        spans.append((start, behind))
    gaps = [(end, start) for (_, end), (start, _) in pairwise(spans)]
    head, tail = text[: spans[0][0]], text[behind:]
    for separator in separators:
        if any(text.count(separator, end, start) != 1 for end, start in gaps):
            continue
        stands = separator in head or separator in tail
        if not gaps and not stands and separator != separators[-1]:
            continue
        cuts = [text.index(separator, end) for end, _ in gaps]
        begin = len(head) - len(head.rpartition(separator)[2])
        finish = behind + len(tail.partition(separator)[0])
        starts = [begin, *(cut + len(separator) for cut in cuts)]
        return list(zip(starts, [*cuts, finish], strict=True))
    return None
