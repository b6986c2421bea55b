"""An answer that comes in pieces, with the labels that the application gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from langchain_core.messages import AIMessageChunk, BaseMessageChunk
from langchain_core.outputs import ChatGenerationChunk

from ctxreuse.adapters.prompt_labels import PromptLabels, TextStream, renamed
from langchain_ctxreuse.messages import SPOKEN_FIELDS, with_renamed_field

_CALL, _RAW_CALL, _FUNCTION = "call beside", "raw call beside", "function call beside"
"""Where tool calls stand that are no part of the content."""
_TEXTS = ("", "text", "output_text")
"""Types of content that LangChain reads as one text."""
_EVENT_FIELDS = {"text-delta": "text", "tool-call-delta": "args"}
"""By the type of what an event adds, the field that holds it."""
_PARSED = ("tool_calls", "invalid_tool_calls")


class _Place(NamedTuple):
    """Where in an answer a text goes on from piece to piece."""

    kind: str
    shared_index: int | str | None = None
    call: str | None = None


class AnswerStream:
    """Renames the labels in an answer that comes in pieces."""

    def __init__(self, labels: PromptLabels) -> None:
        self._labels = labels
        self._texts: dict[_Place, TextStream] = {}
        self._first_calls: dict[tuple[str, int | str], str] = {}
        self._text: _Place | None = None
        self._in_blocks = False

    def _fed(self, place: _Place, text: Any) -> Any:
        """Return what can be shown of a text; other values are whole."""
        if not isinstance(text, str):
            return renamed(text, self._labels.to_given)
        if place not in self._texts:
            self._texts[place] = TextStream(self._labels)
        return self._texts[place].feed(text)

    def chunk(self, message: BaseMessageChunk) -> BaseMessageChunk:
        """Return a chunk of the answer with what can be shown now."""
        if not self._labels.renames:
            return message
        update: dict[str, Any] = {"content": self._content(message.content)}
        calls = getattr(message, "tool_call_chunks", None)
        if calls:
            update["tool_call_chunks"] = [
                {**one, "args": self._arguments(_CALL, one, one["args"])} for one in calls
            ]
        update["additional_kwargs"] = self._beside(message.additional_kwargs)
        if getattr(message, "chunk_position", None) == "last":
            self._flush_into(update)
        return _remade(message, update)

    def _content(self, content: str | list[Any]) -> Any:
        if isinstance(content, str):
            place = _Place("")
            behind = self._kept_before(place) if content else []
            text = self._fed(place, content)
            return [*behind, text] if behind else text
        self._in_blocks = True
        return [part for one in content for part in self._blocks(one)]

    def _blocks(self, block: str | dict[str, Any]) -> list[str | dict[str, Any]]:
        """Return a part of the content, behind what was kept back of the text before it."""
        if isinstance(block, str):
            place = _Place("")
            return [*self._kept_before(place), self._fed(place, block)]
        place = _Place(_as_text(block.get("type")), _as_index(block.get("index")))
        if place.kind not in _TEXTS and place.shared_index is None:  # a call that is whole
            return [with_renamed_field(block, lambda value: renamed(value, self._labels.to_given))]
        behind = self._kept_before(place) if place.kind in _TEXTS else []
        return [*behind, with_renamed_field(block, lambda value: self._fed(place, value))]

    def _kept_before(self, place: _Place) -> list[str | dict[str, Any]]:
        """Return what was kept back of the text that ends where another one goes on."""
        before, self._text = self._text, place
        text = None if before is None or before == place else self._texts.get(before)
        rest = "" if text is None else text.flush()
        return [_part(before, rest)] if before is not None and rest else []

    def _arguments(self, kind: str, call: Mapping[str, Any], arguments: Any) -> Any:
        """Return what can be shown of a tool call's arguments."""
        index, call_id = call.get("index"), _as_text(call.get("id"))
        if not isinstance(index, int):
            return renamed(arguments, self._labels.to_given)
        first = self._first_calls.setdefault((kind, index), call_id) if call_id else call_id
        return self._fed(_Place(kind, index, None if call_id == first else call_id), arguments)

    def _beside(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a chunk holds beside its content: calls as the server sent them, and more."""
        shown = dict(kwargs)
        for name in ("parsed", "refusal"):
            if name in kwargs:
                shown[name] = renamed(kwargs[name], self._labels.to_given)
        calls, function = kwargs.get("tool_calls"), kwargs.get("function_call")
        if isinstance(calls, list):
            shown["tool_calls"] = [self._raw_call(one) for one in calls]
        if isinstance(function, dict) and "arguments" in function:
            arguments = self._fed(_Place(_FUNCTION), function["arguments"])
            shown["function_call"] = {**function, "arguments": arguments}
        return shown

    def _raw_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = self._arguments(_RAW_CALL, call, function["arguments"])
        return {**call, "function": {**function, "arguments": arguments}}

    def rest(self, last: Any) -> list[Any]:
        """Return what was kept back when the last piece has come, as more pieces of its kind."""
        if isinstance(last, ChatGenerationChunk):
            return list(self.rest_chunks())
        return [one for place in self._texts for one in self._kept_event(place)]

    def rest_chunks(self) -> list[ChatGenerationChunk]:
        """Return what was kept back when the last chunk has come, as one more chunk or none."""
        update: dict[str, Any] = {"content": [] if self._in_blocks else ""}
        if not self._flush_into(update):
            return []
        return [ChatGenerationChunk(message=AIMessageChunk(**update))]

    def _flush_into(self, update: dict[str, Any]) -> bool:
        """Add what was kept back to a chunk; return whether there was anything."""
        kept = {place: rest for place, text in self._texts.items() if (rest := text.flush())}
        if not kept:
            return False
        content, kwargs = update["content"], dict(update.get("additional_kwargs", ()))
        parts: list[Any] = []
        calls, raw_calls = [], []
        for place, rest in kept.items():
            if place.kind == _CALL:
                one = {"name": None, "args": rest, "id": place.call, "index": place.shared_index}
                calls.append(one)
            elif place.kind == _RAW_CALL:
                function = {"arguments": rest}
                raw_calls.append(
                    {"index": place.shared_index, "id": place.call, "function": function}
                )
            elif place.kind == _FUNCTION:
                function = kwargs.get("function_call", {})
                arguments = function.get("arguments", "") + rest
                kwargs["function_call"] = {**function, "arguments": arguments}
            elif place.kind == "" and isinstance(content, str):
                content += rest
            else:
                parts.append(_part(place, rest))
        if parts:
            content = [*([content] if isinstance(content, str) else content), *parts]
        if calls:
            update["tool_call_chunks"] = [*update.get("tool_call_chunks", ()), *calls]
        if raw_calls:
            kwargs["tool_calls"] = [*kwargs.get("tool_calls", ()), *raw_calls]
        update.update(content=content, additional_kwargs=kwargs)
        return True

    def events(self, event: Any) -> list[Any]:
        """Return an event of the streaming protocol with what can be shown now."""
        if not self._labels.renames or not isinstance(event, dict):
            return [event]
        index = event.get("index")
        if event.get("event") == "content-block-delta":
            delta = event.get("delta") or {}
            name = _EVENT_FIELDS.get(delta.get("type", ""))
            if name is None or not isinstance(delta.get(name), str):
                return [event]
            shown = self._fed(_Place(delta["type"], _as_index(index)), delta[name])
            return [{**event, "delta": {**delta, name: shown}}] if shown else []
        if event.get("event") != "content-block-finish":
            return [event]
        places = [_Place(kind, _as_index(index)) for kind in _EVENT_FIELDS]
        kept = [one for place in places for one in self._kept_event(place)]
        content = with_renamed_field(
            event.get("content") or {}, lambda value: renamed(value, self._labels.to_given)
        )
        return [*kept, {**event, "content": content}]

    def _kept_event(self, place: _Place) -> list[dict[str, Any]]:
        """Return what was kept back of a text, as an event of the streaming protocol or none."""
        rest = self._texts[place].flush() if place in self._texts else ""
        if not rest:
            return []
        delta = {"type": place.kind, _EVENT_FIELDS[place.kind]: rest}
        return [{"event": "content-block-delta", "index": place.shared_index, "delta": delta}]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _as_index(value: Any) -> int | str | None:
    """Return the index of a block; None for what a server may send instead."""
    return value if isinstance(value, (int, str)) else None


def _part(place: _Place, text: str) -> str | dict[str, Any]:
    """Return a text as a part of the content."""
    if not place.kind:
        return text
    at = {} if place.shared_index is None else {"index": place.shared_index}
    return {"type": place.kind, SPOKEN_FIELDS[place.kind]: text, **at}


def _remade(message: BaseMessageChunk, update: Mapping[str, Any]) -> BaseMessageChunk:
    """Return a copy of a chunk, in which what follows from its fields follows anew."""
    calls = update.get("tool_call_chunks")
    if not calls:
        return message.model_copy(update=update)
    parsed = AIMessageChunk(
        content=update["content"],
        tool_call_chunks=calls,
        response_metadata=message.response_metadata,
        chunk_position=getattr(message, "chunk_position", None),
    )
    follows = {name: getattr(parsed, name) for name in ("content", *_PARSED)}
    return message.model_copy(update={**update, **follows})
