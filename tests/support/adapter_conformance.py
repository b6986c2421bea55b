"""What each adapter for retrieved things promises, whatever the framework; its tests subclass this.

An adapter gives back the application's own objects, as many as came, in planned order, with nothing
in them that was not there.
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from copy import deepcopy
from typing import Any, Protocol

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, request_context

WORDS = ["abc", "cab", "bcd", "dea"] * 5


class FaultyPlanner(ReusePlanner):
    """A planner with a fault of ours, whose message holds what the user asked."""

    def plan(self, request: ContextRequest, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"a fault with {request.query}")

    def plan_batch(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"a fault with {[request.query for request in requests]}")


class DrivenAdapter(Protocol):
    """An adapter around a retrieval that returns what the test gives."""

    @property
    def faults(self) -> int: ...

    def run(self, given: list[Any], query: str) -> Sequence[Any]: ...

    async def arun(self, given: list[Any], query: str) -> Sequence[Any]: ...


class AdapterConformance:
    """Give `adapter`, `item` and `text_of`: `class TestReuseRetriever(AdapterConformance)`."""

    @abstractmethod
    def adapter(self, planner: Any) -> DrivenAdapter:
        """Return the adapter, made with a planner."""

    @abstractmethod
    def item(self, letter: str) -> Any:
        """Return a thing as the framework's retrieval does, long enough that moving it pays."""

    @abstractmethod
    def text_of(self, item: Any) -> str:
        """Return the text of a thing, which begins with its letter."""

    def items(self, word: str) -> list[Any]:
        return [self.item(letter) for letter in word]

    def word(self, items: Sequence[Any]) -> str:
        return "".join(self.text_of(item)[0] for item in items)

    def test_the_order_is_the_planners(self) -> None:
        adapter, alone = self.adapter(ReusePlanner()), ReusePlanner()
        for word in ("abc", "dbe", "cba", "xyz", "bca"):
            blocks = [ContextBlock(text=self.text_of(one)) for one in self.items(word)]
            plan = alone.plan(ContextRequest(blocks, "q?"))
            found = adapter.run(self.items(word), "q?")
            assert [self.text_of(one) for one in found] == [block.text for block in plan.blocks]

    @examples(30, suppress_health_check=[HealthCheck.differing_executors])
    @given(words=st.lists(st.text("abcdefgh", max_size=6), max_size=6))
    def test_all_come_back_as_they_were_and_a_repeat_behind_others(self, words: list[str]) -> None:
        adapter = self.adapter(ReusePlanner())
        for word in words:
            items = self.items(word)
            copies = deepcopy(items)
            planned = adapter.run(items, "q?")
            assert sorted(map(id, planned)) == sorted(map(id, items))
            assert items == copies
            assert set(self.word(planned[: len(set(word))])) == set(word)
        assert adapter.faults == 0

    async def test_async_gives_what_sync_gives(self) -> None:
        sync, asynchronous = self.adapter(ReusePlanner()), self.adapter(ReusePlanner())
        for word in ("abc", "dbe", "cba", "", "bca"):
            found = await asynchronous.arun(self.items(word), "q?")
            assert found == sync.run(self.items(word), "q?")

    async def test_many_tasks_and_threads_lose_nothing(self) -> None:
        adapter = self.adapter(ReusePlanner())
        found = await asyncio.gather(*(adapter.arun(self.items(one), "q?") for one in WORDS))
        with ThreadPoolExecutor(8) as pool:
            found += pool.map(lambda one: adapter.run(self.items(one), "q?"), WORDS)
        for word, items in zip(WORDS * 2, found, strict=True):
            assert sorted(self.word(items)) == sorted(word)
        assert adapter.faults == 0

    async def test_a_planning_fault_lets_all_through_as_they_came(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapter = self.adapter(FaultyPlanner())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            assert self.word(adapter.run(self.items("cab"), "a secret question")) == "cab"
            found = await adapter.arun(self.items("bca"), "a secret question")
        assert self.word(found) == "bca"
        assert adapter.faults == 2
        said = [one.getMessage() for one in caplog.records]
        assert len(said) == len({one.split(":")[0] for one in said}), "each component says it once"
        assert all("RuntimeError" in one for one in said)
        assert "secret" not in caplog.text

    def test_a_tenants_order_does_not_depend_on_another_tenant(self) -> None:
        adapter = self.adapter(ReusePlanner())
        with request_context(tenant="one"), ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, adapter.run, self.items("abc"), "q?").result()
        assert self.word(adapter.run(self.items("cba"), "q?")) == "cba"
        with request_context(tenant="two"):
            assert self.word(adapter.run(self.items("cba"), "q?")) == "cba"
        with request_context(tenant="one"):
            assert self.word(adapter.run(self.items("cba"), "q?")) == "abc"

    def test_without_a_planner_one_is_made_and_other_things_are_refused(self) -> None:
        assert len(self.adapter(None).run(self.items("ab"), "q?")) == 2
        with pytest.raises((ValueError, TypeError), match=r"planner must be a ctxreuse\.ReusePlan"):
            self.adapter("planner")
