"""Messages of an agent whose text was planned, once, when they were new.

The agent's state holds every block in whole, because not only the model reads it. Metadata in
`additional_kwargs`, which no model sees and which is equal in all runs, says:

    labels     label -> id, for the blocks that the text shows
    repeated   for each block that the conversation showed already its label, where in the text it
               begins and ends, and a digest of what stands there
    part       which part of a multi-part content holds the text; None if the content is a string
    question   the user's words, where the text is a question behind its context
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage

from ctxreuse.adapters.plan_metadata import METADATA_KEY
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.rendering import Reference, SentBlock, Templates, TurnPart, render_turn
from ctxreuse.planning.plan import Plan
from langchain_ctxreuse.messages import TextPart, text_parts, with_text

_Message = TypeVar("_Message", bound=BaseMessage)


@dataclass(frozen=True, slots=True)
class UserQuestion:
    """A user's message that waits for its context."""

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
        return self.rewritten(templates.separator.join(pieces), {"labels": {}, "repeated": []})

    def planned(self, plan: Plan, registry: ContextRegistry) -> HumanMessage:
        """Return the message with what its plan shows; the plan's query is `text`."""
        return self.rewritten(*state_text(plan, registry))

    def rewritten(self, text: str, metadata: Mapping[str, Any]) -> HumanMessage:
        """Return the message with a text in place of its own, or before its parts."""
        if isinstance(self.message.content, str):
            message = self.message.model_copy(update={"content": text})
            return _with_metadata(message, {**metadata, "part": None, "question": self.text})
        parts = [{"type": "text", "text": text}, *self.message.content]
        message = self.message.model_copy(update={"content": parts})
        return _with_metadata(message, {**metadata, "part": 0})


def first_unplanned(messages: Sequence[AnyMessage]) -> int:
    """Return the position of the first message that no model has seen and no plan covers."""
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


class StateText(NamedTuple):
    """What a plan shows, as an agent's state holds it."""

    text: str
    metadata: dict[str, Any]


def state_text(plan: Plan, registry: ContextRegistry, offset: int = 0) -> StateText:
    """Return what a plan shows, for the state; have it remembered, in whole and as it is sent."""
    templates, unique = plan.templates, plan.request.unique_blocks
    block_of = {label: unique[key] for key, label in plan.label_of.items()}
    parts: list[TurnPart] = []
    repeated = []
    start = offset
    for part in plan.parts:
        if isinstance(part, (Reference, SentBlock)):
            # trimmed overlaps, too: what they point to may be removed
            whole: TurnPart = SentBlock(part.label, block_of[part.label])
        else:
            whole = part
        shown = render_turn([whole], None, "", templates)
        end = start + len(shown)
        if isinstance(part, Reference):
            digest = text_digest(shown).hex()
            repeated.append({"label": part.label, "start": start, "end": end, "digest": digest})
        parts.append(whole)
        start = end + len(templates.separator)
    in_whole = replace(plan, shown=replace(plan.shown, given=tuple(parts)))
    registry.remember_plan(plan)
    if in_whole.parts != plan.parts:
        registry.remember_plan(in_whole)
    labels = {label: block.id for label, block in block_of.items()}
    return StateText(in_whole.content, {"labels": labels, "repeated": repeated})


def planned_result(
    message: ToolMessage,
    old: TextPart,
    plan: Plan,
    before: str,
    after: str,
    registry: ContextRegistry,
) -> ToolMessage:
    """Return a tool's message with what its plan shows in place of a text."""
    text, metadata = state_text(plan, registry, len(before))
    new = with_text(message, TextPart(before + text + after, old.part))
    return _with_metadata(new, {**metadata, "part": old.part})


def planned_text(message: BaseMessage) -> TextPart | None:
    """Return the text that a plan is part of; None if the message no longer has such a part."""
    carried = message.additional_kwargs.get(METADATA_KEY)
    number = carried.get("part") if isinstance(carried, Mapping) else None
    if number is not None and type(number) is not int:
        return None
    return next((one for one in text_parts(message) if one.part == number), None)


def repeated_blocks(message: BaseMessage) -> Sequence[Mapping[str, Any]]:
    """Return which blocks were shown already, as metadata says; of another form, none."""
    carried = message.additional_kwargs.get(METADATA_KEY)
    repeated = carried.get("repeated") if isinstance(carried, Mapping) else None
    return [one for one in repeated if _is_repeated(one)] if isinstance(repeated, list) else []


def _is_repeated(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    kinds = [type(value.get(name)) for name in ("label", "start", "end", "digest")]
    return kinds == [str, int, int, str] and 0 <= value["start"] <= value["end"]


def _with_metadata(message: _Message, metadata: Mapping[str, Any]) -> _Message:
    kwargs = {**message.additional_kwargs, METADATA_KEY: dict(metadata)}
    return message.model_copy(update={"additional_kwargs": kwargs})
