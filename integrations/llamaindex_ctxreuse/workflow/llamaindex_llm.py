"""A LlamaIndex LLM as the language model of a workflow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from llama_index.core.llms import LLM, ChatMessage

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.workflow.models.language_model import Piece


class LlamaIndexLLM:
    """Serves a LlamaIndex LLM to a workflow; closing a stream leaves the LLM's.

    A chunk with text counts as a token; what the usage of OpenAI-like models says besides comes at
    the end, as a piece without text.

    Args:
        llm: The LLM. A generation's `params`, such as `max_tokens`, are passed with each call.

    Raises:
        InvalidRequestError: If it is something else.

    Example:
        >>> import asyncio
        >>> from llama_index.core.llms import MockLLM
        >>> async def main():
        ...     llm = LlamaIndexLLM(MockLLM(max_tokens=2))
        ...     prompt = [{"role": "user", "content": "Is Paris in France?"}]
        ...     async with aclosing(llm.stream(prompt, {})) as pieces:
        ...         return "".join([piece.text async for piece in pieces])
        >>> asyncio.run(main())
        'text text'
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = checked_llm(llm)

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt piece by piece; see `ctxreuse.workflow.LanguageModel`.

        Args:
            prompt: A plan, or chat messages.
            params: Keyword arguments for the LLM.

        Yields:
            The pieces.
        """
        told = used = 0
        messages = [ChatMessage(**message) for message in messages_of(prompt)]
        chunks: Any = await self._llm.astream_chat(messages, **params)
        async with aclosing(chunks):
            async for chunk in chunks:
                usage = getattr(getattr(chunk, "raw", None), "usage", None)
                used = getattr(usage, "completion_tokens", None) or used
                if chunk.delta:
                    told += 1
                    yield Piece(chunk.delta, 1)
        if used > told:
            yield Piece("", used - told)


def checked_llm(llm: object) -> LLM:
    """Return the LLM if it is one.

    Raises:
        InvalidRequestError: If it is none.
    """
    if not isinstance(llm, LLM):
        raise InvalidRequestError(f"llm must be a LlamaIndex LLM, not {describe(llm)}")
    return llm
