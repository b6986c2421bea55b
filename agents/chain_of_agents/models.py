"""The models that answer agents: engines of a pool, a LangChain model, or a LlamaIndex LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.checks import check_keywords, reported_count
from ctxreuse.context.copies import made_with
from ctxreuse.context.reported_usage import ReportedTokens, reported_field, usage_in
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.request import check_params
from ctxreuse.serving.pool.admission import AdmissionQueue, AdmissionSlot
from ctxreuse.serving.pool.engine_pool import EnginePool, PoolResult

_SET_HERE = ("engines", "base_url", "events", "retries", "client")
_ATTEMPTS = 6
"""Of a request: an engine that is away for some seconds fails no question of many calls."""

OnPiece: TypeAlias = Callable[[str], object]
"""Called with each piece of an answer when it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """A model's answer to one agent."""

    text: str | None  # None where the model gave something other than text
    plan: Plan
    replica: str = ""  # empty where there is only one model
    usage: ReportedTokens = field(default_factory=ReportedTokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One agent's request."""

    context: ContextRequest
    replica: str | None = None  # where the agent lives; None: the pool chooses
    session_id: str | None = None
    max_tokens: int = 256
    limit_s: float | None = None  # from being sent; None waits


def as_model(
    llm: object,
    planner: ReusePlanner,
    concurrency: int,
    params: Mapping[str, Any],
    client: Mapping[str, Any],
    chain: Callable[..., Any],
) -> AgentModel:
    """Return the AgentModel for what the user gives."""
    check_keywords("ChainOfAgents", client, chain, EnginePool, EngineClient, without=_SET_HERE)
    if isinstance(llm, EnginePool):
        if client:
            raise InvalidRequestError(
                f"{', '.join(client)}: give these to the EnginePool, which is made already"
            )
        return PoolModel(llm, params, owned=False)
    if isinstance(llm, str) or (
        isinstance(llm, Sequence) and llm and all(isinstance(one, str) for one in llm)
    ):
        client = {"attempts": _ATTEMPTS, **client}
        pool = EnginePool(llm, planner=planner, concurrency=concurrency, **client)
        return PoolModel(pool, params, owned=True)
    if params or client:
        raise InvalidRequestError(
            f"{', '.join([*params, *client])}: these are for addresses; set them on the model"
        )
    if isinstance(llm, Runnable):
        return LangChainModel(llm, planner, concurrency)
    if hasattr(llm, "achat") and hasattr(llm, "metadata"):
        return LlamaIndexModel(llm, planner, concurrency)
    raise InvalidRequestError(
        "llm must be a LangChain chat model, a LlamaIndex LLM, an address such as "
        f"'http://127.0.0.1:8000/v1', a list of addresses or an EnginePool, not {describe(llm)}"
    )


class PoolModel:
    """AgentModel backed by an `EnginePool`."""

    keeps_connections = False  # beyond a request, so that sync calls must share an event loop

    def __init__(self, pool: EnginePool, params: Mapping[str, Any], owned: bool) -> None:
        if "max_tokens" in params:
            raise InvalidRequestError(
                "params must not have max_tokens; give note_tokens and answer_tokens"
            )
        check_params(params)
        self.engines = pool
        self._params = dict(params)
        self._owned = owned

    async def ask(
        self, request: AgentRequest, config: RunnableConfig, on_piece: OnPiece | None = None
    ) -> AgentReply:
        """Send a request to the agent's replica, or to the one that the pool chooses."""
        result = await self._ask(request, request.replica, on_piece)
        # one that says nothing is not asked again: another one is
        if not result.completion.text.strip() and (
            others := [name for name in self.engines.available() if name != result.replica]
        ):
            other = self.engines.route(request.context, among=others)
            result = await self._ask(request, other, on_piece)
        completion = result.completion
        return AgentReply(
            text=completion.text,
            plan=result.plan,
            replica=result.replica,
            usage=ReportedTokens(
                completion.prompt_tokens, completion.cached_tokens, completion.completion_tokens
            ),
        )

    async def _ask(
        self, request: AgentRequest, replica: str | None, on_piece: OnPiece | None
    ) -> PoolResult:
        options: dict[str, Any] = {
            "replica": replica,
            "session_id": request.session_id,
            "limit_s": request.limit_s,
            "max_tokens": request.max_tokens,
            **self._params,
        }
        if on_piece is None:
            return await self.engines.complete(request.context, **options)
        async with self.engines.stream(request.context, **options) as pieces:
            async for piece in pieces:
                on_piece(piece)
        return pieces.served

    async def aclose(self) -> None:
        """Close the pool, if the chain has made it."""
        if self._owned:
            await self.engines.aclose()


class SingleEngineModel:
    """A model object, which counts as one engine without a name."""

    keeps_connections = True
    names = ("",)

    def __init__(self, model: Any, planner: ReusePlanner, concurrency: int) -> None:
        self._model = model
        self._planner = planner
        self._concurrency = concurrency
        self._queue = AdmissionQueue(planner, concurrency)

    def __reduce__(self) -> tuple[Any, ...]:
        return made_with(type(self), self._model, self._planner, self._concurrency)

    @property
    def engines(self) -> Self:
        """The model itself."""
        return self

    def available(self) -> tuple[str, ...]:
        """Return the one engine's name."""
        return self.names

    def cache_epoch(self, engine: str) -> int:
        """Return 0: it is unknown when the engine's cache was emptied."""
        return 0

    async def aclose(self) -> None:
        """Do nothing: the connections belong to the model object."""

    disconnect = aclose

    @asynccontextmanager
    async def _sending(self, request: AgentRequest) -> AsyncIterator[Plan]:
        """Wait for admission; the planner forgets a request that was not answered."""
        async with AdmissionSlot(self._queue, request.context) as plan:
            try:
                async with asyncio.timeout(request.limit_s):
                    yield plan
            except BaseException:
                self._queue.forget(plan)
                raise


class LangChainModel(SingleEngineModel):
    """AgentModel backed by a LangChain chat model, bound to arguments or not."""

    async def context_window(self) -> int | None:
        """Return what the model's profile says."""
        profile = getattr(self._model, "profile", None)
        return reported_count(reported_field(profile, "max_input_tokens")) or None

    async def ask(
        self, request: AgentRequest, config: RunnableConfig, on_piece: OnPiece | None = None
    ) -> AgentReply:
        """Send a request."""
        message: Any = None
        async with self._sending(request) as plan:
            messages = convert_to_messages(plan.messages())
            if on_piece is None:
                message = await self._model.ainvoke(messages, config)
            else:
                chunks: Any = self._model.astream(messages, config)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        message = chunk if message is None else message + chunk
                        if text := _text(chunk):
                            on_piece(text)
        usage = usage_in(message) or ReportedTokens()
        return AgentReply(text=_text(message), plan=plan, usage=usage)


class LlamaIndexModel(SingleEngineModel):
    """AgentModel backed by a LlamaIndex LLM."""

    async def context_window(self) -> int | None:
        """Return what the LLM's metadata say."""
        return reported_count(getattr(self._model.metadata, "context_window", None)) or None

    async def ask(
        self, request: AgentRequest, config: RunnableConfig, on_piece: OnPiece | None = None
    ) -> AgentReply:
        """Send a request."""
        from llama_index.core.llms import ChatMessage

        response: Any = None
        text: Any = ""
        async with self._sending(request) as plan:
            messages = [ChatMessage(**message) for message in plan.messages()]
            if on_piece is None:
                response = await self._model.achat(messages)
                text = response.message.content
            else:
                async with aclosing(await self._model.astream_chat(messages)) as chunks:
                    async for response in chunks:
                        if response.delta:
                            text += response.delta
                            on_piece(response.delta)
        usage = usage_in(getattr(response, "raw", None))
        said = text if isinstance(text, str) else None
        return AgentReply(text=said, plan=plan, usage=usage or ReportedTokens())


AgentModel: TypeAlias = PoolModel | LangChainModel | LlamaIndexModel
"""What answers a chain's agents."""


def _text(message: object) -> str | None:
    if isinstance(message, BaseMessage) and message.content != []:
        return str(message.text)
    return message if isinstance(message, str) else None
