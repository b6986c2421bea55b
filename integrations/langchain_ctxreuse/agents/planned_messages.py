"""Messages of an agent whose text was planned, once, when they were new.

The agent's state holds what was sent, so its history is replayed byte for byte. Metadata in
`additional_kwargs`, which no model sees, holds what the text shows and what it left out:

    labels     label -> id, for the blocks that the text shows
    left_out   for each block that the conversation showed already its label, id and text, and where
               in the text its location annotation begins
    part       which part of a multi-part content holds the text; None if the content is a string
    question   the user's words, where the text is a question behind its context

The metadata does not change from run to run, so caches of model calls still find such messages. The
registry remembers these texts as planned, so that a `ReuseChatModel` does not plan them again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage

from ctxreuse.adapters.plan_metadata import METADATA_KEY
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.rendering import Reference, SentBlock, Templates, render_block, render_turn
from ctxreuse.planning.plan import Plan
from langchain_ctxreuse.messages import TextPart, text_parts, with_text

_log = logging.getLogger("ctxreuse")
_LEAST_WORK = 1 << 20
_WORK_A_CHARACTER = 16
_BEGINNING = 32

_Message = TypeVar("_Message", bound=BaseMessage)


@dataclass(frozen=True, slots=True)
class UserQuestion:
    """A user's message that waits for its context.

    Attributes:
        message: The message.
        position: Where it stands among the messages.
    """

    message: HumanMessage
    position: int

    @property
    def query(self) -> str:
        """The query for the retriever."""
        return str(self.message.text)

    @property
    def text(self) -> str:
        """The text behind the context in the same part; empty if the content has several parts."""
        return self.message.content if isinstance(self.message.content, str) else ""

    def behind(self, texts: Sequence[str], templates: Templates) -> HumanMessage:
        """Return the message with texts before it that were not planned."""
        pieces = [*texts, self.text] if self.text else texts
        return self.rewritten(templates.separator.join(pieces), {"labels": {}, "left_out": []})

    def planned(self, plan: Plan, registry: ContextRegistry) -> HumanMessage:
        """Return the message with its plan's content; the plan's query is `text`."""
        registry.remember_plan(plan)
        return self.rewritten(plan.content, message_metadata(plan))

    def rewritten(self, text: str, metadata: Mapping[str, Any]) -> HumanMessage:
        """Return the message with a text in place of its own, or before its parts."""
        if isinstance(self.message.content, str):
            message = self.message.model_copy(update={"content": text})
            return _with_metadata(message, {**metadata, "part": None, "question": self.text})
        parts = [{"type": "text", "text": text}, *self.message.content]
        message = self.message.model_copy(update={"content": parts})
        return _with_metadata(message, {**metadata, "part": 0})


def first_unplanned(messages: Sequence[AnyMessage]) -> int:
    """Return the position of the first message that no model has seen and no plan covers.

    A message before a planned one stays as it is in any case, because labels count upwards.
    """
    done = [n for n, one in enumerate(messages) if isinstance(one, AIMessage) or is_planned(one)]
    return done[-1] + 1 if done else 0


def newest_question(messages: Sequence[AnyMessage]) -> UserQuestion | None:
    """Return the newest user message if it has a text and was neither planned nor sent."""
    for position, message in reversed(list(enumerate(messages))):
        if isinstance(message, AIMessage):  # a model has seen what stands before it
            return None
        if isinstance(message, HumanMessage):
            question = UserQuestion(message, position)
            waits = not is_planned(message) and message.id is not None and question.query.strip()
            return question if waits else None
    return None


def is_planned(message: BaseMessage) -> bool:
    """Return whether a message's text was planned."""
    return METADATA_KEY in message.additional_kwargs


def planned_result(
    message: ToolMessage,
    old: TextPart,
    plan: Plan,
    before: str,
    after: str,
    registry: ContextRegistry,
) -> ToolMessage:
    """Return a tool's message with its plan's content in place of a text.

    Args:
        message: The message.
        old: The text that the plan replaces.
        plan: The plan.
        before: The text before the blocks.
        after: The text behind them.
        registry: Where the text is remembered.
    """
    registry.remember_plan(plan)
    new = with_text(message, TextPart(before + plan.content + after, old.part))
    return _with_metadata(new, {**message_metadata(plan, len(before)), "part": old.part})


def message_metadata(plan: Plan, offset: int = 0) -> dict[str, Any]:
    """Return the metadata for a plan whose content begins at an offset in the text."""
    labels = {part.label: part.block.id for part in plan.parts if isinstance(part, SentBlock)}
    unique = plan.request.unique_blocks
    texts = {label: unique[key].text for key, label in plan.label_of.items()}
    left_out = []
    for part in plan.parts:
        if isinstance(part, Reference):
            left_out.append(
                {"label": part.label, "id": part.id, "text": texts[part.label], "start": offset}
            )
        offset += len(render_turn([part], None, "", plan.templates))
        offset += len(plan.templates.separator)
    return {"labels": labels, "left_out": left_out}


