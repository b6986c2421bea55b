import copy
import dataclasses
import json
import logging
from typing import get_args

import numpy as np
import pytest
from adapter_conformance import FaultyPlanner
from hypothesis import example, given
from hypothesis import strategies as st
from planning_helpers import (
    assistant,
    block,
    location_words,
    odd_blocks,
    order_words,
    plain_blocks,
    user,
)

from ctxreuse import PAPER_TEMPLATES, ContextBlock, ContextRequest, ReusePlanner, Templates
from ctxreuse.adapters.document_planner import (
    AnnotationMode,
    DocumentPlanner,
    PlannedItem,
    PlannedItems,
    RetrievedItems,
    appended_annotation,
    as_retrieved,
    checked_annotation,
)
from ctxreuse.adapters.plan_metadata import METADATA_KEY, plan_metadata
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("paper_words")

MODES = get_args(AnnotationMode)
SECRET = "a secret text"


@dataclasses.dataclass
class Item:
    """A document as frameworks have them: changeable, not hashable, equal by its fields."""

    id: str
    text: str
    metadata: dict = dataclasses.field(default_factory=dict)


class RecordingPlanner(ReusePlanner):
    """A planner that keeps what it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def plan(self, request, *args, **options):
        self.asked.append(("plan", [request], options))
        return super().plan(request, *args, **options)

    def plan_batch(self, requests, *args, **options):
        requests = list(requests)
        self.asked.append(("plan_batch", requests, options))
        return super().plan_batch(requests, *args, **options)


def block_of(item):
    return ContextBlock(id=item.id, text=item.text, tokens=100)


def item(name, **metadata):
    return Item(name, f"text of {name}", metadata)


def items_of(names):
    return [item(name) for name in names]


def document_planner(planner=None, annotation="append", component="ReuseRetriever"):
    planner = ReusePlanner() if planner is None else planner
    return DocumentPlanner(planner, block_of, annotation, component)


def in_scope(retrieved, scope):
    return [RetrievedItems(items, query, scope) for items, query in retrieved]


def names(items):
    return "".join(one.item.id for one in items)


def row(items):
    return [(one.item.id, one.rank, one.label) for one in items]


def first_turn(documents, retrieved, tenant="", conversation_id="c"):
    """Send a first turn; return the scope of the second one."""
    scope = RequestScope(tenant, conversation_id, ())
    content = documents.plan(items_of(retrieved), "First?", scope).plan.content
    return scope.inside(history=[user(content), assistant("Yes.")])


retrievals = st.lists(
    st.builds(
        lambda name, version, source: Item(name, f"{name} v{version}", {"source": source}),
        st.sampled_from("abcd"),
        st.integers(1, 2),
        st.sampled_from(("x", "x", "y")),
    ),
    max_size=8,
)
conversations = st.lists(st.tuples(retrievals, st.booleans()), max_size=4)


def assert_holds_each_item_once(planned, items):
    """Check a result against what was retrieved, item by item."""
    wanted = [
        rank for rank, one in enumerate(items) if not any(one == other for other in items[:rank])
    ]
    everything = [*planned.items, *planned.left_out]
    assert sorted(one.rank for one in everything) == wanted
    assert all(one.item is items[one.rank] for one in everything)


def place_words(*places):
    return PAPER_TEMPLATES.order_annotation(list(map(str, places)))


def assert_names_what_it_shows(planned):
    """Check that the annotation ranks the places of all items, equal blocks too."""
    plan = planned.plan
    said = list(plan.location_annotations)
    if plan.order_annotation is not None:
        places = enumerate(planned.items, start=1)
        said.append(
            place_words(*(place for place, _ in sorted(places, key=lambda one: one[1].rank)))
        )
    assert planned.annotation == (" ".join(said) or None)


def assert_follows_its_plan(planned, items):
    """Check that both halves are in the plan's order, equal blocks side by side, best first."""
    plan = planned.plan
    key_of = [block_of(one).key for one in items]
    place_of = {sent.key: place for place, sent in enumerate(plan.blocks)}
    places = [(place_of[key_of[one.rank]], one.rank) for one in planned.items]
    assert places == sorted(places)
    assert {place for place, _ in places} == set(range(len(plan.blocks)))
    firsts = [key_of.index(key_of[one.rank]) for one in planned.left_out]
    assert firsts == sorted(firsts)
    assert not {key_of[one.rank] for one in planned.left_out} & set(place_of)
    assert list(dict.fromkeys(one.item.id for one in planned.left_out)) == list(
        dict.fromkeys(plan.references)
    )
    for one in [*planned.items, *planned.left_out]:
        assert plan.labels[one.label] == one.item.id


