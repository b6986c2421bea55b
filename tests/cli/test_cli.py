"""The `ctxreuse` command, called as a user calls it."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
from cli_helpers import words
from planning_helpers import block, location_words, order_words, tokenizer_file, write_jsonl

import ctxreuse
from ctxreuse.cli.command_line import _COMMANDS
from ctxreuse.errors import MissingExtraError
from ctxreuse.measure.replay import plan_file
from ctxreuse.planner import ReusePlanner

pytestmark = pytest.mark.usefixtures("paper_words")

LATER = {
    "request_id": "a1",
    "blocks": [1, 2, 5],
    "references": [],
    "order_annotation": order_words(2, 1, 5),
    "parts": [["[Doc_1]", 1], ["[Doc_2]", 2], ["[Doc_5]", 5]],
    "is_labelled": True,
    "query": "B?",
    "system": None,
    "tenant": "",
    "conversation_id": None,
    "turn": 1,
    "after": None,
    "expected_cached_tokens": 200,
}
"""The line of a plan whose request is a conversation's second one, planned without the first."""


@pytest.fixture
def corpus(tmp_path):
    lines = [{"id": i, "text": block(i).text, "tokens": 100} for i in range(1, 10)]
    return write_jsonl(tmp_path / "corpus.jsonl", *lines)


TRACE = [
    {"request_id": "a0", "query": "A?", "blocks": [1, 2], "conversation_id": "a", "turn": 0},
    {"request_id": "x", "query": "X?", "blocks": [3, 2, 1], "conversation_id": None, "turn": 0},
    {"request_id": "y", "query": "Y?", "blocks": [7, 8]},
    {"request_id": "a1", "query": "B?", "blocks": [2, 1, 5], "conversation_id": "a", "turn": 1},
    {"request_id": 4, "query": "Z?", "blocks": [8, 9, 7]},
]


@pytest.fixture
def trace(tmp_path, corpus):
    return write_jsonl(tmp_path / "trace.jsonl", *TRACE)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def orders(text):
    return [(line["request_id"], line["blocks"]) for line in lines(text)]


# ctxreuse plan


def test_plan_writes_a_line_a_request_to_standard_output(run, trace, corpus):
    code, out, err = run("plan", "--trace", trace, "--corpus", corpus, "--mode", "online")
    assert (code, err) == (0, "")
    assert [list(line) for line in lines(out)] == [list(LATER)] * 5
    assert orders(out) == [
        ("a0", [1, 2]),
        ("x", [1, 2, 3]),
        ("y", [7, 8]),
        ("a1", [1, 2, 5]),
        (4, [7, 8, 9]),
    ]
    assert lines(out)[3] == LATER
    assert run("plan", trace, "-o", "-")[1] == out


def test_plan_offline_writes_the_execution_order(run, trace):
    _, out, _ = run("plan", trace, "--mode", "offline")
    assert orders(out) == [
        ("a0", [1, 2]),
        ("x", [1, 2, 3]),
        ("a1", [1, 2, 5]),
        ("y", [7, 8]),
        (4, [7, 8, 9]),
    ]


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_plan_takes_other_strategies(run, trace, mode):
    arguments = ("plan", trace, "--mode", mode, "--strategy")
    _, out, _ = run(*arguments, "none")
    assert orders(out) == [(line["request_id"], line["blocks"]) for line in TRACE]
    _, out, _ = run(*arguments, "paper")
    assert sorted((str(name), sorted(ids)) for name, ids in orders(out)) == sorted(
        (str(line["request_id"]), sorted(line["blocks"])) for line in TRACE
    )
    assert lines(run(*arguments, "reuse")[1]) == lines(run(*arguments[:-1])[1])


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_plan_can_keep_the_best_block_in_front(run, trace, mode):
    arguments = ("plan", trace, "--mode", mode)
    _, out, _ = run(*arguments, "--keep-best")
    best = {line["request_id"]: line["blocks"][0] for line in TRACE}
    assert {name: ids[0] for name, ids in orders(out)} == best
    _, moved, _ = run(*arguments)
    assert {name: ids[0] for name, ids in orders(moved)} != best


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_plan_dedup_replays_conversations(run, trace, mode):
    _, out, _ = run("plan", trace, "--mode", mode, "--dedup")
    later = next(line for line in lines(out) if line["request_id"] == "a1")
    shown = [["[Doc_2]", 2, location_words(2)], ["[Doc_1]", 1, location_words(1)], ["[Doc_5]", 5]]
    assert later == LATER | {
        "blocks": [5],
        "references": [2, 1],
        "order_annotation": None,
        "parts": shown,
        "conversation_id": "a",
        "after": "a0",
        "expected_cached_tokens": 0,
    }


