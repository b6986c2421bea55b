"""A client of the emulated engine in virtual time, where `EngineClient` would talk to a server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ctxreuse.cache import CacheUsage
from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.errors import EngineError
from ctxreuse.planning.plan import Plan
from ctxreuse.serving import Completion, CompletionStream
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.serving.emulation.batching_engine import BatchedRequest, BatchingEngine
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER, chat_markup

NOTE_TOKENS = 96
"""Tokens of an emulated agent's answer."""
_BLOCK_TOKENS = 16


@dataclass(slots=True)
class Ledger:
    """What the engines answered, and when."""

    # the tokens of each engine's prompts
    usage: dict[str, CacheUsage] = field(default_factory=dict)
    worker_calls: int = 0  # how many workers' calls were answered
    last_worker_s: float = 0.0  # when the last of them was
    last_s: float = 0.0  # when the last call of all was
    # how often each worker's prompt was answered, by its hash
    worker_prompts: Counter[int] = field(default_factory=Counter)
    calls: int = 0  # how many calls were answered
    chains: int = 0  # how many of them were managers'

    @property
    def worker_calls_per_s(self) -> float:
        """How many workers' calls were answered in a second, up to the last of them."""
        return self.worker_calls / self.last_worker_s

    @property
    def total(self) -> CacheUsage:
        """The tokens of all prompts."""
        return sum(self.usage.values(), CacheUsage())

    @property
    def imbalance(self) -> float:
        """The most prompt tokens of an engine, compared with the mean."""
        tokens = [usage.prompt_tokens for usage in self.usage.values()]
        return max(tokens) * len(tokens) / sum(tokens)

    def note(self, engine: str, usage: CacheUsage, now: float, worker_prompt: str | None) -> None:
        """Write an answer down; `worker_prompt` is None for a manager's."""
        self.usage[engine] += usage
        self.last_s = now
        self.calls += 1
        if worker_prompt is None:
            self.chains += 1
        else:
            self.worker_calls += 1
            self.last_worker_s = now
            self.worker_prompts[hash(worker_prompt)] += 1


class VirtualClient:
    """Answers with notes of the usual length, after as long as the emulated engine takes.

    Calls without the manager's system message are workers'. With `workers_alone` managers are
    answered at once and take nothing of the engine.
    """

    def __init__(
        self,
        name: str,
        capacity_tokens: int,
        manager: str,
        ledger: Ledger,
        workers_alone: bool = False,
    ) -> None:
        self._name = name
        self._engine = BatchingEngine(capacity_tokens, _BLOCK_TOKENS)
        self._blocks = capacity_tokens // _BLOCK_TOKENS
        self._manager = manager
        self._ledger = ledger
        self._workers_alone = workers_alone
        self._answers = 0
        self._is_down = False
        self._under_way: dict[asyncio.Task[None], None] = {}  # in order: runs repeat
        ledger.usage[name] = CacheUsage()

    def stop(self) -> None:
        """Break all connections, and take no new ones."""
        self._is_down = True
        for task in self._under_way:
            task.cancel()

    async def complete(
        self,
        prompt: Prompt,
        *,
        session_id: str | None = None,
        on_first_token: Callable[[], object] | None = None,
        **params: Any,
    ) -> Completion:
        """Wait until the engine has answered."""
        messages = messages_of(prompt)
        await self.check_health()
        clock = asyncio.get_running_loop().time
        began = clock()
        self._answers += 1
        words = (f"w{number}" for number in range(NOTE_TOKENS - 1))
        text = " ".join([f"{self._name}x{self._answers:x}", *words])
        is_manager = messages[0]["content"] == self._manager
        if is_manager and self._workers_alone:
            self._ledger.chains += 1
            usage = CacheUsage()
        else:
            usage = await self._serve(messages, text)
            worker_prompt = None if is_manager else messages[-1]["content"]
            self._ledger.note(self._name, usage, clock(), worker_prompt)
        return Completion(
            text=text,
            request_id=prompt.request_id if isinstance(prompt, Plan) else "",
            finish_reason="length",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=NOTE_TOKENS,
            time_to_first_token_s=0.0,
            total_s=clock() - began,
            attempts=1,
        )

    async def _serve(self, messages: list[dict[str, Any]], text: str) -> CacheUsage:
        """Have the engine serve a call; `stop` breaks it."""
        tokens = ENGINE_TOKENIZER.ids(chat_markup(messages))
        answer = ENGINE_TOKENIZER.ids(text)[:NOTE_TOKENS]
        request = BatchedRequest(tokens, answer)

        async def served() -> None:
            async with aclosing(self._engine.stream(request)) as counts:
                async for _ in counts:
                    pass

        serving = asyncio.ensure_future(served())
        self._under_way[serving] = None
        try:
            await serving
            assert request.usage is not None, "a finished request has begun"
            return request.usage
        except asyncio.CancelledError:
            if self._is_down:
                raise EngineError(f"{self._name} broke the connection") from None
            raise
        finally:
            del self._under_way[serving]

    def stream(
        self, prompt: Prompt, *, session_id: str | None = None, **params: Any
    ) -> CompletionStream:
        """Not needed here."""
        raise NotImplementedError("the benchmark does not stream")

    def forget(self, plan: Plan) -> None:
        """Keep nothing of plans, so there is nothing to forget."""

    async def check_health(self) -> None:
        """Raise EngineError if the engine is down."""
        if self._is_down:
            raise EngineError(f"{self._name} is down")

    async def context_window(self) -> int | None:
        """Return None: the engine does not say."""
        return None

    async def metrics(self) -> PrefixCacheMetrics:
        """Return the size of the cache."""
        return PrefixCacheMetrics(block_size=_BLOCK_TOKENS, num_gpu_blocks=self._blocks)

    async def aclose(self) -> None:
        """Close nothing: there is no connection."""
