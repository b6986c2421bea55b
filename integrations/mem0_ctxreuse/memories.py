"""Memories as mem0 returns them, and as context blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

from ctxreuse import ContextBlock, Plan
from ctxreuse.adapters.plan_metadata import METADATA_KEY, plan_metadata
from ctxreuse.context.blocks import BlockId, BlockKey
from ctxreuse.context.rendering import SentBlock
from ctxreuse.errors import InvalidRequestError

Memory: TypeAlias = Mapping[str, Any]
"""One memory: `id`, `memory` (its text), and whatever else mem0 says of it."""

_RESULTS = "results"


@dataclass(frozen=True, slots=True)
class PlacedMemory:
    """A memory in its place.

    Attributes:
        memory: As it was found.
        id: Its id, as the plan has it.
        rank: Its position as found, from 0.
        label: The label of its block, such as "[Doc_1]".
    """

    memory: Memory
    id: BlockId
    rank: int
    label: str


def found_memories(result: Any) -> Sequence[Memory]:
    """Return the memories of a search, best first.

    Args:
        result: `{"results": [...]}`, or the list itself, as older hosted clients return it.

    Raises:
        InvalidRequestError: If it is neither.
    """
    memories = result.get(_RESULTS) if isinstance(result, Mapping) else result
    if not isinstance(memories, list):
        raise InvalidRequestError(
            f"a search must return a dict with a list under 'results', or a list, not a "
            f"{type(result).__name__} with a {type(memories).__name__}"
        )
    return memories


def memory_block(memory: Memory) -> ContextBlock:
    """Return a memory as a block: id and text together, so that an updated memory is another one.

    Raises:
        InvalidBlockError: If it has no text, as when only some fields were asked for.
    """
    memory_id = memory.get("id")
    if memory_id is not None and not isinstance(memory_id, (str, int)):
        memory_id = str(memory_id)  # a UUID
    return ContextBlock(id=memory_id, text=memory.get("memory"))  # type: ignore[arg-type]


def placed_memories(
    memories: Sequence[Memory], blocks: Sequence[ContextBlock], plan: Plan
) -> list[PlacedMemory]:
    """Return the memories in the order of a plan that leaves nothing out, each once.

    Args:
        memories: As found.
        blocks: Their blocks, in the same order.
        plan: Made with `deduplicate=False`.
    """
    ranks: dict[BlockKey, list[int]] = {}
    for rank, block in enumerate(blocks):
        ranks.setdefault(block.key, []).append(rank)
    placed = [
        PlacedMemory(memories[rank], part.block.id, rank, part.label)
        for part in plan.parts
        if isinstance(part, SentBlock)
        for rank in ranks[part.block.key]
    ]
    assert len(placed) == len(memories)
    return placed


def result_in_order(result: Any, placed: Sequence[PlacedMemory], plan: Plan) -> Any:
    """Return a search's result with its memories in order, as copies.

    Args:
        result: What the search returned.
        placed: All its memories.
        plan: The plan behind their order.

    Returns:
        A dict has the plan, and each memory's rank and label, under one more key, "ctxreuse"; a
        list has no place for it.
    """
    memories = [deepcopy(one.memory) for one in placed]
    if not isinstance(result, Mapping):
        return memories
    others = {name: deepcopy(value) for name, value in result.items() if name != _RESULTS}
    return {
        _RESULTS: memories,
        **others,
        METADATA_KEY: {
            "memories": [{"id": one.id, "rank": one.rank, "label": one.label} for one in placed],
            "plan": plan_metadata(plan),
        },
    }
