from collections import defaultdict

import pytest
from helpers import Sender, context, keys, word
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS
from ctxreuse.ordering.online import Cooccurrence, OnlineOrder
from ctxreuse.ordering.paper import paper_order

WORDS = DEFAULT_TEMPLATES.order_tokens
HEAVY = defaultdict(lambda: 100)
LIGHT = defaultdict(lambda: 1)

words = st.lists(st.sampled_from("abcd"), unique=True).map("".join)
some_words = st.lists(words, max_size=8)
# the papers' C1 {2, 1, 3}, C2 {2, 6, 1} and C3 {4, 1, 0}, as Algorithm 4 orders them
PAPERS_BATCH = ("123", "126", "140")
PAPERS_ARRIVALS = [("214", "124"), ("578", "578"), ("129", "129"), ("140", "140")]


def recent_requests(sent):
    recent = Cooccurrence()
    for letters in sent:
        recent.add(keys(letters))
    return recent


def reuse_order(letters, sent=(), recent=(), weights=HEAVY):
    """Order a context on top of an index that holds `sent`, after some recent requests."""
    index = Sender(*sent, weights=weights).index
    online = OnlineOrder(recent_requests(recent))
    return word(online.order(context(letters, weights), index.tree, index.root(None)))


def papers_order(letters, sent, alpha=0.001):
    index = Sender(*sent).index
    return word(paper_order(context(letters), index.tree, index.root(None), alpha).order)


@pytest.mark.parametrize(("asked", "order"), PAPERS_ARRIVALS)
def test_the_papers_arrivals_get_the_papers_orders(asked, order):
    assert reuse_order(asked, PAPERS_BATCH) == order


def test_without_cache_and_history_the_retrievers_order_stays():
    assert reuse_order("cab") == "cab"
    assert reuse_order("") == ""


def test_the_cached_path_comes_first_and_the_rest_as_retrieved():
    assert reuse_order("dcba", sent=["ab9"]) == "abdc"


def test_a_context_that_is_cached_as_a_whole_is_sent_as_it_was():
    assert reuse_order("abc", sent=["cba", "ab"]) == "cba"


def test_the_rest_follows_by_what_came_together_with_the_cached_path():
    recent = ["abd", "abd", "abc"]
    assert reuse_order("cdba", sent=["ab9"], recent=recent) == "abdc"


def test_without_a_cached_path_the_most_shared_blocks_come_first():
    assert reuse_order("cba", sent=["9"], recent=["ab", "ab", "c"]) == "bac"


def test_behind_a_text_that_nothing_was_sent_with_the_retrievers_order_stays():
    """What others sent behind other texts is not cached behind this one."""
    assert reuse_order("cba", recent=["ab", "ab", "c"]) == "cba"


def test_a_path_shorter_than_an_engine_block_moves_nothing():
    weights = {"a": 1, "b": ENGINE_BLOCK_TOKENS - 1, "c": ENGINE_BLOCK_TOKENS}
    assert reuse_order("ab", sent=["b"], weights=weights) == "ab"
    assert reuse_order("ac", sent=["c"], weights=weights) == "ca"


@given(words, some_words, some_words, st.sampled_from([HEAVY, LIGHT]))
def test_every_order_is_a_permutation_that_begins_with_the_best_cached_path(
    asked, sent, recent, weights
):
    order = reuse_order(asked, sent, recent, weights)
    path, weight = Sender(*sent, weights=weights).search(asked)
    assert sorted(order) == sorted(asked)
    if weight >= ENGINE_BLOCK_TOKENS:
        assert any(one.startswith(order[: len(path)]) for one in sent)


LIGHT_PAIRS = ["ac", "ba", "ad", "ba"] * 8


def scattered_pairs(number, one="a", two="b"):
    """Return requests for two blocks, in any order and with a block of their own between."""
    fillers = [chr(0x4E00 + i) for i in range(number)]
    return [one + own + two if i % 2 else own + two + one for i, own in enumerate(fillers)]


def learn(online, recent, sent, weights):
    for letters in sent:
        online.learn(context(letters, weights), None)
        recent.add(keys(letters))
    return online


def after(sent, weights):
    """Return the online order of a tenant who sent these requests."""
    recent = Cooccurrence()
    return learn(OnlineOrder(recent, WORDS), recent, sent, weights)


def order_of(online, letters, weights):
    """Return the order where nothing of it is cached."""
    index = Sender("9").index
    return word(online.order(context(letters, weights), index.tree, index.root(None)))


def test_at_first_cooccurrence_orders():
    online = after(LIGHT_PAIRS[:31], LIGHT)
    assert online.follows_cooccurrence
    assert order_of(online, "ca", LIGHT) == "ac"


def test_cooccurrence_goes_on_where_it_shares_more():
    online = after(scattered_pairs(40), HEAVY)
    assert online.follows_cooccurrence
    assert order_of(online, "7b8a", HEAVY) == "ba78"


def test_the_retrievers_order_goes_on_where_moving_saves_less_than_the_annotation_costs():
    online = after(LIGHT_PAIRS, LIGHT)
    assert not online.follows_cooccurrence
    assert order_of(online, "ca", LIGHT) == "ca"


def test_a_tenant_who_comes_to_ask_otherwise_gets_the_other_continuation():
    recent = Cooccurrence()
    online = OnlineOrder(recent, WORDS)
    follows = []
    for sent, weights in ((LIGHT_PAIRS, LIGHT), (scattered_pairs(40, *"xy"), HEAVY)):
        learn(online, recent, sent, weights)
        follows.append(online.follows_cooccurrence)
    assert follows == [False, True]


def test_what_is_tried_stays_within_its_bound():
    online = OnlineOrder(Cooccurrence())
    for number in range(9_000):
        online.learn({number.to_bytes(2): 1}, None)
    assert online.node_count == 2 * 2_000


@pytest.mark.parametrize(("asked", "order"), PAPERS_ARRIVALS)
def test_algorithm_1_finds_the_papers_nodes(asked, order):
    assert papers_order(asked, PAPERS_BATCH) == order


def test_algorithm_1_descends_to_the_closest_child_not_to_the_longest_path():
    # {a, b} and {c} are as far as their overlap says; a heavier path is not looked for
    assert papers_order("acd", ["ab", "cde"]) == "cda"
    assert papers_order("abcd", ["abxyz", "cd"]) == "cdab"


def test_blocks_that_a_node_has_and_the_context_lacks_are_not_injected():
    assert papers_order("ca", ["abc"]) == "ac"
    assert papers_order("bc", ["abc"]) == "bc"


def test_a_later_turn_is_no_candidate():
    sender = Sender()
    sender.extend(sender.send("a", 0).end, "bc", 1)
    assert (
        word(paper_order(context("cba"), sender.index.tree, sender.index.root(None), 0.001).order)
        == "acb"
    )


def test_among_children_at_equal_distance_the_more_shared_wins_then_the_older():
    assert papers_order("ab", ["b", "a", "a"], alpha=0) == "ab"
    assert papers_order("ab", ["b", "a"], alpha=0) == "ba"


@given(words, some_words)
def test_the_papers_order_is_a_cached_path_and_then_the_retrievers_order(asked, sent):
    order = papers_order(asked, sent)
    assert sorted(order) == sorted(asked)
    prefixes = {one[:end] for one in sent for end in range(len(one) + 1)} | {""}
    assert any(
        order == path + "".join(letter for letter in asked if letter not in path)
        for path in prefixes
        if set(path) <= set(asked)
    )
