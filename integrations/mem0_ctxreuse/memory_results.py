"""Memories as mem0 returns them, as context blocks, in planned order, and as text for a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

from ctxreuse import ContextBlock, ContextRequest, Plan
from ctxreuse.adapters.plan_metadata import METADATA_KEY, plan_metadata
from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, SentBlock, render_messages, render_turn
from ctxreuse.errors import InvalidRequestError

MemoryRecord: TypeAlias = Mapping[str, Any]
"""One memory: `id`, `memory` (its text), and other fields of mem0."""

_RESULTS = "results"


def found_memories(result: Any) -> Sequence[MemoryRecord]:
    """Return the memories of a search, best first.

    Args:
        result: `{"results": [...]}`, or the list itself, as older hosted clients return it.

    Raises:
        InvalidRequestError: neither of these.
    """
    memories = result.get(_RESULTS) if isinstance(result, Mapping) else result
    if not isinstance(memories, list):
        raise InvalidRequestError(
            f"a search must return a dict with a list under 'results', or a list, not a "
            f"{type(result).__name__} with a {type(memories).__name__}"
        )
    return memories


def texts_as_found(result: Any) -> list[str]:
    """Return the texts in a result of any kind, without exact duplicates."""
    memories = result.get(_RESULTS) if isinstance(result, Mapping) else result
    found = memories if isinstance(memories, (list, tuple)) else ()
    texts = (memory.get("memory") for memory in found if isinstance(memory, Mapping))
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def memory_block(memory: MemoryRecord) -> ContextBlock:
    """Return a memory as a block: id and text together, so that an updated memory is another one.

    Raises:
        InvalidBlockError: no text, as when only some fields were asked for.
    """
    memory_id = memory.get("id")
    if memory_id is not None and not isinstance(memory_id, (str, int)):
        memory_id = str(memory_id)  # a UUID
    return ContextBlock(id=memory_id, text=memory.get("memory"))  # type: ignore[arg-type]


def result_in_order(result: Any, blocks: Sequence[ContextBlock], plan: Plan) -> Any:
    """Return a search's result with its memories in the order of a plan, as copies.

    Args:
        result: What the search returned.
        blocks: A block for each of its memories.
        plan: Their plan, made with `deduplicate=False`.

    Returns:
        A dict has the plan, and each memory's rank and label, under one more key, "ctxreuse"; a
        list has no place for it.
    """
    found = found_memories(result)
    ranks: dict[BlockKey, list[int]] = {}
    for rank, block in enumerate(blocks):
        ranks.setdefault(block.key, []).append(rank)
    places: list[dict[str, Any]] = [
        {"id": part.block.id, "rank": rank, "label": part.label}
        for part in plan.parts
        if isinstance(part, SentBlock)
        for rank in ranks[part.block.key]
    ]
    assert len(places) == len(found)
    memories = [deepcopy(found[place["rank"]]) for place in places]
    if not isinstance(result, Mapping):
        return memories
    others = {name: deepcopy(value) for name, value in result.items() if name != _RESULTS}
    return {
        _RESULTS: memories,
        **others,
        METADATA_KEY: {"memories": places, "plan": plan_metadata(plan)},
    }


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """The memories found for a question, as text.

    `str()` of it is the whole context: text, then annotation.

    Attributes:
        text: The memories under their labels, in planned order; instead of a memory that the
            conversation shows already, its place there. "" if none was found.
        annotation: The order in which mem0 ranked them, in words; None if the text has that order.
        request: The request: system text, history, question, and the planned memories, exact
            duplicates once.
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
    """Return texts in the order given, without labels, because earlier turns may use these."""
    return MemoryContext(_joined(texts), None, request)


def _joined(texts: Iterable[str]) -> str:
    return DEFAULT_TEMPLATES.separator.join(text for text in texts if text)
