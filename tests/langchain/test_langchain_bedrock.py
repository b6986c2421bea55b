"""Wrapped chat models of Amazon Bedrock, whose marks are blocks of their own."""

from itertools import pairwise
from typing import Any

import pytest
from caching_server import CachingServer
from converse_model import ChatBedrock, ChatBedrockConverse
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_hosted import found, planner_for
from langchain_hosted import wrapped as wrapped_at

from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, format_context

ROUNDS = ["one two three", "two one four", "five one two", "one two"]
POINT = {"cachePoint": {"type": "default"}}


def wrapped(server: CachingServer, cache: str = "bedrock") -> ReuseChatModel:
    return wrapped_at(server, cache, ChatBedrockConverse.at(server))


def points(model: ReuseChatModel) -> int:
    body = model.inner.sent[-1]
    contents = [body["system"], *(one["content"] for one in body["messages"])]
    return sum("cachePoint" in one for content in contents for one in content)


@pytest.mark.parametrize("life", ["5m", "1h"])
def test_cache_points_stand_where_prompts_fork(server, life):
    model = wrapped(server, f"bedrock(life={life})")
    for number, names in enumerate([*ROUNDS, *ROUNDS]):
        context = format_context(found(names))
        model.invoke([SystemMessage("Be brief."), HumanMessage(f"{context}\n\nQ {number}?")])
    assert server.usages[-1].read > 1_500
    assert {ttl for usage in server.usages for ttl in usage.written} == {life}
    reported = model.planner.savings.reported
    assert reported.cached_tokens == sum(usage.read for usage in server.usages)
    assert not server.refusals


@pytest.mark.parametrize("users", range(7))
def test_the_users_cache_points_stay_and_a_fifth_never_leaves_us(server, users):
    model = wrapped(server)
    rules: list[Any] = []
    for number in range(users):
        rules += [{"type": "text", "text": f"rule{number} holds"}, POINT]
    for number, names in enumerate(ROUNDS):
        text = {"type": "text", "text": f"{format_context(found(names))}\n\nQ {number}?"}
        messages: list[BaseMessage] = [HumanMessage([*rules, text])]
        if rules:
            messages.insert(0, SystemMessage([{"type": "text", "text": "Be brief."}]))
        model.invoke(messages)
        content = model.inner.sent[-1]["messages"][0]["content"]
        kept = [one["text"] for one, point in pairwise(content) if point == POINT]
        expected = [f"rule{n} holds" for n in range(users)][-4:]
        assert kept[: len(expected)] == expected
        assert points(model) <= 4
    assert not server.refusals


def test_a_cache_point_of_the_users_behind_a_context_is_not_doubled(server):
    model = wrapped(server)
    history: list[BaseMessage] = []
    for number in range(3):
        text = {"type": "text", "text": f"{format_context(found('one two'))}\n\nQ {number}?"}
        image = {"image": {"format": "png", "source": {"bytes": "x"}}}
        history.append(HumanMessage([image, text, POINT], name="ann"))
        config: Any = {"configurable": {"thread_id": "c"}}
        history.append(AIMessage(model.invoke(history, config).content))
        assert model.inner.sent[-1]["messages"][-1]["content"][0] == image
    assert points(model) <= 4


def test_each_turn_of_a_conversation_reads_the_turn_before(server):
    model = wrapped(server)
    messages: list[BaseMessage] = [SystemMessage("Be brief.")]
    for number, names in enumerate(["one two three", "four five", "six one"]):
        messages.append(HumanMessage(f"{format_context(found(names))}\n\nQ {number}?"))
        config: Any = {"configurable": {"thread_id": "c1"}}
        before = server.usages[-1].total if server.usages else 0
        messages.append(AIMessage(model.invoke(messages, config).content))
        assert server.usages[-1].read == before


def test_an_agents_tool_result_has_one_cache_point_behind_it(server):
    ours = ReuseMiddleware(planner=planner_for(server, "bedrock"))
    inner = ChatBedrockConverse.at(server)
    agent: Any = create_agent(inner, middleware=[ours])
    for number in range(3):
        documents = found("one two three")
        text = "\n\n".join(one.page_content for one in documents)
        call = {"name": "search", "args": {}, "id": "t"}
        agent.invoke(
            {
                "messages": [
                    HumanMessage(f"Q {number}?"),
                    AIMessage("Wait.", tool_calls=[call]),
                    ToolMessage(text, artifact=documents, tool_call_id="t", id="r"),
                ]
            }
        )
        content = inner.sent[-1]["messages"][-1]["content"]
        assert [list(one) for one in content] == [["toolResult"], ["cachePoint"]]


def test_the_older_class_sends_them_where_it_uses_that_api(server):
    planner = planner_for(server, "bedrock")
    points_sent = []
    for uses_converse in (False, True):
        inner = ChatBedrock.at(server)
        inner.beta_use_converse_api = uses_converse
        model = wrapped_at(server, inner=inner, planner=planner)
        for number in range(3):
            model.invoke([HumanMessage(f"{format_context(found('one two'))}\n\nQ {number}?")])
        points_sent.append(points(model))
    assert points_sent[0] == 0
    assert points_sent[1] > 0
