"""Several engines that serve the same model: each request goes where its prefix is cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ctxreuse.adapters.micro_batch import DEFAULT_WINDOW_S
from ctxreuse.errors import EngineError, InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.serving.client.completion import Completion
from ctxreuse.serving.client.transient_errors import is_retryable
from ctxreuse.serving.pool.admission import Plannable
from ctxreuse.serving.pool.membership import (
    EngineSpec,
    Replicas,
    check_count,
    check_limit,
    is_number,
)
from ctxreuse.serving.pool.pool_result import PoolResult, PoolStream
from ctxreuse.serving.pool.replica import Client, InFlightRequest, Replica
from ctxreuse.serving.pool.routing import RequestRouter, request_of


class EnginePool(Replicas):
    """Sends each request to the engine that is expected to serve it first.

    Each engine has its own planner, whose index is what its cache holds. A request goes to the
    engine with most expected cached tokens, less what it would have to wait for, in tokens; there
    it waits until it may be sent, is planned together with those that wait with it, and sent.

    An engine that does not answer is tried again elsewhere, once the whole request has failed
    there, and is left alone for a while when that happens several times in a row. Its cache counts
    as empty then, and so does that of an engine that repeatedly serves nothing from it where much
    was expected. Where all have failed, they are tried nevertheless.

    A pool may be used from several event loops.

    Args:
        engines: Addresses, or `EngineSpec`s; a mapping from names to functions that
            make a client is for clients of your own.
        model: The model's name; None asks each engine.
        planner: Its settings are those of each engine's planner; None takes the defaults.
        strategy: "reuse", "paper" or "none".
        concurrency: Requests under way at an engine; more wait here, to be planned together.
        window_s: Seconds for which a request waits for others to be planned with.
        queue_weight: What waiting for one token costs, compared with computing one.
        attempts: How often a request is sent before it has failed.
        backoff_s: Seconds before a request is sent again to an engine that has failed it; it
            doubles with each.
        failures: After how many failures in a row an engine is left alone.
        rest_s: For how many seconds; it doubles each time.
        clock: Seconds from any start.
        **client: Further arguments of each `EngineClient`: `api_key`, `http_client`, `timeout_s`,
            `cache_salt`, `session_id`, `salt_key`, `lora`.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
        MissingExtraError: If `openai` or `tenacity` is not installed.

    Example:
        >>> import asyncio, httpx
        >>> from ctxreuse import ContextRequest
        >>> from ctxreuse.serving import EmulatedEngine, EngineClient
        >>> def connect():
        ...     transport = EmulatedEngine(answer="In France.").transport()
        ...     return EngineClient("http://a", http_client=httpx.AsyncClient(transport=transport))
        >>> async def main():
        ...     async with EnginePool({"a": connect}) as pool:
        ...         request = ContextRequest(["Paris is in France."], "Where is Paris?")
        ...         return await pool.complete(request, max_tokens=20)
        >>> served = asyncio.run(main())
        >>> served.completion.text, served.replica
        ('In France.', 'a')
    """

    def __init__(
        self,
        engines: str | EngineSpec | Iterable[str | EngineSpec] | Mapping[str, Callable[[], Client]],
        model: str | None = None,
        *,
        planner: ReusePlanner | None = None,
        strategy: Strategy = "reuse",
        concurrency: int = 256,
        window_s: float = DEFAULT_WINDOW_S,
        queue_weight: float = 1.0,
        attempts: int = 3,
        backoff_s: float = 0.5,
        failures: int = 3,
        rest_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        **client: Any,
    ) -> None:
        if not is_number(queue_weight):
            raise InvalidRequestError(
                f"queue_weight must be a number from 0, not {describe(queue_weight)}"
            )
        if not is_number(backoff_s):
            raise InvalidRequestError(
                f"backoff_s must be a number from 0, not {describe(backoff_s)}"
            )
        check_count("attempts", attempts)
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._router = RequestRouter(queue_weight, in_order=strategy == "none")
        super().__init__(
            engines,
            planner=planner,
            strategy=strategy,
            concurrency=concurrency,
            window_s=window_s,
            failures=failures,
            rest_s=rest_s,
            clock=clock,
            client_options={"model": model, **client},
        )

    def route(self, prompt: Plannable, *, among: Iterable[str] | None = None) -> str:
        """Return the name of the replica to which a request should go now.

        It is the one with most expected cached tokens, less `queue_weight` times the tokens that it
        has still to compute. Among equals the request's first block decides, by rendezvous hashing,
        so that what nobody has read goes to the same replica in every process.

        Args:
            prompt: A request, or a plan whose order stands.
            among: Names to choose from; None takes all.

        Raises:
            InvalidRequestError: If an argument is of the wrong kind.
            EngineError: If none may be chosen.
        """
        request_of(prompt)
        if among is None:
            return self._best(self._candidates(), prompt).name
        if isinstance(among, str) or not isinstance(among, Iterable):
            raise InvalidRequestError(
                f"among must be a list of replicas' names, not {describe(among)}"
            )
        names = list(among)
        candidates = _usable(one for one in self._staying() if one.name in names)
        return self._best(candidates, prompt).name

    async def complete(
        self,
        prompt: Plannable,
        *,
        replica: str | None = None,
        session_id: str | None = None,
        limit_s: float | None = None,
        on_first_token: Callable[[], object] | None = None,
        **params: Any,
    ) -> PoolResult:
        """Send a request, wherever it is served first, and wait for the whole answer.

        Args:
            prompt: A request; or a plan, which is sent as it is.
            replica: Where to send it, as long as that replica is there, does not drain and does
                not rest, and has not failed it; else, and for None, the pool chooses.
            session_id: As in `EngineClient.complete`.
            limit_s: Seconds from being sent after which a replica has failed to answer; None
                leaves it to the client's `timeout_s`.
            on_first_token: Called when the first token has come.
            **params: As in `EngineClient.complete`.

        Raises:
            InvalidRequestError: If an argument is of the wrong kind.
            EngineError: If no engine answered, or the request itself was refused.
        """
        check_limit(limit_s)
        tried: list[str] = []
        while True:
            chosen = self._choose(prompt, replica, tried)
            to_compute = self._router.to_compute(chosen, prompt)
            try:
                async with chosen.sending(prompt, to_compute, limit_s) as sending:
                    completion = await sending.in_time(
                        chosen.client().complete(
                            sending.plan,
                            session_id=session_id,
                            on_first_token=on_first_token,
                            **params,
                        )
                    )
            except EngineError as error:
                await self._give_up_or_wait(error, chosen, tried)
                continue
            return self._served(chosen, sending, completion, tried)

    def stream(
        self,
        prompt: Plannable,
        *,
        replica: str | None = None,
        session_id: str | None = None,
        limit_s: float | None = None,
        **params: Any,
    ) -> PoolStream:
        """Send a request, wherever it is served first, and get the answer piece by piece.

        It is sent again elsewhere only as long as no piece has come.

        Args:
            prompt: A request; or a plan, which is sent as it is.
            replica: As in `complete`.
            session_id: As in `complete`.
            limit_s: As in `complete`, for the whole answer; what the caller does between two
                pieces does not count.
            **params: As in `complete`.

        Returns:
            An async iterator of texts; use it with `async with`, so that a request whose answer is
            left early is cancelled at once.

        Raises:
            InvalidRequestError: If an argument is of the wrong kind.
        """
        request_of(prompt)
        check_limit(limit_s)
        stream = PoolStream()
        stream.pieces = self._pieces(stream, prompt, replica, session_id, limit_s, params)
        return stream

    def _candidates(self, tried: Collection[str] = ()) -> list[Replica]:
        """Return where a request that some have failed may go: elsewhere, if there is another."""
        usable = _usable(self._staying())
        return [one for one in usable if one.name not in tried] or usable

    def _best(self, candidates: Sequence[Replica], prompt: Plannable) -> Replica:
        if not candidates:
            raise EngineError(
                "no engine of the pool may be sent anything: all are draining; call resume() or "
                "add()",
                attempts=0,
            )
        return self._router.best(candidates, prompt)

    def _choose(self, prompt: Plannable, wanted: str | None, tried: Collection[str]) -> Replica:
        candidates = self._candidates(tried)
        for one in candidates:
            if one.name == wanted and wanted not in tried:
                return one
        return self._best(candidates, prompt)

    def _served(
        self, by: Replica, sending: InFlightRequest, completion: Completion, tried: Iterable[str]
    ) -> PoolResult:
        """Note that a request is answered; return its answer."""
        by.note_answer(sending, completion)
        self._router.note(sending.plan.request, by)
        return PoolResult(completion, sending.plan, by.name, tuple(tried))

    async def _pieces(
        self,
        stream: PoolStream,
        prompt: Plannable,
        wanted: str | None,
        session_id: str | None,
        limit_s: float | None,
        params: dict[str, Any],
    ) -> AsyncGenerator[str]:
        tried: list[str] = []
        has_begun = False
        while True:
            chosen = self._choose(prompt, wanted, tried)
            to_compute = self._router.to_compute(chosen, prompt)
            try:
                async with (
                    chosen.sending(prompt, to_compute, limit_s) as sending,
                    chosen.client().stream(sending.plan, session_id=session_id, **params) as pieces,
                ):
                    while (piece := await sending.in_time(anext(pieces, None))) is not None:
                        has_begun = True
                        yield piece
                    completion = pieces.completion
            except EngineError as error:
                if has_begun:
                    raise
                await self._give_up_or_wait(error, chosen, tried)
                continue
            stream.result = self._served(chosen, sending, completion, tried)
            return

    async def _give_up_or_wait(self, error: EngineError, failed: Replica, tried: list[str]) -> None:
        """Raise the error if trying again is of no use; else wait, unless another may be tried."""
        tried.append(failed.name)
        candidates = self._candidates(tried)
        if not is_retryable(error.status) or len(tried) >= self._attempts or not candidates:
            if len(tried) > 1:
                error.attempts += len(tried) - 1
                error.add_note(f"sent to {', '.join(tried)}, in turn")
            raise error
        if candidates[0].name in tried:
            rounds = tried.count(failed.name)
            await asyncio.sleep(self._backoff_s * 2 ** (rounds - 1))


def _usable(replicas: Iterable[Replica]) -> list[Replica]:
    """Return those that do not rest; where all do, they are tried nevertheless."""
    replicas = list(replicas)
    return [one for one in replicas if one.is_available] or replicas
