"""The OpenAPI file says what the server does: its routes, what they take and what they answer."""

import json
from importlib.resources import files

import pytest
from door_helpers import CHAT, MESSAGES, answering, asking, documents, served
from starlette.routing import Route

from ctxreuse import ReusePlanner
from ctxreuse.cli.serve_command import ServeCommand
from ctxreuse.serving import EmulatedEngine
from ctxreuse.serving.door.app import _Door

jsonschema = pytest.importorskip("jsonschema")

SPEC = json.loads(files("ctxreuse.serving.door").joinpath("openapi.json").read_text())
ROW = {"documents": documents("ab"), "query": "Which?", "conversation": "c", "template": "{text}"}
REQUESTS = {
    CHAT: asking("ab", conversation="c", ctxreuse=True),
    MESSAGES: asking("ab", system="Be brief.", ctxreuse=True),
    "/v1/plan": ROW,
    "/v1/plans": {"requests": [ROW, {"documents": documents("ba")}], "primes": False},
    "/v1/usage": {"plan_id": "x", "usage": {"prompt_tokens": 3}},
    "/v1/forget": {"plan_id": "x"},
}


def check(instance, schema):
    whole = {**schema, "components": SPEC["components"]}
    jsonschema.Draft202012Validator(whole).validate(instance)


def taken(path):
    return SPEC["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def check_answer(method, path, answer):
    told = SPEC["paths"][path][method]["responses"][str(answer.status_code)]
    kind = answer.headers["content-type"].partition(";")[0]
    schema = told["content"][kind]["schema"]
    check(answer.json() if kind == "application/json" else answer.text, schema)


async def test_it_has_the_servers_routes_and_no_others():
    door = _Door(ReusePlanner(), ServeCommand(engines=("http://127.0.0.1:9",)))
    routes = [one for one in door.routes() if isinstance(one, Route)]
    methods = {(one.path, name.lower()) for one in routes for name in one.methods - {"HEAD"}}
    await door.pool.aclose()
    assert methods == {(path, method) for path, own in SPEC["paths"].items() for method in own}


async def test_requests_and_answers_are_as_it_says():
    async with served(EmulatedEngine()) as door:
        for path, body in REQUESTS.items():
            check(body, taken(path))
            engine_says = path != MESSAGES
            answer = await door.post(path, json=body)
            assert answer.status_code == (200 if engine_says else 404), answer.text
            if engine_says:
                check_answer("post", path, answer)
        for path in ("/v1/models", "/v1/savings", "/healthz", "/readyz", "/metrics"):
            check_answer("get", path, await door.get(path))
    async with served(answering(200, b"{}")) as door:
        check_answer("post", MESSAGES, await door.post(MESSAGES, json=REQUESTS[MESSAGES]))


@pytest.mark.parametrize("path", REQUESTS)
async def test_errors_are_as_it_says_and_what_it_refuses_is_refused(path):
    async with served(engines=("http://127.0.0.1:9",), max_body_bytes=100_000) as door:
        check_answer("post", path, await door.post(path, content=b"x" * 150_000))
        for name in resolved(taken(path))["required"]:
            less = {key: one for key, one in REQUESTS[path].items() if key != name}
            answer = await door.post(path, json=less)
            assert answer.status_code == 400, name
            check_answer("post", path, answer)
        wrong = {"documents": "x", "requests": 3, "plan_id": 7}
        with pytest.raises(jsonschema.ValidationError):
            check({**REQUESTS[path], **wrong}, resolved(taken(path)))
        answer = await door.post(path, json={**REQUESTS[path], **wrong})
        assert answer.status_code == 400


def resolved(schema):
    name = schema.get("$ref", "").rpartition("/")[2]
    return SPEC["components"]["schemas"][name] if name else schema


async def test_an_engine_that_is_down_is_told_as_it_says():
    async with served(engines=("http://127.0.0.1:9",)) as door:
        check_answer("post", CHAT, await door.post(CHAT, json=REQUESTS[CHAT]))
        check_answer("get", "/readyz", await door.get("/readyz"))