def test_items_come_back_in_the_planned_order_with_rank_and_label():
    documents = document_planner()
    first = items_of("abc")
    planned = documents.plan(first, "First?", NO_SCOPE)
    assert planned.items == (
        PlannedItem(first[0], 0, "[Doc_a]"),
        PlannedItem(first[1], 1, "[Doc_b]"),
        PlannedItem(first[2], 2, "[Doc_c]"),
    )
    assert (planned.left_out, planned.annotation) == ((), None)

    second = documents.plan(items_of("dcba"), "Then?", NO_SCOPE)
    assert row(second.items) == [
        ("a", 3, "[Doc_a]"),
        ("b", 2, "[Doc_b]"),
        ("c", 1, "[Doc_c]"),
        ("d", 0, "[Doc_d]"),
    ]
    assert second.left_out == ()
    assert second.plan.request == ContextRequest(
        [block_of(one) for one in items_of("dcba")], "Then?", labels=True
    )
    assert second.annotation == place_words(4, 3, 2, 1)
    assert documents.faults == 0


def test_nothing_retrieved_or_remembered_leaves_noitem_out():
    planned = document_planner().plan([], "Why?", NO_SCOPE)
    assert (planned.items, planned.left_out, planned.annotation) == ((), (), None)
    assert planned.plan.content == "Why?"
    documents = document_planner()
    first_turn(documents, "ab")
    again = documents.plan(items_of("ba"), "?", RequestScope("", "c"))
    assert (names(again.items), again.left_out) == ("ab", ())


def test_items_are_others_by_metadata_or_text_and_equal_ones_come_once():
    items = [item("a", page=1), item("b"), item("a", page=2), item("b"), item("a", page=1)]
    planned = document_planner().plan(items, "Why?", NO_SCOPE)
    assert [(one.item, one.rank, one.label) for one in planned.items] == [
        (item("a", page=1), 0, "[Doc_a]"),
        (item("a", page=2), 2, "[Doc_a]"),
        (item("b"), 1, "[Doc_b]"),
    ]
    assert planned.plan.content == "[Doc_a] text of a\n\n[Doc_b] text of b\n\nWhy?"

    items = [Item("a", "old"), Item("a", "new"), Item("a", "old")]
    planned = document_planner().plan(items, "Why?", NO_SCOPE)
    assert [(one.item.text, one.rank, one.label) for one in planned.items] == [
        ("old", 0, "[Doc_a]"),
        ("new", 1, "[Doc_a]"),
    ]


def test_a_later_turn_leaves_out_what_the_conversation_shows_and_says_where_it_stands():
    documents = document_planner()
    scope = first_turn(documents, "ab")
    planned = documents.plan(
        [item("b", page=1), item("c"), item("a"), item("b", page=2)], "Then?", scope
    )
    assert row(planned.items) == [("c", 1, "[Doc_c]")]
    assert [(one.item, one.rank, one.label) for one in planned.left_out] == [
        (item("b", page=1), 0, "[Doc_b]"),
        (item("b", page=2), 3, "[Doc_b]"),
        (item("a"), 2, "[Doc_a]"),
    ]
    assert planned.annotation == f"{location_words('b')} {location_words('a')}"


@given(conversations, st.sampled_from(MODES))
def test_each_item_comes_back_once_and_in_plans_order(turns, mode):
    documents = document_planner(annotation=mode)
    history = []
    for number, (items, goes_on) in enumerate(turns):
        before = copy.deepcopy(items)
        scope = RequestScope("t", "c", tuple(history))
        planned = documents.plan(items, f"{number}?", scope)
        assert documents.faults == 0
        assert items == before
        assert_holds_each_item_once(planned, items)
        assert_follows_its_plan(planned, items)
        if mode == "append":
            assert_names_what_it_shows(planned)
        history = [*history, user(planned.plan.content), assistant("Yes.")] if goes_on else []


@given(st.lists(retrievals, max_size=5), st.sampled_from(MODES))
def test_a_batch_is_answered_in_the_order_given_and_loses_nothing(contexts, mode):
    documents = document_planner(annotation=mode)
    before = copy.deepcopy(contexts)
    retrieved = [(items, f"{number}?") for number, items in enumerate(contexts)]
    batch = documents.plan_batch(in_scope(retrieved, NO_SCOPE))
    assert (len(batch), documents.faults) == (len(contexts), 0)
    assert contexts == before
    for number, (planned, items) in enumerate(zip(batch, contexts, strict=True)):
        assert planned.plan.request.query == f"{number}?"
        assert_holds_each_item_once(planned, items)
        assert_follows_its_plan(planned, items)


