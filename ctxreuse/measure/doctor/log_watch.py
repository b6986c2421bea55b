"""Who writes to a shared log, and whether anybody does while we look."""

from __future__ import annotations

import secrets
import sqlite3
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ctxreuse.errors import CtxreuseError, InputFileError, InvalidRequestError
from ctxreuse.sharing import SharedLog, SQLiteLog
from ctxreuse.sharing.entries import UnreadableEntryError, decode
from ctxreuse.sharing.redis_log import DEFAULT_STREAM, FIELD_MARK, RedisLog, is_redis_url

_LATEST = 2_000
_READ_AT_ONCE = 5_000


class LogWatch:
    """Reads a shared log before and after a while; what cannot be read is said in `error`."""

    def __init__(self, log: str, stream: str | None = None, timeout_s: float = 5.0) -> None:
        self.is_in_redis = is_redis_url(log)
        if stream is not None and not self.is_in_redis:
            raise InvalidRequestError(
                "--stream names a stream of a server; leave it out, because the log is a file"
            )
        self._path = Path(log)
        self._stream = _Stream(log, stream, timeout_s) if self.is_in_redis else None
        self.entries = self.writers = self.appended = self.unreadable = self.secrets = 0
        self.error: str | None = None
        self._position = ""
        self._latest: deque[bytes] = deque(maxlen=_LATEST)

    def end(self) -> None:
        """Read what has come since."""
        self.appended = self.read()
        writers = list[bytes]()
        for one in self._latest:
            with suppress(UnreadableEntryError):
                writers.append(decode(one)[0])
        self.writers = len(set(writers))
        self.unreadable = len(self._latest) - len(writers)
        if self._stream is not None:
            self.secrets = len(set(self._stream.fields) - {b""})
            if not self.entries and self.error is None:
                self.error = f"{self._stream!r} holds no entries: no process has written to it"

    def read(self) -> int:
        """Read on; return how many entries there were."""
        before, path = self.entries, self._path
        log: SharedLog | None = self._stream
        try:
            if log is None:
                if not (path.is_file() and path.with_name(f"{path.name}.key").is_file()):
                    raise InputFileError(
                        f"{path}: there is no such log, or not its key: no process has opened it"
                    )
                log = SQLiteLog(path)
            more = True
            while more:
                read = log.read(self._position, _READ_AT_ONCE)
                self._position = read.position
                self._latest.extend(read.entries)
                self.entries += len(read.entries)
                more = len(read.entries) == _READ_AT_ONCE
        except (sqlite3.Error, OSError, CtxreuseError) as error:
            self.error = str(error)
        return self.entries - before


class _Stream(RedisLog):
    """A stream of which all entries are read, whatever the secret that they were written with."""

    def __init__(self, url: str, stream: str | None, timeout_s: float) -> None:
        super().__init__(
            url, secret=secrets.token_bytes(), stream=stream or DEFAULT_STREAM, timeout_s=timeout_s
        )
        self.fields: deque[bytes] = deque(maxlen=_LATEST)

    def _entry(self, fields: Mapping[bytes, bytes]) -> bytes:
        name = next((one for one in fields if one.startswith(FIELD_MARK)), b"")
        self.fields.append(name)
        return fields[name] if name else b""
