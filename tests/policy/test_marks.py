from itertools import combinations, product

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.memory.points import MarkPlace, most_gainful
from ctxreuse.policy.clustering import reuse_orders
from ctxreuse.policy.view import depth_first_order
from ctxreuse.rules.cache_rules import CacheRules, TimeToLive
from ctxreuse.rules.marks import marks_of_batch


def rules(write_factor: float, marks: int = 4) -> CacheRules:
    return CacheRules(
        name="own",
        granularity="marks",
        minimum=10,
        marks=marks,
        times_to_live=(TimeToLive("", None, write_factor),),
        read_factor=0.1,
    )


PRICES, HOUR = rules(1.25), rules(2.0)


def replay(sequences, weights, marks, system_tokens, prices):
    """Return the bill of marked prompts, by the rules of the cache alone."""
    written, bill = set(), 0.0
    for sequence, tokens, own in zip(sequences, weights, marks, strict=True):
        lengths = [system_tokens + sum(tokens[:end]) for end in range(len(tokens) + 1)]
        read = max([lengths[end] for end in own if tuple(sequence[:end]) in written], default=0)
        new = [end for end in own if lengths[end] >= prices.least_tokens and lengths[end] > read]
        written.update(tuple(sequence[:end]) for end in new)
        last = max([lengths[end] for end in new], default=read)
        bill += (1 - prices.saving) * read + prices.write_factor * (last - read)
        bill += lengths[-1] - last
    return bill


contexts = st.lists(st.lists(st.integers(0, 5), max_size=5, unique=True), min_size=1, max_size=8)
all_weights = st.lists(st.integers(1, 30), min_size=6, max_size=6)
prices = st.sampled_from([PRICES, HOUR, rules(1.25, marks=1), rules(1.25, marks=2)])


@given(contexts, all_weights, st.sampled_from((0, 4, 20)), prices)
@examples(150)
def test_the_marks_of_a_batch_are_few_and_pay(found, weights, system, one):
    orders = reuse_orders(found, weights, one.least_tokens - system)
    assert [sorted(order) for order in orders] == [sorted(context) for context in found]
    sent = [orders[position] for position in depth_first_order(orders, largest_first=False)]
    tokens = [[weights[block] for block in order] for order in sent]
    chosen = marks_of_batch(sent, tokens, system, [-1] * len(sent), one)
    bill = replay(sent, tokens, chosen, system, one)
    assert bill <= sum(map(sum, tokens)) + system * len(sent) + 1e-9
    for order, marks in zip(sent, chosen, strict=True):
        assert len(marks) <= one.marks
        assert list(marks) == sorted(set(marks))
        assert not marks or 0 <= marks[0] <= marks[-1] <= len(order)


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=3, unique=True), min_size=1, max_size=3),
    st.lists(st.integers(1, 30), min_size=3, max_size=3),
)
@examples(60)
def test_no_marks_of_a_small_batch_cost_less(found, weights):
    sent = [found[position] for position in depth_first_order(found)]
    tokens = [[weights[block] for block in order] for order in sent]
    chosen = marks_of_batch(sent, tokens, 0, [-1] * len(sent), PRICES)
    choices = [
        [
            marks
            for size in range(len(order) + 2)
            for marks in combinations(range(len(order) + 1), size)
        ]
        for order in sent
    ]
    cheapest = min(replay(sent, tokens, marks, 0, PRICES) for marks in product(*choices))
    assert replay(sent, tokens, chosen, 0, PRICES) == pytest.approx(cheapest)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), max_size=6), st.integers(1, 4))
def test_no_marks_of_an_arrival_gain_more(steps, most):
    places, tokens = [], 0
    for blocks, (length, again) in enumerate(steps, start=1):
        tokens += length
        places.append(MarkPlace(blocks, tokens, again))

    def gain(marks):
        before, total = 0, 0.0
        for place in places:
            if place.blocks in marks:
                total += (place.tokens - before) * (1.15 * place.again - 0.25)
                before = place.tokens
        return total

    marks = most_gainful(places, 0, most, 0.9, 0.25)
    ends = [place.blocks for place in places]
    choices = [one for size in range(most + 1) for one in combinations(ends, size)]
    assert set(marks) <= set(ends)
    assert gain(marks) == pytest.approx(max(map(gain, choices)))


def test_what_is_written_already_is_read_not_written():
    sent, tokens = ["ab", "ac"], [[20, 5], [20, 5]]
    assert marks_of_batch(sent, tokens, 0, [1, 1], PRICES) == [(1,), (1,)]
