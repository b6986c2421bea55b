"""Bodies of chat requests: documents that come with them are shown where they are asked for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.blocks import BlockId, ContextBlock, text_digest
from ctxreuse.context.checks import checked_each, checked_id, checked_kind
from ctxreuse.context.lru_map import TenantLRUMap
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.formatting import joined_forms, labelled_block
from ctxreuse.pipeline.known_texts import Form
from ctxreuse.pipeline.model_gateway import ModelGateway
from ctxreuse.pipeline.prompt_turn import (
    PlannedPrompt,
    PromptPart,
    ScopedPrompt,
    TextPosition,
    marked_contents,
    message_key,
)
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.rules.cache_marks import mark_field
from ctxreuse.rules.cache_rules import CacheRules

CONVERSATION_HEADER = "x-conversation-id"
_PLACE = "{documents}"
OURS = ("documents", "conversation", "ctxreuse")
_INSTRUCTS, _TEXTUAL = ("user", "system", "developer"), ("role", "content")
_KEY = re.compile(r"\{([^{}]*)\}")
_IN_JSON = {"None": "null", "True": "true", "False": "false", "a dict": "an object"} | {
    "conversation_id": "conversation"
}
_IN_PYTHON = re.compile(rf"(?<!')\b({'|'.join(_IN_JSON)})\b( \((NoneType|bool)\))?")
_MOST_CHARACTERS = 64_000_000  # of which each tenant has a share
_FORGOTTEN = (
    "a conversation's history asks for {documents} that this process has not shown there; they are "
    "left out. Another worker has shown them (use one worker, or route by conversation), or it has "
    "restarted, or other messages stand before."
)
_log = logging.getLogger("ctxreuse")
_Places: TypeAlias = list[TextPosition | None]


def json_words(error: Exception) -> str:
    """Return what an error says, in the words of JSON."""
    return _IN_PYTHON.sub(lambda found: _IN_JSON[found[1]], str(error))


def read_documents(given: object, template: object = None) -> list[ContextBlock]:
    """Return the documents that show anything, each by a template of its keys or its title."""
    checked_kind("template", template, (str, NoneType), "a string such as '{title}: {text}'")
    if isinstance(template, str) and "{text}" not in template:
        raise InvalidRequestError(f"template must hold {{text}}, not {describe(template)}")
    listed = checked_each("documents", given, dict, "an object with a text")
    read = [
        ContextBlock(id=one.get("id"), text=_shown(one, template, place))  # type: ignore[arg-type]
        for place, one in enumerate(listed)
    ]
    return [one for one in read if one.text.strip()]


def _shown(given: Mapping[str, Any], template: Any, place: int) -> str:
    checked_kind(f"documents[{place}].text", given.get("text"), str, "a string")
    if template is None:
        template = "{title}\n{text}" if given.get("title") else "{text}"

    def named(found: re.Match[str]) -> str:
        value = given.get(found[1])
        if isinstance(value, (str, int, float)):
            return str(value)
        raise InvalidRequestError(
            f"the template names {found[1]!r}, which has to be a string or a number in each "
            f"document, not {describe(value)}"
        )

    # in one pass: a text may hold such names, and format() takes specifications of gigabytes
    return _KEY.sub(named, template)


class PromptBody(NamedTuple):
    """A chat request whose prompt is to be planned."""

    fields: dict[str, Any]  # without what is ours
    documents: list[ContextBlock]
    conversation: BlockId | None
    tells: bool  # whether the answer is to say what was planned
    asked: TextPosition | None  # which text shows the documents

    @classmethod
    def of(cls, body: Mapping[str, Any], headers: Mapping[str, str]) -> PromptBody | None:
        """Return a body that has something of ours; None for one that is sent as it came."""
        named = body.get("conversation", headers.get(CONVERSATION_HEADER))
        if named is None and not any(name in body for name in OURS):
            return None
        tells = checked_kind("ctxreuse", body.get("ctxreuse"), (bool, NoneType), "true or false")
        # one for all who have none would show them each other's documents; 5 is "5" in the header
        named = None if named in (None, "") else str(checked_id("conversation", named))
        checked_each("messages", body.get("messages"), dict, "an object")
        documents = read_documents(body.get("documents") or [])
        fields = {name: one for name, one in body.items() if name not in OURS}
        asked = _place_of_documents(_messages(fields)) if documents else None
        return cls(fields, documents, named, bool(tells), asked)

    def told(self, plan: Plan | None, planner: ReusePlanner) -> dict[str, Any]:
        """Return what an answer says of its documents; without a plan nothing moves."""
        names = {one.text: one.id for one in reversed(self.documents)}
        blocks = self.documents if plan is None else plan.blocks
        shown = () if self.conversation is None or planner.mode == "shadow" else self.documents
        return {
            "order": [names.get(one.text, one.id) for one in blocks],
            "labels": {planner.templates.label_of(one): names[one.text] for one in shown},
            "expected_cached_tokens": 0 if plan is None else plan.expected_cached_tokens,
        }


class ChatPlanner:
    """Plans bodies; knows how messages were shown with documents, which clients leave out."""

    def __init__(self, planner: ReusePlanner, component: str, window_s: float = 0.0) -> None:
        self._planner, usage, self._has_warned = planner, attrgetter("usage"), False
        self.gateway = ModelGateway(planner, "reuse", window_s, component, "", usage)
        self._shown: TenantLRUMap[bytes, str] = TenantLRUMap(
            max_weight=_MOST_CHARACTERS, weight_of=len
        )

    async def planned(
        self, body: PromptBody | None, tenant: str
    ) -> tuple[PlannedPrompt | None, dict[str, Any] | None]:
        """Return a prompt as planned, and the fields to send; None is to send what came."""
        if body is None:
            self._planner.note_without_context(1)
            return None, None
        attempt, rules = self.gateway.attempt, self._planner.wire_cache
        if (given := attempt(lambda: self._given(body, tenant), lambda: None)) is None:
            return None, None
        prompt, places = given
        planned = await self.gateway.aplan(prompt)
        return planned, attempt(lambda: _sent(body.fields, places, planned, rules))

    def _given(self, body: PromptBody, tenant: str) -> tuple[ScopedPrompt, _Places]:
        """Return a prompt with documents in this turn and earlier ones, and where texts stand."""
        messages, keeps = _messages(body.fields), body.conversation is not None
        key = text_digest(repr(body.conversation))
        parts: list[PromptPart] = []
        places: _Places = []
        for role, at, text in _texts(messages):
            places.append(at)
            if at is None:
                parts.append(PromptPart.of_value(role, text))
                continue
            key = text_digest((key + message_key(role, text)).hex())
            if at == body.asked:
                shown = self._with_documents(text, body, tenant)
                if keeps:
                    self._shown.put(tenant, key, shown)
            else:
                shown = (keeps and self._shown.get(tenant, key)) or text
                if shown == text and role in _INSTRUCTS:
                    shown = text.replace(_PLACE, "", 1)
                    if keeps and body.asked and shown != text and not self._has_warned:
                        self._has_warned = True
                        _log.warning(_FORGOTTEN)
            parts.append(PromptPart(role, shown))
        beside = json.dumps(body.fields["tools"]) if body.fields.get("tools") else ""
        scope = RequestScope(tenant or None, body.conversation)
        return ScopedPrompt(tuple(parts), scope, beside=beside), places

    def _with_documents(self, text: str, body: PromptBody, tenant: str) -> str:
        texts, ids = [one.text for one in body.documents], [one.id for one in body.documents]
        forms, keeps = [Form(one) for one in texts], body.conversation is not None
        templates = self._planner.templates
        if keeps and self._planner.mode == "shadow":  # they would stand under labels
            blocks = [labelled_block(*one, templates) for one in zip(forms, ids, strict=True)]
            forms, keeps = [Form(one.text, one, kind="labelled") for one in blocks], False
        shown = joined_forms(forms, texts, "\n\n", tenant, templates, labels=keeps, ids=ids)
        if _PLACE in text:
            return text.replace(_PLACE, shown, 1)  # further ones are users' words
        return f"{shown}\n\n{text}" if text else shown


def _sent(
    fields: Mapping[str, Any], places: _Places, planned: PlannedPrompt, rules: CacheRules
) -> dict[str, Any]:
    messages = [dict(one) for one in _messages(fields)]
    for at, text in zip(places, planned.texts, strict=True):
        if at is None:
            continue
        content: Any = text
        if at.part is not None:
            content = list(messages[at.message]["content"])
            content[at.part] = {**content[at.part], "text": text}
        messages[at.message]["content"] = content
    sent = dict(fields)
    if planned.parts:
        contents = [one.get("content") for one in messages]
        field, tools = mark_field(rules), fields.get("tools") or ()
        contents, tools = marked_contents(contents, planned.parts, places, rules, field, tools)
        for message, content in zip(messages, contents, strict=True):
            if "content" in message:
                message["content"] = content
        sent |= {"tools": tools} if tools else {}
    if "system" in fields:
        sent["system"] = messages.pop(0)["content"]
    return {**sent, "messages": messages}


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": fields["system"]}] if "system" in fields else []
    return [*system, *fields["messages"]]


def _place_of_documents(messages: Sequence[Mapping[str, Any]]) -> TextPosition:
    """Return which text shows the documents: a system message's that asks, else the question."""
    texts = [(role, at, text) for role, at, text in _texts(messages) if at is not None]
    asking = {at for _, at, text in texts if _PLACE in text}
    places = [at for role, at, _ in texts if role in _INSTRUCTS[1:] and at in asking]
    places = places or [at for role, at, _ in texts if role == "user"]
    if not places:
        raise InvalidRequestError(
            f"documents need a user message with a text, or {_PLACE} in a system message"
        )
    last = [at for at in places if at.message == places[-1].message]
    return next((at for at in last if at in asking), last[0])


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, TextPosition | None, Any]]:
    """Yield the role, place and text of each text; of what is no text, its value without place."""
    for number, message in enumerate(messages):
        role, content = str(message.get("role")), message.get("content")
        is_list = isinstance(content, list)
        for part, one in enumerate(content if is_list else [content]):  # type: ignore[arg-type]
            match one:
                case {"type": "text", "text": str(text)} if is_list:
                    yield role, TextPosition(number, part), text
                case str() if not is_list:
                    yield role, TextPosition(number, None), one
                case _:
                    yield role, None, one
        if others := {name: one for name, one in message.items() if name not in _TEXTUAL}:
            yield role, None, others
