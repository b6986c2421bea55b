import pytest

from ctxreuse import ContextBlock, ContextRequest
from ctxreuse.distributed.ray_data import ColumnReader
from ctxreuse.errors import InvalidBlockError, InvalidRequestError

ROW = {
    "documents": [{"id": "d1", "text": "one", "tokens": 7}, {"id": None, "text": "two"}],
    "query": "Which?",
    "system": None,
    "history": [
        {"role": "user", "content": "Hi", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
    ],
    "conversation_id": 4,
    "tenant": "t",
    "request_id": "r1",
    "price": 3,
}


def test_columns_become_the_fields_of_a_request():
    assert ColumnReader({"blocks": "documents"})(ROW) == ContextRequest(
        [ContextBlock(id="d1", text="one", tokens=7), "two"],
        "Which?",
        history=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
        ],
        conversation_id=4,
        tenant="t",
        request_id="r1",
    )


def test_blocks_alone_are_enough_and_nulls_are_nothing():
    read = ColumnReader({})
    assert read({"blocks": ["one", "two"]}) == ContextRequest(["one", "two"])
    assert read({"blocks": ["one"], "query": None, "tenant": None}) == ContextRequest(["one"])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("blocks", "columns must be a dict of field: column, or None, not 'blocks'"),
        ({"docs": "blocks"}, "columns names the field 'docs' .*; a request has 'blocks', 'query'"),
        ({"query": 1}, "the column of 'query' must be a string, not 1"),
    ],
)
def test_wrong_names_of_columns_are_refused(columns, message):
    with pytest.raises(InvalidRequestError, match=message):
        ColumnReader(columns)


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        ({}, {"query": "?"}, "no column 'blocks' with the blocks of a request; say which it is"),
        ({"query": "question"}, {"blocks": []}, "no column 'question' with the query of a request"),
        ({}, {"blocks": "one text"}, "must be a list of texts or of structs with id, text, tokens"),
        ({}, {"blocks": [{"id": "d1"}]}, "a block must have a text; the struct has only 'id'"),
    ],
)
def test_a_row_that_lacks_something_is_refused(columns, row, message):
    with pytest.raises(InvalidRequestError, match=message):
        ColumnReader(columns)(row)


def test_a_block_of_the_wrong_type_is_refused():
    with pytest.raises(InvalidBlockError, match="a block's text must be a string"):
        ColumnReader({})({"blocks": [{"id": "d1", "text": None}]})
