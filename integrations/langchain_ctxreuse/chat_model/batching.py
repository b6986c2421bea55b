"""Running the calls of a batch so that they reach the model in the planned order.

What LangChain's `Runnable.batch` and its three relatives do, for calls in another order. The calls
start in that order, but callbacks, caches and rate limiters in front of the model take different
times. So each waits until those before it have gone on, in threads and tasks alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import NamedTuple, TypeAlias, TypeVar

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_executor_for_config

from ctxreuse.adapters.leader_first import LeaderFirst
from ctxreuse.adapters.ordered_release import Slot
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from langchain_ctxreuse.messages import PromptTexts

_Answer = TypeVar("_Answer")


class BatchInput(NamedTuple):
    """One input of a batch.

    Attributes:
        position: Its position among the caller's inputs.
        value: The input.
        config: Its config.
        texts: The prompt that was planned; None for an input that was not.
    """

    position: int
    value: LanguageModelInput
    config: RunnableConfig
    texts: PromptTexts | None


BatchSlot: TypeAlias = Slot[BatchInput, PlannedPrompt]
"""One call of a batch, its plan, and its place in the order in which the calls are sent."""


class PlannedBatch(NamedTuple):
    """The calls of a batch.

    Attributes:
        slots: The calls, in the order in which to send them.
        config: Its `max_concurrency` bounds how many run at a time.
        leading: Lines up those that wait for another one's answer.
    """

    slots: Sequence[BatchSlot]
    config: RunnableConfig
    leading: LeaderFirst | None = None

    def end(self, slot: BatchSlot) -> None:
        """Let a call leave, and those go on that have waited for it."""
        slot.leave()
        if self.leading is not None:
            self.leading.release(slot)


def answers(
    batch: PlannedBatch,
    send: Callable[[BatchSlot], _Answer],
    ended: Callable[[Sequence[Future[_Answer]]], Iterable[Future[_Answer]]] = iter,
) -> Iterator[_Answer]:
    """Send the calls of a batch in threads, and yield their answers.

    Calls that have not started are given up if one raises, or if the caller reads no further.

    Args:
        batch: The calls.
        send: Sends one, has its slot leave, and returns its answer.
        ended: In which order to wait for the calls: as they are sent, or as they are completed.
    """
    if len(batch.slots) == 1:  # no thread for a single one
        yield send(batch.slots[0])
        return

    def sent(slot: BatchSlot) -> _Answer:
        try:
            return send(slot)
        finally:
            batch.end(slot)

    with get_executor_for_config(batch.config) as executor:
        futures = [executor.submit(sent, slot) for slot in batch.slots]
        try:
            for future in ended(futures):
                yield future.result()
        finally:
            for future, slot in zip(futures, batch.slots, strict=True):
                if future.cancel():
                    batch.end(slot)


def started(
    batch: PlannedBatch, send: Callable[[BatchSlot], Awaitable[_Answer]]
) -> list[asyncio.Task[_Answer]]:
    """Start the calls of a batch as tasks; with a bound on them the first to wait is the first.

    Args:
        batch: The calls.
        send: Sends one and returns its answer.
    """
    bound = batch.config.get("max_concurrency")
    places = asyncio.Semaphore(bound) if bound else nullcontext()

    async def run(slot: BatchSlot) -> _Answer:
        async with places:
            return await send(slot)

    tasks = []
    for slot in batch.slots:
        task = asyncio.create_task(run(slot))
        # not in `run`: a task that is cancelled before it starts never runs
        task.add_done_callback(lambda _, slot=slot: batch.end(slot))  # type: ignore[misc]
        tasks.append(task)
    return tasks
