"""Tenants share no order, label, conversation, plan or cache; keys are hashed, and never seen."""

import json

import pytest
from cli_helpers import run
from door_helpers import CHAT, asking, documents, served

from ctxreuse.errors import InputFileError, InvalidRequestError
from ctxreuse.serving import EmulatedEngine
from ctxreuse.serving.door.app import hashed_key, read_keys

__all__ = ["run"]

SECRET = {"CTXREUSE_KEYS_SECRET": "s"}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    rows = {hashed_key(f"key-{name}", "s"): name for name in ("one", "two")}
    path.write_text(json.dumps(rows))
    return str(path)


def bearer(name):
    return {"authorization": f"Bearer key-{name}"}


def as_header(name):
    return {"x-tenant": name}


@pytest.fixture(params=["keys", "header"])
def of_tenants(request, keys):
    if request.param == "keys":
        return {"keys": keys, "environment": SECRET}, bearer
    return {"tenant_header": "X-Tenant"}, as_header


async def test_each_tenant_has_its_own_order_labels_conversations_and_salt(of_tenants):
    settings, naming = of_tenants
    body = asking("abc", conversation="c", ctxreuse=True)
    async with served(EmulatedEngine(), **settings) as door:
        for name in ("one", "two", "one"):
            answer = await door.post(CHAT, json=body, headers=naming(name))
            assert answer.status_code == 200
        await door.post(CHAT, json=asking(), headers=naming("two"))
        bodies = door.bodies()
        plan = {"documents": documents("ab"), "conversation": "p"}
        issued = (await door.post("/v1/plan", json=plan, headers=naming("one"))).json()
        other = (await door.post("/v1/plan", json=plan, headers=naming("two"))).json()
        taken = {"plan_id": issued["plan_id"]}
        theirs = await door.post("/v1/forget", json=taken, headers=naming("two"))
        own = await door.post("/v1/forget", json=taken, headers=naming("one"))
    salts = [one["cache_salt"] for one in bodies]
    assert salts[0] == salts[2] != salts[1] == salts[3]
    assert "one" not in salts[0]
    assert other["left_out"] == []
    assert (theirs.json()["known"], own.json()["known"]) == (False, True)
    answered = json.loads(json.dumps(answer.json()))["ctxreuse"]
    assert answered["expected_cached_tokens"] > 50


async def test_what_a_tenant_was_shown_stands_in_no_other_tenants_conversation(of_tenants):
    settings, naming = of_tenants
    turn = [{"role": "user", "content": "One?"}]
    later = [*turn, {"role": "assistant", "content": "OK."}, {"role": "user", "content": "Two?"}]
    async with served(EmulatedEngine(), **settings) as door:
        first = asking("abc", messages=turn, conversation="c")
        await door.post(CHAT, json=first, headers=naming("one"))
        for name in ("two", "one"):
            more = asking(messages=later, conversation="c")
            await door.post(CHAT, json=more, headers=naming(name))
        _, two, one = door.bodies()
    assert two["messages"] == later
    assert "a says" in one["messages"][0]["content"]


@pytest.mark.parametrize("headers", [{}, bearer("three"), {"x-api-key": "key-"}, bearer("one ☃")])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/plan", "/v1/models", "/v1/savings"])
async def test_an_unknown_key_is_refused_in_openais_words(keys, headers, path):
    raw = {name: value.encode() for name, value in headers.items()}
    async with served(EmulatedEngine(), keys=keys, environment=SECRET) as door:
        method = "GET" if path in ("/v1/models", "/v1/savings") else "POST"
        answer = await door.request(method, path, json=asking("ab"), headers=raw)
        assert door.bodies() == []
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "three" not in answer.text


