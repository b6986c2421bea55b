"""What every loader returns: passages, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    name: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]
