"""Several engines that serve the same model: each request goes where its prefix is cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ctxreuse.errors import EngineError, InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.serving.circuit import CircuitBreaker
from ctxreuse.serving.client import EngineClient
from ctxreuse.serving.closing import AsyncClosing
from ctxreuse.serving.completion import Completion
from ctxreuse.serving.replica import Client, Replica, ReplicaStatus, Sending
from ctxreuse.serving.routing import Router, request_of
from ctxreuse.serving.served import PoolStream, Served
from ctxreuse.serving.transient_errors import passes
from ctxreuse.serving.waiting_room import Plannable, WaitingRoom
from ctxreuse.serving.window import DEFAULT_WINDOW_S

if TYPE_CHECKING:
    from ctxreuse.cache.events import KVEventSync

_DRAINING_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine of a pool, where its address alone does not say all.

    Attributes:
        base_url: Its address, with or without `/v1`.
        name: What it is called; None takes host and port.
        capacity_tokens: What its cache holds; None asks the engine.
        kv_events: Where it publishes its cache events, such as "tcp://127.0.0.1:5557"; its index
            then follows them.
        kv_replay: Where it takes requests for replays of them.
    """

    base_url: str
    name: str | None = None
    capacity_tokens: int | None = None
    kv_events: str | None = None
    kv_replay: str | None = None


