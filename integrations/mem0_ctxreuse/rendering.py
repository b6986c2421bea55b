"""Memories as text for a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ctxreuse import ContextRequest, Plan
from ctxreuse.context.rendering import render_messages, render_turn
from ctxreuse.context.templates import DEFAULT_TEMPLATES


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """The memories found for a question, as text.

    `str()` of it is the whole context: text, then annotation.

    Attributes:
        text: The memories under their labels, in planned order; in place of one that the
            conversation shows already, where it stands. "" if none was found.
        annotation: The order in which mem0 ranked them, in words; None if that is the order in
            which they stand.
        request: What was asked: system text, history, question, and the memories that were planned,
            exact duplicates once.
        plan: The plan, with `labels` for citations; None where planning failed and the text is the
            memories as mem0 ranked them, without labels.
    """

    text: str
    annotation: str | None
    request: ContextRequest
    plan: Plan | None = None

    def __str__(self) -> str:
        """Return text and annotation."""
        if self.plan is None:
            return self.text
        return render_turn(self.plan.parts, self.annotation, "", self.plan.templates)

    def messages(self) -> list[dict[str, Any]]:
        """Return OpenAI chat messages: system text, history, then memories and question as one."""
        if self.plan is not None:
            return self.plan.messages()
        content = _joined((self.text, self.request.query))
        return render_messages(self.request.system, self.request.history, content)


def planned_context(plan: Plan) -> MemoryContext:
    """Return the memories of a plan as text."""
    text = render_turn(plan.parts, None, "", plan.templates)
    return MemoryContext(text, plan.order_annotation, plan.request, plan)


def plain_context(texts: Iterable[str], request: ContextRequest) -> MemoryContext:
    """Return texts in the order given, without labels: those of earlier turns may be in use."""
    return MemoryContext(_joined(texts), None, request)


def _joined(texts: Iterable[str]) -> str:
    return DEFAULT_TEMPLATES.separator.join(text for text in texts if text)
