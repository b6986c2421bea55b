"""A context that comes again as it was retrieved before is sent as it was sent before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assert_keeps_the_promises, big_request, sent_ids
from tenant_sizes import bounded

from ctxreuse import Plan, ReusePlanner
from ctxreuse.ordering.repeats import SentOrders, context_digest, ranks_of
from ctxreuse.planning.tenant_state import Bounds

pytestmark = pytest.mark.usefixtures("paper_words")


def order(plan: Plan) -> str:
    return "".join(map(str, sent_ids(plan)))


def with_two_orders(again: str, **fields: str) -> ReusePlanner:
    """Return a planner whose index holds `ab`, sent once, and `ba`, sent three times."""
    planner = ReusePlanner()
    for letters in ("ab", "ba", "ba", "bax"):
        planner.plan(big_request(letters, **fields), "none")
    planner.plan(big_request(again), "none")
    return planner


def test_a_context_keeps_its_order_though_more_requests_share_another_one():
    planner = with_two_orders("yz")
    assert order(planner.plan(big_request("ab"))) == "ab"
    assert order(planner.plan(big_request("ba"))) == "ba"
    assert order(planner.plan(big_request("abx"))) == "bax"


def test_it_is_the_order_in_which_it_was_sent_last():
    planner = with_two_orders("yz")
    assert order(planner.plan(big_request("abx"))) == "bax"
    planner.plan(big_request("abx"), "none")
    planner.plan(big_request("bax"), "none")
    assert order(planner.plan(big_request("abx"))) == "abx"


def test_a_preview_shows_the_order_that_is_kept():
    planner = with_two_orders("yz")
    assert order(planner.preview(big_request("ab"))) == "ab"


def test_a_batch_keeps_the_orders_of_what_was_sent_before():
    planner = with_two_orders("yz")
    plans = planner.plan_batch([big_request(one) for one in ("ab", "ba", "yz")]).in_input_order()
    assert [order(plan) for plan in plans] == ["ab", "ba", "yz"]


def test_what_was_sent_in_a_batch_is_sent_so_again():
    planner = ReusePlanner()
    requests = [big_request(letters) for letters in ("abcd", "bxad", "dacy", "cab")]
    batch = planner.plan_batch(requests).in_input_order()
    for request, plan in zip(requests, batch, strict=True):
        assert planner.plan(request).messages() == plan.messages()


def test_long_contexts_keep_their_order():
    planner = ReusePlanner()
    long = list(range(100))
    for numbers in (long, long[::-1], long[::-1]):
        planner.plan(big_request(numbers), "none")
    plan = planner.plan(big_request(long))
    assert sent_ids(plan) == long
    assert plan.expected_cached_tokens == 100 * 100


def test_an_order_of_which_the_engine_has_lost_the_end_is_planned_anew():
    planner = ReusePlanner()
    planner.plan(big_request("bca"), "none")
    request_id = planner.plan(big_request("abc"), "none").request_id
    planner.trim(request_id, 1)
    assert order(planner.plan(big_request("abc"))) == "bca"


def test_another_system_text_or_tenant_has_orders_of_its_own():
    planner = with_two_orders("yz")
    for fields in ({"system": "Be brief."}, {"tenant": "other"}):
        for letters in ("ba", "ba"):
            planner.plan(big_request(letters, **fields), "none")
        assert order(planner.plan(big_request("ab", **fields))) == "ba"
        assert order(planner.plan(big_request("ab"))) == "ab"


def test_a_tenant_that_sends_much_does_not_make_another_one_forget():
    planner = bounded(Bounds(repeat_blocks=8))
    planner.plan(big_request("ba", tenant="quiet"), "none")
    planner.plan(big_request("ab", tenant="quiet"), "none")
    for _ in range(2):
        planner.plan(big_request("ba", tenant="quiet"), "none")
    for number in range(50):
        planner.plan(big_request([number, number + 1], tenant="noisy"), "none")
    assert planner.statistics().parts["repeat_blocks"] == (8, 8)
    assert order(planner.plan(big_request("ab", tenant="quiet"))) == "ab"


contexts = st.builds(
    lambda order, length: order[:length], st.permutations(range(3)), st.sampled_from([2, 3])
)
sent = st.lists(st.tuples(contexts, st.sampled_from(["reuse", "none", "paper"])), max_size=12)


@given(sent, contexts)
def test_whatever_else_is_sent_a_context_that_is_held_keeps_its_prompt(sent, repeated):
    planner = ReusePlanner()
    for numbers, _ in sent[::2]:
        planner.plan(big_request(numbers))
    first = planner.plan(big_request(repeated))
    for numbers, strategy in sent:
        if numbers != repeated:
            planner.plan(big_request(numbers), strategy)
    again = planner.plan(big_request(repeated))
    assert_keeps_the_promises(again)
    assert again.messages() == first.messages()
    assert again.expected_cached_tokens == 100 * len(repeated)


keys = st.lists(st.binary(min_size=16, max_size=16), min_size=2, max_size=8, unique=True)


@given(keys, st.randoms(use_true_random=False))
def test_orders_come_back_as_they_were_noted(retrieved, random):
    orders, digest = SentOrders(), context_digest(None, retrieved)
    sent = random.sample(retrieved, len(retrieved))
    orders.note(digest, ranks_of(sent, retrieved))
    assert orders.order(digest, retrieved) == sent
    assert orders.size == (1 if sent == retrieved else len(sent))
    assert context_digest(b"s" * 16, retrieved) != digest
    assert context_digest(None, retrieved[1:]) != digest
    orders.forget_oldest()
    assert orders.order(digest, retrieved) is None
    assert orders.size == 0


def test_the_least_recently_sent_context_is_forgotten_first():
    orders = SentOrders(max_blocks=4)
    one, two, three = b"one", b"two", b"three"
    for name in (one, two, one, three):
        orders.note(name, (1, 0))
    assert [orders.order(name, "ab") for name in (one, two, three)] == [
        ["b", "a"],
        None,
        ["b", "a"],
    ]


@given(st.permutations([(0, 1, 2), (1, 0, 2), (2, 1, 0)]))
def test_planners_agree_whichever_order_they_hear_of_first(heard):
    orders = SentOrders()
    orders.note(b"it", heard[0])
    for ranks in heard[1:]:
        orders.note_others(b"it", ranks)
    assert orders.order(b"it", "abc") == ["a", "b", "c"]
