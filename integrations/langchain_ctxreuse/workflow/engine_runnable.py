"""A Runnable whose work is asynchronous: everything else is made of that."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForChainRun
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list

from ctxreuse.serving.aio import sync_bridge
from ctxreuse.serving.aio.gather import all_of

Input = TypeVar("Input")
Output = TypeVar("Output")


class EngineRunnable(Runnable[Input, Output]):
    """Runs on a workflow engine, for callers that are asynchronous and for others.

    `batch` gives all inputs to the engine at once, which runs as many at a time as it takes.
    """

    @abstractmethod
    async def _answer(
        self,
        input: Input,  # noqa: A002  # LangChain's name
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> Output:
        """Return what comes of an input."""

    @abstractmethod
    def _pieces(
        self,
        inputs: AsyncIterator[Input],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncIterator[Output]:
        """Return it piece by piece; the pieces add up to it."""

    def invoke(
        self,
        input: Input,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Output:
        """Return what comes of an input; arguments as in `ainvoke`."""
        config = ensure_config(config)
        return sync_bridge.run(partial(self.ainvoke, input, config, **kwargs), lasting=True)

    async def ainvoke(
        self,
        input: Input,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Output:
        """Return what comes of an input.

        Args:
            input: The input.
            config: LangChain's; `configurable` may name a `tenant` and a `thread_id`.
            **kwargs: None are known.
        """
        return await self._acall_with_config(self._answer, input, config, **kwargs)

    def batch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Output]:
        """Return what comes of each input, in their order; arguments as in `abatch`."""
        configs = get_config_list(config, len(inputs))
        work = partial(self.abatch, inputs, configs, return_exceptions=return_exceptions, **kwargs)
        return sync_bridge.run(work, lasting=True)

    async def abatch(
        self,
        inputs: list[Input],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Output]:
        """Return what comes of each input, in their order.

        Args:
            inputs: The inputs.
            config: LangChain's, one or one for each; `max_concurrency` bounds how many are under
                way.
            return_exceptions: Whether an error takes the place of its output; else the first one
                cancels what is still under way.
            **kwargs: None are known.
        """
        configs = get_config_list(config, len(inputs))
        limit = configs[0].get("max_concurrency") if configs else None
        places = asyncio.Semaphore(limit or max(1, len(inputs)))

        async def one(input: Input, config: RunnableConfig) -> Output:  # noqa: A002
            async with places:
                try:
                    return await self.ainvoke(input, config, **kwargs)
                except Exception as error:
                    if not return_exceptions:
                        raise
                    return error  # type: ignore[return-value]  # as LangChain does

        return await all_of(one(*job) for job in zip(inputs, configs, strict=True))

    def stream(
        self,
        input: Input,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Output]:
        """Yield what comes of an input, piece by piece; arguments as in `ainvoke`."""
        config = ensure_config(config)
        return sync_bridge.iterate(partial(self.astream, input, config, **kwargs), lasting=True)

    async def astream(
        self,
        input: Input,  # noqa: A002  # the base class names it so
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Output]:
        """Yield what comes of an input, piece by piece; arguments as in `ainvoke`."""

        async def inputs() -> AsyncIterator[Input]:
            yield input

        pieces: Any = self._atransform_stream_with_config(inputs(), self._pieces, config, **kwargs)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
