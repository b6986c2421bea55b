"""Answers as the application sees them: with the labels that it gave, and what these stand for."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    TextBlock,
    ToolCallBlock,
)

from ctxreuse.adapters.model_gateway import ModelGateway
from ctxreuse.adapters.plan_metadata import METADATA_KEY
from ctxreuse.adapters.prompt_labels import PromptLabels, TextStream, renamed, renamed_calls
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from ctxreuse.context.reported_usage import ReportedTokens, usage_of


class ModelAnswer:
    """What comes back from the inner model for one prompt."""

    def __init__(self, planned: PlannedPrompt, gateway: ModelGateway) -> None:
        self._began = time.perf_counter()
        self._planned = planned
        self._usage: ReportedTokens | None = None
        self._gateway = gateway
        self._labels = planned.answer_labels
        self._metadata: Mapping[str, Any] = planned.answer_metadata()

    def whole(self, answer: Any) -> Any:
        """Return a whole answer: a response, or the object that a structured one is."""
        self._read_usage(answer)
        self._tell_usage()
        return self._whole(answer)

    def _whole(self, answer: Any) -> Any:
        if not self._metadata:
            return answer
        return self._gateway.attempt(
            lambda: self._shown(answer, self._labels.to_given), lambda: answer
        )

    def stream(self, pieces: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield a streamed answer; each piece holds all of it that has come."""
        so_far, piece = _AnswerSoFar(self._labels), None
        with closing(pieces):
            try:
                for piece in pieces:
                    yield self._piece(piece, so_far)
            except Exception:
                yield from self._rest(piece, so_far)
                raise
        self._tell_usage()
        yield from self._rest(piece, so_far)

    async def astream(self, pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield a streamed answer as `stream` does."""
        so_far, piece = _AnswerSoFar(self._labels), None
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    yield self._piece(piece, so_far)
            except Exception:
                for rest in self._rest(piece, so_far):
                    yield rest
                raise
        self._tell_usage()
        for rest in self._rest(piece, so_far):
            yield rest

    def _read_usage(self, answer: Any) -> None:
        """Take note of the usage that an answer comes with; in a stream the last one counts."""
        usage = self._gateway.attempt(lambda: reported_usage(answer), lambda: None)
        self._usage = usage or self._usage

    def _tell_usage(self) -> None:
        self._gateway.report_usage(self._planned, self._usage, time.perf_counter() - self._began)

    def _piece(self, piece: Any, so_far: _AnswerSoFar) -> Any:
        self._read_usage(piece)
        if not self._metadata:
            return piece
        return self._gateway.attempt(lambda: self._so_far(piece, so_far), lambda: piece)

    def _so_far(self, piece: Any, so_far: _AnswerSoFar) -> Any:
        so_far.begin_piece()
        shown = self._shown(piece, so_far.renamed)
        # a user's own object may have a field of this name
        if isinstance(piece, CompletionResponse | ChatResponse) and piece.delta is not None:
            shown = shown.model_copy(update={"delta": so_far.deltas.feed(piece.delta)})
        return shown

    def _rest(self, last: Any, so_far: _AnswerSoFar) -> Iterator[Any]:
        """Yield the whole answer once more if its end was kept back."""
        if so_far.keeps_back:
            yield self._whole(last).model_copy(update={"delta": so_far.deltas.flush()})

    def _shown(self, answer: Any, rename: Callable[[str], str]) -> Any:
        if isinstance(answer, CompletionResponse):
            update: dict[str, Any] = {"text": rename(answer.text)}
            kwargs = _with_renamed_calls(answer.additional_kwargs, rename)
        elif isinstance(answer, ChatResponse):
            update = {"message": with_renamed_labels(answer.message, rename)}
            kwargs = answer.additional_kwargs
        else:
            return renamed(answer, self._labels.to_given)
        update["additional_kwargs"] = {**kwargs, METADATA_KEY: self._metadata}
        return answer.model_copy(update=update)


class _AnswerSoFar:
    """Renames the labels in an answer whose pieces each hold all of it that has come."""

    def __init__(self, labels: PromptLabels) -> None:
        self.deltas = TextStream(labels)
        self._labels = labels
        self._texts: list[_GrowingText] = []
        self._place = 0

    @property
    def keeps_back(self) -> bool:
        """Whether the last piece is not shown in whole."""
        texts = self._texts[: self._place]
        return self.deltas.keeps_back or any(text.stream.keeps_back for text in texts)

    def begin_piece(self) -> None:
        """Begin with the first text of a piece."""
        self._place = 0

    def renamed(self, text: str) -> str:
        """Return what can be shown of the next text of a piece."""
        place = self._place
        self._place += 1
        before = self._texts[place] if place < len(self._texts) else None
        if before is not None and text == before.given:
            return before.shown
        if before is None or not text.startswith(before.given):
            before = _GrowingText("", "", TextStream(self._labels))
        added = before.stream.feed(text[len(before.given) :])
        self._texts[place : place + 1] = [_GrowingText(text, before.shown + added, before.stream)]
        return self._texts[place].shown


class _GrowingText(NamedTuple):
    """A text that grows: as it came, as it was shown, and what renames the labels in it."""

    given: str
    shown: str
    stream: TextStream


def reported_usage(answer: object) -> ReportedTokens | None:
    """Return what the usage of a model's answer says; None if it has none."""
    if not isinstance(answer, CompletionResponse | ChatResponse):
        return None
    return usage_of(_part(answer.raw, "usage"))


def _part(value: Any, name: str) -> Any:
    """Return a field of what is an object in one model, and a dict in another."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def with_renamed_labels(
    message: ChatMessage, rename: Callable[[str], str], only_calls: bool = False
) -> ChatMessage:
    """Return a message with the labels renamed that the model names in it; signed words stay."""
    blocks = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            arguments = renamed(block.tool_kwargs, rename)
            if arguments is not block.tool_kwargs:
                block = block.model_copy(update={"tool_kwargs": arguments})
        elif isinstance(block, TextBlock) and not only_calls:
            block = block.model_copy(update={"text": rename(block.text)})
        blocks.append(block)
    kwargs = _with_renamed_calls(message.additional_kwargs, rename)
    if kwargs is message.additional_kwargs and all(
        one is other for one, other in zip(blocks, message.blocks, strict=True)
    ):
        return message
    return message.model_copy(update={"blocks": blocks, "additional_kwargs": kwargs})


def _with_renamed_calls(kwargs: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return what stands beside an answer with the labels in its tool calls renamed."""
    calls = kwargs.get("tool_calls")
    new = renamed_calls(calls, rename)
    return kwargs if new is calls else {**kwargs, "tool_calls": new}
