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
    ChatMessage,
    FunctionMessage,
    HumanMessage,
)
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_model_helpers import PIXEL, RecordingModel, StreamingModel, configured, question

import ctxreuse
from ctxreuse import request_context
from ctxreuse.context.scope import NO_SCOPE, RequestScope, current_scope
from ctxreuse.pipeline.prompt_turn import PromptPart
from langchain_ctxreuse import ReuseChatModel
from langchain_ctxreuse.messages import prompt_texts, role_of, text_parts
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


@pytest.mark.parametrize(
    "part", [{"type": "image_url"}, {"text": "x"}, {"type": "media", "mime_type": 3, "data": 4}]
)
def test_of_content_that_openai_does_not_know_the_text_is_kept(part):
    text = "Which?\nx" if "text" in part else "Which?"
    message = HumanMessage([{"type": "text", "text": "Which?"}, part])
    assert history_as_openai([message]) == [{"role": "user", "content": text}]


class TestMessageTexts:
    def test_roles_have_openais_names(self):
        class Asked(HumanMessage):
            type: Any = "asked"

        messages = [AIMessageChunk("a"), FunctionMessage("f", name="f"), ChatMessage("o", role="x")]
        roles = ["assistant", "function", "x", "user"]
        assert [role_of(one) for one in [*messages, Asked("u")]] == roles

    def test_a_message_may_lack_content(self):
        assert text_parts(HumanMessage("").model_copy(update={"content": None})) == []

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
    inner: BaseChatModel

    @property
    def _llm_type(self) -> str:
        return "foreign"

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        return self.inner._generate(*args, **kwargs)

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        return await self.inner._agenerate(*args, **kwargs)


class ForeignStream(Foreign):
    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        return self.inner._stream(*args, **kwargs)

    def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        return self.inner._astream(*args, **kwargs)


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
    scopes: list[RequestScope] = []
    engine = StreamingModel(before_answer=lambda text: scopes.append(current_scope()))
    kind = ForeignStream if "stream" in call else Foreign
    model = ReuseChatModel(inner=kind(inner=ReuseChatModel(inner=engine)))
    CALLS[call](model, configured(tenant="acme", thread_id="c1"))
    assert [(one.tenant, one.conversation_id) for one in scopes] == [("acme", "c1")]
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
