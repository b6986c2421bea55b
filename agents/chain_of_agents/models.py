"""Who answers: an engine pool, a LangChain chat model, or a LlamaIndex LLM, behind one face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig

from ctxreuse.blocks import ContextRequest
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.plans import Plan
from ctxreuse.serving.call import check_params
from ctxreuse.serving.pool import EnginePool
from ctxreuse.serving.waiting_room import WaitingRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A model's answer to one agent.

    Attributes:
        text: What it says; anything but a text is None.
        plan: What was sent.
        replica: The engine that answered; empty where there is only one model.
        prompt_tokens: Tokens of the prompt; None where the model does not tell.
        cached_tokens: Those served from the prefix cache; None is unknown.
        completion_tokens: Tokens of the answer.
    """

    text: str | None
    plan: Plan
    replica: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One agent's call.

    Attributes:
        request: What it reads and is asked.
        replica: The engine that it lives on; None leaves it to the pool.
        session_id: The agent's name for routers in front of engines.
        max_tokens: Tokens of the longest answer.
        limit_s: Seconds from being sent after which the call has failed; None waits.
        config: LangChain's config of this call, with its callbacks.
    """

    request: ContextRequest
    replica: str | None = None
    session_id: str | None = None
    max_tokens: int = 256
    limit_s: float | None = None
    config: RunnableConfig | None = None


class ReplyStream:
    """An answer that comes piece by piece; `reply` is there once it has ended."""

    def __init__(self) -> None:
        self.reply: Reply | None = None


class AgentModel(Protocol):
    """What a chain needs of whoever answers."""

    @property
    def keeps_connections(self) -> bool:
        """Whether connections outlive a call, so that sync calls must share an event loop."""

    def all_engines(self) -> tuple[str, ...]:
        """Return the names of all engines; a model object is one without a name."""

    def engines(self) -> tuple[str, ...]:
        """Return the names of those that may be sent something."""

    def generation(self, engine: str) -> int:
        """Return how often an engine has been found with an empty cache."""

    async def context_window(self) -> int | None:
        """Return the tokens of the longest prompt with its answer; None if nobody says."""

    async def ask(self, ask: Ask) -> Reply:
        """Send an agent's call and wait for the answer."""

    def stream(self, ask: Ask, into: ReplyStream) -> AsyncGenerator[str]:
        """Send an agent's call and yield the answer's pieces."""

    async def disconnect(self) -> None:
        """Close the connections of the running event loop."""

    async def aclose(self) -> None:
        """Close what the chain has opened."""


class PoolModel:
    """Engines behind OpenAI-compatible addresses.

    Args:
        pool: The engines.
        params: What each call sends besides: `temperature`, `extra_body`, ...
        owned: Whether the chain has made the pool, and so closes it.
    """

    keeps_connections = False

    def __init__(self, pool: EnginePool, params: Mapping[str, Any], owned: bool) -> None:
        if "max_tokens" in params:
            raise InvalidRequestError(
                "params must not have max_tokens; give note_tokens and answer_tokens"
            )
        check_params(params)
        self._pool = pool
        self._params = dict(params)
        self._owned = owned

    def all_engines(self) -> tuple[str, ...]:
        """Return the names of all replicas."""
        return self._pool.names

    def engines(self) -> tuple[str, ...]:
        """Return the names of the replicas that may be sent something."""
        return self._pool.available()

    def generation(self, engine: str) -> int:
        """Return how often a replica has been found with an empty cache."""
        return self._pool.generation(engine)

    async def context_window(self) -> int | None:
        """Return what the engines say."""
        return await self._pool.context_window()

    async def ask(self, ask: Ask) -> Reply:
        """Send a call to the agent's replica, or where the pool sends it."""
        served = await self._pool.complete(
            ask.request,
            replica=ask.replica,
            session_id=ask.session_id,
            limit_s=ask.limit_s,
            max_tokens=ask.max_tokens,
            **self._params,
        )
        return self._reply(served)

    async def stream(self, ask: Ask, into: ReplyStream) -> AsyncGenerator[str]:
        """Yield the answer's pieces."""
        async with self._pool.stream(
            ask.request,
            replica=ask.replica,
            session_id=ask.session_id,
            limit_s=ask.limit_s,
            max_tokens=ask.max_tokens,
            **self._params,
        ) as pieces:
            async for piece in pieces:
                yield piece
            into.reply = self._reply(pieces.served)

    async def disconnect(self) -> None:
        """Close the connections of the running event loop."""
        await self._pool.disconnect()

    async def aclose(self) -> None:
        """Close the pool, if it is the chain's own."""
        if self._owned:
            await self._pool.aclose()

    @staticmethod
    def _reply(served: Any) -> Reply:
        completion = served.completion
        return Reply(
            text=completion.text,
            plan=served.plan,
            replica=served.replica,
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            completion_tokens=completion.completion_tokens,
        )


