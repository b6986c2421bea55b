"""Answers as the application sees them: with the labels that it gave, and what these stand for."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, closing
from copy import copy
from functools import partial
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from ctxreuse.adapters.model_gateway import ModelGateway
from ctxreuse.adapters.plan_metadata import METADATA_KEY
from ctxreuse.adapters.prompt_labels import PromptLabels, TextStream
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from ctxreuse.context.checks import reported_count
from ctxreuse.context.fork_safety import cached_property
from ctxreuse.context.reported_usage import ReportedTokens, written_by_life
from langchain_ctxreuse.chat_model.answer_stream import AnswerStream
from langchain_ctxreuse.messages import TextPart, text_parts, with_renamed_calls, with_text

_Message = TypeVar("_Message", bound=BaseMessage)
_Found = TypeVar("_Found")
_RunManager = TypeVar("_RunManager", CallbackManagerForLLMRun, AsyncCallbackManagerForLLMRun)


class ModelAnswer:
    """What comes back from the inner model for one prompt."""

    def __init__(self, planned: PlannedPrompt | None, gateway: ModelGateway) -> None:
        self._began = time.perf_counter()
        self._planned = planned
        self._usage: ReportedTokens | None = None
        self._gateway = gateway
        self._labels = PromptLabels() if planned is None else planned.answer_labels
        self._told: _Tokens | None = None

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        """What the answer carries; asked for when it has come, not while the engine could work."""
        return {} if self._planned is None else self._planned.answer_metadata()

    def result(self, result: ChatResult) -> ChatResult:
        """Return a whole answer."""
        for generation in result.generations[:1]:  # each has the usage of all
            self._read_usage(generation)
        self._tell_usage()
        return self._gateway.attempt(lambda: self._result(result), lambda: result)

    def _result(self, result: ChatResult) -> ChatResult:
        if not self._metadata:
            return result
        generations = [self._generation(one) for one in result.generations]
        return result.model_copy(update={"generations": generations})

    def _generation(self, generation: ChatGeneration) -> ChatGeneration:
        message = self._whole(generation.message)
        if not self._labels.renames:  # the same text, so nothing has to be made anew
            return generation.model_copy(update={"message": message})
        return type(generation)(message=message, generation_info=generation.generation_info)

    def _whole(self, message: _Message) -> _Message:
        if self._labels.renames:
            for text, part in text_parts(message):
                message = with_text(message, TextPart(self._labels.to_given(text), part))
            message = with_renamed_calls(message, self._labels.to_given)
        return self._with_metadata(message)

    def _with_metadata(self, message: _Message) -> _Message:
        metadata = {**message.response_metadata, METADATA_KEY: self._metadata}
        return message.model_copy(update={"response_metadata": metadata})

    def told(self, generate: Callable[[], _Found]) -> _Found:
        """Return what the inner model returns; callbacks know all that it has said by then."""
        try:
            found = generate()
        except Exception:
            self._tell_rest()
            raise
        self._tell_rest()
        return found

    async def atold(self, generated: Awaitable[_Found]) -> _Found:
        """Return what the inner model returns, as `told` does."""
        try:
            found = await generated
        except Exception:
            await self._atell_rest()
            raise
        await self._atell_rest()
        return found

    def stream(self, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield a streamed answer: chunks, or events of LangChain's streaming protocol."""
        streamed, is_first, step = AnswerStream(self._labels), True, None
        with closing(steps):
            try:
                for step in steps:
                    yield from self._steps(streamed, step, is_first)
                    is_first = False
            except Exception:
                self._tell_rest()
                yield from self._rest(streamed, step)
                raise
        self._tell_usage()
        self._tell_rest()
        yield from self._rest(streamed, step)

    async def astream(self, steps: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield a streamed answer as `stream` does."""
        streamed, is_first, step = AnswerStream(self._labels), True, None
        async with aclosing(steps):
            try:
                async for step in steps:
                    for one in self._steps(streamed, step, is_first):
                        yield one
                    is_first = False
            except Exception:
                await self._atell_rest()
                for one in self._rest(streamed, step):
                    yield one
                raise
        self._tell_usage()
        await self._atell_rest()
        for one in self._rest(streamed, step):
            yield one

    def _rest(self, streamed: AnswerStream, last: Any) -> list[Any]:
        return self._gateway.attempt(lambda: streamed.rest(last), list)

    def _steps(self, streamed: AnswerStream, step: Any, is_first: bool) -> list[Any]:
        self._read_usage(step)
        return self._gateway.attempt(lambda: self._shown(streamed, step, is_first), lambda: [step])

    def _read_usage(self, answer: ChatGeneration | Any) -> None:
        """Take note of the usage that an answer, or a piece of one, comes with."""
        usage = reported_usage(answer)
        if usage is not None:
            self._usage = usage if self._usage is None else _larger(self._usage, usage)

    def _tell_usage(self) -> None:
        self._gateway.report_usage(self._planned, self._usage, time.perf_counter() - self._began)

    def _shown(self, streamed: AnswerStream, step: Any, is_first: bool) -> list[Any]:
        if not isinstance(step, ChatGenerationChunk):
            return streamed.events(step)
        message = streamed.chunk(step.message)
        if is_first and self._metadata:  # once: chunks are added up
            message = self._with_metadata(message)
        if message is step.message:
            return [step]
        return [ChatGenerationChunk(message=message, generation_info=step.generation_info)]

    def _tell_rest(self) -> None:
        """Tell callbacks what was kept back when the inner model has told all."""
        for tell in self._tokens_kept():
            tell()

    async def _atell_rest(self) -> None:
        """Tell callbacks what was kept back, as `_tell_rest` does."""
        for tell in self._tokens_kept():
            await tell()

    def _tokens_kept(self) -> list[Callable[[], Any]]:
        return [] if self._told is None else self._gateway.attempt(self._told.rest, list)

    def tokens(self, run_manager: _RunManager | None) -> _RunManager | None:
        """Return a run manager that tells callbacks the tokens as the application sees them."""
        if run_manager is None or not self._labels.renames:
            return run_manager
        told: Any = copy(run_manager)
        told.on_llm_new_token = self._told = _Tokens(run_manager, self._labels, self._gateway)
        return told  # type: ignore[no-any-return]


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


class _Tokens:
    """Tells callbacks each token that an inner model tells; the tokens of a call come in order."""

    def __init__(self, run_manager: Any, labels: PromptLabels, gateway: ModelGateway) -> None:
        self._tell = run_manager.on_llm_new_token
        self._streamed = AnswerStream(labels)
        self._text = TextStream(labels)
        self._gateway = gateway

    def __call__(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> Any:
        token, chunk = self._gateway.attempt(
            lambda: self._renamed(token, chunk), lambda: (token, chunk)
        )
        return self._tell(token, chunk=chunk, **kwargs)

    def rest(self) -> list[Callable[[], Any]]:
        """Return how to tell what was kept back when the last token has come."""
        chunks = [partial(self._tell, one.text, chunk=one) for one in self._streamed.rest_chunks()]
        text = self._text.flush()
        return [*chunks, partial(self._tell, text)] if text else list(chunks)

    def _renamed(self, token: Any, chunk: Any) -> tuple[Any, Any]:
        if isinstance(chunk, ChatGenerationChunk):
            message = self._streamed.chunk(chunk.message)
            chunk = ChatGenerationChunk(message=message, generation_info=chunk.generation_info)
            return (chunk.text if isinstance(token, str) else message.content), chunk
        return (self._text.feed(token) if isinstance(token, str) else token), chunk
