"""Retrieved blocks inside tool results, found only where each piece certainly is one item's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from langchain_core.documents import Document

from ctxreuse.adapters.plan_metadata import METADATA_KEY, memory_ranks, retrievers_order
from ctxreuse.context.blocks import BlockId, ContextBlock
from langchain_ctxreuse.documents.document_plans import planned_document

_OF_ONE_SEARCH = ("score", "score_details")
"""Fields of a memory that change from one search to the next."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """The text of a tool result, as blocks."""

    blocks: tuple[ContextBlock, ...]
    before: str = ""
    after: str = ""
    documents: tuple[Document, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A text, cut at separators: `before`, the pieces, `after`."""

    texts: tuple[str, ...]
    before: str = ""
    after: str = ""

    def as_blocks(
        self, ids: Sequence[BlockId | None] = (), order: Sequence[int] | None = None
    ) -> FoundBlocks:
        positions = range(len(self.texts)) if order is None else order
        # without an id, the block's is derived from its text
        ids = ids or [None] * len(self.texts)
        blocks = [ContextBlock(id=ids[n], text=self.texts[n]) for n in positions]  # type: ignore[arg-type]
        return FoundBlocks(tuple(blocks), self.before, self.after)


def blocks_in(artifact: Any, text: str, separator: str, splits: bool) -> FoundBlocks | None:
    """Return the blocks in a tool result, or None if it is not certain that there are any."""
    documents = _documents(artifact)
    memories = [] if documents else _memories(_parsed(text))
    if memories:
        return FoundBlocks(tuple(map(_memory_block, memories)))
    memories = [] if documents else _memories(artifact)
    contents = [document.page_content for document in documents]
    contents += [one["memory"] for one in memories]
    pieces = _pieces(text, contents, (separator, "\n") if memories else (separator,))
    if pieces is None:
        texts = [piece for piece in text.split(separator) if piece.strip()] if splits else []
        return _Pieces(tuple(texts)).as_blocks() if texts else None
    if documents:
        return _shown_documents(pieces, documents)
    return pieces.as_blocks([one["id"] for one in memories])


def rendered_blocks(blocks: Sequence[ContextBlock], artifact: Any) -> FoundBlocks:
    """Return the blocks of a tool result that shows them under labels."""
    documents = _documents(artifact)
    same = [one.page_content for one in documents] == [block.text for block in blocks]
    return FoundBlocks(tuple(blocks), documents=tuple(documents) if same else ())


def joined_documents(
    lists: Iterable[Sequence[ContextBlock]], text: str, separator: str
) -> FoundBlocks | None:
    """Return the blocks of a tool result that is retrieved documents, joined, and nothing else."""
    for blocks in lists:
        if text == separator.join(one.text for one in blocks):
            return FoundBlocks(tuple(blocks))
    return None


def _documents(artifact: Any) -> list[Document]:
    """Return an artifact's documents; none if it holds anything else."""
    given = artifact if isinstance(artifact, list) else []
    documents = [document for one in given if (document := _document(one)) is not None]
    return documents if len(documents) == len(given) else []


def _document(value: Any) -> Document | None:
    """Return a document, also one that a checkpointer gave back as a dict."""
    if isinstance(value, Document):
        return value
    if isinstance(value, Mapping) and value.get("type") == "Document":
        return Document(**{name: one for name, one in value.items() if name != "type"})
    return None


def _shown_documents(pieces: _Pieces, documents: list[Document]) -> FoundBlocks | None:
    order = retrievers_order([planned_document(document) for document in documents])
    if not order:
        return None
    found = pieces.as_blocks([document.id for document in documents], order)
    return replace(found, documents=tuple(documents[position] for position in order))


def _pieces(text: str, contents: Sequence[str], separators: Sequence[str]) -> _Pieces | None:
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
    for separator in separators:
        if any(text.count(separator, end, start) != 1 for end, start in gaps):
            continue
        stands = separator in text[: spans[0][0]] or separator in text[behind:]
        if not gaps and not stands and separator != separators[-1]:
            continue
        cuts = [text.index(separator, end) for end, _ in gaps]
        first = text.rfind(separator, 0, spans[0][0])
        begin = 0 if first < 0 else first + len(separator)
        last = text.find(separator, spans[-1][1])
        finish = len(text) if last < 0 else last
        starts = [begin, *(cut + len(separator) for cut in cuts)]
        texts = [text[start:end] for start, end in zip(starts, [*cuts, finish], strict=True)]
        return _Pieces(tuple(texts), text[:begin], text[finish:])
    return None


def _parsed(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # some other text, or one that nests too deeply
        return None


def _memories(result: Any) -> list[Mapping[str, Any]]:
    """Return the memories in a search result of Mem0; none if it is anything else, or more."""
    if not isinstance(result, Mapping):
        return []
    memories = result.get("results")
    known = {"results"} if memory_ranks(result) is None else {"results", METADATA_KEY}
    beside = [name for name, one in result.items() if name not in known and one]
    if beside or not isinstance(memories, list):
        return []
    found = [
        one
        for one in memories
        if isinstance(one, Mapping)
        and isinstance(one.get("memory"), str)
        and isinstance(one.get("id"), (str, int))
    ]
    return found if len(found) == len(memories) else []


def _memory_block(memory: Mapping[str, Any]) -> ContextBlock:
    lasting = {name: one for name, one in memory.items() if name not in _OF_ONE_SEARCH}
    return ContextBlock(id=memory["id"], text=json.dumps(lasting, ensure_ascii=False))
