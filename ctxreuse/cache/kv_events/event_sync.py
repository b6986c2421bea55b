"""Following an engine's own cache events, so that the index holds what the engine holds."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from threading import Condition, Thread
from types import TracebackType
from typing import Any

from ctxreuse.cache import prompt_ends
from ctxreuse.cache.kv_events.engine_blocks import (
    EngineBlocks,
    HeldRequests,
    SentRequest,
)
from ctxreuse.cache.kv_events.event_stream import EventSockets, Received, decode_batch
from ctxreuse.cache.simulator import token_array
from ctxreuse.context.checks import checked_integer, checked_kind
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan

_log = logging.getLogger("ctxreuse")
_POLL_MS = 20
_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class KVEventStatistics:
    """What a `KVEventSync` has seen.

    Attributes:
        batches: Messages that were applied.
        events: Events in them that were used.
        skipped: Messages and events that were skipped: unknown, broken, of other memory.
        gaps: How often messages were missing.
        replays: How often messages were asked for again.
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
    restarts: int = 0
    losses: int = 0
    last_seq: int | None = None
    requests: int = 0
    faults: int = 0


class Arrival(Enum):
    """What a live message is to the listener."""

    NEXT = auto()
    """The one that was expected."""
    FIRST = auto()
    """The first one seen: of the stream if its number is 0, else the listener is late."""
    KNOWN = auto()
    """One that a replay has brought already."""
    AFTER_GAP = auto()
    """One before which others are missing."""
    RESTARTED = auto()
    """The first one seen of a sender that has started anew."""


class EventSequence:
    """Follows the numbers of live and replayed messages, so that each is applied once, in order.

    A sender counts from 0 and never goes back, so a live number that is not greater than the live
    one before it belongs to a new sender. Replayed messages run ahead of the live ones, which then
    arrive a second time.
    """

    def __init__(self) -> None:
        self.applied: int | None = None
        """The last message that was applied; None before the first."""
        self._live: int | None = None

    def arrive(self, number: int) -> Arrival:
        """Return what a live message is."""
        restarted = self._live is not None and number <= self._live
        if restarted:
            self.applied = None
        self._live = number
        if restarted:
            return Arrival.RESTARTED
        if self.applied is None:
            return Arrival.FIRST
        if number <= self.applied:
            return Arrival.KNOWN
        return Arrival.NEXT if number == self.applied + 1 else Arrival.AFTER_GAP

    def reset(self) -> None:
        """Forget the sender."""
        self.applied = self._live = None


