import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.blocks import ContextBlock, ContextRequest, text_digest
from ctxreuse.errors import InvalidBlockError, InvalidRequestError

HUGE = 10**5000
odd_text = st.text(st.characters(categories=None))  # control characters and lone surrogates too
block_ids = st.integers() | odd_text | st.sampled_from([HUGE, -HUGE, True, np.int64(7)])


def user(content):
    return {"role": "user", "content": content}


def test_a_derived_id_is_the_same_in_every_process_and_when_it_is_given_by_hand():
    block = ContextBlock(text="A")
    assert block.id == "sha-f96658555f24a7608e17d9d14603e79c"
    assert block.key.hex() == "4b7dbcb258d862bb4db147e6978b68a6"
    assert ContextBlock(text="A", id=5).key.hex() == "072e3109d6ccafe842b7e77b5943a4d1"
    assert ContextBlock(text="A", id=block.id).key == block.key


@given(block_ids, odd_text)
def test_an_id_and_a_text_come_back_as_given(block_id, text):
    block = ContextBlock(id=block_id, text=text, tokens=3)
    assert (type(block.id), block.id, block.text, block.tokens) == (
        type(block_id),
        block_id,
        text,
        3,
    )
    assert (len(block.key), block.digest) == (16, text_digest(text))
    assert ContextBlock(text=text).id == f"sha-{text_digest(text).hex()}"


@given(st.integers() | odd_text, odd_text, st.integers() | odd_text, odd_text)
def test_two_blocks_are_the_same_when_id_and_text_are(id_1, text_1, id_2, text_2):
    same = (type(id_1), id_1, text_1) == (type(id_2), id_2, text_2)
    one, two = ContextBlock(id=id_1, text=text_1), ContextBlock(id=id_2, text=text_2)
    assert (one.key == two.key) == (one == two) == same


@pytest.mark.parametrize(
    ("one", "two"),
    [(1, "1"), (1, -1), ("", "\x00"), ("é", "e\u0301"), (16, "10"), (HUGE, HUGE + 1), ("a", "A")],
    ids=range(7),
)
def test_ids_that_look_alike_are_different_blocks(one, two):
    assert ContextBlock(id=one, text="x").key != ContextBlock(id=two, text="x").key


@pytest.mark.parametrize(("one", "two"), [(1, True), (7, np.int64(7)), (0, np.uint8(0))])
def test_equal_integers_of_any_type_are_the_same_block(one, two):
    assert ContextBlock(id=one, text="x").key == ContextBlock(id=two, text="x").key


def test_the_identity_is_of_id_and_text_apart_and_not_of_the_token_count():
    assert ContextBlock(id="ab", text="c").key != ContextBlock(id="a", text="bc").key
    assert ContextBlock(id=1, text="x", tokens=5).key == ContextBlock(id=1, text="x").key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": None}, "a block's text must be a string, not None (NoneType); pass Con"),
        (
            {"text": "x", "id": 1.5},
            "a block's id must be a string or an integer, not 1.5 (float); ",
        ),
        ({"text": "x", "id": "d1", "tokens": -1}, "block 'd1' (str) has -1 (int) as its token cou"),
        ({"text": "x", "id": HUGE, "tokens": 2.0}, "block a value of type int has 2.0 (float) as "),
    ],
    ids=range(4),
)
def test_what_cannot_be_a_block_is_named_with_the_remedy(fields, message):
    with pytest.raises(InvalidBlockError) as caught:
        ContextBlock(**fields)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("tokens", [0, 10**30, np.int64(3), None])
def test_a_token_count_is_any_integer_from_0_or_left_out(tokens):
    assert ContextBlock(text="x", tokens=tokens).tokens == tokens


@given(st.lists(st.tuples(st.sampled_from([1, "1", 2]), st.sampled_from(["x", "y"]))))
def test_unique_blocks_are_the_first_of_each_identity_in_the_retrievers_order(pairs):
    blocks = [ContextBlock(id=id_, text=text, tokens=n) for n, (id_, text) in enumerate(pairs)]
    request = ContextRequest(blocks)
    assert request.blocks == tuple(blocks)
    unique = [(block.id, block.text) for block in request.unique_blocks.values()]
    assert unique == list(dict.fromkeys(pairs))
    firsts = [block.tokens for block in request.unique_blocks.values()]
    assert firsts == [pairs.index(pair) for pair in unique]


