"""An agent's call, its reply, and what a chain needs of whoever answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from langchain_core.runnables import RunnableConfig

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.planning.plan import Plan


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
class AgentRequest:
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

    async def ask(self, ask: AgentRequest) -> Reply:
        """Send an agent's call and wait for the answer."""

    def stream(self, ask: AgentRequest, into: ReplyStream) -> AsyncGenerator[str]:
        """Send an agent's call and yield the answer's pieces."""

    async def disconnect(self) -> None:
        """Close the connections of the running event loop."""

    async def aclose(self) -> None:
        """Close what the chain has opened."""
