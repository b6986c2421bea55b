"""Bodies of chat requests: documents that come with them are shown where they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, NamedTuple

from ctxreuse.context.blocks import BlockId, text_digest
from ctxreuse.context.lru_map import TenantLRUMap
from ctxreuse.context.rendering import Templates
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.pipeline.formatting import joined_forms
from ctxreuse.pipeline.known_texts import Form
from ctxreuse.pipeline.marked_contents import TextPosition, marked_contents
from ctxreuse.pipeline.prompt_turn import PlannedPrompt, PromptPart, ScopedPrompt, message_key
from ctxreuse.rules.cache_marks import mark_field
from ctxreuse.rules.cache_rules import CacheRules

PLACE = "{documents}"
_OURS = ("documents", "conversation", "ctxreuse")
_MOST_CHARACTERS = 64_000_000


class Document(NamedTuple):
    """A document of a request, as a prompt shows it."""

    id: BlockId | None
    text: str


def read_documents(given: object, template: object = None) -> list[Document]:
    """Return the documents of a body, best first.

    Args:
        given: A list of objects with `text`, and perhaps `id` and `title`.
        template: How each is shown: a string with `{text}` and names of other keys. None shows the
            title, if there is one, above the text.

    Raises:
        InvalidRequestError: wrong type, or a key that the template names is missing.
    """
    if not isinstance(given, list):
        raise InvalidRequestError(f"documents must be a list of objects, not {describe(given)}")
    if not isinstance(template, (str, NoneType)):
        raise InvalidRequestError(f"template must be a string, not {describe(template)}")
    return [_document(one, f"documents[{place}]", template) for place, one in enumerate(given)]


def _document(given: object, where: str, template: str | None) -> Document:
    if not isinstance(given, Mapping) or not isinstance(given.get("text"), str):
        raise InvalidRequestError(f"{where} must be an object whose text is a string")
    name, title, text = given.get("id"), given.get("title"), given["text"]
    if not isinstance(name, (str, int, NoneType)) or isinstance(name, bool):
        raise InvalidRequestError(f"{where}.id must be a string or an integer, not {describe(name)}")
    if template is None:
        return Document(name, f"{title}\n{text}" if title else text)
    shown = template
    for key, value in given.items():  # no format specifications, which could ask for gigabytes
        shown = shown.replace(f"{{{key}}}", str(value))
    return Document(name, shown)


class ChatBody(NamedTuple):
    """A chat request whose prompt is to be planned.

    Attributes:
        fields: The body without what is ours.
        documents: Those of the last user message.
        conversation: Names the conversation within the tenant.
        tells: Whether the answer is to say what was planned.
    """

    fields: dict[str, Any]
    documents: list[Document]
    conversation: str | int | None
    tells: bool

    @classmethod
    def of(cls, body: Any, conversation: str | None, *, tells: bool) -> ChatBody | None:
        """Return a body with documents or a conversation; None for one that is sent as it came.

        Raises:
            InvalidRequestError: wrong type.
        """
        if not isinstance(body, dict):
            raise InvalidRequestError(f"the body must be a JSON object, not {describe(body)}")
        named = body.get("conversation", conversation)
        if body.get("documents") is None and named is None:
            return None
        if not isinstance(named, (str, int, NoneType)) or isinstance(named, bool):
            raise InvalidRequestError(f"conversation must be a string, not {describe(named)}")
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise InvalidRequestError("messages must be a list of objects")
        documents = read_documents(body.get("documents") or [])
        fields = {name: one for name, one in body.items() if name not in _OURS}
        return cls(fields, documents, named, tells or body.get("ctxreuse") is True)


class GivenTexts(NamedTuple):
    """The texts of a body's messages, with documents in them, and where they stand."""

    prompt: ScopedPrompt
    places: list[TextPosition | None]
    messages: list[dict[str, Any]]  # of Anthropic's protocol with the system text as the first


