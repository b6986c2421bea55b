"""Calls of a batch that take their turns: they reach the model in the planned order.

A batch's calls start in that order, but callbacks, caches and rate limiters in front of the model
take different times. So each waits until those before it have gone on, in threads and tasks alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from threading import Event, Lock

from ctxreuse.adapters.micro_batch import in_event_loop
from ctxreuse.adapters.prompt_planner import PlannedPrompt
from langchain_ctxreuse.messages import PromptTexts


class Line:
    """Lets members go on in their order, whatever order they come in; some never come.

    Args:
        length: How many there are; their places are counted from 0.
    """

    def __init__(self, length: int) -> None:
        self._left = [False] * length
        self._front = 0
        self._waiting: dict[int, Callable[[], object]] = {}
        self._lock = Lock()

    def is_front(self, place: int, wake: Callable[[], object]) -> bool:
        """Return whether it is a member's turn; if not, `wake` is called when it is."""
        with self._lock:
            if place <= self._front:
                return True
            self._waiting[place] = wake
            return False

    def leave(self, place: int) -> None:
        """Take a member out; when all before it have left, it is the next one's turn."""
        with self._lock:
            self._left[place] = True
            while self._front < len(self._left) and self._left[self._front]:
                self._front += 1
            wake = self._waiting.pop(self._front, None)
        if wake is not None:
            wake()


class Turn:
    """One call of a batch, its plan, and its place in the line.

    The batch hands it over and calls `invoke` as a user would; whoever sends the call takes the
    plan; in the end the batch closes it.

    Args:
        model: Whose call it is.
        position: The position of its input among the caller's.
        place: Its place in the line, which is the execution order.
        line: The line.
        prompt: The prompt that was planned; None for an input that is none.
        planned: Its plan.
        unsent: Called with the plan if nobody takes it.
    """

    def __init__(
        self,
        model: object,
        position: int,
        place: int,
        line: Line,
        prompt: PromptTexts | None = None,
        planned: PlannedPrompt | None = None,
        unsent: Callable[[PlannedPrompt], object] = lambda planned: None,
    ) -> None:
        self.position = position
        self._model = model
        self._place, self._line = place, line
        self._prompt = prompt
        self._planned = planned
        self._unsent = unsent
        self._lock = Lock()

    def hand_over(self) -> None:
        """Give the turn to the model's call in this context."""
        _handed_over.set(self)

    def is_for(self, model: object) -> bool:
        """Return whether it is this very model's turn."""
        return self._model is model

    def take(self, prompt: PromptTexts) -> PlannedPrompt | None:
        """Wait, in this thread, for the turn, and return the plan.

        Args:
            prompt: What is about to be sent.

        Returns:
            The plan; None if it is for another prompt, or was taken before.
        """
        if not self._is_planned(prompt):
            return None
        woken = Event()
        # inside an event loop those before it could not run while it waits
        if not in_event_loop() and not self._line.is_front(self._place, woken.set):
            woken.wait()
        return self._take()

    async def atake(self, prompt: PromptTexts) -> PlannedPrompt | None:
        """Wait, in this task, for the turn, and return the plan as `take` does."""
        if not self._is_planned(prompt):
            return None
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(woken.set)

        if not self._line.is_front(self._place, wake):
            await woken.wait()
        return self._take()

    def close(self) -> None:
        """Let the others go on; a plan that nobody took was not sent. May be repeated."""
        planned = self._take()
        if planned is not None:
            self._unsent(planned)

    def _is_planned(self, prompt: PromptTexts) -> bool:
        return self._prompt is not None and self._prompt.says_the_same_as(prompt)

    def _take(self) -> PlannedPrompt | None:
        with self._lock:
            planned, self._planned = self._planned, None
        self._line.leave(self._place)
        return planned


_handed_over: ContextVar[Turn | None] = ContextVar("langchain_ctxreuse_turn", default=None)


def handed_over_turn(model: object) -> Turn | None:
    """Return the turn that a batch of the model has handed over in this context."""
    turn = _handed_over.get()
    return turn if turn is not None and turn.is_for(model) else None
