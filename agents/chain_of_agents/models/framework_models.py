"""AgentModels backed by a model object of LangChain or LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig

from chain_of_agents.models.agent_model import AgentReply, AgentRequest, OnPiece
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.pool.admission import AdmissionQueue


class SingleEngineModel:
    """A model object, which counts as one engine without a name.

    Args:
        planner: Plans the prompts.
        concurrency: Requests that run at a time.
    """

    keeps_connections = True
    names = ("",)

    def __init__(self, planner: ReusePlanner, concurrency: int) -> None:
        self._planner = planner
        self._queue = AdmissionQueue(planner, concurrency)

    @property
    def engines(self) -> SingleEngineModel:
        """The model itself."""
        return self

    def available(self) -> tuple[str, ...]:
        """Return the one engine's name."""
        return self.names

    def cache_epoch(self, engine: str) -> int:
        """Return 0: it is unknown when the engine's cache was emptied."""
        return 0

    async def disconnect(self) -> None:
        """Do nothing: the connections belong to the model object."""

    async def aclose(self) -> None:
        """Do nothing: the connections belong to the model object."""

    @asynccontextmanager
    async def _sending(self, request: AgentRequest) -> AsyncIterator[Plan]:
        """Wait for admission; the planner forgets a request that was not answered."""
        async with self._queue.slot(request.context) as plan:
            try:
                async with asyncio.timeout(request.limit_s):
                    yield plan
            except BaseException:
                self._planner.evict([plan.request_id])
                raise


class LangChainModel(SingleEngineModel):
    """AgentModel backed by a LangChain chat model, bound to arguments or not.

    Args:
        model: The model; its own settings bound its answers.
        planner: Plans the prompts.
        concurrency: Requests that run at a time.
    """

    def __init__(self, model: Runnable[Any, Any], planner: ReusePlanner, concurrency: int) -> None:
        super().__init__(planner, concurrency)
        self._model = model

    async def context_window(self) -> int | None:
        """Return what the model's profile says."""
        profile = getattr(self._model, "profile", None) or {}
        return _window(profile.get("max_input_tokens") if isinstance(profile, Mapping) else None)

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
        usage = getattr(message, "usage_metadata", None) or {}
        return AgentReply(
            text=_text(message),
            plan=plan,
            prompt_tokens=usage.get("input_tokens"),
            cached_tokens=(usage.get("input_token_details") or {}).get("cache_read"),
            completion_tokens=usage.get("output_tokens"),
        )


class LlamaIndexModel(SingleEngineModel):
    """AgentModel backed by a LlamaIndex LLM.

    Args:
        llm: The LLM; its own settings bound its answers.
        planner: Plans the prompts.
        concurrency: Requests that run at a time.
    """

    def __init__(self, llm: Any, planner: ReusePlanner, concurrency: int) -> None:
        super().__init__(planner, concurrency)
        self._llm = llm

    async def context_window(self) -> int | None:
        """Return what the LLM's metadata say."""
        return _window(getattr(self._llm.metadata, "context_window", None))

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
                response = await self._llm.achat(messages)
                text = response.message.content
            else:
                chunks = await self._llm.astream_chat(messages)
                async with aclosing(chunks):
                    async for response in chunks:
                        if response.delta:
                            text += response.delta
                            on_piece(response.delta)
        usage = getattr(getattr(response, "raw", None), "usage", None)
        details = getattr(usage, "prompt_tokens_details", None)
        return AgentReply(
            text=text if isinstance(text, str) else None,
            plan=plan,
            prompt_tokens=getattr(usage, "prompt_tokens", None),
            cached_tokens=getattr(details, "cached_tokens", None),
            completion_tokens=getattr(usage, "completion_tokens", None),
        )


def _window(tokens: object) -> int | None:
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _text(message: object) -> str | None:
    """Return the text of a message, whose content may be a list of parts; None if it has none."""
    if isinstance(message, str):
        return message
    if not isinstance(message, BaseMessage):
        return None
    if isinstance(message.content, str):
        return message.content
    texts = [part if isinstance(part, str) else part.get("text") for part in message.content]
    return "".join(text for text in texts if isinstance(text, str)) if texts else None