class EnginePool(AsyncClosing):
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
        engines: Addresses, or `Engine`s; a mapping from names to functions that make a client is
            for clients of your own.
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
        engines: str | Engine | Iterable[str | Engine] | Mapping[str, Callable[[], Client]],
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
        if planner is not None and not isinstance(planner, ReusePlanner):
            raise InvalidRequestError(f"planner must be a ReusePlanner, not {describe(planner)}")
        for name, value in (
            ("queue_weight", queue_weight),
            ("backoff_s", backoff_s),
            ("rest_s", rest_s),
        ):
            if not _is_number(value):
                raise InvalidRequestError(f"{name} must be a number from 0, not {describe(value)}")
        for name, value in (("attempts", attempts), ("failures", failures)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(
                    f"{name} must be an integer from 1, not {describe(value)}"
                )
        self._settings = planner or ReusePlanner()
        self._strategy = strategy
        self._concurrency = concurrency
        self._window_s = window_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._failures = failures
        self._rest_s = rest_s
        self._clock = clock
        self._client_options = {"model": model, **client}
        self._router = Router(queue_weight, in_order=strategy == "none")
        # never changed, but replaced: whoever goes through it may be in another thread
        self._replicas: Mapping[str, Replica] = {}
        self._syncs: dict[str, KVEventSync] = {}
        try:
            self._enter_all(engines)
        except BaseException:
            for sync in self._syncs.values():
                sync.stop()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replicas, in the order in which they were added."""
        return tuple(self._replicas)

    @property
    def faults(self) -> int:
        """How often bookkeeping or planning has failed; no request has."""
        return sum(replica.faults for replica in self._replicas.values())

    def statistics(self) -> tuple[ReplicaStatus, ...]:
        """Return how each replica is."""
        return tuple(replica.status() for replica in self._replicas.values())

    def available(self) -> tuple[str, ...]:
        """Return the names of the replicas that new requests may go to."""
        return tuple(one.name for one in self._replicas.values() if one.is_available)

    def generation(self, name: str) -> int:
        """Return how often a replica has been found with an empty cache.

        Raises:
            InvalidRequestError: If there is no such replica.
        """
        return self._replica(name).generation

    def add(self, engine: str | Engine) -> str:
        """Add an engine; return its name.

        Raises:
            InvalidRequestError: If it is no address, or the name is taken.
        """
        if isinstance(engine, str):
            engine = Engine(base_url=engine)
        if not isinstance(engine, Engine):
            raise InvalidRequestError(f"an engine must be an address, not {describe(engine)}")
        planner = self._settings.sibling()
        events: KVEventSync | None = None
        if engine.kv_events is not None:
            from ctxreuse.cache.events import KVEventSync as Sync

            events = Sync(planner, engine.kv_events, engine.kv_replay)
        base_url, options = engine.base_url, self._client_options

        def make() -> Client:
            return EngineClient(base_url, planner=planner, events=events, retries=0, **options)

        made = [make()]  # at once, so that wrong arguments are refused here

        def connect() -> Client:
            return made.pop() if made else make()

        name = engine.name or urlsplit(base_url).netloc.rpartition("@")[2]
        self._enter(name, connect, planner, engine.capacity_tokens, events)
        return name

    async def remove(self, name: str) -> None:
        """Wait until a replica has ended its requests, and take it out; no new ones go there.

        Raises:
            InvalidRequestError: If there is no such replica.
        """
        replica = self._replica(name)
        self.drain(name)
        await self.drained(name)
        if self._replicas.get(name) is not replica:
            return  # somebody else has removed it, too
        self._replicas = {one.name: one for one in self._replicas.values() if one is not replica}
        sync = self._syncs.pop(name, None)
        if sync is not None:
            await asyncio.to_thread(sync.stop)
        await replica.disconnect()

    def drain(self, name: str) -> None:
        """Send no new requests to a replica; those that it has go on.

        Raises:
            InvalidRequestError: If there is no such replica.
        """
        self._replica(name).is_draining = True

    async def drained(self, name: str) -> None:
        """Wait until a replica has ended its requests.

        Raises:
            InvalidRequestError: If there is no such replica.
        """
        replica = self._replica(name)
        while not replica.is_idle:
            await asyncio.sleep(_DRAINING_S)

    def resume(self, name: str) -> None:
        """Send requests to a draining replica again.

        Raises:
            InvalidRequestError: If there is no such replica.
        """
        self._replica(name).is_draining = False

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
    ) -> Served:
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
        _check_limit(limit_s)
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
        _check_limit(limit_s)
        stream = PoolStream()
        stream.pieces = self._pieces(stream, prompt, replica, session_id, limit_s, params)
        return stream

    async def context_window(self) -> int | None:
        """Return the tokens of the longest prompt with its answer; None if no engine says.

        Each engine is asked until it has answered once; where they differ, it is the least.
        """
        asked = (replica.context_window() for replica in self._replicas.values())
        return min(filter(None, await asyncio.gather(*asked)), default=None)

    async def check(self, limit_s: float = 5.0) -> dict[str, bool]:
        """Ask each replica whether it is ready; return the answers by name.

        One that is not is left alone at once; one that is, after it was not, is used again, with an
        empty cache. One that has no such route (404) counts as ready, for it answers.

        Args:
            limit_s: Seconds after which a replica is not.
        """
        _check_limit(limit_s)
        replicas = list(self._replicas.values())
        healthy = await asyncio.gather(*(replica.check_health(limit_s) for replica in replicas))
        return {replica.name: well for replica, well in zip(replicas, healthy, strict=True)}

    async def watch(self, interval_s: float = 5.0, limit_s: float = 5.0) -> None:
        """Check all replicas again and again, until it is cancelled: run it as a task.

        Args:
            interval_s: Seconds between two checks.
            limit_s: As in `check`.
        """
        while True:
            await self.check(limit_s)
            await asyncio.sleep(interval_s)

    async def aclose(self) -> None:
        """Close the connections of the running event loop, and stop following events."""
        syncs, self._syncs = self._syncs, {}
        for sync in syncs.values():
            await asyncio.to_thread(sync.stop)
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connections that were made in the running event loop."""
        for replica in self._replicas.values():
            await replica.disconnect()

    def _enter_all(
        self, engines: str | Engine | Iterable[str | Engine] | Mapping[str, Callable[[], Client]]
    ) -> None:
        if isinstance(engines, (str, Engine)):
            engines = [engines]
        if isinstance(engines, Mapping):
            given = sorted(
                name for name, value in self._client_options.items() if value is not None
            )
            if given:
                raise InvalidRequestError(
                    f"{', '.join(given)}: give these to the clients, which you make yourself"
                )
            for name, connect in engines.items():
                if not isinstance(name, str) or not callable(connect):
                    raise InvalidRequestError(
                        "clients of your own are a mapping from names to functions that make one, "
                        f"not from {describe(name)} to {describe(connect)}"
                    )
                self._enter(name, connect, self._settings.sibling())
        elif isinstance(engines, Iterable):
            for engine in engines:
                self.add(engine)
        else:
            raise InvalidRequestError(
                f"engines must be addresses, such as 'http://127.0.0.1:8000', not "
                f"{describe(engines)}"
            )
        if not self._replicas:
            raise InvalidRequestError("a pool needs at least one engine's address")

    def _enter(
        self,
        name: str,
        connect: Callable[[], Client],
        planner: ReusePlanner,
        capacity_tokens: int | None = None,
        events: KVEventSync | None = None,
    ) -> None:
        if name in self._replicas:
            raise InvalidRequestError(
                f"there are two engines called {describe(name)}; give Engine(..., name=...)"
            )
        room = WaitingRoom(planner, self._concurrency, self._window_s, self._strategy)
        circuit = CircuitBreaker(self._failures, self._rest_s)
        replica = Replica(
            name,
            connect,
            planner,
            room,
            circuit,
            capacity_tokens=capacity_tokens,
            follows_events=events is not None,
            clock=self._clock,
        )
        if events is not None:
            events.start()
            self._syncs[name] = events
        self._replicas = {**self._replicas, name: replica}

    def _replica(self, name: str) -> Replica:
        try:
            return self._replicas[name]
        except KeyError:
            raise InvalidRequestError(
                f"there is no replica {describe(name)}; there are {', '.join(self._replicas)}"
            ) from None

    def _staying(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if not replica.is_draining]

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
        self, by: Replica, sending: Sending, completion: Completion, tried: Iterable[str]
    ) -> Served:
        """Note that a request is answered; return its answer."""
        by.note_answer(sending, completion)
        self._router.note(sending.plan.request, by)
        return Served(completion, sending.plan, by.name, tuple(tried))

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
        if not passes(error.status) or len(tried) >= self._attempts or not candidates:
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


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite number from 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value < float("inf")


def _check_limit(limit_s: float | None) -> None:
    if limit_s is not None and not (_is_number(limit_s) and limit_s):
        raise InvalidRequestError(
            f"limit_s must be a number of seconds above 0, or None, not {describe(limit_s)}"
        )
