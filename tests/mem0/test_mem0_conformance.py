import asyncio
from typing import Any

from adapter_conformance import AdapterConformance
from mem0_stores import memory

from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory


class AskedStore:
    """Returns the memories that the call itself names, so that threads may share it."""

    def search(self, query: str, *, found: list[dict[str, Any]]) -> dict[str, Any]:
        return {"results": found}


class AsyncAskedStore:
    async def search(self, query: str, *, found: list[dict[str, Any]]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"results": found}


class DrivenMemory:
    def __init__(self, planner: Any) -> None:
        self._sync = ReuseMemory(AskedStore(), planner=planner)
        self._async = AsyncReuseMemory(AsyncAskedStore(), planner=planner)

    @property
    def faults(self) -> int:
        return self._sync.faults + self._async.faults

    def run(self, given: list[Any], query: str) -> list[Any]:
        return _results(self._sync.search(query, found=given))

    async def arun(self, given: list[Any], query: str) -> list[Any]:
        return _results(await self._async.search(query, found=given))


def _results(result: dict[str, Any]) -> list[Any]:
    assert list(result) == ["results"]
    return list(result["results"])


class TestReuseMemory(AdapterConformance):
    def adapter(self, planner: Any) -> DrivenMemory:
        return DrivenMemory(planner)

    def item(self, letter: str) -> dict[str, Any]:
        return memory(f"id-{letter}", f"{letter} says: " + letter * 400)

    def text_of(self, item: dict[str, Any]) -> str:
        return str(item["memory"])
