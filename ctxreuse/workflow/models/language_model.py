"""What a generation needs of a language model: an answer that comes piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.client.request import Prompt


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        text: Its text; the pieces' texts together are the answer.
        tokens: How many tokens the model has generated for it, from 0.
    """

    text: str
    tokens: int


@runtime_checkable
class LanguageModel(Protocol):
    """A model that a workflow's generations are sent to."""

    def stream(self, prompt: Prompt, params: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Return the answer to a prompt, piece by piece.

        The request is sent when the first piece is asked for. Whoever leaves early, by `aclose` or
        because the task that reads is cancelled, ends the request at the engine at once; read it
        inside `contextlib.aclosing`, since `async for` alone leaves the closing to the garbage
        collector.

        Args:
            prompt: A plan, or chat messages.
            params: What the generation asks for: `max_tokens`, `temperature`, ...

        Returns:
            The pieces, in order.
        """


def checked_llm(llm: object) -> LanguageModel:
    """Return the language model if it is one.

    Raises:
        InvalidRequestError: If it is none.
    """
    if isinstance(llm, type) or not isinstance(llm, LanguageModel):
        raise InvalidRequestError(
            f"llm must have stream(prompt, params), not be {describe(llm)}; pass "
            "OpenAILLM('http://...'), EmulatedLLM(...) or one of your own"
        )
    return llm
