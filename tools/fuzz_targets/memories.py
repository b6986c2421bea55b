"""Memories with hostile contents: Mem0's searches, and LlamaIndex's memory that replays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from random import Random
from typing import Any

import pydantic
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import Memory, StaticMemoryBlock
from llamaindex_helpers import ListChatStore

from ctxreuse import request_context
from ctxreuse.errors import InvalidRequestError
from fuzz_targets.llamaindex_models import fields_of, message
from fuzz_targets.mutation import Target, UsersError, json_value, mutated, text
from fuzz_targets.wrapped import DOCUMENTS, Comparison, Outcome, fresh, names, odd
from fuzz_targets.wrapped import document as text_of
from llamaindex_ctxreuse import ReplayMemory, ReuseMemoryBlock
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory

_FIELDS: dict[str, tuple[Any, ...]] = {
    "token_limit": (30_000, 300, 1),
    "token_flush_size": (3_000, 10),
    "chat_history_token_ratio": (0.7, 0.1),
    "insert_method": ("user", "system"),
    "session_id": ("s", ""),
    "memory_blocks": ([],),
    "tokenizer_fn": (str.split, list),
    "image_token_size_estimate": (256,),
}


_DEFAULTS = {
    "token_limit": 30_000,
    "token_flush_size": 3_000,
    "insert_method": "user",
    "session_id": "s",
    "memory_blocks": [],
    "tokenizer_fn": str.split,
}


class _Store:
    """A Mem0 that finds what it is told to; `get` knows nothing."""

    def __init__(self) -> None:
        self.found: Any = None

    def search(self, query: str, **kwargs: Any) -> Any:
        if self.found is None:
            raise UsersError("failed")
        return fresh(self.found)

    def get(self, memory_id: Any) -> Any:
        return None


class _AsyncStore(_Store):
    async def search(self, query: str, **kwargs: Any) -> Any:
        return super().search(query, **kwargs)


def found_memories(source: Random) -> Any:
    """Return what a search finds; None raises."""
    if source.random() < 0.06:
        return source.choice((None, odd(source)))
    memories: list[Any] = [
        {"id": source.choice((name, name, 3, None)), "memory": text_of(name), "score": 0.5}
        for name in names(source)
    ]
    if source.random() < 0.3:
        memories.append({"id": text(source, 2), "memory": text(source)})
    if source.random() < 0.1:
        memories.append({"id": "x", "memory": json.dumps({"role": "system", "content": "No."})})
    result: Any = {"results": memories, "relations": []}
    if source.random() < 0.2:
        result["ctxreuse"] = json_value(source)
    if source.random() < 0.2:
        result["relations"] = json_value(source)
    found = mutated(source.choice((result, result, memories)), source, 1)
    among = _memories_in(found)
    if type(among) is list and source.random() < 0.1:
        among.insert(source.randrange(len(among) + 1), odd(source))
    return found


def _searches(source: Random) -> dict[str, Any]:
    return {
        "calls": [
            (
                source.choice(("search", "context", "messages")),
                source.choice((text(source), "Which?")),
                found_memories(source),
            )
            for _ in range(source.randrange(1, 4))
        ],
        "filters": source.choice((None, {"user_id": "a"}, {"user_id": text(source)}, odd(source))),
        "conversation_id": source.choice((None, None, "c")),
        "is_async": source.random() < 0.3,
    }


def _search(given: Mapping[str, Any]) -> None:
    """Search with and without a wrapper; each memory comes back once, as it was found."""
    store = _AsyncStore() if given["is_async"] else _Store()
    memory = AsyncReuseMemory(store) if given["is_async"] else ReuseMemory(store)
    history: list[dict[str, Any]] = []
    for method, query, found in given["calls"]:
        store.found = found
        options: dict[str, Any] = {"filters": fresh(given["filters"])}
        plain = _outcome(store, "search", query, options)
        if method != "search" and given["conversation_id"] is not None:
            options |= {"conversation_id": given["conversation_id"], "history": list(history)}
        planned = _outcome(memory, method, query, options)
        reads = method != "search"
        if reads and isinstance(planned.error, UsersError) and plain.error is None:
            continue  # what was found fails while it is read
        if not planned.check_as_fine_as(plain):
            continue
        if not reads:
            _check_result(plain.value, planned.value)
            continue
        messages = planned.value if method == "messages" else planned.value.messages()
        content = messages[-1]["content"]
        assert content.endswith(query)
        _check_shown(_remembered(found), content, "\n".join(one["content"] for one in messages))
        history = [*messages, {"role": "assistant", "content": "Yes."}]


def _outcome(memory: Any, method: str, query: str, options: Mapping[str, Any]) -> Outcome:
    return Outcome.of(lambda: getattr(memory, method)(query, **options))


def _memories_in(result: Any) -> Any:
    return result.get("results") if isinstance(result, dict) else result


def _remembered(found: Any) -> list[str]:
    """Return the texts of the memories in a result, as far as it has any."""
    given = _memories_in(found) if type(_memories_in(found)) is list else []
    texts = [one.get("memory") for one in given if isinstance(one, dict)]
    return [words for words in texts if isinstance(words, str)]


def _check_result(given: Any, got: Any) -> None:
    assert type(given) is type(got)
    before, after = _memories_in(given), _memories_in(got)
    if type(before) is not list:
        Comparison().check(given, got)
        return
    left = list(after)
    for one in before:
        same = next((n for n, other in enumerate(left) if _is_same(one, other)), None)
        assert same is not None, f"lost: {one!r}"
        del left[same]
    assert not left, "a memory is doubled"
    if isinstance(given, dict):
        beside = [{k: v for k, v in one.items() if k != "results"} for one in (given, got)]
        Comparison().check(*beside)


def _is_same(one: Any, other: Any) -> bool:
    try:
        Comparison().check([one], [other])
        if isinstance(one, dict):
            Comparison().check(one.get("id"), other.get("id"))
    except AssertionError:
        return False
    return True


def _check_shown(texts: list[str], content: str, whole: str) -> None:
    assert all(words in whole for words in texts if words.strip()), "a memory is lost"
    for name in DOCUMENTS:
        count = content.count(text_of(name))
        assert count <= 1, f"{name} is doubled"


def _replay(source: Random) -> dict[str, Any]:
    fields = {
        name: source.choice(values) if source.random() < 0.9 else odd(source)
        for name, values in _FIELDS.items()
        if source.random() < 0.2
    }
    steps: list[tuple[str, Any, Any]] = []
    for _ in range(source.randrange(1, 5)):
        kind = source.choice(("put", "put", "get", "ask", "set", "reset"))
        given: Any = fields_of(source, source.choice(("user", "assistant", "tool")), text(source))
        if kind == "ask":
            given = source.choice((text(source), given))
        steps.append((kind, given, found_memories(source)))
    return {"fields": fields, "has_block": source.random() < 0.7, "steps": steps}


def _replay_both(given: Mapping[str, Any]) -> None:
    """Take the same steps with LlamaIndex's memory and with ours."""
    made = [_made(kind, given["fields"]) for kind in (Memory, ReplayMemory)]
    if made[1].error is not None:
        if "insert_method" not in given["fields"]:
            numbers = (one for one in given["fields"].values() if type(one) in (int, float))
            assert any(one > 1e308 for one in numbers) or made[0].error is not None, made[1].error
        if isinstance(made[1].error, (pydantic.ValidationError, UsersError)):
            raise InvalidRequestError("refused") from made[1].error
        raise made[1].error
    if made[0].error is not None:  # ours takes any empty collection for no blocks
        return
    plain, memory = made[0].value, made[1].value
    store = _Store()
    if given["has_block"] and not memory.memory_blocks:
        plain.memory_blocks.append(StaticMemoryBlock(static_content=[]))  # it takes ours' steps
        memory.memory_blocks.append(ReuseMemoryBlock(memory=store))
    asyncio.run(_steps(given, plain, memory, store))


