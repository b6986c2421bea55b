"""Whose request it is for the engine: model, cache salt, session, address."""

import asyncio

import httpx
import pytest
from client_helpers import NOTHING, completed, connected, overheard, planned
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ReusePlanner
from ctxreuse.errors import EngineError, InvalidRequestError
from ctxreuse.pipeline.engine_options import conversation_session, is_cache_salt, tenant_salt
from ctxreuse.serving import EmulatedEngine
from ctxreuse.serving.client.connection import EngineFact

pytestmark = pytest.mark.usefixtures("paper_words")


class Models:
    """A transport that counts look-ups of the model; each waits until it may go on."""

    def __init__(self, *answers):
        self.asked = 0
        self.answers = list(answers)
        self.go_on = asyncio.Event()

    async def answer(self, request):
        assert request.url.path == "/v1/models"
        self.asked += 1
        await self.go_on.wait()
        answer = self.answers.pop(0)
        if answer is None:
            raise httpx.ConnectError("no", request=request)
        return httpx.Response(200, json={"data": [{"id": answer}]})

    async def begun(self):
        while not self.asked:
            await asyncio.sleep(0)


async def test_those_who_wait_for_the_model_share_a_failed_look_up_and_later_ones_try_again():
    models = Models(None, None, "its-own")
    planner = ReusePlanner()
    transport = httpx.MockTransport(models.answer)
    async with connected(transport, planner=planner, retries=1) as client:
        waiting_ones = [asyncio.create_task(client.complete(planned(planner))) for _ in range(8)]
        await models.begun()
        models.go_on.set()
        errors = await asyncio.gather(*waiting_ones, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineError] * 8
        assert {(error.attempts, str(error)) for error in errors} == {
            (
                2,
                "the engine at engine did not answer: APIConnectionError, attempts: 2; the cause "
                "says more, and so does the engine's log",
            )
        }
        assert models.asked == 2
        assert planner.statistics() == NOTHING
        assert await asyncio.gather(client.model(), client.model()) == ["its-own", "its-own"]
    assert models.asked == 3


async def test_who_stops_waiting_for_the_model_does_not_stop_the_others():
    models = Models("its-own")
    async with connected(httpx.MockTransport(models.answer)) as client:
        first, second = (asyncio.create_task(client.model()) for _ in range(2))
        await models.begun()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        models.go_on.set()
        assert await second == "its-own"
    assert models.asked == 1


def test_a_look_up_that_an_event_loop_left_behind_is_begun_anew_in_the_next():
    asked = []

    async def look_up():
        asked.append(asyncio.get_running_loop())
        if len(asked) == 1:
            await asyncio.Event().wait()
        return "its-own"

    name = EngineFact(None, look_up)

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(name.get(), 0.001)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(give_up())
    loop.close()  # unlike asyncio.run it cancels nothing
    assert asyncio.run(name.get()) == "its-own"
    assert len(asked) == 2


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
