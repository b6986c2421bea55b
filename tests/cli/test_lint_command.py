"""`ctxreuse lint` and `ctxreuse explain --cache`, called as a user calls them."""

import json

import pytest
from cli_helpers import words

from ctxreuse.measure.traces.recording import CORPUS, TRACE, PromptRecorder, TraceRecorder

MARK = {"type": "ephemeral"}
RIVERS = {name: f"{name} is a river of many towns. " * 90 for name in ("Seine", "Loire", "Tiber")}


def ask(recorder, minute, *, names=("Seine", "Loire"), **more):
    parts = [{"type": "text", "text": f"{RIVERS[name]}\n\n"} for name in names]
    parts[-1] = {**parts[-1], "cache_control": MARK}
    parts.append({"type": "text", "text": f"Where, at {minute}?"})
    system = [{"type": "text", "text": f"Help. It is 10:{minute:02}.", "cache_control": MARK}]
    fields = {"system": system, "model": "m", **more}
    return PromptRecorder(recorder, source="tests").note(
        [{"role": "user", "content": parts}], fields
    )


@pytest.fixture
def recording(tmp_path):
    with TraceRecorder(tmp_path / "recording", clock=lambda: 0.0) as recorder:
        for minute in range(4):
            ask(recorder, minute)
    return tmp_path / "recording"


def test_findings_are_told_and_the_exit_code_says_so(run, recording):
    code, out, err = run("lint", recording, "--cache", "anthropic")
    assert (code, err) == (1, "")
    said = words(out)
    assert said.startswith("1 finding in 4 requests with 5,792 prompt tokens (anthropic). First: ")
    assert "volatile text in front, request 2" in said
    assert "is followed by 10:00. and by 10:01." in said
    assert "-> Say it behind the documents, such as in the question." in said


def test_json_has_every_finding_with_its_numbers(run, recording, tmp_path):
    prices = tmp_path / "prices.json"
    told = {"input": 3.0, "cached_input": 0.3, "currency": "USD", "date": "today", "source": "me"}
    prices.write_text(json.dumps(told))
    code, out, _ = run("lint", recording, "--cache", "anthropic", "--prices", prices, "--json")
    report = json.loads(out)
    assert code == 1
    (finding,) = report["findings"]
    assert finding | {"found": "", "label": ""} == {
        "check": "volatile text in front",
        "request_id": finding["request_id"],
        "number": finding["request_id"],
        "label": "",
        "requests": 3,
        "found": "",
        "tokens": finding["tokens"],
        "cost_tokens": round(1.15 * finding["tokens"]),
        "share": round(finding["cost_tokens"] / report["prompt_tokens"], 6),
        "remedy": "Say it behind the documents, such as in the question.",
        "money": pytest.approx(finding["cost_tokens"] * 3 / 1_000_000),
    }
    assert report["prices"]["source"] == "me"
    _, out, _ = run("lint", recording, "--cache", "anthropic", "--prices", prices)
    assert "USD" in out
    assert "prices of today: me" in out


def test_a_clean_trace_ends_with_0(run, tmp_path):
    with TraceRecorder(tmp_path / "clean") as recorder:
        recorder.record(["a river"], "Which?")
    code, out, _ = run("lint", tmp_path / "clean")
    assert code == 0
    assert words(out).startswith("Nothing found in 1 request with 4 prompt tokens (vllm).")
    assert "not known: tools, history and breakpoints of 1 request" in words(out)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "broken JSON"),
        ('{"request_id": 1, "blocks": ["ghost"]}', "block 'ghost' (str) is not in the corpus"),
        ('{"request_id": 1, "blocks": [], "sent": []}', "field 'sent' is"),
        ('{"request_id": 1, "blocks": [], "marks": [1]}', "must hold integers from 0 to 0"),
    ],
)
def test_a_broken_trace_ends_with_2_and_names_the_line(run, tmp_path, line, problem):
    (tmp_path / CORPUS).write_text("")
    (tmp_path / TRACE).write_text(line)
    code, out, err = run("lint", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"ctxreuse: {tmp_path / TRACE}:1: ")
    assert problem in err


def test_a_cache_that_is_none_ends_with_2(run, recording):
    code, _, err = run("lint", recording, "--cache", "antropic")
    assert (code, "did you mean 'anthropic'?" in err) == (2, True)


# explain


def test_json_has_reasons(run, recording):
    files = ("--plan", recording / TRACE, "--corpus", recording / CORPUS)
    _, out, _ = run("explain", *files, "--cache", "anthropic", "--json")
    told = [json.loads(line)["reason"] for line in out.splitlines()]
    assert told == ["never written", "system", "system", "system"]


def test_the_last_turn_of_a_conversation_is_compared_however_long_ago_it_was(run, tmp_path):
    front = {"conversation_id": "c", "blocks": [], "timestamp": 0}
    turns = [
        {"request_id": "first", **front, "sent": {"tools": ["a#1"]}},
        *({"request_id": n, "blocks": []} for n in range(5)),
        {"request_id": "second", **front, "sent": {"tools": ["b#2"], "history": 2}},
        {"request_id": "third", **front, "sent": {"tools": ["b#2"], "history": 4}},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(one) + "\n" for one in turns))
    (tmp_path / CORPUS).write_text("")
    files = ("--plan", trace, "--corpus", tmp_path / CORPUS)
    _, out, _ = run("explain", *files, "--cache", "anthropic", "--json")
    told = [json.loads(line) for line in out.splitlines()][-2:]
    assert [(one["cause"], one["reason"], one["closest"]) for one in told] == [
        ("other tools", "tools", "first"),
        ("later turn", None, None),
    ]
