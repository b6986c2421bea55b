"""Where prompts go, and what of an address may be seen."""

import logging
import traceback

import httpx
import pytest
from client_helpers import MESSAGES
from http_servers import engine_script, listening, response

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.errors import EngineError, InvalidRequestError, shown_url
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool, EngineSpec
from ctxreuse.workflow import OpenAILLM


def redirect(where, status):
    async def script(received, writer):
        writer.write(response(status, location=where(received)))

    return script


def asked_by(client):
    planner = ReusePlanner()
    request = ContextRequest(["A secret."], "Why?", tenant="one", conversation_id="c")
    return [
        lambda: client.complete(planner.plan(request)),
        lambda: anext(client.stream(planner.plan(request))),
        lambda: client.tokenize(MESSAGES),
        lambda: client.metrics(),
        lambda: client.check_health(),
        lambda: client.context_window(),
    ]


THERE = "http://user:pw@{host}{path}?key=s3cret"


@pytest.mark.parametrize(
    ("status", "location", "shown"),
    [
        *((status, THERE, "http://{host}/") for status in (301, 302, 303, 307, 308)),
        (307, "/v1/elsewhere?key=s3cret", "/v1/elsewhere'"),
        (307, "file:///etc/passwd", "file:///etc/passwd'"),
        (307, "http://[/", "http://[/'"),
    ],
)
@pytest.mark.parametrize("follows", [False, True])
async def test_nothing_is_sent_to_another_host(status, location, shown, follows):
    async with listening(engine_script(EmulatedEngine())) as [other]:
        host = other.url.removeprefix("http://")
        away = redirect(lambda received: location.format(host=host, path=received.path), status)
        async with listening(away) as [server], httpx.AsyncClient(follow_redirects=True) as http:
            options = {"http_client": http} if follows else {}
            async with EngineClient(
                server.url, "m", cache_salt="tenant", session_id="conversation", **options
            ) as client:
                for ask in asked_by(client):
                    with pytest.raises(EngineError) as caught:
                        await ask()
                    words = f"redirects to '{shown.format(host=host)}"
                    assert words in str(caught.value)
                    assert "set base_url to it" in str(caught.value)
                    assert not any(one in str(caught.value) for one in ("pw", "s3cret"))
                    assert caught.value.status == status
        assert len(server.received) == 6  # none was tried again
        assert other.received == []


PASSWORD = "s3cret"


async def test_a_password_goes_to_the_engine_and_nowhere_else(caplog):
    caplog.set_level(logging.DEBUG)
    async with listening(engine_script(EmulatedEngine(fail=[500, 400]))) as [server]:
        address = server.url.replace("http://", f"http://user:{PASSWORD}%21@")
        client = EngineClient(address, "emulated", backoff_s=0)
        pool = EnginePool([EngineSpec(base_url=address)], "emulated", window_s=0)
        async with client, pool:
            shown = [repr(client), repr(EngineSpec(base_url=address)), repr(pool.statistics())]
            with pytest.raises(EngineError) as caught:
                await client.complete(MESSAGES)
            shown.append("".join(traceback.format_exception(caught.value)))
            shown += [repr(caught.value.__cause__), str(pool.names)]
            await pool.complete(ContextRequest(["A text."], "Why?"))
    assert {one.headers["authorization"] for one in server.received} == {"Basic dXNlcjpzM2NyZXQh"}
    assert not any(PASSWORD in one for one in [*shown, caplog.text])


async def test_without_a_password_the_key_is_sent():
    async with (
        listening(engine_script(EmulatedEngine())) as [server],
        EngineClient(server.url, "emulated", api_key="the key") as client,
    ):
        await client.complete(MESSAGES)
    assert server.received[0].headers["authorization"] == "Bearer the key"


@pytest.mark.parametrize(
    "address",
    [
        "ftp://user:s3cret@host/v1",
        "user:s3cret@host:8000/v1",
        "http://user:s3cret@host/v1?api-version=3",
        "http://host/v1?key=s3cret",
        "http://host/v1#s3cret",
        "http://user:s3c?s3cret@host",
        "http://user:s3c/s3cret@host:8000?x",
        "http://user:s3cret@[::1",
        "http://user:s3cret@",
        "https:user:s3cret@host",
        "http://user:s3cret@host:port",
        "http://user:s3cret@host\0",
        "http://user:s3cret@xn--a",
        "http://user:s3cret@[v1.x]",
        "http://user:s3cret@host/\ud800",
        "http://user:s3cret\ud800@host",
        "http://user:s3cret@host/" + "x" * 100_000,
    ],
)
@pytest.mark.parametrize("make", [EngineClient, EnginePool, OpenAILLM])
def test_a_wrong_address_is_refused_without_showing_a_secret(address, make):
    with pytest.raises(InvalidRequestError, match=r"address|base_url") as caught:
        make(address)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("secret", [f"{PASSWORD}\n", f"{PASSWORD}\0", f"{PASSWORD}\xfc", b"s3cret"])
async def test_what_no_header_holds_is_refused_without_showing_it(secret):
    async with listening(engine_script(EmulatedEngine())) as [server]:
        client = EngineClient(server.url, "emulated", retries=0)
        for make in (
            lambda: EngineClient(server.url, api_key=secret),
            lambda: client.stream(MESSAGES, session_id=secret),
            lambda: client.stream(MESSAGES, extra_headers={secret: "x"}),
            lambda: client.stream(MESSAGES, extra_headers={"Key": str(secret) + "\n"}),
        ):
            with pytest.raises(InvalidRequestError, match="header") as caught:
                make()
            assert PASSWORD not in "".join(traceback.format_exception(caught.value))
        await client.aclose()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("https://user:pw@host/v1?key=k#f", "https://host/v1"),
        ("https://user:p@w:/?#@host:1", "https://host:1"),
        ("user:pw@host", "host"),
        ("engine:8000", "engine:8000"),
        ("http://host/\n\x1b[31mlog line", "http://host/??[31mlog line"),
        (5, "5 (int)"),
        (None, "None (NoneType)"),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(url, shown):
    assert shown_url(url) == shown
