"""One run of following an engine's events: a thread, its sockets, and the order of messages."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread

from ctxreuse.cache.kv_events.engine_blocks import HeldRequests
from ctxreuse.cache.kv_events.event_stream import BlocksStored, EventSockets, Received, decode_batch
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.errors import InvalidRequestError

_log = logging.getLogger("ctxreuse")
_POLL_MS = 20
_AT_ONCE = 1_000
_STOP_S = 0.9
_MOST_WAITING = 10_000
_MOST_WAITING_BYTES = 2**26
_MOST_ASKED_A_SECOND = 10
_LEAST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 60.0
_LEAST_CONNECTED_S = 1.0
_IDLE_EVENTS = 100
_FOLLOWS_NONE = (
    "KVEventSync has seen %d cache events and follows none of the planner's requests, so its index "
    "does not know what the engine has dropped: wrap the model with this planner= "
    "(ReuseChatModel, ReuseLLM; their engine needs /tokenize), give the sync to "
    "EngineClient(events=...), or tell it yourself with record(plan, token_ids)"
)


class ReplayBackoff:
    """Whether to ask for a replay: after one that did not come the wait doubles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = deque([-math.inf] * _MOST_ASKED_A_SECOND, maxlen=_MOST_ASKED_A_SECOND)
        self._until = -math.inf
        self._next_s = _LEAST_BACKOFF_S

    def admits(self) -> bool:
        """Return whether to ask now; who is told so asks."""
        now = self._clock()
        # mixed messages of two senders look like an engine that starts anew each time
        is_admitted = now >= self._until and now >= self._asked[0] + 1.0
        if is_admitted:
            self._asked.append(now)
        return is_admitted

    def fail(self) -> None:
        """Note that a replay did not come, or not in time."""
        self._until = self._clock() + self._next_s
        self._next_s = min(2 * self._next_s, _LONGEST_BACKOFF_S)

    def reset(self) -> None:
        """Note that one has come, or that the engine is another one."""
        self._until = -math.inf
        self._next_s = _LEAST_BACKOFF_S