class _OneModel:
    """A model object of a framework: one engine, as far as anybody can tell."""

    keeps_connections = True

    def __init__(self, planner: ReusePlanner, concurrency: int) -> None:
        self._planner = planner
        self._room = WaitingRoom(planner, concurrency)

    def all_engines(self) -> tuple[str, ...]:
        return ("",)

    def engines(self) -> tuple[str, ...]:
        return ("",)

    def generation(self, engine: str) -> int:
        return 0

    async def disconnect(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    @asynccontextmanager
    async def _sending(self, ask: Ask) -> AsyncIterator[Plan]:
        """Wait for a place and hold it; the planner hears of a call that was not answered."""
        async with self._room.turn(ask.request) as plan:
            try:
                async with asyncio.timeout(ask.limit_s):
                    yield plan
            except BaseException:
                self._planner.evict([plan.request_id])
                raise


class LangChainModel(_OneModel):
    """A LangChain chat model, as it is or bound to arguments.

    Args:
        model: The model; its own settings bound its answers.
        planner: Plans the prompts.
        concurrency: Calls under way at a time.
    """

    def __init__(self, model: Runnable[Any, Any], planner: ReusePlanner, concurrency: int) -> None:
        super().__init__(planner, concurrency)
        self._model = model

    async def context_window(self) -> int | None:
        """Return what the model's profile says."""
        profile = getattr(self._model, "profile", None) or {}
        window = profile.get("max_input_tokens") if isinstance(profile, Mapping) else None
        return window if isinstance(window, int) and window > 0 else None

    async def ask(self, ask: Ask) -> Reply:
        """Send a call."""
        async with self._sending(ask) as plan:
            message = await self._model.ainvoke(_langchain_messages(plan), ask.config)
        return _langchain_reply(message, plan)

    async def stream(self, ask: Ask, into: ReplyStream) -> AsyncGenerator[str]:
        """Yield the answer's pieces."""
        whole: Any = None
        async with self._sending(ask) as plan:
            chunks: Any = self._model.astream(_langchain_messages(plan), ask.config)
            async with aclosing(chunks):
                async for chunk in chunks:
                    whole = chunk if whole is None else whole + chunk
                    text = _langchain_text(chunk)
                    if text:
                        yield text
        into.reply = _langchain_reply(whole, plan)


class LlamaIndexModel(_OneModel):
    """A LlamaIndex LLM.

    Args:
        llm: The LLM; its own settings bound its answers.
        planner: Plans the prompts.
        concurrency: Calls under way at a time.
    """

    def __init__(self, llm: Any, planner: ReusePlanner, concurrency: int) -> None:
        super().__init__(planner, concurrency)
        self._llm = llm

    async def context_window(self) -> int | None:
        """Return what the LLM's metadata say."""
        window = getattr(self._llm.metadata, "context_window", None)
        return window if isinstance(window, int) and window > 0 else None

    async def ask(self, ask: Ask) -> Reply:
        """Send a call."""
        async with self._sending(ask) as plan:
            response = await self._llm.achat(_llamaindex_messages(plan))
        return _llamaindex_reply(response, plan, response.message.content)

    async def stream(self, ask: Ask, into: ReplyStream) -> AsyncGenerator[str]:
        """Yield the answer's pieces."""
        text, response = "", None
        async with self._sending(ask) as plan:
            chunks = await self._llm.astream_chat(_llamaindex_messages(plan))
            async with aclosing(chunks):
                async for response in chunks:
                    if response.delta:
                        text += response.delta
                        yield response.delta
        into.reply = _llamaindex_reply(response, plan, text)


def as_model(
    llm: object,
    planner: ReusePlanner,
    concurrency: int,
    params: Mapping[str, Any],
    client: Mapping[str, Any],
) -> AgentModel:
    """Return who answers, for what users have at hand.

    Args:
        llm: A LangChain chat model, a LlamaIndex LLM, an address or several, or an `EnginePool`.
        planner: Plans the prompts; a pool's replicas get planners with its settings.
        concurrency: Calls under way at a time, at each engine.
        params: What each call to an engine sends besides.
        client: Arguments of an `EnginePool` that is made here.

    Raises:
        InvalidRequestError: If it is none of these, or has options that are for another kind.
    """
    if isinstance(llm, EnginePool):
        if client:
            raise InvalidRequestError(
                f"{', '.join(client)}: give these to the EnginePool, which is made already"
            )
        return PoolModel(llm, params, owned=False)
    if isinstance(llm, str) or (
        isinstance(llm, Sequence) and llm and all(isinstance(one, str) for one in llm)
    ):
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


def _langchain_messages(plan: Plan) -> list[BaseMessage]:
    return convert_to_messages(plan.messages())


def _langchain_text(message: object) -> str | None:
    """Return the text of a message, whose content may be a list of parts; None if it has none."""
    if isinstance(message, str):
        return message
    if not isinstance(message, BaseMessage):
        return None
    if isinstance(message.content, str):
        return message.content
    texts = [part if isinstance(part, str) else part.get("text") for part in message.content]
    return "".join(text for text in texts if isinstance(text, str)) if texts else None


def _langchain_reply(message: object, plan: Plan) -> Reply:
    usage = getattr(message, "usage_metadata", None) or {}
    return Reply(
        text=_langchain_text(message),
        plan=plan,
        prompt_tokens=usage.get("input_tokens"),
        cached_tokens=(usage.get("input_token_details") or {}).get("cache_read"),
        completion_tokens=usage.get("output_tokens"),
    )


def _llamaindex_messages(plan: Plan) -> list[Any]:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(**message) for message in plan.messages()]


def _llamaindex_reply(response: Any, plan: Plan, text: object) -> Reply:
    usage = getattr(getattr(response, "raw", None), "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    return Reply(
        text=text if isinstance(text, str) else None,
        plan=plan,
        prompt_tokens=getattr(usage, "prompt_tokens", None),
        cached_tokens=getattr(details, "cached_tokens", None),
        completion_tokens=getattr(usage, "completion_tokens", None),
    )
