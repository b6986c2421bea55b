"""What every adapter for retrieved things has to do, whatever the framework; each subclasses this.

A subclass says how its framework is driven (`adapter`); the tests stand here once.
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import ctxreuse
from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, Templates


@dataclass(frozen=True)
class Retrieved:
    """What the framework's retrieval is to return."""

    id: str
    text: str
    source: str = ""


@dataclass(frozen=True)
class Shown:
    """What an adapter returned: a document, or the annotation behind them."""

    id: str | None
    text: str
    source: str | None
    rank: int | None
    label: str | None
    plan: Mapping[str, Any] | None
    is_annotation: bool = False


class DrivenAdapter(Protocol):
    """An adapter with a retrieval inside that returns what the test says."""

    @property
    def faults(self) -> int: ...

    def run(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]: ...

    async def arun(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]: ...

    def inputs_are_untouched(self) -> bool:
        """Whether the things that went in are still equal to copies made before."""
        ...


def documents(letters: str) -> list[Retrieved]:
    """Return one document a letter, long enough that reordering pays."""
    return [
        Retrieved(f"id-{letter}", f"{letter} says: " + letter * 400, f"{letter}.txt")
        for letter in letters
    ]


class AdapterConformance:
    """Subclass it, give `adapter`; `class TestReuseRetriever(AdapterConformance)`."""

    annotation_modes: tuple[str, ...] = ("append", "metadata", "off")

    @abstractmethod
    def adapter(self, planner: Any, annotation: Any = "metadata") -> DrivenAdapter:
        """Return the adapter, made with the planner and annotation mode given."""

    def test_the_order_is_the_planners(self) -> None:
        adapter, alone = self.adapter(ReusePlanner()), ReusePlanner(labels=True)
        for letters in ("abc", "dbe", "cba", "xyz", "bca"):
            shown = adapter.run(documents(letters), "q?")
            plan = alone.plan(
                ContextRequest(
                    [ContextBlock(id=d.id, text=d.text) for d in documents(letters)], "q?"
                )
            )
            assert [one.text for one in shown] == [block.text for block in plan.blocks]
            assert [one.label for one in shown] == list(plan.labels)

    def test_ranks_and_plan_are_in_the_metadata(self) -> None:
        adapter = self.adapter(ReusePlanner())
        adapter.run(documents("abc"), "q?")
        shown = adapter.run(documents("dba"), "q?")
        assert {one.text[0]: one.rank for one in shown} == {"d": 0, "b": 1, "a": 2}
        first, *others = shown
        assert first.plan is not None
        assert len(first.plan["blocks"]) == 3
        assert first.plan["references"] == []
        assert all(one.plan in (None, first.plan) for one in others)

    def test_ids_and_metadata_are_kept(self) -> None:
        shown = self.adapter(ReusePlanner()).run(documents("abc"), "q?")
        assert {(one.id, one.source) for one in shown} == {
            ("id-a", "a.txt"),
            ("id-b", "b.txt"),
            ("id-c", "c.txt"),
        }

    def test_what_goes_in_is_not_changed(self) -> None:
        adapter = self.adapter(ReusePlanner(), self.annotation_modes[0])
        adapter.run(documents("abc"), "q?")
        adapter.run(documents("dba"), "q?")
        assert adapter.inputs_are_untouched()

    @examples(30, suppress_health_check=[HealthCheck.differing_executors])
    @given(contexts=st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), max_size=6))
    def test_each_document_comes_back_once_and_unaltered(self, contexts: list[list[str]]) -> None:
        adapter = self.adapter(ReusePlanner())
        for letters in contexts:
            retrieved = documents("".join(letters))
            shown = adapter.run(retrieved, "q?")
            assert sorted((one.id or "", one.text) for one in shown) == sorted(
                (one.id, one.text) for one in retrieved
            )
        assert adapter.faults == 0

    async def test_async_gives_what_sync_gives(self) -> None:
        sync, asynchronous = self.adapter(ReusePlanner()), self.adapter(ReusePlanner())
        for letters in ("abc", "dbe", "cba", "", "bca"):
            assert await asynchronous.arun(documents(letters), "q?") == sync.run(
                documents(letters), "q?"
            )

    async def test_many_tasks_lose_nothing(self) -> None:
        adapter = self.adapter(ReusePlanner())
        contexts = ["abc", "cab", "bcd", "dea"] * 5
        answers = await asyncio.gather(*(adapter.arun(documents(c), "q?") for c in contexts))
        for letters, shown in zip(contexts, answers, strict=True):
            assert sorted(one.text[0] for one in shown) == sorted(letters)

    def test_many_threads_lose_nothing(self) -> None:
        adapter = self.adapter(ReusePlanner())
        contexts = ["abc", "cab", "bcd", "dea"] * 5
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda c: adapter.run(documents(c), "q?"), contexts))
        for letters, shown in zip(contexts, answers, strict=True):
            assert sorted(one.text[0] for one in shown) == sorted(letters)
        assert adapter.faults == 0

    def test_a_planning_fault_lets_documents_through_as_retrieved(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapter = self.adapter(FaultyPlanner(), self.annotation_modes[0])
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            for _ in range(3):
                shown = adapter.run(documents("abc"), "a secret question")
                assert [one.text[0] for one in shown] == ["a", "b", "c"]
        assert adapter.faults == 3
        assert len(caplog.records) == 1
        assert "RuntimeError" in caplog.text
        assert "secret" not in caplog.text

    async def test_a_planning_fault_lets_async_calls_through_too(self) -> None:
        adapter = self.adapter(FaultyPlanner())
        shown = await adapter.arun(documents("abc"), "q?")
        assert [one.text[0] for one in shown] == ["a", "b", "c"]
        assert adapter.faults == 1

    def test_a_tenants_order_does_not_depend_on_another_tenant(self) -> None:
        planner, alone = ReusePlanner(), ReusePlanner()
        adapter, reference = self.adapter(planner), self.adapter(alone)
        with ctxreuse.request_context(tenant="one"):
            adapter.run(documents("abc"), "q?")
        with ctxreuse.request_context(tenant="two"):
            assert [one.text for one in adapter.run(documents("cba"), "q?")] == [
                one.text for one in reference.run(documents("cba"), "q?")
            ]
        with ctxreuse.request_context(tenant="one"):
            shown = adapter.run(documents("cba"), "q?")
        assert [one.text[0] for one in shown] != ["c", "b", "a"]

    def test_the_tenant_reaches_threads_that_copy_the_context(self) -> None:
        planner = ReusePlanner()
        adapter = self.adapter(planner)
        with ctxreuse.request_context(tenant="one"), ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, adapter.run, documents("abc"), "q?").result()
        unseen = adapter.run(documents("dcb"), "q?")
        assert [one.text[0] for one in unseen] == ["d", "c", "b"]

    def test_append_puts_the_annotation_behind_the_documents(self) -> None:
        if "append" not in self.annotation_modes:
            pytest.skip("this adapter has no such mode")
        adapter = self.adapter(ReusePlanner(templates=Templates()), "append")
        first = adapter.run(documents("abc"), "q?")
        assert [one.is_annotation for one in first] == [False] * 3, "nothing was moved"
        second = adapter.run(documents("dba"), "q?")
        assert [one.is_annotation for one in second] == [False] * 3 + [True]
        places = {one.rank: str(place) for place, one in enumerate(second[:3], 1)}
        ranking = ", ".join(places[rank] for rank in range(3))
        assert second[-1].text == f"Read documents {ranking} first."

    def test_metadata_mode_appends_nothing(self) -> None:
        adapter = self.adapter(ReusePlanner(templates=Templates()), "metadata")
        adapter.run(documents("abc"), "q?")
        shown = adapter.run(documents("dba"), "q?")
        assert len(shown) == 3
        assert shown[0].plan is not None
        assert shown[0].plan["order_annotation"].startswith("Read documents ")

    def test_off_mode_appends_nothing(self) -> None:
        adapter = self.adapter(ReusePlanner(), "off")
        adapter.run(documents("abc"), "q?")
        assert len(adapter.run(documents("dba"), "q?")) == 3

    def test_without_a_planner_one_is_made(self) -> None:
        assert len(self.adapter(None).run(documents("ab"), "q?")) == 2

    @pytest.mark.parametrize("planner", ["planner", 3])
    def test_a_planner_of_another_type_is_refused(self, planner: object) -> None:
        with pytest.raises(
            (ValueError, TypeError), match=r"planner must be a ctxreuse\.ReusePlanner"
        ):
            self.adapter(planner)

    def test_an_unknown_annotation_mode_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no annotation mode 'loud'.*'append'"):
            self.adapter(ReusePlanner(), "loud")


class FaultyPlanner(ReusePlanner):
    """A planner with a fault of ours, whose message holds what the user asked."""

    def plan(self, request: ContextRequest, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"a fault with {request.query}")

    def plan_batch(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"a fault with {[request.query for request in requests]}")
