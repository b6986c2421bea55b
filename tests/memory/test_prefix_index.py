from itertools import permutations

import pytest
from example_counts import examples
from helpers import (
    Sender,
    check_index,
    context,
    held,
    ids_at,
    keys,
    letter_weights,
    nodes_of,
    prefixes,
    shape,
    size_of,
    some_words,
    weight_of,
    word,
    words,
)
from hypothesis import example, given
from hypothesis import strategies as st
from steps import steps

from ctxreuse.memory import prefix_index
from ctxreuse.memory.prefix_index import Evicted, IndexStatistics, SearchBudget


@pytest.fixture
def sender():
    return Sender()


def test_request_ids_of_different_types_are_different_requests(sender):
    sender.send("a", 1)
    sender.send("b", "1")
    assert sender.evict(["1"]) == Evicted(1, 1, ())
    assert shape(sender.index) == {"a": [1]}


def test_a_chain_of_five_thousand_turns_needs_no_recursion(sender):
    node = sender.send("a", 0).end
    for number in range(1, 5_000):
        node = sender.extend(node, "b", number).end
    assert size_of(sender.index) == IndexStatistics(5_000, 5_000, 5_000)
    check_index(sender.index)
    assert sender.search("ab") == ("a", 1)
    assert [sender.index.evict_oldest(1) for _ in range(10)] == [1] * 10
    assert sender.evict(range(4_990)) == Evicted(4_990, 4_990, ())
    assert nodes_of(sender.index) == []


def test_a_turn_takes_the_same_work_however_long_its_conversation_is():
    def turn_after(turns):
        sender = Sender()
        node = sender.send("a", 0).end
        for number in range(1, turns):
            node = sender.extend(node, "b", number).end
        return lambda: sender.extend(node, "b", turns)

    assert steps(turn_after(2_000)) <= steps(turn_after(10)) + 100  # some ids beside it


@given(some_words, st.lists(st.integers(0, 9), unique=True))
def test_evicting_requests_leaves_exactly_what_the_others_sent(sent, gone):
    sender = Sender(*sent)
    before = sender.index.tokens
    evicted = sender.evict(gone)

    kept = {one for i, letters in enumerate(sent) if i not in gone for one in prefixes(letters)}
    assert held(sender.index) == kept
    known = [number for number in gone if number < len(sent)]
    unknown = tuple(number for number in gone if number >= len(sent))
    assert evicted == Evicted(len(known), before - len(kept), unknown)
    check_index(sender.index)


def ends(index):
    """Return the block sequence at whose end each request stands."""
    return {id_: path.replace(".", "") for path, ids in shape(index).items() for id_ in ids}


def least_recently_used(held_since, capacity, weights):
    """Drop one block after the other, always from the sequence whose last use is the oldest."""
    while sum(weights[path[-1]] for path in held_since) > capacity:
        inner = {path[:-1] for path in held_since}
        oldest = min((path for path in held_since if path not in inner), key=held_since.get)
        del held_since[oldest]


@given(st.lists(words, max_size=12), letter_weights, st.integers(0, 20))
def test_a_bounded_index_evicts_block_by_block_like_a_naive_cache(sent, weights, capacity):
    sender = Sender(weights=weights, capacity_tokens=capacity)
    naive, end_of = {}, {}
    for number, letters in enumerate(sent):
        hits = [path for path in prefixes(letters) if path in naive]
        assert sender.send(letters, number).blocks_before == len(hits)
        naive |= dict.fromkeys(prefixes(letters), number)
        end_of[number] = letters
        least_recently_used(naive, capacity, weights)
        for earlier, end in end_of.items():
            end_of[earlier] = max((path for path in prefixes(end) if path in naive), default="")
        assert held(sender.index) == set(naive)
        # a request whose last blocks left ends where the rest of it ends
        assert ends(sender.index) == {
            earlier: end for earlier, end in end_of.items() if end or not sent[earlier]
        }
        check_index(sender.index)


def test_too_many_nodes_push_out_the_least_recently_used_leaves():
    sender = Sender("a", "b", "c", max_nodes=3)
    sender.send("a", 3)
    sender.send("d", 4)
    assert shape(sender.index) == {"d": [4], "c": [2], "a": [0, 3]}


