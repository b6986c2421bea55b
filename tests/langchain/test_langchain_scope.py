from typing import Any
from uuid import UUID

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_model_helpers import PIXEL

import ctxreuse
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.pipeline.prompt_turn import PromptPart
from langchain_ctxreuse.messages import prompt_texts
from langchain_ctxreuse.scope import history_as_openai, scope_from_config


def config(**configurable: object) -> RunnableConfig:
    return {"configurable": configurable}


def test_a_config_refines_what_is_said_around_it_as_text():
    with ctxreuse.request_context(tenant="acme", conversation_id="t1"):
        assert scope_from_config(None) == RequestScope("acme", "t1")
        assert scope_from_config(config(thread_id="t2")) == RequestScope("acme", "t2")
        assert scope_from_config(config(tenant="other")) == RequestScope("other", None)
    thread = UUID(int=1)
    assert scope_from_config(config(tenant=5, thread_id=thread)) == RequestScope("5", str(thread))
    assert scope_from_config(config(thread_id=7)) == RequestScope(None, 7)
    chain = RunnableLambda(lambda _: scope_from_config(None)) | (lambda scope: scope)
    assert chain.invoke("x", config(tenant="acme", thread_id="t1")) == RequestScope("acme", "t1")
    assert scope_from_config(None) == NO_SCOPE
    assert scope_from_config({}) == NO_SCOPE
    assert scope_from_config(config(checkpoint_ns="")) == NO_SCOPE


def test_a_history_is_what_langchain_takes_without_system_messages():
    said = [("user", "Which?"), ("ai", "This."), "And why?", ["system", "Be brief."]]
    assert history_as_openai(said) == [
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "This."},
        {"role": "user", "content": "And why?"},
    ]
    messages = [SystemMessage("Be brief."), HumanMessage("Which?")]
    assert history_as_openai(messages) == [{"role": "user", "content": "Which?"}]
    found = [{"type": "tool_result", "tool_use_id": one, "content": f"{one} is so"} for one in "ab"]
    history = history_as_openai([HumanMessage([*found, {"type": "text", "text": "Which?"}])])
    assert [one["content"] for one in history] == ["Which?", "a is so", "b is so"]


def test_tool_calls_and_results_become_openai_messages():
    call = {"name": "search", "args": {"query": "x"}, "id": "c1", "type": "tool_call"}
    assert history_as_openai(
        [AIMessage("", tool_calls=[call]), ToolMessage("found", tool_call_id="c1")]
    ) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "c1",
                    "function": {"name": "search", "arguments": '{"query": "x"}'},
                }
            ],
        },
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    "part", [{"type": "image_url"}, {"text": "x"}, {"type": "media", "mime_type": 3, "data": 4}]
)
def test_of_content_that_openai_does_not_know_the_text_is_kept(part):
    text = "Which?\nx" if "text" in part else "Which?"
    message = HumanMessage([{"type": "text", "text": "Which?"}, part])
    assert history_as_openai([message]) == [{"role": "user", "content": text}]


class TestMessageTexts:
    def test_roles_have_openais_names(self):
        messages = [
            SystemMessage("s"),
            HumanMessage("u"),
            AIMessage("a"),
            AIMessageChunk("c"),
            ToolMessage("t", tool_call_id="1"),
            FunctionMessage("f", name="f"),
            ChatMessage("o", role="critic"),
        ]
        assert list(prompt_texts(messages, {}).parts) == [
            PromptPart("system", "s"),
            PromptPart("user", "u"),
            PromptPart("assistant", "a"),
            PromptPart("assistant", "c"),
            PromptPart("tool", "t"),
            PromptPart("function", "f"),
            PromptPart("critic", "o"),
        ]

    def test_what_is_no_text_stands_for_itself(self):
        def segments(*parts: Any) -> list[PromptPart]:
            return list(prompt_texts([HumanMessage(list(parts))], {}).parts)

        [first, image, last] = segments("a", PIXEL, {"type": "text", "text": "b"})
        assert (first, last) == (PromptPart("user", "a"), PromptPart("user", "b"))
        assert image.role == "user"
        assert "AAAA" not in image.text
        other = {"type": "image_url", "image_url": {"url": "other"}}
        assert segments(PIXEL) == [image]
        assert segments(other) != [image]

    def test_tool_calls_and_empty_messages_count(self):
        one = AIMessage("", tool_calls=[{"name": "look", "args": {"at": 1}, "id": "1"}])
        other = AIMessage("", tool_calls=[{"name": "look", "args": {"at": 2}, "id": "1"}])
        assert prompt_texts([one], {}).parts != prompt_texts([other], {}).parts
        assert prompt_texts([one], {}).parts[0] == PromptPart("assistant", "")
        assert prompt_texts([AIMessage([])], {}).parts == (PromptPart("assistant", ""),)
