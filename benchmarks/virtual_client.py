"""A client of an engine in virtual time, where `EngineClient` would talk to a server."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.errors import EngineError
from ctxreuse.planning.plan import Plan
from ctxreuse.serving import Completion, CompletionStream
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.serving.emulation.batching_engine import BatchingEngine
from ctxreuse.serving.emulation.emulated_engine import chat_markup, word_tokens
from ctxreuse.serving.emulation.rates import NOTE_TOKENS
from ctxreuse.serving.emulation.timed_engine import TimedEngine

_BLOCK_TOKENS = 16


@dataclass(slots=True)
class Ledger:
    """What was answered, by engine, and when.

    Attributes:
        usage: The tokens of each engine's prompts.
        worker_calls: How many workers were answered.
        last_worker_s: When the last of them was.
        last_s: When the last call of all was.
        worker_prompts: How often each worker's prompt was answered, by its hash.
        calls: How many calls were answered.
        chains: How many of them were managers'.
    """

    usage: dict[str, CacheUsage] = field(default_factory=dict)
    worker_calls: int = 0
    last_worker_s: float = 0.0
    last_s: float = 0.0
    worker_prompts: Counter[int] = field(default_factory=Counter)
    calls: int = 0
    chains: int = 0

    @property
    def worker_calls_per_s(self) -> float:
        """How many workers were answered in a second, until the last of them was."""
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


class VirtualClient:
    """Answers with notes of the usual length, after as long as the emulated engine takes.

    Args:
        name: The engine's name.
        capacity_tokens: What its cache holds.
        manager: The manager's system message; all others are workers.
        ledger: Where the answers are written down.
        workers_alone: Whether managers are answered at once, and for nothing.
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
        self._capacity_tokens = capacity_tokens
        self._manager = manager
        self._ledger = ledger
        self._workers_alone = workers_alone
        self._answers = 0
        self._is_down = False
        self._under_way: set[asyncio.Task[Any]] = set()
        ledger.usage[name] = CacheUsage()
        self._start()

    def _start(self) -> None:
        cache = PrefixCacheSimulator(self._capacity_tokens, _BLOCK_TOKENS, null_block=True)
        self._engine = TimedEngine(BatchingEngine(cache))

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
        if self._is_down:
            raise EngineError(f"{self._name} is down")
        began = asyncio.get_running_loop().time()
        self._answers += 1
        words = (f"w{number}" for number in range(NOTE_TOKENS - 1))
        text = " ".join([f"{self._name}x{self._answers:x}", *words])
        is_manager = messages[0]["content"] == self._manager
        if is_manager and self._workers_alone:
            self._ledger.chains += 1
            return self._completion(prompt, text, CacheUsage(), 0.0)
        serving = asyncio.ensure_future(
            self._engine.serve(word_tokens(chat_markup(messages)), word_tokens(text)[:NOTE_TOKENS])
        )
        self._under_way.add(serving)
        try:
            usage = await serving
        except asyncio.CancelledError:
            if self._is_down:
                raise EngineError(f"{self._name} broke the connection") from None
            raise
        finally:
            self._under_way.discard(serving)
        ended = asyncio.get_running_loop().time()
        self._note(messages, usage, ended, is_manager)
        return self._completion(prompt, text, usage, ended - began)

    @staticmethod
    def _completion(prompt: Prompt, text: str, usage: CacheUsage, total_s: float) -> Completion:
        return Completion(
            text=text,
            request_id=prompt.request_id if isinstance(prompt, Plan) else "",
            finish_reason="length",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=NOTE_TOKENS,
            time_to_first_token_s=0.0,
            total_s=total_s,
            attempts=1,
        )

    def stream(
        self, prompt: Prompt, *, session_id: str | None = None, **params: Any
    ) -> CompletionStream:
        """Not needed here."""
        raise NotImplementedError("the benchmark does not stream")

    def forget(self, plan: Plan) -> None:
        """Nothing is kept here."""

    async def check_health(self) -> None:
        """Raise EngineError if the engine is down."""
        if self._is_down:
            raise EngineError(f"{self._name} is down")

    async def context_window(self) -> int | None:
        """Return that nobody says."""
        return None

    async def metrics(self) -> PrefixCacheMetrics:
        """Return the size of the cache."""
        return PrefixCacheMetrics(
            block_size=_BLOCK_TOKENS, num_gpu_blocks=self._capacity_tokens // _BLOCK_TOKENS
        )

    async def aclose(self) -> None:
        """Nothing is open."""

    def _note(
        self, messages: list[dict[str, Any]], usage: CacheUsage, now: float, is_manager: bool
    ) -> None:
        ledger = self._ledger
        ledger.usage[self._name] += usage
        ledger.last_s = now
        ledger.calls += 1
        if is_manager:
            ledger.chains += 1
        else:
            ledger.worker_calls += 1
            ledger.last_worker_s = now
            ledger.worker_prompts[hash(messages[-1]["content"])] += 1
