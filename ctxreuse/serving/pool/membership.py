"""Which engines a pool has, and how they are: members come and go, rest, drain, are checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.serving.aio.closing import AsyncClosing
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.pool.admission import AdmissionQueue
from ctxreuse.serving.pool.circuit_breaker import CircuitBreaker
from ctxreuse.serving.pool.replica import Client, Replica, ReplicaStatus

if TYPE_CHECKING:
    from ctxreuse.cache.kv_events.event_sync import KVEventSync

_DRAINING_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
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


class Replicas(AsyncClosing):
    """The engines of a pool, each with a planner, a waiting room and a circuit breaker of its own.

    See `EnginePool`, which sends requests to them, for the arguments.

    Raises:
        InvalidRequestError: If an argument is of the wrong kind.
        MissingExtraError: If `openai` or `tenacity` is not installed.
    """

    def __init__(
        self,
        engines: str | EngineSpec | Iterable[str | EngineSpec] | Mapping[str, Callable[[], Client]],
        *,
        planner: ReusePlanner | None,
        strategy: Strategy,
        concurrency: int,
        window_s: float,
        failures: int,
        rest_s: float,
        clock: Callable[[], float],
        client_options: Mapping[str, Any],
    ) -> None:
        if planner is not None and not isinstance(planner, ReusePlanner):
            raise InvalidRequestError(f"planner must be a ReusePlanner, not {describe(planner)}")
        if not is_number(rest_s):
            raise InvalidRequestError(f"rest_s must be a number from 0, not {describe(rest_s)}")
        check_count("failures", failures)
        self._settings = planner or ReusePlanner()
        self._strategy = strategy
        self._concurrency = concurrency
        self._window_s = window_s
        self._failures = failures
        self._rest_s = rest_s
        self._clock = clock
        self._client_options = dict(client_options)
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

    def add(self, engine: str | EngineSpec) -> str:
        """Add an engine; return its name.

        Raises:
            InvalidRequestError: If it is no address, or the name is taken.
        """
        if isinstance(engine, str):
            engine = EngineSpec(base_url=engine)
        if not isinstance(engine, EngineSpec):
            raise InvalidRequestError(f"an engine must be an address, not {describe(engine)}")
        planner = self._settings.sibling()
        events: KVEventSync | None = None
        if engine.kv_events is not None:
            from ctxreuse.cache.kv_events.event_sync import KVEventSync as Sync

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
        check_limit(limit_s)
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
        self,
        engines: str | EngineSpec | Iterable[str | EngineSpec] | Mapping[str, Callable[[], Client]],
    ) -> None:
        if isinstance(engines, (str, EngineSpec)):
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
                f"there are two engines called {describe(name)}; give EngineSpec(..., name=...)"
            )
        room = AdmissionQueue(planner, self._concurrency, self._window_s, self._strategy)
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


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number from 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value < float("inf")


def check_count(name: str, value: object) -> None:
    """Raise InvalidRequestError unless a value is an integer from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"{name} must be an integer from 1, not {describe(value)}")


def check_limit(limit_s: float | None) -> None:
    """Raise InvalidRequestError unless a limit is seconds above 0, or None."""
    if limit_s is not None and not (is_number(limit_s) and limit_s):
        raise InvalidRequestError(
            f"limit_s must be a number of seconds above 0, or None, not {describe(limit_s)}"
        )
