"""A shared log in a file, for the processes of one machine.

No connection may be inherited, nor SQLite be at work while a process forks: the child would wait
for locks that nobody frees. So a fork waits for SQLite's step, and closes all connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from ctxreuse.context.blocks import text_digest
from ctxreuse.context.checks import checked_each, checked_integer, checked_kind, checked_path
from ctxreuse.context.copies import FixedSettings
from ctxreuse.context.files import behind_links, file_errors
from ctxreuse.context.fork_safety import leave_to_parent
from ctxreuse.errors import SharedLogError
from ctxreuse.sharing.exchange import LogRead, checked_read
from ctxreuse.sharing.secret_file import check_own, kept_secret, key_path

_log = logging.getLogger("ctxreuse")
_BUSY_S = 5.0
_LARGEST = 2**63 - 1
_FORK_WAITS_S = 1.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY AUTOINCREMENT, entry BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS log (name TEXT NOT NULL);
INSERT INTO log SELECT hex(randomblob(8)) WHERE NOT EXISTS (SELECT 1 FROM log);
"""
_DROP_OLDEST = "DELETE FROM entries WHERE number <= (SELECT max(number) FROM entries) - ?"
_NEXT = "SELECT number, entry FROM entries WHERE number > ? ORDER BY number LIMIT ?"
_LATEST = "SELECT ifnull(max(seq), 0) FROM sqlite_sequence WHERE name = 'entries'"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST_NAME = 64
_POSITION = re.compile(r"(\d{1,19})-([0-9A-F]{16})", re.ASCII)

_REMEDIES = {
    "SQLITE_BUSY": "another program locks it",
    "SQLITE_CORRUPT": "stop all processes that use it, and delete it and its -wal and -shm files",
    "SQLITE_FULL": "make room on its disk; if there is some, delete it and its -wal and -shm files",
    "SQLITE_IOERR": "make room on its disk and in the user's quota (or ulimit -f); if there is "
    "some, the disk is broken, or a network file system",
    "SQLITE_NOTADB": "delete it, or name another file",
    "SQLITE_READONLY": "let this user write it and its folder",
    "SQLITE_CANTOPEN": "name a file in a folder that exists and may be written",
}


