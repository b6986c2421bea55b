"""Caches that can be read at the end of a prompt and at junctions that were met before."""

import random

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import CacheRules, ContextBlock, ContextRequest, ReusePlanner, cache_profile
from ctxreuse.cache import BlockLevelCache
from ctxreuse.cache.provider_cache import PromptPiece, ProviderCache
from ctxreuse.errors import InvalidRequestError

RULES = cache_profile("deepseek")
ENGINE = cache_profile("vllm(states=junctions, prime_tokens=150)")
TOKENS = 100


def asked(letters: str) -> ContextRequest:
    return ContextRequest([ContextBlock(id=one, text=one, tokens=TOKENS) for one in letters], "?")


def expected(planner: ReusePlanner, *contexts: str) -> list[int]:
    return [planner.plan(asked(letters)).expected_cached_tokens for letters in contexts]


def test_a_common_prefix_is_read_from_its_third_sight_on():
    assert expected(ReusePlanner(cache="deepseek"), "abx", "aby", "abz") == [0, 0, 192]


def test_the_end_of_a_prompt_is_read_at_once():
    assert expected(ReusePlanner(cache="deepseek"), "abc", "abcd", "abcde") == [0, 256, 384]


def test_a_fork_is_worth_one_use_less_where_states_are_kept_at_junctions():
    assert [RULES.worth(100, uses) for uses in (2, 3)] == [0, 90]
    assert [cache_profile("vllm").worth(100, uses) for uses in (1, 2, 3)] == [0, 100, 200]
    assert cache_profile("anthropic").worth(100, 2) == 65


def test_each_kind_of_cache_says_where_a_sent_prompt_can_be_read():
    caches = ("vllm", "openai-before-5.6", "deepseek", "anthropic")
    points = [list(cache_profile(name).points((1,), met=2, parts=4)) for name in caches]
    assert points == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 4], [1]]


contexts = st.lists(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True).map("".join),
    min_size=1,
    max_size=12,
)


@given(contexts)
@examples(100)
def test_what_is_expected_is_what_such_a_provider_reads(sent):
    planner = ReusePlanner(cache=RULES)
    cache = ProviderCache(RULES)
    for now, letters in enumerate(sent):
        plan = planner.plan(asked(letters))
        pieces = [PromptPiece(block.text, TOKENS) for block in plan.blocks]
        assert cache.serve(pieces, now=now).read == plan.expected_cached_tokens


@given(contexts)
@examples(30)
def test_a_batch_is_planned_as_if_it_came_one_by_one(sent):
    requests = [asked(letters) for letters in sent]
    batch = ReusePlanner(cache=CacheRules(name="own", granularity="steps", states="junctions"))
    alone = batch.sibling()
    plans = batch.plan_batch(requests).in_input_order()
    assert [plan.blocks for plan in plans] == [alone.plan(one).blocks for one in requests]


def computed(plans, *, primed=True):
    cache, tokens, hits = BlockLevelCache(None, ENGINE), 0, []
    for plan in plans:
        keys, lengths = [block.key for block in plan.blocks], [TOKENS] * len(plan.blocks)
        for end in plan.primes if primed else ():
            tokens += cache.serve(keys[:end], lengths[:end]).prefilled_tokens
        usage = cache.serve(keys, lengths)
        tokens, hits = tokens + usage.prefilled_tokens, [*hits, usage.cached_tokens]
    return tokens, hits


def test_a_primed_batch_reads_each_fork_that_is_worth_a_call_from_its_second_use_on():
    requests = [asked(letters) for letters in ("abcx", "abcy", "abcz", "dx", "dy")]
    batch = ReusePlanner(cache=ENGINE).plan_batch(requests, primes=True)
    assert [(prime.plan.request_id, prime.blocks) for prime in batch.primes] == [
        (batch.plans[0].request_id, 3)
    ]
    tokens, hits = computed(batch.plans)
    assert hits == [300, 300, 300, 0, 0]
    assert tokens == 300 + 3 * 100 + 2 * 200
    assert [plan.expected_cached_tokens for plan in batch.plans] == hits
    assert computed(batch.plans, primed=False)[0] == tokens + 300


@given(contexts)
@examples(100)
def test_primes_are_fewer_than_requests_and_expected_is_what_is_hit(sent):
    requests = [asked(letters) for letters in sent]
    batch = ReusePlanner(cache=ENGINE).plan_batch(requests, primes=True)
    assert len(batch.primes) < len(requests)
    assert all(0 < one.blocks <= len(one.plan.blocks) for one in batch.primes)
    assert [plan.expected_cached_tokens for plan in batch.plans] == computed(batch.plans)[1]


def test_a_second_batch_primes_no_fork_that_can_be_read_already():
    planner = ReusePlanner(cache=ENGINE)
    first = planner.plan_batch([asked("abcx"), asked("abcy")], primes=True)
    second = planner.plan_batch([asked("abcv"), asked("abcw")], primes=True)
    assert [one.blocks for one in first.primes] == [3]
    assert second.primes == ()
    assert [plan.expected_cached_tokens for plan in second.plans] == [300, 300]


def test_arriving_requests_prime_where_prefixes_have_come_again_and_compute_less():
    draw = random.Random(1)
    topics = [draw.sample("abcdefghijklmnop", 4) for _ in range(40)]
    requests = [asked([*draw.choice(topics)[:3], "xyz"[n % 3]]) for n in range(300)]
    arms = {}
    for primes in (False, True):
        planner = ReusePlanner(cache=ENGINE)
        arms[primes] = [planner.plan(one, primes=primes) for one in requests]
    calls = [end for plan in arms[True] for end in plan.primes]
    assert 0 < len(calls) <= 0.75 * len(requests)
    assert all(0 < end < 4 for end in calls)
    assert all([*plan.primes] == sorted({*plan.primes}) for plan in arms[True])
    (plain, _), (primed, hits) = computed(arms[False]), computed(arms[True])
    assert primed < plain
    assert [plan.expected_cached_tokens for plan in arms[True]] == hits


@pytest.mark.parametrize("cache", ["vllm", "sglang"])
def test_where_each_block_can_be_read_there_is_nothing_to_prime(cache):
    requests = [asked("abcx"), asked("abcy")]
    assert ReusePlanner(cache=cache).plan_batch(requests, primes=True).primes == ()


@pytest.mark.parametrize("cache", ["deepseek", "anthropic"])
def test_primes_are_refused_where_calls_cost_money(cache):
    batch = ReusePlanner(cache=cache).plan_batch
    for plan in (ReusePlanner(cache=cache).plan, lambda one, **options: batch([one], **options)):
        with pytest.raises(InvalidRequestError, match="has prices; leave out primes=True"):
            plan(asked("ab"), primes=True)
