"""Engines that are away, slow, busy or talk nonsense: programs fail, or not, as without us."""

from collections.abc import Callable

import httpx
import pytest
from fault_programs import ALL_PROGRAMS, ANSWER, assert_profits

from ctxreuse import ReusePlanner

Reply = Callable[[httpx.Request], httpx.Response]


def raising(error: type[httpx.TransportError]) -> Reply:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error("no", request=request)

    return fail


def replying(status: int, content: bytes = b"", **headers: str) -> Reply:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request: httpx.Response(status, headers=headers, content=content)


FAULTS: dict[str, Reply] = {
    "refuses": raising(httpx.ConnectError),
    "breaks off": raising(httpx.ReadError),
    "does not answer": raising(httpx.ReadTimeout),
    "takes no connection": raising(httpx.ConnectTimeout),
    "500": replying(500, b'{"error": {"message": "no"}}'),
    "503": replying(503, b"<html>", content_type="text/html"),
    "busy": replying(429, b"{}", retry_after="0"),
    "refuses the prompt": replying(400, b'{"error": {"message": "too long", "code": 400}}'),
    "wrong key": replying(401, b'{"error": "key"}'),
    "says nothing": replying(200, b"", content_type="application/json"),
    "half a reply": replying(200, b'{"choices": [{"mess', content_type="application/json"),
    "no reply": replying(200, b"[1, 2]", content_type="application/json"),
}
READ = ("no reply",)
"""Where an engine has read the prompt, as far as a framework can tell."""


@pytest.mark.parametrize("kind", ALL_PROGRAMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_fails_as_without_us_and_profits_again(kind, fault, caplog):
    ours, plain = ALL_PROGRAMS[kind](ReusePlanner()), ALL_PROGRAMS[kind](None)
    planner = ours.planner
    assert planner is not None
    assert ours.ask("abc") == plain.ask("abc")
    before = planner.statistics().tokens
    for program in (ours, plain):
        program.engine.fault = FAULTS[fault]
    for letters in ("cab", "bca", "def"):
        asked = ours.ask(letters)
        assert asked == plain.ask(letters)
        assert asked.said != ANSWER, "else nothing is tried here"
    for program in (ours, plain):
        program.engine.fault = None
    if ours.takes_back and fault not in READ:
        assert planner.statistics().tokens <= before, "what nobody answered is not expected"
    assert ours.ask("cab") == plain.ask("cab")
    if kind != "engine pool":  # which takes the engine for one that starts anew
        assert ours.engine.prompts[-1] == "abc", "what was answered before is known as it was"
    assert_profits(ours)
    assert ours.faults == planner.savings.planning_failures == 0
    said = [one.msg for one in caplog.records if one.name == "ctxreuse"]
    assert not said or (kind == "engine pool" and "rests for" in said[0])
