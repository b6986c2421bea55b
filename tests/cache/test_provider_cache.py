"""The simulator of hosted caches, beside second reckonings of their rules."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from caching_provider import Provider, count_tokens
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cache.provider_cache import PromptPiece, ProviderCache
from ctxreuse.errors import InvalidRequestError
from ctxreuse.memory.prefix_index import common_blocks
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import CacheRules, TimeToLive, cache_profile

MINIMUM = 6
IN_STEPS = cache_profile("openai-before-5.6(minimum=256)")


def pieces(names: Iterable[str], tokens: int = 100) -> list[PromptPiece]:
    return [PromptPiece(name, tokens) for name in names]


@st.composite
def requests(draw: st.DrawFn, lives: list[str], most_marks: int) -> list[Any]:
    """Draw prompts of few different blocks, each with marks and a time."""
    drawn, now = [], 0.0
    for _ in range(draw(st.integers(1, 8))):
        now += draw(st.sampled_from([0, 1, 299, 300, 301, 1_799, 1_800, 3_000, 3_600]))
        names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
        names += [f"x{n}" for n in range(draw(st.sampled_from([0, 1, 2, 17, 18, 19, 20, 90])))]
        places = st.integers(0, len(names) - 1)
        marks = sorted(draw(st.sets(places, max_size=most_marks)))
        longest_first = sorted((draw(st.sampled_from(lives)) for _ in marks), key=lives.index)
        drawn.append((names, dict(zip(marks, longest_first, strict=True)), now))
    return drawn


def words(name: str) -> str:
    return " ".join([name] * 3)


@given(requests(["1h", "5m"], 4), st.sampled_from(["5m", "1h"]))
def test_it_agrees_with_the_rules_of_anthropic(prompts, life):
    cache = ProviderCache(cache_profile(f"anthropic(minimum={MINIMUM}, life={life})"))
    provider = Provider("anthropic", MINIMUM)
    for names, marks, now in prompts:
        content = [{"type": "text", "text": words(name)} for name in names]
        for position, ttl in marks.items():
            content[position]["cache_control"] = {"type": "ephemeral", "ttl": ttl}
        usage = provider.take({"messages": [{"role": "user", "content": content}]}, now)
        pieces = [
            PromptPiece(words(name), count_tokens(words(name)), n in marks, marks.get(n))
            for n, name in enumerate(names)
        ]
        billed = cache.serve(pieces, now=now)
        assert billed == BilledTokens(usage.uncached, usage.read, usage.written)
        assert billed.prompt_tokens == usage.total
        assert billed.bill(cache_profile("anthropic")) == pytest.approx(usage.bill())


@given(requests(["30m"], 12), st.booleans(), st.sampled_from(["", "k"]))
def test_it_agrees_with_the_rules_of_openai(prompts, marks_end, key):
    cache = ProviderCache(cache_profile(f"openai(minimum={MINIMUM})"))
    provider = Provider("openai", MINIMUM)
    for number, (names, marks, now) in enumerate(prompts):
        content = [{"type": "text", "text": words(name)} for name in names]
        for position in marks:
            content[position]["prompt_cache_breakpoint"] = {"mode": "explicit"}
        own = key if number % 2 else ""
        body = {
            "messages": [{"role": "user", "content": content}],
            "prompt_cache_options": {"mode": "implicit" if marks_end else "explicit"},
            "prompt_cache_key": own,
        }
        usage = provider.take(body, now)
        kept = {*marks, len(names) - 1} if marks_end else marks
        pieces = [
            PromptPiece(words(name), count_tokens(words(name)), n in kept)
            for n, name in enumerate(names)
        ]
        expected = BilledTokens(usage.uncached, usage.read, usage.written)
        assert cache.serve(pieces, now=now, key=own) == expected


def test_what_is_written_and_never_read_is_counted():
    cache = ProviderCache(cache_profile("anthropic(minimum=1)"))

    def serve(names: str, marks: str, now: float) -> BilledTokens:
        return cache.serve([PromptPiece(one, 10, one in marks) for one in names], now=now)

    serve("abcd", "bd", 0.0)
    assert cache.never_read == 40
    assert serve("abx", "b", 1.0).read == 20
    assert cache.never_read == 20  # what stands behind the second one
    serve("abcd", "bd", 400.0)
    assert cache.never_read == 60  # all of it was written again, and the first end is lost
    assert serve("abcd", "bd", 401.0).read == 40
    assert cache.never_read == 20


@pytest.mark.parametrize("profile", [cache_profile("anthropic(minimum=1)"), IN_STEPS])
def test_what_has_expired_takes_no_memory(profile):
    cache = ProviderCache(profile)
    for number in range(1_000):
        cache.serve([PromptPiece(f"{number}", 1_000, is_marked=True)], now=10.0 * number)
    assert len(cache) <= 61


def test_a_time_to_live_that_the_profile_lacks_is_refused():
    cache = ProviderCache(cache_profile("openai(minimum=1)"))
    with pytest.raises(InvalidRequestError, match="no time to live '1h'"):
        cache.serve([PromptPiece("a", 9, is_marked=True, life="1h")], now=0.0)
    with pytest.raises(InvalidRequestError, match="take the profile"):
        BilledTokens(0, 0, {"1h": 1}).bill(cache_profile("openai"))


def test_what_prompts_begin_with_is_read_in_steps():
    cache = ProviderCache(IN_STEPS)
    assert cache.serve(pieces("abcd"), now=0.0).read == 0
    assert cache.serve(pieces("abce"), now=1.0).read == 256
    assert cache.serve(pieces("abce"), now=2.0).read == 384
    assert cache.serve(pieces("xbce"), now=2.0).read == 0
    assert cache.serve(pieces("abce"), now=2.0, key="other").read == 0
    assert cache.never_read == 0


def second_reckoning(prompts: Any, profile: CacheRules) -> Iterator[int]:
    seen = []
    for names, now in prompts:
        alive = [other for other, last in seen if last + profile.lifetime > now]
        long = [other for other in alive if 100 * len(other) >= profile.least_tokens]
        tokens = max((100 * common_blocks(names, other) for other in long), default=0)
        yield 0 if tokens < profile.least_tokens else tokens - tokens % profile.step_tokens
        seen.append((names, now))


prompts = st.lists(
    st.tuples(st.lists(st.sampled_from("abc"), max_size=6), st.sampled_from([0, 1, 299, 300])),
    max_size=8,
)


@given(prompts, st.sampled_from([1.0, 1.25]))
def test_it_agrees_with_a_comparison_of_all_prompts(given_prompts, write_factor):
    lives = (TimeToLive("", 300, write_factor),)
    profile = replace(IN_STEPS, times_to_live=lives)
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
