"""What the inner model answers: passed on as it is, its usage reported."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse

from ctxreuse.context.reported_usage import ReportedTokens, usage_of
from ctxreuse.pipeline.model_gateway import ModelGateway
from ctxreuse.pipeline.prompt_turn import PlannedPrompt


class ModelAnswer:
    """What comes back from the inner model for one prompt."""

    def __init__(self, planned: PlannedPrompt, gateway: ModelGateway) -> None:
        self._began = time.perf_counter()
        self._planned = planned
        self._usage: ReportedTokens | None = None
        self._gateway = gateway

    def whole(self, answer: Any) -> Any:
        """Return a whole answer: a response, or the object that a structured one is."""
        self._read_usage(answer)
        self._tell_usage()
        return answer

    def stream(self, pieces: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield a streamed answer; each piece holds all of it that has come."""
        with closing(pieces):
            for piece in pieces:
                self._read_usage(piece)
                yield piece
        self._tell_usage()

    async def astream(self, pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield a streamed answer as `stream` does."""
        async with aclosing(pieces):
            async for piece in pieces:
                self._read_usage(piece)
                yield piece
        self._tell_usage()

    def _read_usage(self, answer: Any) -> None:
        """Take note of the usage that an answer comes with; in a stream the last one counts."""
        usage = self._gateway.attempt(lambda: reported_usage(answer), lambda: None)
        self._usage = usage or self._usage

    def _tell_usage(self) -> None:
        self._gateway.report_usage(self._planned, self._usage, time.perf_counter() - self._began)


def reported_usage(answer: object) -> ReportedTokens | None:
    """Return what the usage of a model's answer says; None if it has none."""
    if not isinstance(answer, CompletionResponse | ChatResponse):
        return None
    return usage_of(_part(answer.raw, "usage"))


def _part(value: Any, name: str) -> Any:
    """Return a field of what is an object in one model, and a dict in another."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
