"""Language models as generations need them: an answer that comes piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ctxreuse.context.checks import checked_kind
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.prompt_turn import note_planned
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.aio.concurrency import AsyncClosing
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.request import Prompt, check_params, messages_of

_Message = TypeVar("_Message")


class Piece(NamedTuple):
    """A piece of an answer, and how many tokens (from 0) the model has generated for it."""

    text: str
    tokens: int


@runtime_checkable
class LanguageModel(Protocol):
    """A model that answers a workflow's generations."""

    def stream(self, prompt: Prompt, params: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Return the answer to a prompt, piece by piece; the first one that is asked for sends it.

        Iterate inside `contextlib.aclosing`: a caller that stops early then ends the request at the
        engine at once.

        Args:
            prompt: A plan, or chat messages.
            params: The generation's parameters: `max_tokens`, `temperature`, ...
        """


def checked_llm(llm: object) -> LanguageModel:
    """Return the argument if it is a language model."""
    if isinstance(llm, type) or not isinstance(llm, LanguageModel):
        raise InvalidRequestError(
            f"llm must have stream(prompt, params), not be {describe(llm)}; pass "
            "OpenAILLM('http://...'), EmulatedLLM(...) or one of your own"
        )
    if hasattr(llm, "invoke") or hasattr(llm, "stream_chat"):  # another framework's `stream`
        raise InvalidRequestError(
            f"llm streams as its framework does, {describe(llm)}; pass LangChainLLM(llm) or "
            "LlamaIndexLLM(llm), of langchain_ctxreuse and llamaindex_ctxreuse"
        )
    return llm


def converted_messages(
    prompt: Prompt, convert: Callable[[list[dict[str, Any]]], list[_Message]], framework: str
) -> list[_Message]:
    """Return a prompt as a framework's messages; its wrapped models leave a plan as it is."""
    if isinstance(prompt, Plan):
        note_planned(prompt.request.tenant, "user", prompt.content, prompt)
    messages = messages_of(prompt)
    try:
        return convert(messages)
    except Exception as error:  # of several kinds; its words hold the message
        raise InvalidRequestError(
            f"{framework} cannot read the chat messages ({type(error).__name__}); give each a role "
            "that it knows, such as 'user', and text as content"
        ) from error


class OpenAILLM(AsyncClosing):
    """Sends prompts to an OpenAI-compatible server; closing a stream aborts the request there.

    Tokens that only the server's usage counts come at the end, as a piece without text.

    Args:
        client: An engine's client, which the caller closes, or an address, with or without `/v1`,
            for a client with the usual settings that `aclose` closes. Only a client with a planner
            tells it the usage.
        **params: Parameters of every request, as in `EngineClient.complete`; a generation's
            parameters override them.

    Raises:
        MissingExtraError: `openai` or `tenacity` is not installed.
    """

    def __init__(self, client: EngineClient | str, **params: Any) -> None:
        check_params(params)
        words = "an EngineClient or an engine's address"
        checked_kind("client", client, (EngineClient, str), words)
        self._is_own = isinstance(client, str)
        self._client = EngineClient(client) if isinstance(client, str) else client
        self._params = params

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Yield the answer piece by piece; `params` are those of `chat.completions.create`.

        Raises:
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