class SQLiteLog(FixedSettings):
    """A log in an SQLite file with a write-ahead log, for many processes of one machine.

    It holds keyed digests; the key stands in a file beside it, in `.key`: whoever has both can tell
    whether a text that he guesses was sent. Both files have mode 0600. A network file system will
    not do.

    Args:
        path: The file; its folder exists.
        max_entries: How many entries are kept, about 250 bytes each.

    Raises:
        InvalidRequestError: the key can be neither read nor written.
        InputFileError: a link of another user leads to the file, or it cannot be looked at.
    """

    def __init__(self, path: str | os.PathLike[str], max_entries: int = 200_000) -> None:
        self._path = checked_path("path", path).absolute()  # the process may change its folder
        self._max_entries = min(checked_integer("max_entries", max_entries, 1), _LARGEST)
        with file_errors(self._path, "read"), contextlib.suppress(FileNotFoundError):
            status = behind_links(self._path).stat()
            check_own(self._path, status)
            if status.st_size and not key_path(self._path).exists():
                _log.warning(
                    "%s has lost its key, and a new one does not fit what it holds. Put the old "
                    "key back, or delete the log; then start its processes again.",
                    self._path,
                )
        self.secret = kept_secret(self._path)
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # that it is connected to
        self._name = ""  # of what the file holds
        self._is_inherited = False
        _logs.add(self)

    def __del__(self) -> None:
        connection = self.__dict__.get("_connection")  # it is not there if a path was refused
        if connection is None:
            return
        _dropped.append(connection)
        if _at_work.acquire(blocking=False):  # else whoever is at work closes it
            _close_dropped()
            _at_work.release()

    def __reduce__(self) -> tuple[object, ...]:
        return SQLiteLog, (self._path, self._max_entries)

    def close(self) -> None:
        """Close the connection to the file; the next call opens another one."""
        with _at_work:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def of_engine(self, name: str) -> SQLiteLog:
        """Return the log of one engine of a pool, by its name, in a file beside this one."""
        checked_kind("name", name, str, "a string")
        shown = _UNSAFE.sub("_", name)[:_LONGEST_NAME]
        if shown != name:  # two names may look alike then
            shown += f"-{text_digest(name).hex()}"
        return SQLiteLog(self._path.with_stem(f"{self._path.stem}-{shown}"), self._max_entries)

    def append(self, entries: Sequence[bytes]) -> None:
        """Append entries, in order, all or none; SharedLogError if that fails."""
        listed = checked_each("entries", entries, bytes, "bytes")
        with self._step("written"):
            connection = self._connected()
            with connection:
                connection.executemany(
                    "INSERT INTO entries (entry) VALUES (?)", [(one,) for one in listed]
                )
                connection.execute(_DROP_OLDEST, (self._max_entries,))

    def read(self, position: str, most: int) -> LogRead:
        """Return what `SharedLog.read` says for a position; SharedLogError if that fails."""
        parts = checked_read(position, most, _POSITION)
        with self._step("read"):
            connection, name = self._connected(), self._name
            after, of = (min(int(parts[1]), _LARGEST), parts[2]) if parts else (0, name)
            [latest] = connection.execute(_LATEST).fetchone()
            # another file of this name, or an earlier state of it
            is_other = after > 0 and (of != name or after > latest)
            after = 0 if is_other else after
            found = connection.execute(_NEXT, (after, min(most, _LARGEST))).fetchall()
        has_gap = is_other or bool(after and found and found[0][0] > after + 1)
        # SQLite keeps what others wrote there, whatever its type
        entries = [one if isinstance(one, bytes) else b"" for _, one in found]
        return LogRead(f"{found[-1][0] if found else after}-{name}", entries, has_gap)

    def _connected(self) -> sqlite3.Connection:
        """Return the connection to the file that now has the name."""
        if self._connection is not None and self._file != _identity(self._path):
            self.close()
        if self._connection is None:
            target = behind_links(self._path)
            with contextlib.suppress(FileExistsError):  # SQLite would let others read it
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            check_own(self._path, target.stat())
            connection = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
            self._connection = connection  # to be closed by whoever forks, if the rest fails
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_SCHEMA)
            [self._name] = connection.execute("SELECT name FROM log").fetchone()
            self._file = _identity(self._path)
        return self._connection

    @contextmanager
    def _step(self, done: str) -> Iterator[None]:
        """Keep the process from being forked, and name the file in errors of SQLite."""
        if self._is_inherited:
            raise SharedLogError(
                f"{self._path} cannot be {done}: it was in use when this process was forked; make "
                "the log, or the planner, behind the fork"
            )
        try:
            with _at_work:
                _close_dropped()
                yield
        except (sqlite3.Error, OSError) as error:
            self.close()  # the next step makes anew what is gone, such as a table
            kind = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
            advice = f"; {_REMEDIES[kind]}" if kind in _REMEDIES else ""
            raise SharedLogError(f"{self._path} cannot be {done}: {error}{advice}") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of its name; None without one."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


_at_work = threading.RLock()
"""Whoever holds it may call SQLite; a fork waits for it."""
_dropped: list[sqlite3.Connection] = []
"""Connections of logs that nobody has any more; closing one is work, too."""
_logs: WeakSet[SQLiteLog] = WeakSet()
_forking = threading.local()  # two threads may fork at the same time


def _close_dropped() -> None:
    while _dropped:
        _dropped.pop().close()


def _prepare_fork() -> None:
    _forking.is_prepared = _at_work.acquire(timeout=_FORK_WAITS_S)
    if _forking.is_prepared:
        _close_dropped()
        for log in list(_logs):
            log.close()


def _end_fork() -> None:
    if _forking.__dict__.pop("is_prepared", False):
        _at_work.release()


def _begin_child() -> None:
    global _at_work
    if not _forking.__dict__.get("is_prepared", False):  # SQLite is busy, or nobody said a word
        _at_work = threading.RLock()
        leave_to_parent(*_dropped)
        _dropped.clear()
        for log in list(_logs):
            if log._connection is not None:  # its parent could not close it
                leave_to_parent(log._connection)
                log._connection, log._is_inherited = None, True
    _end_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(
        before=_prepare_fork, after_in_parent=_end_fork, after_in_child=_begin_child
    )
