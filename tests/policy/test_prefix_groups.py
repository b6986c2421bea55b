from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.distributed.planned_table import batch_order, prefix_groups
from ctxreuse.policy.view import depth_first_order

sequences = st.lists(st.lists(st.sampled_from("abc"), max_size=4).map("".join), max_size=30)
sizes_of_batches = st.integers(1, 7)


def groups_of(ordered, most):
    start, groups = 0, []
    for size in prefix_groups(ordered, most):
        groups.append(ordered[start : start + size])
        start += size
    assert start == len(ordered)
    return groups


def depth_first(words):
    return [words[position] for position in depth_first_order(words)]


def cut_groups(sizes, most):
    """Return the groups that stand in two batches, when these are sent one after the other."""
    end, cut = 0, []
    for group in batch_order(sizes, most):
        start, end = end, end + sizes[group]
        if start // most != (end - 1) // most:
            cut.append(group)
    return cut


def test_a_group_is_the_largest_subtree_that_fits():
    ordered = ["a", "ab", "abc", "acd", "b", "ba"]
    assert groups_of(ordered, 4) == [["a", "ab", "abc", "acd"], ["b", "ba"]]
    assert groups_of(ordered, 2) == [["a"], ["ab", "abc"], ["acd"], ["b", "ba"]]


def test_each_batch_begins_with_the_next_group_and_is_filled():
    assert batch_order([3, 3, 1, 1], 4) == [0, 2, 1, 3]
    assert batch_order([2, 4, 1, 1, 2], 4) == [0, 4, 1, 2, 3]
    assert batch_order([5, 3, 2, 4, 2, 1, 3], 6) == [0, 5, 1, 6, 2, 3, 4]
    assert batch_order([1, 2, 2, 2, 4], 5) == [0, 4, 1, 2, 3]


@given(sequences, sizes_of_batches)
def test_groups_fit_into_a_batch_and_share_their_first_entry(words, most):
    for group in groups_of(depth_first(words), most):
        assert len(group) <= most
        assert len(group) == 1 or len({word[:1] for word in group}) == 1


@given(sequences, sizes_of_batches)
def test_no_group_could_take_in_its_whole_subtree(words, most):
    ordered = depth_first(words)
    for group in groups_of(ordered, most):
        if len(group) == len({*group}) == 1:
            continue
        shared = next(
            depth for depth in range(5, -1, -1) if len({word[:depth] for word in group}) == 1
        )
        prefix = group[0][:shared]
        subtree = [word for word in ordered if word.startswith(prefix)]
        assert group == subtree or len(subtree) > most


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(5, 9))
def test_every_group_is_sent_once_and_is_cut_only_where_none_fits(sizes, most):
    order = batch_order(sizes, most)
    assert sorted(order) == list(range(len(sizes)))
    end = 0
    for place, group in enumerate(order):
        room = most - end % most
        if sizes[group] > room:
            assert all(sizes[later] > room for later in order[place:])
        end += sizes[group]


@given(st.lists(st.integers(2, 5), max_size=20), st.integers(5, 9))
def test_none_is_cut_where_single_requests_fill_the_batches(sizes, most):
    assert cut_groups(sizes + [1] * (most * len(sizes)), most) == []
