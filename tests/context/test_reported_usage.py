"""Usage in the words of each provider: every token counts once."""

from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.context.reported_usage import ReportedTokens, usage_of
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
