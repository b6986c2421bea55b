import pytest
from example_counts import examples
from helpers import tree_weight
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.policy import clustering
from ctxreuse.policy.clustering import merge_heaviest, reuse_orders

BLOCKS = 5


def batches(max_contexts, max_blocks=BLOCKS):
    context = st.lists(st.integers(0, max_blocks - 1), unique=True, max_size=max_blocks)
    return st.lists(context, max_size=max_contexts)


def block_weights(number=BLOCKS):
    return st.lists(st.integers(1, 9), min_size=number, max_size=number)


def total_weight(contexts, weights):
    return sum(weights[block] for context in contexts for block in context)


def partitions(items):
    """Yield every way to put the items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


def best_saving(contexts, weights, placed=frozenset()):
    """Return the most weight that any prefix tree saves, over all groupings of the contexts."""
    best = 0
    for groups in partitions(contexts):
        saved = 0
        for group in groups:
            common = frozenset.intersection(*map(frozenset, group)) - placed
            if len(group) > 1 and common:
                saved += (len(group) - 1) * sum(weights[block] for block in common)
                saved += best_saving(group, weights, placed | common)
        best = max(best, saved)
    return best


def test_the_heavier_common_blocks_decide():
    contexts = [[0, 1, 2], [3, 2, 0], [4, 1]]
    assert reuse_orders(contexts, [1, 1, 1, 1, 1]) == [[0, 2, 1], [0, 2, 3], [4, 1]]
    assert reuse_orders(contexts, [1, 9, 1, 1, 1]) == [[1, 0, 2], [3, 2, 0], [1, 4]]


def test_common_blocks_of_the_largest_cluster_come_first():
    contexts = [[3, 2, 1, 0], [0, 1, 2, 4], [0, 1, 5], [6, 0]]
    assert reuse_orders(contexts, [1] * 7) == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 6]]


def test_a_run_of_common_blocks_stands_in_the_order_of_its_earliest_context():
    assert reuse_orders([[5, 2, 1], [1, 2, 4]], [1] * 6) == [[2, 1, 5], [2, 1, 4]]


@pytest.mark.parametrize("copies", [1, 300])  # searched one by one, and as arrays
def test_what_is_shorter_than_a_cache_keeps_is_not_merged(copies):
    contexts = [[2, 0, 1], [3, 1, 0], [4, 0]] * copies
    assert reuse_orders(contexts, [1] * 5, least=2)[:3] == [[0, 1, 2], [0, 1, 3], [4, 0]]
    assert reuse_orders(contexts, [1] * 5, least=3)[:3] == contexts[:3]


@given(batches(8), block_weights())
def test_contexts_of_the_same_blocks_get_the_same_order(contexts, weights):
    orders = reuse_orders(contexts, weights)
    order_of = {frozenset(order): order for order in orders}
    assert orders == [order_of[frozenset(context)] for context in contexts]


@given(batches(6, max_blocks=12), block_weights(12))
def test_blocks_shared_with_nobody_come_last_in_the_retrievers_order(contexts, weights):
    for position, (context, order) in enumerate(
        zip(contexts, reuse_orders(contexts, weights), strict=True)
    ):
        others = {b for i, other in enumerate(contexts) if i != position for b in other}
        own = [block for block in context if block not in others]
        assert [block for block in order if block in own] == own
        if len(own) == len(context):
            assert order == context


@given(batches(8), block_weights())
def test_two_contexts_that_share_the_most_weight_are_merged(contexts, weights):
    saved = total_weight(contexts, weights) - tree_weight(reuse_orders(contexts, weights), weights)
    heaviest_pair = max(
        (
            sum(weights[block] for block in set(one) & set(two))
            for i, one in enumerate(contexts)
            for two in contexts[:i]
        ),
        default=0,
    )
    assert saved >= 0.7 * heaviest_pair


@examples(300)
@given(batches(4), block_weights())
def test_at_least_half_of_the_best_possible_saving_is_found(contexts, weights):
    orders = reuse_orders(contexts, weights)
    saved = total_weight(contexts, weights) - tree_weight(orders, weights)
    assert saved >= best_saving(contexts, weights) / 2


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), block_weights(4))
def test_one_group_with_a_common_block_saves_all_that_can_be_saved(groups, weights):
    contexts = [[10 + position, group] for position, group in enumerate(groups)]
    all_weights = weights + [1] * (6 + len(groups))
    saved = total_weight(contexts, all_weights) - tree_weight(
        reuse_orders(contexts, all_weights), all_weights
    )
    assert saved == sum((groups.count(group) - 1) * weights[group] for group in set(groups))


@given(batches(40, max_blocks=12), block_weights(12))
def test_few_and_many_entries_are_searched_with_the_same_result(contexts, weights):
    contents = list(dict.fromkeys(tuple(sorted(context)) for context in contexts))
    found = []
    for most in (0, len(contents) * 12):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(clustering, "_FEW_ENTRIES", most)
            found.append(merge_heaviest(contents, weights))
    assert found[0] == found[1]


MANY = 5_000


def test_thousands_of_disjoint_contexts_stay_as_they_are():
    contexts = [[2 * i + 1, 2 * i] for i in range(MANY)]
    assert reuse_orders(contexts, [1] * 2 * MANY) == contexts


def test_thousands_of_contexts_of_the_same_blocks_get_the_order_of_the_first():
    contexts = [[2, 0, 1], *([0, 1, 2] for _ in range(MANY))]
    assert reuse_orders(contexts, [1] * 3) == [[2, 0, 1]] * (MANY + 1)


def test_thousands_of_contexts_around_one_block_share_it():
    contexts = [[i, 0] for i in range(1, MANY + 1)]
    assert reuse_orders(contexts, [1] * (MANY + 1)) == [[0, i] for i in range(1, MANY + 1)]
