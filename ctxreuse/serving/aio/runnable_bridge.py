"""All ways to call a LangChain Runnable, made of its asynchronous work; imports no LangChain."""
# ruff: noqa: A002 - LangChain's Runnables call their argument `input`

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from ctxreuse.context.checks import check_function, checked_list
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.aio.concurrency import all_of

Input = TypeVar("Input")
Output = TypeVar("Output")
Config = TypeVar("Config", bound=Mapping[str, object])

_Result = TypeVar("_Result")


class RunnableBridge(ABC, Generic[Input, Output, Config]):
    """A base class beside `langchain_core.runnables.Runnable`, whose helpers it calls."""

    _shares_event_loop = True
    """Whether sync calls share one event loop; else each has its own and disconnects at its end."""

    @abstractmethod
    async def _answer(self, input: Input, run_manager: Any, config: Config) -> Output:
        """Return the output for an input."""

    @abstractmethod
    def _pieces(
        self, input: Input, run_manager: Any, config: Config
    ) -> AsyncGenerator[Output, None]:
        """Yield the output piece by piece; the pieces add up to it."""

    @abstractmethod
    def _configs(self, config: Config | list[Config] | None, count: int) -> list[Config]:
        """Return the config of each of several inputs, with the caller's context filled in."""

    async def _disconnect(self) -> None:
        """Close the connections of the running event loop."""

    def invoke(self, input: Input, config: Config | None = None, **kwargs: Any) -> Output:
        """`ainvoke`, for sync callers."""
        [config] = self._configs(config, 1)
        return self._run_sync(partial(self.ainvoke, input, config, **kwargs))

    async def ainvoke(self, input: Input, config: Config | None = None, **kwargs: Any) -> Output:
        """Return the output for an input; `configurable` may name a `tenant` and a `thread_id`."""
        runnable: Any = self
        output: Output = await runnable._acall_with_config(self._answer, input, config, **kwargs)
        return output

    def batch(
        self,
        inputs: list[Input],
        config: Config | list[Config] | None = None,
        *,
        return_exceptions: bool = False,
        progress: Callable[[int, int], object] | None = None,
        **kwargs: Any,
    ) -> list[Output]:
        """`abatch`, for sync callers."""
        inputs = checked_list("inputs", inputs, "a list of inputs")
        configs = self._configs(config, len(inputs))
        options = {"return_exceptions": return_exceptions, "progress": progress, **kwargs}
        return self._run_sync(partial(self.abatch, inputs, configs, **options))

    async def abatch(
        self,
        inputs: list[Input],
        config: Config | list[Config] | None = None,
        *,
        return_exceptions: bool = False,
        progress: Callable[[int, int], object] | None = None,
        **kwargs: Any,
    ) -> list[Output]:
        """Return the output for each input; all start at once, and are planned together.

        `config` is one for all or one for each; its `max_concurrency` bounds what runs at once.
        With `return_exceptions` an error takes the place of its output; else the first one ends the
        batch and cancels what still runs. `progress` is called with the number of ended inputs and
        of all, whenever one has ended.
        """
        inputs = checked_list("inputs", inputs, "a list of inputs")
        check_function("progress", progress)
        configs = self._configs(config, len(inputs))
        limit: Any = configs[0].get("max_concurrency") if configs else None
        slots = asyncio.Semaphore(limit or max(1, len(inputs)))
        ended = 0

        async def one(input: Input, config: Config) -> Output:
            nonlocal ended
            async with slots:
                try:
                    return await self.ainvoke(input, config, **kwargs)
                except Exception as error:
                    if not return_exceptions:
                        raise
                    return error  # type: ignore[return-value]  # as LangChain does
                finally:
                    ended += 1
                    if progress is not None:
                        progress(ended, len(inputs))

        return await all_of(one(*job) for job in zip(inputs, configs, strict=True))

    def stream(self, input: Input, config: Config | None = None, **kwargs: Any) -> Iterator[Output]:
        """`astream`, for sync callers."""
        [config] = self._configs(config, 1)

        async def pieces() -> AsyncIterator[Output]:
            async with self._connected():
                async for piece in self.astream(input, config, **kwargs):
                    yield piece

        return sync_bridge.iterate(pieces, lasting=self._shares_event_loop)

    async def astream(
        self, input: Input, config: Config | None = None, **kwargs: Any
    ) -> AsyncIterator[Output]:
        """Yield the output piece by piece; arguments as in `ainvoke`."""

        async def inputs() -> AsyncIterator[Input]:
            yield input

        async def transformed(
            inputs: AsyncIterator[Input], run_manager: Any, config: Config
        ) -> AsyncIterator[Output]:
            async for one in inputs:
                async with aclosing(self._pieces(one, run_manager, config)) as pieces:
                    async for piece in pieces:
                        yield piece

        runnable: Any = self
        pieces = runnable._atransform_stream_with_config(inputs(), transformed, config, **kwargs)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    def _run_sync(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        async def connected() -> _Result:
            async with self._connected():
                return await work()

        return sync_bridge.run(connected, lasting=self._shares_event_loop)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if not self._shares_event_loop:
                from anyio import CancelScope

                with CancelScope(shield=True):  # connections are closed even if it is cancelled
                    await self._disconnect()
