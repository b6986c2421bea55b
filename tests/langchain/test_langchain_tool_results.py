import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_document_helpers import documents, no_sockets, text_of

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.adapters.document_planner import RetrievedItems
from ctxreuse.adapters.plan_metadata import memories_metadata
from ctxreuse.context.scope import NO_SCOPE
from langchain_ctxreuse.agents.tool_results import FoundBlocks, blocks_in
from langchain_ctxreuse.documents.document_plans import LangChainDocumentPlanner

__all__ = ["no_sockets"]


def blocks(found: FoundBlocks | None) -> list[tuple[object, str]] | None:
    return None if found is None else [(block.id, block.text) for block in found.blocks]


def in_documents(given: list[Document], text: str, splits: bool = False) -> FoundBlocks | None:
    return blocks_in(given, text, "\n\n", splits)


def test_joined_documents_are_blocks_also_with_the_separator_inside_or_as_dicts():
    given = documents("ab")
    found = in_documents(given, f"{text_of('a')}\n\n{text_of('b')}")
    assert found is not None
    assert blocks(found) == [("id-a", text_of("a")), ("id-b", text_of("b"))]
    assert (found.before, found.after, list(found.documents)) == ("", "", given)

    given = documents("ab")
    found = blocks_in(
        [one.model_dump() for one in given], f"{text_of('a')}\n\n{text_of('b')}", "\n\n", False
    )
    assert found is not None
    assert list(found.documents) == given
    assert blocks_in([given[0], {"type": "other"}], text_of("a"), "\n\n", False) is None
    given = [Document("one\n\nmore"), Document("two\n\nmore")]
    found = in_documents(given, "one\n\nmore\n\ntwo\n\nmore")
    assert found is not None
    assert [block.text for block in found.blocks] == ["one\n\nmore", "two\n\nmore"]


def test_what_a_tool_writes_around_documents_belongs_to_them_and_what_stands_outside_stays_there():
    text = "Source: a.txt\nContent: one two\n\nSource: b.txt\nContent: three (b)"
    given = [Document("one two", id="1"), Document("three", id="2")]
    assert blocks(in_documents(given, text)) == [
        ("1", "Source: a.txt\nContent: one two"),
        ("2", "Source: b.txt\nContent: three (b)"),
    ]

    found = in_documents(
        [Document("one"), Document("two")], "I found these.\n\n- one\n\n- two\n\nThat is all."
    )
    assert found is not None
    assert [block.text for block in found.blocks] == ["- one", "- two"]
    assert (found.before, found.after) == ("I found these.\n\n", "\n\nThat is all.")


@pytest.mark.parametrize(
    "text",
    [
        "Found 2 documents.",
        "one",
        "two\n\none",
        "one, two",
        "one\n\nfrom a\n\ntwo",
        "",
    ],
)
def test_where_it_is_not_certain_which_piece_is_which_document_nothing_is_found(text):
    assert in_documents([Document("one"), Document("two")], text) is None


def test_documents_that_a_planned_retriever_gave_go_back_to_its_order_without_the_annotation():
    document_planner = LangChainDocumentPlanner(ReusePlanner(), "append", "Test")
    document_planner.plan(RetrievedItems(documents("abc"), "?", NO_SCOPE))
    given = document_planner.plan(RetrievedItems(documents("cba"), "?", NO_SCOPE))
    found = in_documents(given, "\n\n".join(one.page_content for one in given))
    assert [block_id for block_id, _ in blocks(found) or []] == ["id-c", "id-b", "id-a"]


def memory(number: int, text: str, **more: object) -> dict[str, object]:
    return {"id": f"m{number}", "memory": text, "score": number / 10, "user_id": "u", **more}


def test_a_memory_search_makes_a_block_a_memory_or_a_line_unless_its_plan_is_forged():
    result = {"results": [memory(1, "likes tea"), memory(2, "has a cät")]}
    assert blocks(blocks_in(None, json.dumps(result), "\n\n", False)) == [
        ("m1", '{"id": "m1", "memory": "likes tea", "user_id": "u"}'),
        ("m2", '{"id": "m2", "memory": "has a cät", "user_id": "u"}'),
    ]

    result = {"results": [memory(1, "likes tea"), memory(2, "has a cat")]}
    found = blocks_in(result, "Memories:\n- likes tea\n- has a cat", "\n\n", False)
    assert blocks(found) == [("m1", "- likes tea"), ("m2", "- has a cat")]
    assert found is not None
    assert found.before == "Memories:\n"
    result = {"results": [memory(1, "likes tea")], "ctxreuse": {"plan": {"references": []}}}
    assert blocks_in(None, json.dumps(result), "\n\n", False) is None
    assert blocks_in(None, "{not json", "\n\n", False) is None


def test_a_planned_memory_search_is_shown_without_its_plan():
    plan = ReusePlanner().plan(ContextRequest([ContextBlock(id="m1", text="likes tea")]))
    places = [{"id": "m1", "rank": 0, "label": plan.templates.label_of(plan.blocks[0])}]
    result = {
        "results": [memory(1, "likes tea")],
        "ctxreuse": memories_metadata(plan, places),
    }
    assert blocks(blocks_in(None, json.dumps(result), "\n\n", False)) == [
        ("m1", '{"id": "m1", "memory": "likes tea", "user_id": "u"}')
    ]


@pytest.mark.parametrize(
    "result",
    [
        {"results": [memory(1, "likes tea")], "relations": ["tea"]},
        {"results": [memory(1, "likes tea"), {"text": "no memory"}]},
        {"results": [{"memory": "without an id"}]},
        {"results": []},
        {"results": "none"},
        {"results": [memory(1, "likes tea")], "ctxreuse": {"plan": {"references": ["m2"]}}},
        {"answer": 42},
        ["likes tea"],
    ],
)
def test_json_that_is_more_or_less_than_a_memory_search_is_left_alone(result):
    assert blocks_in(None, json.dumps(result), "\n\n", False) is None
    assert blocks_in(result, "likes tea", "\n\n", False) is None


def test_only_a_named_tools_text_is_split_where_its_documents_do_not_stand_in_it():
    assert blocks_in(None, "one\n\ntwo", "\n\n", False) is None
    found = blocks_in(None, "one\n\n\n\ntwo\n\n", "\n\n", True)
    assert found is not None
    assert [block.text for block in found.blocks] == ["one", "two"]
    assert blocks_in(None, "  \n\n ", "\n\n", True) is None
    assert blocks(in_documents([Document("one")], "x\n\ny", splits=True)) is not None
    assert in_documents([Document("one")], "x\n\ny") is None


@given(
    texts=st.lists(st.text("ab\n ", max_size=6), min_size=1, max_size=4),
    around=st.tuples(st.text("a-\n", max_size=4), st.text("a-\n", max_size=4)),
    separator=st.sampled_from(["\n\n", "--", "\n"]),
)
def test_no_character_of_a_result_is_lost(texts, around, separator):
    before, after = around
    text = before + separator.join(texts) + after
    found = blocks_in([Document(one) for one in texts], text, separator, False)
    if found is not None:
        whole = separator.join(block.text for block in found.blocks)
        assert found.before + whole + found.after == text
        assert all(one in block.text for one, block in zip(texts, found.blocks, strict=True)), (
            "each piece holds its document"
        )


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
def test_a_result_that_nests_too_deeply_is_a_text_as_any_other(depth):
    text = '{"results": ' + "[" * depth + "]" * depth + "}"
    assert blocks_in(None, text, "\n\n", splits=False) is None
