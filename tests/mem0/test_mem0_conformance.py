import asyncio
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from adapter_conformance import AdapterConformance, Retrieved, Shown
from mem0_stores import memory

from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory


class AskedStore:
    """Returns the memories that the call itself names, so that threads may share it."""

    def __init__(self) -> None:
        self.returned: list[tuple[Any, Any]] = []

    def search(self, query: str, *, found: list[dict[str, Any]]) -> dict[str, Any]:
        self.returned.append((found, deepcopy(found)))
        return {"results": found}


class AsyncAskedStore(AskedStore):
    async def search(self, query: str, *, found: list[dict[str, Any]]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return super().search(query, found=found)


class DrivenMemory:
    def __init__(self, planner: Any) -> None:
        self._stores = AskedStore(), AsyncAskedStore()
        self._sync = ReuseMemory(self._stores[0], planner=planner)
        self._async = AsyncReuseMemory(self._stores[1], planner=planner)

    @property
    def faults(self) -> int:
        return self._sync.faults + self._async.faults

    def run(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        return _shown(self._sync.search(query, found=_memories(retrieved)))

    async def arun(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        return _shown(await self._async.search(query, found=_memories(retrieved)))

    def inputs_are_untouched(self) -> bool:
        return all(found == copy for store in self._stores for found, copy in store.returned)


def _memories(retrieved: Sequence[Retrieved]) -> list[dict[str, Any]]:
    return [memory(one.id, one.text, metadata={"source": one.source}) for one in retrieved]


def _shown(result: dict[str, Any]) -> list[Shown]:
    planned = result.get("ctxreuse")
    places = planned["memories"] if planned else [{"rank": None, "label": None}] * 99
    return [
        Shown(
            id=one["id"],
            text=one["memory"],
            source=one["metadata"]["source"],
            rank=place["rank"],
            label=place["label"],
            plan=planned["plan"] if planned else None,
        )
        for one, place in zip(result["results"], places, strict=planned is not None)
    ]


class TestReuseMemory(AdapterConformance):
    annotation_modes = ("metadata",)

    def adapter(self, planner: Any, annotation: Any = "metadata") -> DrivenMemory:
        return DrivenMemory(planner)

    @pytest.mark.skip(reason="search only says the annotation in its extra key: it has no modes")
    def test_off_mode_appends_nothing(self): ...

    @pytest.mark.skip(reason="search only says the annotation in its extra key: it has no modes")
    def test_an_unknown_annotation_mode_is_refused(self): ...
