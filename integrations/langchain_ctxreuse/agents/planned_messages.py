"""Messages of an agent that were planned, once, when they were new, and blocks in tool results.

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
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage

from ctxreuse.context.blocks import BlockId, ContextBlock, text_digest
from ctxreuse.context.rendering import Templates
from ctxreuse.pipeline.memories import memories_in, memories_of
from ctxreuse.pipeline.prompt_turn import message_key
from ctxreuse.planning.prompt_records import Edit, ShownTexts, Slice, made_of
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
    return edit and PlannedText(text, edit)


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
            found = PlannedText(texts[0], edit) if edit and len(texts) == 1 else None
        if found is not None:
            text = found.edit.applied(found.text.text, templates, before)
            new = TextPart(text, found.text.part)
            message = with_text(message, new)
            planned[number] = PlannedText(new, found.edit)
        sent.append(message)
        for part in text_parts(message):
            before.add(part.text)
    return sent, planned


class ResultPiece(NamedTuple):
    """A piece of a tool's result that is one item, what is shown of it, and in place of what."""

    block: ContextBlock
    shown: tuple[Slice | str, ...]
    place: Slice

    @classmethod
    def of(cls, text: str, start: int, end: int, block_id: BlockId | None = None) -> ResultPiece:
        """Return a piece that is shown as it stands."""
        block = ContextBlock(id=block_id, text=text[start:end])  # type: ignore[arg-type]
        return cls(block, (Slice(start, end),), Slice(start, end))


def result_pieces(
    artifact: Any, text: str, separator: str, splits: bool
) -> list[ResultPiece] | None:
    """Return the pieces of a tool's result; None unless each certainly is one item's."""
    named: list[tuple[Any, str]] = [(one.id, one.page_content) for one in _documents(artifact)]
    separators = [separator]
    if not named:
        if listed := memories_in(text):
            parts = [(one.memory["id"], one.lasting) for one in listed]
            made = [(ContextBlock(id=name, text=made_of(text, own)), own) for name, own in parts]
            return [ResultPiece(*one, Slice(0, len(text))) for one in made]
        named = [(one["id"], one["memory"]) for one in memories_of(artifact)]
        separators.append("\n")
    spans = _spans(text, [content for _, content in named], separators)
    if spans is None and splits:
        spans, start = [], 0
        for piece in text.split(separator):
            if piece.strip():
                spans.append((start, start + len(piece)))
            start += len(piece) + len(separator)
        named = [(None, "")] * len(spans)
    if not spans:
        return None
    return [ResultPiece.of(text, *span, one) for span, (one, _) in zip(spans, named, strict=True)]


def pieces_between(
    text: str, found: Sequence[tuple[int, int]], separator: str
) -> list[ResultPiece] | None:
    """Return the pieces that hold one found text each; None if what stands on each differs."""
    spans = _spans(text, [text[start:end] for start, end in found], (separator,)) or []
    before = [text[at:start] for (at, _), (start, _) in zip(spans, found, strict=False)]
    behind = [text[end:at] for (_, at), (_, end) in zip(spans, found, strict=False)]
    for sides in (before, [one[::-1] for one in behind]):
        kinds = {(one[:1], one.count("\n")) for one in sides}
        if len(kinds) > 1 or (len(sides) == 1 and sides[0]):
            return None
    return [ResultPiece.of(text, *span) for span in spans] or None


def _documents(artifact: Any) -> list[Document]:
    """Return an artifact's documents; none if it holds anything else."""
    documents: list[Document] = []
    for one in artifact if isinstance(artifact, list) else ():
        if isinstance(one, Mapping) and one.get("type") == "Document":  # as checkpointers give it
            one = Document(**{name: value for name, value in one.items() if name != "type"})
        if not isinstance(one, Document):
            return []
        documents.append(one)
    return documents


def _spans(
    text: str, contents: Sequence[str], separators: Sequence[str]
) -> list[tuple[int, int]] | None:
    """Cut a text so that each piece holds one content, in order; None if that is not unique."""
    if not contents:
        return None
    spans: list[tuple[int, int]] = []
    behind = 0
    for content in contents:
        start = text.find(content, behind)
        if start < 0:
            return None
        behind = start + len(content)
        spans.append((start, behind))
    gaps = [(end, start) for (_, end), (start, _) in pairwise(spans)]
    head, tail = text[: spans[0][0]], text[behind:]
    for separator in separators:
        if any(text.count(separator, end, start) != 1 for end, start in gaps):
            continue
        stands = separator in head or separator in tail
        if not gaps and not stands and separator != separators[-1]:
            continue
        cuts = [text.index(separator, end) for end, _ in gaps]
        begin = len(head) - len(head.rpartition(separator)[2])
        finish = behind + len(tail.partition(separator)[0])
        starts = [begin, *(cut + len(separator) for cut in cuts)]
        return list(zip(starts, [*cuts, finish], strict=True))
    return None
