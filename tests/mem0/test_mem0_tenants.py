import re
from typing import Any

import pytest
from mem0_stores import AsyncFakeMemory, FakeMemory, ListMemory, lettered

from ctxreuse import request_context
from ctxreuse.pipeline import memories
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory, tenant_of

ALICE = {"user_id": "alice"}


@pytest.mark.parametrize(
    "filters",
    [
        {"user_id": "alice"},
        {"user_id": " alice "},
        {"user_id": {"eq": "alice"}},
        {"user_id": {"in": ["alice"]}},
        {"user_id": ["alice", "alice"]},
        {"user_id": "alice", "category": "food", "score": {"gte": 3}},
        {"user_id": "alice", "agent_id": "coach", "run_id": "r1"},
        {"AND": [{"user_id": "alice"}]},
        {"AND": [{"user_id": "alice"}, {"OR": [{"run_id": "r1"}, {"run_id": "r2"}]}]},
        {"OR": [{"user_id": "alice"}, {"agent_id": "coach"}]},
        {"AND": [{"user_id": "alice"}, {"NOT": [{"category": "food"}]}]},
        {"$and": [{"user_id": "alice"}]},
        {"user_id": "alice", "app_id": None},
        {"user_id": "alice", 3: "a key that is no string"},
    ],
)
def test_a_users_store_is_one_tenant_however_it_is_filtered(filters):
    assert tenant_of(filters) == tenant_of(user_id="alice") == tenant_of(ALICE)


def test_other_stores_are_other_tenants():
    stores: list[dict[str, Any]] = [
        ALICE,
        {"user_id": "bob"},
        {"user_id": "alice", "app_id": "shop"},
        {"agent_id": "alice"},
        {"app_id": "alice"},
        {"run_id": "alice"},
        {"agent_id": "coach"},
        {"agent_id": "coach", "run_id": "r1"},
        {"user_id": "*"},
        {"user_id": {"ne": "alice"}},
        {"NOT": [{"user_id": "alice"}]},
        {"NOT": [{"user_id": "alice"}], "agent_id": "coach"},
        {"OR": [{"user_id": "alice"}, {"user_id": "bob"}]},
        {"AND": [{"user_id": "alice"}, {"NOT": [{"user_id": "bob"}]}]},
        {"user_id": {"contains": "ali"}},
        {"category": "food"},
    ]
    assert len({tenant_of(filters) for filters in stores}) == len(stores)


def test_users_and_those_left_out_are_told_apart_wherever_they_stand():
    nobodys = tenant_of({"NOT": [{"user_id": "alice"}]})
    assert tenant_of({"NOT": [{"AND": [{"user_id": "alice"}]}]}) == nobodys
    assert tenant_of({"AND": [{"NOT": {"user_id": "alice"}}]}) == nobodys
    assert tenant_of({"user_id": 7}) == tenant_of({"user_id": "7"})
    nobodys: list[Any] = [None, {}, {"category": "food"}, {"AND": []}, {"metadata": ALICE}]
    for filters in nobodys:
        assert tenant_of(filters) == ""


def test_a_tenant_is_a_valid_cache_salt_by_one_rule_and_the_plans():
    tenant = tenant_of({"user_id": "alice@example.com/\\\0 é"})
    assert re.fullmatch(r"mem0-[0-9a-f]{32}", tenant)
    assert tenant_of(ALICE) == "mem0-089b962ff8b7b31c248f780274b2741a"
    assert tenant_of is memories.tenant_of
    wrapped = ReuseMemory(FakeMemory(lettered("a")))
    plan = wrapped.context("q?", filters=ALICE).plan
    assert plan is not None
    assert plan.request.tenant == tenant_of(ALICE)


class Options:
    """As the hosted client's `SearchMemoryOptions`."""

    def __init__(self, filters: dict[str, Any]) -> None:
        self.filters = filters


class HostedMemory(FakeMemory):
    def search(self, query: str, options: Any = None, **kwargs: Any) -> Any:
        return {"results": list(self.found)}


def other_order(wrapped: ReuseMemory, *args: Any, **kwargs: Any) -> bool:
    """Return whether memories "cba" come in another order: whether "abc" has been seen."""
    wrapped.memory.found = lettered("cba")
    return [one["id"] for one in _results(wrapped.search("q?", *args, **kwargs))] != [
        "id-c",
        "id-b",
        "id-a",
    ]


def _results(result: Any) -> Any:
    return result["results"] if isinstance(result, dict) else result


@pytest.mark.parametrize(
    ("store", "args", "kwargs", "other_args", "other_kwargs"),
    [
        (FakeMemory, (), {"filters": ALICE}, (), {"filters": {"user_id": "bob"}}),
        (HostedMemory, (Options(ALICE),), {}, (Options({"user_id": "bob"}),), {}),
        (HostedMemory, (), {"options": Options(ALICE)}, (), {"filters": {"user_id": "bob"}}),
        (HostedMemory, ({"filters": ALICE},), {}, (Options(ALICE),), {"filters": {"run_id": "r"}}),
        (ListMemory, ("alice",), {}, ("bob",), {}),
        (ListMemory, (), {"user_id": "alice"}, (), {"user_id": "bob"}),
    ],
)
def test_a_users_order_tells_nothing_of_other_users(store, args, kwargs, other_args, other_kwargs):
    wrapped = ReuseMemory(store(lettered("abc")))
    wrapped.search("q?", *args, **kwargs)
    assert not other_order(wrapped, *other_args, **other_kwargs)
    assert other_order(wrapped, *args, **kwargs)
    assert wrapped.faults == 0


async def test_messages_contexts_and_awaited_searches_keep_users_apart_too():
    wrapped = ReuseMemory(FakeMemory(lettered("abc")), annotate=True)
    wrapped.messages("q?", filters=ALICE)
    wrapped.memory.found = lettered("cba")
    assert wrapped.context("q?", filters={"user_id": "bob"}).annotation is None
    assert wrapped.context("q?", filters=ALICE).annotation is not None

    wrapped = AsyncReuseMemory(AsyncFakeMemory(lettered("abc")))
    await wrapped.search("q?", filters=ALICE)
    wrapped.memory.found = lettered("cba")
    bobs = await wrapped.search("q?", filters={"user_id": "bob"})
    alices = await wrapped.search("q?", filters=ALICE)
    assert bobs["results"] == lettered("cba")
    assert alices["results"] != lettered("cba")


def test_a_tenant_of_the_wrapper_or_the_surroundings_joins_users():
    wrapped = ReuseMemory(FakeMemory(lettered("abc")), tenant="acme")
    wrapped.search("q?", filters=ALICE)
    with request_context(tenant="other"):
        assert not other_order(wrapped, filters=ALICE), "what is said for the call goes first"
    assert other_order(wrapped, filters={"user_id": "bob"})

    wrapped = ReuseMemory(FakeMemory(lettered("abc")))
    with request_context(tenant="acme"):
        wrapped.search("q?", filters=ALICE)
    assert not other_order(wrapped, filters=ALICE)
    with request_context(tenant="acme"):
        assert other_order(wrapped, filters={"user_id": "bob"})


def test_filters_that_make_no_sense_plan_nothing():
    endless: dict[str, Any] = {}
    endless["AND"] = [endless]
    wrapped = ReuseMemory(FakeMemory(lettered("abc")))
    assert wrapped.search("q?", filters=endless) == {"results": lettered("abc")}
    assert wrapped.faults == 1
