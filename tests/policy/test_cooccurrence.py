import pytest
from helpers import context, keys, word
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.memory.sent_log import Cooccurrence
from ctxreuse.policy import reuse

words = st.lists(st.sampled_from("abcdef"), unique=True, max_size=5).map("".join)
letter_weights = st.fixed_dictionaries({letter: st.integers(1, 9) for letter in "abcdef"})


def recent_requests(sent, **bounds):
    recent = Cooccurrence(**bounds)
    for letters in sent:
        recent.add(keys(letters))
    return recent


def remembered(sent, window, max_entries):
    """Return the requests that the bounds leave."""
    kept = []
    for letters in sent:
        kept = [*kept, letters][-window:]
        while sum(map(len, kept)) > max_entries:
            kept.pop(0)
    return kept


def found(recent, placed, rest, weights=None, missing=0):
    members = recent.members(keys(placed + rest))
    return reuse.continuation(members, keys(placed), context(rest, weights), missing)


def continuation(recent, placed, rest, weights=None):
    return word(found(recent, placed, rest, weights).order)


def naive_continuation(sent, placed, rest, weights):
    """The same rule, with a list of requests instead of bit sets."""

    def together(letters):
        return sum(set(letters) <= set(one) for one in sent)

    firsts = [letter for letter in rest if together(placed + letter)]
    firsts.sort(key=lambda letter: -together(placed + letter))
    most, of = together(placed + firsts[0]) if firsts else 0, together(placed) if placed else 0
    if most < 2 and not 0 < of <= 5 * most:
        return rest
    best, best_value = "", -1
    for first in firsts[:10]:
        order, value = "", 0
        following = first
        while following:
            order += following
            value += together(placed + order) * weights[following]
            left = [one for one in firsts if one not in order and together(placed + order + one)]
            following = max(left, key=lambda one: together(placed + order + one), default="")
        if value > best_value:
            best, best_value = order, value
    return best + "".join(letter for letter in rest if letter not in best)


@given(st.lists(words, max_size=15), st.integers(1, 6), st.integers(0, 12))
def test_counts_equal_a_look_at_the_last_requests(sent, window, max_entries):
    recent = recent_requests(sent, window=window, max_entries=max_entries)
    kept = remembered(sent, window, max_entries)
    assert recent.entries == sum(map(len, kept))
    assert {key.decode(): bits.bit_count() for key, bits in recent._members.items()} == {
        letter: sum(letter in one for one in kept) for letter in set("".join(kept))
    }


@given(
    st.lists(words, max_size=12),
    st.integers(1, 6),
    st.integers(0, 20),
    words,
    words,
    letter_weights,
)
def test_the_order_is_that_of_a_rule_on_lists(sent, window, max_entries, placed, rest, weights):
    rest = "".join(letter for letter in rest if letter not in placed)
    recent = recent_requests(sent, window=window, max_entries=max_entries)
    kept = remembered(sent, window, max_entries)
    order = continuation(recent, placed, rest, weights)
    assert sorted(order) == sorted(rest)
    assert order == naive_continuation(kept, placed, rest, weights)


@pytest.mark.parametrize(
    ("sent", "placed", "rest", "order"),
    [
        (["abc", "abd", "abd"], "a", "cdb", "bdc"),  # first what came always, then what mostly
        (["ab", "cd", "cd"], "", "abcd", "cdab"),  # nothing placed: the most popular pair first
        (["abc"], "", "xcy", "xcy"),  # one request alone is no evidence
        (["ab", "a", "a", "a", "a"], "a", "cb", "bc"),  # nor is one in more than five
        (["ab", "a", "a", "a", "a", "a"], "a", "cb", "cb"),
        (["ab", "b"], "", "ab", "ba"),  # all who had a had b, but b alone is shared by two
    ],
)
def test_blocks_follow_by_how_often_they_came_with_all_before_them(sent, placed, rest, order):
    assert continuation(recent_requests(sent), placed, rest) == order


@given(st.lists(words, max_size=15), words, letter_weights, st.integers(-60, 0))
def test_a_continuation_that_reaches_its_bound_says_so_and_is_whole(sent, rest, weights, bound):
    recent = recent_requests(sent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse, "_STEPS", bound)
        patch.setattr(reuse, "_STEPS_A_BLOCK", 1)
        cut = found(recent, "", rest, weights)
    assert sorted(cut.order) == sorted(context(rest))
    whole = continuation(recent, "", rest, weights)
    assert word(cut.order) == whole or cut.is_cut_short


def test_what_requests_share_counts_from_the_shortest_prefix_that_is_kept():
    recent = recent_requests(["ab"] * 3 + ["cdef"] * 2)
    assert continuation(recent, "", "cdefab", dict.fromkeys("abcdef", 10)) == "cdefab"
    assert word(found(recent, "", "abcdef", dict.fromkeys("abcdef", 10), 30).order) == "cdefab"
    assert word(found(recent, "", "xab", dict.fromkeys("abx", 10), 30).order) == "xab"
