from collections import Counter
from dataclasses import dataclass

import numpy as np
from helpers import tree_weight
from hypothesis import example, given
from hypothesis import strategies as st

from ctxreuse.distributed.partitions import Contexts, partition
from ctxreuse.policy.clustering import reuse_orders


@dataclass(frozen=True)
class Request:
    blocks: tuple[int, ...] = ()
    digest: int = 0
    scope: int = 1
    conversation: int = 0
    is_later: bool = False


def contexts_of(requests, weights=None):
    held = [block for request in requests for block in request.blocks]
    return Contexts(
        scopes=np.array([one.scope for one in requests], dtype=np.uint64),
        digests=np.array([one.digest for one in requests], dtype=np.uint64),
        conversations=np.array([one.conversation for one in requests], dtype=np.uint64),
        are_later=np.array([one.is_later for one in requests], dtype=np.bool_),
        lengths=np.array([len(one.blocks) for one in requests], dtype=np.int64),
        blocks=np.array(held, dtype=np.uint64),
        weights=np.array([weights[block] if weights else 1 for block in held], dtype=np.int64),
    )


def numbered(contexts, **of_all):
    return [Request(tuple(one), digest, **of_all) for digest, one in enumerate(contexts)]


def partitions_of(requests, most, weights=None):
    contexts = contexts_of(requests, weights)
    found = partition(contexts, most)
    numbers = found.of(contexts).tolist()
    assert set(numbers) == set(range(found.count))
    return numbers


def together(requests, numbers):
    """Return the requests of each partition, in any order."""
    members = {}
    for request, number in zip(requests, numbers, strict=True):
        members.setdefault(number, []).append(request)
    return {frozenset(Counter(requests).items()) for requests in members.values()}


blocks_held = st.lists(st.integers(0, 8), unique=True, max_size=5).map(tuple)
requests_of_a_scope = st.lists(blocks_held, max_size=24).map(numbered)
sizes = st.integers(1, 9)


def test_requests_go_with_their_heaviest_shared_block():
    contexts = [(1, 9), (1, 8), (2, 7), (2, 6), (1, 5), (2, 4)]
    assert partitions_of(numbered(contexts), 3) == [0, 0, 1, 1, 0, 1]


def test_a_block_that_most_requests_hold_tells_none_apart():
    contexts = [(0, 1), (0, 2), (0, 1), (0, 2), (0, 1), (0, 2)]
    assert partitions_of(numbered(contexts), 3) == [0, 1, 0, 1, 0, 1]


def test_weights_decide_which_shared_block_is_heaviest():
    contexts = [(0, 2), (0, 2), (1, 3), (1, 3), (0, 3), (1, 2)]
    by_first = partitions_of(numbered(contexts), 3, [9, 9, 1, 1])
    assert together(contexts, by_first) == together(contexts, [0, 0, 1, 1, 0, 1])
    by_second = partitions_of(numbered(contexts), 3, [1, 1, 9, 9])
    assert together(contexts, by_second) == together(contexts, [0, 0, 1, 1, 1, 0])


def test_a_request_without_the_block_of_its_likes_comes_back_to_them():
    # three questions; of each, one request was retrieved without the block that weighs most
    contexts = [(q, 12 - q, 22 - q) for q in range(3) for _ in range(3)]
    contexts += [(12 - q, 22 - q) for q in range(3)]
    weights = {block: 9 if block < 10 else 2 for block in range(30)}
    numbers = partitions_of(numbered(contexts), 4, weights)
    assert numbers[:9] == [numbers[0]] * 3 + [numbers[3]] * 3 + [numbers[6]] * 3
    assert numbers[9:] == [numbers[0], numbers[3], numbers[6]]
    assert len(set(numbers)) == 3


def test_a_group_that_is_too_large_is_cut_by_its_next_blocks():
    contexts = [(0, 1), (0, 2)] * 4 + [(9, 3), (9, 4)] * 4
    numbers = partitions_of(numbered(contexts), 4)
    assert together(contexts[:8], numbers[:8]) == {
        frozenset({((0, 1), 4)}),
        frozenset({((0, 2), 4)}),
    }


