"""One partition, without Ray."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import block

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.distributed import planned_table as module
from ctxreuse.distributed.partitions import contexts_of, request_digest
from ctxreuse.distributed.planned_table import PLANNED, planned_table
from ctxreuse.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("paper_words")


def asked(ids, query="", **fields):
    return ContextRequest([ContextBlock(id=one, text=one * 200) for one in ids], query, **fields)


def turn(conversation, number, ids="xy"):
    history = [{"role": "user", "content": f"turn {one}"} for one in range(number)]
    return asked(ids, f"turn {number}", history=history, conversation_id=conversation)


def planned(requests, planner=None, batch_size=4, partition=3):
    rows = pa.table({"row": pa.array(range(len(requests)), pa.int64())})
    table = planned_table(rows, requests, planner or ReusePlanner(), partition, batch_size)
    assert sorted(table["row"].to_pylist()) == list(range(len(requests)))
    return table.to_pylist()


contexts = st.lists(st.lists(st.sampled_from("abcde"), max_size=4), max_size=12)


def test_rows_come_in_execution_order_with_their_plans():
    rows = planned([asked("ab", "one"), asked("c", "two"), asked("xab", "three")])
    assert [row["row"] for row in rows] == [0, 2, 1]
    assert rows[1] == {
        "row": 2,
        "messages": [
            {
                "role": "user",
                "content": f"[Doc_a] {'a' * 200}\n\n[Doc_b] {'b' * 200}\n\n[Doc_x] {'x' * 200}\n\n"
                "Please read the context in the following priority order: [Doc_x] > [Doc_a] > "
                "[Doc_b] and answer the question.\n\nthree",
            }
        ],
        "plan_order": [1, 2, 0],
        "plan_labels": ["[Doc_x]", "[Doc_a]", "[Doc_b]"],
        "plan_expected_cached_tokens": 100,
        "plan_strategy": "reuse",
        "plan_group": "3-0",
        "plan_position": 1,
    }
    assert rows[2]["plan_group"] == "3-1"


def test_the_columns_are_there_without_rows():
    table = planned_table(pa.table({"row": pa.array([], pa.int64())}), [], ReusePlanner(), 0, 4)
    assert table.schema == pa.schema({"row": pa.int64(), **PLANNED})


def test_a_repeated_block_is_sent_once_and_labelled_wherever_it_stands():
    (row,) = planned([asked("aba")])
    assert (row["plan_order"], row["plan_labels"]) == ([0, 1], ["[Doc_a]", "[Doc_b]", "[Doc_a]"])


def test_turns_of_a_conversation_stand_in_order_behind_its_first():
    requests = [turn("c", 2), asked("xyz"), turn("c", 1), turn("d", 0), turn("c", 0), turn("d", 1)]
    for batch_size in (1, 2, 3, 8):
        rows = [row["row"] for row in planned(requests, batch_size=batch_size)]
        assert [row for row in rows if row in (0, 2, 4)] == [4, 2, 0]
        assert [row for row in rows if row in (3, 5)] == [3, 5]


def test_messages_that_are_not_plain_keep_what_they_have():
    calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1"}]}
    asked_before = [{"role": "user", "content": "hi"}, calls]
    (row,) = planned([asked("a", history=asked_before)])
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user"]
    assert row["messages"][1]["tool_calls"] == [{"id": "c1"}]


def test_messages_and_texts_that_arrow_cannot_hold_are_refused():
    mixed = [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text"}]}]
    with pytest.raises(InvalidRequestError, match="Arrow cannot hold the messages"):
        planned([asked("a", history=mixed)])
    with pytest.raises(InvalidRequestError, match="texts that are valid Unicode"):
        planned([ContextRequest(["half of a pair: \ud800"])])


def test_where_planning_fails_rows_go_out_as_retrieved_and_say_so(monkeypatch, caplog):
    whole = ReusePlanner.plan_batch

    def failing(planner, requests, strategy="reuse"):
        if strategy == "reuse":
            raise RuntimeError("a text of a document")
        return whole(planner, requests, strategy)

    monkeypatch.setattr(module, "_fail_open", module.FailOpen("plan_dataset", "as retrieved"))
    monkeypatch.setattr(ReusePlanner, "plan_batch", failing)
    rows = planned([asked("ab"), asked("ba")])
    assert [row["plan_strategy"] for row in rows] == ["none", "none"]
    assert {row["messages"][0]["content"][8] for row in rows} == {"a", "b"}
    assert "RuntimeError" in caplog.text
    assert "a text of a document" not in caplog.text


def test_faults_of_the_user_are_the_users():
    planner = ReusePlanner(token_counter=lambda text: -1)
    with pytest.raises(InvalidRequestError, match="token_counter returned -1"):
        planned([asked("ab")], planner)


def test_what_the_planner_has_seen_changes_nothing_and_it_sees_nothing(planner):
    requests = [asked("abc", "one"), asked("bcd", "two")]
    planner.plan(asked("cb"))
    before = planner.statistics()
    assert planned(requests, planner) == planned(requests)
    assert planner.statistics() == before


@given(contexts, st.integers(1, 5), st.randoms(use_true_random=False))
def test_plans_and_order_do_not_depend_on_the_order_of_the_rows(drawn, batch_size, random):
    requests = [asked(ids, f"query {number}") for number, ids in enumerate(drawn)]
    order = random.sample(range(len(requests)), len(requests))
    shuffled = planned([requests[number] for number in order], batch_size=batch_size)
    for row in shuffled:
        row["row"] = order[row["row"]]
    assert shuffled == planned(requests, batch_size=batch_size)


@given(contexts, st.integers(1, 5))
def test_every_block_is_sent_once_under_its_label(drawn, batch_size):
    requests = [asked(ids) for ids in drawn]
    for row in planned(requests, batch_size=batch_size):
        request = requests[row["row"]]
        sent = [request.blocks[position] for position in row["plan_order"]]
        assert sorted(one.key for one in sent) == sorted(request.unique_blocks)
        content = row["messages"][0]["content"]
        for one, label in zip(request.blocks, row["plan_labels"], strict=True):
            assert f"{label} {one.text}" in content


@given(contexts, st.integers(1, 5))
def test_a_prefix_group_begins_with_one_block_and_fits_into_a_batch(drawn, batch_size):
    requests = [asked(ids) for ids in drawn]
    groups = {}
    for row in planned(requests, batch_size=batch_size):
        groups.setdefault(row["plan_group"], []).append(row["messages"][0]["content"][:9])
    for members in groups.values():
        assert len(members) <= batch_size
        assert len(set(members)) == 1


def test_digests_stand_for_all_that_is_planned_and_for_nothing_else():
    base = {"query": "q", "system": "s", "tenant": "t", "request_id": "1"}
    requests = [
        asked("ab", **base),
        asked("ba", **base),
        asked("abc", **base),
        *(asked("ab", **{**base, name: None}) for name in ("system", "request_id")),
        asked("ab", **{**base, "request_id": 1}),
        *(asked("ab", **{**base, name: "other"}) for name in base),
        asked("ab", **base, history=[]),
        asked("ab", **base, history=[{"role": "user", "content": "hi"}]),
    ]
    digests = [request_digest(one) for one in requests]
    assert len({*digests}) == len(digests) - 1  # an empty history is none
    assert request_digest(asked("ab", **base)) == digests[0]


def test_equal_requests_have_digests_of_their_own():
    found = contexts_of([asked("ab")] * 3 + [asked("c")], len)
    assert len({*found.digests.tolist()}) == 4
    assert found.digests[0] == request_digest(asked("ab"))


def test_contexts_hold_each_block_once_with_its_tokens():
    requests = [
        ContextRequest([block("a", 5), block("b"), block("a", 5)]),
        ContextRequest([], tenant="t", history=[{"role": "user", "content": "hi"}]),
        ContextRequest([block("b"), block("z", 0)], history=[], conversation_id="c"),
    ]
    found = contexts_of(requests, len)
    assert found.lengths.tolist() == [2, 0, 2]
    assert found.weights.tolist() == [5, len("text of b"), len("text of b"), 1]
    assert found.blocks[1] == found.blocks[2] != found.blocks[0]
    assert found.are_later.tolist() == [False, True, False]
    assert [bool(one) for one in found.conversations] == [False, False, True]
    assert found.scopes[0] == found.scopes[2] != found.scopes[1]
