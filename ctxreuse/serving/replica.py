"""One engine of a pool: the way to it, what its cache holds, and how much it has to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ctxreuse.cache.metrics import EngineMetrics
from ctxreuse.cache.shadow import ShadowCache
from ctxreuse.errors import EngineError
from ctxreuse.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner
from ctxreuse.plans import Plan
from ctxreuse.serving.call import Prompt
from ctxreuse.serving.circuit import CircuitBreaker
from ctxreuse.serving.completion import Completion
from ctxreuse.serving.stream import CompletionStream
from ctxreuse.serving.waiting_room import WaitingRoom

_SURPRISES = 3
"""So many answers in a row without one cached token, where some were expected, are no accident."""
_SURPRISING_TOKENS = 64


class Client(Protocol):
    """What a pool needs of a client; `EngineClient` has it all."""

    async def complete(
        self,
        prompt: Prompt,
        *,
        session_id: str | None = None,
        on_first_token: Callable[[], object] | None = None,
        **params: Any,
    ) -> Completion:
        """Send a prompt and wait for the whole answer."""

    def stream(
        self, prompt: Prompt, *, session_id: str | None = None, **params: Any
    ) -> CompletionStream:
        """Send a prompt and get the answer piece by piece."""

    def forget(self, plan: Plan) -> None:
        """Tell the planner that a plan's prompt is not in the engine's cache."""

    async def check_health(self) -> None:
        """Raise EngineError if the engine is not ready."""

    async def context_window(self) -> int | None:
        """Return the tokens of the longest prompt with its answer; None if nobody says."""

    async def metrics(self) -> EngineMetrics:
        """Return what the engine says about its prefix cache."""

    async def aclose(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """How a replica is.

    Attributes:
        name: Its name.
        state: "up", "resting" (it failed too often and is left alone), "on trial" (it has rested,
            and the next request tries it) or "draining".
        running: Requests that were sent and have not ended.
        waiting: Requests that are held back.
        queued_tokens: What all these have still to compute, in prompt tokens, as expected.
        answered: Requests answered so far.
        failed: Requests that it did not answer.
        generation: How often it has been found with an empty cache.
    """

    name: str
    state: str
    running: int
    waiting: int
    queued_tokens: int
    answered: int
    failed: int
    generation: int


class Replica:
    """One engine of a pool. Made by `EnginePool`.

    Args:
        name: What it is called in statistics and errors.
        connect: Makes a client; one is made for each event loop that uses the replica.
        planner: Its own planner, whose index is what this engine's cache holds.
        room: Where its requests wait.
        circuit: Whether it is left alone.
        capacity_tokens: What its cache holds; None asks the engine.
        follows_events: Whether its index is kept by the engine's own events.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Client],
        planner: ReusePlanner,
        room: WaitingRoom,
        circuit: CircuitBreaker,
        capacity_tokens: int | None = None,
        follows_events: bool = False,
    ) -> None:
        self.name = name
        self.planner = planner
        self.room = room
        self.circuit = circuit
        self.is_draining = False
        self.queued_tokens = 0
        self.answered = 0
        self.failed = 0
        self.generation = 0
        self.shadow = None if capacity_tokens is None else ShadowCache(planner, capacity_tokens)
        self._knows_capacity = follows_events or self.shadow is not None
        self._connect = connect
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = WeakKeyDictionary()
        self._surprises = 0
        self._lock = Lock()
        self._bookkeeping = FailOpen(
            "EnginePool", "the answer is returned all the same", work="bookkeeping"
        )

    @property
    def faults(self) -> int:
        """How often bookkeeping or planning has failed."""
        return self._bookkeeping.faults + self.room.faults

    def client(self) -> Client:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                client = self._clients[loop] = self._connect()
            return client

    async def learn_capacity(self) -> None:
        """Ask the engine, once, how much its cache holds; one that does not say is unlimited."""
        if self._knows_capacity:
            return
        self._knows_capacity = True
        try:
            capacity = (await self.client().metrics()).capacity_tokens
        except EngineError:
            return  # no vLLM, or down, which the request itself will tell
        if capacity is not None:
            self.shadow = ShadowCache(self.planner, capacity)

    @contextmanager
    def queued(self, tokens: int) -> Iterator[None]:
        """Count tokens as still to be computed, as long as the block runs."""
        with self._lock:
            self.queued_tokens += tokens
        try:
            yield
        finally:
            with self._lock:
                self.queued_tokens -= tokens

    def note_answer(self, plan: Plan, completion: Completion) -> None:
        """Take note of an answered request."""
        self.answered += 1
        self._bookkeeping.attempt(lambda: self._observe(plan, completion), lambda: None)

    def reset(self) -> None:
        """Treat the engine's cache as empty."""
        self.generation += 1
        self._surprises = 0
        self.planner.evict_tokens(self.planner.statistics().tokens)
        if self.shadow is not None:
            self.shadow = ShadowCache(self.planner, self.shadow.capacity_tokens)

    async def aclose(self) -> None:
        """Close the running loop's client; those of loops that are gone are gone with them."""
        with self._lock:
            client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _observe(self, plan: Plan, completion: Completion) -> None:
        cached = completion.cached_tokens
        if self.shadow is not None and completion.prompt_tokens is not None:
            self.shadow.observe(
                plan, completion.prompt_tokens, cached, completion.completion_tokens or 0
            )
        if cached:
            self._surprises = 0
        elif cached == 0 and plan.expected_cached_tokens >= _SURPRISING_TOKENS:
            self._surprises += 1
            if self._surprises >= _SURPRISES:
                self.reset()
