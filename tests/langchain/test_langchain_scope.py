from uuid import UUID

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_document_helpers import no_sockets

import ctxreuse
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from langchain_ctxreuse.scope import history_as_openai, scope_from_config

__all__ = ["no_sockets"]


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
