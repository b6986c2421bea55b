"""Chat messages in the forms of the providers' protocols, with content parts and marks.

Content parts are written in OpenAI's form and translated; what a form has no word for stays.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from ctxreuse.context.checks import checked_choice, checked_kind, checked_list
from ctxreuse.context.content_parts import ContentPart
from ctxreuse.errors import InvalidRequestError
from ctxreuse.rules.cache_marks import (
    MarkField,
    Path,
    cache_fields,
    fitting_life,
    is_cache_point,
    life_at,
    mark_field,
    mark_value,
    marks_in,
    room_for_marks,
    without_mark,
)
from ctxreuse.rules.cache_rules import CacheRules

PromptForm: TypeAlias = Literal["openai", "responses", "anthropic", "bedrock"]
"""The protocol whose words are used."""

Json: TypeAlias = dict[str, Any]

_MARK_FIELDS: Mapping[PromptForm, MarkField] = {
    "responses": "prompt_cache_breakpoint",
    "anthropic": "cache_control",
    "bedrock": "cachePoint",
}
_SYSTEM = ("system", "developer")
_CONSUMED = ("role", "content", "tool_calls", "tool_call_id")
_MARKS = ("cache_control", "prompt_cache_breakpoint")
_INPUTS = {"image_url": "input_image", "file": "input_file"}
"""How OpenAI's Responses API calls content parts that hold more than a text."""


def marked_prompt(
    messages: Sequence[Mapping[str, Any]],
    profile: CacheRules,
    field: MarkField,
    tools: Sequence[Any] = (),
    *,
    cites: bool = False,
) -> tuple[list[Json], list[Any]]:
    """Return messages and tools in OpenAI's form with as many marks as a provider takes.

    The user's marks come first, but for those at ends of turns that are past. Of ours, spare ones
    go first, then those behind the first, which may be read; the last holds those before it.
    """
    taken = [(-1, path) for path in marks_in(list(tools))]
    taken += [(n, path) for n, message in enumerate(messages) for path in marks_in(message)]
    gone: list[tuple[int, Path]] = []
    ours = [
        (number, position)
        for number, message in enumerate(messages)
        for position, part in enumerate(content_list(message))
        if isinstance(part, ContentPart)
        and part.is_marked
        and not any(map(is_cache_point, content_list(message)[position + 1 : position + 2]))
    ]
    firm = [at for at in ours if not content_list(messages[at[0]])[at[1]].is_spare]
    passed = _passed_ends(messages)
    while firm and len(taken) + len(firm) > profile.marks and any(at in passed for at in taken):
        gone.append(next(at for at in taken if at in passed))
        taken.remove(gone[-1])
    room = room_for_marks(profile, len(taken), len(firm))
    left = len(firm) - room
    kept = [*firm[:1], *firm[left + 1 :]] if room > 1 else firm[left:]
    spare = [at for at in ours if at not in firm][: max(0, profile.marks - len(taken) - len(firm))]
    kept = sorted([*kept, *spare])
    life = ""
    if kept:
        lives = [
            ((n, _position(path)), life_at(list(tools) if n < 0 else messages[n], path))
            for n, path in taken
        ]
        before = [one for place, one in lives if place < kept[0]]
        life = fitting_life(profile, before, [one for place, one in lives if place > kept[-1]])
    written: list[Json] = []
    for number, message in enumerate(messages):
        content = [
            one
            for position, part in enumerate(content_list(message))
            for one in (
                _as_parts(part, (number, position) in kept, field, life, cites)
                if isinstance(part, ContentPart)
                else [part]
            )
        ]
        written.append({**message, "content": content} if content else dict(message))
    own_tools = list(tools)
    too_many = max(0, len(taken) - profile.marks) if profile.has_marks else 0
    for number, path in sorted(
        [*gone, *taken[:too_many]], reverse=True
    ):  # a block may go with its mark
        if number < 0:
            own_tools = without_mark(own_tools, path)
        else:
            written[number] = without_mark(written[number], path)
    return written, own_tools


def prompt_body(
    messages: Sequence[Mapping[str, Any]],
    profile: CacheRules,
    form: PromptForm,
    tools: Sequence[Any] = (),
    *,
    citations: bool = False,
    key: str = "",
) -> Json:
    """Return messages and tools as the fields of a request's body in a protocol, with marks."""
    checked_choice("form", form, get_args(PromptForm))
    checked_kind("citations", citations, bool, "True or False")
    if citations and form != "anthropic":
        raise InvalidRequestError(
            'citations need form="anthropic"; other protocols have no search results'
        )
    field = _MARK_FIELDS.get(form) or mark_field(profile)
    tools = checked_list("tools", tools, "a list of tools")
    written, own_tools = marked_prompt(messages, profile, field, tools, cites=citations)
    body = as_form(written, form)
    if tools and form == "bedrock":
        body["toolConfig"] = {"tools": own_tools}
    elif tools:
        body["tools"] = own_tools
    if form in ("openai", "responses"):
        body |= cache_fields(profile, field, key)
    return body


