"""A LangChain chat model as the language model of a workflow."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.workflow.models.language_model import Piece
from langchain_ctxreuse.messages import text_parts


class LangChainLLM:
    """Serves a LangChain chat model to a workflow; closing a stream leaves the model's.

    A chunk with text counts as a token; what the usage at the end says besides comes as a piece
    without text. Callbacks of the chain around it see each call; one that was a wrong guess of the
    engine's shows as cancelled.

    Args:
        model: A chat model, as it is or bound to arguments. A generation's `params`, such as
            `max_tokens`, are passed with each call.

    Raises:
        InvalidRequestError: If it is something else.

    Example:
        >>> import asyncio
        >>> from langchain_core.language_models import FakeListChatModel
        >>> async def main():
        ...     llm = LangChainLLM(FakeListChatModel(responses=["Yes."]))
        ...     prompt = [{"role": "user", "content": "Is Paris in France?"}]
        ...     async with aclosing(llm.stream(prompt, {})) as pieces:
        ...         return "".join([piece.text async for piece in pieces])
        >>> asyncio.run(main())
        'Yes.'
    """

    def __init__(self, model: Runnable[Any, Any]) -> None:
        self._model = checked_model(model)

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt piece by piece; see `ctxreuse.workflow.LanguageModel`.

        Args:
            prompt: A plan, or chat messages.
            params: Keyword arguments for the model.

        Yields:
            The pieces.
        """
        pieces = streamed(self._model, convert_to_messages(messages_of(prompt)), None, params)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece


async def streamed(
    model: Runnable[Any, Any],
    prompt: Any,
    config: RunnableConfig | None,
    params: Mapping[str, Any],
) -> AsyncGenerator[Piece, None]:
    """Yield what a model says, with the tokens that it takes.

    Args:
        model: A chat model or what stands around one.
        prompt: What it takes.
        config: LangChain's.
        params: Further keyword arguments.

    Raises:
        InvalidRequestError: If it gives something else than messages or texts.
    """
    told = used = 0
    chunks: Any = model.astream(prompt, config, **params)
    async with aclosing(chunks):
        async for chunk in chunks:
            usage = getattr(chunk, "usage_metadata", None) or {}
            used += usage.get("output_tokens") or 0
            text = _text(chunk)
            if text:
                told += 1
                yield Piece(text, 1)
    if used > told:
        yield Piece("", used - told)


def checked_model(model: object) -> Runnable[Any, Any]:
    """Return the model if it can be asked.

    Raises:
        InvalidRequestError: If it is none.
    """
    inner = model
    while not isinstance(inner, BaseLanguageModel) and hasattr(inner, "bound"):
        inner = inner.bound  # what `bind`, `with_config` and `with_retry` make
    if isinstance(model, Runnable) and isinstance(inner, BaseLanguageModel):
        return model
    raise InvalidRequestError(
        f"llm must be a LangChain chat model, not {describe(model)}; pass ChatOpenAI(...), "
        "or any other as it is or bound to arguments"
    )


def _text(chunk: object) -> str:
    if isinstance(chunk, str):
        return chunk
    if isinstance(chunk, BaseMessage):
        return "".join(part.text for part in text_parts(chunk))
    raise InvalidRequestError(
        f"the model must give messages or texts, not {type(chunk).__name__}; leave out what "
        "parses its output, and put it behind the workflow"
    )
