from collections import defaultdict

from helpers import LetterView, Sender, context, keys, word
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.tokens import ENGINE_BLOCK_TOKENS
from ctxreuse.memory.tenants import TenantState
from ctxreuse.policy.paper import paper_order
from ctxreuse.policy.reuse import REUSE

HEAVY = defaultdict(lambda: 100)
LIGHT = defaultdict(lambda: 1)

words = st.lists(st.sampled_from("abcd"), unique=True).map("".join)
some_words = st.lists(words, max_size=8)


def reuse_order(letters, sent=(), recent=(), weights=HEAVY, *, words=0):
    """Order a context on top of an index that holds `sent`, after some recent requests."""
    state = TenantState("", None, 100)
    for number, one in enumerate(sent):
        state.index.insert(None, keys(one), [weights[letter] for letter in one], number, number)
    for one in recent:
        state.recent.add(keys(one))
    return word(REUSE.order(LetterView(letters, state, weights, words=words)))


def papers_order(letters, sent, alpha=0.001):
    index = Sender(*sent).index
    return word(paper_order(context(letters), index.roots.get(None), alpha)[0])


def test_the_cached_path_comes_first_and_the_rest_as_retrieved():
    assert reuse_order("dcba", sent=["ab9"]) == "abdc"


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
def test_every_order_is_a_permutation_behind_the_best_cached_path(asked, sent, recent, weights):
    order = reuse_order(asked, sent, recent, weights)
    path, weight = Sender(*sent, weights=weights).search(asked)
    assert sorted(order) == sorted(asked)
    if weight >= ENGINE_BLOCK_TOKENS:
        assert any(one.startswith(order[: len(path)]) for one in sent)


def test_what_came_together_moves_only_where_it_saves_more_than_the_words_on_it_cost():
    often = ["ab"] * 4
    for words, order in ((0, "bac"), (199, "bac"), (200, "cba")):
        assert reuse_order("cba", ["9"], often, words=words) == order
    assert reuse_order("cba", ["9"], often, LIGHT, words=11) == "cba"


def test_a_cached_path_comes_first_only_where_it_saves_more_than_the_words_on_it_cost():
    for words, order in ((199, "abc"), (200, "cba")):
        assert reuse_order("cba", ["ab"], ["ab"], words=words) == order


def test_behind_a_path_that_moves_nothing_the_rest_pays_for_its_words_itself():
    often = ["abd"] * 4
    for words, order in ((99, "abdc"), (100, "abcd")):
        assert reuse_order("abcd", ["ab9"], often, words=words) == order


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
    assert word(paper_order(context("cba"), sender.index.roots.get(None), 0.001)[0]) == "acb"


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
