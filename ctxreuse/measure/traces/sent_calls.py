"""How a recorded request was sent, besides its documents: model, tools, marks, lengths; no text.

A trace line keeps it in its field `sent`: `model`, `key`, `tools` (a name for each, equal for equal
tools), `tool_tokens`, `system_tokens`, `history` (messages besides the system's and the last one of
the user), `history_tokens`, and `marks` (how many stand in `tools`, `system`, `history`, `turn`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import message_texts
from ctxreuse.measure.traces.json_lines import JsonLine
from ctxreuse.rules.cache_marks import marks_in

MARKED_PLACES: Final = ("tools", "system", "history", "turn")
"""Where marks stand, in the order of a prompt; the turn is the last message of the user."""

_COUNTS: Final = ("tool_tokens", "system_tokens", "history", "history_tokens")
_SYSTEM_ROLES = ("system", "developer")
_MOST_TOOLS = 1_000
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class SentCall:
    """How a request was sent, besides its documents."""

    model: str = ""
    key: str = ""
    tools: tuple[str, ...] = ()
    tool_tokens: int = 0
    system_tokens: int | None = None
    history: int = 0
    history_tokens: int = 0
    marks: Mapping[str, int] = field(default_factory=dict)

    @property
    def mark_count(self) -> int:
        """All marks of the request."""
        return sum(self.marks.values())

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object; what is empty is left out."""
        told = {name: getattr(self, name) for name in ("model", "key", "tools", *_COUNTS)}
        told["tools"] = list(self.tools)
        return {name: one for name, one in told.items() if one} | {"marks": dict(self.marks)}


def sent_call_of(line: JsonLine) -> SentCall | None:
    """Return what a trace line says in its field `sent`; None without it."""
    fields = line.get("sent", (dict,), None)
    if fields is None:
        return None
    sent = JsonLine(f"{line.place}, in 'sent'", fields)
    tools = sent.get("tools", (list,), [])
    if not all(isinstance(one, str) for one in tools):
        sent.fail("field 'tools' must hold strings")
    counts = {name: sent.natural(name, None if name == "system_tokens" else 0) for name in _COUNTS}
    marks = sent.get("marks", (dict,), {})
    placed = JsonLine(f"{sent.place}, in 'marks'", marks)
    numbers = {name: placed.natural(name, 0) for name in MARKED_PLACES}
    return SentCall(
        model=sent.get("model", (str,), ""),
        key=sent.get("key", (str,), ""),
        tools=tuple(tools),
        **counts,
        marks={name: count for name, count in numbers.items() if count},
    )


class ReadCall(NamedTuple):
    """A request to a model as it is recorded."""

    system: str
    questions: Sequence[Mapping[str, Any]]
    marked_ends: Sequence[str]
    sent: SentCall


def read_call(
    messages: object,
    fields: Mapping[str, Any],
    count_tokens: Callable[[str], int],
    digest: Callable[[str], str],
    *,
    hash_only: bool = False,
) -> ReadCall | None:
    """Read a request of OpenAI's or Anthropic's protocol; None without a turn."""
    checked_kind("fields", fields, Mapping, "a mapping")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
        return None
    told = [one for one in messages if one.get("role") in _SYSTEM_ROLES]
    questions = [one for one in messages if one.get("role") == "user"]
    if not questions:
        return None
    for front in ("instructions", "system"):
        if isinstance(fields.get(front), (str, list, tuple)):
            told.insert(0, {"role": "system", "content": fields[front]})
    system = "\n\n".join(text for one in told for text in message_texts(one))
    last, said = questions[-1], [one for one in messages if one.get("role") not in _SYSTEM_ROLES]
    others = [one for one in said if one is not last]
    tools = list(islice(_tools(fields.get("tools")), _MOST_TOOLS))
    itself = {"cache_control": fields.get("cache_control")}  # Anthropic's API marks the last part
    marked = (fields.get("tools"), told, others, [last, itself])
    counts = (sum(1 for _ in marks_in(one)) for one in marked)
    model, key = fields.get("model"), fields.get("prompt_cache_key")
    return ReadCall(
        system,
        questions,
        list(_marked_ends(last)),
        SentCall(
            model="" if not isinstance(model, str) else digest(model) if hash_only else model,
            key=digest(key) if isinstance(key, str) else "",
            tools=tuple(f"{'' if hash_only else name}#{digest(text)}" for name, text in tools),
            tool_tokens=sum(count_tokens(text) for _, text in tools),
            system_tokens=count_tokens(system),
            history=len(others),
            history_tokens=sum(count_tokens(text) for one in others for text in message_texts(one)),
            marks={name: count for name, count in zip(MARKED_PLACES, counts, strict=True) if count},
        ),
    )


def _tools(given: object) -> Iterator[tuple[str, str]]:
    """Yield each tool's name, and the tool as a text without its marks, equal for equal tools."""
    for one in given if isinstance(given, (list, tuple)) else ():
        tool = one if isinstance(one, Mapping) else {"type": type(one).__name__}
        function = tool.get("function")
        name = (function if isinstance(function, Mapping) else tool).get("name")
        bare = {field: value for field, value in tool.items() if field != "cache_control"}
        try:
            text = json.dumps(bare, default=repr)
        except (ValueError, TypeError, RecursionError):  # no API takes it
            text = repr(sorted(map(str, bare)))
        yield (name[:_LONGEST_NAME] if isinstance(name, str) else ""), text


def _marked_ends(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of a message up to each of its marks."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return
    marked = {path[1] for path in marks_in(message) if len(path) > 1}
    texts: list[str] = []
    for position, part in enumerate(content):
        texts += message_texts({"content": [part]})
        if position in marked:
            yield "\n\n".join(texts)
