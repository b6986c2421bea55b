"""Messages of an agent that were planned, once, when they were new.

The agent's state holds what the tools, and the user, have said. Metadata in `additional_kwargs`,
which no model sees and which is equal in all runs and processes, says how it is sent:

    edit       of which pieces, as `Edit` has them, the text is made
    part       which part of a multi-part content holds the text; None if the content is a string
    digest     of the text; another one is sent as it is
    question   the user's words, where the text is a question behind its context
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage

from ctxreuse.context.blocks import text_digest
from ctxreuse.context.rendering import Templates
from ctxreuse.pipeline.prompt_turn import message_key
from ctxreuse.planning.prompt_records import Edit, ShownTexts
from langchain_ctxreuse.messages import TextPart, role_of, text_parts, with_text

METADATA_KEY = "ctxreuse"

_Message = TypeVar("_Message", bound=BaseMessage)


class PlannedText(NamedTuple):
    """The text of a message that was planned, and how it is sent."""

    text: TextPart
    edit: Edit


def first_unplanned(messages: Sequence[AnyMessage]) -> int:
    """Return the position of the first message that no model has seen and no plan covers."""
    done = [n for n, one in enumerate(messages) if isinstance(one, AIMessage) or is_planned(one)]
    return done[-1] + 1 if done else 0


def newest_question(messages: Sequence[AnyMessage]) -> int | None:
    """Return where the newest user message is, if it has a text and was neither planned nor sent.

    A model has seen what stands before its answer.
    """
    said = [n for n, one in enumerate(messages) if isinstance(one, (AIMessage, HumanMessage))]
    last = messages[said[-1]] if said else None
    if not isinstance(last, HumanMessage) or is_planned(last) or last.id is None:
        return None
    return said[-1] if last.text.strip() else None


def behind_context(message: _Message, context: str, separator: str) -> _Message:
    """Return a message with a context in front of its text, or of its parts."""
    content: Any = message.content
    if isinstance(content, str):
        content = f"{context}{separator}{content}" if content else context
    else:
        content = [{"type": "text", "text": context}, *content]
    return message.model_copy(update={"content": content})


def is_planned(message: BaseMessage) -> bool:
    """Return whether a message was planned."""
    return METADATA_KEY in message.additional_kwargs


def with_edit(message: _Message, text: TextPart, edit: Edit, **more: Any) -> _Message:
    """Return a message that says how one of its texts is sent."""
    metadata = {
        "edit": json.loads(edit.encoded()),
        "part": text.part,
        "digest": text_digest(text.text).hex(),
        **more,
    }
    kwargs = {**message.additional_kwargs, METADATA_KEY: metadata}
    return message.model_copy(update={"additional_kwargs": kwargs})


def message_keys(messages: Iterable[BaseMessage], way: bytes) -> list[bytes]:
    """Return names of messages, each with all before it: without metadata they are the same."""
    keys, key = list[bytes](), way
    for message in messages:
        texts = [message_key(role_of(message), one.text) for one in text_parts(message)]
        key = text_digest(b"".join([key, *texts]).hex())
        keys.append(key)
    return keys


def planned_text(message: BaseMessage) -> PlannedText | None:
    """Return the text that was planned; None if the message has none, or another one by now."""
    carried = message.additional_kwargs.get(METADATA_KEY)
    if not isinstance(carried, Mapping):
        return None
    part, digest = carried.get("part"), carried.get("digest")
    text = next((one for one in text_parts(message) if one.part == part), None)
    if text is None or text_digest(text.text).hex() != digest:
        return None
    edit = Edit.of_json(carried.get("edit"), len(text.text))
    return None if edit is None else PlannedText(text, edit)


def sent_messages(
    messages: Sequence[BaseMessage],
    templates: Templates,
    before: ShownTexts | None = None,
    way: bytes = b"",
    edit_of: Callable[[bytes], Edit | None] = lambda key: None,
) -> tuple[list[BaseMessage], dict[int, PlannedText]]:
    """Return messages as the model gets them, and which were planned, as they are sent.

    What points to a block that none before shows any more is shown in whole. What is shown is added
    to `before`. `edit_of` says how messages were sent that have lost their metadata.
    """
    answers = [number for number, one in enumerate(messages) if isinstance(one, AIMessage)]
    keys = message_keys(messages[: answers[-1]], way) if answers else []
    sent: list[BaseMessage] = []
    planned: dict[int, PlannedText] = {}
    before = ShownTexts() if before is None else before
    for number, message in enumerate(messages):
        found = planned_text(message)
        if found is None and number < len(keys):
            texts, edit = text_parts(message), edit_of(keys[number])
            found = None if edit is None or len(texts) != 1 else PlannedText(texts[0], edit)
        if found is not None:
            text = found.edit.applied(found.text.text, templates, before)
            new = TextPart(text, found.text.part)
            message = with_text(message, new)
            planned[number] = PlannedText(new, found.edit)
        sent.append(message)
        for part in text_parts(message):
            before.add(part.text)
    return sent, planned
