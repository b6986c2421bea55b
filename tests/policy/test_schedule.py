import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.policy.paper import paper_schedule
from ctxreuse.policy.view import depth_first_order

sequences = st.lists(
    st.lists(st.sampled_from("abc"), unique=True, max_size=3).map("".join), max_size=12
)
search_paths = st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=12)


def scheduled(batch):
    return [batch[position] for position in depth_first_order(batch)]


@pytest.mark.parametrize(
    ("batch", "order"),
    [
        (["x", "ab", "ac"], ["ab", "ac", "x"]),  # larger groups first
        (["x", "y", "a"], ["x", "y", "a"]),  # equally large: the earliest first
        (["abc", "a", "ab"], ["a", "ab", "abc"]),  # who ends at a node goes before its branches
        (["abx", "acx", "aby", "z", "acy", "acz"], ["acx", "acy", "acz", "abx", "aby", "z"]),
    ],
)
def test_shared_prefixes_run_back_to_back_larger_groups_first(batch, order):
    assert scheduled(batch) == order


def test_smaller_groups_run_first_where_that_is_wanted():
    batch = ["abc", "x", "abd", "ay", "abe"]
    assert depth_first_order(batch, largest_first=False) == [1, 3, 0, 2, 4]


@given(sequences)
def test_requests_that_share_a_prefix_are_contiguous_at_every_depth(batch):
    order = scheduled(batch)
    assert sorted(order) == sorted(batch)
    for prefix in {one[:end] for one in batch for end in range(len(one) + 1)}:
        places = [i for i, one in enumerate(order) if one.startswith(prefix)]
        assert places == list(range(places[0], places[0] + len(places)))


@given(sequences)
def test_at_every_node_larger_branches_come_before_smaller_ones(batch):
    order = scheduled(batch)
    for prefix in {one[:end] for one in batch for end in range(len(one) + 1)}:
        below = [one[len(prefix) :] for one in order if one.startswith(prefix)]
        ended = below.count("")
        assert below[:ended] == [""] * ended
        firsts = [one[0] for one in below[ended:]]
        sizes = [firsts.count(first) for first in firsts]
        assert sizes == sorted(sizes, reverse=True)


def test_very_long_sequences_need_no_recursion():
    long = list(range(5_000))
    assert depth_first_order([long, [*long, 1], long]) == [0, 2, 1]


@given(search_paths)
def test_algorithm_5_sorts_groups_by_size_and_members_by_length(paths):
    order = paper_schedule(paths)
    assert sorted(order) == list(range(len(paths)))
    branch = [paths[position][0] if paths[position] else None for position in order]
    size = [branch.count(one) for one in branch]
    assert size == sorted(size, reverse=True)
    assert [one for i, one in enumerate(branch) if one not in branch[:i]] == [
        one for i, one in enumerate(branch) if i == 0 or one != branch[i - 1]
    ]
    for one in set(branch):
        members = [p for p, its in zip(order, branch, strict=True) if its == one]
        assert members == sorted(members, key=lambda p: (-len(paths[p]), p))
