"""The clients that people have: each streams, calls tools, gets structured output, sees errors."""

import asyncio
import json
import shutil

import anthropic
import openai
import pytest
from caching_server import caching_server
from door_helpers import MESSAGES, answering, asking, documents, served
from pydantic import BaseModel

from ctxreuse.serving import EmulatedEngine, ToolCall


class City(BaseModel):
    """A city."""

    name: str


CALL = ToolCall(id="call_1", name="look_up", arguments='{"name": "Paris"}')
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a city up.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


def answer(body):
    """What the emulated model says: a tool's call, JSON where it is asked for, or words."""
    if body.get("tools"):
        return CALL
    return '{"name": "Paris"}' if body.get("response_format") else "In France, they say."


EXTRA = {"documents": documents("abc"), "conversation": "c"}


@pytest.fixture
async def door():
    async with served(EmulatedEngine(answer=answer)) as door:
        yield door


@pytest.fixture
async def refusing():
    body = b'{"error": {"message": "too long", "type": "invalid_request_error", "code": "c9"}}'
    async with served(answering(400, body)) as door:
        yield door


def client_of(door):
    return openai.AsyncOpenAI(base_url=f"{door.base_url}/v1", api_key="k", max_retries=0)


async def test_openais_sdk(door):
    messages = asking()["messages"]
    async with client_of(door) as client:
        create = client.chat.completions.create
        plain = await create(model="emulated", messages=messages, extra_body=EXTRA)
        stream = await create(
            model="emulated", messages=messages, stream=True, extra_body={**EXTRA, "ctxreuse": True}
        )
        pieces = [one async for one in stream]
        called = await create(model="emulated", messages=messages, tools=[TOOL], extra_body=EXTRA)
        parsed = await client.chat.completions.parse(
            model="emulated", messages=messages, response_format=City, extra_body=EXTRA
        )
        assert [one.id async for one in client.models.list()] == ["emulated"]
    assert plain.choices[0].message.content == "In France, they say."
    said = [one.choices[0].delta.content or "" for one in pieces if one.choices]
    assert "".join(said) == "In France, they say."
    assert sorted(pieces[-1].ctxreuse["order"]) == ["a", "b", "c"]
    assert called.choices[0].message.tool_calls[0].function.name == "look_up"
    assert parsed.choices[0].message.parsed == City(name="Paris")
    assert all("a says" in one["messages"][0]["content"] for one in door.bodies())


async def test_openais_sdk_sees_the_engines_errors_and_ours(refusing):
    messages = asking()["messages"]
    async with client_of(refusing) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="too long") as refused:
            await create(model="m", messages=messages, extra_body=EXTRA)
        with pytest.raises(openai.BadRequestError, match="documents must be a list"):
            await create(model="m", messages=messages, extra_body={"documents": 3})
    assert refused.value.code == "c9"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("streams", [False, True])
async def test_curl(door, streams):
    body = json.dumps(asking("ab", stream=streams, ctxreuse=True))
    at = f"{door.base_url}/v1/chat/completions"
    kind = "content-type: application/json"
    curl = await asyncio.create_subprocess_exec(
        *("curl", "-sN", "--noproxy", "*", at, "-H", kind, "-d", body),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(curl.communicate(), 10)
    assert curl.returncode == 0
    assert b'"ctxreuse":{"order": ["a", "b"]' in out
    assert out.endswith(b"data: [DONE]\n\n") == streams
    assert streams or json.loads(out)["choices"][0]["message"]["content"]


def claude(door):
    url = str(door.base_url)
    return anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0)


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.\n\n{documents}",
        [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "{documents}"}],
    ],
    ids=["string", "list"],
)
async def test_anthropics_sdk_with_marks_that_are_read_again(system):
    options = {"model": "claude", "max_tokens": 9, "system": system}
    with caching_server("anthropic", minimum=64) as provider:
        before = served(engines=(provider.url,), cache="anthropic(minimum=64)")
        async with before as door, claude(door) as client:
            for names in ("abcd", "bcad", "cabd"):
                await client.messages.create(
                    messages=[{"role": "user", "content": f"Of {names}?"}],
                    extra_body={"documents": documents(names)},
                    **options,
                )
        assert [body["messages"][0]["content"] for body in provider.bodies] == [
            "Of abcd?",
            "Of bcad?",
            "Of cabd?",
        ]
        assert "cache_control" in json.dumps(provider.bodies[-1]["system"])
        assert provider.usages[-1].read > 200
        assert all(one["anthropic-version"] for one in provider.headers)


async def test_anthropics_sdk_streams_calls_tools_and_sees_errors():
    with caching_server("anthropic") as provider:
        tool = {"name": "look_up", "input_schema": {"type": "object", "properties": {}}}
        asked = {"model": "claude", "max_tokens": 9, "messages": asking()["messages"]}
        async with (
            served(engines=(provider.url,), cache="anthropic") as door,
            claude(door) as client,
        ):
            more = {"documents": documents("abc"), "ctxreuse": True}
            async with client.messages.stream(**asked, extra_body=more) as stream:
                text = "".join([one async for one in stream.text_stream])
            told = await door.post(
                MESSAGES, json={**asked, **more, "stream": True, "tools": [tool]}
            )
            with pytest.raises(anthropic.BadRequestError, match="documents must be a list"):
                await client.messages.create(**asked, extra_body={"documents": 1})
        assert text == provider.answer
        assert '"ctxreuse":{"order": ' in told.text.rpartition("event: message_stop")[2]
        assert provider.bodies[-1]["tools"][0]["name"] == "look_up"
        assert provider.refusals == []
