"""One engine of a pool: its clients, what its cache holds, and how much it has to do."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import responses
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from ctxreuse.cache.capacity_tracker import CapacityTracker
from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import ForkSafeLock, leave_to_parent, renew_after_fork
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.errors import EngineError
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.serving.aio.concurrency import TimeLimit
from ctxreuse.serving.client.connection import BUSY, FAILS, WORKS, status_rule
from ctxreuse.serving.client.engine_client import EngineClient
from ctxreuse.serving.client.reply import Completion
from ctxreuse.serving.pool.admission import AdmissionQueue, AdmissionSlot, Plannable, recorded
from ctxreuse.sharing.exchange import SharingStatistics

if TYPE_CHECKING:
    from ctxreuse.cache.kv_events.event_sync import KVEventSync

_log = logging.getLogger("ctxreuse")
_MAX_MISSES = 3
"""Answers in a row without a cached token, where some were expected, that mean a lost cache."""
_LEAST_EXPECTED_TOKENS = 64
_ASKING_S = 5.0
"""Seconds after which an engine has failed to tell what its cache or its model holds."""
_MOST_UNCONFIRMED = 64
"""Plans that are remembered while an engine serves nothing from its cache."""
_LONGEST_BUSY_S = 300.0
"""How long an engine that says it is busy is believed."""
_QUESTIONS = 3
"""How often an engine is asked what its cache holds."""

_LONGEST_OPEN_S = 300.0

CLOSED: Final = "up"  # the engine answers
OPEN: Final = "resting"  # it has failed too often in a row, and gets no requests
HALF_OPEN: Final = "on trial"  # it rested long enough; one request tries it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """The status of a replica.

    Attributes:
        name: Its name.
        state: "up", "resting" (its circuit is open), "refuses: 401 Unauthorized" or another status
            (open, too: another engine answered what it refused), "on trial" (half-open) or
            "draining".
        running: Requests that were sent and have not ended.
        waiting: Requests that are held back.
        queued_tokens: Prompt tokens that all these have still to compute, as expected.
        answered: Requests answered so far.
        failed: Requests that it did not answer.
        cache_epoch: How often it has been found with an empty cache.
        busy: How often it has answered that it has too much to do.
        parts: How much its planner and the bookkeeping of its cache remember, and may.
        sharing: What it exchanges with other processes through shared logs.
    """

    name: str
    state: str
    running: int
    waiting: int
    queued_tokens: int
    answered: int
    failed: int
    cache_epoch: int
    busy: int = 0
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)
    sharing: SharingStatistics = field(default=SharingStatistics(), compare=False)


class InFlightRequest(NamedTuple):
    """A request on its way to a replica, and the time that all parts of its answer have."""

    plan: Plan
    cache_epoch: int
    limit: TimeLimit


class Replica:
    """One engine of a pool. Made by `EnginePool`; threads and event loops may share it."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], EngineClient],
        planner: ReusePlanner,
        *,
        strategy: Strategy,
        concurrency: int,
        window_s: float,
        failures: int,
        open_s: float,
        clock: Callable[[], float],
        capacity_tokens: int | None = None,
        events: KVEventSync | None = None,
        tells_planner: bool = True,
    ) -> None:
        self.name = name
        self.planner = planner
        self.is_draining = False
        self.cache_epoch = 0  # how often it was found with an empty cache
        self._queue = AdmissionQueue(planner, concurrency, window_s, strategy)
        self._circuit = CircuitBreaker(name, failures, open_s)
        self._clock = clock
        self._connect = connect
        self._capacity: CapacityTracker | None = None
        self.events = events
        self._tells_planner = tells_planner
        if capacity_tokens is not None and events is None:
            self._capacity = CapacityTracker(planner, capacity_tokens)
        self._questions = 0 if events is not None or self._capacity is not None else _QUESTIONS
        self._window: int | None = None
        self._knows_window = False
        self._misses = 0
        self._unconfirmed: deque[Plan] = deque(maxlen=_MOST_UNCONFIRMED)
        self._answered = 0
        self._failed = 0
        self._busy = 0
        self._busy_until = -math.inf
        self._rests_as = ""  # its state; "" leaves it to a check to find it ready again
        self._lock = ForkSafeLock()
        # What answers and failures change in the index waits here, in their order: it may wait for
        # a tenant, and the lock above must not.
        self._to_note: deque[Callable[[], None]] = deque()
        self._noting = ForkSafeLock()
        self._have_no_requests()
        renew_after_fork(self._start_anew)
        self._bookkeeping = FailOpen(
            "EnginePool", "the answer is returned all the same", work="bookkeeping"
        )
        self._judging = FailOpen(
            "EnginePool", "nothing counts as cached", "routing", tell=planner.note_failure
        )

    def _have_no_requests(self) -> None:
        self.queued_tokens = 0  # prompt tokens still to compute, as expected
        self._clients = WeakKeyDictionary[asyncio.AbstractEventLoop, EngineClient]()

    def _start_anew(self) -> None:
        """Have no requests and no clients: in a child, those of the parent's threads never end."""
        leave_to_parent(self._clients, *self._clients.values())
        self._have_no_requests()
        self._to_note.clear()
        self._circuit.abandon()

    @property
    def faults(self) -> int:
        """How often bookkeeping or planning has failed."""
        return self._bookkeeping.faults + self._judging.faults + self._queue.faults

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, waiting or under way."""
        return not (self._queue.running or self._queue.waiting)

    @property
    def is_available(self) -> bool:
        """Whether a new request may go there; to a half-open circuit one at a time may."""
        with self._lock:
            return not self.is_draining and self._circuit.admits(self._clock())

    @property
    def busy_s(self) -> float:
        """Seconds for which it wants to be left alone, because it has too much to do."""
        with self._lock:
            return max(0.0, self._busy_until - self._clock())

    def cached_tokens(self, request: ContextRequest, *, in_order: bool) -> int:
        """Return the block tokens of a request that are expected in its cache; 0 on a fault."""
        return self._judging.attempt(
            lambda: self.planner.cached_tokens(request, in_order=in_order), lambda: 0
        )

    def block_tokens(self, prompt: Plannable, tenant: str) -> int:
        """Return how many tokens a prompt's blocks have; on a fault, estimated."""
        return self._judging.attempt(
            lambda: self.planner.block_tokens(prompt.blocks, tenant),
            lambda: sum(estimate_tokens(block.text) for block in prompt.blocks),
        )

    def status(self) -> ReplicaStatus:
        """Return its status."""
        with self._lock:
            circuit = self._circuit.state(self._clock())
            state = (circuit == OPEN and self._rests_as) or circuit
            capacity, unconfirmed = self._capacity, len(self._unconfirmed)
        return ReplicaStatus(
            name=self.name,
            state="draining" if self.is_draining else state,
            running=self._queue.running,
            waiting=self._queue.waiting,
            queued_tokens=self.queued_tokens,
            answered=self._answered,
            failed=self._failed,
            cache_epoch=self.cache_epoch,
            busy=self._busy,
            parts={
                **self.planner.statistics().parts,
                **(capacity.parts if capacity is not None else {}),
                "unconfirmed_plans": PartSize(unconfirmed, _MOST_UNCONFIRMED),
            },
            sharing=self.planner.sharing,
        )

    def client(self) -> EngineClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                for other in list(self._clients):
                    if other.is_closed():  # its client's connections may keep it alive
                        del self._clients[other]
                client = self._clients[loop] = self._connect()
            return client

    @asynccontextmanager
    async def sending(
        self, prompt: Plannable, to_compute: int, limit_s: float | None
    ) -> AsyncIterator[InFlightRequest]:
        """Wait for a place and hold it while a request is sent; note if that fails."""
        limit = TimeLimit(limit_s, f"replica {self.name}", "limit_s")
        with self._lock:
            is_trial = self._circuit.begin(self._clock())
            self.queued_tokens += to_compute
            cache_epoch = self.cache_epoch
        try:
            async with AdmissionSlot(self._queue, prompt) as plan:
                try:
                    yield InFlightRequest(plan, cache_epoch, limit)
                    # only now that it has answered: one that is down would fail twice for each
                    # request
                    await self._learn_capacity()
                except BaseException:
                    self._queue.forget(plan)
                    raise
        except (EngineError, TimeoutError) as error:
            self._note_error(error, is_trial)
            raise
        except BaseException:
            if is_trial:  # any other one leaves the trial alone
                with self._lock:
                    self._circuit.abandon()
            raise
        finally:
            with self._lock:
                self.queued_tokens -= to_compute

    def note_answer(self, sending: InFlightRequest, completion: Completion) -> None:
        """Take note of an answered request."""
        with self._lock:
            self._circuit.succeed()
            self._answered += 1
            self._to_note.append(partial(self._observe, sending, completion))
        self._note_in_index()

    async def check_health(self, limit_s: float) -> bool:
        """Ask the engine whether it is ready; the circuit of one that is not opens at once."""
        answered, is_ready, is_silent = self._answered, True, False
        try:
            client = self.client()  # to make one takes time of its own
            async with asyncio.timeout(limit_s):
                await client.check_health()
        except EngineError as error:
            # 404: it answers, and knows no such route
            is_ready = status_rule(error.status, error.retry_after_s) is not FAILS
        except TimeoutError:
            is_ready, is_silent = False, True
        with self._lock:
            if not is_ready and self._answered > answered:
                return True  # it has answered a request since it was asked
            now = self._clock()
            if not is_ready:
                opened = self._circuit.fail(now, "it was asked and is not ready", at_once=True)
                self._rests_as = ""
                if opened and is_silent:
                    # it may have kept its cache: the next answer tells
                    self._misses = _MAX_MISSES - 1
                elif opened:
                    self._to_note.append(self._reset)
            # else it would hide that requests fail in a row, or are refused
            elif self._circuit.state(now) != CLOSED and not self._rests_as:
                self._circuit.succeed()
        self._note_in_index()
        return is_ready

    async def context_window(self) -> int | None:
        """Return what the engine says its model holds; None if it is silent, or down."""
        with self._lock:
            is_open = self._circuit.state(self._clock()) == OPEN
        if not self._knows_window and not is_open:
            try:
                async with asyncio.timeout(_ASKING_S):
                    self._window = await self.client().context_window()
            except (EngineError, TimeoutError):
                return None  # the next caller asks again
            self._knows_window = True
        return self._window

    def _note_in_index(self) -> None:
        """Do all that is to be noted, in order; who finds it being done goes on without waiting."""
        while self._to_note and self._noting.acquire(blocking=False):
            try:
                while self._to_note:
                    self._bookkeeping.attempt(self._to_note.popleft())
            finally:
                self._noting.release()

    def _reset(self) -> None:
        """Treat the engine's cache as empty, but for what it has computed since it was."""
        # a request that was planned before the epoch changes, so before the index is empty, has the
        # old one and is recorded anew once it is answered: nothing gets lost in between
        computed, self._misses = list(self._unconfirmed), 0
        self._unconfirmed.clear()
        if self.events is not None:
            self.cache_epoch += 1
            return  # its index follows the engine's own events, which tell what the cache holds
        if self._capacity is not None:
            self._capacity = CapacityTracker(self.planner, self._capacity.capacity_tokens)
        self.planner.evict_tokens(self.planner.statistics().tokens)
        self.cache_epoch += 1
        for plan in computed:
            recorded(self.planner, plan)

    def stop_following(self) -> None:
        """Stop following the engine's events."""
        events, self.events = self.events, None
        if events is not None:
            events.stop()

    async def aclose(self) -> None:
        """Stop following events, and close the running event loop's client."""
        if self.events is not None:
            await asyncio.to_thread(self.stop_following)
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the running event loop's client; those of closed loops went with their loops."""
        with self._lock:
            client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _learn_capacity(self) -> None:
        """Ask the engine how much its cache holds; one that does not say is unlimited."""
        if not self._questions:
            return
        questions, self._questions = self._questions, 0  # the others don't ask, too
        try:
            async with asyncio.timeout(_ASKING_S):
                capacity = (await self.client().metrics()).capacity_tokens
            if capacity is not None:
                self._capacity = CapacityTracker(self.planner, capacity)
        except (EngineError, TimeoutError):
            self._questions = questions - 1
        except asyncio.CancelledError:
            self._questions = questions
            raise
        except Exception as error:
            self._bookkeeping.note(error)

    def _observe(self, sending: InFlightRequest, completion: Completion) -> None:
        plan, cached = sending.plan, completion.cached_tokens
        if not self._tells_planner:
            self.planner.report_usage(
                plan,
                completion.prompt_tokens,
                cached,
                completion_tokens=completion.completion_tokens,
                written_tokens=completion.written_tokens,
                seconds=completion.total_s,
                through="",
            )
        is_current = sending.cache_epoch == self.cache_epoch
        if is_current and cached:
            self._misses = 0
            self._unconfirmed.clear()
        elif is_current:
            self._misses += cached == 0 and plan.expected_cached_tokens >= _LEAST_EXPECTED_TOKENS
            if self._misses:
                self._unconfirmed.append(plan)
            if self._misses >= _MAX_MISSES:  # the engine has lost its cache
                self._reset()
        elif self.events is None:
            # The index was emptied while this was on its way. It is answered all the same, so
            # the engine lives, and has its prompt in the cache.
            self.planner.forget(plan)
            recorded(self.planner, plan)

    def _note_error(self, error: Any, is_trial: bool) -> None:
        rule = FAILS
        if isinstance(error, EngineError):  # else its caller's time is over
            rule = status_rule(error.status, error.retry_after_s)
        with self._lock:
            self._failed += rule.again
            if rule is WORKS:
                self._circuit.succeed()
            elif rule is FAILS:
                self._rests_as = OPEN
                if self._circuit.fail(self._clock(), error):
                    self._to_note.append(self._reset)
            elif is_trial:  # this tells nothing of the requests that failed
                self._circuit.abandon()
            if rule is BUSY:
                self._busy += 1
                asked_s = min(error.retry_after_s or 0.0, _LONGEST_BUSY_S)
                self._busy_until = max(self._busy_until, self._clock() + asked_s)
        self._note_in_index()

    def note_refusal(self, error: EngineError) -> None:
        """Rest, since another engine has answered what this one refused; the index stays."""
        with self._lock:
            self._failed += 1
            self._circuit.fail(self._clock(), error, at_once=True)
            reason = responses.get(error.status or 0, "")
            self._rests_as = f"refuses: {error.status} {reason}".rstrip()