class KVEventSync:
    """Follows vLLM's KV-cache events, so that a planner's index holds what the engine holds.

    Start vLLM with::

        --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv",
            "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'

    A thread follows the stream. Tell it with `record` which tokens a plan's prompt had, or give it
    to `EngineClient(events=...)`, which does; the index is then trimmed to the blocks of each
    prompt that the engine still holds. Missing messages are asked for again at the replay endpoint,
    and all that the engine remembers when the thread starts. When the engine is gone, starts anew,
    drops its whole cache, or messages are lost, the index is emptied: what is planned from then on
    counts.

    Without a replay endpoint, vLLM can be asked to report what a request found in the cache: send
    `extra_body={"vllm_xargs": {"kv_cache_report_mode": "full"}}`.

    One sync follows one engine; with data parallelism each rank has its own endpoints, and prompts
    of different ranks need planners of their own. Requests that were planned but never recorded are
    not followed: tell the planner with `evict` when they fail.

    Args:
        planner: The planner whose index follows.
        endpoint: Where the engine publishes, to connect to: "tcp://127.0.0.1:5557".
        replay_endpoint: Where it takes requests for replays. Without it, missing messages
            are lost, and blocks stored before the start are known only by what is stored on top of
            them.
        topic: The topic of the messages; those of other topics are skipped.
        tokenizer: The model's tokenizer with its chat template (of `transformers`), to know exactly
            where blocks end in a prompt; None estimates it.
        bind: Whether to bind the endpoint, for engines that connect to it (vLLM does so for
            addresses without `*`).
        settle_s: Seconds after which a request's events must have come.
        replay_timeout_s: Seconds to wait for the next replayed message.
        max_requests: How many requests are followed; older ones are taken out of the index.
        max_blocks: How many of the engine's blocks are remembered.
        clock: Seconds from any start.

    Raises:
        InvalidRequestError: wrong type or out of range.
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
        max_blocks: int = 500_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checked_kind("planner", planner, ReusePlanner, "a ReusePlanner")
        checked_kind("topic", topic, str, "a string")
        checked_integer("max_requests", max_requests, 1)
        self._sockets = EventSockets(
            endpoint, replay_endpoint, topic, bind=bind, replay_timeout_s=replay_timeout_s
        )
        self._requests = HeldRequests(planner, EngineBlocks(max_blocks), max_requests, settle_s)
        self._tokenizer = tokenizer
        self._clock = clock
        self._sequence = EventSequence()
        self._recorded: deque[SentRequest] = deque(maxlen=max_requests)
        self._counts: Counter[str] = Counter()  # by the fields of the statistics
        self._faults = FailOpen("KVEventSync", "the index is emptied", work="event handling")
        self._thread: Thread | None = None
        self._is_wanted = False
        self._quiet_turns = 0
        self._turned = Condition()

    @property
    def stats(self) -> KVEventStatistics:
        """What has been seen so far."""
        return KVEventStatistics(
            **(self._counts + Counter(skipped=self._sockets.skipped)),
            last_seq=self._sequence.applied,
            requests=self._requests.followed,
            faults=self._faults.faults,
        )

    def start(self) -> None:
        """Start following; do nothing if that has begun.

        Raises:
            InvalidRequestError: the endpoint cannot be used.
        """
        if self._thread is not None:
            return
        self._sockets.open()
        if self._sequence.applied is not None:  # not the first start: what was missed is unknown
            self._lose()
            self._sequence.reset()
        self._is_wanted = True
        self._thread = Thread(target=self._run, name="ctxreuse-kv-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop following, and wait until that is done; the index stays as it is."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._is_wanted = False
            thread.join()

    def __enter__(self) -> KVEventSync:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

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
                None asks the tokenizer or, without one or if its template changes the text,
                estimates it from the shares of the text, rather too late than too early.
            cache_salt: The `cache_salt` that it was sent with.
            lora: The name of the LoRA adapter that it was for.

        Raises:
            InvalidRequestError: wrong type or out of range.
        """
        checked_kind("plan", plan, Plan, "a Plan")
        tokens = token_array(prompt_token_ids)
        if block_ends is None:
            ends = self._find_ends(plan, len(tokens))
        else:
            ends = prompt_ends.checked_ends(block_ends, len(plan.blocks))
        if ends:  # a turn without blocks of its own has nothing in the index
            self._recorded.append(
                SentRequest(
                    plan.request_id,
                    plan.request.tenant,
                    tokens,
                    ends,
                    cache_salt,
                    lora,
                    self._clock(),
                )
            )

    def _find_ends(self, plan: Plan, prompt_tokens: int) -> list[int]:
        if self._tokenizer is not None:
            try:
                return prompt_ends.block_ends(plan, self._tokenizer)
            except InvalidRequestError:
                _log.debug("the chat template changes a message; block ends are estimated")
        return prompt_ends.estimated_ends(plan, prompt_tokens)

    def settle(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything that has come is applied, and every recorded request is judged.

        Args:
            timeout_s: How long to wait, in seconds.

        Returns:
            Whether that was reached in time.
        """
        with self._turned:
            # the turn that is going on may have begun before the last message came
            wanted = self._quiet_turns + 2
            return self._turned.wait_for(lambda: self._quiet_turns >= wanted, timeout_s)

    def _run(self) -> None:
        """Follow until `stop`; no message, however broken, ends this."""
        try:
            if self._sockets.can_replay:
                self._faults.attempt(lambda: self._replay(0), self._lose)
            while self._is_wanted:
                self._sockets.wait(_POLL_MS)
                is_quiet = self._faults.attempt(self._turn, self._lose)
                if is_quiet:
                    with self._turned:
                        self._quiet_turns += 1
                        self._turned.notify_all()
        finally:
            self._sockets.close()

    def _turn(self) -> bool:
        """Apply what has come; return whether nothing had, and no request waits to be judged."""
        is_gone = self._sockets.sender_is_gone()
        batches = self._counts["batches"]
        for message in self._sockets.received(None if is_gone else _AT_ONCE):
            self._take(message)
        if is_gone:
            self._note_restart("the connection to the engine was lost")
            self._sequence.reset()
        while self._recorded:
            self._requests.add(self._recorded.popleft())
        self._requests.settle(self._clock())
        return batches == self._counts["batches"] and not self._requests.unsettled

    def _take(self, message: Received) -> None:
        """Apply a live message, after those that are missing before it."""
        arrival = self._sequence.arrive(message.number)
        if arrival is Arrival.RESTARTED:
            self._note_restart("the engine has started anew")
        if arrival is Arrival.AFTER_GAP:
            self._counts["gaps"] += 1
        is_late = arrival in (Arrival.FIRST, Arrival.RESTARTED) and message.number > 0
        if arrival is Arrival.AFTER_GAP or is_late:
            applied = self._sequence.applied
            if self._sockets.can_replay:
                self._replay(0 if applied is None else applied + 1)
        self._apply(message)

    def _replay(self, start: int) -> None:
        """Apply what the engine remembers from a number on."""
        self._counts["replays"] += 1
        for message in self._sockets.replayed(start, lambda: self._is_wanted):
            self._apply(message)

    def _apply(self, message: Received) -> None:
        """Apply a message, unless it is known; if others are missing before it, nothing is sure."""
        applied = self._sequence.applied
        if applied is not None:
            if message.number <= applied:
                return
            if message.number > applied + 1:
                self._lose()
        self._sequence.applied = message.number
        batch = decode_batch(message.payload)
        if batch is None:
            self._counts["skipped"] += 1
            return
        used = sum(map(self._requests.apply, batch.events))
        self._counts["batches"] += 1
        self._counts["events"] += used
        self._counts["skipped"] += batch.skipped + len(batch.events) - used

    def _note_restart(self, what: str) -> None:
        self._counts["restarts"] += 1
        _log.info("%s: its cache counts as empty", what)
        self._requests.clear()

    def _lose(self) -> bool:
        """Forget everything, because nothing is certain any more."""
        self._counts["losses"] += 1
        self._requests.clear()
        return False
