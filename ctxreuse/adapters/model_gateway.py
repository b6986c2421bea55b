"""The gateway to a model: prompts wait for each other, are planned, and go on in the planned order.

The model wrappers of all frameworks share it. An internal error sends prompts as given.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from threading import Event
from typing import Any, Generic, NamedTuple, TypeVar

from ctxreuse.adapters.ordered_release import (
    DEFAULT_WINDOW_S,
    PLANNED_ON_THE_LOOP,
    OrderedQueue,
    Slot,
    TaskWaiter,
    checked_window,
    in_event_loop,
)
from ctxreuse.adapters.prompt_draft import ScopedPrompt
from ctxreuse.adapters.prompt_planner import PlannedPrompt, PromptPlanner, as_given
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.planner import ReusePlanner, Strategy

_STALL_TIMEOUT_S = 1.0
"""If no caller goes on for this time, all do: an answer is worth more than the order."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Piece = TypeVar("_Piece")


class ReportedTokens(NamedTuple):
    """What an engine reports of an answer, as far as it can be read; None is unknown.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those that came from the prefix cache.
        completion_tokens: Tokens of the answer.
    """

    prompt_tokens: int | None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class Scheduled(NamedTuple, Generic[_Result]):
    """What came out of planning for the item that arrived as the `position`-th."""

    position: int
    result: _Result


class MicroBatcher(Generic[_Item, _Result]):
    """Collects single concurrent calls, plans them together, and lets them go in the planned order.

    Applications that serve many users call the model once a user, from tasks or threads. Planned
    one by one, their order is that of arrival; planned together, prompts that share a prefix run
    back to back.

    The first caller waits for the window to close and plans for all. Then each passes a release
    token to the next waiter as it goes on, so that they reach the engine in the planned order.
    Tasks of one event loop that follow each other go on together: it resumes them in their order.
    Tasks of any event loop and threads may be mixed. A caller that is cancelled is passed over.

    No caller depends on another one's thread or event loop to run: the first one that notices that
    the window is over closes it, and all go on if the token does not come. A blocking call inside
    an event loop is planned on its own, at once: the tasks that it would wait for cannot run.

    Args:
        schedule: Plans the items, given in the order of arrival; returns each once, in the order in
            which to go. If it raises, every caller gets the exception.
        window_s: Seconds for which the first caller waits for others; 0 plans each call on its own,
            at once.
        dropped: Called with what was planned for a caller that was cancelled while it waited.

    Raises:
        InvalidRequestError: the window is not a number of seconds from 0 to 60.
    """

    def __init__(
        self,
        schedule: Callable[[list[_Item]], Sequence[Scheduled[_Result]]],
        window_s: float = DEFAULT_WINDOW_S,
        dropped: Callable[[_Result], object] = lambda result: None,
    ) -> None:
        self._schedule = schedule
        self._window_s = checked_window(window_s)
        self._dropped = dropped
        self._lock = ForkSafeLock()
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Have no batch: in a child, those who wait in the parent's cannot go on."""
        self._open: OrderedQueue[_Item, _Result] | None = None

    def submit(self, item: _Item) -> _Result:
        """Wait in this thread until the item is released; return what was planned for it."""
        if not self._window_s or in_event_loop():
            return self._schedule([item])[0].result
        slot = self._join(item)
        woken = Event()
        slot.attach(woken.set)
        try:
            if not woken.wait(self._window_s):
                self._close(slot.queue)
            while not woken.wait(_STALL_TIMEOUT_S):
                slot.queue.release_if_stalled(_STALL_TIMEOUT_S)
            return _taken(slot)
        finally:
            slot.leave()

    async def asubmit(self, item: _Item) -> _Result:
        """Wait in this task until the item is released; return what was planned for it."""
        if not self._window_s:
            return self._schedule([item])[0].result
        slot = self._join(item)
        waiter = TaskWaiter(slot)
        # a wait that ends for the window would resume its task out of turn
        close, go_on = (partial(one, slot.queue) for one in (self._close_aside, self._go_on))
        timer = _Timer(self._window_s, close, go_on)
        try:
            await waiter.wait()
            return _taken(slot)
        finally:
            timer.cancel()
            slot.leave()

    def _join(self, item: _Item) -> Slot[_Item, _Result]:
        with self._lock:
            if self._open is None:
                self._open = OrderedQueue(unused=self._dropped, by_loop=True)
            return Slot(self._open, item)

    def _go_on(self, batch: OrderedQueue[_Item, _Result]) -> None:
        """Close a batch that is still open, and release all of it if it stalls."""
        self._close(batch)  # all threads may be busy with other work
        batch.release_if_stalled(_STALL_TIMEOUT_S)

    def _close_aside(self, batch: OrderedQueue[_Item, _Result]) -> None:
        """Close a batch; a large one in a thread.

        Nobody waits for the thread: its caller goes on when it is released, as all others do.
        """
        if len(batch.arrived) <= PLANNED_ON_THE_LOOP:
            self._close(batch)
            return
        loop = asyncio.get_running_loop()
        try:
            loop.run_in_executor(None, copy_context().run, self._close, batch)
        except RuntimeError:  # no thread can be started
            self._close(batch)

    def _close(self, batch: OrderedQueue[_Item, _Result]) -> None:
        """Plan the calls that have come together, unless that is done, and line them up."""
        with self._lock:
            if self._open is not batch:
                return
            self._open = None
        slots = batch.take_arrived()
        if slots:
            batch.plan(slots, self._planned)

    def _planned(self, slots: list[Slot[_Item, _Result]]) -> list[Slot[_Item, _Result]]:
        scheduled = self._schedule([slot.item for slot in slots])
        assert sorted(position for position, _ in scheduled) == list(range(len(slots)))
        for position, result in scheduled:
            slots[position].set_result(result)
        return [slots[position] for position, _ in scheduled]