class ShownDocuments:
    """Messages as they were shown with documents, by conversation: clients send them without.

    Bounded in characters, of which each tenant has a share. For one event loop.
    """

    def __init__(self, templates: Templates, max_characters: int = _MOST_CHARACTERS) -> None:
        self._templates = templates
        self._shown: TenantLRUMap[bytes, str] = TenantLRUMap(
            max_weight=max_characters, weight_of=len
        )

    def given(self, body: ChatBody, tenant: str) -> GivenTexts:
        """Return a body's prompt, with documents in this turn's message and in earlier ones."""
        messages = list(body.fields["messages"])
        if "system" in body.fields:
            messages.insert(0, {"role": "system", "content": body.fields["system"]})
        asked = _place_of_documents(messages) if body.documents else None
        key = text_digest(repr(body.conversation))
        parts: list[PromptPart] = []
        places: list[TextPosition | None] = []
        for number, message in enumerate(messages):
            for part, text in _texts(message):
                role, at = str(message.get("role")), TextPosition(number, part)
                if not isinstance(text, str):
                    parts.append(PromptPart.of_value(role, text))
                    places.append(None)
                    continue
                key = text_digest((key + message_key(role, text)).hex())
                if at == asked:
                    text = self._with_documents(text, body, tenant)
                    if body.conversation is not None:
                        self._shown.put(tenant, key, text)
                elif body.conversation is not None:
                    text = self._shown.get(tenant, key) or text
                parts.append(PromptPart(role, text))
                places.append(at)
        beside = json.dumps(body.fields["tools"]) if body.fields.get("tools") else ""
        scope = RequestScope(tenant or None, body.conversation)
        return GivenTexts(ScopedPrompt(tuple(parts), scope, beside=beside), places, messages)

    def _with_documents(self, text: str, body: ChatBody, tenant: str) -> str:
        texts = [one.text for one in body.documents]
        shown = joined_forms(
            [Form(one) for one in texts],
            texts,
            "\n\n",
            tenant,
            self._templates,
            labels=body.conversation is not None,
            ids=[one.id for one in body.documents],
        )
        if PLACE in text:
            return text.replace(PLACE, shown, 1)
        return "\n\n".join(filter(None, (shown, text)))


def sent_fields(
    fields: Mapping[str, Any], given: GivenTexts, planned: PlannedPrompt, rules: CacheRules
) -> dict[str, Any]:
    """Return the fields of a body with its texts as planned."""
    messages = [dict(one) for one in given.messages]
    for at, text in zip(given.places, planned.texts, strict=True):
        if at is None:
            continue
        message = messages[at.message]
        if at.part is None:
            message["content"] = text
        else:
            content = message["content"] = list(message["content"])
            content[at.part] = {**content[at.part], "text": text}
    sent = dict(fields)
    if planned.parts:
        contents = [one.get("content") for one in messages]
        field, tools = mark_field(rules), fields.get("tools") or ()
        marked = marked_contents(contents, planned.parts, given.places, rules, field, tools)
        for message, content in zip(messages, marked.contents, strict=True):
            message["content"] = content
        sent |= {"tools": marked.tools} if marked.tools else {}
    if "system" in fields:
        sent["system"] = messages.pop(0)["content"]
    return {**sent, "messages": messages}


def _place_of_documents(messages: Iterable[Mapping[str, Any]]) -> TextPosition:
    """Return which text shows the documents: the one that says where, else the last of a user."""
    last: TextPosition | None = None
    for number, message in enumerate(messages):
        for part, text in _texts(message):
            if isinstance(text, str) and PLACE in text:
                return TextPosition(number, part)
            if isinstance(text, str) and message.get("role") == "user":
                last = TextPosition(number, part)
    if last is None:
        raise InvalidRequestError("documents need a user message, or {documents} in another one")
    return last


def _texts(message: Mapping[str, Any]) -> Iterable[tuple[int | None, object]]:
    """Yield a message's texts with their places in its content; what is no text as it is."""
    content = message.get("content")
    if not isinstance(content, list):
        yield None, content
    else:
        for part, one in enumerate(content):
            is_text = isinstance(one, dict) and isinstance(one.get("text"), str)
            yield part, one["text"] if is_text and one.get("type") == "text" else one
    if message.get("tool_calls"):
        yield None, message["tool_calls"]
