"""A wrapped model inside somebody else's wrapper, inside a wrapped model: tenants stay apart."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_model_helpers import RecordingModel, StreamingModel, configured, question
from pydantic import Field

from ctxreuse import request_context
from ctxreuse.context.scope import NO_SCOPE, RequestScope, current_scope
from langchain_ctxreuse import ReuseChatModel


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
