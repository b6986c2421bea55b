"""Chat messages in the form of Amazon Bedrock's Converse, where marks are blocks of their own."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]

_SYSTEM: Final = ("system", "developer")
_CONSUMED: Final = ("role", "content", "tool_calls", "tool_call_id", "name")
_MARKS: Final = ("cache_control", "prompt_cache_breakpoint")


def converse_form(messages: Iterable[Mapping[str, Any]]) -> Json:
    """Return chat messages as `messages` and, if there is any, `system`."""
    system: list[Json] = []
    turns: list[Json] = []
    for message in messages:
        role = message.get("role")
        if role in _SYSTEM:
            system += _blocks(message.get("content"))
            continue
        rest = {name: value for name, value in message.items() if name not in _CONSUMED}
        blocks = _blocks(message.get("content"))
        if role == "tool":
            points = [one for one in blocks if "cachePoint" in one]
            said = [one for one in blocks if "cachePoint" not in one]
            result = {"toolUseId": message.get("tool_call_id", ""), "content": said}
            blocks = [{"toolResult": result}, *points[-1:]]  # a result holds none
        blocks += [_tool_use(call) for call in message.get("tool_calls") or ()]
        turn = {"role": "assistant" if role == "assistant" else "user", "content": blocks, **rest}
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1] = {**turns[-1], **turn, "content": turns[-1]["content"] + turn["content"]}
        else:
            turns.append(turn)
    return {"system": system, "messages": turns} if system else {"messages": turns}


def _blocks(content: Any) -> list[Any]:
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else [content]
    blocks: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            blocks += [{"text": part}] if part.strip() else []
        elif isinstance(part, Mapping):
            blocks += _block(part)
        elif part is not None:
            blocks.append(part)
    return blocks


def _block(part: Mapping[str, Any]) -> list[Any]:
    """Return a content part as a block and, if it is marked, the cache point behind it."""
    kind, text = part.get("type"), part.get("text")
    bare = {name: value for name, value in part.items() if name not in _MARKS}
    block: list[Any] = [bare]
    if kind == "text" and isinstance(text, str):
        block = [{"text": text}] if text.strip() else []
    elif kind == "image_url":
        block = [_image(bare)]
    control = part.get("cache_control") or part.get("prompt_cache_breakpoint")
    if not isinstance(control, Mapping):
        return block
    life = {"ttl": control["ttl"]} if control.get("ttl") == "1h" else {}
    return [*block, {"cachePoint": {"type": "default", **life}}]


def _image(part: Json) -> Json:
    """Return an image that stands in the prompt; one at an address stays as it was given."""
    given = part.get("image_url")
    url = str(given.get("url", "")) if isinstance(given, Mapping) else ""
    kind, _, data = url.removeprefix("data:image/").partition(";base64,")
    if not url.startswith("data:image/") or not data:
        return part
    try:
        return {"image": {"format": kind, "source": {"bytes": base64.b64decode(data)}}}
    except (binascii.Error, ValueError):
        return part


def _tool_use(call: Mapping[str, Any]) -> Json:
    name, given = called_function(call)
    return {"toolUse": {"toolUseId": call.get("id", ""), "name": name, "input": given}}


def called_function(call: Mapping[str, Any]) -> tuple[Any, Json]:
    """Return the name and the arguments of a tool call; what is no JSON object is put into one."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    try:
        given = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        given = None
    return function.get("name"), given if isinstance(given, dict) else {"arguments": arguments}
