"""Several engines that serve the same model: each request goes where its prefix is cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from ctxreuse.context.checks import (
    check_keywords,
    checked_integer,
    checked_kind,
    checked_list,
    checked_number,
    checked_positive,
)
from ctxreuse.context.copies import FixedSettings, OnePerProcess
from ctxreuse.context.lru_map import PartSize
from ctxreuse.errors import EngineError, InvalidRequestError, describe
from ctxreuse.pipeline.ordered_release import DEFAULT_WINDOW_S
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.aio.concurrency import AsyncClosing
from ctxreuse.serving.client.connection import BUSY, REFUSES, status_rule
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.reply import Completion
from ctxreuse.serving.client.request import AnswerStream
from ctxreuse.serving.pool.admission import Plannable
from ctxreuse.serving.pool.replica import InFlightRequest, Replica, ReplicaStatus
from ctxreuse.serving.pool.routing import RequestRouter, candidates, request_of

_SET_HERE = ("base_url", "events", "retries", "client")
"""Arguments of an `EngineClient` that the pool sets."""
_DRAINING_S = 0.02
_PATIENCE_S = 600.0
"""How long a request without a time limit waits for busy engines."""


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

    base_url: str = field(repr=False)  # it may hold a password
    name: str | None = None
    capacity_tokens: int | None = None
    kv_events: str | None = None
    kv_replay: str | None = None


Engines: TypeAlias = (
    str | EngineSpec | Iterable[str | EngineSpec] | Mapping[str, Callable[[], EngineClient]]
)
"""Addresses, or functions by name that make an `EngineClient`, or what has its methods."""


@dataclass(frozen=True, slots=True)
class PoolResult:
    """An answer of a pool.

    Attributes:
        completion: The answer and what it cost.
        plan: What was sent.
        replica: The name of the replica that answered.
        tried: The names of the replicas that failed before, in order.
    """

    completion: Completion
    plan: Plan
    replica: str
    tried: tuple[str, ...] = ()


class PoolStream(AnswerStream[PoolResult]):
    """An answer of a pool in progress: an async iterator of its pieces."""

    @property
    def served(self) -> PoolResult:
        """The whole answer; EngineError before it has ended."""
        return self._whole()


class EnginePool(FixedSettings, OnePerProcess, AsyncClosing):
    """Sends each request to the engine that is expected to serve it first.

    Each engine has its own planner, whose index is what its cache holds. A request goes to the
    engine with most expected cached tokens, less what it would have to wait for; there it is
    planned together with those that wait with it. May be used from several event loops.

    A request that fails at an engine is tried elsewhere. After several failures in a row the
    engine's circuit opens: its cache counts as empty, and it gets no requests for a while, unless
    all circuits are open. A cache that repeatedly serves nothing counts as empty, too. A busy
    engine (429, 529, or 503 with a `Retry-After`) keeps circuit and index; requests wait for it or
    go elsewhere. One that refuses (redirects, 401, 403, 404 and the like) what another one then
    answers has its circuit open at once, and keeps its index.

    Args:
        engines: Addresses, or `EngineSpec`s; or a mapping from names to functions that make a
            client.
        model: The model's name; None asks each engine.
        planner: Its settings are those of each engine's planner; None takes the defaults. With a
            `shared_log`, each engine has a log of its own (its `of_engine`).
        strategy: "reuse", "paper" or "none".
        concurrency: Requests that run at an engine; more wait here, to be planned together.
        window_s: Seconds for which a request waits for others to be planned with.
        queue_weight: What waiting for one token costs, compared with computing one.
        attempts: How often a request is sent before it has failed; refusals do not count.
        backoff_s: Seconds before an engine that has failed a request gets it again; doubles each
            time.
        failures: After how many failures in a row the circuit of an engine opens.
        open_s: For how many seconds it stays open; they double each time.
        clock: Seconds from any start.
        **client: Further arguments of each `EngineClient`: `api_key`, `http_client`, `timeout_s`
            (anew at each engine), `max_reply_bytes`, `cache_salt`, `session_id`, `salt_key`,
            `lora`.

    Raises:
        UnknownArgumentError: an unknown argument.
        MissingExtraError: `openai` or `tenacity` is not installed.
    """

    def __init__(
        self,
        engines: Engines,
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
        open_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        **client: Any,
    ) -> None:
        check_keywords("EnginePool", client, EnginePool, EngineClient, without=_SET_HERE)
        checked_number("queue_weight", queue_weight)
        self._backoff_s = checked_number("backoff_s", backoff_s)
        self._attempts = checked_integer("attempts", attempts, 1)
        self._patience_s: float = client.get("timeout_s") or _PATIENCE_S
        self._router = RequestRouter(queue_weight, strategy == "none")
        self._make = partial(
            Replica,
            strategy=strategy,
            concurrency=concurrency,
            window_s=window_s,
            failures=checked_integer("failures", failures, 1),
            open_s=checked_number("open_s", open_s),
            clock=clock,
        )
        planner = ReusePlanner() if planner is None else planner
        self._planner = checked_kind("planner", planner, ReusePlanner, "a ReusePlanner")
        self._client_options = {"model": model, **client}
        # never changed, but replaced: another thread may be going through it
        self._replicas: Mapping[str, Replica] = {}
        try:
            for replica in self._replicas_of(engines):
                self._enter(replica)
            if not self._replicas:
                raise InvalidRequestError("a pool needs at least one engine's address")
        except BaseException:
            for replica in self._replicas.values():
                replica.stop_following()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replicas, in the order in which they were added."""
        return tuple(self._replicas)

    @property
    def faults(self) -> int:
        """How often bookkeeping or planning has failed; no request has."""
        return sum(replica.faults for replica in self._replicas.values())

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much the pool itself remembers, and may; for the replicas see their status."""
        return self._router.parts

    @property
    def planners(self) -> dict[str, ReusePlanner]:
        """Each replica's own planner, by the replica's name, for its `savings` and `statistics`."""
        return {name: replica.planner for name, replica in self._replicas.items()}

    def statistics(self) -> tuple[ReplicaStatus, ...]:
        """Return the status of each replica."""
        return tuple(replica.status() for replica in self._replicas.values())

    async def catch_up(self, timeout_s: float = 10.0) -> bool:
        """Wait, `timeout_s` seconds at most, until shared logs are taken in; return whether so."""
        waits = (asyncio.to_thread(one.catch_up, timeout_s) for one in self.planners.values())
        return all(await asyncio.gather(*waits))

    def available(self) -> tuple[str, ...]:
        """Return the names of the replicas that new requests may go to."""
        return tuple(one.name for one in self._replicas.values() if one.is_available)

    def cache_epoch(self, name: str) -> int:
        """Return how often a replica has been found with an empty cache."""
        return self._replica(name).cache_epoch

    def add(self, engine: str | EngineSpec) -> str:
        """Add an engine, whose name must be a new one; return its name."""
        return self._enter(self._replica_at(engine)).name

    async def remove(self, name: str) -> None:
        """Wait until a replica has ended its requests, and take it out; no new ones go there."""
        replica = self._replica(name)
        self.drain(name)
        while not replica.is_idle:
            await asyncio.sleep(_DRAINING_S)
        if self._replicas.get(name) is not replica:
            return  # another caller has removed it meanwhile
        self._replicas = {one.name: one for one in self._replicas.values() if one is not replica}
        await replica.aclose()

    def drain(self, name: str) -> None:
        """Send no new requests to a replica; those that it has go on."""
        self._replica(name).is_draining = True

    def resume(self, name: str) -> None:
        """Send requests to a draining replica again."""
        self._replica(name).is_draining = False

    async def context_window(self) -> int | None:
        """Return the tokens of the longest prompt with its answer, anywhere; None is unknown."""
        asked = (replica.context_window() for replica in self._replicas.values())
        return min(filter(None, await asyncio.gather(*asked)), default=None)

    async def check(self, limit_s: float = 5.0) -> dict[str, bool]:
        """Return whether each replica, by name, says within `limit_s` seconds that it is ready.

        The circuit of one that is not opens at once, closes when it is again, and its cache counts
        as empty. One that has failed or refused requests rests on. One without such a route (404)
        is ready.
        """
        checked_positive("limit_s", limit_s)
        replicas = list(self._replicas.values())
        healthy = await asyncio.gather(*(replica.check_health(limit_s) for replica in replicas))
        return {replica.name: well for replica, well in zip(replicas, healthy, strict=True)}

    async def watch(self, interval_s: float = 5.0) -> None:
        """`check` all replicas every `interval_s` seconds, until cancelled: run it as a task."""
        while True:
            await self.check()
            await asyncio.sleep(interval_s)

    async def aclose(self) -> None:
        """Close the connections of the running event loop, and stop following events."""
        for replica in self._replicas.values():
            await replica.aclose()

    async def disconnect(self) -> None:
        """Close the connections that were made in the running event loop."""
        for replica in self._replicas.values():
            await replica.disconnect()

    def route(self, prompt: Plannable, *, among: Iterable[str] | None = None) -> str:
        """Return the name of the replica to which a request should go now.

        It has most expected cached tokens, less `queue_weight` times the tokens that it has still
        to compute. Among equals the request's first block decides, by rendezvous hashing.

        Args:
            prompt: A request, or a plan whose order stands.
            among: Names to choose from; None takes all.

        Raises:
            EngineError: no replica may be chosen.
        """
        request_of(prompt)
        replicas = self._replicas
        if among is not None:
            names = checked_list("among", among, "a list of replicas' names")
            replicas = {name: one for name, one in replicas.items() if name in names}
        return self._router.choose(replicas.values(), prompt).name

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
            replica: Where to send it, unless that replica drains, is busy, has an open circuit or
                has failed the request; else, and for None, the pool chooses.
            session_id: As in `EngineClient.complete`.
            limit_s: Seconds for a replica's answer, as `timeout_s` of a client, which None leaves
                it to.
            on_first_token: Called when the first token has come; it must not raise.
            **params: As in `EngineClient.complete`.

        Raises:
            EngineError: no engine answered, or the request is at fault; where all refused it, what
                the first one said.
        """
        going = _Going(prompt, replica, limit_s, {"session_id": session_id, **params})
        while going.result is None:
            async with self._attempt(going) as (client, sending):
                await _prime(going, client, sending)
                completing = client.complete(
                    sending.plan, on_first_token=on_first_token, **going.options
                )
                going.completion = await sending.limit.wait_for(completing)
        return going.result

    def stream(
        self,
        prompt: Plannable,
        *,
        replica: str | None = None,
        session_id: str | None = None,
        limit_s: float | None = None,
        **params: Any,
    ) -> PoolStream:
        """Return the answer's pieces as they come; arguments as in `complete`.

        The request is sent again elsewhere only as long as no piece has come. Iterate inside `async
        with`, so that a request whose answer is left early is cancelled at once.
        """
        request_of(prompt)
        going = _Going(prompt, replica, limit_s, {"session_id": session_id, **params})
        stream = PoolStream()
        stream.pieces = self._pieces(going, stream)
        return stream

    def _replicas_of(self, engines: Engines) -> Iterator[Replica]:
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
                planner = self._planner.sibling(name)
                yield self._make(name, connect, planner, tells_planner=False)
        else:
            words = "addresses, such as 'http://127.0.0.1:8000'"
            for engine in checked_list("engines", engines, words):
                yield self._replica_at(engine)

    def _replica_at(self, engine: str | EngineSpec) -> Replica:
        if isinstance(engine, str):
            engine = EngineSpec(base_url=engine)
        checked_kind("an engine", engine, EngineSpec, "an address")
        name = engine.name or host_of(engine.base_url)
        options: dict[str, Any] = {"planner": self._planner.sibling(name), "events": None}
        if engine.kv_events is not None:
            from ctxreuse.cache.kv_events.event_sync import KVEventSync

            options["events"] = KVEventSync(options["planner"], engine.kv_events, engine.kv_replay)
        connect = partial(
            EngineClient, engine.base_url, retries=0, **options, **self._client_options
        )
        made = [connect()]  # at once, so that wrong arguments are refused here
        return self._make(
            name,
            lambda: made.pop() if made else connect(),
            capacity_tokens=engine.capacity_tokens,
            **options,
        )

    def _enter(self, replica: Replica) -> Replica:
        if replica.name in self._replicas:
            raise InvalidRequestError(
                f"there are two engines called {describe(replica.name)}; give EngineSpec(..., "
                "name=...), or a host and port to one --engine only"
            )
        if replica.events is not None:
            replica.events.start()
        self._replicas = {**self._replicas, replica.name: replica}
        return replica

    def _replica(self, name: str) -> Replica:
        try:
            return self._replicas[name]
        except (KeyError, TypeError):  # a list has no hash
            raise InvalidRequestError(
                f"there is no replica {describe(name)}; there are {', '.join(self._replicas)}"
            ) from None

    @asynccontextmanager
    async def _attempt(self, going: _Going) -> AsyncIterator[tuple[EngineClient, InFlightRequest]]:
        """Send a request to one replica; note its answer, or where it was sent in vain."""
        chosen = await self._choose(going)
        to_compute = self._router.to_compute(chosen, going.prompt)
        try:
            async with chosen.sending(going.prompt, to_compute, going.limit_s) as sending:
                yield chosen.client(), sending
        except EngineError as error:
            if going.has_begun:
                raise
            await self._give_up_or_wait(error, chosen, going)
            return
        assert going.completion is not None, "what has not failed is answered"
        chosen.note_answer(sending, going.completion)
        self._router.note(sending.plan.request, chosen)
        for replica, refusal in going.refused.items():
            replica.note_refusal(refusal)
        going.result = PoolResult(going.completion, sending.plan, chosen.name, tuple(going.tried))

    async def _pieces(self, going: _Going, stream: PoolStream) -> AsyncGenerator[str]:
        while going.result is None:
            async with self._attempt(going) as (client, sending):
                await _prime(going, client, sending)
                async with client.stream(sending.plan, **going.options) as pieces:
                    while (piece := await sending.limit.wait_for(anext(pieces, None))) is not None:
                        going.has_begun = True
                        yield piece
                going.completion = pieces.completion
        stream.answer = going.result

    async def _choose(self, going: _Going) -> Replica:
        """Return where to send a request; wait as long as a busy replica is the best choice."""
        checked_kind("replica", going.wanted, (str, NoneType), "a replica's name or None")
        wanted = None if going.wanted in going.tried else going.wanted
        while True:
            chosen = self._router.choose(self._open_to(going), going.prompt, wanted, going.without)
            wait_s = chosen.busy_s
            if not wait_s:
                return chosen
            if going.waited_s + wait_s > (going.limit_s or self._patience_s):
                raise going.last or EngineError(
                    f"{chosen.name} is busy and asks to be left alone for {wait_s:.0f} s, longer "
                    "than the request may take; add engines, or give a larger limit_s",
                    attempts=0,
                    retry_after_s=wait_s,
                )
            going.waited_s += wait_s
            await asyncio.sleep(wait_s)

    async def _give_up_or_wait(self, error: EngineError, failed: Replica, going: _Going) -> None:
        """Raise the error if trying again is of no use; else wait, unless another may be tried."""
        going.tried.append(failed.name)
        going.last = error
        rule = status_rule(error.status, error.retry_after_s)
        says_when = rule is BUSY and bool(error.retry_after_s)
        if not says_when:
            going.without.append(failed.name)
        if rule is REFUSES:
            going.refused[failed] = error
        left = candidates(self._open_to(going), going.without)
        # a refusal costs an engine nothing, and there is one of each at most
        attempts = len(going.tried) - len(going.refused)
        if not rule.elsewhere or attempts >= self._attempts or not left:
            if not attempts:
                error = next(iter(going.refused.values()))
            if len(going.tried) > 1:
                error.attempts += len(going.tried) - 1
                error.add_note(f"sent to {', '.join(going.tried)}, in turn")
            raise error
        if not says_when and left[0].name in going.without:
            rounds = going.tried.count(failed.name)
            await asyncio.sleep(self._backoff_s * 2 ** (rounds - 1))

    def _open_to(self, going: _Going) -> list[Replica]:
        return [one for one in self._replicas.values() if one not in going.refused]


@dataclass(slots=True)
class _Going:
    """One request on its way: where it was sent in vain, and what came of it."""

    prompt: Plannable
    wanted: str | None
    limit_s: float | None
    options: dict[str, Any]  # of the client's call
    waited_s: float = 0.0  # for busy replicas
    tried: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    refused: dict[Replica, EngineError] = field(default_factory=dict)
    last: EngineError | None = None
    has_begun: bool = False  # to be answered, so that it is not sent again
    completion: Completion | None = None
    result: PoolResult | None = None

    def __post_init__(self) -> None:
        if self.limit_s is not None:
            checked_positive("limit_s", self.limit_s)


async def _prime(going: _Going, client: EngineClient, sending: InFlightRequest) -> None:
    if sending.plan.primes:
        await sending.limit.wait_for(client.prime(sending.plan, **going.options))


def host_of(base_url: str) -> str:
    """Return host and port; "" for what is no address, which the client refuses."""
    try:
        return urlsplit(str(base_url)).netloc.rpartition("@")[2]
    except ValueError:
        return ""
