from __future__ import annotations

import copy
import inspect
import logging
from functools import reduce
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mem0_stores import AsyncFakeMemory, FakeMemory, ListMemory, lettered, memory
from python_processes import python

from ctxreuse import ReusePlanner, request_context
from ctxreuse.errors import InvalidRequestError
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory


def planned_after(letters: str, *earlier: str, **options: Any) -> tuple[ReuseMemory, FakeMemory]:
    """Return a wrapper that has searched and found the earlier ones, and will find the letters."""
    store = FakeMemory()
    wrapped = ReuseMemory(store, **options)
    for found in earlier:
        store.found = lettered(found)
        wrapped.search("q?")
    store.found = lettered(letters)
    return wrapped, store


def test_importing_it_imports_no_mem0():
    assert python("import sys, mem0_ctxreuse; sys.exit('mem0' in sys.modules)")


@pytest.mark.parametrize("mode", ["active", "shadow"])
@given(st.lists(st.permutations("abcd"), max_size=6))
def test_what_searches_save_is_unknown_and_never_a_number(mode, orders):
    planner, store = ReusePlanner(mode=mode), FakeMemory()
    wrapped = ReuseMemory(store, planner=planner)
    for letters in orders:
        store.found = lettered("".join(letters))
        wrapped.search("q?")
    savings = planner.savings
    assert savings.unseen == len(orders)
    assert savings.saved_tokens == savings.changed == 0
    assert str(savings).startswith("What is saved is unknown" if savings.unseen else "No request")


def test_what_else_a_result_holds_is_kept():
    wrapped, _ = planned_after("")
    wrapped.memory.found = {"count": 1, "results": lettered("a"), "relations": [{"source": "a"}]}
    result = wrapped.search("q?")
    assert {name: result[name] for name in wrapped.memory.found} == wrapped.memory.found


def test_a_list_stays_a_list():
    store = ListMemory(lettered("abc"))
    wrapped = ReuseMemory(store)
    wrapped.search("q?", "alice")
    store.found = lettered("dba")
    d, b, a = store.found
    assert wrapped.search("q?", "alice") == [a, b, d]
    assert wrapped.search("q?", limit=2, user_id="bob") == [d, b]


def test_ids_need_not_be_strings_and_an_updated_memory_is_another_block():
    uuid = UUID("12345678123456781234567812345678")
    found = [memory(7, "seven"), memory(uuid, "a UUID"), {"memory": "without an id"}]
    result = ReuseMemory(FakeMemory(found)).search("q?")
    assert result["results"] == found
    nested: Any = reduce(lambda inner, _: [inner], range(5_000), [])  # has no repr
    wrapped = ReuseMemory(FakeMemory([memory(nested, "nested")]))
    assert ("nested" in str(wrapped.context("q?")), wrapped.faults) == (True, 0)

    wrapped, store = planned_after("abc", "abc")
    a, b, c = lettered("abc")
    changed = {**b, "memory": "b changed: " + "B" * 400}
    store.found = [changed, a, c]
    assert wrapped.search("q?")["results"][0] == a, "what is cached comes first"
    store.found = [b, a, c]
    assert wrapped.search("q?")["results"] == [a, b, c]


def test_a_search_behind_a_history_leaves_nothing_out():
    wrapped, _ = planned_after("ab", labels=True)
    with request_context(tenant="t", conversation_id="c", history=[]):
        first = wrapped.context("q?")
    history = [*first.messages(), {"role": "assistant", "content": "yes"}]
    with request_context(tenant="t", conversation_id="c", history=history):
        result = wrapped.search("q?")
    assert result["results"] == lettered("ab")


@pytest.mark.parametrize(
    "found",
    [
        {"results": [{"id": "1", "score": 0.5}]},
        {"results": [memory("1", "text"), "no memory"]},
        {"results": None},
        {"message": "accepted"},
    ],
)
def test_what_cannot_be_planned_comes_back_as_it_is(found, caplog):
    wrapped = ReuseMemory(FakeMemory(found))
    before = copy.deepcopy(found)
    with caplog.at_level(logging.WARNING, "ctxreuse"):
        assert wrapped.search("q?") == before
        assert wrapped.search("q?") == before
    assert wrapped.faults == 2
    assert len(caplog.records) == 1
    assert "ReuseMemory: planning failed with" in caplog.text
    assert "memories go through as retrieved" in caplog.text


def test_an_error_of_the_memory_is_the_callers():
    class Broken:
        def search(self, query: str) -> Any:
            raise ConnectionError("the store is down")

    wrapped = ReuseMemory(Broken())
    for call in (wrapped.search, wrapped.context, wrapped.messages):
        with pytest.raises(ConnectionError, match="the store is down"):
            call("q?")
    assert wrapped.faults == 0


def test_a_search_looks_as_the_wrapped_memorys():
    store, async_store = FakeMemory(), AsyncFakeMemory()
    wrapped, awaited = ReuseMemory(store), AsyncReuseMemory(async_store)
    assert wrapped.search.__name__ == "search"
    assert inspect.getdoc(wrapped.search) == "Search for memories."
    assert inspect.signature(awaited.search) == inspect.signature(async_store.search)
    assert "planned order" in (inspect.getdoc(ReuseMemory.search) or "")
    assert list(inspect.signature(ReuseMemory.search).parameters)[:2] == ["self", "query"]


