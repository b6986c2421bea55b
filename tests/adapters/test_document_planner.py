import copy
import dataclasses
import json
import logging
from typing import get_args

import numpy as np
import pytest
from adapter_conformance import FaultyPlanner
from hypothesis import given
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

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, Templates
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

MODES = get_args(AnnotationMode)
SECRET = "a secret text"


@dataclasses.dataclass
class Thing:
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


def block_of(thing):
    return ContextBlock(id=thing.id, text=thing.text, tokens=100)


def thing(name, **metadata):
    return Thing(name, f"text of {name}", metadata)


def things_of(names):
    return [thing(name) for name in names]


def arranger(planner=None, annotation="append", component="ReuseRetriever"):
    planner = ReusePlanner() if planner is None else planner
    return DocumentPlanner(planner, block_of, annotation, component)


def in_scope(retrieved, scope):
    return [RetrievedItems(things, query, scope) for things, query in retrieved]


def names(placed):
    return "".join(one.thing.id for one in placed)


def row(placed):
    return [(one.thing.id, one.rank, one.label) for one in placed]


def first_turn(arranging, retrieved, tenant="", conversation_id="c"):
    """Send a first turn; return the scope of the second one."""
    scope = RequestScope(tenant, conversation_id, ())
    content = arranging.arrange(things_of(retrieved), "First?", scope).plan.content
    return scope.inside(history=[user(content), assistant("Yes.")])


retrievals = st.lists(
    st.builds(
        lambda name, version, source: Thing(name, f"{name} v{version}", {"source": source}),
        st.sampled_from("abcd"),
        st.integers(1, 2),
        st.sampled_from(("x", "x", "y")),
    ),
    max_size=8,
)
conversations = st.lists(st.tuples(retrievals, st.booleans()), max_size=4)


def assert_holds_each_thing_once(arranged, things):
    """Check an arrangement against what was retrieved, thing by thing."""
    wanted = [
        rank for rank, one in enumerate(things) if not any(one == other for other in things[:rank])
    ]
    everything = [*arranged.placed, *arranged.left_out]
    assert sorted(one.rank for one in everything) == wanted
    assert all(one.thing is things[one.rank] for one in everything)


def assert_names_what_it_shows(arranged):
    """Check that the annotation says the label of each thing in its place, equal blocks too."""
    plan = arranged.plan
    said = list(plan.location_annotations)
    if plan.order_annotation is not None:
        labels = ", ".join(one.label for one in arranged.placed)
        said += [f"The documents above are {labels}, in this order.", plan.order_annotation]
    assert arranged.annotation == (" ".join(said) or None)


def assert_follows_its_plan(arranged, things):
    """Check that both halves are in the plan's order, equal blocks side by side, best first."""
    plan = arranged.plan
    key_of = [block_of(one).key for one in things]
    place_of = {sent.key: place for place, sent in enumerate(plan.blocks)}
    places = [(place_of[key_of[one.rank]], one.rank) for one in arranged.placed]
    assert places == sorted(places)
    assert {place for place, _ in places} == set(range(len(plan.blocks)))
    firsts = [key_of.index(key_of[one.rank]) for one in arranged.left_out]
    assert firsts == sorted(firsts)
    assert not {key_of[one.rank] for one in arranged.left_out} & set(place_of)
    assert list(dict.fromkeys(one.thing.id for one in arranged.left_out)) == list(
        dict.fromkeys(plan.references)
    )
    for one in [*arranged.placed, *arranged.left_out]:
        assert plan.labels[one.label] == one.thing.id


# one retrieval


