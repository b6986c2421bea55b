"""Telling other planners what this one has sent, and learning what they have: in the background.

Planning waits for nothing here. What is to be told stands in a queue; one thread appends it to the
log and takes in what others have appended. A log that is away, slow, full, damaged or newer costs
what others have sent, and no call: the thread tries again, later and later, and catches up.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakMethod, ref

from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.planning.sharing import Entry
from ctxreuse.sharing.entries import UnreadableEntryError, decode, encode

_log = logging.getLogger("ctxreuse")
_MAX_UNTOLD = 100_000
_READ_AT_ONCE = 500
_POLL_S = 0.02
_LONGEST_PAUSE_S = 5.0


class LogRead(NamedTuple):
    """What a log has behind a position.

    Attributes:
        position: Where to go on.
        entries: What stands between, oldest first.
    """

    position: str
    entries: Sequence[bytes]


@runtime_checkable
class SharedLog(Protocol):
    """A sequence of entries that several processes append to and read; two methods.

    Both are called by one thread of each planner. What they raise is counted, logged once, and
    tried again.

    Attributes:
        secret: The key with which names become digests; the same in all processes.
    """

    @property
    def secret(self) -> bytes:
        """Up to 64 bytes, known without asking the store.

        Whoever has them and the log can tell whether a text that he guesses was sent.
        """

    def append(self, entries: Sequence[bytes]) -> None:
        """Append entries, in order, all or none."""

    def read(self, position: str, most: int) -> LogRead:
        """Return what stands behind a position.

        Args:
            position: What an earlier read returned; "" is the beginning.
            most: How many entries at most.
        """


@dataclass(frozen=True, slots=True)
class SharingStatistics:
    """What has become of entries so far.

    Attributes:
        told: Entries that were appended to the log.
        taken_in: Entries of other planners that were taken in.
        untold: Entries that wait to be appended; at most 100,000.
        lost: Entries that were dropped because too many waited.
        unreadable: Entries that were damaged, or written by a newer version.
        faults: How often the log could not be read or written.
    """

    told: int = 0
    taken_in: int = 0
    untold: int = 0
    lost: int = 0
    unreadable: int = 0
    faults: int = 0


class Exchange:
    """Tells others through a log, and takes in what they tell.

    Its thread starts with the first entry, or with `catch_up`; in a process that is forked it
    starts anew.

    Args:
        log: The log.
    """

    def __init__(self, log: SharedLog) -> None:
        self._log = log
        self._take_in: Callable[[], Callable[[Entry], object] | None] = lambda: None
        self._keyed = hashlib.blake2b(digest_size=16, key=bytes(log.secret)[:64])
        self._lock = ForkSafeLock()
        self._start_anew()
        renew_after_fork(self._start_anew)

    def _start_anew(self) -> None:
        """Have no thread, and another name: a child writes for itself."""
        self._writer = os.urandom(8)
        self._untold: deque[bytes] = deque()
        self._telling: list[bytes] = []  # is being appended
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_caught_up = threading.Event()
        self._position = ""
        self._told = self._taken_in = self._lost = self._unreadable = self._faults = 0

    def statistics(self) -> SharingStatistics:
        """Return what has become of entries so far."""
        return SharingStatistics(
            told=self._told,
            taken_in=self._taken_in,
            untold=len(self._untold) + len(self._telling),
            lost=self._lost,
            unreadable=self._unreadable,
            faults=self._faults,
        )

    def hand_over_to(self, take_in: Callable[[Entry], object]) -> None:
        """Have a method called with each entry of another planner, as long as its object lives."""
        self._take_in = WeakMethod(take_in)

    def keyed(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name in all planners that share the log."""
        digest = self._keyed.copy()  # half the time of a new one
        digest.update(name)
        return digest.digest()

    def own(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name of this planner in all that share."""
        return self.keyed(self._writer + name)

    def tell(self, entry: Entry) -> None:
        """Have an entry appended."""
        written = encode(self._writer, entry)
        with self._lock:
            self._untold.append(written)
            self._drop_excess()
        self._start()

    def catch_up(self, timeout_s: float) -> bool:
        """Wait until all that the log holds is taken in; return whether it is."""
        self._is_caught_up.clear()
        self._start()
        self._wake.set()
        return self._is_caught_up.wait(timeout_s)

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(ref(self),), name="ctxreuse-sharing", daemon=True
                )
                self._thread.start()

    def _drop_excess(self) -> None:
        while len(self._untold) > _MAX_UNTOLD:
            self._untold.popleft()
            self._lost += 1

    def work(self, pause_s: float) -> tuple[float, threading.Event]:
        """Append and take in all there is; what the thread does.

        Args:
            pause_s: How long it paused before.

        Returns:
            How long to pause now, and what ends the pause.
        """
        wake = self._wake
        try:
            while not self._exchange():
                pass
        except Exception as error:
            self._note(error)
            return min(2 * pause_s, _LONGEST_PAUSE_S), wake
        if not self._untold:
            self._is_caught_up.set()
        return _POLL_S, wake

    def _exchange(self) -> bool:
        """Append what waits, and take in what is new; return whether that was all."""
        with self._lock:
            number = min(len(self._untold), _READ_AT_ONCE)
            self._telling = [self._untold.popleft() for _ in range(number)]
        if self._telling:
            try:
                self._log.append(self._telling)
                self._told += number
                self._telling = []
            finally:
                with self._lock:
                    self._untold.extendleft(reversed(self._telling))
                    self._telling = []
                    self._drop_excess()
        read = self._log.read(self._position, _READ_AT_ONCE)
        for one in read.entries:
            self._take(one)
        self._position = read.position
        return len(read.entries) < _READ_AT_ONCE

    def _take(self, one: bytes) -> None:
        try:
            writer, entry = decode(one)
        except UnreadableEntryError as error:
            self._unreadable += 1
            _log_unreadable(str(error))
            return
        take_in = self._take_in()
        if writer != self._writer and take_in is not None:
            try:
                take_in(entry)
            except Exception as error:  # one that fails would else be read again, with those before
                self._note(error)
            else:
                self._taken_in += 1
            time.sleep(0)  # let a thread that plans go on

    def _note(self, error: Exception) -> None:
        self._faults += 1
        if self._faults == 1:
            _log.warning(
                "the shared log failed with %s; this process goes on alone, and catches up when "
                "the log is back. Further faults are only counted.",
                type(error).__name__,
            )


def _run(exchange: ref[Exchange]) -> None:
    """Exchange until nobody uses the exchange any more."""
    pause = _POLL_S
    while True:
        one = exchange()
        if one is None:
            return
        pause, wake = one.work(pause)
        del one
        wake.wait(pause)
        wake.clear()


@lru_cache(1)
def _log_unreadable(words: str) -> None:
    _log.warning("%s; it is left out. Further ones are only counted.", words)
