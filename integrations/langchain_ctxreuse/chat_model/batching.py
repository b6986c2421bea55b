"""Running the calls of a batch, started in the order of their turns.

What LangChain's `Runnable.batch` and its three relatives do, for calls in an order of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_executor_for_config

from langchain_ctxreuse.chat_model.turns import Turn

_Answer = TypeVar("_Answer")


class Answered(NamedTuple, Generic[_Answer]):
    """An answer, with the position of its input among the caller's."""

    position: int
    answer: _Answer


def answers(
    turns: Sequence[Turn], send: Callable[[Turn], _Answer], config: RunnableConfig
) -> list[_Answer]:
    """Return the answers in the caller's order.

    Args:
        turns: The calls, in the order in which to send them.
        send: Sends one and returns its answer. If it raises, calls that have not started are
            given up.
        config: Its `max_concurrency` bounds the threads.
    """
    with _futures(turns, send, config) as futures:
        by_position = dict(future.result() for future in futures)
    return [by_position[position] for position in range(len(turns))]


def answers_as_completed(
    turns: Sequence[Turn], send: Callable[[Turn], _Answer], config: RunnableConfig
) -> Iterator[Answered[_Answer]]:
    """Yield each answer when it is there; arguments as in `answers`."""
    with _futures(turns, send, config) as futures:
        for future in as_completed(futures):
            yield future.result()


async def aanswers(
    turns: Sequence[Turn], send: Callable[[Turn], Awaitable[_Answer]], config: RunnableConfig
) -> list[_Answer]:
    """Return the answers in the caller's order; as in `answers`, with tasks.

    If one raises the others go on, as they do in LangChain.
    """
    by_position = dict(await asyncio.gather(*_tasks(turns, send, config)))
    return [by_position[position] for position in range(len(turns))]


async def aanswers_as_completed(
    turns: Sequence[Turn], send: Callable[[Turn], Awaitable[_Answer]], config: RunnableConfig
) -> AsyncGenerator[Answered[_Answer]]:
    """Yield each answer when it is there; who stops listening ends the calls that still run."""
    tasks = _tasks(turns, send, config)
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _futures(
    turns: Sequence[Turn], send: Callable[[Turn], _Answer], config: RunnableConfig
) -> Iterator[list[Future[Answered[_Answer]]]]:
    """Start the calls in threads; those that wait for one are given up at the end."""

    def run(turn: Turn) -> Answered[_Answer]:
        turn.hand_over()
        return Answered(turn.position, send(turn))

    if len(turns) == 1:  # no thread for a single one
        future: Future[Answered[_Answer]] = Future()
        try:
            future.set_result(copy_context().run(run, turns[0]))
        finally:
            turns[0].close()
        yield [future]
        return
    with get_executor_for_config(config) as executor:
        futures = []
        for turn in turns:
            future = executor.submit(run, turn)
            future.add_done_callback(partial(_close, turn))
            futures.append(future)
        try:
            yield futures
        finally:
            for future in futures:
                future.cancel()


def _tasks(
    turns: Sequence[Turn], send: Callable[[Turn], Awaitable[_Answer]], config: RunnableConfig
) -> list[asyncio.Task[Answered[_Answer]]]:
    """Start the calls as tasks; with a bound on them the first to wait is the first to go on."""
    bound = config.get("max_concurrency")
    gate = asyncio.Semaphore(bound) if bound else nullcontext()

    async def run(turn: Turn) -> Answered[_Answer]:
        try:
            async with gate:
                turn.hand_over()
                return Answered(turn.position, await send(turn))
        finally:
            turn.close()

    tasks = []
    for turn in turns:
        task = asyncio.create_task(run(turn))
        # a task that is cancelled before it starts never runs its own `finally`
        task.add_done_callback(partial(_close, turn))
        tasks.append(task)
    return tasks


def _close(turn: Turn, _: object) -> None:
    turn.close()
