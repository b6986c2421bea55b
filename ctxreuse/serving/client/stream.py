"""An answer that is read piece by piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from ctxreuse.errors import EngineError
from ctxreuse.serving.aio.closing import AsyncClosing
from ctxreuse.serving.client.completion import Completion
from ctxreuse.serving.client.request import EngineCall


class CompletionStream(AsyncClosing):
    """An answer in progress: an async iterator of its pieces.

    Made by `EngineClient.stream`. The request is sent when the first piece is asked for;
    `completion` is there once the iteration has ended.
    """

    def __init__(
        self, call: EngineCall, pieces: AsyncGenerator[str], drop: Callable[[], None]
    ) -> None:
        self._call = call
        self._pieces = pieces
        self._drop = drop
        self._has_begun = False

    @property
    def completion(self) -> Completion:
        """The whole answer and what it cost.

        Raises:
            EngineError: the answer has not ended.
        """
        if self._call.completion is None:
            raise EngineError("the answer has not ended; iterate over its pieces first")
        return self._call.completion

    def __aiter__(self) -> CompletionStream:
        return self

    async def __anext__(self) -> str:
        self._has_begun = True
        return await anext(self._pieces)

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended, and tell the planner.

        A request of which no piece was asked for is not sent any more; the planner is told of that,
        too.
        """
        if not self._has_begun:
            self._has_begun = True
            self._drop()  # a generator that was never started does not run its own clean-up
        await self._pieces.aclose()
