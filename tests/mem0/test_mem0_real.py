"""The real mem0ai, with qdrant in memory, and its hosted client; sockets are off."""

import inspect
import json
from collections.abc import AsyncIterator, Iterator
from functools import wraps
from typing import Any

import pytest
from mem0_stores import ANSWER, lettered, mem0_offline

from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory

mem0 = pytest.importorskip("mem0", reason="needs mem0ai")
pytest_socket = pytest.importorskip("pytest_socket", reason="needs pytest-socket")
ALICE = {"user_id": "alice"}
BOB = {"user_id": "bob"}
LONG = " ..." * 200  # long enough that reordering pays, and no words that make all alike

FACTS = [
    "Alice lives in Porto with her sister",
    "Alice likes green tea in the morning",
    "Alice has two cats named Ink and Quill",
    "Alice works as a nurse in Porto",
    "Alice plays the cello on Sundays",
    "Alice is afraid of dogs but likes cats",
]

QUERIES = [
    "Where does Alice live and who is her sister?",
    "Does Alice like tea in the morning?",
    "What are the names of the two cats?",
    "Where does the nurse work?",
    "Which instrument does Alice play on Sundays?",
    "Is Alice afraid of cats or dogs?",
]


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


@pytest.fixture
def memory() -> Iterator[Any]:
    with ReuseMemory(mem0_offline(mem0.Memory)) as wrapped:
        for fact in FACTS:
            wrapped.add(fact + LONG, user_id="alice", infer=False)
            wrapped.add(fact.replace("Alice", "Bob") + LONG, user_id="bob", infer=False)
        yield wrapped


@pytest.fixture
async def async_memory() -> AsyncIterator[Any]:
    async with AsyncReuseMemory(mem0_offline(mem0.AsyncMemory)) as wrapped:
        for fact in FACTS:
            await wrapped.add(fact + LONG, user_id="alice", infer=False)
        yield wrapped


def ids(result: dict[str, Any]) -> list[str]:
    return [one["id"] for one in result["results"]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the wrapped memory itself finds; qdrant's scores vary in the last digits."""

    def watch(memory: Any) -> list[dict[str, Any]]:
        search, results = memory.search, []

        @wraps(search)
        def noting(*args: Any, **kwargs: Any) -> Any:
            results.append(search(*args, **kwargs))
            return results[-1]

        @wraps(search)
        async def noting_awaited(*args: Any, **kwargs: Any) -> Any:
            results.append(await search(*args, **kwargs))
            return results[-1]

        awaited = inspect.iscoroutinefunction(search)
        monkeypatch.setattr(memory, "search", noting_awaited if awaited else noting)
        return results

    return watch


def id_of(wrapped: Any, start: str) -> Any:
    found = wrapped.get_all(filters=ALICE)["results"]
    return next(one["id"] for one in found if one["memory"].startswith(start))


def assert_is_in_planned_order(planned: dict[str, Any], plain: dict[str, Any]) -> None:
    assert sorted(ids(planned)) == sorted(ids(plain))
    assert list(planned) == list(plain)
    assert all(one in plain["results"] for one in planned["results"])


def test_a_search_finds_what_the_unwrapped_memory_finds(memory, found):
    results = found(memory.memory)
    reordered = 0
    for query in QUERIES:
        for options in ({}, {"top_k": 3}, {"threshold": 0.2}, {"explain": True, "rerank": True}):
            planned = memory.search(query, filters=ALICE, **options)
            assert_is_in_planned_order(planned, results[-1])
            assert sorted(ids(planned)) == sorted(
                ids(memory.memory.search(query, filters=ALICE, **options))
            )
            assert all(list(result) == ["results"] for result in results[-2:])
            reordered += ids(planned) != ids(results[-2])
    assert reordered > 0
    assert memory.faults == 0


def test_signatures_and_errors_are_the_unwrapped_memorys(memory):
    for name in ("search", "get_all", "add", "update", "delete", "history"):
        own, foreign = getattr(memory, name), getattr(memory.memory, name)
        assert inspect.signature(own) == inspect.signature(foreign)
    for call in (memory.search, memory.context, memory.messages):
        with pytest.raises(ValueError, match="Top-level entity parameters"):
            call("q?", user_id="alice")
        with pytest.raises(ValueError, match="filters must contain at least one of"):
            call("q?")
        with pytest.raises(ValueError, match="cannot be empty"):
            call(" ", filters=ALICE)
    plain = memory.memory.search(QUERIES[0], filters=ALICE, limit=1)
    planned = memory.search(QUERIES[0], filters=ALICE, limit=1)
    assert sorted(ids(planned)) == sorted(ids(plain)), "mem0 2.2 passes over it, so do we"


def test_users_see_their_own_memories_alone_and_nobody_sees_none(memory, found):
    for query in QUERIES:
        memory.messages(query, filters=ALICE)
    results = found(memory.memory)
    first = memory.search(QUERIES[0], filters=BOB)
    assert first["results"] == results[0]["results"], "nothing of Bob's was sent before"
    assert {one["user_id"] for one in first["results"]} == {"bob"}
    assert memory.messages(QUERIES[0], filters={"user_id": "carol"}) == [
        {"role": "user", "content": QUERIES[0]}
    ]


def test_an_updated_memory_is_shown_again_and_a_deleted_one_never(memory):
    first = memory.messages(
        QUERIES[0], history=[], conversation_id="c", filters=ALICE, threshold=0.0
    )
    assert "Alice lives in Porto" in first[-1]["content"]
    home, tea = id_of(memory, "Alice lives"), id_of(memory, "Alice likes green tea")

    memory.update(home, "Alice lives in Lisbon now" + LONG)
    memory.delete(tea)
    history = [*first, ANSWER]
    second = memory.context(
        QUERIES[0], history=history, conversation_id="c", filters=ALICE, threshold=0.0
    )
    assert "Alice lives in Lisbon now" + LONG in second.text
    assert [block.id for block in second.plan.blocks] == [home], "all else stands in the history"
    pieces = second.text.split("\n\n")
    quoted = [f'"{(fact + LONG)[:100]}..."' for fact in FACTS[:2]]
    assert sorted(pieces[:2]) == sorted(f"{one} no longer holds; do not use it." for one in quoted)
    assert pieces[2:] == [f"Alice lives in Lisbon now{LONG}"]
    assert len(second.plan.references) == len(FACTS) - 2
    assert tea not in {*second.plan.references, *(block.id for block in second.plan.blocks)}

    alone = memory.search(QUERIES[0], filters=ALICE, threshold=0.0)
    assert tea not in json.dumps(alone)
    assert memory.history(home)[-1]["new_memory"].startswith("Alice lives in Lisbon")


async def test_the_async_memory_does_the_same(async_memory, found):
    results = found(async_memory.memory)
    for query in QUERIES:
        planned = await async_memory.search(query, filters=ALICE)
        assert_is_in_planned_order(planned, results[-1])
    everything = await async_memory.get_all(filters=ALICE)
    assert everything == await async_memory.memory.get_all(filters=ALICE)
    assert inspect.signature(async_memory.search) == inspect.signature(async_memory.memory.search)

    first = await async_memory.messages(
        QUERIES[0], history=[], conversation_id="c", filters=ALICE, top_k=3
    )
    context = await async_memory.context(
        QUERIES[0], history=[*first, ANSWER], conversation_id="c", filters=ALICE, top_k=3
    )
    assert context.plan.blocks == ()
    assert len(context.plan.references) == 3
    with pytest.raises(ValueError, match="Top-level entity parameters"):
        await async_memory.search("q?", user_id="alice")
    assert async_memory.faults == 0


mem0_types = pytest.importorskip("mem0.client.types", reason="needs mem0ai")
httpx = pytest.importorskip("httpx", reason="needs httpx, mem0ai brings it")


class Service:
    """Answers as the hosted service does; searches find what `found` names."""

    def __init__(self) -> None:
        self.found = "abc"
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, request: Any) -> Any:
        path = request.url.path
        body = json.loads(request.content) if request.content else None
        self.asked.append((path, body))
        if path == "/v1/ping/":
            return httpx.Response(200, json={"org_id": "o", "project_id": "p", "user_email": None})
        if path == "/v3/memories/search/":
            return httpx.Response(200, json={"results": lettered(self.found)})
        if path == "/v3/memories/":
            page = int(request.url.params.get("page", 1))
            return httpx.Response(
                200,
                json={
                    "count": 3,
                    "next": None,
                    "previous": None,
                    "results": lettered(self.found)[page - 1 :],
                },
            )
        return httpx.Response(500, json={"detail": "The service is down."})


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def client(service: Service) -> Iterator[Any]:
    with httpx.Client(transport=httpx.MockTransport(service)) as http:
        yield mem0.MemoryClient(api_key="none", client=http)


