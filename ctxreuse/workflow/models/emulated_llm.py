"""A language model without a model: given answers, in the time that an engine would take."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from ctxreuse.cache.simulator import PrefixCacheSimulator
from ctxreuse.cache.usage import CacheUsage
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.serving.emulation.batching_engine import BatchingEngine
from ctxreuse.serving.emulation.emulated_engine import chat_markup, word_pieces, word_tokens
from ctxreuse.serving.emulation.rates import COMMON_RATES, EngineRates
from ctxreuse.serving.emulation.timed_engine import TimedEngine
from ctxreuse.workflow.models.language_model import Piece

_BLOCK_TOKENS = 16


class EmulatedLLM:
    """Gives the answers of a function, as fast as an engine with continuous batching would.

    A step of the engine takes what its rates say, prompts are served from a prefix cache as far as
    it holds them, and a request that is left early stops costing anything. A token is a word, or
    eight letters of a long one. For one event loop, which may have a virtual clock.

    Args:
        answer: From a prompt's messages to what the model says, at best always the same.
        rates: How long a step takes.
        speed: How many times faster than its rates the engine runs.
        capacity_tokens: Size of the prefix cache, the one block included that vLLM keeps back;
            None is unlimited.
        chunk_tokens: Tokens of a piece; the last one may have fewer.
        max_running: Requests that run at a time; others wait for their turn.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind or out of range.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     llm = EmulatedLLM(lambda messages: "It is in France.", speed=1_000, chunk_tokens=2)
        ...     prompt = [{"role": "user", "content": "Where is Paris?"}]
        ...     async with aclosing(llm.stream(prompt, {"max_tokens": 4})) as pieces:
        ...         return [piece async for piece in pieces]
        >>> asyncio.run(main())
        [Piece(text='It is', tokens=2), Piece(text=' in France', tokens=2)]
    """

    def __init__(
        self,
        answer: Callable[[list[dict[str, Any]]], str],
        *,
        rates: EngineRates = COMMON_RATES,
        speed: float = 1.0,
        capacity_tokens: int | None = None,
        chunk_tokens: int = 8,
        max_running: int = 256,
    ) -> None:
        if not callable(answer):
            raise InvalidRequestError(
                f"answer must be a function of a prompt's messages, not {describe(answer)}"
            )
        if not isinstance(rates, EngineRates):
            raise InvalidRequestError(f"rates must be EngineRates, not {describe(rates)}")
        if not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise InvalidRequestError(
                f"chunk_tokens must be an integer from 1, not {describe(chunk_tokens)}"
            )
        cache = PrefixCacheSimulator(capacity_tokens, _BLOCK_TOKENS, null_block=True)
        self._answer = answer
        self._chunk_tokens = chunk_tokens
        self._batching = BatchingEngine(cache, rates, max_running=max_running)
        self._engine = TimedEngine(self._batching, speed)

    @property
    def usage(self) -> CacheUsage:
        """Tokens of all prompts that have begun, and how many came from the cache."""
        return self._batching.usage

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers, also of those that were left early."""
        return self._batching.generated_tokens

    @property
    def requests(self) -> int:
        """How many requests wait for their turn or are being answered."""
        return self._engine.requests

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt piece by piece; see `ctxreuse.workflow.LanguageModel`.

        Args:
            prompt: A plan, or chat messages.
            params: Of these, `max_tokens` or `max_completion_tokens` ends the answer.

        Yields:
            The pieces. An empty answer is one without text, which costs a token.

        Raises:
            InvalidRequestError: If the prompt is of the wrong kind or larger than the cache, or the
                function returns no text.
        """
        messages = messages_of(prompt)
        words = word_pieces(self._said(messages))[: _limit(params)] or [""]
        tokens = word_tokens(chat_markup(messages))
        answer = word_tokens("".join(words)) or [0]
        given = 0
        counts = self._engine.stream(tokens, answer, chunk_tokens=self._chunk_tokens)
        async with aclosing(counts):
            async for said in counts:
                yield Piece("".join(words[given:said]), said - given)
                given = said

    def _said(self, messages: list[dict[str, Any]]) -> str:
        text = self._answer(messages)
        if not isinstance(text, str):
            raise InvalidRequestError(f"answer must return a text, not {type(text).__name__}")
        return text


def _limit(params: Mapping[str, Any]) -> int | None:
    """Return the most tokens that an answer may have; None is any number."""
    name = "max_completion_tokens" if "max_completion_tokens" in params else "max_tokens"
    limit = params.get(name)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise InvalidRequestError(f"{name} must be an integer from 1, not {describe(limit)}")
    return limit