def test_each_of_equal_blocks_side_by_side_has_a_place_in_the_ranking():
    documents = document_planner()
    documents.plan(items_of("ab"), "First?", NO_SCOPE)
    moved = [item("b"), item("a", page=1), item("b", page=2), item("a", page=2)]
    for planned in (
        documents.plan(moved, "?", NO_SCOPE),
        documents.plan_batch(in_scope([(items_of("cd"), "?"), (moved, "?")], NO_SCOPE))[1],
    ):
        assert row(planned.items) == [
            ("a", 1, "[Doc_a]"),
            ("a", 3, "[Doc_a]"),
            ("b", 0, "[Doc_b]"),
            ("b", 2, "[Doc_b]"),
        ]
        assert planned.annotation == place_words(3, 1, 4, 2)


def test_a_batch_is_planned_together_and_one_or_none_as_it_arrives():
    planner = RecordingPlanner()
    batch = document_planner(planner).plan_batch(
        in_scope([(items_of(retrieved), "?") for retrieved in ("ab", "xy", "cba")], NO_SCOPE)
    )
    assert [(call, len(requests)) for call, requests, _ in planner.asked] == [("plan_batch", 3)]
    assert [names(planned.items) for planned in batch] == ["ab", "xy", "abc"]
    assert [planned.plan.expected_cached_tokens for planned in batch] == [0, 0, 200]
    planner = RecordingPlanner()
    assert document_planner(planner).plan_batch(in_scope([], NO_SCOPE)) == []
    batch = document_planner(planner).plan_batch(in_scope([(items_of("ab"), "?")], NO_SCOPE))
    assert [names(planned.items) for planned in batch] == ["ab"]
    assert [call for call, requests, _ in planner.asked if requests] == ["plan"]


@pytest.mark.parametrize("mode", ["metadata", "off"])
def test_only_append_gives_words_for_an_own_document(mode):
    documents = document_planner(annotation=mode)
    documents.plan(items_of("ab"), "?", NO_SCOPE)
    moved = documents.plan(items_of("ba"), "?", NO_SCOPE)
    assert (names(moved.items), moved.annotation) == ("ab", None)
    assert moved.plan.order_annotation == order_words("b", "a")
    later = documents.plan(items_of("ca"), "?", first_turn(documents, "ab"))
    assert later.annotation is None


def test_off_mode_leaves_nothing_out_for_noitem_would_point_to_it_nor_of_a_batch():
    documents = document_planner(annotation="off")
    later = documents.plan(items_of("bca"), "?", first_turn(documents, "ab"))
    assert row(later.items) == [("b", 0, "[Doc_b]"), ("c", 1, "[Doc_c]"), ("a", 2, "[Doc_a]")]
    assert (later.left_out, later.plan.references) == ((), ())

    for mode, left_out in (("off", ["", ""]), ("metadata", ["ba", "a"])):
        documents = document_planner(annotation=mode)
        scope = first_turn(documents, "ab")
        batch = documents.plan_batch(
            in_scope([(items_of("bca"), "?"), (items_of("ad"), "?")], scope)
        )
        assert [names(planned.left_out) for planned in batch] == left_out
    documents = document_planner(annotation="metadata")
    later = documents.plan(items_of("bca"), "?", first_turn(documents, "ab"))
    assert (names(later.items), names(later.left_out)) == ("c", "ba")
    assert later.plan.location_annotations == (location_words("b"), location_words("a"))


@pytest.mark.parametrize(("mode", "expected"), [("append", True), ("off", False)])
def test_a_planner_that_keeps_repeated_blocks_is_asked_in_its_own_way(mode, expected):
    keeping = ReusePlanner(deduplicate=False)
    documents = document_planner(keeping, annotation=mode)
    later = documents.plan(items_of("ba"), "?", first_turn(documents, "ab"))
    assert names(later.items) == "ba"
    leaving_out = document_planner(annotation=mode)
    later = leaving_out.plan(items_of("ba"), "?", first_turn(leaving_out, "ab"))
    assert bool(later.left_out) is expected