def test_plan_takes_the_size_of_the_engines_cache(run, trace):
    arguments = ("plan", trace)
    expected = {
        size: [
            line["expected_cached_tokens"]
            for line in lines(run(*arguments, "--capacity-tokens", size)[1])
        ]
        for size in (0, 300, 10_000)
    }
    assert expected[0] == [0, 0, 0, 0, 0]
    assert expected[300] == [0, 200, 0, 100, 0]
    assert expected[10_000] == [0, 200, 0, 200, 200]


def test_plan_reads_the_trace_or_the_corpus_from_standard_input(run, trace, corpus):
    _, expected, _ = run("plan", trace)
    for path, option, other in ((trace, "--trace", "--corpus"), (corpus, "--corpus", "--trace")):
        file = trace if other == "--trace" else corpus
        with open(path) as stdin:
            code, out, _ = run("plan", option, "-", other, file, stdin=stdin.read())
        assert (code, out) == (0, expected)


def test_plan_writes_and_replaces_a_file(run, trace, corpus, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    arguments = ("plan", trace)
    assert run(*arguments, "-o", output) == (0, "", "")
    assert output.read_text() == run(*arguments)[1]
    assert run(*arguments, "--strategy", "none", "--output", output)[0] == 0
    assert orders(output.read_text())[1] == ("x", [3, 2, 1])
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "out.jsonl", "trace.jsonl"]


def test_plan_of_an_empty_trace_is_an_empty_file(run, corpus, tmp_path):
    empty, output = write_jsonl(tmp_path / "empty.jsonl"), tmp_path / "out.jsonl"
    for mode in ("online", "offline"):
        arguments = ("plan", empty, "--mode", mode, "-o", output)
        assert run(*arguments) == (0, "", "")
        assert output.read_bytes() == b""


def test_plan_of_a_broken_trace_exits_with_2_and_writes_nothing(run, corpus, tmp_path):
    broken = '{"request_id": "z", "blo'
    trace = write_jsonl(tmp_path / "trace.jsonl", *TRACE, broken)
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    code, out, err = run("plan", trace, "-o", output)
    assert (code, out) == (2, "")
    assert err.startswith(f"ctxreuse: {trace}:6: broken JSON")
    assert err.count("\n") == 1
    assert output.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 3


def test_plan_names_standard_input_and_files_that_are_missing(run, corpus, tmp_path):
    code, _, err = run("plan", "-", "--corpus", corpus, stdin="\n{}\n")
    assert code == 2
    assert err.startswith("ctxreuse: standard input:2: field 'request_id' is missing; it must be ")
    assert "for logs of prompts, run the application under `ctxreuse record`" in err
    missing = tmp_path / "missing.jsonl"
    code, _, err = run("plan", missing)
    assert (code, err) == (2, f"ctxreuse: {missing}: there is no such file or folder\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--trace", "-", "--corpus", "-", "--mode", "online"),
        ("simulate", "--plan", "-", "--corpus", "-"),
        ("explain", "--plan", "-", "--corpus", "-"),
    ],
)
def test_only_one_file_comes_from_standard_input(run, arguments):
    assert run(*arguments) == (
        2,
        "",
        "ctxreuse: only one file can be read from standard input ('-')\n",
    )


# ctxreuse simulate


@pytest.fixture
def plan(run, trace, tmp_path):
    path = tmp_path / "plan.jsonl"
    run("plan", trace, "-o", path)
    return str(path)


def test_simulate_prints_the_hit_ratio_as_json_and_a_table_for_people(run, plan):
    code, out, err = run("simulate", plan, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "requests": 5,
        "prompt_tokens": 1300,
        "cached_tokens": 600,
        "prefilled_tokens": 700,
        "hit_ratio": 0.461538,
        "capacity_tokens": None,
        "level": "block",
    }

    code, out, err = run("simulate", plan)
    assert (code, err) == (0, "")
    assert words(out).startswith("5 requests with 1,300 prompt tokens Hit ratio by cache size")
    assert "unlimited 0.462" in words(out)


