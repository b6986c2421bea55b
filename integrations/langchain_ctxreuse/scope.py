"""Whose request it is, as LangChain users say it: `config={"configurable": {...}}`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, TypeVar, cast

from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import BaseModel, PrivateAttr

from ctxreuse.context.blocks import Message
from ctxreuse.context.scope import RequestScope, current_scope, serving
from langchain_ctxreuse.messages import text_parts

_Method = TypeVar("_Method", bound=Callable[..., Any])


class CarriedRequest(NamedTuple):
    """The request that a component serves."""

    config: RunnableConfig
    scope: RequestScope


class RequestCarrier(BaseModel):
    """A LangChain component whose private methods know the request that they serve.

    LangChain gives the config to the public methods only. The private ones may run later, in
    another thread or context. So each call runs on a shallow copy, which carries the request.
    """

    _request: CarriedRequest | None = PrivateAttr(default=None)

    @property
    def _carried(self) -> CarriedRequest:
        """The request of the call at hand; outside of one, what the code around says."""
        request = self._request
        if request is not None:
            return request
        config = ensure_config()
        return CarriedRequest(config, scope_from_config(config))


def on_carrying_copy(method: _Method) -> _Method:
    """Return a public method of LangChain's that runs on a copy that carries the request."""

    @wraps(method)
    def call(
        self: RequestCarrier,
        input: Any,  # noqa: A002  # LangChain's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        carrying, request = copy(self), self._request
        # a stream without chunks invokes its copy when it is read, maybe in another context
        with nullcontext() if request is None else serving(request.scope):
            whole = ensure_config(config)
            carrying._request = CarriedRequest(whole, scope_from_config(whole))
        return method(carrying, input, config, **kwargs)

    @wraps(method)
    async def acall(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return cast(_Method, acall if iscoroutinefunction(method) else call)


class CarryingRetriever(RequestCarrier, BaseRetriever):
    """A retriever whose private methods know the request that they serve."""

    invoke = on_carrying_copy(BaseRetriever.invoke)
    ainvoke = on_carrying_copy(BaseRetriever.ainvoke)


def scope_from_config(config: RunnableConfig | None) -> RequestScope:
    """Return a call's tenant and conversation: by config, else `request_context`."""
    configurable: Mapping[str, Any] = ensure_config(config).get("configurable", {})
    tenant, thread = configurable.get("tenant"), configurable.get("thread_id")
    return current_scope().inside(
        tenant=None if tenant is None else str(tenant),
        conversation_id=thread if isinstance(thread, int) or thread is None else str(thread),
    )


def tenant_from_config() -> str:
    """Return the tenant of a call, as `scope_from_config` does."""
    return scope_from_config(None).tenant or ""


def history_as_openai(messages: Iterable[BaseMessage]) -> list[Message]:
    """Return LangChain messages as a history: OpenAI chat messages, without system messages."""
    history: list[Message] = []
    for message in messages:
        try:
            converted = convert_to_openai_messages([message])
        except (KeyError, TypeError, ValueError):
            # it has a part that OpenAI does not know, or that lacks something
            text = "\n".join(text for text, _ in text_parts(message))
            converted = convert_to_openai_messages([message.model_copy(update={"content": text})])
        history += [one for one in converted if one["role"] not in ("system", "developer")]
    return history