def test_things_come_back_in_the_planned_order_with_rank_and_label():
    arranging = arranger()
    first = things_of("abc")
    arranged = arranging.arrange(first, "First?", NO_SCOPE)
    assert arranged.placed == (
        PlannedItem(first[0], 0, "[Doc_1]"),
        PlannedItem(first[1], 1, "[Doc_2]"),
        PlannedItem(first[2], 2, "[Doc_3]"),
    )
    assert (arranged.left_out, arranged.annotation) == ((), None)

    second = arranging.arrange(things_of("dcba"), "Then?", NO_SCOPE)
    assert row(second.placed) == [
        ("a", 3, "[Doc_1]"),
        ("b", 2, "[Doc_2]"),
        ("c", 1, "[Doc_3]"),
        ("d", 0, "[Doc_4]"),
    ]
    assert second.left_out == ()
    assert second.plan.request == ContextRequest(
        [block_of(one) for one in things_of("dcba")], "Then?"
    )
    assert second.annotation == (
        "The documents above are [Doc_1], [Doc_2], [Doc_3], [Doc_4], in this order. "
        + order_words(4, 3, 2, 1)
    )
    assert arranging.faults == 0


def test_nothing_retrieved_is_nothing_placed():
    arranged = arranger().arrange([], "Why?", NO_SCOPE)
    assert (arranged.placed, arranged.left_out, arranged.annotation) == ((), (), None)
    assert arranged.plan.content == "Why?"


def test_things_that_differ_in_metadata_only_are_kept_side_by_side_and_equal_ones_once():
    things = [thing("a", page=1), thing("b"), thing("a", page=2), thing("b"), thing("a", page=1)]
    arranged = arranger().arrange(things, "Why?", NO_SCOPE)
    assert [(one.thing, one.rank, one.label) for one in arranged.placed] == [
        (thing("a", page=1), 0, "[Doc_1]"),
        (thing("a", page=2), 2, "[Doc_1]"),
        (thing("b"), 1, "[Doc_2]"),
    ]
    assert arranged.plan.content == "[Doc_1] text of a\n\n[Doc_2] text of b\n\nWhy?"


def test_the_same_id_with_another_text_is_another_thing():
    things = [Thing("a", "old"), Thing("a", "new"), Thing("a", "old")]
    arranged = arranger().arrange(things, "Why?", NO_SCOPE)
    assert [(one.thing.text, one.rank, one.label) for one in arranged.placed] == [
        ("old", 0, "[Doc_1]"),
        ("new", 1, "[Doc_2]"),
    ]


def test_a_later_turn_leaves_out_what_the_conversation_shows_and_says_where_it_stands():
    arranging = arranger()
    scope = first_turn(arranging, "ab")
    arranged = arranging.arrange(
        [thing("b", page=1), thing("c"), thing("a"), thing("b", page=2)], "Then?", scope
    )
    assert row(arranged.placed) == [("c", 1, "[Doc_3]")]
    assert [(one.thing, one.rank, one.label) for one in arranged.left_out] == [
        (thing("b", page=1), 0, "[Doc_2]"),
        (thing("b", page=2), 3, "[Doc_2]"),
        (thing("a"), 2, "[Doc_1]"),
    ]
    assert arranged.annotation == f"{location_words(2)} {location_words(1)}"


@given(conversations, st.sampled_from(MODES))
def test_each_thing_comes_back_once_and_in_plans_order(turns, mode):
    arranging = arranger(annotation=mode)
    history = []
    for number, (things, goes_on) in enumerate(turns):
        before = copy.deepcopy(things)
        scope = RequestScope("t", "c", tuple(history))
        arranged = arranging.arrange(things, f"{number}?", scope)
        assert arranging.faults == 0
        assert things == before
        assert_holds_each_thing_once(arranged, things)
        assert_follows_its_plan(arranged, things)
        if mode == "append":
            assert_names_what_it_shows(arranged)
        history = [*history, user(arranged.plan.content), assistant("Yes.")] if goes_on else []


@given(st.lists(retrievals, max_size=5), st.sampled_from(MODES))
def test_a_batch_is_answered_in_the_order_given_and_loses_nothing(contexts, mode):
    arranging = arranger(annotation=mode)
    before = copy.deepcopy(contexts)
    retrieved = [(things, f"{number}?") for number, things in enumerate(contexts)]
    batch = arranging.arrange_batch(in_scope(retrieved, NO_SCOPE))
    assert (len(batch), arranging.faults) == (len(contexts), 0)
    assert contexts == before
    for number, (arranged, things) in enumerate(zip(batch, contexts, strict=True)):
        assert arranged.plan.request.query == f"{number}?"
        assert_holds_each_thing_once(arranged, things)
        assert_follows_its_plan(arranged, things)