def test_the_appended_words_are_the_planners_templates():
    templates = Templates(
        label="<{id}>",
        order="Best: {order}.",
        order_separator=" > ",
        location="See {label}.",
    )
    documents = document_planner(ReusePlanner(templates=templates))
    documents.plan(items_of("ab"), "?", NO_SCOPE)
    moved = documents.plan(items_of("ba"), "?", NO_SCOPE)
    assert moved.annotation == "Best: 2 > 1."
    later = documents.plan(items_of("bc"), "?", first_turn(documents, "ab"))
    assert later.annotation == "See <b>."


@pytest.mark.parametrize("mode", ["loud", "Append", "", 3, True, ["append"]])
def test_an_unknown_annotation_mode_is_refused_at_construction(mode):
    named = f"{mode!r} ({type(mode).__name__})"
    message = f"there is no annotation mode {named}; choose one of 'append', 'metadata', 'off'"
    for call in (lambda: checked_annotation(mode), lambda: document_planner(annotation=mode)):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert str(caught.value) == message
    assert all(checked_annotation(one) == one for one in MODES)


@pytest.mark.parametrize("planner", [3, "planner", ReusePlanner])
def test_a_planner_of_another_type_is_refused_at_construction(planner):
    with pytest.raises(InvalidRequestError) as caught:
        DocumentPlanner(planner, block_of, "append", "ReuseRetriever")
    assert str(caught.value) == (
        f"planner must be a ctxreuse.ReusePlanner, not {planner!r} ({type(planner).__name__}); "
        "pass planner=ReusePlanner(), or leave it out"
    )


def test_tenant_conversation_and_history_come_from_the_scope():
    planner = RecordingPlanner()
    documents = document_planner(planner)
    history = (user("Hello."), assistant("Yes?"))
    scopes = [
        NO_SCOPE,
        RequestScope("t"),
        RequestScope("", 0, ()),
        RequestScope("t", "c", history),
        RequestScope(None, "c"),
    ]
    for scope in scopes:
        documents.plan(items_of("a"), "Why?", scope)
        documents.plan_batch(in_scope([(items_of("a"), "1?"), (items_of("b"), "2?")], scope))
    asked = [request for _, requests, _ in planner.asked for request in requests]
    for number, scope in enumerate(scopes):
        group = asked[3 * number : 3 * number + 3]
        assert [request.query for request in group] == ["Why?", "1?", "2?"]
        for request in group:
            assert request.tenant == (scope.tenant or "")
            assert request.conversation_id == scope.conversation_id
            assert request.history == scope.history
            assert (request.system, request.request_id) == (None, None)


def test_another_tenants_conversation_of_the_same_name_shows_nothing():
    documents = document_planner()
    scope = first_turn(documents, "ab", tenant="one")
    again = documents.plan(items_of("ba"), "?", RequestScope("two", "c", ()))
    assert (names(again.items), again.left_out) == ("ba", ())
    quoted, own = (
        documents.plan(items_of("b"), "?", RequestScope(tenant, "c", scope.history)).plan
        for tenant in ("three", "one")
    )
    assert quoted.labels == {"[Doc_b]": "b"}, "read in the messages that the tenant has sent"
    assert own.labels == {"[Doc_a]": "a", "[Doc_b]": "b"}


@given(st.lists(retrievals, max_size=5), st.lists(retrievals, max_size=5))
def test_a_tenants_order_does_not_depend_on_another_tenant(ones, others):
    shared, alone = document_planner(), document_planner()
    one, other = RequestScope("one"), RequestScope("other")
    for number in range(max(len(ones), len(others))):
        for items in ones[number : number + 1]:
            shared.plan(items, "?", one)
        for items in others[number : number + 1]:
            seen = shared.plan(items, "?", other)
            wanted = alone.plan(items, "?", other)
            assert (seen.items, seen.annotation) == (wanted.items, wanted.annotation)


@given(st.lists(st.tuples(retrievals, st.lists(retrievals, max_size=2)), max_size=6))
@example([(items_of("eb"), [items_of("a")]), (items_of("cb"), [items_of("a")])])
def test_who_retrieves_at_the_same_time_does_not_change_another_tenants_order(turns):
    shared, alone = document_planner(), document_planner()
    for items, others in turns:
        mine = RetrievedItems(items, "?", RequestScope("one"))
        theirs = [RetrievedItems(one, "?", RequestScope("other")) for one in others]
        [seen, *_] = shared.plan_batch([mine, *theirs])
        [wanted] = alone.plan_batch([mine])
        assert (seen.items, seen.annotation) == (wanted.items, wanted.annotation)