def made_whole(
    messages: Sequence[AnyMessage],
    templates: Templates,
    registry: ContextRegistry,
    tenant: str | None = None,
) -> list[AnyMessage] | None:
    """Return messages so that every location annotation in them points to something.

    A block that a message left out because an earlier one showed it comes back, under its label, if
    the earlier one was removed or changed since: by a summary, trimming, or clearing tool results.

    Args:
        messages: The messages that are about to be sent.
        templates: The words around blocks.
        registry: Where the texts are remembered.
        tenant: Whose messages they are; None is the default tenant.

    Returns:
        The messages, or None if nothing is missing.
    """
    labels = {one["label"] for message in messages for one in _left_out(message)}
    if not labels:
        return None
    whole: list[AnyMessage] = []
    shown = _ShownBlocks(labels, templates)
    for message in messages:
        one = _made_whole(message, shown, templates)
        if one is not message:
            part = message.additional_kwargs[METADATA_KEY]["part"]
            registry.remember_planned(_part_text(one, part), tenant or "")
        whole.append(one)
        for text, _ in text_parts(one):
            shown.add(text)
    if shown.is_cut_short:
        _log.info("a history repeats labels too often to be searched; blocks are shown again")
    changed = any(new is not old for new, old in zip(whole, messages, strict=True))
    return whole if changed else None


def _made_whole(message: AnyMessage, shown: _ShownBlocks, templates: Templates) -> AnyMessage:
    left_out = _left_out(message)
    if not left_out:
        return message
    part = message.additional_kwargs[METADATA_KEY]["part"]
    old = _part_text(message, part)
    pieces: list[str] = []
    end = 0
    for one in sorted(left_out, key=itemgetter("start")):
        label, text, start = one["label"], one["text"], one["start"]
        words = templates.location_annotation(label)
        is_there = start >= end and old.startswith(words, start)
        if is_there and not shown.has(label, text):
            pieces += [old[end:start], render_block(label, text, templates)]
            end = start + len(words)
    if not pieces:
        return message
    return with_text(message, TextPart("".join([*pieces, old[end:]]), part))


class _ShownBlocks:
    """Looks for blocks under their labels in the texts of earlier messages.

    The work is bounded, because a hostile text may repeat a label and a block's beginning thousands
    of times: 16 characters compared for each one of the texts, and a million more; a place that is
    looked at counts as 16. What is not found by then counts as not shown, so it is sent again.

    Args:
        labels: The labels of all blocks that are looked for.
        templates: The words around blocks.
    """

    def __init__(self, labels: Iterable[str], templates: Templates) -> None:
        self._templates = templates
        self._places: dict[str, list[tuple[str, int]]] = {label: [] for label in labels}
        self._looked: dict[tuple[str, str], tuple[int, bool]] = {}
        self._label_at = len(templates.block.partition("{label}")[0])
        self._work = _LEAST_WORK

    @property
    def is_cut_short(self) -> bool:
        """Whether the bound was reached."""
        return self._work < 0

    def add(self, text: str) -> None:
        """Add a text that is shown behind all others."""
        self._work += _WORK_A_CHARACTER * len(text)
        for found in self._templates.label_pattern.finditer(text):
            start = found.start() - self._label_at
            if start >= 0 and found[0] in self._places:
                self._places[found[0]].append((text, start))

    def has(self, label: str, text: str) -> bool:
        """Return whether a block stands in one of the texts under a label."""
        places, block = self._places[label], self._templates.before_text(label) + text
        beginning = block[:_BEGINNING]
        done, stands = self._looked.get((label, text), (0, False))  # no place is looked at twice
        while not stands and done < len(places) and not self.is_cut_short:
            shown, start = places[done]
            done += 1
            self._work -= _WORK_A_CHARACTER
            if shown.startswith(beginning, start):
                self._work -= len(block)
                stands = shown.startswith(block, start)
        self._looked[label, text] = done, stands
        return stands


def _part_text(message: AnyMessage, part: int | None) -> str:
    return next((text for text, number in text_parts(message) if number == part), "")


def _left_out(message: BaseMessage) -> Sequence[Mapping[str, Any]]:
    left_out: Sequence[Mapping[str, Any]] = message.additional_kwargs.get(METADATA_KEY, {}).get(
        "left_out", ()
    )
    return left_out


def _with_metadata(message: _Message, metadata: Mapping[str, Any]) -> _Message:
    kwargs = {**message.additional_kwargs, METADATA_KEY: dict(metadata)}
    return message.model_copy(update={"additional_kwargs": kwargs})
