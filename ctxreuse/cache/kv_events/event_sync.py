"""Following an engine's own cache events, so that the index holds what the engine holds."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import TIMEOUT_MAX, Condition, Thread
from typing import Any

from ctxreuse.cache import prompt_ends
from ctxreuse.cache.kv_events.engine_blocks import (
    EngineBlocks,
    HeldRequests,
    RecordedRequests,
    SentRequest,
)
from ctxreuse.cache.kv_events.event_stream import BlocksStored, EventSockets, Received, decode_batch
from ctxreuse.cache.simulator import token_array
from ctxreuse.context.checks import checked_integer, checked_kind, checked_number
from ctxreuse.context.copies import FixedSettings, OnePerProcess
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.fork_safety import leave_to_parent, renew_after_fork
from ctxreuse.context.lru_map import PartSize
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan

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
        # the times of the latest requests for replays; after one that fails the wait doubles
        self._asked = deque([-math.inf] * _MOST_ASKED_A_SECOND, maxlen=_MOST_ASKED_A_SECOND)
        self._reset_backoff()
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
            self._reset_backoff()
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
        now = time.monotonic()
        # mixed messages of two senders look like an engine that starts anew each time
        may_ask = now >= max(self._asks_at, self._asked[0] + 1.0)
        if self.sockets.replay_endpoint is not None and may_ask:
            self._asked.append(now)
            self.counts["replays"] += 1
            self.sockets.begin_replay(start)

    def _reset_backoff(self) -> None:
        self._asks_at, self._backoff_s = -math.inf, _LEAST_BACKOFF_S

    def _take_replayed(self) -> None:
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
            self._reset_backoff()
        else:
            self.counts["abandoned"] += 1
            self._asks_at = time.monotonic() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)
        if waiting and self._is_wanted:
            self._apply(waiting.popleft())
        while waiting and self._is_wanted:
            self._apply_in_turn(waiting.popleft())

    def _drop_replay(self) -> deque[Received]:
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
        self._reset_backoff()
        self.requests.clear()


@dataclass(frozen=True, slots=True)
class KVEventStatistics:
    """What a `KVEventSync` has seen.

    Attributes:
        batches: Messages that were applied.
        events: Events in them that were used.
        skipped: Messages and events that were skipped: unknown, broken, of other memory.
        gaps: How often messages were missing.
        replays: How often messages were asked for again.
        replayed: Messages that came again.
        abandoned: Replays that did not come, came too slowly, or too many live messages waited for;
            what was missing is lost then.
        queued: Live messages that wait for a replay.
        restarts: How often the engine was gone or started anew.
        losses: How often messages were lost, so that nothing was certain any more.
        last_seq: The number of the last message that was applied.
        requests: How many requests are followed.
        faults: How often handling events failed by an internal error; the index was emptied.
    """

    batches: int = 0
    events: int = 0
    skipped: int = 0
    gaps: int = 0
    replays: int = 0
    replayed: int = 0
    abandoned: int = 0
    queued: int = 0
    restarts: int = 0
    losses: int = 0
    last_seq: int | None = None
    requests: int = 0
    faults: int = 0


class KVEventSync(FixedSettings, OnePerProcess):
    """Follows vLLM's KV-cache events, so that a planner's index holds what the engine holds.

    Start vLLM with `--kv-events-config`, as the guide on vLLM says. A thread follows the stream.
    Tell it with `record` which tokens a plan's prompt had, or give it to `EngineClient(events=)`;
    the index is then trimmed to what the engine still holds. When the engine is gone, starts anew
    or drops its cache, or messages are lost, the index is emptied.

    Without a replay endpoint, vLLM can be asked to report what a request found in the cache: send
    `extra_body={"vllm_xargs": {"kv_cache_report_mode": "full"}}`.

    One sync follows one engine, or one rank of data parallelism, with a planner of its own. Tell
    the planner with `evict` of requests that failed.

    Args:
        planner: The planner whose index follows.
        endpoint: Where the engine publishes, to connect to: "tcp://127.0.0.1:5557".
        replay_endpoint: Where it takes requests for replays; without it, missing messages are lost.
        topic: The topic of the messages; those of other topics are skipped.
        tokenizer: The model's tokenizer with its chat template (of `transformers`), to know exactly
            where blocks end in a prompt; None estimates it.
        bind: Whether to bind the endpoint, for engines that connect to it (vLLM does so for
            addresses without `*`).
        settle_s: Seconds after which a request's events must have come.
        replay_timeout_s: Seconds to wait for the next replayed message, and half of what is waited
            for one replay. Live messages wait meanwhile, 10,000 or 64 MiB at most.
        max_requests: How many requests are followed, and may wait for it; older ones leave the
            index.
        clock: Seconds from any start.

    Raises:
        MissingExtraError: `pyzmq` or `msgspec` is not installed.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "kv",
        *,
        tokenizer: Any = None,
        bind: bool = False,
        settle_s: float = 0.25,
        replay_timeout_s: float = 2.0,
        max_requests: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checked_kind("planner", planner, ReusePlanner, "a ReusePlanner")
        checked_kind("topic", topic, str, "a string")
        checked_integer("max_requests", max_requests, 1)
        checked_number("settle_s", settle_s)
        checked_number("replay_timeout_s", replay_timeout_s)
        self._counts: Counter[str] = Counter()  # by the fields of the statistics
        self._of_sockets = (endpoint, replay_endpoint, topic, bind, replay_timeout_s)
        self._planner = planner
        self._max_requests = max_requests
        self._settle_s = settle_s
        self._tokenizer = tokenizer
        self._clock = clock
        self._recorded = RecordedRequests(planner, max_requests)
        self._faults = FailOpen("KVEventSync", "the index is emptied", work="event handling")
        self._listener = self._new_listener()
        self._is_following = self._follows_again = False
        renew_after_fork(self._start_anew)

    @property
    def stats(self) -> KVEventStatistics:
        """What has been seen so far."""
        return KVEventStatistics(
            **self._counts,
            queued=len(self._listener.waiting),
            last_seq=self._listener.applied,
            requests=self._listener.requests.followed,
            faults=self._faults.faults,
        )

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        return self._listener.requests.parts

    def start(self) -> None:
        """Start following, once; InvalidRequestError for an endpoint that cannot be used."""
        if self._is_following:
            return
        before, self._listener = self._listener, self._new_listener()
        self._listener.start()
        self._is_following = True
        self._planner.prompt_follower = self  # wrapped models with this planner tell it
        if before.applied is not None:  # what was missed since is unknown
            self._listener.lose()

    def stop(self) -> None:
        """Stop following, within a second; the index stays as it is."""
        if self._is_following:
            self._is_following = False
            if self._planner.prompt_follower is self:
                self._planner.prompt_follower = None
            self._listener.stop()

    def __enter__(self) -> KVEventSync:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def expect(self) -> None:
        """Know that somebody will record requests once they are answered; clients call it."""
        self._recorded.are_expected = True

    def record(
        self,
        plan: Plan,
        prompt_token_ids: Sequence[int],
        block_ends: Sequence[int] | None = None,
        *,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> None:
        """Tell which tokens the prompt of an answered request had.

        Args:
            plan: The request's plan.
            prompt_token_ids: The prompt (vLLM returns it with `return_token_ids`).
            block_ends: At which token each of `plan.blocks` ends (`ctxreuse.cache.block_ends`).
                None asks the tokenizer or, if that cannot tell, estimates it, rather too late than
                too early.
            cache_salt: The `cache_salt` that it was sent with.
            lora: The name of the LoRA adapter that it was for.
        """
        checked_kind("plan", plan, Plan, "a Plan")
        if self._follows_again:
            self._faults.attempt(self._follow_again)
        tokens = token_array(prompt_token_ids)
        if block_ends is None:
            ends = self._find_ends(plan, len(tokens))
        else:
            ends = prompt_ends.checked_ends(block_ends, len(plan.blocks))
        if ends:  # a turn without blocks of its own has nothing in the index
            name, now = (plan.request_id, plan.request.tenant), self._clock()
            self._recorded.add(SentRequest(*name, tokens, ends, cache_salt, lora, now))

    def _find_ends(self, plan: Plan, prompt_tokens: int) -> list[int]:
        if self._tokenizer is not None:
            try:
                return prompt_ends.block_ends(plan, self._tokenizer)
            except InvalidRequestError:
                _log.debug("the chat template changes a message; block ends are estimated")
        return prompt_ends.estimated_ends(plan, prompt_tokens)

    def settle(self, timeout_s: float = 5.0) -> bool:
        """Wait, `timeout_s` seconds at most, until all is applied and each recorded request judged.

        Returns:
            Whether that was reached in time; False at once where nothing is followed.
        """
        seconds = min(checked_number("timeout_s", timeout_s), TIMEOUT_MAX)
        return self._is_following and self._listener.settle(seconds)

    def _new_listener(self) -> EventListener:
        sockets = EventSockets(*self._of_sockets, self._counts)
        requests = HeldRequests(self._recorded, EngineBlocks(), self._settle_s)
        return EventListener(sockets, requests, self._counts, self._faults, self._clock)

    def _start_anew(self) -> None:
        """Follow nothing, as a child: the thread and the sockets are the parent's."""
        leave_to_parent(self._listener)
        self._recorded = RecordedRequests(self._planner, self._max_requests)
        self._listener = self._new_listener()
        self._follows_again, self._is_following = self._is_following or self._follows_again, False

    def _follow_again(self) -> None:
        """Follow in a child what the parent follows; what it knew may be half-changed."""
        self._follows_again = False
        self.start()
        self._listener.lose()
