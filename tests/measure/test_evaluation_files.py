import json

import pytest
from planning_helpers import big_request, block, user, write_jsonl

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.context import files
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.errors import InputFileError
from ctxreuse.measure.replay.plan_file import PlannedRequest, read_plan
from ctxreuse.measure.traces.json_lines import read_lines, write_lines
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_titles, read_trace

CORPUS = {1: block(1), "a": block("a"), 2: block(2)}


BROKEN_JSON = "each line must be one complete JSON object, or the file an array of them"


def readers():
    return {
        "corpus": (read_corpus, {"id": 0, "text": "nothing"}),
        "trace": (lambda path: read_trace(path, CORPUS), {"request_id": 0, "blocks": []}),
        "plan": (read_plan, {"request_id": 0, "blocks": []}),
    }


NATURAL = "it must be an integer from 0, with at most 100 digits"
every_file = pytest.mark.parametrize("kind", ["corpus", "trace", "plan"])


def error_of(kind, path):
    read, _ = readers()[kind]
    with pytest.raises(InputFileError) as caught:
        read(path)
    return str(caught.value)


# every kind of file


@every_file
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": 1, "te', f"broken JSON (Unterminated string starting at); {BROKEN_JSON}"),
        (
            "{'id': 1}",
            f"broken JSON (Expecting property name enclosed in double quotes); {BROKEN_JSON}",
        ),
        ("{} {}", f"broken JSON (Extra data); {BROKEN_JSON}"),
        (b'{"text": "\xff"}', "not UTF-8 (byte 10); convert the file"),
        ('"text"', "'text' (str) is no JSON object"),
        ("NaN", "nan (float) is no JSON object"),
    ],
)
def test_a_line_that_is_no_json_object_is_named_by_file_and_line(tmp_path, kind, line, problem):
    _, good = readers()[kind]
    path = write_jsonl(tmp_path / "broken.jsonl", good, "", line, good)
    assert error_of(kind, path) == f"{path}:3: {problem}"


@every_file
def test_an_array_is_read_as_its_objects_would_be_from_lines(tmp_path, kind):
    read, good = readers()[kind]
    for text in (json.dumps([good]), "\n \r\n" + json.dumps([good], indent=1) + "\n\n"):
        assert len(read(write_jsonl(tmp_path / "array.json", text))) == 1
    assert len(read(write_jsonl(tmp_path / "empty.json", "[\n]"))) == 0


@every_file
@pytest.mark.parametrize(
    ("array", "problem"),
    [
        ("[GOOD, 7]", "2[1]: 7 (int) is no JSON object"),
        ("[GOOD, [7]]", "2[1]: [7] (list) is no JSON object"),
        ("[GOOD,\n\n GOOD", f"4: broken JSON (Expecting ',' delimiter); {BROKEN_JSON}"),
        ("[GOOD,", f"2: broken JSON (Expecting value); {BROKEN_JSON}"),
        ("[GOOD]\nGOOD", f"3: broken JSON (Extra data); {BROKEN_JSON}"),
        (
            "\ufeff[GOOD]",
            f"2: broken JSON (Unexpected UTF-8 BOM (decode using utf-8-sig)); {BROKEN_JSON}",
        ),
        (b"[GOOD, \xff]", "2: not UTF-8 (byte "),
    ],
)
def test_a_broken_array_is_named_by_line_or_item(tmp_path, kind, array, problem):
    good = json.dumps(readers()[kind][1])
    text = array.replace(
        *((b"GOOD", good.encode()) if isinstance(array, bytes) else ("GOOD", good))
    )
    path = write_jsonl(tmp_path / "array.json", "", text)
    assert error_of(kind, path).startswith(f"{path}:{problem}")


@every_file
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": ' + "7" * 5000 + "}", "4300 digits"),
        ("[" * 100_000, "recursion"),
        ("\ufeff{}", "BOM"),
    ],
    ids=["digits", "nested", "byte order mark"],
)
def test_a_line_that_python_cannot_read_is_an_error_of_that_line(tmp_path, kind, line, problem):
    path = write_jsonl(tmp_path / "broken.jsonl", line)
    message = error_of(kind, path)
    assert message.startswith(f"{path}:1: broken JSON (")
    assert problem in message
    assert len(message) < 300 + len(path)