class CircuitBreaker:
    """Opens after failures in a row, for a time that doubles; who shares it holds a lock."""

    def __init__(self, name: str, failures: int, open_s: float) -> None:
        self._name = name
        self._limit = failures
        self._first_open_s = open_s
        self._opened_at: float | None = None
        self.succeed()

    def state(self, now: float) -> str:
        """Return the state at a time, in seconds of any clock that never goes back."""
        if self._opened_at is None:
            return CLOSED
        if now - self._opened_at < self._open_s:
            return OPEN
        return HALF_OPEN

    def admits(self, now: float) -> bool:
        """Return whether a request may be sent now; while it is half-open, one at a time."""
        state = self.state(now)
        return state == CLOSED or (state == HALF_OPEN and not self._has_trial)

    def begin(self, now: float) -> bool:
        """Note that a request is sent; return whether it is the one that tries the engine."""
        is_trial = self.state(now) == HALF_OPEN and not self._has_trial
        self._has_trial |= is_trial
        return is_trial

    def succeed(self) -> None:
        """Note that a request was answered."""
        if self._opened_at is not None:
            _log.warning("%s answers again", self._name)
        self._failures = 0
        self._opened_at = None
        self._open_s = self._first_open_s
        self._has_trial = False

    def fail(self, now: float, why: object, at_once: bool = False) -> bool:
        """Note that a request was not answered; return whether that opened a closed circuit."""
        self._failures += 1
        state = self.state(now)
        if state == OPEN or (state == CLOSED and not at_once and self._failures < self._limit):
            return False
        if state == HALF_OPEN:
            self._open_s = max(self._open_s, min(2 * self._open_s, _LONGEST_OPEN_S))
            self._has_trial = False
        self._opened_at = now
        _log.warning("%s rests for %.0f s: %s", self._name, self._open_s, why)
        return state == CLOSED

    def abandon(self) -> None:
        """Note that a request was cancelled, so that it does not tell whether the engine works."""
        self._has_trial = False
