import pytest

from ctxreuse import CacheRules, TimeToLive, cache_profile
from ctxreuse.errors import InvalidRequestError
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, READY_PROFILES


@pytest.mark.parametrize("name", READY_PROFILES)
def test_each_ready_profile_says_when_and_where_its_values_were_read(name):
    profile = cache_profile(name)
    assert profile.name == name
    assert profile.date == "November 2026"
    assert profile.source
    assert cache_profile(profile) is profile


def test_marks_and_readable_parts_are_those_of_the_profile():
    five_minutes = cache_profile("anthropic")
    hour = cache_profile(" Anthropic( minimum=4_096, life='1h' ) ")
    assert (five_minutes.write_factor, five_minutes.lifetime, five_minutes.marks) == (1.25, 300, 4)
    assert (hour.write_factor, hour.lifetime, hour.minimum) == (2.0, 3600, 4096)
    assert (cache_profile("openai").look_back, hour.look_back) == (0, 20)

    assert [DEFAULT_CACHE.readable(tokens) for tokens in (15, 16, 47)] == [0, 16, 32]
    before = cache_profile("openai-before-5.6")
    assert [before.readable(tokens) for tokens in (1023, 1024, 1300)] == [0, 1024, 1280]
    assert cache_profile("vllm(block_tokens=1536)").least_tokens == 1536
    assert cache_profile("sglang").least_tokens == 1
    assert cache_profile("openai").readable(1500) == 1500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("antropic", "did you mean 'anthropic'"),
        ("", "choose one of 'vllm'"),
        ("anthropic(", "there is no cache profile"),
        ("anthropic(5)", "argument=value"),
        ("anthropic(minimum=1, minimum=2)", "each once"),
        ("anthropic(ttl=5m)", "its arguments: minimum, life"),
        ("sglang(minimum=5)", "its arguments: block_tokens, states, prime_tokens"),
        ("anthropic(life=2h)", "choose one of '5m', '1h'"),
        ("anthropic(minimum=many)", "minimum must be an integer from 0, not 'many' (str)"),
        ("openai(minimum=-1)", "minimum must be an integer from 0"),
        ("vllm(states=window)", "choose one of 'everywhere', 'junctions'"),
        ("vllm(block_tokens=0)", "block_tokens must be an integer from 1"),
    ],
)
def test_the_error_of_a_wrong_text_names_it_and_the_remedy(text, words):
    with pytest.raises(InvalidRequestError) as caught:
        cache_profile(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"granularity": "words"},
        {"granularity": "marks"},
        {"granularity": "blocks", "marks": 4},
        {"granularity": "marks", "marks": True},
        {"granularity": "steps", "step_tokens": 0},
        {"granularity": "steps", "read_factor": float("nan")},
        {"granularity": "steps", "times_to_live": ()},
        {"granularity": "steps", "times_to_live": [TimeToLive()]},
        {"granularity": "steps", "times_to_live": ("5m",)},
        {"granularity": "steps", "life": "5m"},
        {"granularity": "steps", "key": "perhaps"},
        {"granularity": "steps", "follower_hits": "never"},
        {"granularity": "steps", "date": 2026},
    ],
)
def test_a_profile_that_cannot_be_is_refused(values):
    with pytest.raises(InvalidRequestError):
        CacheRules(name="ours", **values)


@pytest.mark.parametrize("values", [(5,), ("5m", -1), ("5m", 5, float("inf"))])
def test_a_time_to_live_that_cannot_be_is_refused(values):
    with pytest.raises(InvalidRequestError):
        TimeToLive(*values)


def test_a_profile_of_a_wrong_type_is_refused():
    with pytest.raises(InvalidRequestError, match="cache must be CacheRules or one of"):
        cache_profile(16)