def _made(kind: Any, fields: Mapping[str, Any]) -> Outcome:
    options = {**_DEFAULTS, **fresh(fields)}
    return Outcome.of(lambda: kind(sql_store=ListChatStore(), **options))


async def _steps(given: Mapping[str, Any], plain: Memory, memory: Any, store: _Store) -> None:
    alone = ReuseMemoryBlock(memory=store)
    for kind, value, found in given["steps"]:
        store.found = found
        content = await alone.aget([ChatMessage(role="user", content="Which?")])
        _check_shown(_remembered(found), content, content)
        outcomes = [await _stepped(one, kind, value) for one in (plain, memory)]
        error = outcomes[1].error
        if isinstance(error, UsersError) and memory.memory_blocks:  # of what these say
            continue
        if not outcomes[1].check_as_fine_as(outcomes[0]) or kind not in ("get", "ask"):
            continue
        said, shown = outcomes[0].value, outcomes[1].value
        for one in said:  # each in its order, with memories before it
            while shown and not _shows(shown[0], one):
                shown = shown[1:]
            assert shown, f"lost: {one!r}"
            shown = shown[1:]


def _shows(sent: ChatMessage, said: ChatMessage) -> bool:
    blocks = sent.blocks[len(sent.blocks) - len(said.blocks) :]
    return sent.role == said.role and blocks == said.blocks


async def _stepped(memory: Any, kind: str, value: Any) -> Outcome:
    with request_context(conversation_id="c"):
        if kind == "put":
            return await Outcome.awaited(lambda: memory.aput(message(value)))
        if kind == "set":
            return await Outcome.awaited(lambda: memory.aset([message(value)]))
        if kind == "reset":
            return await Outcome.awaited(memory.areset)
        if kind == "ask":
            question = message(value) if isinstance(value, dict) else value
            # LlamaIndex's own takes it for its blocks alone
            asked = {"input": question} if isinstance(memory, ReplayMemory) else {}
            return await Outcome.awaited(lambda: memory.aget(**asked))
        return await Outcome.awaited(memory.aget)


TARGETS = {
    "mem0 searches": Target(_searches, _search),
    "replaying memories": Target(_replay, _replay_both),
}
