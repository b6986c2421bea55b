"""The search of the context index."""

from itertools import permutations

from helpers import (
    Sender,
    context,
    keys,
    letter_weights,
    prefixes,
    some_words,
    weight_of,
    word,
    words,
)
from hypothesis import given
from hypothesis import strategies as st
from steps import steps

from ctxreuse.index import path_search
from ctxreuse.index.path_search import Match, SearchBudget, heaviest_path, sent_prefix
from ctxreuse.index.radix_tree import ContextIndex


def best_path(sent, letters, weights):
    """Return what `heaviest_path` promises, by looking at every prefix of every sequence sent."""
    usable = {prefix for one in sent for prefix in prefixes(one) if set(prefix) <= set(letters)}

    def merit(path):
        shared_by = sum(one.startswith(path) for one in sent)
        return weight_of(path, weights), shared_by, [-letters.index(letter) for letter in path]

    best = max(usable, key=merit, default="")
    return best, weight_of(best, weights)


def test_an_empty_index_matches_nothing():
    assert heaviest_path(ContextIndex().tree, 0, context("abc")) == Match((), 0)


def test_search_returns_the_path_and_its_weight():
    sender = Sender("abc", "xyz")
    match = heaviest_path(*top(sender), context("zcba"))
    assert match == Match(tuple(keys("abc")), 3)


@given(some_words, words.map(lambda letters: letters + "x"), letter_weights)
def test_search_finds_the_path_of_most_weight_like_a_look_at_every_prefix(sent, asked, weights):
    sender = Sender(*sent, weights=weights)
    assert sender.search(asked) == best_path(sent, asked, weights)


@given(some_words, words.map(lambda letters: letters + "x"), letter_weights, st.sampled_from("abx"))
def test_a_path_can_be_made_to_begin_with_a_block(sent, asked, weights, first):
    sender = Sender(*sent, weights=weights)
    (key,) = keys(first)
    match = heaviest_path(*top(sender), context(asked, weights), first=key)
    beginning_so = [one for one in sent if one.startswith(first)]
    assert (word(match.path), match.weight) == best_path(beginning_so, asked, weights)


def test_the_heaviest_path_wins_over_the_longest():
    sender = Sender("abc", "de", weights={"a": 1, "b": 1, "c": 1, "d": 2, "e": 2})
    assert sender.search("abcde") == ("de", 4)


def test_among_equal_weights_the_path_that_more_requests_share_wins():
    assert Sender("ab", "cd", "cd").search("abcd") == ("cd", 2)


def test_among_equally_shared_paths_the_retrievers_first_wins():
    sender = Sender("ab", "cd")
    assert sender.search("abcd") == ("ab", 2)
    assert sender.search("cbad") == ("cd", 2)
    assert sender.search("cabd") == ("cd", 2)


def test_a_path_may_end_inside_a_run():
    assert Sender("abcde").search("cab") == ("abc", 3)
    assert Sender("abcde").search("bcde") == ("", 0)


def test_the_heavier_branch_is_found_behind_a_lighter_start():
    sender = Sender("abx", "acd", "bcd")
    assert sender.search("dcba") == ("bcd", 3)


@given(words, st.randoms())
def test_a_sequence_that_was_inserted_is_found_again_from_any_order(letters, random):
    asked = "".join(random.sample(letters, len(letters)))
    assert Sender(letters).search(asked) == (letters, len(letters))


def test_system_texts_have_roots_of_their_own():
    sender = Sender()
    sender.send("ab", 0, "one")
    sender.send("ba", 1, "two")
    assert sender.search("abc", "one") == ("ab", 2)
    assert sender.search("abc", "two") == ("ba", 2)
    assert sender.search("abc", None) == ("", 0)


def test_a_search_with_very_many_candidates_still_returns_a_cached_path():
    everything = ["".join(order) for order in permutations("abcdef")]
    sender = Sender(*everything)
    path, weight = sender.search("abcdefg")
    assert (path in everything, weight) == (True, 6)


def top(sender, system=None):
    """Return where the search for a request with a system text starts."""
    return sender.index.tree, sender.index.root(system)


def prefix(sender, letters, system=None):
    """Return the beginning of a word that was sent in this order."""
    return letters[: sent_prefix(*top(sender, system), keys(letters))]


@given(some_words, words.map(lambda letters: letters + "x") | words)
def test_the_sent_prefix_is_the_longest_that_any_sequence_begins_with(sent, asked):
    known = {beginning for one in sent for beginning in prefixes(one)}
    expected = max((one for one in prefixes(asked) if one in known), key=len, default="")
    assert prefix(Sender(*sent), asked) == expected


def test_the_sent_prefix_keeps_the_order_that_it_is_given():
    sender = Sender("abcd", "abe", "ca")
    assert [
        prefix(sender, asked) for asked in ("abcd", "abdc", "abe", "ac", "bacd", "cab", "")
    ] == [
        "abcd",
        "ab",
        "abe",
        "a",
        "",
        "ca",
        "",
    ]


def test_nothing_was_sent_to_an_empty_index_or_with_another_system_text():
    assert prefix(Sender(), "ab") == ""
    sender = Sender()
    sender.send("ab", 0, "one")
    assert [prefix(sender, "ab", system) for system in ("one", "two", None)] == ["ab", "", ""]


def test_a_later_turn_is_no_sent_prefix():
    sender = Sender()
    end = sender.send("ab", 0)
    sender.extend(end.end, "cd", 1)
    assert [prefix(sender, asked) for asked in ("abcd", "cd")] == ["ab", ""]


def test_a_search_that_reaches_its_bound_says_so_and_returns_a_cached_path(monkeypatch):
    everything = ["".join(order) for order in permutations("abcdef")]
    sender = Sender(*everything)
    exact = heaviest_path(*top(sender), context("abcdefg"))
    assert not exact.is_cut_short
    monkeypatch.setattr(path_search, "_STEPS", -90)
    match = heaviest_path(*top(sender), context("abcdefg"))
    assert match.is_cut_short
    path = word(match.path)
    assert 0 < len(path) == match.weight
    assert any(one.startswith(path) for one in everything)


def test_searches_that_share_a_budget_take_few_steps_for_each_block_once_it_is_spent(monkeypatch):
    monkeypatch.setattr(path_search, "_STEPS_A_BATCH", 1_000)
    sender = Sender(*("".join(letters) for letters in permutations("abcde")))
    budget = SearchBudget()

    def search():
        matches.append(heaviest_path(*top(sender), context("abcde"), budget))

    matches = []
    taken = [steps(search) for _ in range(20)]
    assert not matches[0].is_cut_short
    assert all(match.is_cut_short for match in matches[10:])
    assert all(match.weight for match in matches)
    assert max(taken[10:]) < taken[0] / 4


def test_what_a_search_leaves_of_a_shared_budget_is_for_the_next_and_no_more_than_for_one(
    monkeypatch,
):
    monkeypatch.setattr(path_search, "_STEPS_A_BATCH", 0)
    sender = Sender(*("".join(letters) for letters in permutations("abcde")))
    budget = SearchBudget()
    assert heaviest_path(*top(sender), context("abcde"), budget).is_cut_short
    for _ in range(50):
        assert not heaviest_path(*top(sender), context("xyz"), budget).is_cut_short
    assert not heaviest_path(*top(sender), context("abcde"), budget).is_cut_short
    monkeypatch.setattr(path_search, "_STEPS", 0)
    assert heaviest_path(*top(sender), context("abcde"), budget).is_cut_short
