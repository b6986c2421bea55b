"""A language model without a model: given answers, in the time that an engine would take."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from ctxreuse.cache.simulator import CacheUsage
from ctxreuse.context.checks import check_function, checked_integer, checked_optional_integer
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving.client.request import Prompt, check_params, messages_of
from ctxreuse.serving.emulation.batching_engine import (
    COMMON_RATES,
    BatchedRequest,
    BatchingEngine,
    EngineRates,
)
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER, chat_markup
from ctxreuse.workflow.models.language_model import Piece


class EmulatedLLM:
    """Gives the answers of a function, as fast as an engine with continuous batching would.

    Prompts are served from a prefix cache as far as it holds them; a stream that is closed early
    stops costing anything. A token is a word, or eight letters of a long one. For one event loop.

    Args:
        answer: From a prompt's messages to what the model says, at best always the same.
        rates: How long a step takes.
        speed: How many times faster than its rates the engine runs.
        capacity_tokens: Size of the prefix cache, vLLM's null block included; None is unlimited.
        chunk_tokens: Tokens of a piece; the last one may have fewer.
        max_running: Requests that run at a time; others wait for their turn.
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
        check_function("answer", answer, "a function of a prompt's messages")
        self._answer = answer
        self._chunk_tokens = checked_integer("chunk_tokens", chunk_tokens, 1)
        self._engine = BatchingEngine(
            capacity_tokens, rates=rates, speed=speed, max_running=max_running
        )

    @property
    def usage(self) -> CacheUsage:
        """Tokens of all prompts that have begun, and how many came from the cache."""
        return self._engine.usage

    @property
    def generated_tokens(self) -> int:
        """Tokens of all answers, those included whose stream was closed early."""
        return self._engine.generated_tokens

    @property
    def requests(self) -> int:
        """How many requests wait for their turn or are being answered."""
        return self._engine.open_requests

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Yield the answer piece by piece; see `ctxreuse.workflow.LanguageModel`.

        Args:
            prompt: A plan, or chat messages; not larger than the cache.
            params: Of these, `max_tokens` or `max_completion_tokens` ends the answer.
        """
        check_params(params)
        messages = messages_of(prompt)
        text = self._answer(messages)
        if not isinstance(text, str):
            raise InvalidRequestError(f"answer must return a text, not {type(text).__name__}")
        limit = "max_completion_tokens" if "max_completion_tokens" in params else "max_tokens"
        most = checked_optional_integer(limit, params.get(limit), 1)
        words = ENGINE_TOKENIZER.pieces(text)[:most] or [""]
        tokens, answer = map(ENGINE_TOKENIZER.ids, (chat_markup(messages), "".join(words)))
        request = BatchedRequest(tokens, answer or [0], self._chunk_tokens)
        given = 0
        async with aclosing(self._engine.stream(request)) as counts:
            async for generated in counts:
                yield Piece("".join(words[given:generated]), generated - given)
                given = generated
