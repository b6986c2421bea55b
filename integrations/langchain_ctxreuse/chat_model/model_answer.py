"""Answers as the application sees them: with the labels that it gave, and what these stand for."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, closing
from copy import copy
from functools import partial
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import AIMessageChunk, BaseMessage, BaseMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from ctxreuse.adapters.model_gateway import ModelGateway, ReportedTokens
from ctxreuse.adapters.plan_metadata import METADATA_KEY
from ctxreuse.adapters.prompt_labels import PromptLabels, TextStream, renamed
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from ctxreuse.context.checks import reported_count
from langchain_ctxreuse.messages import (
    SPOKEN_FIELDS,
    TextPart,
    text_parts,
    with_renamed_calls,
    with_renamed_field,
    with_text,
)

_Message = TypeVar("_Message", bound=BaseMessage)
_RunManager = TypeVar("_RunManager", CallbackManagerForLLMRun, AsyncCallbackManagerForLLMRun)


class ModelAnswer:
    """What comes back from the inner model for one prompt.

    An internal error lets an answer through as the model gave it. When an answer is whole, the
    planner is told what its usage says.

    Args:
        planned: The prompt as it was sent; None if it was not planned.
        gateway: Counts the errors.
    """

    def __init__(self, planned: PlannedPrompt | None, gateway: ModelGateway) -> None:
        self._began = time.perf_counter()
        self._planned = planned
        self._usage: ReportedTokens | None = None
        self._gateway = gateway
        self._labels = PromptLabels() if planned is None else planned.answer_labels
        self._metadata: Mapping[str, Any] = {} if planned is None else planned.answer_metadata()
        self._told: _Tokens | None = None

    def result(self, result: ChatResult) -> ChatResult:
        """Return a whole answer."""
        for generation in result.generations[:1]:  # each has the usage of all
            self._read_usage(generation)
        self._tell_usage()
        if not self._metadata:
            return result
        return self._gateway.attempt(lambda: self._result(result), lambda: result)

    def _result(self, result: ChatResult) -> ChatResult:
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

    def stream(self, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield a streamed answer: chunks, or events of LangChain's streaming protocol."""
        streamed, is_first, step = _StreamedAnswer(self._labels), bool(self._metadata), None
        with closing(steps):
            for step in steps:
                yield from self._steps(streamed, step, is_first)
                is_first = False
        yield from self._rest(streamed, step)

    async def astream(self, steps: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield a streamed answer as `stream` does."""
        streamed, is_first, step = _StreamedAnswer(self._labels), bool(self._metadata), None
        async with aclosing(steps):
            async for step in steps:
                for one in self._steps(streamed, step, is_first):
                    yield one
                is_first = False
        for one in self._rest(streamed, step):
            yield one

    def _rest(self, streamed: _StreamedAnswer, last: Any) -> list[Any]:
        self._tell_usage()
        if not isinstance(last, ChatGenerationChunk):
            return []
        return self._gateway.attempt(streamed.rest, list)

    def _steps(self, streamed: _StreamedAnswer, step: Any, is_first: bool) -> list[Any]:
        self._read_usage(step)
        return self._gateway.attempt(lambda: self._shown(streamed, step, is_first), lambda: [step])

    def _read_usage(self, answer: ChatGeneration | Any) -> None:
        """Take note of the usage that an answer, or a piece of one, comes with."""
        usage = reported_usage(answer)
        if usage is not None:
            self._usage = usage if self._usage is None else _larger(self._usage, usage)

    def _tell_usage(self) -> None:
        self._gateway.observe(self._planned, self._usage, time.perf_counter() - self._began)

    def _shown(self, streamed: _StreamedAnswer, step: Any, is_first: bool) -> list[Any]:
        if not isinstance(step, ChatGenerationChunk):
            return streamed.events(step)
        message = streamed.chunk(step.message)
        if is_first:  # once: chunks are added up
            message = self._with_metadata(message)
        if message is step.message:
            return [step]
        return [ChatGenerationChunk(message=message, generation_info=step.generation_info)]

    def tell_rest(self) -> None:
        """Tell callbacks what was kept back when the inner model has told all."""
        for tell in self._tokens_kept():
            tell()

    async def atell_rest(self) -> None:
        """Tell callbacks what was kept back, as `tell_rest` does."""
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
    """Return what the usage of an answer says, or of a piece of one; None if it has none.

    Args:
        answer: A generation, a chunk of one, or an event of LangChain's streaming protocol.
    """
    if isinstance(answer, ChatGeneration):
        usage: Any = getattr(answer.message, "usage_metadata", None)
    else:
        usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return None
    details = usage.get("input_token_details")
    return ReportedTokens(
        reported_count(usage.get("input_tokens")),
        reported_count(details.get("cache_read")) if isinstance(details, dict) else None,
        reported_count(usage.get("output_tokens")),
    )


def _larger(one: ReportedTokens, other: ReportedTokens) -> ReportedTokens:
    """Return the larger of each two counts: models tell them at the beginning, the end, or both."""
    pairs = zip(one, other, strict=True)
    return ReportedTokens(*[b if a is None else a if b is None else max(a, b) for a, b in pairs])


class _Tokens:
    """Tells callbacks each token that an inner model tells; the tokens of a call come in order.

    Args:
        run_manager: Who tells them.
        labels: The labels of the prompt.
        gateway: Counts errors.
    """

    def __init__(self, run_manager: Any, labels: PromptLabels, gateway: ModelGateway) -> None:
        self._tell = run_manager.on_llm_new_token
        self._streamed = _StreamedAnswer(labels)
        self._text = TextStream(labels)
        self._gateway = gateway

    def __call__(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> Any:
        token, chunk = self._gateway.attempt(
            lambda: self._renamed(token, chunk), lambda: (token, chunk)
        )
        return self._tell(token, chunk=chunk, **kwargs)

    def rest(self) -> list[Callable[[], Any]]:
        """Return how to tell what was kept back when the last token has come."""
        chunks = [partial(self._tell, one.text, chunk=one) for one in self._streamed.rest()]
        text = self._text.flush()
        return [*chunks, partial(self._tell, text)] if text else list(chunks)

    def _renamed(self, token: Any, chunk: Any) -> tuple[Any, Any]:
        if isinstance(chunk, ChatGenerationChunk):
            message = self._streamed.chunk(chunk.message)
            chunk = ChatGenerationChunk(message=message, generation_info=chunk.generation_info)
            return (chunk.text if isinstance(token, str) else message.content), chunk
        return (self._text.feed(token) if isinstance(token, str) else token), chunk


class _StreamedAnswer:
    """Renames the labels in an answer that comes in pieces.

    Args:
        labels: The labels of the prompt.
    """

    def __init__(self, labels: PromptLabels) -> None:
        self._labels = labels
        self._texts: dict[tuple[str, Any], TextStream] = {}
        self._in_blocks = False

    def _fed(self, kind: str, index: Any, text: Any) -> Any:
        """Return what can be shown of a text; other values are whole."""
        if not isinstance(text, str):
            return renamed(text, self._labels.to_given)
        if (kind, index) not in self._texts:
            self._texts[kind, index] = TextStream(self._labels)
        return self._texts[kind, index].feed(text)

    def chunk(self, message: BaseMessageChunk) -> BaseMessageChunk:
        """Return a chunk of the answer with what can be shown now."""
        if not self._labels.renames:
            return message
        update: dict[str, Any] = {}
        if isinstance(message.content, str):
            update["content"] = self._fed("", None, message.content)
        else:
            self._in_blocks = True
            update["content"] = [self._block(one) for one in message.content]
        calls = getattr(message, "tool_call_chunks", None)
        if calls:
            update["tool_call_chunks"] = [
                {**one, "args": self._fed("call", one.get("index"), one["args"])} for one in calls
            ]
        beside = {
            name: self._fed(f"beside {name}", None, value)
            for name, value in message.additional_kwargs.items()
            if name == "parsed"
        }
        update["additional_kwargs"] = message.additional_kwargs | beside | self._raw(message)
        if getattr(message, "chunk_position", None) == "last":
            self._flush_into(update)
        return _remade(message, update)

    def _block(self, block: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(block, str):
            return str(self._fed("", None, block))
        kind, index = block.get("type", ""), block.get("index")
        return with_renamed_field(block, lambda value: self._fed(kind, index, value))

    def _raw(self, message: BaseMessage) -> dict[str, Any]:
        """Return the tool calls that a chunk repeats as the server sent them."""
        raw = message.additional_kwargs.get("tool_calls")
        if not isinstance(raw, list):
            return {}
        return {"tool_calls": [self._raw_call(one) for one in raw]}

    def _raw_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = self._fed("raw", call.get("index"), function["arguments"])
        return {**call, "function": {**function, "arguments": arguments}}

    def rest(self) -> list[ChatGenerationChunk]:
        """Return what was kept back when the last chunk has come, as one more chunk or none."""
        update: dict[str, Any] = {"content": [] if self._in_blocks else ""}
        if not self._flush_into(update):
            return []
        return [ChatGenerationChunk(message=AIMessageChunk(**update))]

    def _flush_into(self, update: dict[str, Any]) -> bool:
        """Add what was kept back to a chunk; return whether there was anything."""
        kept = {key: rest for key, text in self._texts.items() if (rest := text.flush())}
        for (kind, index), rest in kept.items():
            content = update["content"]
            if kind == "call":
                one = {"name": None, "args": rest, "id": None, "index": index}
                update["tool_call_chunks"] = [*update.get("tool_call_chunks", []), one]
            elif isinstance(content, str) and kind == "":
                update["content"] = content + rest
            elif kind == "" or kind in SPOKEN_FIELDS:
                block = rest if kind == "" else {"type": kind, SPOKEN_FIELDS[kind]: rest}
                if isinstance(block, dict) and index is not None:
                    block["index"] = index
                update["content"] = [*([content] if isinstance(content, str) else content), block]
        return bool(kept)

    def events(self, event: Any) -> list[Any]:
        """Return an event of the streaming protocol with what can be shown now."""
        if not self._labels.renames or not isinstance(event, dict):
            return [event]
        index = event.get("index")
        if event.get("event") == "content-block-delta":
            delta = event.get("delta") or {}
            name = {"text-delta": "text", "tool-call-delta": "args"}.get(delta.get("type", ""))
            if name is None or not isinstance(delta.get(name), str):
                return [event]
            shown = self._fed(name, index, delta[name])
            return [{**event, "delta": {**delta, name: shown}}] if shown else []
        if event.get("event") != "content-block-finish":
            return [event]
        kept = [
            {"event": "content-block-delta", "index": index, "delta": {"type": kind, name: rest}}
            for kind, name in (("text-delta", "text"), ("tool-call-delta", "args"))
            if (name, index) in self._texts and (rest := self._texts[name, index].flush())
        ]
        content = with_renamed_field(
            event.get("content") or {}, lambda value: renamed(value, self._labels.to_given)
        )
        return [*kept, {**event, "content": content}]


def _remade(message: BaseMessageChunk, update: Mapping[str, Any]) -> BaseMessageChunk:
    """Return a copy of a chunk, in which what follows from its fields follows anew."""
    fields = {name: getattr(message, name) for name in message.model_fields_set}
    if "tool_call_chunks" in update:  # tool calls are parsed from these
        fields = {name: one for name, one in fields.items() if name not in _PARSED}
    return type(message)(**{**fields, **update})


_PARSED = ("tool_calls", "invalid_tool_calls")
