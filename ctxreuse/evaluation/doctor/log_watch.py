"""Who writes to a shared log, and whether anybody does while we look."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ctxreuse.errors import CtxreuseError, InputFileError
from ctxreuse.sharing import SQLiteLog
from ctxreuse.sharing.entries import UnreadableEntryError, decode

_LATEST = 2_000
_READ_AT_ONCE = 5_000


class LogWatch:
    """Reads a shared log before and after a while; what cannot be read is said in `error`.

    Args:
        path: The file of a `SQLiteLog`; nothing is made if it is not there.

    Attributes:
        path: The file.
        entries: How many entries it has.
        writers: How many planners have written the latest 2,000 of them.
        appended: How many entries came between `begin` and `end`.
        unreadable: How many of the latest entries are damaged, or of a newer version.
        error: Why it cannot be read; None if it can.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.entries = self.writers = self.appended = self.unreadable = 0
        self.error: str | None = None
        self._position = ""
        self._latest: deque[bytes] = deque(maxlen=_LATEST)

    def begin(self) -> None:
        """Read all that the log holds."""
        self._attempt()

    def end(self) -> None:
        """Read what has come since."""
        self.appended = self._attempt()
        writers = list(self._writers())
        self.writers = len(set(writers))
        self.unreadable = len(self._latest) - len(writers)

    def _attempt(self) -> int:
        try:
            return self._read()
        except (sqlite3.Error, OSError, CtxreuseError) as error:
            self.error = str(error)
            return 0

    def _read(self) -> int:
        path = Path(self.path)
        if not (path.is_file() and path.with_name(f"{path.name}.key").is_file()):
            raise InputFileError(
                f"{self.path}: there is no such log, or not its key; no process has opened it"
            )
        log = SQLiteLog(path)
        before = self.entries
        while True:
            read = log.read(self._position, _READ_AT_ONCE)
            self._position = read.position
            self._latest.extend(read.entries)
            self.entries += len(read.entries)
            if len(read.entries) < _READ_AT_ONCE:
                return self.entries - before

    def _writers(self) -> Iterator[bytes]:
        for one in self._latest:
            try:
                yield decode(one).writer
            except UnreadableEntryError:
                continue