def retrieved_as_they_are(items):
    return PlannedItems(
        tuple(PlannedItem(one, rank, None) for rank, one in enumerate(items)), (), None
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_planning_fault_lets_all_items_through_as_retrieved(caplog, mode):
    documents = DocumentPlanner(FaultyPlanner(), block_of, mode, "ReuseRetriever")
    items = [item("b"), item("a", page=1), item("b"), item("a", page=2)]
    for _ in range(2):
        planned = documents.plan(items, SECRET, NO_SCOPE)
        assert planned == retrieved_as_they_are(items)
        assert all(one.item is given for one, given in zip(planned.items, items, strict=True))
    batch = documents.plan_batch(in_scope([(items, SECRET), (items_of("c"), SECRET)], NO_SCOPE))
    assert batch == [retrieved_as_they_are(items), retrieved_as_they_are(items_of("c"))]
    assert documents.faults == 3
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ctxreuse", logging.WARNING)
    assert record.getMessage().startswith("ReuseRetriever: planning failed with RuntimeError at ")
    assert "; documents go through as retrieved. " in record.getMessage()
    assert SECRET not in repr(vars(record))


@given(retrievals)
def test_items_as_retrieved_have_their_ranks_and_no_labels(items):
    assert as_retrieved(items) == retrieved_as_they_are(items)
    assert DocumentPlanner(FaultyPlanner(), block_of, "append", "c").plan(
        items, "?", NO_SCOPE
    ) == retrieved_as_they_are(items)


def test_a_item_that_cannot_become_a_block_lets_its_batch_through_as_retrieved(caplog):
    def block_of_text(one):
        return ContextBlock(id=one.id, text=one.text)

    documents = DocumentPlanner(ReusePlanner(), block_of_text, "append", "ReuseRetriever")
    broken = [item("a"), Item("b", [SECRET])]
    assert documents.plan(broken, "?", NO_SCOPE) == retrieved_as_they_are(broken)
    batch = documents.plan_batch(in_scope([(items_of("c"), "?"), (broken, "?")], NO_SCOPE))
    assert batch == [retrieved_as_they_are(items_of("c")), retrieved_as_they_are(broken)]
    assert documents.faults == 2
    assert "planning failed with InvalidBlockError at blocks.py:" in caplog.text
    assert SECRET not in caplog.text
    planned = documents.plan(items_of("c"), "?", NO_SCOPE)
    assert (row(planned.items), documents.faults) == ([("c", 0, "[Doc_c]")], 2)


def test_a_query_that_is_no_text_and_arrays_in_metadata_lose_nothing():
    documents = document_planner()
    items = items_of("ab")
    assert documents.plan(items, None, NO_SCOPE) == retrieved_as_they_are(items)
    assert documents.faults == 1

    documents = document_planner()
    items = [item("a", vector=np.array([1.0, number])) for number in (2, 2, 3)]
    planned = documents.plan(items, "?", NO_SCOPE)
    assert row(planned.items) == [("a", rank, "[Doc_a]") for rank in range(3)]
    assert (planned.plan.content, documents.faults) == ("[Doc_a] text of a\n\n?", 0)


class Incomparable(Item):
    """An item whose comparison raises, as that of some libraries' values does."""

    __hash__ = None

    def __eq__(self, other):
        raise self.metadata["error"]


@pytest.mark.parametrize("error", [TypeError(SECRET), ValueError(SECRET)])
def test_items_that_cannot_be_compared_count_as_different(error, caplog):
    odd = [Incomparable("a", "same", {"error": error}) for _ in range(3)]
    documents = document_planner()
    for planned in (
        documents.plan([*odd, item("b")], "?", NO_SCOPE),
        documents.plan_batch(in_scope([(items_of("b"), "?"), ([*odd, item("b")], "?")], NO_SCOPE))[
            1
        ],
    ):
        assert row(planned.items) == [
            ("a", 0, "[Doc_a]"),
            ("a", 1, "[Doc_a]"),
            ("a", 2, "[Doc_a]"),
            ("b", 3, "[Doc_b]"),
        ]
        items = [one.item for one in planned.items]
        assert all(one is given for one, given in zip(items, odd, strict=False))
        assert planned.plan is not None
    assert (documents.faults, caplog.text) == (0, "")


def test_a_comparison_that_fails_otherwise_lets_items_through_before_anyitem_is_planned(caplog):
    planner = RecordingPlanner()
    documents = document_planner(planner)
    odd = [Incomparable("a", "same", {"error": RuntimeError(SECRET)}) for _ in range(2)]
    for planned in (
        documents.plan(odd, "?", NO_SCOPE),
        documents.plan_batch(in_scope([(items_of("b"), "?"), (odd, "?")], NO_SCOPE))[1],
    ):
        assert [(id(one.item), one.rank, one.label) for one in planned.items] == [
            (id(one), rank, None) for rank, one in enumerate(odd)
        ]
        assert planned.plan is None
    assert (planner.asked, documents.faults) == ([], 2)
    assert SECRET not in caplog.text


def test_what_ends_the_program_is_not_held_up():
    class Interrupted(ReusePlanner):
        def plan(self, *args, **options):
            raise KeyboardInterrupt

    documents = document_planner(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        documents.plan(items_of("ab"), "?", NO_SCOPE)
    assert documents.faults == 0


def test_a_plan_is_json_metadata():
    assert METADATA_KEY == "ctxreuse"
    documents = document_planner()
    scope = first_turn(documents, "ab")
    later = documents.plan(items_of("bca"), "Then?", scope).plan
    assert plan_metadata(later) == {
        "request_id": "request-1",
        "blocks": ["c"],
        "references": ["b", "a"],
        "order_annotation": None,
        "parts": [
            ["[Doc_b]", "b", location_words("b")],
            ["[Doc_c]", "c"],
            ["[Doc_a]", "a", location_words("a")],
        ],
        "expected_cached_tokens": 0,
    }
    moved = documents.plan(items_of("ba"), "?", NO_SCOPE).plan
    assert plan_metadata(moved) == {
        "request_id": "request-2",
        "blocks": ["a", "b"],
        "references": [],
        "order_annotation": order_words("b", "a"),
        "parts": [["[Doc_a]", "a"], ["[Doc_b]", "b"]],
        "expected_cached_tokens": 200,
    }


@given(st.lists(st.lists(odd_blocks | plain_blocks, max_size=5), max_size=4))
def test_metadata_survives_json_whatever_the_ids(contexts):
    planner = ReusePlanner()
    for context in contexts:
        plan = planner.plan(ContextRequest(context, "?"))
        metadata = plan_metadata(plan)
        assert json.loads(json.dumps(metadata)) == metadata
        assert metadata["blocks"] == [sent.id for sent in plan.blocks]


def test_numpys_integers_become_numbers_of_json():
    planner = ReusePlanner()
    one, two, three = (
        ContextBlock(id=kind(number), text=f"text of {number}", tokens=kind(100))
        for number, kind in ((1, np.int64), (2, np.uint8), (3, np.int32))
    )
    first = planner.plan(ContextRequest([one, two], "?", history=[], conversation_id="c"))
    history = [user(first.content)]
    later = planner.plan(
        ContextRequest([three, two], "?", history=history, conversation_id="c", request_id=7)
    )
    again = planner.plan(ContextRequest([two, one]))
    words = location_words(2)
    assert json.loads(json.dumps(plan_metadata(later))) == {
        "request_id": 7,
        "blocks": [3],
        "references": [2],
        "order_annotation": None,
        "parts": [["[Doc_3]", 3], ["[Doc_2]", 2, words]],
        "expected_cached_tokens": 0,
    }
    told = plan_metadata(again)
    assert json.loads(json.dumps(told)) == told
    assert (told["blocks"], told["expected_cached_tokens"]) == ([1, 2], 200)
    assert {type(value) for value in (*told["blocks"], told["expected_cached_tokens"])} == {int}


def test_metadata_holds_no_text_of_documents_or_messages():
    planner = ReusePlanner()
    blocks = [ContextBlock(text=f"{SECRET} {number}", tokens=50) for number in range(3)]
    first = planner.plan(
        ContextRequest(blocks, SECRET, system=SECRET, history=[], conversation_id="c")
    )
    moved = planner.plan(ContextRequest(blocks[::-1], SECRET, system=SECRET))
    later = planner.plan(
        ContextRequest(blocks, SECRET, history=[user(first.content)], conversation_id="c")
    )
    assert (bool(moved.order_annotation), len(later.references)) == (True, 3)
    for plan in (first, moved, later):
        assert SECRET not in json.dumps(plan_metadata(plan))


def test_there_are_no_words_to_append_where_noitem_was_moved_or_left_out():
    planner = ReusePlanner()
    for blocks in ([], [block(1)], [block(1), block(2)]):
        plan = planner.plan(ContextRequest(blocks, "?"))
        assert appended_annotation(plan, []) is None
