"""Files as other tools write them, given to the commands: read, or named with what to do."""

import json

import pytest
from planning_helpers import write_jsonl

COMMANDS = ("estimate", "lint", "plan", "simulate", "explain")
TEXTS = [{"id": name, "text": f"Text {name} says this. " * 30} for name in ("d1", "d2", "d3")]
RUN = """\
q2 Q0 d3 2 7.5 bm25
q1\tQ0\td2\t1\t9.0\tbm25

q2 Q0 d1 1 8.5 bm25
q1 Q0 d1 10 0.5 bm25
q1 Q0 d3 9 0.6 bm25
"""
BY_RANK = [
    {"request_id": "q2", "blocks": ["d1", "d3"]},
    {"request_id": "q1", "blocks": ["d2", "d3", "d1"]},
]


@pytest.fixture
def beir(tmp_path):
    lines = [{"_id": one["id"], "title": "T", "text": one["text"]} for one in TEXTS]
    return write_jsonl(tmp_path / "corpus.jsonl", *lines)


@pytest.mark.usefixtures("beir")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_a_retriever_with_a_beir_corpus_is_read_as_a_trace_is(run, tmp_path, command):
    def told():
        code, out, err = run(command, tmp_path / "trace")
        assert (code in (0, 1), err) == (True, "")
        return out.partition("\n")[0] if command == "estimate" else out  # it tells times, too

    (tmp_path / "trace").write_text(RUN)
    of_run = told()
    write_jsonl(tmp_path / "trace", *BY_RANK)
    assert told() == of_run
    write_jsonl(tmp_path / "trace", json.dumps(BY_RANK, indent=4))
    write_jsonl(tmp_path / "corpus.jsonl", json.dumps(TEXTS))
    assert told() == of_run


def test_a_run_comes_from_standard_input_too(run, beir):
    code, out, _ = run("plan", "-", "--corpus", beir, "--strategy", "none", stdin=RUN)
    assert code == 0
    planned = [json.loads(line) for line in out.splitlines()]
    assert [(one["request_id"], one["blocks"]) for one in planned] == [
        ("q2", ["d1", "d3"]),
        ("q1", ["d2", "d3", "d1"]),
    ]
    assert {one["query"] for one in planned} == {""}


BROKEN_RUN = "broken line of a TREC run; it must be 'query Q0 document rank score tag'"


@pytest.mark.usefixtures("beir")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("q Q0 d1 1 0.5", f":1: {BROKEN_RUN}"),
        ("q Q0 d1 1 0.5 a b", f":1: {BROKEN_RUN}"),
        ("q Q0 d1 first 0.5 a", f":1: {BROKEN_RUN}"),
        ("q Q0 d1 -1 0.5 a", f":1: {BROKEN_RUN}"),
        (f"q Q0 d1 {'9' * 5_000} 0.5 a", f":1: {BROKEN_RUN}"),
        (
            "q Q0 d1 1 2 a\nq Q0 d2 1 1 a",
            ":2: query 'q' (str) has rank 1 twice; rank each document",
        ),
        ("q Q0 d1 1 2 a\nq 0 d2 2 1 a", ":2: broken JSON (Expecting value); "),
        (b"q Q0 \xff 1 2 a", ":1: not UTF-8 (byte 5); convert the file"),
    ],
)
def test_a_broken_run_is_named_by_line(run, tmp_path, command, lines, problem):
    path = write_jsonl(tmp_path / "run.trec", lines)
    code, out, err = run(command, path)
    assert (code, out) == (2, "")
    assert err.startswith(f"ctxreuse: {path}{problem}")


@pytest.mark.usefixtures("beir")
def test_a_document_of_a_run_that_the_corpus_lacks_is_named_with_its_query(run, tmp_path):
    path = write_jsonl(tmp_path / "run.trec", "q1 Q0 d1 1 0.5 a", "q2 Q0 ghost 1 0.5 a")
    code, _, err = run("estimate", path)
    assert (code, err) == (
        2,
        f"ctxreuse: {path}: query 'q2' (str): block 'ghost' (str) is not in the corpus; add it "
        "there, or pass the corpus that the trace was made with\n",
    )


HASHED = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}


@pytest.mark.parametrize("command", [one for one in COMMANDS if one != "simulate"])
@pytest.mark.parametrize(
    ("line", "item"),
    [
        (HASHED, ""),
        ({**HASHED, "session_id": "a", "request_id": "r1"}, ""),
        (json.dumps([HASHED]), "[0]"),
    ],
    ids=["line", "session", "array"],
)
def test_a_trace_without_texts_is_named_without_a_corpus_too(run, tmp_path, command, line, item):
    path = write_jsonl(tmp_path / "trace.jsonl", line)
    code, out, err = run(command, path)
    assert (code, out) == (2, "")
    assert err == (
        f"ctxreuse: {path}:1{item}: a trace in Mooncake's format has no texts; "
        "`ctxreuse simulate` reads it\n"
    )