def cut_content(content: Any, parts: Mapping[int | None, Sequence[ContentPart]]) -> Any:
    """Return a message's content with its texts in parts, by position in the list or None."""
    wanted = {at: own for at, own in parts.items() if len(own) > 1 or own[0].is_marked}
    if not wanted:
        return content
    if isinstance(content, str):
        return list(wanted[None]) if None in wanted else content
    cut: list[Any] = []
    for position, one in enumerate(content):
        own = list(wanted.get(position, ()))
        if not own:
            cut.append(one)
        elif isinstance(one, Mapping) and set(one) != {"type", "text"}:
            last: Any = {**one, "text": own[-1].text}
            if own[-1].is_marked and next(marks_in(last), None) is None:
                last = own[-1]._replace(beside=last)
            cut += [*own[:-1], last]
        else:
            cut += own
    return cut


def as_form(messages: Iterable[Json], form: PromptForm) -> Json:
    """Return chat messages as the fields of a request's body in a protocol."""
    if form == "bedrock":
        return converse_form(messages)
    if form == "openai":
        return {"messages": list(messages)}
    if form == "responses":
        return {"input": [item for message in messages for item in _response_items(message)]}
    system: list[Json] = []
    turns: list[Json] = []
    for message in messages:
        role = message.get("role")
        if role in _SYSTEM:
            system += _anthropic_parts(message)
        elif role == "tool" and turns and _holds_results(turns[-1]):  # one turn holds those of all
            turns[-1]["content"] += _anthropic_turn(message)["content"]
        else:
            turns.append(_anthropic_turn(message))
    return {"system": system, "messages": turns} if system else {"messages": turns}


def mark_opening(messages: list[Json], blocks: int) -> None:
    """Mark the first turn behind `blocks` of its parts, in place; others may keep that prefix."""
    first: Json = next((one for one in messages if one.get("role") == "user"), {})
    parts = content_list(first)
    if not 0 < blocks < len(parts) or not _is_plain_text(parts[blocks - 1]):
        return
    marked = ContentPart(parts[blocks - 1]["text"]).as_spare()
    first["content"] = [*parts[: blocks - 1], marked, *parts[blocks:]]


def mark_turn_before(messages: list[Json]) -> None:
    """Mark the end of the latest answered turn, in place: it was written when it was sent."""
    answered = next(
        (n for n in range(len(messages) - 1, -1, -1) if messages[n].get("role") == "assistant"), 0
    )
    for message in reversed(messages[:answered]):
        if message.get("role") == "assistant":
            return
        content = message.get("content")
        parts = content_list(message)
        if isinstance(content, str) and content.strip():
            parts = [{"type": "text", "text": content}]
        if message.get("role") != "user" or not parts:
            continue
        if _is_plain_text(parts[-1]):
            text = parts[-1]["text"]
            marked = ContentPart(text, is_marked=bool(text.strip()))
            message["content"] = [*parts[:-1], marked]
        return


def content_list(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the parts of a message's content; none where it is a text."""
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def _is_plain_text(part: Any) -> bool:
    is_plain = isinstance(part, Mapping) and set(part) == {"type", "text"}
    return is_plain and part["type"] == "text" and isinstance(part["text"], str)


def _passed_ends(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, Path]]:
    """Return where turns end that later ones have left behind."""
    roles = [message.get("role") for message in messages]
    answered = [
        number
        for number, following in enumerate(roles[1:])
        if roles[number] == "user" and following == "assistant"
    ]
    return [
        (number, ("content", len(content_list(messages[number])) - 1)) for number in answered[:-1]
    ]


def _position(path: Path) -> int:
    """Return which part of a content a mark stands in; -1 for one beside it."""
    return path[1] if path[:1] == ("content",) and isinstance(path[1], int) else -1


def _as_parts(
    part: ContentPart, is_marked: bool, field: MarkField, life: str, cites: bool
) -> list[Json]:
    mark: Json = {field: mark_value(field, life)} if is_marked else {}
    block = part.block
    if not cites or block is None or not block.text.strip():
        written = {"type": "text", **(part.beside or {}), "text": part.text}
    else:
        written = {
            "type": "search_result",
            "source": str(block.id),
            "title": part.label or str(block.id),
            "content": [{"type": "text", "text": block.text}],
            "citations": {"enabled": True},
        }
    if mark and field == "cachePoint":  # a block of its own
        return [written, mark]
    return [{**written, **mark}]


def _response_items(message: Json) -> list[Json]:
    role = message.get("role")
    rest = {name: value for name, value in message.items() if name not in _CONSUMED}
    if role == "tool":
        output = {"type": "function_call_output", "call_id": message.get("tool_call_id", "")}
        return [{**output, "output": _response_content(message.get("content"), "user"), **rest}]
    items: list[Json] = []
    content = message.get("content")
    if content is not None or not message.get("tool_calls"):
        given = _response_content("" if content is None else content, str(role))
        items.append({"role": role, "content": given, **rest})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        items.append(
            {
                "type": "function_call",
                "call_id": call.get("id", ""),
                "name": function.get("name", ""),
                "arguments": function.get("arguments", ""),
            }
        )
    return items