@pytest.fixture
async def async_client(service: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    def validated(client: Any) -> None:
        client.org_id, client.project_id = "o", "p"

    # the async client asks for these with another library, which has no such transport
    monkeypatch.setattr(mem0.AsyncMemoryClient, "_validate_api_key", validated)
    http = httpx.AsyncClient(transport=httpx.MockTransport(service))
    async with AsyncReuseMemory(mem0.AsyncMemoryClient(api_key="none", client=http)) as wrapped:
        yield wrapped
    assert http.is_closed


def test_a_hosted_search_comes_in_planned_order(client, service):
    wrapped = ReuseMemory(client)
    assert wrapped.search("q?", mem0_types.SearchMemoryOptions(filters=ALICE))[
        "results"
    ] == lettered("abc")
    service.found = "dba"
    d, b, a = lettered("dba")
    result = wrapped.search("q?", filters=ALICE, top_k=3, rerank=True)
    assert result["results"] == [a, b, d]
    assert wrapped.search("q?", filters={"user_id": "bob"})["results"] == [d, b, a]
    assert [body for path, body in service.asked if path == "/v3/memories/search/"] == [
        {"query": "q?", "filters": ALICE},
        {"query": "q?", "filters": ALICE, "top_k": 3, "rerank": True},
        {"query": "q?", "filters": {"user_id": "bob"}},
    ]
    assert wrapped.faults == 0


async def test_the_async_client_does_the_same(async_client, service):
    await async_client.search("q?", filters=ALICE)
    service.found = "dba"
    d, b, a = lettered("dba")
    assert (await async_client.search("q?", mem0_types.SearchMemoryOptions(filters=ALICE)))[
        "results"
    ] == [a, b, d]
    messages = await async_client.messages("q?", filters={"user_id": "bob"})
    assert messages[-1]["content"].startswith(f"{d['memory']}\n\n")
    page = await async_client.get_all(filters=ALICE, page=2)
    assert page["results"] == lettered("dba")[1:]
    assert inspect.iscoroutinefunction(async_client.search)
    assert async_client.faults == 0