def test_any_iterable_of_strings_and_blocks_becomes_blocks():
    request = ContextRequest(["A", ContextBlock(id=1, text="B"), ""])
    assert request.blocks == (
        ContextBlock(id="sha-f96658555f24a7608e17d9d14603e79c", text="A"),
        ContextBlock(id=1, text="B"),
        ContextBlock(text=""),
    )
    assert ContextRequest(text for text in "ab") == ContextRequest(("a", "b"))


def test_what_is_not_given_has_the_documented_default_which_is_not_the_same_as_empty():
    assert dataclasses.astuple(ContextRequest([])) == ((), "", None, None, None, "", None, (), None)
    assert ContextRequest([], history=[]).history == ()
    assert ContextRequest([], history=None).history is None


def test_what_the_caller_does_to_his_lists_later_changes_nothing():
    blocks = ["A"]
    history = [user("q"), user([{"type": "text", "text": "q"}])]
    request = ContextRequest(blocks, history=history)
    before = copy.deepcopy((blocks, history))
    assert (blocks, history) == before

    blocks.append("B")
    history[0]["content"] = "edited"
    history[1]["content"][0]["text"] = "edited"
    history.pop()
    assert request == ContextRequest(before[0], history=before[1])


def test_values_cannot_be_changed_but_copied_pickled_and_replaced_in_part():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ContextRequest([]).query = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        ContextBlock(text="x").text = "other"

    request = ContextRequest(
        [ContextBlock(id=HUGE, text="\ud800")], "Why?", history=[user("q")], conversation_id=1
    )
    for again in (pickle.loads(pickle.dumps(request)), copy.deepcopy(request)):
        assert again == request
        assert list(again.unique_blocks) == list(request.unique_blocks)
    assert dataclasses.replace(request, query="How?") == ContextRequest(
        request.blocks, "How?", history=[user("q")], conversation_id=1
    )


NO_MESSAGE = "a chat message in history must be a dict with 'role' and 'content', not"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": "text"}, "blocks must be a list of ContextBlock or str, not 'text' (str); a"),
        ({"blocks": {"d1": "the text"}}, "blocks must be a list of ContextBlock or str, not {'d1'"),
        ({"history": "q"}, "history must be a list of chat messages, not 'q' (str); pass [{'role'"),
        ({"history": ["q"]}, f"{NO_MESSAGE} 'q' (str)"),
        ({"query": None}, "query must be a string, not None (NoneType)"),
        ({"system": 1}, "system must be a string, not 1 (int)"),
        ({"tenant": None}, "tenant must be a string, not None (NoneType)"),
        ({"conversation_id": ["c"]}, "conversation_id must be a string or an integer, not ['c']"),
        ({"request_id": 1.5}, "request_id must be a string or an integer, not 1.5 (float)"),
    ],
    ids=range(9),
)
def test_what_cannot_be_a_request_is_named_with_the_remedy(fields, message):
    with pytest.raises(InvalidRequestError) as caught:
        ContextRequest(**{"blocks": []} | fields)
    assert str(caught.value).startswith(message)


def test_a_block_of_the_wrong_kind_is_a_block_error():
    with pytest.raises(InvalidBlockError) as caught:
        ContextRequest([{"id": 1, "text": "x"}])
    assert str(caught.value) == (
        "a block's text must be a string, not {'id': 1, 'text': 'x'} (dict); "
        "pass ContextBlock(id=..., text='...')"
    )


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "input_text", "text": "Be brief."}]])
def test_a_history_that_begins_with_the_system_text_is_taken_without_it(content):
    question = {"role": "user", "content": "Which?"}
    kept = {"role": "system", "content": content, "saved_at": 3}
    request = ContextRequest((), system="Be brief.", history=[kept, question])
    assert list(request.history or ()) == [question]
    request = ContextRequest((), system="Be long.", history=[kept, question])
    assert list(request.history or ()) == [kept, question]