def test_everything_else_passes_through():
    class Store(FakeMemory):
        limit = 3

        def add(self, messages: str, *, user_id: str) -> dict[str, Any]:
            return {"added": messages, "for": user_id}

    store = Store(lettered("cab"))
    wrapped: Any = ReuseMemory(store)
    assert wrapped.memory is store
    assert wrapped.add("text", user_id="alice") == {"added": "text", "for": "alice"}
    assert wrapped.add == store.add
    assert wrapped.get_all(top_k=2) == {"results": lettered("cab")[:2]}
    assert inspect.signature(wrapped.get_all) == inspect.signature(store.get_all)
    wrapped.limit = 5
    assert store.limit == 5
    wrapped.note = "mine"
    assert (wrapped.note, hasattr(store, "note")) == ("mine", False)
    assert {"add", "get_all", "limit", "messages"} <= set(dir(wrapped))
    with pytest.raises(AttributeError, match="'Store' object has no attribute 'delete'"):
        wrapped.delete("id")
    assert repr(wrapped) == "ReuseMemory(Store)"
    wrapped.search = "another"
    assert (wrapped.search, callable(store.search)) == ("another", True)


def test_a_wrapper_may_be_copied():
    class Store(FakeMemory):
        def __deepcopy__(self, memo: Any) -> Store:
            raise AssertionError("the wrapper was asked for")

    wrapped = ReuseMemory(Store(lettered("a")))
    assert copy.copy(wrapped).search("q?")["results"] == lettered("a")
    assert not hasattr(wrapped, "__deepcopy__")
    with pytest.raises(AttributeError, match="has no attribute '_memory'"):
        _ = ReuseMemory.__new__(ReuseMemory).limit


def test_a_with_block_is_the_memorys():
    class Store(FakeMemory):
        closed = False

        def __enter__(self) -> Store:
            return self

        def __exit__(self, *raised: Any) -> bool:
            self.closed = True
            return raised[0] is KeyError

    store = Store()
    with ReuseMemory(store) as wrapped:
        assert isinstance(wrapped, ReuseMemory)
        raise KeyError("swallowed by the store")
    assert store.closed


def test_a_subclass_may_extend_the_search():
    class Few(ReuseMemory):
        def __init__(self, store: FakeMemory) -> None:
            self.searches = 0
            super().__init__(store)

        def search(self, query: str, *args: Any, **kwargs: Any) -> Any:
            self.searches += 1
            return super().search(query, *args, **kwargs)

    few = Few(FakeMemory(lettered("a")))
    assert few.search("q?")["results"] == lettered("a")
    assert few.searches == 1


@pytest.mark.parametrize(
    ("not_a_memory", "named"),
    [
        (None, "NoneType is none"),
        ({"llm": {"api_key": "sk-secret"}}, "dict is none"),
        (FakeMemory, "the class FakeMemory is none"),
        (ReuseMemory(FakeMemory()), "memory is a ReuseMemory already"),
    ],
)
def test_what_is_no_memory_is_refused(not_a_memory, named):
    for kind in (ReuseMemory, AsyncReuseMemory):
        with pytest.raises(InvalidRequestError, match=named) as raised:
            kind(not_a_memory)
        assert "secret" not in str(raised.value)


def test_wrong_memories_and_arguments_are_refused_at_construction():
    with pytest.raises(InvalidRequestError, match="AsyncFakeMemory is awaited; use AsyncReuseMem"):
        ReuseMemory(AsyncFakeMemory())
    with pytest.raises(InvalidRequestError, match="FakeMemory cannot be awaited; use ReuseMemory"):
        AsyncReuseMemory(FakeMemory())

    with pytest.raises(InvalidRequestError, match=r"planner must be a ctxreuse\.ReusePlanner"):
        ReuseMemory(FakeMemory(), planner=3)
    with pytest.raises(InvalidRequestError, match="tenant must be a string, not 3"):
        ReuseMemory(FakeMemory(), tenant=3)
    planner = ReusePlanner()
    assert ReuseMemory(FakeMemory(), planner=planner).planner is planner


async def test_mocks_may_be_wrapped():
    mock = MagicMock()
    mock.search.return_value = {"results": lettered("a")}
    assert ReuseMemory(mock).search("q?", filters={})["results"] == lettered("a")
    mock.search.assert_called_once_with("q?", filters={})
    awaited = AsyncMock()
    awaited.search.return_value = lettered("b")
    assert await AsyncReuseMemory(awaited).search("q?") == lettered("b")


def test_a_patch_of_a_wrapped_method_ends_where_it_should():
    class Store(FakeMemory):
        def update(self) -> str:
            return "updated"

    store = Store(lettered("a"))
    wrapped = ReuseMemory(store)
    before = store.search
    with patch.object(wrapped, "add", create=True) as added:
        wrapped.add("x")
        added.assert_called_once_with("x")
    assert not hasattr(store, "add")
    with patch.object(wrapped, "update", return_value="patched"):
        assert store.update() == "patched"
    assert (wrapped.update(), store.update()) == ("updated", "updated")
    with patch.object(wrapped, "search", return_value="patched"):
        assert wrapped.search("q?") == "patched"
    assert store.search == before
    assert [one["id"] for one in wrapped.search("q?")["results"]] == ["id-a"]


def test_an_attribute_that_is_nowhere_cannot_be_deleted():
    wrapped, _ = planned_after("a")
    with pytest.raises(AttributeError, match="nowhere"):
        del wrapped.nowhere


async def test_an_async_with_block_is_the_memorys():
    store = MagicMock()
    async with AsyncReuseMemory(store) as wrapped:
        assert isinstance(wrapped, AsyncReuseMemory)
        store.__aexit__.assert_not_awaited()
    store.__aexit__.assert_awaited_once()