def test_more_than_four_request_ids_a_node_push_out_the_oldest_ids_but_not_their_blocks():
    sender = Sender("ab", "c", "c", "c", "c", "c", "c", "c", max_nodes=2)
    assert shape(sender.index) == {"ab": [0], "c": [1, 2, 3, 4, 5, 6, 7]}
    sender.send("c", 8)
    assert shape(sender.index) == {"ab": [], "c": [1, 2, 3, 4, 5, 6, 7, 8]}
    assert sender.evict([0]) == Evicted(0, 0, (0,))
    check_index(sender.index)


def test_trimming_a_request_cuts_its_path_and_what_is_behind_the_first_lost_block():
    sender = Sender(
        "abcd", "abce", "abf", "ag", "h", weights=dict(zip("abcdefgh", range(1, 9), strict=True))
    )
    assert sender.trim(0, 2) == Evicted(1, 3 + 4 + 5, ())
    assert shape(sender.index) == {
        "a": [],
        "a.b": [0, 1],
        "a.b.f": [2],  # another branch: nothing was said of it
        "a.g": [3],
        "h": [4],
    }
    check_index(sender.index)


def test_shortening_a_path_takes_the_same_work_however_many_requests_end_there():
    def shortening(requests):
        sender = Sender(*prefixes("abcdefghijklmnop"))
        for number in range(requests):
            sender.send("abcdefghijklmnop", f"later {number}")
        return lambda: [sender.index.evict_oldest(1) for _ in range(15)]

    assert steps(shortening(2_000)) <= steps(shortening(2)) + 500  # queue entries out of date


few_ids = st.integers(0, 5)

operations = st.one_of(
    st.tuples(st.just("insert"), words, few_ids, st.sampled_from(["one", "two"])),
    st.tuples(st.just("extend"), words, few_ids, st.integers(0, 50)),
    st.tuples(st.just("evict"), st.lists(few_ids, max_size=3, unique=True)),
    st.tuples(st.just("evict_oldest"), st.integers(0, 6)),
    st.tuples(st.just("trim"), few_ids, st.integers(0, 4)),
    st.tuples(st.just("search"), words, st.sampled_from(["one", "two"])),
)


def end_of(index, request_id):
    return next(node for node in nodes_of(index) if request_id in ids_at(index, node))


def own_blocks(node):
    """The blocks from where a node's turn begins to its end."""
    own = ""
    while node.parent is not None:
        own = word(node.run) + own
        if node.opens_turn:
            break
        node = node.parent
    return own


@examples(300)
@given(
    st.lists(operations, max_size=30),
    letter_weights,
    st.none() | st.integers(0, 12),
    st.integers(0, 6),
)
def test_any_operations_leave_it_consistent_and_within_its_bounds(
    steps, weights, capacity, max_nodes
):
    sender = Sender(weights=weights, capacity_tokens=capacity, max_nodes=max_nodes)
    index = sender.index
    ends = []
    for step in steps:
        match step:
            case "insert", letters, request_id, system:
                ends.append(sender.send(letters, request_id, system).end)
            case "extend", letters, request_id, choice:
                end = ends[choice % len(ends)] if ends else None
                ends.append(sender.extend(end, letters, request_id, "one").end)
            case "evict", request_ids:
                known = [i for i in request_ids if i in index]
                before = index.tokens
                evicted = sender.evict(request_ids)
                assert evicted.requests == len(known)
                assert evicted.tokens == before - index.tokens
                assert evicted.unknown == tuple(i for i in request_ids if i not in known)
            case "evict_oldest", tokens:
                before = index.tokens
                assert index.evict_oldest(tokens) == before - index.tokens
            case "trim", request_id, blocks:
                is_known, paths = request_id in index, held(index)
                before = index.tokens
                evicted = sender.trim(request_id, blocks)
                assert evicted.tokens == before - index.tokens
                assert evicted.unknown == (() if is_known else (request_id,))
                assert held(index) <= paths
                if request_id in index:
                    assert len(own_blocks(end_of(index, request_id))) <= blocks
            case "search", letters, system:
                path, weight = sender.search(letters, system)
                assert path in held(index) | {""}
                assert (set(path) <= set(letters), weight) == (True, weight_of(path, weights))
        check_index(index)