@every_file
def test_a_file_that_cannot_be_read_is_named(tmp_path, kind):
    missing = str(tmp_path / "missing.jsonl")
    assert error_of(kind, missing) == f"{missing}: cannot be read: No such file or directory"
    assert error_of(kind, str(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"


# corpora


def test_a_corpus_is_its_blocks_by_id(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(
        b'{"id": "a", "text": "one", "tokens": 3, "title": "passed over"}\r\n'
        b"\n"
        b'{"id": 1, "text": "line\xe2\x80\xa8separator \\ud800", "tokens": null}\n'
        b'{"id": "1", "text": ""}\n'
        b'{"id": -5, "text": "no newline at the end"}'
    )
    corpus = read_corpus(str(path))
    assert corpus == {
        "a": ContextBlock(id="a", text="one", tokens=3),
        1: ContextBlock(id=1, text="line\u2028separator \ud800"),
        "1": ContextBlock(id="1", text=""),
        -5: ContextBlock(id=-5, text="no newline at the end"),
    }
    assert list(corpus) == ["a", 1, "1", -5]


def test_the_corpus_of_a_beir_data_set_is_read(tmp_path):
    path = write_jsonl(
        tmp_path / "corpus.jsonl",
        {"_id": "d1", "title": "Rivers", "text": "The Seine.", "metadata": {}},
        {"_id": "own", "id": 2, "text": "An id of its own goes first."},
    )
    assert [(one.id, one.text) for one in read_corpus(path).values()] == [
        ("d1", "The Seine."),
        (2, "An id of its own goes first."),
    ]
    assert read_titles(path) == {"d1": "Rivers"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"text": "t"}, "field 'id' is missing; it must be str or int"),
        ({"id": True, "text": "t"}, "field 'id' is True (bool); it must be str or int"),
        ({"id": 1}, "field 'text' is missing; it must be str"),
        ({"id": 1, "text": ["t"]}, "field 'text' is ['t'] (list); it must be str"),
        ({"id": 1, "text": "t", "tokens": True}, "field 'tokens' is True (bool); it must be int"),
        (
            {"id": 1, "text": "t", "tokens": 10**100},
            f"field 'tokens' is {'1' + '0' * 58}… (int); {NATURAL}",
        ),
        ({"id": 1, "text": "t", "tokens": -1}, f"field 'tokens' is -1 (int); {NATURAL}"),
        (
            {"id": 0, "text": "something"},
            "id 0 (int) has had another text before; give every text its own id",
        ),
    ],
)
def test_a_broken_corpus_line_names_the_value_and_the_remedy(tmp_path, line, problem):
    path = write_jsonl(tmp_path / "corpus.jsonl", {"id": 0, "text": "nothing"}, line)
    assert error_of("corpus", path) == f"{path}:2: {problem}"


def test_a_repeated_line_of_a_corpus_is_no_error(tmp_path):
    path = write_jsonl(tmp_path / "corpus.jsonl", *[{"id": 1, "text": "text of 1"}] * 2)
    assert read_corpus(path) == {1: block(1)}


# traces


def test_a_trace_is_its_retrievals_in_arrival_order(tmp_path):
    path = write_jsonl(
        tmp_path / "trace.jsonl",
        {"request_id": "r", "query": "Why?", "blocks": [2, "a", 2], "score": [0.5]},
        {
            "request_id": 7,
            "query": None,
            "blocks": [],
            "conversation_id": 0,
            "turn": 3,
            "tenant": "t",
            "system": "",
        },
        {"request_id": "7", "blocks": [1], "conversation_id": None, "turn": None, "system": None},
    )
    assert read_trace(path, CORPUS) == [
        TraceRequest("r", "Why?", (block(2), block("a"), block(2))),
        TraceRequest(7, "", (), conversation_id=0, turn=3, tenant="t", system=""),
        TraceRequest("7", "", (block(1),)),
    ]


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("request_id", False, "is False (bool); it must be str or int"),
        ("blocks", "a", "is 'a' (str); it must be list"),
        ("blocks", [1, True], "holds True (bool); ids are strings or integers"),
        ("query", 7, "is 7 (int); it must be str"),
        ("conversation_id", True, "is True (bool); it must be str or int"),
        ("turn", "1", "is '1' (str); it must be int"),
        ("tenant", 1, "is 1 (int); it must be str"),
        ("system", ["s"], "is ['s'] (list); it must be str"),
    ],
)
def test_a_broken_trace_line_names_the_value_and_the_remedy(tmp_path, field, value, problem):
    good = {"request_id": 0, "query": "", "blocks": [1]}
    path = write_jsonl(tmp_path / "trace.jsonl", good, {**good, "request_id": 1, field: value})
    assert error_of("trace", path) == f"{path}:2: field '{field}' {problem}"


def test_ids_of_a_trace_are_told_apart_and_in_the_corpus(tmp_path):
    good = {"request_id": 0, "query": "", "blocks": [1]}
    path = write_jsonl(tmp_path / "trace.jsonl", good, good)
    assert error_of("trace", path) == (
        f"{path}:2: request_id 0 (int) was there before; ids must be unique"
    )
    path = write_jsonl(tmp_path / "trace.jsonl", {**good, "blocks": [1, "1"]})
    assert error_of("trace", path) == (
        f"{path}:1: block '1' (str) is not in the corpus; "
        "add it there, or pass the corpus that the trace was made with"
    )


# plans