async def test_keys_of_anthropics_clients_name_tenants_too(keys):
    async with served(EmulatedEngine(), keys=keys, environment=SECRET) as door:
        answer = await door.post(CHAT, json=asking(), headers={"x-api-key": "key-one"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("settings", "environment", "seen"),
    [
        ({}, {}, ("Bearer key-one", "key-one")),
        ({}, {"CTXREUSE_ENGINE_KEY": "up"}, ("Bearer up", "up")),
        ({"keys": True}, {}, (None, None)),
        ({"keys": True}, {"CTXREUSE_ENGINE_KEY": "up"}, ("Bearer up", "up")),
    ],
    ids=["passes", "ours", "neither", "ours for theirs"],
)
async def test_whose_key_an_engine_gets(keys, settings, environment, seen, caplog):
    settings = {"keys": keys} if settings else {}
    headers = {**bearer("one"), "x-api-key": "key-one"}
    async with served(EmulatedEngine(), environment={**SECRET, **environment}, **settings) as door:
        await door.post(CHAT, json=asking("ab"), headers=headers)
        await door.get("/v1/models", headers=headers)
        asked = [one for one in door.engines[0].received if one.path in (CHAT, "/v1/models")]
    for one in asked:
        assert (one.headers.get("authorization"), one.headers.get("x-api-key")) == seen
    assert len(asked) == 2
    assert "key-one" not in caplog.text
    assert "up" not in caplog.text


async def test_a_header_names_no_tenant_unless_that_is_set():
    async with served(EmulatedEngine()) as door:
        await door.post(CHAT, json=asking("ab"), headers=as_header("one"))
        assert "cache_salt" not in door.bodies()[0]
    async with served(EmulatedEngine(), tenant_header="x-tenant") as door:
        await door.post(CHAT, json=asking("ab"), headers=as_header("one"))
        received = next(one for one in door.engines[0].received if one.path == CHAT)
    assert "x-tenant" not in received.headers


async def test_a_hosted_cache_gets_no_salt():
    settings = {"tenant_header": "x-tenant", "cache": "anthropic"}
    async with served(EmulatedEngine(), **settings) as door:
        await door.post(CHAT, json=asking("ab"), headers=as_header("one"))
        assert "cache_salt" not in door.bodies()[0]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"x": "t"}', f'{{"{"a" * 30}": "t"}}', f'{{"{"a" * 32}": 1}}', "[" * 100_000],
)
def test_a_file_that_holds_no_hashes_is_named(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(InputFileError, match="keys: must be JSON"):
        read_keys(str(path), "s")
    with pytest.raises(InputFileError, match="cannot be read"):
        read_keys(str(tmp_path / "none"), "s")


def test_the_command_hashes_a_key(run, monkeypatch, keys):
    monkeypatch.setenv("CTXREUSE_KEYS_SECRET", "s")
    code, out, err = run("serve", "--hash-key", stdin="key-one\n")
    assert (code, out, err) == (0, f"{hashed_key('key-one', 's')}\n", "")
    monkeypatch.delenv("CTXREUSE_KEYS_SECRET")
    code, _, err = run("serve", "--hash-key", stdin="key-one\n")
    assert (code, err.startswith("ctxreuse: set CTXREUSE_KEYS_SECRET")) == (2, True)
    with pytest.raises(InvalidRequestError, match="CTXREUSE_KEYS_SECRET"):
        read_keys(keys, "")


async def test_a_callers_salt_opens_no_other_tenants_cache(of_tenants):
    settings, naming = of_tenants
    callers = [naming("two")] if "keys" in settings else [naming("two"), {}]
    async with served(EmulatedEngine(), **settings) as door:
        await door.post(CHAT, json=asking("abc"), headers=naming("one"))
        salt = door.bodies()[0]["cache_salt"]
        for headers in callers:
            for body in (asking(cache_salt=salt), asking("abc", cache_salt=salt)):
                answer = await door.post(CHAT, json=body, headers=headers)
                assert answer.status_code == 200
        bodies = door.bodies()
    assert len(bodies) == 1 + 2 * len(callers)
    assert not any(one.get("cache_salt") == salt for one in bodies[1:])
