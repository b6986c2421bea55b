"""What the wrappers of Mem0 return, over a memory that finds what it is told to."""

from __future__ import annotations

import asyncio
from typing import Any

from ctxreuse import ReusePlanner, Templates, request_context
from golden_cases.letters import HISTORY, WORDS, FaultyPlanner, text_of
from golden_cases.recording import Cases, digest
from mem0_ctxreuse import AsyncReuseMemory, MemoryContext, ReuseMemory, tenant_of

CASES = Cases()
_FILTERS: tuple[dict[str, Any], ...] = (
    {"user_id": "ann"},
    {"user_id": "bob", "run_id": "r1"},
    {"AND": [{"user_id": "ann"}, {"agent_id": "helper"}]},
    {"OR": [{"user_id": "ann"}, {"user_id": "bob"}]},
    {"agent_id": 7},
    {},
)


class LetterMemory:
    """Finds a memory for each letter of the query's first word, and notes how it is asked."""

    def __init__(self, as_list: bool = False) -> None:
        self.asked: list[Any] = []
        self._as_list = as_list

    def search(self, query: str, *, filters: Any = None, top_k: int = 20, **more: Any) -> Any:
        """Search for memories."""
        self.asked.append([query, filters, top_k, more])
        word = query.partition(" ")[0][:top_k]
        found = [
            {"id": f"id-{one}", "memory": text_of(one.lower()), "score": 1 - rank / 10, "hash": one}
            for rank, one in enumerate(word)
        ]
        return found if self._as_list else {"results": found, "relations": []}

    def get_all(self, **kwargs: Any) -> Any:
        """Return all memories."""
        return {"results": [{"id": "id-a", "memory": text_of("a")}]}


class AsyncLetterMemory(LetterMemory):
    """The same, awaited."""

    async def search(self, query: str, **kwargs: Any) -> Any:
        """Search for memories."""
        return super().search(query, **kwargs)


def _context(context: MemoryContext) -> list[Any]:
    return [context.text, context.annotation, str(context), context.messages()]


@CASES
def search() -> Any:
    """One search after the other, for several users."""
    inner = LetterMemory()
    memory = ReuseMemory(inner, planner=ReusePlanner())
    results = [memory.search(f"{word} Which?", filters=_FILTERS[0]) for word in WORDS]
    results += [memory.search("cba", filters=filters, top_k=2) for filters in _FILTERS]
    results.append(memory.search("abAc", filters=_FILTERS[0], threshold=0.5))
    listed = ReuseMemory(LetterMemory(as_list=True), planner=ReusePlanner())
    return {
        "results": results[1:3],
        "all": [[[one["id"] for one in r["results"]], digest(r)] for r in results],
        "asked": inner.asked[-2:],
        "list": [[one["id"] for one in listed.search(word)] for word in WORDS],
        "everything else": memory.get_all(filters=_FILTERS[0]),
        "tenants": [tenant_of(filters) for filters in _FILTERS],
    }


@CASES
def messages() -> Any:
    """Messages over some turns of a conversation."""
    memory = ReuseMemory(LetterMemory())
    history: list[Any] = []
    told: list[Any] = []
    for word in ("abc", "bad", "", "ab", "xA"):
        sent = memory.messages(
            f"{word} Which?",
            filters=_FILTERS[0],
            system="Be brief.",
            history=history,
            conversation_id="c",
        )
        told.append(sent[-1])
        history = [*sent[1:], {"role": "assistant", "content": "So."}]
    return {"turns": told, "last": digest(sent)}


@CASES
def contexts() -> Any:
    """Contexts in other words, for tenants and conversations of the surroundings."""
    words = Templates(label="({letters})", block="{label}: {text}", separator="\n")
    planner = ReusePlanner(templates=words)
    memory = ReuseMemory(LetterMemory(), planner=planner)
    found = [_context(memory.context(word, filters=_FILTERS[0])) for word in ("abc", "cbA", "")]
    for said in ({"tenant": "one"}, {"tenant": "one", "conversation_id": "c", "history": HISTORY}):
        with request_context(**said):
            contexts = [memory.context(word, filters=_FILTERS[1]) for word in ("abc", "cab")]
        found += map(_context, contexts)
    own = ReuseMemory(LetterMemory(), planner=planner, tenant="one")
    found.append(_context(own.context("bca", filters=_FILTERS[2], system="Be brief.")))
    return found


@CASES
def awaited() -> Any:
    """The asynchronous wrapper."""

    async def asked() -> list[Any]:
        memory = AsyncReuseMemory(AsyncLetterMemory())
        told = [await memory.search(word, filters=_FILTERS[0]) for word in WORDS]
        told += [await memory.messages(word, filters=_FILTERS[1]) for word in ("abc", "cab")]
        told.append(_context(await memory.context("bca", filters=_FILTERS[1])))
        return told

    return [*map(digest, told := asyncio.run(asked())), told[-2]]


@CASES
def planning_faults() -> Any:
    """Where planning fails, memories go through as found."""
    memory = ReuseMemory(LetterMemory(), planner=FaultyPlanner())
    found = memory.search("ba", filters=_FILTERS[0])
    return [found, memory.messages("ba", system="Be brief.", history=HISTORY), memory.faults]
