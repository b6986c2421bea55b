"""What providers say of cache misses, in one vocabulary."""

from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.reported_usage import MissReason, ReportedMiss, reported_miss
from ctxreuse.memory.explanations import Cause


def anthropic(term, **more):
    return {"id": "m", "diagnostics": {"cache_miss_reason": {"type": term, **more}}}


def openai(reason, missed=None):
    told = {"type": "cache_miss", "reason": reason, "cache_missed_tokens": missed}
    return {"id": "r", "prompt_cache_diagnostics": told}


def test_the_vocabulary():
    assert [str(one) for one in MissReason] == [
        "model",
        "key",
        "tools",
        "system",
        "messages",
        "compacted",
        "expired",
        "below the minimum",
        "never written",
    ]


def test_every_cause_that_misses_something_has_a_reason_and_each_reason_a_cause():
    without = {cause for cause in Cause if cause.reason is None}
    assert without == {Cause.hit, Cause.later_turn, Cause.older_prompt, Cause.empty}
    assert {cause.reason for cause in Cause} - {None} == set(MissReason)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (anthropic("system_changed", cache_missed_input_tokens=900), "system"),
        (anthropic("tools_changed", cache_missed_input_tokens=900), "tools"),
        (anthropic("model_changed", cache_missed_input_tokens=900), "model"),
        (anthropic("messages_changed", cache_missed_input_tokens=900), "messages"),
        (openai("prompt_cache_key_changed", 900), "key"),
        (openai("context_compacted", 900), "compacted"),
        (openai("service_tier_changed", 900), "model"),
        (openai("reasoning_effort_changed", 900), "model"),
        (openai("verbosity_changed", 900), "model"),
        (openai("text_format_changed", 900), "model"),
        (openai("input_changed", 900), "messages"),
    ],
)
def test_each_providers_terms_have_a_word_of_the_vocabulary(response, said):
    miss = reported_miss(response)
    assert (str(miss), miss.missed_tokens) == (said, 900)


def test_objects_are_read_as_dicts_are():
    same = reported_miss({"prompt_cache_diagnostics": {"type": "cache_hit"}})
    assert str(same) == "no difference"
    reason = SimpleNamespace(type="tools_changed", cache_missed_input_tokens=7)
    response = SimpleNamespace(diagnostics=SimpleNamespace(cache_miss_reason=reason))
    assert reported_miss(response) == ReportedMiss("tools_changed", (MissReason.tools,), 7)
    assert reported_miss(response.diagnostics) == reported_miss(response)


@pytest.mark.parametrize(
    ("response", "term"),
    [
        ({"diagnostics": {"cache_miss_reason": None}}, "pending"),
        (anthropic("previous_message_not_found"), "previous_message_not_found"),
        (anthropic("unavailable"), "unavailable"),
        (anthropic("a_term_of_next_year"), "a_term_of_next_year"),
        (anthropic(["no", "text"]), "unavailable"),
        ({"prompt_cache_diagnostics": {"type": "unavailable"}}, "unavailable"),
        (
            {"prompt_cache_diagnostics": {"type": "comparison_response_not_found"}},
            "comparison_response_not_found",
        ),
    ],
)
def test_a_provider_may_be_unable_to_tell(response, term):
    miss = reported_miss(response)
    assert (miss.term, str(miss)) == (term, "cannot tell")


@pytest.mark.parametrize(
    "response",
    [None, {}, {"diagnostics": None}, {"type": "message"}, "text", 7, {"type": ["cache_hit"]}],
)
def test_an_answer_without_diagnostics_says_nothing(response):
    assert reported_miss(response) is None


def test_the_terms_of_anthropics_own_types_are_known():
    types = pytest.importorskip("anthropic.types")
    if not hasattr(types, "CacheMissReason"):
        pytest.skip("this version of anthropic has no diagnostics")
    (union, _) = get_args(types.CacheMissReason)
    for kind in get_args(union):
        (term,) = get_args(kind.model_fields["type"].annotation)
        fields = {"cache_missed_input_tokens": 1} if term.endswith("_changed") else {}
        message = types.Message.model_validate(
            {
                "id": "m",
                "type": "message",
                "role": "assistant",
                "model": "claude",
                "content": [],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 1, "output_tokens": 1},
                "diagnostics": {"cache_miss_reason": {"type": term, **fields}},
            }
        )
        miss = reported_miss(message)
        assert miss.term == term
        assert bool(miss.reasons) == term.endswith("_changed")


_names = st.sampled_from(
    [
        "type",
        "reason",
        "diagnostics",
        "prompt_cache_diagnostics",
        "cache_miss_reason",
        "cache_missed_tokens",
        "cache_missed_input_tokens",
    ]
)
_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=12,
)


@given(_anything)
def test_whatever_a_server_sends_it_is_read_or_says_nothing(response):
    miss = reported_miss(response)
    if miss is None:
        return
    assert len(miss.term) <= 60
    assert miss.missed_tokens is None or miss.missed_tokens >= 0
    again = reported_miss(miss.as_json())
    assert (again.term, again.reasons) == (miss.term, miss.reasons)
