"""Running the calls of a batch so that they reach the model in the planned order.

What LangChain's `Runnable.batch` and its three relatives do, for calls in another order. The calls
start in that order, but callbacks, caches and rate limiters in front of the model take different
times. So each waits until those before it have gone on, in threads and tasks alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, as_completed
from contextlib import contextmanager, nullcontext
from threading import Event
from typing import NamedTuple, TypeAlias, TypeVar

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_executor_for_config

from ctxreuse.adapters.ordered_release import (
    OrderedQueue,
    Slot,
    TaskWaiter,
    in_event_loop,
)
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from langchain_ctxreuse.messages import PromptTexts

_Answer = TypeVar("_Answer")


class BatchedPrompt(NamedTuple):
    """One input of a batch.

    Attributes:
        position: Its position among the caller's inputs.
        texts: The prompt that was planned; None for an input that was not.
    """

    position: int
    texts: PromptTexts | None


BatchSlot: TypeAlias = Slot[BatchedPrompt, PlannedPrompt]
"""One call of a batch, its plan, and its place in the order in which the calls are sent."""


def batch_slots(
    prompts: Sequence[PromptTexts | None],
    planned: Mapping[int, PlannedPrompt],
    unused: Callable[[PlannedPrompt], object],
) -> list[BatchSlot]:
    """Return the slots of a batch, in the order in which to send its calls.

    Args:
        prompts: The prompts in the caller's order; None for an input that was not planned.
        planned: The plans by position, in the planned order; inputs without one go last.
        unused: Called with a plan that was not taken.
    """
    queue: OrderedQueue[BatchedPrompt, PlannedPrompt] = OrderedQueue(unused=unused)
    order = [*planned, *(one for one in range(len(prompts)) if one not in planned)]
    slots = [Slot(queue, BatchedPrompt(one, prompts[one]), planned.get(one)) for one in order]
    queue.line_up(slots)
    return slots


def taken_plan(slot: BatchSlot, prompt: PromptTexts) -> PlannedPrompt | None:
    """Wait in this thread until a slot is released, and return its plan.

    Args:
        slot: The slot.
        prompt: The prompt that is about to be sent.

    Returns:
        The plan; None if it is for another prompt, or was taken before.
    """
    if slot.item.texts is None or not slot.item.texts.says_the_same_as(prompt):
        return None
    if not in_event_loop():  # else those before it could not run while it waits
        woken = Event()
        slot.attach(woken.set)
        woken.wait()
    planned = slot.take()
    slot.leave()
    return planned


async def ataken_plan(slot: BatchSlot, prompt: PromptTexts) -> PlannedPrompt | None:
    """Wait in this task until a slot is released, and return its plan as `taken_plan` does."""
    if slot.item.texts is None or not slot.item.texts.says_the_same_as(prompt):
        return None
    await TaskWaiter(slot).wait()
    planned = slot.take()
    slot.leave()
    return planned


def answers(
    slots: Sequence[BatchSlot], send: Callable[[BatchSlot], _Answer], config: RunnableConfig
) -> list[_Answer]:
    """Return the answers in the caller's order.

    Args:
        slots: The calls, in the order in which to send them.
        send: Sends one and returns its answer. If it raises, calls that have not started are given
            up.
        config: Its `max_concurrency` bounds the threads.
    """
    with _futures(slots, send, config) as futures:
        by_position = dict(future.result() for future in futures)
    return [by_position[position] for position in range(len(slots))]


def answers_as_completed(
    slots: Sequence[BatchSlot], send: Callable[[BatchSlot], _Answer], config: RunnableConfig
) -> Iterator[tuple[int, _Answer]]:
    """Yield position and answer when each is there; arguments as in `answers`."""
    with _futures(slots, send, config) as futures:
        for future in as_completed(futures):
            yield future.result()


async def aanswers(
    slots: Sequence[BatchSlot],
    send: Callable[[BatchSlot], Awaitable[_Answer]],
    config: RunnableConfig,
) -> list[_Answer]:
    """Return the answers in the caller's order; as in `answers`, with tasks.

    If one raises the others go on, as they do in LangChain.
    """
    by_position = dict(await asyncio.gather(*_tasks(slots, send, config)))
    return [by_position[position] for position in range(len(slots))]


async def aanswers_as_completed(
    slots: Sequence[BatchSlot],
    send: Callable[[BatchSlot], Awaitable[_Answer]],
    config: RunnableConfig,
) -> AsyncGenerator[tuple[int, _Answer]]:
    """Yield position and answer when each is there; closing it cancels the calls still running."""
    tasks = _tasks(slots, send, config)
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _futures(
    slots: Sequence[BatchSlot], send: Callable[[BatchSlot], _Answer], config: RunnableConfig
) -> Iterator[list[Future[tuple[int, _Answer]]]]:
    """Start the calls in threads; at the end, those that have not started are given up."""

    def run(slot: BatchSlot) -> tuple[int, _Answer]:
        try:
            return slot.item.position, send(slot)
        finally:
            slot.leave()

    if len(slots) == 1:  # no thread for a single one
        future: Future[tuple[int, _Answer]] = Future()
        future.set_result(run(slots[0]))
        yield [future]
        return
    with get_executor_for_config(config) as executor:
        futures = [executor.submit(run, slot) for slot in slots]
        try:
            yield futures
        finally:
            for future, slot in zip(futures, slots, strict=True):
                if future.cancel():
                    slot.leave()


def _tasks(
    slots: Sequence[BatchSlot],
    send: Callable[[BatchSlot], Awaitable[_Answer]],
    config: RunnableConfig,
) -> list[asyncio.Task[tuple[int, _Answer]]]:
    """Start the calls as tasks; with a bound on them the first to wait is the first to go on."""
    bound = config.get("max_concurrency")
    places = asyncio.Semaphore(bound) if bound else nullcontext()

    async def run(slot: BatchSlot) -> tuple[int, _Answer]:
        async with places:
            return slot.item.position, await send(slot)

    tasks = []
    for slot in slots:
        task = asyncio.create_task(run(slot))
        # not in `run`: a task that is cancelled before it starts never runs
        task.add_done_callback(lambda _, slot=slot: slot.leave())  # type: ignore[misc]
        tasks.append(task)
    return tasks
