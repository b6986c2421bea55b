"""Telling other planners what this one has sent, and learning what they have: in the background."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakMethod, WeakSet, ref

from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.errors import CtxreuseError
from ctxreuse.memory.names import Sharing
from ctxreuse.memory.sent_log import RatioEntry, ToldEntry
from ctxreuse.sharing.entries import CHECK_BYTES, UnreadableEntryError, decode, encode

_log = logging.getLogger("ctxreuse")
_MAX_UNTOLD = 100_000
_AT_ONCE = 500
_SHORTEST_POLL_S, _LONGEST_POLL_S, _SLOWER = 0.003, 1.0, 1.1
_WRITERS = 10_000
_LONGEST_PAUSE_S = 5.0
_FLUSH_S = 1.0


class LogRead(NamedTuple):
    """What a log has behind a position.

    Attributes:
        position: Where to go on.
        entries: What stands between, oldest first.
        has_gap: Whether entries may be gone unread: the log was cut, emptied or replaced. Entries
            that were read before may then come again.
    """

    position: str
    entries: Sequence[bytes]
    has_gap: bool = False


@runtime_checkable
class SharedLog(Protocol):
    """A sequence of entries that several processes append to and read; two methods.

    Both are called by one thread of each planner. What they raise is counted, logged once, and
    tried again. An entry that was appended twice is taken in once.

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
            most: How many entries at most, from 1.
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
        gaps: How often entries were gone before they were read.
    """

    told: int = 0
    taken_in: int = 0
    untold: int = 0
    lost: int = 0
    unreadable: int = 0
    faults: int = 0
    gaps: int = 0


@runtime_checkable
class SharedLogs(SharedLog, Protocol):
    """A log that has another one for each engine of an `EnginePool`."""

    def of_engine(self, name: str) -> SharedLog:
        """Return the log of what one engine is sent; the same for the name in all processes."""


class _Numbered(NamedTuple):
    """An entry that the log was given and may hold; it keeps its number."""

    number: int
    entry: ToldEntry


class _Outbox:
    """What one planner tells others; its thread keeps it, should the planner go."""

    def __init__(self, log: SharedLog) -> None:
        self._log = log
        self._lock = ForkSafeLock()
        self.writer = os.urandom(8)
        self.process = os.getpid()
        self.wake = threading.Event()
        self.told = self.lost = 0
        self._failures = 0
        self._numbers = 0  # of entries that were given to the log
        self._written: LRUMap[int, bytes] = LRUMap(_WRITERS)  # their checksums
        self._waiting: deque[ToldEntry | _Numbered] = deque()
        self._appending: list[_Numbered] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._appending)

    @property
    def last_number(self) -> int:
        """The number that the latest entry has, or will have."""
        return self._numbers + sum(not isinstance(one, _Numbered) for one in self._waiting)

    def put(self, entry: ToldEntry) -> None:
        """Have an entry appended."""
        self._waiting.append(entry)
        if len(self._waiting) == 1:  # else the log is at work, or fails and is left alone
            self.wake.set()
        elif len(self._waiting) > _MAX_UNTOLD:
            self._drop_excess()

    def append(self) -> None:
        """Append what waits, oldest first, some hundreds at a time."""
        while self._waiting:
            self._append_some()

    def flush(self, until: float) -> None:
        """Wait until what waits is appended, or the log has failed."""
        failures = self._failures
        self.wake.set()
        while len(self) and self._failures == failures and time.monotonic() < until:
            time.sleep(_SHORTEST_POLL_S)

    def _append_some(self) -> None:
        with self._lock:
            number = min(len(self._waiting), _AT_ONCE)
            self._appending = [self._numbered(self._waiting.popleft()) for _ in range(number)]
        try:
            written = [encode(self.writer, *one) for one in self._appending]
            for one, entry in zip(self._appending, written, strict=True):
                self._written.put(one.number, entry[-CHECK_BYTES:])
            self._log.append(written)
            self.told += number
            self._appending = []
        except Exception:
            self._failures += 1
            raise
        finally:
            with self._lock:
                self._waiting.extendleft(reversed(self._appending))
                self._appending = []
            self._drop_excess()

    def has_written(self, writer: bytes, number: int, entry: bytes) -> bool:
        """Return whether an entry is this one's; take another name if others write under its."""
        if writer != self.writer:
            return False
        known = self._written.get(number)
        if known == entry[-CHECK_BYTES:] or (known is None and number <= self._numbers):
            return True  # of one that it no longer knows nothing tells another's
        self.writer = os.urandom(len(writer))
        _log.warning(
            "another process writes to the shared log under the name of this planner, as after a "
            "copy of a running process; it has a new one. Make planners behind such a copy: what "
            "was told since may be lost to others."
        )
        return False

    def _numbered(self, entry: ToldEntry | _Numbered) -> _Numbered:
        if isinstance(entry, _Numbered):
            return entry
        self._numbers += 1
        return _Numbered(self._numbers, entry)

    def _drop_excess(self) -> None:
        with self._lock:
            while len(self._waiting) > _MAX_UNTOLD:
                self._waiting.popleft()
                self.lost += 1


