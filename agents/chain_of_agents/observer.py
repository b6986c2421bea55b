"""Whoever watches the agents' calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from langchain_core.runnables import RunnableConfig

from chain_of_agents.models.agent_model import Reply


@dataclass(slots=True)
class ObservedCall:
    """An agent's call, as its observer sees it.

    Attributes:
        config: LangChain's config for what is called inside.
        reply: The answer, once it has come.
    """

    config: RunnableConfig | None = None
    reply: Reply | None = None


class Observer:
    """Told of each call. This one does nothing."""

    @asynccontextmanager
    async def call(self, name: str, question: str) -> AsyncIterator[ObservedCall]:
        """Watch an agent's call, which runs inside.

        Args:
            name: The agent's name.
            question: What it is asked, without its documents.
        """
        yield ObservedCall()