def test_each_of_equal_blocks_side_by_side_is_named_in_the_legend():
    arranging = arranger()
    arranging.arrange(things_of("ab"), "First?", NO_SCOPE)
    moved = [thing("b"), thing("a", page=1), thing("b", page=2), thing("a", page=2)]
    for arranged in (
        arranging.arrange(moved, "?", NO_SCOPE),
        arranging.arrange_batch(in_scope([(things_of("cd"), "?"), (moved, "?")], NO_SCOPE))[1],
    ):
        assert row(arranged.placed) == [
            ("a", 1, "[Doc_1]"),
            ("a", 3, "[Doc_1]"),
            ("b", 0, "[Doc_2]"),
            ("b", 2, "[Doc_2]"),
        ]
        assert arranged.annotation == (
            "The documents above are [Doc_1], [Doc_1], [Doc_2], [Doc_2], in this order. "
            + order_words(2, 1)
        )


def test_a_batch_is_planned_together():
    planner = RecordingPlanner()
    batch = arranger(planner).arrange_batch(
        in_scope([(things_of(retrieved), "?") for retrieved in ("ab", "xy", "cba")], NO_SCOPE)
    )
    assert [(call, len(requests)) for call, requests, _ in planner.asked] == [("plan_batch", 3)]
    assert [names(arranged.placed) for arranged in batch] == ["ab", "xy", "abc"]
    assert [arranged.plan.expected_cached_tokens for arranged in batch] == [0, 0, 200]


def test_a_batch_of_one_is_planned_as_it_arrives_and_an_empty_one_is_empty():
    planner = RecordingPlanner()
    assert arranger(planner).arrange_batch(in_scope([], NO_SCOPE)) == []
    batch = arranger(planner).arrange_batch(in_scope([(things_of("ab"), "?")], NO_SCOPE))
    assert [names(arranged.placed) for arranged in batch] == ["ab"]
    assert [call for call, requests, _ in planner.asked if requests] == ["plan"]


# annotation modes


@pytest.mark.parametrize("mode", ["metadata", "off"])
def test_only_append_gives_words_for_an_own_document(mode):
    arranging = arranger(annotation=mode)
    arranging.arrange(things_of("ab"), "?", NO_SCOPE)
    moved = arranging.arrange(things_of("ba"), "?", NO_SCOPE)
    assert (names(moved.placed), moved.annotation) == ("ab", None)
    assert moved.plan.order_annotation == order_words(2, 1)
    later = arranging.arrange(things_of("ca"), "?", first_turn(arranging, "ab"))
    assert later.annotation is None


def test_metadata_mode_leaves_out_what_the_conversation_shows():
    arranging = arranger(annotation="metadata")
    later = arranging.arrange(things_of("bca"), "?", first_turn(arranging, "ab"))
    assert (names(later.placed), names(later.left_out)) == ("c", "ba")
    assert later.plan.location_annotations == (location_words(2), location_words(1))


def test_off_mode_leaves_nothing_out_for_nothing_would_point_to_it():
    arranging = arranger(annotation="off")
    later = arranging.arrange(things_of("bca"), "?", first_turn(arranging, "ab"))
    assert row(later.placed) == [("b", 0, "[Doc_3]"), ("c", 1, "[Doc_4]"), ("a", 2, "[Doc_5]")]
    assert (later.left_out, later.plan.references) == ((), ())


def test_off_mode_leaves_nothing_out_of_a_batch_either():
    for mode, left_out in (("off", ["", ""]), ("metadata", ["ba", "a"])):
        arranging = arranger(annotation=mode)
        scope = first_turn(arranging, "ab")
        batch = arranging.arrange_batch(
            in_scope([(things_of("bca"), "?"), (things_of("ad"), "?")], scope)
        )
        assert [names(arranged.left_out) for arranged in batch] == left_out