@dataclass
class EventListener:
    """Follows an engine's events in a thread, from `start` to `stop`."""

    sockets: EventSockets
    requests: HeldRequests
    counts: Counter[str]
    faults: FailOpen
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.applied: int | None = None  # the last message's number; None before a sender's first
        self._live: int | None = None  # the last live one's
        self.waiting: deque[Received] = deque()  # live messages behind a replay
        self._waiting_bytes = 0
        self._backoff = ReplayBackoff()
        self._is_connected = True
        self._connects_at = -math.inf  # not before; a sender may end each connection at once
        self._is_wanted = True
        self._has_removed = False  # so far
        self._quiet_turns = 0
        self._turned = Condition()
        self._thread = Thread(target=self._run, name="ctxreuse-kv-events", daemon=True)

    def start(self) -> None:
        """Subscribe, and start the thread."""
        try:
            self.sockets.open()
            self._ask_from(0)
        except InvalidRequestError:
            self.sockets.close()
            raise
        self._thread.start()

    def stop(self) -> None:
        """Use no message from now on; wait for the thread's end, but less than a second."""
        self._is_wanted = False
        self._thread.join(_STOP_S)

    def settle(self, timeout_s: float) -> bool:
        """Wait as `KVEventSync.settle` does."""
        with self._turned:
            # the turn that is going on may have begun before the last message came
            wanted = self._quiet_turns + 2
            return self._turned.wait_for(lambda: self._quiet_turns >= wanted, timeout_s)

    def lose(self) -> None:
        """Forget everything, because nothing is certain any more."""
        self.counts["losses"] += 1
        self.requests.clear()

    def _run(self) -> None:
        """Follow until `stop`; no message, however broken, ends this."""
        try:
            while self._is_wanted:
                self.sockets.wait(_POLL_MS)
                if self.faults.attempt(self._turn, self._recover):
                    with self._turned:
                        self._quiet_turns += 1
                        self._turned.notify_all()
        finally:
            self.sockets.close()

    def _recover(self) -> bool:
        self._drop_replay()
        self.lose()
        return False

    def _turn(self) -> bool:
        """Apply what has come; return whether nothing had, and nothing is waited for."""
        is_gone = self.sockets.sender_is_gone()
        batches = self.counts["batches"]
        for message in self.sockets.received(_AT_ONCE):
            if not self._is_wanted:
                return False
            self._take(message)
        if is_gone:
            self._note_restart("the connection to the engine was lost")
            self.applied = self._live = None
            self._is_connected = False
        now = time.monotonic()
        if not self._is_connected and now >= self._connects_at:
            self.sockets.reconnect()
            self._is_connected, self._connects_at = True, now + _LEAST_CONNECTED_S
        self._take_replayed()
        if not self.requests.recorded.are_expected and batches != self.counts["batches"]:
            self._tell_if_idle()
        if self.sockets.replay is not None:  # a prompt's events may come yet
            return False
        self.requests.settle(self.clock())
        return batches == self.counts["batches"] and not self.requests.recorded

    def _take(self, message: Received) -> None:
        """Apply a live message, or let it wait for those that are missing before it."""
        # a sender counts from 0 and never goes back
        if self._live is not None and message.number <= self._live:
            self.applied = None
            self._note_restart("the engine has started anew")
        self._live = message.number
        if self.applied is None:  # with another number than 0 the listener is late
            self._backoff.reset()
            if message.number > 0 and self.sockets.replay is None:
                self._ask_from(0)
        self._apply_in_turn(message)

    def _apply_in_turn(self, message: Received) -> None:
        """Apply a live message if none is missing before it, or if that cannot be helped."""
        applied = message.number if self.applied is None else self.applied
        if self.sockets.replay is None and message.number > applied + 1:
            self.counts["gaps"] += 1
            self._ask_from(applied + 1)
        if self.sockets.replay is None:
            self._apply(message)
            return
        self.waiting.append(message)
        self._waiting_bytes += len(message.payload)
        if len(self.waiting) > _MOST_WAITING or self._waiting_bytes > _MOST_WAITING_BYTES:
            self._end_replay(is_complete=False)

    def _ask_from(self, start: int) -> None:
        if self.sockets.replay_endpoint is not None and self._backoff.admits():
            self.counts["replays"] += 1
            self.sockets.begin_replay(start)

    def _take_replayed(self) -> None:
        """Apply what has come of a replay; go on with live messages when it is over."""
        replay = self.sockets.replay
        if replay is None:
            return
        for message in self.sockets.replayed(_AT_ONCE):
            if not self._is_wanted:
                return
            self.counts["replayed"] += 1
            self._apply(message)
        if replay.is_over:
            self._end_replay(is_complete=replay.is_complete)

    def _end_replay(self, *, is_complete: bool) -> None:
        """Apply the live messages that have waited; what is missing still is lost."""
        waiting = self._drop_replay()
        if is_complete:
            self._backoff.reset()
        else:
            self.counts["abandoned"] += 1
            self._backoff.fail()
        if waiting and self._is_wanted:
            self._apply(waiting.popleft())
        while waiting and self._is_wanted:
            self._apply_in_turn(waiting.popleft())

    def _drop_replay(self) -> deque[Received]:
        """Hear no more of a replay; return the live messages that have waited for it."""
        self.sockets.end_replay()
        waiting, self.waiting, self._waiting_bytes = self.waiting, deque(), 0
        return waiting

    def _apply(self, message: Received) -> None:
        """Apply an unknown message; if others are missing before it, nothing is sure."""
        applied = self.applied
        if applied is not None:
            if message.number <= applied:
                return
            if message.number > applied + 1:
                self.lose()
        self.applied = message.number
        batch = decode_batch(message.payload)
        if batch is None:
            self.counts["skipped"] += 1
            return
        used = 0
        for event in batch.events:
            if not self._is_wanted:
                return
            used += self.requests.apply(event)
            self._has_removed |= not isinstance(event, BlocksStored)
        self.counts["batches"] += 1
        self.counts["events"] += used
        self.counts["skipped"] += batch.skipped + len(batch.events) - used

    def _tell_if_idle(self) -> None:
        """Say once that a planner's requests are not followed."""
        events = self.counts["events"]
        recorded = self.requests.recorded
        is_idle = self._has_removed or events >= _IDLE_EVENTS
        if is_idle and recorded.planner.statistics().nodes:
            recorded.are_expected = True
            _log.warning(_FOLLOWS_NONE, events)

    def _note_restart(self, what: str) -> None:
        self.counts["restarts"] += 1
        _log.info("%s: its cache counts as empty", what)
        self._drop_replay()
        self._backoff.reset()
        self.requests.clear()
