"""Which pieces of a tool's result certainly are one document, or one memory, each."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_agent_helpers import agent_with, ask, calls, done, results, search_tool, sent
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool
from langchain_document_helpers import documents, text_of

from ctxreuse import ReusePlanner
from ctxreuse.memory.sent_log import EditEntry
from ctxreuse.planning.prompt_records import made_of
from ctxreuse.sharing import SQLiteLog
from langchain_ctxreuse import ReuseMiddleware, format_context
from langchain_ctxreuse.agents.planned_messages import result_pieces


def pieces(
    artifact: Any, text: str, *, separator: str = "\n\n", splits: bool = False
) -> list[tuple[object, str]] | None:
    found = result_pieces(artifact, text, separator, splits)
    if found is None:
        return None
    for one in found:
        assert one.block.text == made_of(text, one.shown)
    return [(one.block.id, one.block.text) for one in found]


def test_joined_documents_are_pieces_also_with_the_separator_inside_or_as_dicts():
    given, text = documents("ab"), f"{text_of('a')}\n\n{text_of('b')}"
    expected = [("id-a", text_of("a")), ("id-b", text_of("b"))]
    assert pieces(given, text) == expected
    assert pieces([one.model_dump() for one in given], text) == expected
    assert pieces([given[0], {"type": "other"}], text_of("a")) is None
    inside = [Document("one\n\nmore", id="1"), Document("two\n\nmore", id="2")]
    assert pieces(inside, "one\n\nmore\n\ntwo\n\nmore") == [
        ("1", "one\n\nmore"),
        ("2", "two\n\nmore"),
    ]


def test_what_a_tool_writes_on_documents_belongs_to_them_and_what_stands_outside_does_not():
    text = "Source: a.txt\nContent: one two\n\nSource: b.txt\nContent: three (b)"
    given = [Document("one two", id="1"), Document("three", id="2")]
    assert pieces(given, text) == [
        ("1", "Source: a.txt\nContent: one two"),
        ("2", "Source: b.txt\nContent: three (b)"),
    ]
    given = [Document("one", id="1"), Document("two", id="2")]
    text = "I found these.\n\n- one\n\n- two\n\nThat is all."
    assert pieces(given, text) == [("1", "- one"), ("2", "- two")]


@pytest.mark.parametrize(
    "text", ["Found 2 documents.", "one", "two\n\none", "one, two", "one\n\nfrom a\n\ntwo", ""]
)
def test_where_it_is_not_certain_which_piece_is_which_document_nothing_is_found(text):
    assert pieces([Document("one"), Document("two")], text) is None


def memory(number: int, text: str, **more: object) -> dict[str, object]:
    return {"id": f"m{number}", "memory": text, "score": number / 10, "user_id": "u", **more}


def test_a_memory_search_makes_a_piece_of_each_memory_or_line():
    result = {"results": [memory(1, "likes tea"), memory(2, "has a cät")]}
    assert pieces(None, json.dumps(result)) == [
        ("m1", '{"id": "m1", "memory": "likes tea", "user_id": "u"}'),
        ("m2", '{"id": "m2", "memory": "has a c\\u00e4t", "user_id": "u"}'),
    ]
    twice = '{"id":1,"memory":"b","memory" :\t"a","score":[{"x":"}"}]}'
    spaced = '\n{"results":[ ' + twice + ' ,\n{"memory":"c","id":2}]}'
    assert pieces(None, spaced) == [(1, '{"id":1, "memory" :\t"a"}'), (2, '{"memory":"c", "id":2}')]
    assert pieces(result, "Memories:\n- likes tea\n- has a cät") == [
        ("m1", "- likes tea"),
        ("m2", "- has a cät"),
    ]


@pytest.mark.parametrize(
    "result",
    [
        {"results": [memory(1, "likes tea")], "relations": ["tea"]},
        {"results": [memory(1, "likes tea"), {"text": "no memory"}]},
        {"results": [{"memory": "without an id"}]},
        {"results": []},
        {"results": "none"},
        {"answer": 42},
        ["likes tea"],
    ],
)
def test_json_that_is_more_or_less_than_a_memory_search_is_left_alone(result):
    assert pieces(None, json.dumps(result)) is None
    assert pieces(result, "likes tea") is None


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
def test_a_result_that_nests_too_deeply_or_is_no_json_is_a_text_as_any_other(depth):
    assert pieces(None, '{"results": ' + "[" * depth + "]" * depth + "}") is None
    assert pieces(None, "{not json" * depth) is None


def test_only_a_named_tools_text_is_split_where_its_documents_do_not_stand_in_it():
    assert pieces(None, "one\n\ntwo") is None
    assert pieces([Document("one")], "x\n\ny") is None
    for artifact in (None, [Document("one")]):
        found = pieces(artifact, "x\n\n\n\ny\n\n", splits=True) or []
        assert [text for _, text in found] == ["x", "y"]
    assert pieces(None, "  \n\n ", splits=True) is None


@pytest.mark.parametrize("is_json", [True, False], ids=["memories", "labelled documents"])
def test_what_planners_keep_and_tell_each_other_of_a_tools_result_is_no_text(tmp_path, is_json):
    def find(query: str) -> str:
        found = [memory(ord(one), text_of(one)) for one in query]
        if is_json:
            return json.dumps({"results": found}, indent=1)
        return format_context(documents(query), labels=True)

    tool = StructuredTool.from_function(find, name="search", description="Finds what it knows.")
    log = tmp_path / "log.sqlite"
    sharing, alone = ReusePlanner(shared_log=SQLiteLog(log)), ReusePlanner()
    for planner in (sharing, alone):
        script = [calls("ab"), calls("bc"), done()]
        agent, _ = agent_with(ReuseMiddleware(planner=planner), script, tool)
        first, second = results(sent(ask(agent, "Which?")))
        assert [text_of(letter) in first for letter in "abc"] == [True, True, False]
        assert [text_of(letter) in second for letter in "abc"] == [False, False, True]
    alone.save(tmp_path / "saved")
    sharing.catch_up()
    other = ReusePlanner(shared_log=SQLiteLog(log))
    other.catch_up()
    for one in (other, ReusePlanner.load(tmp_path / "saved")):
        entries = [told for told in one._planning._tenants.replay() if isinstance(told, EditEntry)]
        assert len(entries) == 2
        for told in entries:
            said = one._planning._names.sealed(told.request_id, told.edit).decode()
            assert re.search(r"[A-Z]{4}", said), said
            assert not any(text_of(letter)[:9] in said for letter in "abc"), said


@given(
    texts=st.lists(st.text("ab\n ", max_size=6), min_size=1, max_size=4),
    around=st.tuples(st.text("a-\n", max_size=4), st.text("a-\n", max_size=4)),
    separator=st.sampled_from(["\n\n", "--", "\n"]),
)
def test_each_piece_holds_its_document_and_they_stand_behind_each_other(texts, around, separator):
    text = around[0] + separator.join(texts) + around[1]
    found = pieces([Document(one) for one in texts], text, separator=separator)
    if found is not None:
        shown = [piece for _, piece in found]
        assert separator.join(shown) in text
        assert all(one in piece for one, piece in zip(texts, shown, strict=True))


def test_documents_that_share_an_id_are_pointed_to_each_by_its_own_label():
    """As chunks do that a store gives their document's id."""
    pages = [Document(text_of(letter), id="page") for letter in "abc"]
    tool = search_tool(RunnableLambda(lambda query: pages[: len(query)]))
    agent, _ = agent_with(ReuseMiddleware(), [calls("xy"), calls("xyz"), done()], tool)
    first, second = results(sent(ask(agent, "Which?")))
    assert [text_of(letter) in first for letter in "abc"] == [True, True, False]
    assert [text_of(letter) in second for letter in "abc"] == [False, False, True]
    assert all(one in second for one in re.findall(r"\[[A-Z]{4}\]", first))