@pytest.mark.parametrize(("mode", "expected"), [("append", True), ("off", False)])
def test_a_planner_that_keeps_repeated_blocks_is_asked_in_its_own_way(mode, expected):
    keeping = ReusePlanner(deduplicate=False)
    arranging = arranger(keeping, annotation=mode)
    later = arranging.arrange(things_of("ba"), "?", first_turn(arranging, "ab"))
    assert names(later.placed) == "ba"
    leaving_out = arranger(annotation=mode)
    later = leaving_out.arrange(things_of("ba"), "?", first_turn(leaving_out, "ab"))
    assert bool(later.left_out) is expected


def test_the_appended_words_are_the_planners_templates():
    templates = Templates(
        label="<{ordinal}>",
        order="Best: {order}.",
        location="See {label}.",
        legend="Above: {labels}.",
    )
    arranging = arranger(ReusePlanner(templates=templates))
    arranging.arrange(things_of("ab"), "?", NO_SCOPE)
    moved = arranging.arrange(things_of("ba"), "?", NO_SCOPE)
    assert moved.annotation == "Above: <1>, <2>. Best: <2> > <1>."
    later = arranging.arrange(things_of("bc"), "?", first_turn(arranging, "ab"))
    assert later.annotation == "See <2>."


@pytest.mark.parametrize("mode", MODES)
def test_an_annotation_mode_is_given_back(mode):
    assert checked_annotation(mode) == mode
    assert type(checked_annotation(mode)) is str


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("loud", "'loud' (str)"),
        ("Append", "'Append' (str)"),
        ("", "'' (str)"),
        (3, "3 (int)"),
        (True, "True (bool)"),
        (["append"], "['append'] (list)"),
    ],
)
def test_an_unknown_annotation_mode_is_refused_at_construction(mode, named):
    message = f"there is no annotation mode {named}; choose one of 'append', 'metadata', 'off'"
    for call in (lambda: checked_annotation(mode), lambda: arranger(annotation=mode)):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("planner", "named"),
    [
        (3, "3 (int)"),
        ("planner", "'planner' (str)"),
        (ReusePlanner, "<class 'ctxreuse.planner.ReusePlanner'> (type)"),
    ],
)
def test_a_planner_of_another_type_is_refused_at_construction(planner, named):
    with pytest.raises(InvalidRequestError) as caught:
        DocumentPlanner(planner, block_of, "append", "ReuseRetriever")
    assert str(caught.value) == (
        f"planner must be a ctxreuse.ReusePlanner, not {named}; "
        "pass planner=ReusePlanner(), or leave it out"
    )


# the scope


def test_tenant_conversation_and_history_come_from_the_scope():
    planner = RecordingPlanner()
    arranging = arranger(planner)
    history = (user("Hello."), assistant("Yes?"))
    scopes = [
        NO_SCOPE,
        RequestScope("t"),
        RequestScope("", 0, ()),
        RequestScope("t", "c", history),
        RequestScope(None, "c"),
    ]
    for scope in scopes:
        arranging.arrange(things_of("a"), "Why?", scope)
        arranging.arrange_batch(in_scope([(things_of("a"), "1?"), (things_of("b"), "2?")], scope))
    asked = [request for _, requests, _ in planner.asked for request in requests]
    for number, scope in enumerate(scopes):
        group = asked[3 * number : 3 * number + 3]
        assert [request.query for request in group] == ["Why?", "1?", "2?"]
        for request in group:
            assert request.tenant == (scope.tenant or "")
            assert request.conversation_id == scope.conversation_id
            assert request.history == scope.history
            assert (request.system, request.request_id) == (None, None)


def test_without_a_history_nothing_is_left_out():
    arranging = arranger()
    first_turn(arranging, "ab")
    again = arranging.arrange(things_of("ba"), "?", RequestScope("", "c"))
    assert (names(again.placed), again.left_out) == ("ab", ())