def test_small_scopes_share_a_partition_and_large_ones_have_their_own():
    small = [Request((1,), 10 + number, scope=5 + number // 2) for number in range(6)]
    large = numbered([(1,), (1,), (2,), (2,), (2,)], scope=8)
    numbers = partitions_of(small + large, 4)
    assert numbers[:4] == [numbers[0]] * 4
    assert len({numbers[0], numbers[4]}) == 2
    assert not set(numbers[:6]) & set(numbers[6:])


def test_small_partitions_come_last():
    large = [Request((1 + digest // 8,), digest, scope=8) for digest in range(16)]
    small = [Request((9,), digest, scope=5) for digest in (98, 99)]
    assert partitions_of(small + large, 9) == [2] * 2 + [0] * 8 + [1] * 8


@given(requests_of_a_scope, sizes, st.randoms(use_true_random=False))
def test_partitions_do_not_depend_on_the_order(requests, most, random):
    numbers = dict(zip(requests, partitions_of(requests, most), strict=True))
    shuffled = random.sample(requests, len(requests))
    assert dict(zip(shuffled, partitions_of(shuffled, most), strict=True)) == numbers


@given(requests_of_a_scope, sizes)
def test_no_partition_is_larger_than_allowed_or_empty(requests, most):
    found = Counter(partitions_of(requests, most))
    assert all(count <= most for count in found.values())
    assert len(requests) > most or len(found) <= 1
    # two partitions that would fit into one are not many
    assert len(found) <= 2 * -(-len(requests) // most)


OF_EQUAL_WEIGHT = ["", "0", "0", "8", "01", "02", "28", "81", "012", "1238"]


@example(numbered([map(int, one) for one in OF_EQUAL_WEIGHT]), numbered([()]), 2)
@given(requests_of_a_scope, requests_of_a_scope, sizes)
def test_what_goes_together_depends_on_no_other_scope(requests, others, most):
    alone = partitions_of(requests, most)
    foreign = [Request(one.blocks, 100 + one.digest, scope=2) for one in others]
    beside = partitions_of(foreign + requests, most)[len(foreign) :]
    assert together(requests, beside) == together(requests, alone)


@given(st.lists(st.tuples(blocks_held, st.integers(0, 4), st.booleans()), max_size=24), sizes)
def test_turns_of_one_conversation_go_together(drawn, most):
    begun = set()
    requests = []
    for digest, (blocks, conversation, is_later) in enumerate(drawn):
        is_later = is_later or conversation in begun
        begun.add(conversation)
        if conversation:
            requests.append(Request(blocks, digest, 1, 100 + conversation, is_later))
        else:
            requests.append(Request(blocks, digest, 1, 0, is_later))
    numbers = partitions_of(requests, most)
    of_conversation = {}
    for request, number in zip(requests, numbers, strict=True):
        if request.conversation:
            of_conversation.setdefault(request.conversation, set()).add(number)
    assert all(len(found) == 1 for found in of_conversation.values())


def test_little_is_lost_where_requests_repeat_questions():
    random = np.random.default_rng(1)
    weights = random.integers(50, 200, 300).tolist()
    contexts = []
    for question in random.integers(0, 60, 1_200).tolist():
        ranked = [question * 5 + rank for rank in range(5)]
        ranked += [(question // 4 * 20 + other) % 300 for other in random.integers(0, 20, 3)]
        kept = [block for block in dict.fromkeys(ranked) if random.random() > 0.2]
        contexts.append(tuple(kept))
    total = sum(weights[block] for context in contexts for block in context)
    whole = 1 - tree_weight(reuse_orders(contexts, weights), weights) / total
    numbers = partitions_of(numbered(contexts), 150, weights)
    computed = 0
    for number in set(numbers):
        part = [one for one, where in zip(contexts, numbers, strict=True) if where == number]
        computed += tree_weight(reuse_orders(part, weights), weights)
    assert 1 - computed / total >= 0.98 * whole
