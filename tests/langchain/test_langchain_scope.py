"""Whose request it is: configs, histories, and wrapped models inside other wrappers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_model_helpers import PIXEL, RecordingModel, StreamingModel, configured, question
from pydantic import Field

import ctxreuse
from ctxreuse import request_context
from ctxreuse.context.scope import NO_SCOPE, RequestScope, current_scope
from ctxreuse.pipeline.prompt_turn import PromptPart
from langchain_ctxreuse import ReuseChatModel
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


class Foreign(BaseChatModel):
    """Another package's wrapper; it notes whose request the code inside it serves."""

    inner: BaseChatModel
    scopes: list[RequestScope] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "foreign"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.scopes.append(current_scope())
        return self.inner._generate(messages, *args, **kwargs)

    async def _agenerate(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> ChatResult:
        self.scopes.append(current_scope())
        return await self.inner._agenerate(messages, *args, **kwargs)


class ForeignStream(Foreign):
    """One that streams."""

    def _stream(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        self.scopes.append(current_scope())
        yield from self.inner._stream(messages, *args, **kwargs)

    async def _astream(
        self, messages: list[BaseMessage], *args: Any, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        self.scopes.append(current_scope())
        async for chunk in self.inner._astream(messages, *args, **kwargs):
            yield chunk


async def _all(chunks: AsyncIterator[Any]) -> None:
    async for _ in chunks:
        assert current_scope() == NO_SCOPE, "the reader's context shows nothing"


def _read(chunks: Iterator[Any]) -> None:
    for _ in chunks:
        assert current_scope() == NO_SCOPE, "the reader's context shows nothing"


CALLS: dict[str, Any] = {
    "invoke": lambda model, config: model.invoke(question("ab"), config),
    "ainvoke": lambda model, config: asyncio.run(model.ainvoke(question("ab"), config)),
    "batch": lambda model, config: model.batch([question("ab")], config),
    "stream": lambda model, config: _read(model.stream(question("ab"), config)),
    "astream": lambda model, config: asyncio.run(_all(model.astream(question("ab"), config))),
}


@pytest.mark.parametrize("call", CALLS)
def test_code_inside_a_foreign_wrapper_knows_whose_request_it_serves(call):
    streams = "stream" in call
    engine = StreamingModel() if streams else RecordingModel()
    foreign = (ForeignStream if streams else Foreign)(inner=ReuseChatModel(inner=engine))
    model = ReuseChatModel(inner=foreign)
    CALLS[call](model, configured(tenant="acme", thread_id="c1"))
    assert [(one.tenant, one.conversation_id) for one in foreign.scopes] == [("acme", "c1")]
    assert current_scope() == NO_SCOPE


def test_what_one_tenant_sent_orders_nothing_for_another_behind_a_foreign_wrapper():
    engine = RecordingModel()
    within = ReuseChatModel(inner=engine)
    model = ReuseChatModel(inner=Foreign(inner=within), strategy="none")
    model.invoke(question("abc", tenant="one"), configured(tenant="one"))
    model.invoke(question("cba", tenant="two"), configured(tenant="two"))
    with request_context(tenant="three"):
        model.invoke(question("cab", tenant="three"))
    assert list(within.planner._planning._tenants._states) == ["one", "two", "three"]
