"""A conversation, both as it was sent and as it was said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from ctxreuse.context.blocks import Message
from llamaindex_ctxreuse.llm.planned_prompts import message_as_openai

_TOKENS_OF_A_MESSAGE = 8
"""What a chat template adds to a message, at most."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A message of the user or the assistant.

    Attributes:
        sent: The message as the model gets it, context included.
        said: The message as the user knows it.
    """

    sent: ChatMessage
    said: ChatMessage


@dataclass(frozen=True, slots=True)
class Transcript:
    """The utterances of a conversation, in order."""

    utterances: tuple[Utterance, ...] = ()

    def __len__(self) -> int:
        return len(self.utterances)

    def sent(self) -> list[ChatMessage]:
        """Return copies of the messages as they were sent."""
        return [one.sent.model_copy(deep=True) for one in self.utterances]

    def said(self) -> list[ChatMessage]:
        """Return copies of the messages as they were said."""
        return [one.said.model_copy(deep=True) for one in self.utterances]

    def as_openai(self) -> list[Message]:
        """Return the messages as they were sent, for the planner, without system messages."""
        return [
            message_as_openai(one.sent)
            for one in self.utterances
            if one.sent.role not in (MessageRole.SYSTEM, MessageRole.DEVELOPER)
        ]

    def with_turn(self, question: str, content: str, answer: str) -> Transcript:
        """Return the transcript with one more turn.

        Args:
            question: What the user said.
            content: What was sent for it.
            answer: What the assistant answered.
        """
        reply = ChatMessage(role=MessageRole.ASSISTANT, content=answer)
        turn = (
            Utterance(
                ChatMessage(role=MessageRole.USER, content=content),
                ChatMessage(role=MessageRole.USER, content=question),
            ),
            Utterance(reply, reply),
        )
        return Transcript((*self.utterances, *turn))

    def tokens(self, count: Callable[[str], int]) -> int:
        """Return the length of the messages as they were sent."""
        return sum(message_tokens(one.sent.content or "", count) for one in self.utterances)

    def newest(self, tokens: int, count: Callable[[str], int]) -> Transcript:
        """Return the transcript without its first turn, and without more until it fits.

        Args:
            tokens: How long it may be.
            count: Counts tokens.
        """
        rest = self.utterances
        while rest:
            later = (n for n, one in enumerate(rest) if n and one.sent.role == MessageRole.USER)
            rest = rest[next(later, len(rest)) :]
            if Transcript(rest).tokens(count) <= tokens:
                break
        return Transcript(rest)

    def recalled(self, messages: Sequence[ChatMessage]) -> Transcript:
        """Return the transcript of messages that a user passes as history.

        As long as they are this transcript's messages, as said or as sent, they stay as they were
        sent.
        """
        utterances: list[Utterance] = []
        for number, message in enumerate(messages):
            known = self.utterances[number] if number < len(self) else None
            if known is None or not _is_one_of(message, (known.said, known.sent)):
                utterances += [Utterance(one, one) for one in _copies(messages[number:])]
                break
            utterances.append(known)
        return Transcript(tuple(utterances))


def message_tokens(text: str, count: Callable[[str], int]) -> int:
    """Return what a message of this text takes."""
    return count(text) + _TOKENS_OF_A_MESSAGE


def _is_one_of(message: ChatMessage, known: Iterable[ChatMessage]) -> bool:
    return any(message.role == one.role and message.blocks == one.blocks for one in known)


def _copies(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    return [message.model_copy(deep=True) for message in messages]
