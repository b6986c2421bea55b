"""What every loader returns: passages, into which long documents are cut, and questions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate

from ctxreuse.context.tokens import estimate_tokens, joined_up_to
from ctxreuse.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that retrieval may find.

    Attributes:
        id: Unique in its data set, and the same whenever it is loaded with the same chunk size.
        text: What the model reads.
        scope: Only questions of this scope, and those without a scope, may retrieve it.
        tokens: Its length; None where the data set does not say.
    """

    id: str
    text: str
    scope: str = ""
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A question, or a turn of a conversation.

    Attributes:
        id: Unique in its data set.
        text: The question.
        answers: The right answers; empty where the data set has none.
        gold: Ids of the passages that hold the answer, as far as they are in the data set.
        conversation_id: The conversation that it belongs to; None if it is independent.
        turn: Its place in the conversation, from 0.
        scope: The scope of the passages that it may retrieve; "" for all.
        blocks: Passage ids, best first, where the data set itself says what was retrieved.
    """

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
    """Passages and questions.

    Attributes:
        name: The format's name.
        passages: In the order of the files.
        questions: In the order of the files.
        notes: What a reader of results has to know.
    """

    name: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]
    notes: tuple[str, ...] = ()


_SEPARATORS = ["\n\n", "\n", ". ", " ", ""]
_BYTES_PER_TOKEN = 4
"""As in `estimate_tokens`."""


class ChunkedDocument:
    """A document's passages, named `<document>#<number>`.

    Added text is cut where a paragraph, else a line, a sentence or a word ends. Only blanks at the
    cuts are lost, and the order stays.

    Args:
        document_id: The document.
        chunk_tokens: Approximate length of a passage, its heading included.
    """

    def __init__(self, document_id: str, chunk_tokens: int) -> None:
        self.id = document_id
        self.passages: list[Passage] = []
        self._chunk_tokens = chunk_tokens
        self._squeezed: list[str] = []
        self._whole = ""  # of these, made by `holding`: one document may have thousands of quotes
        self._ends: list[int] = []

    def add(self, text: str, heading: str = "") -> None:
        """Append a text.

        Args:
            text: May be empty, which adds nothing.
            heading: Text in front of each of its passages.
        """
        front = f"{heading}\n\n" if heading else ""
        # a heading of any length leaves half of a passage for the text
        room = max(self._chunk_tokens - estimate_tokens(front), -(-self._chunk_tokens // 2))
        for chunk in split_text(text, room):
            self.passages.append(Passage(f"{self.id}#{len(self.passages)}", front + chunk))
            self._squeezed.append(squeeze(chunk))
            self._ends = []

    def holding(self, quote: str) -> frozenset[str]:
        """Return the ids of the passages that hold a quote or, if it was cut, a part of it.

        Args:
            quote: Compared without blanks, as the authors of MultiHop-RAG do.

        Returns:
            Ids; none if the document does not hold it.
        """
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
    """Cut a text into chunks that are not empty.

    Args:
        text: Any text.
        chunk_tokens: The longest chunk, in tokens as `estimate_tokens` counts them.

    Returns:
        The chunks in order, without blanks at their ends.

    Raises:
        MissingExtraError: It must be cut, and langchain-text-splitters is not installed.
    """
    text = text.strip()
    if estimate_tokens(text) <= chunk_tokens:
        return [text] if text else []
    try:
        library = import_module("langchain_text_splitters")
    except ImportError as error:
        raise MissingExtraError("chunking", "bench") from error

    class Splitter(library.RecursiveCharacterTextSplitter):  # type: ignore[misc,name-defined]
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