class Exchange(Sharing):
    """Writes and reads a log in a thread; a fork reads on with a thread and a name of its own."""

    def __init__(self, log: SharedLog) -> None:
        super().__init__(bytes(log.secret))
        self._log = log
        self._take_in: Callable[[], Callable[[ToldEntry], object] | None] = lambda: None
        self._lock = ForkSafeLock()
        self._position = ""
        self._latest_of: LRUMap[bytes, int] = LRUMap(_WRITERS)  # numbers of entries, by writer
        self._start_anew()
        renew_after_fork(self._leave_parent)

    def _leave_parent(self) -> None:
        self._latest_of.put(self._outbox.writer, self._outbox.last_number)
        self._start_anew()

    def _start_anew(self) -> None:
        """Have no thread, and another name: a child writes for itself."""
        self._outbox = _Outbox(self._log)
        self._thread: threading.Thread | None = None
        self._rounds = threading.Condition()
        self._begun = self._finished = 0  # of these
        self._taken_in = self._unreadable = self._faults = self._gaps = 0

    def statistics(self) -> SharingStatistics:
        """Return what has become of entries so far."""
        return SharingStatistics(
            told=self._outbox.told,
            taken_in=self._taken_in,
            untold=len(self._outbox),
            lost=self._outbox.lost,
            unreadable=self._unreadable,
            faults=self._faults,
            gaps=self._gaps,
        )

    def hand_over_to(self, take_in: Callable[[ToldEntry], object]) -> None:
        """Have a method called with each entry of another planner, as long as its object lives."""
        self._take_in = WeakMethod(take_in)

    def own(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name of this planner in all that share."""
        return self.keyed(self._outbox.writer + name)

    def tell(self, entry: ToldEntry) -> None:
        """Have an entry appended."""
        self._outbox.put(entry)
        self._start()

    def catch_up(self, timeout_s: float) -> bool:
        """Wait until all that the log holds is taken in; return whether it is."""
        self._start()
        with self._rounds:
            wanted = self._begun + 1  # the one that goes on may be past what is there by now
            self._outbox.wake.set()
            return self._rounds.wait_for(lambda: self._finished >= wanted, timeout_s)

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=_run,
                    args=(ref(self), self._outbox),
                    name="ctxreuse-sharing",
                    daemon=True,
                )
                try:
                    thread.start()
                except RuntimeError as error:  # too many threads, or the interpreter ends
                    self._note(error)
                    return
                self._thread = thread
                _outboxes.add(self._outbox)
                _flush_at_exit(os.getpid())

    def work(self, pause_s: float) -> float:
        """Append and take in all there is; return the next pause in seconds."""
        done = self._outbox.told + self._taken_in
        with self._rounds:
            self._begun += 1
            number = self._begun
        is_all, is_appended = False, True
        try:
            while not is_all:
                is_appended = is_appended and self._append()
                is_all = self._read()
        except Exception as error:
            self._note(error)
            is_appended = False
        if not is_appended:
            return min(2 * pause_s, _LONGEST_PAUSE_S)
        with self._rounds:
            self._finished = number
            self._rounds.notify_all()
        if self._outbox.told + self._taken_in > done:
            return _SHORTEST_POLL_S
        return min(_SLOWER * pause_s, _LONGEST_POLL_S)

    def _append(self) -> bool:
        """Append what waits; return whether the log takes it: a full one can be read still."""
        try:
            self._outbox.append()
        except Exception as error:
            self._note(error)
            return False
        return True

    def _read(self) -> bool:
        """Take in what is new, some hundreds at a time; return whether that was all."""
        read = self._log.read(self._position, _AT_ONCE)
        if read.has_gap:
            self._note_gap()
        for one in read.entries:
            self._take(one)
        self._position = read.position
        return len(read.entries) < _AT_ONCE

    def _take(self, one: bytes) -> None:
        try:
            writer, number, entry = decode(one)
            if isinstance(entry, RatioEntry):
                raise UnreadableEntryError("the log holds an entry that belongs into a file")
        except UnreadableEntryError as error:
            self._unreadable += 1
            if self._unreadable == 1:
                _log.warning("%s; it is left out. Further ones are only counted.", error)
            return
        take_in = self._take_in()
        if self._outbox.has_written(writer, number, one) or take_in is None:
            return
        if number <= (self._latest_of.get(writer) or 0):
            return  # appended twice, or read again behind a gap
        self._latest_of.put(writer, number)
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
                _shown(error),
            )

    def _note_gap(self) -> None:
        self._gaps += 1
        if self._gaps == 1:
            _log.warning(
                "the shared log no longer holds what this process has read last: it was cut, "
                "emptied or replaced. Planning goes on with what it holds now; if it was cut, let "
                "it keep more entries. Further gaps are only counted."
            )


def _run(exchange: ref[Exchange], outbox: _Outbox) -> None:
    """Exchange until nobody uses the exchange any more."""
    pause = _SHORTEST_POLL_S
    while (one := exchange()) is not None:
        pause = one.work(pause)
        del one
        outbox.wake.wait(pause)
        outbox.wake.clear()
    try:
        outbox.append()
    except Exception as error:
        _log.warning(
            "the shared log failed with %s; the last %d entries of a planner that is gone are lost",
            _shown(error),
            len(outbox),
        )


_outboxes: WeakSet[_Outbox] = WeakSet()
"""Those that a thread appends what waits in; it keeps them."""


@lru_cache(1)
def _flush_at_exit(process: int) -> None:
    """Have what waits appended when a process ends, however it was started."""
    atexit.register(_flush_all)
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:  # its forked children end without what atexit knows
        multiprocessing.Finalize(None, _flush_all, exitpriority=0)


def _flush_all() -> None:
    until = time.monotonic() + _FLUSH_S
    for outbox in list(_outboxes):
        if outbox.process == os.getpid():  # a child has no thread of its parent's
            outbox.flush(until)


def _shown(error: Exception) -> str:
    """Return what a log may show of an error: those that are not ours may hold anything."""
    return str(error) if isinstance(error, CtxreuseError) else type(error).__name__
