"""A language model behind an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.aio.closing import AsyncClosing
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.request import Prompt, check_params
from ctxreuse.workflow.models.language_model import Piece


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