def test_another_tenants_conversation_of_the_same_name_shows_nothing():
    arranging = arranger()
    scope = first_turn(arranging, "ab", tenant="one")
    again = arranging.arrange(things_of("ba"), "?", RequestScope("two", "c", scope.history))
    assert (names(again.placed), again.left_out) == ("ba", ())


@given(st.lists(retrievals, max_size=5), st.lists(retrievals, max_size=5))
def test_a_tenants_order_does_not_depend_on_another_tenant(ones, others):
    shared, alone = arranger(), arranger()
    one, other = RequestScope("one"), RequestScope("other")
    for number in range(max(len(ones), len(others))):
        for things in ones[number : number + 1]:
            shared.arrange(things, "?", one)
        for things in others[number : number + 1]:
            seen = shared.arrange(things, "?", other)
            wanted = alone.arrange(things, "?", other)
            assert (seen.placed, seen.annotation) == (wanted.placed, wanted.annotation)


# failing open


def retrieved_as_they_are(things):
    return PlannedItems(
        tuple(PlannedItem(one, rank, None) for rank, one in enumerate(things)), (), None
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_planning_fault_lets_all_things_through_as_retrieved(caplog, mode):
    arranging = DocumentPlanner(FaultyPlanner(), block_of, mode, "ReuseRetriever")
    things = [thing("b"), thing("a", page=1), thing("b"), thing("a", page=2)]
    for _ in range(2):
        arranged = arranging.arrange(things, SECRET, NO_SCOPE)
        assert arranged == retrieved_as_they_are(things)
        assert all(one.thing is given for one, given in zip(arranged.placed, things, strict=True))
    batch = arranging.arrange_batch(
        in_scope([(things, SECRET), (things_of("c"), SECRET)], NO_SCOPE)
    )
    assert batch == [retrieved_as_they_are(things), retrieved_as_they_are(things_of("c"))]
    assert arranging.faults == 3
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ctxreuse", logging.WARNING)
    assert record.getMessage().startswith("ReuseRetriever: planning failed with RuntimeError at ")
    assert "; documents go through as retrieved. " in record.getMessage()
    assert SECRET not in repr(vars(record))


@given(retrievals)
def test_things_as_retrieved_have_their_ranks_and_no_labels(things):
    assert as_retrieved(things) == retrieved_as_they_are(things)
    assert DocumentPlanner(FaultyPlanner(), block_of, "append", "c").arrange(
        things, "?", NO_SCOPE
    ) == retrieved_as_they_are(things)


def test_a_thing_that_cannot_become_a_block_lets_its_batch_through_as_retrieved(caplog):
    def block_of_text(one):
        return ContextBlock(id=one.id, text=one.text)

    arranging = DocumentPlanner(ReusePlanner(), block_of_text, "append", "ReuseRetriever")
    broken = [thing("a"), Thing("b", [SECRET])]
    assert arranging.arrange(broken, "?", NO_SCOPE) == retrieved_as_they_are(broken)
    batch = arranging.arrange_batch(in_scope([(things_of("c"), "?"), (broken, "?")], NO_SCOPE))
    assert batch == [retrieved_as_they_are(things_of("c")), retrieved_as_they_are(broken)]
    assert arranging.faults == 2
    assert "planning failed with InvalidBlockError at blocks.py:" in caplog.text
    assert SECRET not in caplog.text
    arranged = arranging.arrange(things_of("c"), "?", NO_SCOPE)
    assert (row(arranged.placed), arranging.faults) == ([("c", 0, "[Doc_1]")], 2)


def test_a_query_that_is_no_text_fails_open():
    arranging = arranger()
    things = things_of("ab")
    assert arranging.arrange(things, None, NO_SCOPE) == retrieved_as_they_are(things)
    assert arranging.faults == 1


class Incomparable(Thing):
    """A thing whose comparison raises, as that of some libraries' values does."""

    __hash__ = None

    def __eq__(self, other):
        raise self.metadata["error"]


@pytest.mark.parametrize("error", [TypeError(SECRET), ValueError(SECRET)])
def test_things_that_cannot_be_compared_count_as_different(error, caplog):
    odd = [Incomparable("a", "same", {"error": error}) for _ in range(3)]
    arranging = arranger()
    for arranged in (
        arranging.arrange([*odd, thing("b")], "?", NO_SCOPE),
        arranging.arrange_batch(
            in_scope([(things_of("b"), "?"), ([*odd, thing("b")], "?")], NO_SCOPE)
        )[1],
    ):
        assert row(arranged.placed) == [
            ("a", 0, "[Doc_1]"),
            ("a", 1, "[Doc_1]"),
            ("a", 2, "[Doc_1]"),
            ("b", 3, "[Doc_2]"),
        ]
        placed = [one.thing for one in arranged.placed]
        assert all(one is given for one, given in zip(placed, odd, strict=False))
        assert arranged.plan is not None
    assert (arranging.faults, caplog.text) == (0, "")


def test_things_with_arrays_in_their_metadata_are_all_kept():
    arranging = arranger()
    things = [thing("a", vector=np.array([1.0, number])) for number in (2, 2, 3)]
    arranged = arranging.arrange(things, "?", NO_SCOPE)
    assert row(arranged.placed) == [("a", rank, "[Doc_1]") for rank in range(3)]
    assert (arranged.plan.content, arranging.faults) == ("[Doc_1] text of a\n\n?", 0)


def test_a_comparison_that_fails_otherwise_lets_things_through_before_anything_is_planned(caplog):
    planner = RecordingPlanner()
    arranging = arranger(planner)
    odd = [Incomparable("a", "same", {"error": RuntimeError(SECRET)}) for _ in range(2)]
    for arranged in (
        arranging.arrange(odd, "?", NO_SCOPE),
        arranging.arrange_batch(in_scope([(things_of("b"), "?"), (odd, "?")], NO_SCOPE))[1],
    ):
        assert [(id(one.thing), one.rank, one.label) for one in arranged.placed] == [
            (id(one), rank, None) for rank, one in enumerate(odd)
        ]
        assert arranged.plan is None
    assert (planner.asked, arranging.faults) == ([], 2)
    assert SECRET not in caplog.text


def test_what_ends_the_program_is_not_held_up():
    class Interrupted(ReusePlanner):
        def plan(self, *args, **options):
            raise KeyboardInterrupt

    arranging = arranger(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        arranging.arrange(things_of("ab"), "?", NO_SCOPE)
    assert arranging.faults == 0


# the plan as metadata


def test_a_plan_is_json_metadata():
    assert METADATA_KEY == "ctxreuse"
    arranging = arranger()
    scope = first_turn(arranging, "ab")
    later = arranging.arrange(things_of("bca"), "Then?", scope).plan
    assert plan_metadata(later) == {
        "request_id": "request-1",
        "blocks": ["c"],
        "references": ["b", "a"],
        "order_annotation": None,
        "parts": [
            ["[Doc_2]", "b", location_words(2)],
            ["[Doc_3]", "c"],
            ["[Doc_1]", "a", location_words(1)],
        ],
        "expected_cached_tokens": 0,
    }
    moved = arranging.arrange(things_of("ba"), "?", NO_SCOPE).plan
    assert plan_metadata(moved) == {
        "request_id": "request-2",
        "blocks": ["a", "b"],
        "references": [],
        "order_annotation": order_words(2, 1),
        "parts": [["[Doc_1]", "a"], ["[Doc_2]", "b"]],
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


def test_there_are_no_words_to_append_where_nothing_was_moved_or_left_out():
    planner = ReusePlanner()
    for blocks in ([], [block(1)], [block(1), block(2)]):
        plan = planner.plan(ContextRequest(blocks, "?"))
        assert appended_annotation(plan, list(plan.labels)) is None
