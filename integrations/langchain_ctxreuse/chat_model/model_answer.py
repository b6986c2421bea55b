"""What the inner model answers: passed on as it is, its usage reported."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any

from langchain_core.outputs import ChatGeneration, ChatResult

from ctxreuse.context.checks import reported_count
from ctxreuse.context.reported_usage import ReportedTokens, written_by_life
from ctxreuse.pipeline.model_gateway import ModelGateway
from ctxreuse.pipeline.prompt_turn import PlannedPrompt


class ModelAnswer:
    """What comes back from the inner model for one prompt."""

    def __init__(self, planned: PlannedPrompt | None, gateway: ModelGateway) -> None:
        self._began = time.perf_counter()
        self._planned = planned
        self._usage: ReportedTokens | None = None
        self._gateway = gateway

    def result(self, result: ChatResult) -> ChatResult:
        """Return a whole answer."""
        for generation in result.generations[:1]:  # each has the usage of all
            self._read_usage(generation)
        self._tell_usage()
        return result

    def stream(self, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield a streamed answer: chunks, or events of LangChain's streaming protocol."""
        with closing(steps):
            for step in steps:
                self._read_usage(step)
                yield step
        self._tell_usage()

    async def astream(self, steps: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield a streamed answer as `stream` does."""
        async with aclosing(steps):
            async for step in steps:
                self._read_usage(step)
                yield step
        self._tell_usage()

    def _read_usage(self, answer: ChatGeneration | Any) -> None:
        """Take note of the usage that an answer, or a piece of one, comes with."""
        usage = reported_usage(answer)
        if usage is not None:
            self._usage = usage if self._usage is None else _larger(self._usage, usage)

    def _tell_usage(self) -> None:
        self._gateway.report_usage(self._planned, self._usage, time.perf_counter() - self._began)


def reported_usage(answer: object) -> ReportedTokens | None:
    """Return what the usage of an answer says, or of a piece of one; None if it has none."""
    if isinstance(answer, ChatGeneration):
        usage: Any = getattr(answer.message, "usage_metadata", None)
    else:
        usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    details = usage.get("input_token_details")
    told = details if isinstance(details, dict) else {}
    return ReportedTokens(
        reported_count(usage.get("input_tokens")),
        reported_count(told.get("cache_read")),
        reported_count(usage.get("output_tokens")),
        written_by_life(told.get("cache_creation"), told),
    )


def _larger(one: ReportedTokens, other: ReportedTokens) -> ReportedTokens:
    """Return the larger of each two counts: models tell them at the beginning, the end, or both."""
    prompt, cached, completion = (
        b if a is None else a if b is None else max(a, b)
        for a, b in zip(one[:3], other[:3], strict=True)
    )
    written = max(
        (told for told in (one.written_tokens, other.written_tokens) if told is not None),
        key=lambda told: sum(told.values()),
        default=None,
    )
    return ReportedTokens(prompt, cached, completion, written)