class _Timer:
    """Calls functions in the running event loop until it is cancelled.

    Args:
        window_s: When to call `close`, in seconds.
        close: Called once.
        go_on: Called after that, each time when the stall timeout has passed.
    """

    def __init__(
        self, window_s: float, close: Callable[[], object], go_on: Callable[[], object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._go_on = go_on
        self._next = self._loop.call_later(window_s, self._call, close)

    def _call(self, work: Callable[[], object]) -> None:
        self._next = self._loop.call_later(_STALL_TIMEOUT_S, self._call, self._go_on)
        work()

    def cancel(self) -> None:
        """Call nothing any more."""
        self._next.cancel()


def _taken(slot: Slot[_Item, _Result]) -> _Result:
    result = slot.take()
    assert result is not None, "a call that is released is planned"
    return result


class ModelGateway:
    """Plans prompts and tells the planner which were not sent. Threads and tasks may share it.

    Args:
        planner: Plans the contexts.
        strategy: "reuse", "paper" or "none".
        window_s: Seconds for which a single prompt waits for others; 0 plans each on its own.
        component: The model wrapper's name, for the log.
        registry: Where rendered contexts are remembered; None takes the one of this process.

    Attributes:
        statistics: Returns what became of the contexts in its prompts.
        plan: Waits in this thread until a prompt is released; returns it planned.
        aplan: Does the same in this task.
        attempt: Returns what a function returns or, if it raises, what another one does.

    Raises:
        InvalidRequestError: wrong type or out of range.
        UnknownStrategyError: there is no such strategy.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        strategy: Strategy,
        window_s: float,
        component: str,
        registry: ContextRegistry | None = None,
    ) -> None:
        self._made_with = planner, strategy, window_s, component, registry
        self._planner = PromptPlanner(planner, strategy, registry)
        self._note_answer = planner.observe
        self._fail_open = FailOpen(
            component, "prompts are sent as given", tell=planner.note_failure
        )
        self._batcher = MicroBatcher(self._scheduled, window_s, dropped=self.evict)
        self.attempt = self._fail_open.attempt
        self.statistics = self._planner.statistics
        self.plan = self._batcher.submit
        self.aplan = self._batcher.asubmit

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelGateway, self._made_with

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts were sent as given."""
        return self._fail_open.faults

    def plan_batch(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return prompts that are known together in the order in which to send them, each once."""
        return self.attempt(lambda: self._planner.plan(prompts), lambda: as_given(prompts))

    def evict(self, planned: PlannedPrompt) -> None:
        """Tell the planner that a prompt was not sent, or that its call failed."""
        if planned.plans:
            self.attempt(lambda: self._planner.forget(planned.plans), lambda: None)

    def observe(
        self, planned: PlannedPrompt | None, usage: ReportedTokens | None, seconds: float
    ) -> None:
        """Tell the planner what the engine reports of a prompt that was answered.

        Args:
            planned: The prompt; None if it was not planned, of which nothing is told.
            usage: What the engine reports; None without usage.
            seconds: How long the call took.
        """
        if planned is None or usage is None:
            return
        self.attempt(
            lambda: self._note_answer(
                planned.plans,
                usage.prompt_tokens,
                usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                seconds=seconds,
                tenant=planned.tenant,
            ),
            lambda: None,
        )

    @contextmanager
    def evict_on_failure(self, planned: PlannedPrompt | None) -> Iterator[None]:
        """Evict a prompt if the code that sends it raises or is cancelled.

        Args:
            planned: The prompt; None if it was not planned.
        """
        try:
            yield
        except BaseException:
            self.evict_unread(planned, is_read=False)
            raise

    def stream(
        self, planned: PlannedPrompt | None, start: Callable[[], Iterator[_Piece]]
    ) -> Generator[_Piece, None, None]:
        """Yield what a model streams; evict the prompt if that ends before the first piece.

        Args:
            planned: The prompt; None if it was not planned.
            start: Makes the model stream.
        """
        is_read = False
        try:
            pieces = start()
            try:
                for piece in pieces:
                    is_read = True  # by the engine, which then probably keeps the prompt
                    yield piece
            finally:
                close: Any = getattr(pieces, "close", None)
                if close is not None:
                    close()
        finally:
            self.evict_unread(planned, is_read)

    async def astream(
        self, planned: PlannedPrompt | None, start: Callable[[], AsyncIterator[_Piece]]
    ) -> AsyncGenerator[_Piece, None]:
        """Yield what a model streams, as `stream` does."""
        is_read = False
        try:
            pieces = start()
            try:
                async for piece in pieces:
                    is_read = True
                    yield piece
            finally:
                close: Any = getattr(pieces, "aclose", None)
                if close is not None:
                    await close()
        finally:
            self.evict_unread(planned, is_read)

    def evict_unread(self, planned: PlannedPrompt | None, is_read: bool) -> None:
        """Evict a prompt if the engine has answered nothing, so probably has not read it.

        Args:
            planned: The prompt; None if it was not planned.
            is_read: Whether anything came back.
        """
        if planned is not None and not is_read:
            self.evict(planned)

    def _scheduled(self, prompts: list[ScopedPrompt]) -> list[Scheduled[PlannedPrompt]]:
        return [Scheduled(planned.position, planned) for planned in self.plan_batch(prompts)]
