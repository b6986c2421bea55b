"""Usage in the words of each provider: every token counts once."""

from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.context.reported_usage import ReportedTokens, usage_in, usage_of
from langchain_ctxreuse.messages import reported_usage


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
            },
            ReportedTokens(100, 60, 5, {"": 30}),
        ),
        (
            {
                "input_tokens": 100,
                "output_tokens": 5,
                "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 0},
            },
            ReportedTokens(100, 60, 5, {}),
        ),
        (
            {
                "input_tokens": 10,
                "output_tokens": 5,
                "cache_read_input_tokens": 60,
                "cache_creation_input_tokens": 30,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": 20,
                    "ephemeral_1h_input_tokens": 10,
                },
            },
            ReportedTokens(100, 60, 5, {"5m": 20, "1h": 10}),
        ),
        (
            {"input_tokens": 10, "output_tokens": 5, "cache_creation_input_tokens": 30},
            ReportedTokens(40, None, 5, {"": 30}),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 1, "prompt_cache_hit_tokens": 8},
            ReportedTokens(9, 8, 1),
        ),
        ({"prompt_token_count": 9, "cached_content_token_count": 8}, ReportedTokens(9, 8)),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"created_cache_tokens": 8}},
            ReportedTokens(9, None, None, {"": 8}),
        ),
        ({"prompt_tokens": 9, "prompt_tokens_details": "odd"}, ReportedTokens(9)),
        (  # LiteLLM, of Claude: both names at once
            {
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 60, "cache_creation_tokens": 30},
                "cache_read_input_tokens": 60,
                "cache_creation_input_tokens": 30,
            },
            ReportedTokens(100, 60, 5, {"": 30}),
        ),
        (
            {
                "inputTokens": 10,
                "outputTokens": 5,
                "cacheReadInputTokens": 60,
                "cacheWriteInputTokens": 30,
            },
            ReportedTokens(100, 60, 5, {"": 30}),
        ),
        ({"inputTokens": 10, "outputTokens": 5}, ReportedTokens(10, None, 5)),
        (
            {"promptTokenCount": 9, "candidatesTokenCount": 2, "cachedContentTokenCount": 8},
            ReportedTokens(9, 8, 2),
        ),
        ({"prompt_tokens": -1}, None),
        ({"cache_read_input_tokens": 3}, None),
        (None, None),
        ("odd", None),
    ],
)
def test_each_token_counts_once(usage, read):
    assert usage_of(usage) == read
    if isinstance(usage, dict):
        assert usage_of(SimpleNamespace(**usage)) == read


@pytest.mark.parametrize(
    ("details", "written"),
    [
        ({"cache_read": 60, "cache_creation": 30}, {"": 30}),
        (
            {"cache_read": 60, "cache_creation": 0, "ephemeral_5m_input_tokens": 20,
             "ephemeral_1h_input_tokens": 10},
            {"5m": 20, "1h": 10},
        ),
        (
            {"cache_creation": 30, "ephemeral_5m_input_tokens": 20,
             "ephemeral_1h_input_tokens": 10},
            {"5m": 20, "1h": 10},
        ),
        ({}, None),
    ],
)  # fmt: skip
def test_langchains_details_count_once(details, written):
    usage: Any = {
        "input_tokens": 100, "output_tokens": 5, "total_tokens": 105,
        "input_token_details": details,
    }  # fmt: skip
    found = reported_usage(ChatGeneration(message=AIMessage("a", usage_metadata=usage)))
    assert found == ReportedTokens(100, details.get("cache_read"), 5, written)


@pytest.mark.parametrize("name", ["usage", "usage_metadata", "usageMetadata"])
def test_an_answers_usage_is_found_under_each_name(name):
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    for answer in ({name: usage}, SimpleNamespace(**{name: SimpleNamespace(**usage)})):
        assert usage_in(answer) == ReportedTokens(9, 8)
    assert usage_in({name: None, "id": 1}) is None
    assert usage_in(None) is None


def test_parts_of_an_answer_add_up_or_tell_all_so_far():
    one, other = ReportedTokens(90, 60, 3, {"": 5}), ReportedTokens(0, None, 4, {"": 2, "1h": 1})
    assert one.with_more(other, adds_up=True) == ReportedTokens(90, 60, 7, {"": 7, "1h": 1})
    assert one.with_more(other, adds_up=False) == ReportedTokens(90, 60, 4, {"": 5, "1h": 1})
    again = ReportedTokens(90, 60, 9)  # a part that tells the prompt again
    assert one.with_more(again, adds_up=True) == ReportedTokens(90, 60, 9, {"": 5})
    nothing = ReportedTokens(None)
    for adds_up in (True, False):
        assert one.with_more(nothing, adds_up=adds_up) == one
        assert nothing.with_more(one, adds_up=adds_up) == one


def test_savings_sum_what_was_written_by_time_to_live():
    planner = ReusePlanner(cache="anthropic(life=1h)", tenant_class=lambda tenant: "paid")
    plan = planner.plan(ContextRequest(["one"]))
    planner.report_usage(plan, 100, 60, written_tokens={"5m": 20, "1h": 10})
    planner.report_usage(plan, 100, 60, written_tokens=30)
    planner.report_usage(plan, 100, 60)
    reported = planner.savings.reported
    assert reported.written == {"5m": 20, "1h": 40}
    assert reported.written_tokens == 60
    assert (reported.prompt_tokens, reported.cached_tokens) == (300, 180)
    assert planner.savings.as_json()["reported"]["written"] == {"5m": 20, "1h": 40}
    assert planner.savings.by_class["paid"].reported.written == {"5m": 20, "1h": 40}