def test_a_plan_is_read_as_it_was_written(tmp_path):
    planner = ReusePlanner(labels=True)
    planner.plan(big_request((1, 2)))
    first = planner.plan(
        big_request((2, 1), "Why?", history=[], conversation_id="c", tenant="", system="S")
    )
    other = planner.plan(big_request((2, 1), "Why?", history=[], conversation_id="c"))
    later = planner.plan(
        big_request((1, 3), "And?", history=[user(other.content)], conversation_id="c")
    )
    one, two = (TraceRequest(0, "", (), turn=turn) for turn in range(2))
    planned = [PlannedRequest.of(plan, one, None) for plan in (first, other)]
    planned.append(PlannedRequest.of(later, two, other.request_id))
    path = str(tmp_path / "plan.jsonl")
    write_lines(path, (request.as_json() for request in planned))
    assert [request.as_json() for request in read_plan(path)] == [
        request.as_json() for request in planned
    ]
    left_out, shown = map(DEFAULT_TEMPLATES.label_of, later.request.blocks)
    assert planned[2].as_json() == {
        "request_id": "request-3",
        "blocks": [3],
        "references": [1],
        "order_annotation": None,
        "parts": [[shown, 3], [left_out, 1, f"See also {left_out} above."]],
        "is_labelled": True,
        "query": "And?",
        "system": None,
        "tenant": "",
        "conversation_id": "c",
        "turn": 1,
        "after": "request-2",
        "expected_cached_tokens": 0,
    }
    assert planned[1].as_json()["order_annotation"] == other.order_annotation
    assert read_plan(path)[2].place == f"{path}:3"


def test_a_plan_from_elsewhere_needs_ids_only_and_long_values_are_shortened(tmp_path):
    path = write_jsonl(
        tmp_path / "plan.jsonl", {"request_id": 1, "blocks": ["b", 7], "parts": None}
    )
    (request,) = read_plan(path)
    assert (request.request_id, request.blocks, request.references) == (1, ["b", 7], [])
    assert request.parts == (("", "b", None), ("", 7, None))
    assert not request.is_labelled
    assert (request.query, request.tenant, request.turn, request.after) == ("", "", 0, None)
    assert request.expected_cached_tokens is None

    path = write_jsonl(tmp_path / "trace.jsonl", {"request_id": 1, "blocks": ["x" * 1000]})
    assert error_of("trace", path) == (
        f"{path}:1: block '{'x' * 58}… (str) is not in the corpus; "
        "add it there, or pass the corpus that the trace was made with"
    )


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"request_id": 1.5}, "field 'request_id' is 1.5 (float); it must be str or int"),
        ({"blocks": 7}, "field 'blocks' is 7 (int); it must be list"),
        ({"blocks": [False]}, "field 'blocks' holds False (bool); ids are strings or integers"),
        ({"order_annotation": 7}, "field 'order_annotation' is 7 (int); it must be str"),
        (
            {"expected_cached_tokens": True},
            "field 'expected_cached_tokens' is True (bool); it must be int",
        ),
        ({"expected_cached_tokens": -1}, f"field 'expected_cached_tokens' is -1 (int); {NATURAL}"),
        (
            {"after": 9},
            "it continues request 9, which does not stand before it; "
            "keep the lines in execution order",
        ),
        *(
            ({"parts": [part]}, "field 'parts' must hold [label, id] or [label, id, words]")
            for part in (7, [], ["[Doc_1]"], [1, 1], ["l", True], ["l", 1, 2], ["l", 1, "w", 0])
        ),
    ],
)
def test_a_broken_plan_line_names_the_value_and_the_remedy(tmp_path, fields, problem):
    good = {"request_id": 0, "blocks": [1]}
    path = write_jsonl(tmp_path / "plan.jsonl", good, {**good, "request_id": 1, **fields})
    assert error_of("plan", path) == f"{path}:2: {problem}"


# writing


def test_lines_are_written_as_ascii_json_and_replace_what_was_there(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n" * 100)
    write_lines(str(path), [{"query": "ü \ud800"}, {"ids": [1, "1"]}])
    assert path.read_bytes() == b'{"query": "\\u00fc \\ud800"}\n{"ids": [1, "1"]}\n'
    write_lines(str(path), [])
    assert path.read_bytes() == b""


@pytest.mark.parametrize("read", [read_lines, read_corpus, read_plan])
def test_a_file_without_an_end_is_refused(read, monkeypatch):
    monkeypatch.setattr(files, "_LARGEST", 10_000)
    monkeypatch.setattr(files, "_LONGEST_LINE", 10_000)
    with pytest.raises(InputFileError, match=r"^/dev/zero(:1)?: has more than 10,000 bytes; "):
        list(read("/dev/zero"))


def test_a_line_as_long_as_may_be_is_read(tmp_path, monkeypatch):
    lines = [json.dumps({"id": number, "text": "x" * 980}) for number in range(3)]
    path = write_jsonl(tmp_path / "corpus.jsonl", *lines)
    monkeypatch.setattr(files, "_LONGEST_LINE", len(lines[0]) + 1)
    assert len(list(read_lines(path))) == 3
    monkeypatch.setattr(files, "_LONGEST_LINE", 900)
    with pytest.raises(InputFileError, match=r"corpus\.jsonl:1: has more than 900 bytes"):
        list(read_lines(path))
    array = write_jsonl(tmp_path / "array.json", "[\n1" + ",\n1" * 300 + "]")  # of short lines
    with pytest.raises(InputFileError, match=r"array\.json:1: has more than 900 bytes"):
        list(read_lines(array))
