"""Whose request it is for the engine: model, cache salt, session, address."""

import asyncio

import httpx
import pytest
from client_helpers import NOTHING, completed, connected, overheard, planned
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import EngineError, InvalidRequestError
from ctxreuse.pipeline.engine_options import conversation_session, is_cache_salt, tenant_salt
from ctxreuse.serving import EmulatedEngine, EngineClient

pytestmark = pytest.mark.usefixtures("paper_words")


async def test_the_engines_first_model_is_asked_for_until_it_is_known(planner):
    answers = [
        *(httpx.ConnectError("no") for _ in range(2)),
        httpx.Response(200, json={"data": [{"id": "its-own"}]}),
    ]

    def answer(request):
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers.pop(0)

    async with connected(httpx.MockTransport(answer), planner=planner, retries=1) as client:
        with pytest.raises(EngineError) as caught:
            await client.complete(planned(planner))
        assert str(caught.value) == (
            "the engine at engine did not answer: APIConnectionError (attempts: 2); the cause says "
            "more, and so does the engine's log"
        )
        assert planner.statistics() == NOTHING
        assert [await client.model() for _ in range(3)] == ["its-own"] * 3


def test_a_look_up_is_shared_whoever_gives_up_and_begun_anew_in_another_event_loop():
    asked = []

    async def answer(request):
        asked.append(request.url.path)
        await asyncio.sleep(0.01 if len(asked) > 1 else 1_000)
        return httpx.Response(200, json={"data": [{"id": "its-own"}]})

    async def ask(client, count):
        tasks = [asyncio.create_task(client.model()) for _ in range(count)]
        await asyncio.sleep(0.001)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client, loop = EngineClient("http://engine", http_client=http), asyncio.new_event_loop()
    loop.run_until_complete(ask(client, 1))  # unlike asyncio.run it cancels nothing
    assert asyncio.run(ask(client, 100))[1:] == ["its-own"] * 99
    assert len(asked) == 2
    [left] = asyncio.all_tasks(loop)
    left.cancel()
    loop.run_until_complete(asyncio.wait([left]))
    loop.close()


async def test_a_given_model_is_not_asked_for():
    with pytest.raises(EngineError, match=r"status 404 \(NotFoundError\)"):
        await completed(EmulatedEngine(), options={"model": "another"})


async def test_tenants_get_their_own_salt_and_the_default_tenant_none(planner):
    engine = EmulatedEngine(block_size=4)
    async with connected(engine, cache_salt="tenant", salt_key="secret") as client:
        for tenant in ("a@b/c\\\0", "", "b", "b"):
            await client.complete(planned(planner, tenant=tenant))
        await client.complete(planned(planner, tenant="b"), cache_salt="a" * 128)
    salts = [body.get("cache_salt") for body in engine.requests]
    assert salts == [
        tenant_salt("a@b/c\\\0", "secret"),
        None,
        tenant_salt("b", "secret"),
        tenant_salt("b", "secret"),
        "a" * 128,
    ]
    assert engine.usage.cached_tokens == 20  # only the second one of tenant "b"


@pytest.mark.parametrize("salt", ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 3])
async def test_a_salt_that_vllm_would_refuse_is_refused(salt):
    with pytest.raises(InvalidRequestError, match="cache_salt must be a string of 1 to 128"):
        await completed(EmulatedEngine(), cache_salt=salt)


@given(st.text(min_size=1), st.text(min_size=1), st.text())
def test_tenants_salts_are_valid_and_differ(tenant, other, key):
    salt = tenant_salt(tenant, key)
    assert is_cache_salt(salt)
    assert (salt == tenant_salt(other, key)) == (tenant == other)
    assert (salt == tenant_salt(tenant, "another")) == (key == "another")


def test_a_conversations_session_is_its_own():
    identities = [("t", "1"), ("t", 1), ("u", "1"), ("", "t1"), ("t", 10**5000)]
    assert len({conversation_session(*one) for one in identities}) == len(identities)


async def test_sessions_are_sent_as_a_header_if_asked_for(planner):
    async with overheard("X-Session-ID") as (connect, sessions):
        await connect().complete(planned(planner, conversation_id="c"))
        client = connect(session_id="conversation")
        await client.complete(planned(planner, conversation_id="c", tenant="t"))
        await client.complete(planned(planner))
        await client.complete(planned(planner), session_id="mine")
    assert sessions == [None, conversation_session("t", "c"), None, "mine"]
