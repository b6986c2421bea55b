"""Telling other planners what this one has sent, and learning what they have: in the background."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakMethod, WeakSet

from ctxreuse.context.checks import checked_integer, checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock, renew_after_fork
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.errors import CtxreuseError, InvalidRequestError, describe
from ctxreuse.memory.sent_log import EditEntry, Entry, Sharing, ToldEntry, named_by, request_name
from ctxreuse.sharing.entries import CHECK_BYTES, UnreadableEntryError, decode, encode

_log = logging.getLogger("ctxreuse")
_MAX_UNTOLD = 100_000
_AT_ONCE = 500
_SHORTEST_POLL_S, _LONGEST_POLL_S, _SLOWER = 0.003, 1.0, 1.1
_WRITERS = 10_000
_LONGEST_PAUSE_S = 5.0
_FLUSH_S = 1.0
_FAILED = (
    "the shared log failed with %s; this process goes on alone, and catches up when the log is "
    "back. Further faults are only counted."
)
_GAP = (
    "the shared log no longer holds what this process has read last: it was cut, emptied or "
    "replaced. Planning goes on with what it holds now; if it was cut, let it keep more entries. "
    "Further gaps are only counted."
)


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
    """

    @property
    def secret(self) -> bytes:
        """The key with which names become digests, the same in all processes; up to 64 bytes.

        It is known without asking the store. Whoever has it and the log can tell whether a text
        that he guesses was sent.
        """

    def append(self, entries: Sequence[bytes]) -> None:
        """Append entries, in order, all or none."""

    def read(self, position: str, most: int) -> LogRead:
        """Return what stands behind a position.

        Args:
            position: What an earlier read returned; "" is the beginning.
            most: How many entries at most, from 1.
        """


def checked_read(position: str, most: int, form: re.Pattern[str]) -> re.Match[str] | None:
    """Check the arguments of `SharedLog.read`; return what the position says, None for ""."""
    checked_kind("position", position, str, "a string that an earlier read returned, or ''")
    checked_integer("most", most, 1)
    parts = form.fullmatch(position)
    if position and parts is None:
        raise InvalidRequestError(
            f"position is {describe(position)}; pass what an earlier read returned, or ''"
        )
    return parts


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


