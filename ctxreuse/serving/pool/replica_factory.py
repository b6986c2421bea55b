"""Making the replicas of a pool from addresses, or from clients of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from ctxreuse.context.checks import checked_kind, checked_list
from ctxreuse.errors import InvalidRequestError, describe, shown_url
from ctxreuse.planner import ReusePlanner
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.pool.replica import Replica

if TYPE_CHECKING:
    from ctxreuse.cache.kv_events.event_sync import KVEventSync


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine of a pool, if its address alone is not enough.

    Attributes:
        base_url: Its address, with or without `/v1`.
        name: What it is called; None takes host and port.
        capacity_tokens: What its cache holds; None asks the engine.
        kv_events: Where it publishes its cache events, such as "tcp://127.0.0.1:5557".
        kv_replay: Where it takes requests for replays of them.
    """

    base_url: str
    name: str | None = None
    capacity_tokens: int | None = None
    kv_events: str | None = None
    kv_replay: str | None = None

    def __repr__(self) -> str:
        shown = {one.name: getattr(self, one.name) for one in fields(self)}
        shown["base_url"] = shown_url(self.base_url)
        return f"EngineSpec({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


Engines: TypeAlias = (
    str | EngineSpec | Iterable[str | EngineSpec] | Mapping[str, Callable[[], EngineClient]]
)
"""Addresses, or functions by name that make an `EngineClient`, or what has its methods."""


@dataclass(frozen=True, slots=True)
class ReplicaFactory:
    """Makes the replicas of a pool, each with a planner of its own."""

    planner: ReusePlanner
    client_options: Mapping[str, Any]
    make: Callable[..., Replica]

    def replicas(self, engines: Engines) -> Iterator[Replica]:
        """Yield the replicas of engines, which are given as to `EnginePool`."""
        if isinstance(engines, (str, EngineSpec)):
            engines = [engines]
        if isinstance(engines, Mapping):
            given = sorted(name for name, value in self.client_options.items() if value is not None)
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
                planner = self.planner.sibling(name)
                yield self.make(name, connect, planner, tells_planner=False)
        else:
            words = "addresses, such as 'http://127.0.0.1:8000'"
            for engine in checked_list("engines", engines, words):
                yield self.replica_at(engine)

    def replica_at(self, engine: str | EngineSpec) -> Replica:
        """Return the replica of an engine at an address."""
        if isinstance(engine, str):
            engine = EngineSpec(base_url=engine)
        checked_kind("an engine", engine, EngineSpec, "an address")
        base_url, options = engine.base_url, self.client_options
        name = engine.name or host_of(base_url)
        planner = self.planner.sibling(name)
        events: KVEventSync | None = None
        if engine.kv_events is not None:
            from ctxreuse.cache.kv_events.event_sync import KVEventSync as Sync

            events = Sync(planner, engine.kv_events, engine.kv_replay)

        def make() -> EngineClient:
            return EngineClient(base_url, planner=planner, events=events, retries=0, **options)

        made = [make()]  # at once, so that wrong arguments are refused here

        def connect() -> EngineClient:
            return made.pop() if made else make()

        capacity = engine.capacity_tokens
        return self.make(name, connect, planner, capacity_tokens=capacity, events=events)


def host_of(base_url: str) -> str:
    """Return host and port; "" for what is no address, which the client refuses."""
    try:
        return urlsplit(str(base_url)).netloc.rpartition("@")[2]
    except ValueError:
        return ""
