"""What each agent reads: pieces of documents, put together into segments."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

from langchain_text_splitters import RecursiveCharacterTextSplitter

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.checks import checked_list
from ctxreuse.context.tokens import joined_up_to, well_formed
from ctxreuse.errors import CtxreuseError, InvalidRequestError, describe

_log = logging.getLogger("ctxreuse")

Packing: TypeAlias = Literal["auto", "single", "packed"]
"""One document a call, or all that an agent has; see `ChainOfAgents`."""

_MOST_HALVINGS = 4
"""So parts are a sixteenth: no text has more tokens for each that is estimated."""
_SHORT_TOKENS = 256
"""A document of so many costs less in one call with others than the words of a call of its own."""
_SEPARATORS = ["\n\n", "\n", ". ", " ", ""]


@dataclass(frozen=True, slots=True)
class Segment:
    """What one agent reads in one call."""

    agent: int
    blocks: tuple[ContextBlock, ...]
    tokens: int  # of all blocks, at least 1 each
    is_first_of_agent: bool  # whether it continues the agent's history
    halvings: int = 0  # because the model refused it as too long

    def halves(self, count_tokens: Callable[[str], int]) -> list[Segment]:
        """Return it in parts, of half its length at most; empty where it is not to be cut again."""
        blocks = self.blocks
        if len(blocks) == 1:  # by its text: the tokens that a user gives are not those of its parts
            [whole] = blocks
            half = -(-count_tokens(whole.text) // 2)
            blocks = tuple(pieces_of(replace(whole, tokens=None), half, count_tokens))
        if len(blocks) < 2 or self.halvings == _MOST_HALVINGS:
            return []
        lengths = [max(1, count_tokens(block.text)) for block in blocks]
        middle = max(1, bisect_left(list(accumulate(lengths)), sum(lengths) / 2))
        agent, halvings = self.agent, self.halvings + 1
        return [
            Segment(agent, blocks[begin:end], sum(lengths[begin:end]), False, halvings)
            for begin, end in pairwise((0, middle, len(blocks)))
        ]


def as_blocks(documents: object) -> list[ContextBlock]:
    """Return documents as context blocks; the same id and text twice counts once."""
    words = "a list; a single text goes into a list of one"
    documents = checked_list("documents", documents, words, but=(str, bytes, Mapping))
    blocks: dict[bytes, ContextBlock] = {}
    for position, document in enumerate(documents):
        try:
            block = _as_block(document)
            text = as_sent(block.text)
            block = block if text == block.text else replace(block, text=text)
        except CtxreuseError as error:
            raise InvalidRequestError(f"document {position}: {error}") from error
        blocks.setdefault(block.key, block)
    return list(blocks.values())


def as_sent(text: str) -> str:
    """Return a text as it can be sent: UTF-8 has no lone surrogates."""
    sent = well_formed(text)
    if sent != text:
        _log.warning("a text has lone surrogates, which no engine takes; '?' is sent for each")
    return sent


def pieces_of(
    block: ContextBlock, budget_tokens: int, count_tokens: Callable[[str], int]
) -> list[ContextBlock]:
    """Cut a long document, alike for every question, into pieces that make up its text."""
    tokens = block.tokens if block.tokens is not None else count_tokens(block.text)
    if tokens <= budget_tokens or not block.text:
        return [block]
    splitter = _PieceSplitter(
        separators=_SEPARATORS,
        keep_separator="end",
        strip_whitespace=False,
        chunk_overlap=0,
        chunk_size=budget_tokens,
        # the splitter would repeat text that counts as no token
        length_function=lambda text: count_tokens(text) or len(text[:1]),
    )
    texts = splitter.split_text(block.text)
    assert "".join(texts) == block.text, "the splitter has lost text"
    return [
        ContextBlock(id=f"{block.id} ({number}/{len(texts)})", text=text)
        for number, text in enumerate(texts, 1)
    ]


class _PieceSplitter(RecursiveCharacterTextSplitter):
    """Joins what it has split in one pass: the library's takes the square of a piece's length."""

    def _merge_splits(self, splits: Iterable[str], separator: str) -> list[str]:
        return joined_up_to(splits, self._chunk_size, self._length_function)


def parcels_of(
    tokens: Sequence[int], may_share: Sequence[bool], budget_tokens: int, label_tokens: int
) -> list[list[int]]:
    """Put short pieces together, as many as a segment holds, and leave others alone."""
    parcels: list[list[int]] = []
    shared: list[int] = []
    left = 0
    for position, length in enumerate(tokens):
        if length > _SHORT_TOKENS or not may_share[position]:
            parcels.append([position])
            continue
        if not shared or length + label_tokens > left:
            shared, left = [], budget_tokens
            parcels.append(shared)
        shared.append(position)
        left -= length + label_tokens
    return parcels


def segments_of(
    pieces: Sequence[ContextBlock],
    parcels: Sequence[list[int]],  # each with the positions of its pieces
    agents: Sequence[int],
    tokens: Sequence[int],
    budget_tokens: int,
    label_tokens: int,
    one_each: bool,
) -> list[Segment]:
    """Put uncut parcels, each once, into segments, in the order of their first pieces."""
    segments: list[tuple[int, list[int], bool]] = []  # agents, pieces, whether an agent's first
    members: dict[int, list[int]] = {}  # of each agent's last segment
    totals: dict[int, int] = {}
    for agent, parcel in zip(agents, parcels, strict=True):
        added = sum([tokens[position] + label_tokens for position in parcel])
        is_first = agent not in members
        if is_first or one_each or totals[agent] + added - label_tokens > budget_tokens:
            members[agent], totals[agent] = [], 0
            segments.append((agent, members[agent], is_first))
        members[agent] += parcel
        totals[agent] += added
    lengths = [max(1, length) for length in tokens]
    return [
        Segment(agent, tuple(pieces[n] for n in sorted(some)), sum(lengths[n] for n in some), first)
        for agent, some, first in segments
    ]


def _as_block(document: Any) -> ContextBlock:
    if isinstance(document, ContextBlock):
        return document
    if isinstance(document, str):
        return ContextBlock(text=document)
    name: Any
    text: Any
    if isinstance(document, Mapping):
        name, text = document.get("id"), document.get("text")
    elif hasattr(document, "page_content"):  # LangChain
        name, text = getattr(document, "id", None), document.page_content
    else:
        node = getattr(document, "node", document)  # LlamaIndex
        if not hasattr(node, "get_content"):
            raise InvalidRequestError(
                f"a document must be a string, a ContextBlock, a LangChain document, a LlamaIndex "
                f"node or a dict with 'text', not {describe(document)}"
            )
        name, text = getattr(node, "node_id", None), node.get_content()
    return ContextBlock(id=name, text=text)  # a name that is None is derived
