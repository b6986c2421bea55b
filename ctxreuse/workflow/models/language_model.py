"""Language models as generations need them: an answer that comes piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio.concurrency import AsyncClosing
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.request import Prompt, check_params


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
    """A model that answers a workflow's generations."""

    def stream(self, prompt: Prompt, params: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Return the answer to a prompt, piece by piece.

        The request is sent when the first piece is asked for. A caller that stops early, by
        `aclose` or because its task is cancelled, ends the request at the engine at once; iterate
        inside `contextlib.aclosing`, since `async for` alone leaves the closing to the garbage
        collector.

        Args:
            prompt: A plan, or chat messages.
            params: The generation's parameters: `max_tokens`, `temperature`, ...

        Returns:
            The pieces, in order.
        """


def checked_llm(llm: object) -> LanguageModel:
    """Return the argument if it is a language model."""
    if isinstance(llm, type) or not isinstance(llm, LanguageModel):
        raise InvalidRequestError(
            f"llm must have stream(prompt, params), not be {describe(llm)}; pass "
            "OpenAILLM('http://...'), EmulatedLLM(...) or one of your own"
        )
    return llm


class OpenAILLM(AsyncClosing):
    """Sends prompts to an OpenAI-compatible server; closing a stream aborts the request there.

    A server usually streams one piece a token, except for thoughts, and for engines that predict
    several tokens at once. Tokens that only its usage counts come at the end, as a piece without
    text; of an answer that is left early they are unknown.

    Args:
        client: An engine's client, which the caller closes, or an address, with or without `/v1`,
            for a client with the usual settings that `aclose` closes.
        **params: Parameters of every request, as in `EngineClient.complete`; a generation's
            parameters override them.

    Raises:
        InvalidRequestError: wrong type of client, or a parameter that the client sets.
        MissingExtraError: `openai` or `tenacity` is not installed.
    """

    def __init__(self, client: EngineClient | str, **params: Any) -> None:
        check_params(params)
        if not isinstance(client, (EngineClient, str)):
            raise InvalidRequestError(
                f"client must be an EngineClient or an engine's address, not {describe(client)}"
            )
        self._is_own = isinstance(client, str)
        self._client = EngineClient(client) if isinstance(client, str) else client
        self._params = params

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt piece by piece; see `ctxreuse.workflow.LanguageModel`.

        Args:
            prompt: A plan, or chat messages.
            params: Parameters of `chat.completions.create`.

        Yields:
            The pieces.

        Raises:
            InvalidRequestError: wrong type of prompt or parameter.
            EngineError: The engine did not answer, or broke off.
        """
        check_params(params)
        counted = 0
        async with self._client.stream(prompt, **{**self._params, **params}) as texts:
            async for text in texts:
                counted += 1
                yield Piece(text, 1)
            uncounted = (texts.completion.completion_tokens or 0) - counted
        if uncounted > 0:
            yield Piece("", uncounted)

    async def aclose(self) -> None:
        """Close the client, unless it was passed in."""
        if self._is_own:
            await self._client.aclose()