def test_simulate_takes_several_capacities(run, plan):
    sizes = ("--capacity-tokens", 100, "--capacity-tokens", 10_000)
    _, out, _ = run("simulate", plan, "--json", *sizes)
    one_by_one = [
        json.loads(run("simulate", plan, "--json", sizes[0], size)[1]) for size in (100, 10_000)
    ]
    result = json.loads(out)
    assert (result["requests"], result["level"]) == (5, "block")
    for measured, alone in zip(result["sizes"], one_by_one, strict=True):
        assert measured.pop("second_half")["prompt_tokens"] == 800
        assert measured.items() <= alone.items()
    assert one_by_one[0]["cached_tokens"] < one_by_one[1]["cached_tokens"]


def test_simulate_of_plans_without_their_corpus_or_from_standard_input(run, plan, corpus, tmp_path):
    assert run("simulate", "--plan", plan) == run("simulate", "--plan", plan, "--corpus", corpus)
    os.rename(corpus, f"{corpus}.gone")
    code, out, err = run("simulate", "--plan", plan)
    assert (code, out) == (2, "")
    assert err == f"ctxreuse: {corpus}: cannot be read: No such file or directory\n"
    corpus = f"{corpus}.gone"
    with open(plan) as file:
        text = file.read()
    expected = run("simulate", "--plan", plan, "--corpus", corpus, "--json")
    assert run("simulate", "--plan", "-", "--corpus", corpus, "--json", stdin=text) == expected
    empty = write_jsonl(tmp_path / "empty.jsonl")
    code, out, _ = run("simulate", "--plan", empty, "--corpus", corpus, "--json")
    assert code == 0
    assert json.loads(out)["hit_ratio"] == 0


def test_simulate_with_a_tokenizer_counts_whole_prompts(run, plan, tmp_path):
    text = "<|im_start|>user <|im_start|>assistant text of in : >"
    named = [name for number in range(10) for name in (f"[Doc_{number}]", f"{number}")]
    path = tokenizer_file(tmp_path, *text.split(), *named)
    arguments = ("simulate", plan, "--json", "--tokenizer", path)
    result = json.loads(run(*arguments, "--block-size", "1")[1])
    # user 1, blocks of 4, question 1, assistant 1; x, a1 and 4 have an annotation of 18 words
    prompts = [11, 15 + 18, 11, 15 + 18, 15 + 18]
    cached = [0, 9, 1, 9, 9]  # user 1, two blocks of 4
    assert (result["level"], result["requests"]) == ("token", 5)
    assert (result["prompt_tokens"], result["cached_tokens"]) == (sum(prompts), sum(cached))


def test_a_conversation_in_a_file_has_10_000_turns_at_most(run, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_file, "MOST_TURNS", 2)
    lines = [{"request_id": n, "blocks": [1], "after": n - 1 if n else None} for n in range(3)]
    plan = write_jsonl(tmp_path / "plan.jsonl", *lines)
    code, out, err = run("simulate", plan, "--json")
    assert (code, out) == (2, "")
    assert err == (
        f"ctxreuse: {plan}:3: it continues a conversation of 2 turns; end the conversation before "
        "it, and begin another\n"
    )
    turns = [{"request_id": n, "blocks": [1], "conversation_id": "c"} for n in range(3)]
    trace = write_jsonl(tmp_path / "trace.jsonl", *turns)
    options = (trace, "-o", "-")
    assert run("plan", *options)[0] == 0
    code, out, err = run("plan", *options, "--dedup")
    assert (code, out) == (2, "")
    assert "conversation 'c' (str) has more than 2 turns in the trace" in err


# usage


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_mentions_every_option_and_says_nothing_of_the_type_of_a_flag(run, name):
    code, out, err = run(name, "--help")
    assert (code, err, "bool" in out) == (0, "", False)
    for one in fields(_COMMANDS[name]):
        if "help" in one.metadata and not one.metadata.get("argument"):
            usual = f"--{one.name.replace('_', '-')}"
            assert set(one.metadata["names"] or [usual]) <= set(out.split())
    assert f" {name} " in run("--help")[1]


def test_the_command_alone_shows_its_help(run):
    code, out, err = run()
    assert code in (0, 2)
    assert "ctxreuse [OPTIONS] COMMAND" in words(out + err)