def _response_content(content: Any, role: str) -> Any:
    if not isinstance(content, (list, tuple)):
        return content
    text = "output_text" if role == "assistant" else "input_text"
    written = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            written.append({**part, "type": text})
        elif kind in _INPUTS and isinstance(part.get(kind), Mapping):
            others = {name: one for name, one in part.items() if name != kind}
            url = "url" if kind == "image_url" else None
            given = {kind if name == url else name: one for name, one in part[kind].items()}
            written.append({**others, **given, "type": _INPUTS[kind]})
        else:
            written.append(part)
    return written


def _anthropic_turn(message: Json) -> Json:
    role = message.get("role")
    rest = {
        name: value
        for name, value in message.items()
        if name not in _CONSUMED and name != "name"  # a protocol without names refuses them
    }
    if role == "tool":
        given = message.get("content")
        content = given if isinstance(given, str) else _anthropic_parts(message)
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id", "")}
        return {"role": "user", "content": [{**result, "content": content, **rest}]}
    calls = [_tool_use(call) for call in message.get("tool_calls") or ()]
    given = message.get("content")
    if isinstance(given, str) and not calls:
        return {"role": role, "content": given, **rest}
    return {"role": role, "content": [*_anthropic_parts(message), *calls], **rest}


def _holds_results(turn: Json) -> bool:
    content = turn["content"]
    are_results = (isinstance(one, Mapping) and one.get("type") == "tool_result" for one in content)
    return turn["role"] == "user" and bool(content) and all(are_results)


def _anthropic_parts(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content.strip() else []
    return [_anthropic_part(part) for part in content_list(message)]


def _anthropic_part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    written = {name: one for name, one in part.items() if name != "prompt_cache_breakpoint"}
    if len(written) < len(part):
        written.setdefault("cache_control", mark_value("cache_control"))
    image = part.get("image_url")
    if part.get("type") != "image_url" or not isinstance(image, Mapping):
        return written
    url = str(image.get("url", ""))
    source: Json = {"type": "url", "url": url}
    if url.startswith("data:") and ";base64," in url:
        media_type, _, data = url.removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": media_type, "data": data}
    del written["image_url"]
    return {**written, "type": "image", "source": source}


def _tool_use(call: Mapping[str, Any]) -> Json:
    name, given = called_function(call)
    return {"type": "tool_use", "id": call.get("id", ""), "name": name or "", "input": given}


def converse_form(messages: Iterable[Mapping[str, Any]]) -> Json:
    """Return messages in the form of Amazon Bedrock's Converse: marks are blocks of their own."""
    system: list[Json] = []
    turns: list[Json] = []
    for message in messages:
        role = message.get("role")
        if role in _SYSTEM:
            system += _converse_blocks(message.get("content"))
            continue
        rest = {name: value for name, value in message.items() if name not in (*_CONSUMED, "name")}
        blocks = _converse_blocks(message.get("content"))
        if role == "tool":
            points = [one for one in blocks if "cachePoint" in one]
            said = [one for one in blocks if "cachePoint" not in one]
            result = {"toolUseId": message.get("tool_call_id", ""), "content": said}
            blocks = [{"toolResult": result}, *points[-1:]]  # a result holds none
        for call in message.get("tool_calls") or ():
            name, given = called_function(call)
            use = {"toolUseId": call.get("id", ""), "name": name, "input": given}
            blocks.append({"toolUse": use})
        turn = {"role": "assistant" if role == "assistant" else "user", "content": blocks, **rest}
        if turns and turns[-1]["role"] == turn["role"]:
            turns[-1] = {**turns[-1], **turn, "content": turns[-1]["content"] + turn["content"]}
        else:
            turns.append(turn)
    return {"system": system, "messages": turns} if system else {"messages": turns}


def _converse_blocks(content: Any) -> list[Any]:
    parts: Sequence[Any] = content if isinstance(content, (list, tuple)) else [content]
    blocks: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            blocks += [{"text": part}] if part.strip() else []
        elif isinstance(part, Mapping):
            blocks += _converse_block(part)
        elif part is not None:
            blocks.append(part)
    return blocks


def _converse_block(part: Mapping[str, Any]) -> list[Any]:
    """Return a content part as a block and, if it is marked, the cache point behind it."""
    kind, text = part.get("type"), part.get("text")
    bare = {name: value for name, value in part.items() if name not in _MARKS}
    block: list[Any] = [bare]
    if kind == "text" and isinstance(text, str):
        block = [{"text": text}] if text.strip() else []
    elif kind == "image_url":
        block = [_converse_image(bare)]
    control = part.get("cache_control") or part.get("prompt_cache_breakpoint")
    if not isinstance(control, Mapping):
        return block
    life = {"ttl": control["ttl"]} if control.get("ttl") == "1h" else {}
    return [*block, {"cachePoint": {"type": "default", **life}}]


def _converse_image(part: Json) -> Json:
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


def called_function(call: Mapping[str, Any]) -> tuple[Any, Json]:
    """Return the name and the arguments of a tool call; what is no JSON object is put into one."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    try:
        given = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        given = None
    return function.get("name"), given if isinstance(given, dict) else {"arguments": arguments}
