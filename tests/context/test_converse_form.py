"""Prompts in the form of Amazon Bedrock's Converse."""

from typing import Any

from caching_provider import count_tokens
from caching_server import caching_server
from converse_model import as_anthropic

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.rules.prompt_forms import converse_form

POINT = {"cachePoint": {"type": "default"}}


def planner(cache: str = "bedrock") -> ReusePlanner:
    return ReusePlanner(cache=cache, token_counter=count_tokens)


def blocks(*names: str) -> list[ContextBlock]:
    return [ContextBlock(id=one, text=f"{one} " * 700) for one in names]


def test_prompts_that_share_documents_read_them_and_turns_the_turn_before():
    shared = planner()
    with caching_server("anthropic") as server:
        for number in range(3):
            request = ContextRequest(blocks("a", "b"), f"Which {number}?", system="Be brief.")
            body = shared.plan(request).body("bedrock")
            assert body["system"] == [{"text": "Be brief."}]
            server.reckon(as_anthropic(body), {})
        assert server.usages[-1].read > 1_400
        chat = shared.conversation("c")
        for number in range(3):
            body = chat.plan(blocks(f"d{number}", "e"), "Which?").body("bedrock")
            before = server.usages[-1].total if number else 0
            server.reckon(as_anthropic(body), {})
            assert not number or server.usages[-1].read == before
            chat.record("Yes.")
        assert not server.refusals


def test_tools_come_as_a_tool_config_and_their_marks_count():
    shared = planner("bedrock(life=1h)")
    requests = [ContextRequest(blocks("a", "b", "c"), f"Which {n}?") for n in range(4)]
    plan = shared.plan_batch(requests).plans[0]
    tools: list[Any] = []
    for name in "vwxyz":
        tools += [{"toolSpec": {"name": name}}, POINT]
    body = plan.body("bedrock", tools=tools)
    assert body["toolConfig"]["tools"].count(POINT) == 4
    assert len(body["toolConfig"]["tools"]) == 9
    assert not any("cachePoint" in one for one in body["messages"][0]["content"])
    content = plan.body("bedrock")["messages"][0]["content"]
    assert {"cachePoint": {"type": "default", "ttl": "1h"}} in content


def test_what_messages_hold_is_kept():
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    odd = {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "[1"}}
    body = converse_form(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "And kind."}, POINT]},
            {
                "role": "user",
                "name": "ann",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
                    {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": " "},
                    "well",
                    7,
                ],
                "extra": 1,
            },
            {"role": "assistant", "content": None, "tool_calls": [call, odd]},
            {"role": "tool", "tool_call_id": "t1", "content": "found"},
            {
                "role": "tool",
                "tool_call_id": "t2",
                "content": [
                    {"type": "text", "text": "more", "cache_control": {"type": "ephemeral"}},
                    {
                        "type": "text",
                        "text": "and more",
                        "cache_control": {"type": "ephemeral", "ttl": "1h"},
                    },
                ],
            },
            {"role": "user", "content": "And?"},
        ]
    )
    assert body["system"] == [{"text": "Be brief."}, {"text": "And kind."}, POINT]
    assert body["messages"] == [
        {
            "role": "user",
            "content": [
                {"image": {"format": "png", "source": {"bytes": b"\x00"}}},
                {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
                {"text": "look"},
                POINT,
                {"text": "well"},
                7,
            ],
            "extra": 1,
        },
        {
            "role": "assistant",
            "content": [
                {"toolUse": {"toolUseId": "t1", "name": "f", "input": {"x": 1}}},
                {"toolUse": {"toolUseId": "t2", "name": "g", "input": {"arguments": "[1"}}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"toolResult": {"toolUseId": "t1", "content": [{"text": "found"}]}},
                {
                    "toolResult": {
                        "toolUseId": "t2",
                        "content": [{"text": "more"}, {"text": "and more"}],
                    }
                },
                {"cachePoint": {"type": "default", "ttl": "1h"}},
                {"text": "And?"},
            ],
        },
    ]