def test_the_version_is_the_packages(run):
    assert run("--version") == (0, f"{ctxreuse.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "mentioned"),
    [
        (("plan", "--corpus", "c", "--mode", "online"), "--trace"),
        (("plan", "--trace", "t", "--mode", "online"), "t: there is no such file"),
        (("plan", "t", "--keep-best", "--strategy", "none"), "leave it out with --strategy none"),
        (("plan", "--trace", "t", "--corpus", "c", "--mode", "batch"), "'batch'"),
        (("simulate", "--corpus", "c"), "--plan"),
        (("simulate", "p", "--capacity-tokens", "-1"), "--capacity-tokens"),
        (("simulate", "--plan", "p", "--corpus", "c", "--block-size", "0"), "--block-size"),
        (("simulate", "--plan", "p"), "p: there is no such file or folder"),
        (("explain", "--plan", "p", "--corpus", "c", "--worst", "-1"), "--worst"),
        (("explain", "--plan", "p", "--corpus", "c", "--all"), "--all"),
        (("reorder",), "reorder"),
        (("doctor",), "give --base-url, --metrics, --shared-log, --report or a"),
        (("doctor", "--base-url", "nowhere"), "base_url must be the engine's address"),
        (("doctor", "--metrics", "http://[broken"), "must be the engine's address"),
        (("doctor", "--metrics", "http://host/metrics?key=secret"), "must have no query"),
        (("doctor", "no-such-recording"), "there is no such file or folder"),
        (("doctor", "--base-url", "http://h", "--tokens", "20001"), "--tokens"),
        (("doctor", "--base-url", "http://h", "--workers", "0"), "--workers"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(run, arguments, mentioned):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert mentioned in words(err)
    assert "secret" not in err


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(run, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    remedy = MissingExtraError("the command ctxreuse", "cli")
    assert run("demo") == (2, "", f"ctxreuse: {remedy}\n")


def test_python_m_ctxreuse_is_the_command_and_its_parts_can_be_piped(trace, corpus):
    command = [sys.executable, "-W", "error", "-m", "ctxreuse"]
    plan = subprocess.run(
        [*command, "plan", trace, "--mode", "offline"], capture_output=True, check=True
    )
    simulate = subprocess.run(
        [*command, "simulate", "--plan", "-", "--corpus", corpus, "--json"],
        input=plan.stdout,
        capture_output=True,
        check=True,
    )
    assert (plan.stderr, simulate.stderr) == (b"", b"")
    assert json.loads(simulate.stdout)["hit_ratio"] == 0.461538


@pytest.fixture
def recording(tmp_path):
    folder = tmp_path / "recording"
    folder.mkdir()
    blocks = [{"id": n, "text": f"Text {n} says this. " * 30} for n in range(6)]
    write_jsonl(folder / "corpus.jsonl", *blocks)
    lines = [{"request_id": n, "query": "?", "blocks": [n % 6, (n + 1) % 6]} for n in range(12)]
    write_jsonl(folder / "trace.jsonl", *lines)
    return folder


@pytest.mark.parametrize(
    "command", ["estimate", "lint", "doctor", "report", "plan", "simulate", "explain"]
)
def test_each_command_takes_a_recordings_folder_or_its_file(run, recording, command, tmp_path):
    page = ("-o", tmp_path / "page.html") if command == "report" else ()
    [code] = {run(command, one, *page)[0] for one in (recording, recording / "trace.jsonl")}
    assert code in (0, 1)
    empty = tmp_path / "empty"
    empty.mkdir()
    code, _, err = run(command, empty, *page)
    assert (code, "write one: ctxreuse record -o FOLDER app.py" in err) == (2, True), err


@pytest.mark.parametrize("command", ["plan", "simulate", "explain"])
def test_what_is_read_is_named_once(run, recording, command):
    option = "--trace" if command == "plan" else "--plan"
    assert run(command, option, recording) == run(command, recording)
    code, _, err = run(command)
    assert (code, "once, as an argument or with --" in err) == (2, True), err
    assert run(command, recording, option, recording)[0] == 2


@pytest.mark.parametrize(
    "command", [("estimate", "-o"), ("report", "-o"), ("report", "--pictures")]
)
def test_a_missing_extra_is_told_before_the_work(run, recording, monkeypatch, tmp_path, command):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(ReusePlanner, "plan", None)
    monkeypatch.chdir(tmp_path)
    name, option = command
    code, out, err = run(name, recording, option, tmp_path / "out")
    assert (code, out) == (2, "")
    assert "a report needs optional packages: pip install" in err