class Exchange(Sharing):
    """Writes and reads a log in a thread, which keeps it until the planner's last entry is told."""

    def __init__(self, log: SharedLog, take_in: Callable[[ToldEntry], object]) -> None:
        """Hand each entry of another planner to a method, as long as its object lives."""
        super().__init__(bytes(log.secret))
        self._log = log
        self._take_in = WeakMethod(take_in)
        self._lock = ForkSafeLock()
        self._position = ""
        self._latest_of: LRUMap[bytes, int] = LRUMap(_WRITERS)  # numbers of entries, by writer
        # numbers of its latest edits by message, until they are read: others stand before them
        self._own_edits: LRUMap[tuple[str, bytes], int] = LRUMap(_WRITERS)
        self._start_anew()
        renew_after_fork(self._leave_parent)

    def _leave_parent(self) -> None:
        self._latest_of.put(self._writer, self._numbers)
        self._start_anew()

    def _start_anew(self) -> None:
        """Have no thread, and another name: a child writes for itself."""
        self._writer = os.urandom(8)
        self.process = os.getpid()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._rounds = threading.Condition()
        self._begun = self._finished = 0  # of these
        self._numbers = self._given = 0  # of entries so far, and of those that the log may hold
        self._written: LRUMap[int, bytes] = LRUMap(_WRITERS)  # their checksums
        self._waiting: deque[tuple[int, ToldEntry]] = deque()
        self._appending: list[tuple[int, ToldEntry]] = []
        self._counts: Counter[str] = Counter()  # by the fields of the statistics

    def statistics(self) -> SharingStatistics:
        """Return what has become of entries so far."""
        return SharingStatistics(**self._counts, untold=len(self._waiting) + len(self._appending))

    def tell_own(self, entry: Entry) -> None:
        """Have an entry appended, under the name that its request has in all planners."""
        assert not isinstance(entry.request_id, bytes), "it is another planner's"
        name = self._writer + request_name(entry.tenant, entry.request_id)
        self.tell(named_by(entry, self.keyed(name)))

    def tell(self, entry: ToldEntry) -> None:
        """Have an entry appended."""
        with self._lock:
            self._numbers += 1
            self._waiting.append((self._numbers, entry))
            if isinstance(entry, EditEntry):
                self._own_edits.put((entry.tenant, entry.request_id), self._numbers)
            self._drop_excess()
            if len(self._waiting) == 1:  # else the log is at work, or fails and is left alone
                self._wake.set()
        self._start()

    def _drop_excess(self) -> None:
        while len(self._waiting) > _MAX_UNTOLD:
            self._waiting.popleft()
            self._counts["lost"] += 1

    def catch_up(self, timeout_s: float) -> bool:
        """Wait until all that the log holds is taken in; return whether it is."""
        self._start()
        with self._rounds:
            wanted = self._begun + 1  # the one that goes on may be past what is there by now
            self._wake.set()
            return self._rounds.wait_for(lambda: self._finished >= wanted, timeout_s)

    def flush(self, until: float) -> None:
        """Wait until what waits is appended, or the log has failed."""
        faults = self._counts["faults"]
        self._wake.set()
        while self.statistics().untold and time.monotonic() < until:
            if self._counts["faults"] > faults:
                break
            time.sleep(_SHORTEST_POLL_S)
        self.log_untold()

    def log_untold(self) -> None:
        """Log how many entries are lost where nobody appends them any more."""
        if untold := self.statistics().untold:
            _log.warning("the last %d entries of a planner that is gone are lost", untold)

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ctxreuse-sharing", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # too many threads, or the interpreter ends
                    self._fail(error)
                    return
                self._thread = thread
                _exchanges.add(self)
                _flush_at_exit(os.getpid())

    def _run(self) -> None:
        pause = _SHORTEST_POLL_S
        while self._take_in() is not None:
            pause = self._work(pause)
            self._wake.wait(pause)
            self._wake.clear()
        if not self._append():
            self.log_untold()

    def _work(self, pause_s: float) -> float:
        """Append and take in all there is; return the next pause in seconds."""
        done = self._counts["told"] + self._counts["taken_in"]
        with self._rounds:
            self._begun += 1
            number = self._begun
        is_all, is_appended = False, True
        try:
            while not is_all:
                is_appended = is_appended and self._append()
                is_all = self._read()
        except Exception as error:
            self._fail(error)
            is_appended = False
        if not is_appended:
            return min(2 * pause_s, _LONGEST_PAUSE_S)
        with self._rounds:
            self._finished = number
            self._rounds.notify_all()
        if self._counts["told"] + self._counts["taken_in"] > done:
            return _SHORTEST_POLL_S
        return min(_SLOWER * pause_s, _LONGEST_POLL_S)

    def _append(self) -> bool:
        """Append what waits; return whether the log takes it: a full one can be read still."""
        while self._waiting:
            with self._lock:
                number = min(len(self._waiting), _AT_ONCE)
                self._appending = [self._waiting.popleft() for _ in range(number)]
            try:
                written = [encode(self._writer, *one) for one in self._appending]
                for (told, _), entry in zip(self._appending, written, strict=True):
                    self._written.put(told, entry[-CHECK_BYTES:])
                self._given = self._appending[-1][0]
                self._log.append(written)
                self._counts["told"] += number
                self._appending = []
            except Exception as error:
                self._fail(error)
                return False
            finally:
                with self._lock:
                    self._waiting.extendleft(reversed(self._appending))
                    self._appending = []
                    self._drop_excess()
        return True

    def _read(self) -> bool:
        read = self._log.read(self._position, _AT_ONCE)
        if read.has_gap:
            self._note("gaps", _GAP)
        for one in read.entries:
            self._take(one)
        self._position = read.position
        return len(read.entries) < _AT_ONCE

    def _take(self, one: bytes) -> None:
        try:
            writer, number, entry = decode(one)
        except UnreadableEntryError as error:
            self._note("unreadable", "%s; it is left out. Further ones are only counted.", error)
            return
        is_own = self._has_written(writer, number, one)
        if not is_own:
            if number <= (self._latest_of.get(writer) or 0):
                return  # appended twice, or read again behind a gap
            self._latest_of.put(writer, number)
        if isinstance(entry, EditEntry):  # a message's last one in the log counts, in all processes
            message = entry.tenant, entry.request_id
            with self._lock:
                latest = self._own_edits.get(message)
                if is_own and latest == number:
                    self._own_edits.pop(message)
            is_own |= latest is not None
        if is_own or (take_in := self._take_in()) is None:
            return
        try:
            take_in(entry)
        except Exception as error:  # one that fails would else be read again, with those before
            self._fail(error)
        else:
            self._counts["taken_in"] += 1
        time.sleep(0)  # let a thread that plans go on

    def _has_written(self, writer: bytes, number: int, entry: bytes) -> bool:
        """Return whether an entry is this one's; take another name if others write under its."""
        if writer != self._writer:
            return False
        known = self._written.get(number)
        if known == entry[-CHECK_BYTES:] or (known is None and number <= self._given):
            return True  # of one that it no longer knows nothing tells another's
        self._writer = os.urandom(len(writer))
        _log.warning(
            "another process writes to the shared log under the name of this planner, as after a "
            "copy of a running process; it has a new one. Make planners behind such a copy: what "
            "was told since may be lost to others."
        )
        return False

    def _fail(self, error: Exception) -> None:
        # errors that are not ours may show anything
        shown = str(error) if isinstance(error, CtxreuseError) else type(error).__name__
        self._note("faults", _FAILED, shown)

    def _note(self, what: str, words: str, *about: object) -> None:
        """Count what went wrong, and log the first of its kind."""
        self._counts[what] += 1
        if self._counts[what] == 1:
            _log.warning(words, *about)


_exchanges: WeakSet[Exchange] = WeakSet()
"""Those with a thread."""


@lru_cache(1)
def _flush_at_exit(process: int) -> None:
    """Have what waits appended when a process ends, however it was started."""
    atexit.register(_flush_all)
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:  # its forked children end without what atexit knows
        multiprocessing.Finalize(None, _flush_all, exitpriority=0)


def _flush_all() -> None:
    until = time.monotonic() + _FLUSH_S
    for exchange in list(_exchanges):
        if exchange.process == os.getpid():  # a child has no thread of its parent's
            exchange.flush(until)
