"""A LlamaIndex LLM, as whoever answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from chain_of_agents.models.agent_model import AgentRequest, Reply, ReplyStream
from chain_of_agents.models.single_engine_model import SingleEngineModel
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan


class LlamaIndexModel(SingleEngineModel):
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

    async def ask(self, ask: AgentRequest) -> Reply:
        """Send a call."""
        async with self._sending(ask) as plan:
            response = await self._llm.achat(_messages(plan))
        return _reply(response, plan, response.message.content)

    async def stream(self, ask: AgentRequest, into: ReplyStream) -> AsyncGenerator[str]:
        """Yield the answer's pieces."""
        text, response = "", None
        async with self._sending(ask) as plan:
            chunks = await self._llm.astream_chat(_messages(plan))
            async with aclosing(chunks):
                async for response in chunks:
                    if response.delta:
                        text += response.delta
                        yield response.delta
        into.reply = _reply(response, plan, text)


def _messages(plan: Plan) -> list[Any]:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(**message) for message in plan.messages()]


def _reply(response: Any, plan: Plan, text: object) -> Reply:
    usage = getattr(getattr(response, "raw", None), "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    return Reply(
        text=text if isinstance(text, str) else None,
        plan=plan,
        prompt_tokens=getattr(usage, "prompt_tokens", None),
        cached_tokens=getattr(details, "cached_tokens", None),
        completion_tokens=getattr(usage, "completion_tokens", None),
    )
