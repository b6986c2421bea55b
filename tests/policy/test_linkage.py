from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import linkage

from ctxreuse.distance import context_distance
from ctxreuse.errors import BatchTooLargeError
from ctxreuse.policy import paper
from ctxreuse.policy.paper import paper_orders

batches = st.lists(st.lists(st.integers(0, 7), unique=True, max_size=5), max_size=8)


def equation_1(one, two, alpha):
    shared = set(one) & set(two)
    if not shared:
        return 1.0
    moved = sum(abs(one.index(block) - two.index(block)) for block in shared)
    return 1 - len(shared) / max(len(one), len(two)) + alpha * moved / len(shared)


def algorithm_4(contexts, alpha):
    """ContextPilot's Algorithm 4 by the book: recursive, with the whole matrix."""
    leaves = []
    for context in contexts:
        if set(context) not in map(set, leaves):
            leaves.append(context)
    content = [set(leaf) for leaf in leaves]
    first_leaf = list(range(len(leaves)))
    children = [[] for _ in leaves]
    if len(leaves) > 1:
        matrix = np.array([equation_1(a, b, alpha) for a, b in combinations(leaves, 2)])
        for merge in linkage(matrix, method="average"):
            one, two = int(merge[0]), int(merge[1])
            content.append(content[one] & content[two])
            first_leaf.append(min(first_leaf[one], first_leaf[two]))
            children.append([one, two])

    def without_empty(nodes):
        kept = []
        for node in nodes:
            empty_inner = node >= len(leaves) and not content[node]
            kept += without_empty(children[node]) if empty_inner else [node]
        return kept

    docs, paths = {}, {}

    def align(nodes, above, path):
        for position, node in enumerate(without_empty(nodes)):
            own = [b for b in leaves[first_leaf[node]] if b in content[node] and b not in above]
            docs[node], paths[node] = above + own, [*path, position]
            align(children[node], docs[node], paths[node])

    align([len(content) - 1] if leaves else [], [], [])
    leaf_of = [[set(leaf) for leaf in leaves].index(set(context)) for context in contexts]
    return [docs[leaf] for leaf in leaf_of], [paths[leaf] for leaf in leaf_of]


@given(batches, st.sampled_from([0, 0.001, 0.01]))
@example([[2, 1, 3], [2, 6, 1], [4, 1, 0]], 0.001)
def test_orders_and_paths_equal_algorithm_4_by_the_book(contexts, alpha):
    assert paper_orders(contexts, alpha) == algorithm_4(contexts, alpha)


def test_a_tree_of_thousands_of_levels_needs_no_recursion():
    contexts = [[0, block] for block in range(1, 1_501)]
    assert paper_orders(contexts, alpha=0.001)[0] == contexts
    assert paper_orders([context[1:] for context in contexts], alpha=0.001)[0] == [
        context[1:] for context in contexts
    ]


def test_a_batch_that_no_matrix_can_hold_is_refused(monkeypatch):
    monkeypatch.setattr(paper, "MAX_CONTEXTS", 2)
    assert paper_orders([[1], [2], [1]], alpha=0.001)[0] == [[1], [2], [1]]
    with pytest.raises(BatchTooLargeError) as caught:
        paper_orders([[1], [2], [3]], alpha=0.001)
    assert str(caught.value) == (
        "strategy 'paper' compares all pairs and takes at most 2 distinct contexts, not 3; "
        "split the batch or use strategy 'reuse'"
    )


A, B, C, D = [3, 5, 1, 7], [2, 6, 3, 5], [3, 5, 8, 9], [2, 6, 4, 0]
contexts = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=6), max_size=10)


@pytest.mark.parametrize(
    ("one", "two", "distance"),
    [(A, B, 0.502), (B, C, 0.502), (B, D, 0.5), (A, C, 0.5), (A, D, 1), (C, D, 1)],
    ids=["A-B", "B-C", "B-D", "A-C", "A-D", "C-D"],
)
def test_the_papers_contexts_are_as_far_apart_as_equation_1_says(one, two, distance):
    assert context_distance(one, two, alpha=0.001) == pytest.approx(distance, abs=1e-12)
    assert context_distance(two, one, alpha=0.001) == context_distance(one, two, alpha=0.001)


def test_a_repeated_id_counts_at_its_first_position():
    assert context_distance("abab", "ab") == 0
    assert context_distance("aab", "ab") == 0


def test_ids_of_different_types_are_different_blocks():
    assert context_distance([1, 2], ["1", "2"]) == 1
    assert context_distance([1, "1"], ["1", 1], alpha=0.001) == pytest.approx(0.001)


@given(contexts, st.sampled_from([0, 0.001, 0.01, 1]))
def test_all_pairs_at_once_equal_one_pair_after_the_other(batch, alpha):
    distances = paper.pairwise_distances(batch, alpha)
    one_by_one = [context_distance(one, two, alpha) for one, two in combinations(batch, 2)]
    np.testing.assert_allclose(distances, one_by_one, rtol=0, atol=1e-12)


@given(contexts, st.sampled_from([0, 0.001, 0.01, 1]))
def test_a_distance_is_that_of_equation_1(batch, alpha):
    for one, two in combinations(batch, 2):
        distance = context_distance(one, two, alpha)
        assert distance == pytest.approx(equation_1(one, two, alpha), abs=1e-12)
        assert distance == context_distance(two, one, alpha)
        assert context_distance(one, one) == (0 if one else 1)
