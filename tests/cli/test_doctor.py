"""`ctxreuse doctor`, called as a user calls it, on servers of all kinds."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from itertools import cycle, takewhile
from typing import Any

import pytest
from example_counts import slow_unless
from hostile_servers import BROKEN, DRIPPING, ENDLESS, HEAD, repeating
from http_servers import Received, Script, engine_script, listening, response
from planning_helpers import write_jsonl

from ctxreuse import ContextRequest, ReusePlanner, __version__
from ctxreuse.cache import CacheUsage
from ctxreuse.serving import EmulatedEngine
from ctxreuse.sharing import SQLiteLog

CHECKS = [
    "engine",
    "prefix cache",
    "usage",
    "common half",
    "cached tokens stay",
    "metrics",
    "other processes",
]
QUICK = ("--watch", "0.05", "--timeout", "60")


@pytest.fixture
def examine(run) -> Callable[..., Awaitable[tuple[int, dict[str, Any], str]]]:
    """Return a function that runs the command beside servers: exit code, checks by name, errors."""

    async def examine_server(*arguments: Any) -> tuple[int, dict[str, Any], str]:
        code, out, err = await asyncio.to_thread(run, "doctor", *arguments, *QUICK, "--json")
        report = json.loads(out)
        assert report["healthy"] == (code == 0)
        return code, {one["check"]: one for one in report["checks"]}, err

    return examine_server


@pytest.fixture
def examine_at(examine) -> Callable[..., Awaitable[tuple[int, dict[str, Any], str]]]:
    async def examine_script(script: Script, *arguments: Any) -> tuple[int, dict[str, Any], str]:
        async with listening(script) as [server]:
            return await examine("--base-url", server.url, *arguments)

    return examine_script


def changed(engine: EmulatedEngine, change: Callable[[Received], bytes | None]) -> Script:
    """Serve an engine; for each request a function may answer, or change the engine."""
    serve = engine_script(engine)

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        answer = change(received)
        if answer is None:
            await serve(received, writer)
        else:
            writer.write(answer)

    return script


def routed(metrics: EmulatedEngine, *engines: EmulatedEngine) -> Script:
    turns, others = cycle(map(engine_script, engines)), engine_script(metrics)

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        is_prompt = received.path.endswith("/completions")
        await (next(turns) if is_prompt else others)(received, writer)

    return script


def verdicts(checks: dict[str, Any]) -> dict[str, str]:
    return {name: one["verdict"] for name, one in checks.items() if one["verdict"] != "ok"}


async def test_a_healthy_engine_gets_a_line_for_each_check(run):
    engine = EmulatedEngine(capacity_tokens=100_000)
    async with listening(engine_script(engine)) as [server]:
        url = f"{server.url}/v1"
        code, out, err = await asyncio.to_thread(run, "doctor", "--base-url", url, *QUICK)
    assert code == 0
    said, empty, *lines = out.splitlines()
    assert (said, empty) == ("No problem found in 7 checks. Next: nothing to mend here.", "")
    assert [line[:11] for line in lines] == ["ok         "] * 6 + [" " * 11] + ["ok         "]
    assert lines[1] == (
        "ok         prefix cache: 2,832 of 2,837 tokens cached of a prompt that came again"
    )
    assert lines[3] == (
        "ok         common half: 1,408 of about 1,418 common tokens cached of a prompt with "
        "another end"
    )
    assert lines[6] == " " * 11 + "tell the planner: ReusePlanner(capacity_tokens=99984)"
    host = server.url.removeprefix("http://")
    assert err == (
        f"ctxreuse: sends 4 prompts of about 2,800 tokens to {host}, about 11,200 tokens in all, "
        "and asks for the shortest answers; the prompts are made up here\n"
    )


async def test_json_holds_every_check_with_its_numbers(examine_at):
    code, checks, _ = await examine_at(engine_script(EmulatedEngine()))
    assert (code, list(checks)) == (0, CHECKS)
    assert checks["prefix cache"] == {
        "check": "prefix cache",
        "verdict": "ok",
        "found": "2,832 of 2,837 tokens cached of a prompt that came again",
        "remedy": None,
        "figures": {"prompt_tokens": 2837, "cached_tokens": 2832},
    }


async def test_what_is_sent_is_announced_bounded_made_up_and_another_in_each_run(examine):
    engine = EmulatedEngine()
    async with listening(engine_script(engine)) as [server]:
        code, checks, err = await examine("--base-url", server.url, "--tokens", 20_000)
    assert code == 0
    assert "4 prompts of about 20,000 tokens" in err
    assert "about 80,000 tokens in all" in err
    assert checks["engine"]["figures"]["prompt_tokens"] == engine.usage.prompt_tokens
    assert engine.usage.prompt_tokens < 1.1 * 80_000
    assert [one["max_tokens"] for one in engine.requests] == [1] * 4
    first, again, half, later = [one["messages"] for one in engine.requests]
    assert first == again == later != half

    engine = EmulatedEngine()
    async with listening(engine_script(engine)) as [server]:
        for _ in range(2):
            await examine("--base-url", server.url)
    first, second = engine.requests[0]["messages"], engine.requests[4]["messages"]
    assert first[0]["content"][:30] != second[0]["content"][:30]


async def test_a_cache_that_is_configured_off_is_said_by_the_metrics(examine_at):
    page = (
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1\n'
        "vllm:prefix_cache_queries_total 0\nvllm:prefix_cache_hits_total 0\n"
    )
    engine = EmulatedEngine(capacity_tokens=0, prompt_tokens_details=False)
    code, checks, _ = await examine_at(with_metrics(engine, lambda: page))
    assert code == 1
    assert checks["prefix cache"]["found"] == "enable_prefix_caching is False in /metrics"
    assert checks["usage"]["verdict"] == "not known"  # switched on, it may tell
    assert checks["other processes"]["verdict"] == "ok"  # nothing is counted, nothing is elsewhere


@pytest.mark.parametrize("has_metrics", [True, False])
async def test_usage_that_tells_no_cached_tokens_is_a_problem(examine_at, has_metrics):
    engine = EmulatedEngine(prompt_tokens_details=False)
    page = engine.metrics if has_metrics else lambda: ""
    code, checks, _ = await examine_at(with_metrics(engine, page))
    assert code == 1
    assert checks["usage"]["verdict"] == "problem"
    assert "--enable-prompt-tokens-details" in checks["usage"]["remedy"]
    # what the answers do not say, the metrics do
    assert checks["prefix cache"]["verdict"] == ("ok" if has_metrics else "not known")
    assert checks["common half"]["verdict"] == ("ok" if has_metrics else "not known")


async def test_an_engine_that_finds_whole_prompts_only_is_a_problem(examine_at):
    known: set[str] = set()
    most = 2_800

    def cached(body: dict[str, Any]) -> int:
        text = body["messages"][0]["content"]
        was_known = text in known
        known.add(text)
        return most if was_known else 0

    code, checks, _ = await examine_at(replying(cached), "--model", "m")
    assert code == 1
    assert verdicts(checks) == {
        "common half": "problem",
        "metrics": "not known",
        "other processes": "not known",
    }
    assert "--tokens 10000, if the model's window takes them" in checks["common half"]["remedy"]
    most = 9_000
    _, checks, _ = await examine_at(replying(cached, prompt_tokens=9_000), "--model", "m")
    assert "whole prompts only" in checks["common half"]["remedy"]
    assert "--tokens" not in checks["common half"]["remedy"]


@pytest.mark.parametrize("has_metrics", [True, False])
async def test_an_engine_that_keeps_states_is_known_by_a_third_sight(examine_at, has_metrics):
    engine = EmulatedEngine(states="junctions")
    script = with_metrics(engine, engine.metrics if has_metrics else lambda: "")
    code, checks, _ = await examine_at(script)
    assert code == 1
    assert checks["common half"]["verdict"] == "problem"
    assert checks["common half"]["found"].startswith("0 of about ")
    assert " of a third one" in checks["common half"]["found"]
    remedy = checks["common half"]["remedy"]
    spec = "vllm(states=junctions,block_tokens=16)" if has_metrics else "vllm(states=junctions)"
    assert f"ReusePlanner(cache='{spec}')" in remedy
    assert "--prefix-cache-retention-interval 64" in remedy
    assert verdicts(checks).keys() <= {"common half", "metrics", "other processes"}


async def test_recurrent_layers_are_known_by_their_blocks(examine_at):
    engine = EmulatedEngine(block_size=528, states="junctions")
    _, checks, _ = await examine_at(with_metrics(engine, engine.metrics))
    remedy = checks["common half"]["remedy"]
    assert "block_tokens=528" in remedy
    assert "--prefix-match-unit 64" in remedy


def hosted() -> Callable[[dict[str, Any]], int]:
    """Return what a hosted API has cached: from 1,024 tokens on, in steps of 128."""
    known: list[str] = []

    def cached(body: dict[str, Any]) -> int:
        text = body["messages"][0]["content"]
        same = (
            takewhile(lambda pair: pair[0] == pair[1], zip(text, one, strict=False))
            for one in known
        )
        common = max((len(list(one)) for one in same), default=0) // 4
        known.append(text)
        return common // 128 * 128 if common >= 1_024 else 0

    return cached


async def test_a_hosted_api_is_asked_with_prompts_that_are_long_enough(examine_at):
    code, checks, _ = await examine_at(replying(hosted()), "--model", "m")
    assert code == 0
    assert verdicts(checks) == {"metrics": "not known", "other processes": "not known"}
    script = replying(hosted(), prompt_tokens=600)
    code, checks, _ = await examine_at(script, "--model", "m", "--tokens", 600)
    assert code == 1
    assert "from 1,024 tokens on: --tokens 2800" in checks["prefix cache"]["remedy"]
    _, checks, _ = await examine_at(replying(lambda body: 2_000), "--model", "m")
    assert checks["common half"]["verdict"] == "not known"


def busy(engine: EmulatedEngine) -> Script:
    """Serve an engine to which others send 100 tokens before each look at its metrics."""

    def send(received: Received) -> None:
        if received.path == "/metrics":
            engine.usage += CacheUsage(100, 10)

    return changed(engine, send)


async def test_prompts_of_others_are_seen_and_are_a_question_to_the_user(examine):
    async with listening(busy(EmulatedEngine())) as [server]:
        code, checks, _ = await examine("--base-url", server.url)
        assert code == 0
        assert checks["other processes"]["verdict"] == "not known"
        assert checks["other processes"]["figures"]["foreign_prompt_tokens"] >= 100
        assert "shared_log=SQLiteLog" in checks["other processes"]["remedy"]
        code, checks, _ = await examine("--base-url", server.url, "--workers", 1)
        assert (code, checks["other processes"]["verdict"]) == (0, "ok")
        code, checks, _ = await examine("--base-url", server.url, "--workers", 4)
        assert (code, checks["other processes"]["verdict"]) == (1, "problem")
        assert "4 processes, and no log" in checks["other processes"]["found"]


async def test_metrics_alone_are_enough_to_see_others(examine):
    async with listening(busy(EmulatedEngine())) as [server]:
        code, checks, err = await examine("--metrics", f"{server.url}/metrics")
        assert [one.method for one in server.received] == ["GET"] * 3
    assert (code, err, list(checks)) == (0, "", ["metrics", "other processes"])
    assert checks["other processes"]["figures"]["foreign_prompt_tokens"] == 100


@pytest.fixture
def log_path(tmp_path):
    path = tmp_path / "sent.sqlite"
    planners = [ReusePlanner(shared_log=SQLiteLog(path)) for _ in range(2)]
    for planner in planners:
        for number in range(3):
            planner.plan(ContextRequest([f"text {number}", "another text"]))
        assert planner.catch_up(20)
    return path


async def test_a_log_is_well_that_all_processes_write(examine, log_path):
    async with listening(engine_script(EmulatedEngine())) as [server]:
        arguments = ("--base-url", server.url, "--shared-log", log_path, "--workers", 2)
        code, checks, _ = await examine(*arguments)
    assert (code, verdicts(checks)) == (0, {})
    assert "2 planners wrote the latest of 6 entries" in checks["other processes"]["found"]
    code, checks, _ = await examine("--shared-log", log_path, "--workers", 4)
    assert (code, list(checks)) == (1, ["other processes"])
    assert "4 processes should" in checks["other processes"]["found"]
    async with listening(busy(EmulatedEngine())) as [server]:
        code, checks, _ = await examine("--metrics", server.url, "--shared-log", log_path)
    assert code == 1
    assert "nobody has written meanwhile" in checks["other processes"]["found"]


async def test_a_log_that_is_not_there_is_a_problem_and_is_not_made(examine, tmp_path):
    code, checks, _ = await examine("--shared-log", tmp_path / "sent.sqlite")
    assert (code, list(tmp_path.iterdir())) == (1, [])
    assert "no process has opened it" in checks["other processes"]["found"]


async def test_a_log_of_garbage_is_a_problem(examine, log_path, tmp_path):
    with sqlite3.connect(log_path) as connection:
        connection.execute("INSERT INTO entries (entry) VALUES ('a text')")
    code, checks, _ = await examine("--shared-log", log_path)
    assert code == 1
    assert "1 of the latest entries of the log cannot be read" in checks["other processes"]["found"]
    garbage = tmp_path / "garbage"
    garbage.write_bytes(bytes(range(256)) * 100)
    garbage.with_name("garbage.key").write_bytes(b"k" * 32)
    for path in (garbage, garbage.with_name("garbage.key")):
        path.chmod(0o600)
    code, checks, _ = await examine("--shared-log", garbage)
    assert code == 1
    assert "file is not a database" in checks["other processes"]["found"]


def with_metrics(engine: EmulatedEngine, page: Callable[[], str]) -> Script:
    return changed(
        engine, lambda one: response(200, page().encode()) if one.path == "/metrics" else None
    )


def replying(cached: Callable[[dict[str, Any]], int], prompt_tokens: int = 2_837) -> Script:
    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        if not received.path.endswith("/completions"):
            writer.write(response(404))
            return
        number = cached(json.loads(received.body))
        usage = {"prompt_tokens": prompt_tokens, "prompt_tokens_details": {"cached_tokens": number}}
        choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "length"}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        writer.write(HEAD + b"".join(b"data: %s\n\n" % json.dumps(e).encode() for e in events))
        writer.write(b"data: [DONE]\n\n")

    return script


def answering(status: int, **headers: str) -> Script:
    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status, b'{"error": {"message": "secret words"}}', **headers))

    return script


SENTENCES = {
    "is_on": "enable_prefix_caching is True in /metrics",
    "again": "of 2,837 tokens cached of a prompt that came again",
    "unread": "0 tokens cached of a prompt that came again, about 2,837 expected",
    "block": "16 tokens cached of a prompt that came again, about 2,837 expected",
    "later": "expected, but some of a later one",
    "switch_on": "start vLLM with --enable-prefix-caching",
    "itself": "ask the engine itself, without a gateway",
    "meaningless": "cannot be right, such as more tokens cached than sent: it means nothing",
    "details": "start vLLM with --enable-prompt-tokens-details",
    "blocks": "its blocks hold 2,048 tokens: --tokens 8192, if the model's window takes them",
    "states": "for the model keeps states",
    "several": "name each in an EnginePool, or have the router keep a session on one, with",
    "in_part": "tokens, less than were sent",
    "pushed": "if others push them out: ",
}  # words by which to know sentences on what a cache keeps


def configured() -> Script:
    page = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True"} 1'
    return with_metrics(EmulatedEngine(prompt_tokens_details=False), lambda: page)


def engines(*turns: int) -> Script:
    several = [EmulatedEngine() for _ in range(3)]
    return routed(several[0], *(several[turn] for turn in turns))


@pytest.mark.parametrize(
    ("script", "arguments", "wanted"),
    [
        (lambda: engine_script(EmulatedEngine()), (), "again"),
        (lambda: engine_script(EmulatedEngine(prompt_tokens_details="if cached")), (), "again"),
        (lambda: engine_script(EmulatedEngine(capacity_tokens=0)), (), "unread switch_on"),
        (lambda: engine_script(EmulatedEngine(capacity_tokens=3_000)), (), "again pushed"),
        (lambda: engine_script(EmulatedEngine(states="junctions")), (), "again states"),
        (lambda: engine_script(EmulatedEngine(block_size=2_048)), ("--tokens", 3_000), "blocks"),
        (configured, (), "is_on details"),
        (lambda: replying(lambda body: 16), ("--model", "m"), "block itself"),
        (lambda: replying(lambda body: 5_000), ("--model", "m"), "meaningless itself"),
        (lambda: engines(0, 1, 2), (), "unread later several in_part"),
        (lambda: engines(0, 0, 1), (), "again several in_part"),
    ],
)
async def test_each_sentence_is_said_only_of_engines_it_is_true_of(
    examine_at, script, arguments, wanted
):
    _, checks, _ = await examine_at(script(), *arguments)
    text = "\n".join(f"{one['found']}; {one['remedy']}" for one in checks.values())
    assert {name for name, part in SENTENCES.items() if part in text} == set(wanted.split()), text


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "OPENAI_API_KEY"),
        (404, "--base-url, --model"),
        (429, "less to do"),
        (500, "engine's log"),
    ],
)
async def test_an_engine_that_refuses_is_a_problem_with_its_remedy(examine_at, status, remedy):
    code, checks, _ = await examine_at(answering(status), "--model", "m")
    assert code == 1
    assert checks["engine"]["verdict"] == "problem"
    assert f"status {status}" in checks["engine"]["found"]
    assert remedy in checks["engine"]["remedy"]
    assert "secret words" not in json.dumps(checks)
    assert set(verdicts(checks)) == set(CHECKS)


async def test_metrics_that_are_not_there_are_a_problem(examine):
    async with listening(answering(503)) as [server]:
        code, checks, _ = await examine("--metrics", f"{server.url}/metrics")
    assert (code, checks["metrics"]["verdict"]) == (1, "problem")


@pytest.mark.parametrize("kind", slow_unless(ENDLESS | DRIPPING, "events", "nothing"))
async def test_replies_without_an_end_end_at_the_time_out_with_a_clear_line(run, kind):
    script = (ENDLESS | DRIPPING)[kind]
    async with listening(script) as [server]:
        arguments = ("--base-url", server.url, "--model", "m", "--timeout", "0.5", "--watch", "0")
        code, out, _ = await asyncio.to_thread(run, "doctor", *arguments)
    assert code == 1
    said, *lines = out.splitlines()
    assert said.startswith("1 problem in ")
    [line] = [line for line in lines if "engine: " in line]
    assert line.startswith("problem    engine: 0 answers: the engine at 127.0.0.1:")


@pytest.mark.parametrize("garbage", [one[:60] for one in BROKEN])
async def test_garbage_is_a_problem_and_never_a_traceback(examine_at, garbage):
    whole = next(one for one in BROKEN if one.startswith(garbage))
    reply = response(200, whole, content_type="text/event-stream")
    code, checks, _ = await examine_at(changed(EmulatedEngine(), lambda _: reply), "--model", "m")
    assert (code, checks["engine"]["verdict"]) == (1, "problem")


async def test_metrics_without_an_end_do_not_keep_the_engine_from_being_looked_at(run):
    endless = repeating(HEAD, b"vllm:prefix_cache_hits_total 5\n" * 1_000)
    serve = engine_script(EmulatedEngine())

    async def script(received: Received, writer: asyncio.StreamWriter) -> None:
        await (endless if received.path == "/metrics" else serve)(received, writer)

    async with listening(script) as [server]:
        arguments = ("--base-url", server.url, "--timeout", "2", "--watch", "0", "--json")
        code, out, _ = await asyncio.to_thread(run, "doctor", *arguments)
        assert sum(one.path == "/metrics" for one in server.received) == 1
    checks = {one["check"]: one for one in json.loads(out)["checks"]}
    assert code == 0
    assert verdicts(checks) == {"metrics": "not known", "other processes": "not known"}


async def test_models_that_want_another_limit_of_tokens_get_it(examine_at):
    engine = EmulatedEngine()
    code, checks, _ = await examine_at(
        changed(engine, lambda one: response(400, b"{}") if b"max_tokens" in one.body else None)
    )
    assert (code, verdicts(checks)) == (0, {})
    assert [one["max_completion_tokens"] for one in engine.requests] == [16] * 4


async def test_prompts_fit_the_models_window_and_large_blocks_fit_the_prompts(examine_at):
    for options, tokens in (({"max_model_len": 1_000}, "700"), ({"block_size": 2_048}, "8,192")):
        code, checks, err = await examine_at(engine_script(EmulatedEngine(**options)))
        assert (code, verdicts(checks)) == (0, {})
        assert f"about {tokens} tokens" in err


async def test_the_key_goes_to_the_engine_and_not_to_metrics_elsewhere(examine, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    engine = EmulatedEngine()
    async with listening(engine_script(engine), engine_script(engine)) as [api, elsewhere]:
        arguments = ("--base-url", f"{api.url}/v1", "--metrics", f"{elsewhere.url}/metrics")
        code, checks, err = await examine(*arguments)
        assert code == 0
        assert {one.headers["authorization"] for one in api.received} == {"Bearer the-key"}
        assert all("the-key" not in str(one.headers) for one in elsewhere.received)
    assert "the-key" not in err + json.dumps(checks)


async def test_a_password_in_an_address_stands_in_no_line(examine):
    async with listening(engine_script(EmulatedEngine())) as [server]:
        url = server.url.replace("http://", "http://user:pass-word@")
        code, checks, err = await examine("--base-url", f"{url}/v1")
    assert code == 0
    assert "pass-word" not in err + json.dumps(checks)


def recording(folder, systems, **fields):
    write_jsonl(folder / "corpus.jsonl", *({"id": n, "text": f"Text {n}."} for n in range(3)))
    lines = [
        {"request_id": n, "query": "?", "blocks": [0, 1, 2], "system": system, **fields}
        for n, system in enumerate(systems)
    ]
    write_jsonl(folder / "trace.jsonl", *lines)
    return folder


async def test_a_recording_whose_system_text_varies_is_a_problem_that_shows_where(run, tmp_path):
    systems = [f"You help with rivers. Today is 2026-11-{day}. Be brief." for day in range(10, 30)]
    code, out, _ = run("doctor", recording(tmp_path, systems))
    assert code == 1
    assert out.splitlines() == [
        "1 problem in 1 check. Next, in front of the contexts: say it behind the documents, such "
        "as in the question",
        "",
        "problem    in front of the contexts: 20 forms of the system text in 20 requests: "
        "“rivers. Today is” is followed by “2026-11-10.” and by “2026-11-11.”",
        "           say it behind the documents, such as in the question",
    ]


async def test_nothing_of_a_recording_is_sent(examine, tmp_path):
    engine = EmulatedEngine()
    folder = recording(tmp_path, ["A system text of the user's."] * 5)
    async with listening(engine_script(engine)) as [server]:
        code, checks, _ = await examine(folder, "--base-url", server.url)
        sent = b"".join(one.body for one in server.received).decode()
    assert (code, checks["in front of the contexts"]["verdict"]) == (0, "ok")
    assert len(engine.requests) == 4
    assert "user's" not in sent
    assert "Text 1" not in sent


def test_control_signs_of_a_trace_do_not_reach_the_terminal(run, tmp_path):
    systems = [f"You help. \x1b[31m\u202eToday {n} \x07 it is." for n in range(20)]
    _, out, _ = run("doctor", recording(tmp_path, systems))
    assert all(sign.isprintable() or sign == "\n" for sign in out)


def test_a_report_of_a_bug_says_what_is_installed(run):
    assert f" ctxreuse {__version__}, " in run("doctor", "--report")[1]


def test_an_engine_that_is_down_is_said_once_with_what_the_system_says(run):
    code, out, err = run("doctor", "--base-url", "http://127.0.0.1:9/v1", *QUICK)
    assert (code, err) == (1, "")
    verdict, _, *lines = out.splitlines()
    assert lines == [
        "problem    engine: 0 answers: the engine at 127.0.0.1:9 did not answer: "
        "APIConnectionError, connection refused",
        " " * 11 + "start it, or check --base-url: its host, its port, /v1; if slow: --timeout 120",
        "not known  6 checks need an engine that answers",
    ]
    said = "1 problem in 7 checks; 6 checks need an engine that answers. Next, engine: start it, or"
    assert verdict == f"{said} check --base-url: its host, its port, /v1; if slow: --timeout 120"


def test_without_the_extra_the_option_that_needs_it_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    code, _, err = run("doctor", "--base-url", "http://127.0.0.1:9/v1", *QUICK)
    assert code == 2
    assert err.startswith("ctxreuse: doctor --base-url needs optional packages: pip install ")
