"""An agent's request, its reply, and what a chain needs of the model behind both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from langchain_core.runnables import RunnableConfig

from chain_of_agents.agent_placement import Engines
from ctxreuse.context.blocks import ContextRequest
from ctxreuse.planning.plan import Plan

OnPiece: TypeAlias = Callable[[str], object]
"""Called with each piece of an answer when it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """A model's answer to one agent.

    Attributes:
        text: The answer; None where the model gave something other than text.
        plan: What was sent.
        replica: The engine that answered; empty where there is only one model.
        prompt_tokens: Tokens of the prompt; None where the model does not report them.
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
    """One agent's request.

    Attributes:
        context: What the agent reads and is asked.
        replica: The engine that the agent lives on; None leaves the choice to the pool.
        session_id: The agent's name for routers in front of engines.
        max_tokens: Tokens of the longest answer.
        limit_s: Seconds from being sent after which the request has failed; None waits.
    """

    context: ContextRequest
    replica: str | None = None
    session_id: str | None = None
    max_tokens: int = 256
    limit_s: float | None = None


class AgentModel(Protocol):
    """What a chain needs of the model that answers its agents."""

    @property
    def keeps_connections(self) -> bool:
        """Whether connections outlive a request, so that sync calls must share an event loop."""

    @property
    def engines(self) -> Engines:
        """The engines that agents can live on."""

    async def context_window(self) -> int | None:
        """Return the tokens of the longest prompt with its answer; None if unknown."""

    async def ask(
        self, request: AgentRequest, config: RunnableConfig, on_piece: OnPiece | None = None
    ) -> AgentReply:
        """Send an agent's request and wait for the reply.

        Args:
            request: The request.
            config: LangChain's, with the callbacks for this request.
            on_piece: Asks for a streamed answer, and is called with its pieces.
        """

    async def disconnect(self) -> None:
        """Close the connections of the running event loop."""

    async def aclose(self) -> None:
        """Close what the chain has opened."""
