"""A LangChain chat model, as whoever answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.runnables import Runnable

from chain_of_agents.models.agent_model import AgentRequest, Reply, ReplyStream
from chain_of_agents.models.single_engine_model import SingleEngineModel
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan


class LangChainModel(SingleEngineModel):
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

    async def ask(self, ask: AgentRequest) -> Reply:
        """Send a call."""
        async with self._sending(ask) as plan:
            message = await self._model.ainvoke(_messages(plan), ask.config)
        return _reply(message, plan)

    async def stream(self, ask: AgentRequest, into: ReplyStream) -> AsyncGenerator[str]:
        """Yield the answer's pieces."""
        whole: Any = None
        async with self._sending(ask) as plan:
            chunks: Any = self._model.astream(_messages(plan), ask.config)
            async with aclosing(chunks):
                async for chunk in chunks:
                    whole = chunk if whole is None else whole + chunk
                    text = _text(chunk)
                    if text:
                        yield text
        into.reply = _reply(whole, plan)


def _messages(plan: Plan) -> list[BaseMessage]:
    return convert_to_messages(plan.messages())


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


def _reply(message: object, plan: Plan) -> Reply:
    usage = getattr(message, "usage_metadata", None) or {}
    return Reply(
        text=_text(message),
        plan=plan,
        prompt_tokens=usage.get("input_tokens"),
        cached_tokens=(usage.get("input_token_details") or {}).get("cache_read"),
        completion_tokens=usage.get("output_tokens"),
    )
