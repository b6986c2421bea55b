"""The simulator of hosted caches without marks."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cache.provider_cache import PromptPiece, ProviderCache
from ctxreuse.rules.cache_rules import CacheRules, TimeToLive, cache_profile

PROFILE = cache_profile("openai-before-5.6(minimum=256)")


def pieces(names, tokens=100):
    return [PromptPiece(name, tokens) for name in names]


def test_what_prompts_begin_with_is_read_in_steps():
    cache = ProviderCache(PROFILE)
    assert cache.serve(pieces("abcd"), now=0.0).read == 0
    assert cache.serve(pieces("abce"), now=1.0).read == 256
    assert cache.serve(pieces("abce"), now=2.0).read == 384
    assert cache.serve(pieces("xbce"), now=2.0).read == 0
    assert cache.serve(pieces("abce"), now=2.0, key="other").read == 0
    assert cache.never_read == 0


def test_what_has_expired_takes_no_memory():
    cache = ProviderCache(PROFILE)
    for number in range(1_000):
        cache.serve(pieces([f"{number}"], 1_000), now=10.0 * number)
    assert len(cache) <= 61


def second_reckoning(prompts, profile):
    """Compare each prompt with all earlier ones, one by one."""
    seen = []
    for names, now in prompts:
        alive = [
            index
            for index, (other, last) in enumerate(seen)
            if last + profile.lifetime > now and 100 * len(other) >= profile.least_tokens
        ]
        shared = 0
        for index in alive:
            common = 0
            for one, two in zip(names, seen[index][0], strict=False):
                if one != two:
                    break
                common += 1
            shared = max(shared, common)
        tokens = 100 * shared
        yield 0 if tokens < profile.least_tokens else tokens - tokens % profile.step_tokens
        seen.append((names, now))


prompts = st.lists(
    st.tuples(st.lists(st.sampled_from("abc"), max_size=6), st.sampled_from([0, 1, 299, 300])),
    max_size=8,
)


@given(prompts, st.sampled_from([1.0, 1.25]))
def test_it_agrees_with_a_comparison_of_all_prompts(given_prompts, write_factor):
    lives = (TimeToLive("", 300, write_factor),)
    profile = replace(PROFILE, times_to_live=lives)
    cache, now, timed = ProviderCache(profile), 0.0, []
    for names, later in given_prompts:
        now += later
        timed.append((names, now))
    total = 0
    for (names, at), read in zip(timed, second_reckoning(timed, profile), strict=True):
        billed = cache.serve(pieces(names), now=at)
        assert billed.read == read
        assert billed.prompt_tokens == 100 * len(names)
        assert billed.uncached >= 0
        assert (write_factor > 1) or not billed.written
        total += billed.written_tokens
    assert 0 <= cache.never_read <= total


def test_what_is_written_for_money_and_never_read_is_counted():
    profile = CacheRules(
        name="paid", granularity="steps", times_to_live=(TimeToLive("", None, 2.0),)
    )
    cache = ProviderCache(profile)
    cache.serve(pieces("abc"), now=0.0)
    assert cache.never_read == 300
    cache.serve(pieces("abd"), now=0.0)
    assert cache.never_read == 200
