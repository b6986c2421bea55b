"""Where calls to a model wait for each other, are planned, and go on in the planned order."""

from __future__ import annotations

from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

from ctxreuse.calls import Call, CallPlanner, PlannedCall, as_given
from ctxreuse.fail_open import FailOpen
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.serving.window import MicroBatchWindow, Scheduled
from llamaindex_ctxreuse.streams import AsyncStream, Stream

_Answer = TypeVar("_Answer")
_Piece = TypeVar("_Piece")


class CallGate:
    """Plans calls that come within some milliseconds together; lets them on in the planned order.

    A fault of ours lets prompts through as given. A call that fails before anything of its answer
    has come is taken back from the planner.

    Args:
        planner: Plans the contexts.
        strategy: "reuse", "paper" or "none".
        window_s: Seconds for which the first caller waits for others; 0 waits for nobody.
        component: The model wrapper's name, for the log.

    Raises:
        InvalidRequestError: If the planner or the window is none.
        UnknownStrategyError: If there is no such strategy.
    """

    def __init__(
        self, planner: ReusePlanner, strategy: Strategy, window_s: float, component: str
    ) -> None:
        self._calls = CallPlanner(planner, strategy)
        self._fail_open = FailOpen(component, "prompts go through as given")
        self._dropped: deque[PlannedCall] = deque()
        self._window = MicroBatchWindow(self._schedule, window_s, self.forget)

    @property
    def faults(self) -> int:
        """How often planning has failed and prompts went through as given."""
        return self._fail_open.faults

    def go_through(self, call: Call) -> PlannedCall:
        """Wait in this thread until it is the call's turn; return it planned."""
        return self._window.submit(call)

    async def ago_through(self, call: Call) -> PlannedCall:
        """Wait in this task until it is the call's turn; return it planned."""
        return await self._window.asubmit(call)

    def plan_batch(self, calls: Sequence[Call]) -> list[PlannedCall]:
        """Return calls that are known together, planned, in the order in which to send them."""
        self._forget_dropped()
        return self._fail_open.attempt(lambda: self._calls.plan(calls), lambda: as_given(calls))

    def forget(self, planned: PlannedCall) -> None:
        """Take back a call that never reached the engine."""
        self._fail_open.attempt(lambda: self._calls.forget(planned.plans), lambda: None)

    def attempt(self, work: Callable[[], _Answer], instead: Callable[[], _Answer]) -> _Answer:
        """Return what work of ours returns or, if it fails, what `instead` does."""
        return self._fail_open.attempt(work, instead)

    def answer(self, planned: PlannedCall, send: Callable[[], _Answer]) -> _Answer:
        """Return the answer to a call."""
        try:
            return send()
        except BaseException:
            self.forget(planned)
            raise

    async def aanswer(
        self, planned: PlannedCall, send: Callable[[], Awaitable[_Answer]]
    ) -> _Answer:
        """Return the answer to a call."""
        try:
            return await send()
        except BaseException:
            self.forget(planned)
            raise

    def stream(
        self, planned: PlannedCall, pieces: Iterator[_Piece]
    ) -> Generator[_Piece, None, None]:
        """Return the pieces of an answer.

        A stream that is closed before its first piece is asked for takes its call back; one that is
        only dropped does so when this gate plans the next time.
        """

        def closed() -> None:
            self.forget(planned)
            _close(pieces)

        return Stream(self._pieces(planned, pieces), closed, self._dropping(planned))

    def astream(
        self, planned: PlannedCall, pieces: AsyncIterator[_Piece]
    ) -> AsyncGenerator[_Piece, None]:
        """Return the pieces of an answer; see `stream`."""

        async def closed() -> None:
            self.forget(planned)
            await _aclose(pieces)

        return AsyncStream(self._apieces(planned, pieces), closed, self._dropping(planned))

    def _pieces(
        self, planned: PlannedCall, pieces: Iterator[_Piece]
    ) -> Generator[_Piece, None, None]:
        has_come = False
        try:
            for piece in pieces:
                has_come = True
                yield piece
        except BaseException:
            if not has_come:
                self.forget(planned)
            raise
        finally:
            _close(pieces)

    async def _apieces(
        self, planned: PlannedCall, pieces: AsyncIterator[_Piece]
    ) -> AsyncGenerator[_Piece, None]:
        has_come = False
        try:
            async for piece in pieces:
                has_come = True
                yield piece
        except BaseException:
            if not has_come:
                self.forget(planned)
            raise
        finally:
            await _aclose(pieces)

    def _dropping(self, planned: PlannedCall) -> Callable[[], None]:
        # only noted: whoever collects garbage may be holding the planner's lock
        return partial(self._dropped.append, planned)

    def _forget_dropped(self) -> None:
        while self._dropped:
            try:
                planned = self._dropped.popleft()
            except IndexError:  # another thread took it
                return
            self.forget(planned)

    def _schedule(self, calls: list[Call]) -> list[Scheduled[PlannedCall]]:
        return [Scheduled(planned.position, planned) for planned in self.plan_batch(calls)]


def _close(pieces: Iterator[Any]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        close()


async def _aclose(pieces: AsyncIterator[Any]) -> None:
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()
