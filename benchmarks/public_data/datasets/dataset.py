"""What every loader returns: passages, into which long documents are cut, and questions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from ctxreuse.context.tokens import estimate_tokens, joined_up_to


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that retrieval may find."""

    id: str
    text: str
    scope: str = ""
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A question, or a turn of a conversation."""

    id: str
    text: str
    answers: tuple[str, ...] = ()
    gold: frozenset[str] = frozenset()
    conversation_id: str | None = None
    turn: int = 0
    scope: str = ""
    blocks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Passages and questions."""

    name: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]
    notes: tuple[str, ...] = ()


_SEPARATORS = ["\n\n", "\n", ". ", " ", ""]
_BYTES_PER_TOKEN = 4
"""As in `estimate_tokens`."""


class ChunkedDocument:
    """A document's passages, named `<document>#<number>`."""

    def __init__(self, document_id: str, chunk_tokens: int) -> None:
        self.id = document_id
        self.passages: list[Passage] = []
        self._chunk_tokens = chunk_tokens
        self._squeezed: list[str] = []
        self._whole = ""  # of these, made by `holding`: one document may have thousands of quotes
        self._ends: list[int] = []

    def add(self, text: str, heading: str = "") -> None:
        """Append a text."""
        front = f"{heading}\n\n" if heading else ""
        # a heading of any length leaves half of a passage for the text
        room = max(self._chunk_tokens - estimate_tokens(front), -(-self._chunk_tokens // 2))
        for chunk in split_text(text, room):
            self.passages.append(Passage(f"{self.id}#{len(self.passages)}", front + chunk))
            self._squeezed.append(squeeze(chunk))
            self._ends = []

    def holding(self, quote: str) -> frozenset[str]:
        """Return the ids of the passages that hold a quote or, if it was cut, a part of it."""
        wanted = squeeze(quote)
        if not wanted:
            return frozenset()
        if not self._ends:
            self._whole = "".join(self._squeezed)
            self._ends = list(accumulate(map(len, self._squeezed)))
        held: set[int] = set()
        at = self._whole.find(wanted)
        while at >= 0:
            end = at + len(wanted)
            held.update(range(bisect_right(self._ends, at), bisect_left(self._ends, end) + 1))
            at = self._whole.find(wanted, end)
        return frozenset(self.passages[number].id for number in held)


def passages_of(documents: Iterable[ChunkedDocument]) -> tuple[Passage, ...]:
    """Return the passages of documents, in order."""
    return tuple(passage for document in documents for passage in document.passages)


def split_text(text: str, chunk_tokens: int) -> list[str]:
    """Cut a text into chunks that are not empty."""
    text = text.strip()
    if estimate_tokens(text) <= chunk_tokens:
        return [text] if text else []
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    class Splitter(RecursiveCharacterTextSplitter):
        # the library's takes the square of a chunk's length
        def _merge_splits(self, splits: Iterable[str], separator: str) -> list[str]:
            joined = joined_up_to(splits, self._chunk_size, self._length_function)
            return [chunk for one in joined if (chunk := one.strip())]

    splitter = Splitter(
        separators=_SEPARATORS,
        keep_separator="end",
        chunk_size=chunk_tokens * _BYTES_PER_TOKEN,
        chunk_overlap=0,
        # tokens are rounded up, so the sum over many short words would be too large
        length_function=lambda part: len(part.encode("utf-8", "surrogatepass")),
    )
    chunks: list[str] = splitter.split_text(text)
    return chunks


def squeeze(text: str) -> str:
    """Return a text without its blanks."""
    return "".join(text.split())