def test_leaves_that_are_used_again_and_again_are_found_in_short_steps(sender):
    sender.send("z", "oldest")
    for _ in range(3):
        for number in range(500):
            sender.send(chr(0x4E00 + number), number)
    sender.evict(["oldest"])
    used = []
    taken = steps(lambda: used.extend(sender.index.evict_oldest(1) for _ in range(500)))
    assert taken < 500 * 100
    assert sum(used) == 500
    assert sender.index.evict_oldest(1) == 0


def best_path(sent, letters, weights):
    """Return what `search` promises, by looking at every prefix of every sequence sent."""
    usable = {prefix for one in sent for prefix in prefixes(one) if set(prefix) <= set(letters)}

    def merit(path):
        shared_by = sum(one.startswith(path) for one in sent)
        return weight_of(path, weights), shared_by, [-letters.index(letter) for letter in path]

    best = max(usable, key=merit, default="")
    return best, weight_of(best, weights)


@example(["ab", "cd", "cd"], "abcdx", dict.fromkeys("abcdex", 1))
@given(some_words, words.map(lambda letters: letters + "x"), letter_weights)
def test_search_finds_the_path_of_most_weight_like_a_look_at_every_prefix(sent, asked, weights):
    sender = Sender(*sent, weights=weights)
    assert sender.search(asked) == best_path(sent, asked, weights)


@given(some_words, words.map(lambda letters: letters + "x"), letter_weights, st.sampled_from("abx"))
def test_a_path_can_be_made_to_begin_with_a_block(sent, asked, weights, first):
    sender = Sender(*sent, weights=weights)
    (key,) = keys(first)
    match = sender.index.search(None, context(asked, weights), first=key)
    beginning_so = [one for one in sent if one.startswith(first)]
    assert (word(match.path), match.weight) == best_path(beginning_so, asked, weights)


def prefix(sender, letters, system=None):
    """Return the beginning of a word that was sent in this order."""
    return letters[: sender.index.sent_prefix(system, keys(letters))]


@given(some_words, words.map(lambda letters: letters + "x") | words)
def test_the_sent_prefix_is_the_longest_that_any_sequence_begins_with(sent, asked):
    known = {beginning for one in sent for beginning in prefixes(one)}
    expected = max((one for one in prefixes(asked) if one in known), key=len, default="")
    assert prefix(Sender(*sent), asked) == expected


def test_a_search_that_reaches_its_bound_says_so_and_returns_a_cached_path(monkeypatch):
    everything = ["".join(order) for order in permutations("abcdef")]
    sender = Sender(*everything)
    exact = sender.index.search(None, context("abcdefg"))
    assert len(exact.path) == 6
    assert "cached_paths" not in exact.limits
    monkeypatch.setattr(prefix_index, "_STEPS", -90)
    match = sender.index.search(None, context("abcdefg"))
    assert match.limits == ("cached_paths",)
    path = word(match.path)
    assert 0 < len(path) == match.weight
    assert any(one.startswith(path) for one in everything)


def test_searches_that_share_a_budget_take_few_steps_for_each_block_once_it_is_spent(monkeypatch):
    monkeypatch.setattr(prefix_index, "_STEPS_A_BATCH", 1_000)
    sender = Sender(*("".join(letters) for letters in permutations("abcde")))
    budget = SearchBudget()

    def search():
        matches.append(sender.index.search(None, context("abcde"), budget))

    matches = []
    taken = [steps(search) for _ in range(20)]
    assert not matches[0].limits
    assert all("cached_paths" in match.limits for match in matches[10:])
    assert all(match.weight for match in matches)
    assert max(taken[10:]) < taken[0] / 4


def test_what_a_search_leaves_of_a_shared_budget_is_for_one_more(monkeypatch):
    monkeypatch.setattr(prefix_index, "_STEPS_A_BATCH", 0)
    sender = Sender(*("".join(letters) for letters in permutations("abcde")))
    budget = SearchBudget()
    assert sender.index.search(None, context("abcde"), budget).limits
    for _ in range(50):
        assert not sender.index.search(None, context("xyz"), budget).limits
    assert not sender.index.search(None, context("abcde"), budget).limits
    monkeypatch.setattr(prefix_index, "_STEPS", 0)
    assert sender.index.search(None, context("abcde"), budget).limits
