import planning_helpers
import pytest
from helpers import LetterView, word
from hypothesis import given
from hypothesis import strategies as st
from paper_words import no_words

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.policy.as_retrieved import AS_RETRIEVED
from ctxreuse.policy.batch import arrange
from ctxreuse.policy.paper import Paper
from ctxreuse.policy.reuse import REUSE

STRATEGIES = [strategy for strategy in planning_helpers.STRATEGIES if strategy != "none"]
LATER = ({"role": "user", "content": "Before?"},)


def asked(letters, *, cached="", weights=None, **fields):
    return LetterView(letters, weights=weights, cached=cached, request=ContextRequest([], **fields))


def later_turn(letters, conversation_id, **fields):
    return asked(letters, conversation_id=conversation_id, history=LATER, **fields)


def arranged(batch, strategy="reuse", words=no_words):
    for view in batch:
        view.words = words(len(view.weights))
    views = {number: view for number, view in enumerate(batch) if not view.request.history}
    requests = [view.request for view in batch]
    policies = {one.name: one for one in (REUSE, Paper(), AS_RETRIEVED)}
    arrangement = arrange(requests, views, policies[strategy])
    orders = [word(order) for order in arrangement.orders]
    for number, view in enumerate(batch):
        orders[number] = orders[number] if number in views else word(view.weights)
    return orders, arrangement.execution


def test_each_context_stands_behind_its_cached_path():
    batch = [asked("dcba", cached="ab"), asked("edba", cached="ab"), asked("eda")]
    assert arranged(batch) == (["abdc", "abde", "eda"], [0, 1, 2])


def test_contexts_behind_different_cached_paths_are_not_merged():
    # all three hold x, but only the first two can share it
    batch = [asked("pxa", cached="a"), asked("xqa", cached="a"), asked("xrb", cached="b")]
    assert arranged(batch) == (["axp", "axq", "bxr"], [0, 1, 2])


@pytest.mark.parametrize(
    ("heavy", "orders"), [("a", ["abx", "ay", "zb"]), ("b", ["bax", "ya", "bz"])]
)
def test_weights_decide_what_is_shared(heavy, orders):
    weights = {**dict.fromkeys("abxyz", 1), heavy: 9}
    batch = [asked(letters, weights=weights) for letters in ("abx", "ya", "zb")]
    assert arranged(batch)[0] == orders


def test_a_context_that_shares_no_more_than_words_on_its_order_cost_keeps_the_retrievers():
    weights = {**dict.fromkeys("abcxyz", 1), "a": 8, "b": 9}
    batch = [asked(letters, weights=weights) for letters in ("xa", "ya", "zb", "cb")]
    assert arranged(batch) == (["ax", "ay", "bz", "bc"], [0, 1, 2, 3])
    assert arranged(batch, words=lambda blocks: 4 * blocks)[0] == ["xa", "ya", "bz", "bc"]
    assert arranged(batch, words=lambda blocks: 5 * blocks)[0] == ["xa", "ya", "zb", "cb"]


def test_later_turns_without_their_first_turn_run_at_the_end_conversation_by_conversation():
    batch = [
        later_turn("ba", 1),
        later_turn("dc", 2),
        later_turn("fe", None),
        later_turn("cd", 1),
        asked("x"),
        later_turn("ef", None),
    ]
    assert arranged(batch) == (["ba", "dc", "fe", "cd", "x", "ef"], [4, 0, 3, 1, 2, 5])


def test_requests_with_a_conversation_but_without_history_stand_on_their_own():
    batch = [
        asked("ab", conversation_id=1),
        asked("xy", conversation_id=1),
        asked("xy", conversation_id=1),
    ]
    assert arranged(batch) == (["ab", "xy", "xy"], [1, 2, 0])


words = st.lists(st.sampled_from("abcde"), unique=True, max_size=4).map("".join)


@st.composite
def requests(draw, histories=(None, (), LATER, LATER)):
    conversation_id = draw(st.sampled_from([None, 1, 2, "1"]))
    return asked(
        draw(words),
        conversation_id=conversation_id,
        history=draw(st.sampled_from(histories)),
        tenant=draw(st.sampled_from(["", "t"])),
        system=draw(st.sampled_from([None, "s"])),
    )


batches = st.lists(requests(), max_size=10)
strategies = st.sampled_from(STRATEGIES)


@given(batches, strategies)
def test_orders_and_execution_are_permutations(batch, strategy):
    orders, execution = arranged(batch, strategy)
    assert sorted(execution) == list(range(len(batch)))
    for order, one in zip(orders, batch, strict=True):
        retrieved = word(one.weights)
        assert sorted(order) == sorted(retrieved)
        if one.request.history:
            assert order == retrieved


@given(batches, strategies)
def test_turns_of_every_conversation_run_in_input_order(batch, strategy):
    _, execution = arranged(batch, strategy)
    turns = {}
    for position in execution:
        request = batch[position].request
        if request.conversation_id is not None and request.history is not None:
            name = (request.tenant, type(request.conversation_id), request.conversation_id)
            turns.setdefault(name, []).append(position)
    assert all(positions == sorted(positions) for positions in turns.values())


@given(batches, strategies)
def test_a_tenants_plans_do_not_depend_on_other_tenants(batch, strategy):
    orders, execution = arranged(batch, strategy)
    for tenant in ("", "t"):
        own = [i for i, one in enumerate(batch) if one.request.tenant == tenant]
        own_orders, own_execution = arranged([batch[i] for i in own], strategy)
        assert own_orders == [orders[i] for i in own]
        assert [own[i] for i in own_execution] == [i for i in execution if i in own]


@given(st.lists(requests(histories=[None]), max_size=10), strategies)
def test_requests_of_one_tenant_and_system_text_run_together(batch, strategy):
    _, execution = arranged(batch, strategy)
    groups = [(batch[i].request.tenant, batch[i].request.system) for i in execution]
    sizes = [groups.count(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    for group in set(groups):
        places = [i for i, one in enumerate(groups) if one == group]
        assert places == list(range(places[0], places[0] + len(places)))
