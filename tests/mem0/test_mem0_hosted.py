"""mem0's real clients of its hosted service; a transport answers in the service's place."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
from mem0_stores import lettered

from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory, tenant_of

mem0 = pytest.importorskip("mem0", reason="needs mem0ai")
mem0_types = pytest.importorskip("mem0.client.types", reason="needs mem0ai")
httpx = pytest.importorskip("httpx", reason="needs httpx, mem0ai brings it")
pytest_socket = pytest.importorskip("pytest_socket", reason="needs pytest-socket")

ALICE = {"user_id": "alice"}


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


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
    assert [one["rank"] for one in result["ctxreuse"]["memories"]] == [2, 1, 0]
    assert wrapped.search("q?", filters={"user_id": "bob"})["results"] == [d, b, a]
    assert [body for path, body in service.asked if path == "/v3/memories/search/"] == [
        {"query": "q?", "filters": ALICE},
        {"query": "q?", "filters": ALICE, "top_k": 3, "rerank": True},
        {"query": "q?", "filters": {"user_id": "bob"}},
    ]
    assert wrapped.faults == 0


def test_hosted_pages_stay_as_they_are(client, service):
    wrapped: Any = ReuseMemory(client)
    for options in ({}, {"page": 2, "page_size": 2}):
        assert wrapped.get_all(filters=ALICE, **options) == client.get_all(filters=ALICE, **options)
    assert wrapped.get_all(filters=ALICE, page=2)["results"] == lettered("abc")[1:]


def test_hosted_signatures_and_errors_are_the_clients(client):
    wrapped: Any = ReuseMemory(client)
    for name in ("search", "get_all", "add", "delete_all"):
        assert inspect.signature(getattr(wrapped, name)) == inspect.signature(getattr(client, name))
    with pytest.raises(ValueError, match="Top-level entity parameters"):
        wrapped.search("q?", user_id="alice")
    with pytest.raises(mem0.exceptions.MemoryError, match="The service is down"):
        wrapped.get("an-id")


def test_hosted_memories_become_messages(client, service):
    service.found = "a"
    wrapped = ReuseMemory(client)
    context = wrapped.context("q?", mem0_types.SearchMemoryOptions(filters=ALICE))
    assert context.plan is not None
    assert context.plan.request.tenant == tenant_of(ALICE)
    assert wrapped.messages("q?", filters=ALICE) == [
        {"role": "user", "content": f"{lettered('a')[0]['memory']}\n\nq?"}
    ]


def test_memories_without_their_text_come_back_as_found(client, service):
    def only_ids(request: Any) -> Any:
        return httpx.Response(200, json={"results": [{"id": "1"}, {"id": "2"}]})

    wrapped = ReuseMemory(client)
    client.client = httpx.Client(transport=httpx.MockTransport(only_ids), base_url="http://mem0")
    with client.client:
        found = wrapped.search("q?", filters=ALICE, fields=["id"])
    assert found == {"results": [{"id": "1"}, {"id": "2"}]}
    assert wrapped.faults == 1


async def test_the_async_client_does_the_same(async_client, service):
    await async_client.search("q?", filters=ALICE)
    service.found = "dba"
    d, b, a = lettered("dba")
    assert (await async_client.search("q?", mem0_types.SearchMemoryOptions(filters=ALICE)))[
        "results"
    ] == [
        a,
        b,
        d,
    ]
    messages = await async_client.messages("q?", filters={"user_id": "bob"})
    assert messages[-1]["content"].startswith(f"{d['memory']}\n\n")
    page = await async_client.get_all(filters=ALICE, page=2)
    assert page["results"] == lettered("dba")[1:]
    assert inspect.iscoroutinefunction(async_client.search)
    assert async_client.faults == 0
