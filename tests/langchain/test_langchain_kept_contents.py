"""What the user has put on messages stays in prompts that a wrapped chat model sends."""

from typing import Any

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_model_helpers import RecordingModel
from message_contents import Message, check_kept, conversations

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, format_context

KINDS: dict[str, Any] = {"user": HumanMessage, "assistant": AIMessage, "system": SystemMessage}
DOCUMENTS = [Document(id=one, page_content=one * 5_000) for one in "ab"]


def as_langchain(messages: list[Message]) -> list[BaseMessage]:
    return [
        KINDS[one.role](one.content, additional_kwargs={"mine": number}, **one.beside)
        for number, one in enumerate(messages)
    ]


def check(sent: list[BaseMessage], messages: list[BaseMessage], cache: str) -> None:
    before, after = [one.content for one in messages], [one.content for one in sent]
    check_kept(before, after, cache=cache)
    for one, other in zip(sent, messages, strict=True):
        assert one.model_copy(update={"content": ""}) == other.model_copy(update={"content": ""})


@given(conversations(), st.sampled_from(["openai", "anthropic", "vllm"]), st.booleans())
@examples(150)
def test_contents_names_and_fields_are_kept(messages, cache, is_named):
    inner = RecordingModel()
    planner = ReusePlanner(cache=cache)
    model = ReuseChatModel(inner=inner, planner=planner, window_s=0, strategy="none")
    for number in range(3):
        context = format_context(DOCUMENTS)
        given = as_langchain([one.filled(context) for one in messages])
        copies = [one.model_copy(deep=True) for one in given]
        name = f"c{number}"
        model.invoke(given, {"configurable": {"thread_id": name}} if is_named else None)
        assert given == copies
        check(inner.calls[-1].messages, given, cache)


@pytest.mark.parametrize("is_wrapped", [False, True])
@given(conversations())
@examples(25)
def test_an_agents_messages_are_kept(is_wrapped, messages):
    inner = RecordingModel()
    planner = ReusePlanner(cache="anthropic")
    model = ReuseChatModel(inner=inner, planner=planner, window_s=0) if is_wrapped else inner
    found = RunnableLambda(lambda query: DOCUMENTS)
    ours = ReuseMiddleware(planner=planner, retriever=found)
    agent: Any = create_agent(model, middleware=[ours])
    before = as_langchain([one for one in messages[:-1] if one.role != "system"])
    for _ in range(3):
        agent.invoke({"messages": [*before, HumanMessage("Which?")]})
        sent = inner.calls[-1].messages
        check_kept([one.content for one in before], [one.content for one in sent[:-1]])
        assert [one.name for one in sent[:-1]] == [one.name for one in before]
