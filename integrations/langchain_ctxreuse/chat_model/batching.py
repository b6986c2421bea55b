"""Running a batch's calls so that they reach the model in planned order, in threads and tasks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias, TypeVar

from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_executor_for_config

from ctxreuse.adapters.leader_first import LeaderFirst
from ctxreuse.adapters.ordered_release import OrderedQueue, Slot, SlotState, TaskWaiter
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from langchain_ctxreuse.messages import PromptTexts

_Answer = TypeVar("_Answer")


class BatchInput(NamedTuple):
    """One input of a batch."""

    position: int
    value: LanguageModelInput
    config: RunnableConfig
    texts: PromptTexts | None  # that was planned


BatchSlot: TypeAlias = Slot[BatchInput, PlannedPrompt]
"""One call of a batch, its plan, and its place in the order in which the calls are sent."""


class PlannedBatch(NamedTuple):
    """The calls of a batch."""

    slots: Sequence[BatchSlot]  # in the order in which to send them
    config: RunnableConfig
    leaders: Sequence[int | None]  # whose answer each waits for, without a thread: all might wait


class _Starts:
    """Lets the calls of a batch start in their order, those with a leader once it has answered."""

    def __init__(self, batch: PlannedBatch, places: float) -> None:
        self._queue: OrderedQueue[int, None] = OrderedQueue()
        self._queue.places = places
        self._slots = batch.slots
        self.turns = [Slot(self._queue, position) for position in range(len(batch.slots))]
        self._leading = LeaderFirst(self._queue, self.turns, batch.leaders)

    def start(self, position: int) -> BatchSlot:
        """Return a call that starts now, lined up among those that have started."""
        slot = self._slots[position]
        slot.queue.line_up([slot], first=position)
        return slot

    def add_place(self, places: int) -> None:
        """Let more calls run at a time, or fewer."""
        with self._queue.lock:
            self._queue.places += places
        self._queue.release()

    def give_up(self) -> None:
        """Let no call start any more, and those leave that have not."""
        with self._queue.lock:
            self._queue.places = -math.inf
        for turn in self.turns:
            if turn.state in (SlotState.ARRIVED, SlotState.WAITING):
                self.end(turn.item)

    def end(self, position: int) -> None:
        """Let a call leave that has ended or is given up, and those start that waited for it."""
        turn = self.turns[position]
        self._slots[position].leave()
        self._leading.release(turn)  # before another one gets its place
        turn.leave()


def answers(
    batch: PlannedBatch,
    send: Callable[[BatchSlot], _Answer],
    ended: Callable[[Sequence[Future[_Answer]]], Iterable[Future[_Answer]]] = iter,
) -> Iterator[_Answer]:
    """Send a batch's calls in threads, and yield answers; unstarted ones end with the reader."""
    starts = _Starts(batch, places=0)
    if len(batch.slots) == 1:  # no thread for a single one
        yield send(starts.start(0))
        return
    queue: SimpleQueue[int | None] = SimpleQueue()
    for turn in starts.turns:
        turn.attach(partial(_hand_over, starts, turn.item, queue))

    def next_sent() -> _Answer:
        starts.add_place(1)  # this thread
        position = queue.get()
        if position is None:
            queue.put(None)  # for other threads
            raise CancelledError
        try:
            return send(batch.slots[position])
        finally:
            starts.add_place(-1)
            starts.end(position)

    with get_executor_for_config(batch.config) as executor:
        futures = [executor.submit(next_sent) for _ in batch.slots]
        try:
            for future in ended(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            starts.give_up()
            queue.put(None)


def _hand_over(starts: _Starts, position: int, queue: SimpleQueue[int | None]) -> None:
    """Start a call, for the thread that takes its position."""
    starts.start(position)
    queue.put(position)


def started(
    batch: PlannedBatch, send: Callable[[BatchSlot], Awaitable[_Answer]]
) -> list[asyncio.Task[_Answer]]:
    """Start the calls of a batch as tasks; with a bound on them the first to wait is the first."""
    starts = _Starts(batch, places=batch.config.get("max_concurrency") or math.inf)

    async def run(position: int) -> _Answer:
        await TaskWaiter(starts.turns[position]).wait()
        return await send(starts.start(position))

    tasks = []
    for position in range(len(batch.slots)):
        task = asyncio.create_task(run(position))
        # not in `run`: a task that is cancelled before it starts never runs
        task.add_done_callback(lambda _, position=position: starts.end(position))  # type: ignore[misc]
        tasks.append(task)
    return tasks
