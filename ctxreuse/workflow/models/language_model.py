"""Language models as generations need them: an answer that comes piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio.closing import AsyncClosing
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


class OpenAILLM(AsyncClosing):
    """Sends prompts to a server and passes on what it streams; closing a stream aborts it there.

    A server that streams says a piece a token, but for thoughts, and for engines that predict
    several tokens at once. What its usage tells of them comes at the end, as a piece without text;
    of an answer that is left early nobody tells.

    Args:
        client: An engine's client, which stays yours to close, or an address, with or without
            `/v1`, for a client with the usual settings that `aclose` closes.
        **params: What goes into every request, as in `EngineClient.complete`; a generation's own
            parameters come before it.

    Raises:
        InvalidRequestError: If the client is none, or a parameter is the client's to set.
        MissingExtraError: If `openai` or `tenacity` is not installed.
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
            params: What `chat.completions.create` takes.

        Yields:
            The pieces.

        Raises:
            InvalidRequestError: If an argument is of the wrong kind.
            EngineError: If the engine did not answer, or broke off.
        """
        told = 0
        async with self._client.stream(prompt, **{**self._params, **params}) as texts:
            async for text in texts:
                told += 1
                yield Piece(text, 1)
            untold = (texts.completion.completion_tokens or 0) - told
        if untold > 0:
            yield Piece("", untold)

    async def aclose(self) -> None:
        """Close the client, unless it is yours."""
        if self._is_own:
            await self._client.aclose()
