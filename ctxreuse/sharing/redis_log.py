"""A shared log in a stream of Redis or Valkey, for the processes of several machines."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ctxreuse.context.checks import checked_each, checked_integer, checked_kind, checked_number
from ctxreuse.context.copies import FixedSettings, made_with
from ctxreuse.context.fork_safety import leave_to_parent, renew_after_fork
from ctxreuse.errors import (
    InvalidRequestError,
    MissingExtraError,
    SharedLogError,
    describe,
    shown_url,
)
from ctxreuse.sharing.exchange import LogRead, checked_read

_log = logging.getLogger("ctxreuse")
_SCHEMES = ("redis://", "rediss://", "unix://")
_URL_OPTIONS = ("db", "protocol", "ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
DEFAULT_STREAM = "ctxreuse"
_LEAST_SECRET = 16
FIELD_MARK = b"ctxreuse-"
"""The beginning of the names of fields that hold entries; a fingerprint of the secret follows."""
_POSITION = re.compile(r"(\d{1,20}-\d{1,20})\+(\d{1,20})", re.ASCII)
"""The id of the last entry, and how many the stream held: idle readers fetch nothing they know."""

_REMEDIES = {
    "WRONGTYPE": "the key holds something that is no stream; name another one with stream=",
    "MISCONF": "the server cannot save to its disk, and takes no writes; mend that",
    "NOREPLICAS": "the server has too few replicas to take writes",
    "DB index": "the server has no such database; mend the number in the URL",
    "last possible ID": "somebody has written under the last id there is; delete the stream",
    "MAXMEMORY": "the server is out of memory; give it more, or lower max_entries",
    "AuthenticationError": "the user or password is wrong; mend the URL",
    "AuthorizationError": "the user may not connect; mend the server's ACL",
    "NoPermissionError": "the user may not do this; allow XADD, XLEN, XRANGE, MULTI on the stream",
    "OutOfMemoryError": "the server is out of memory; give it more, or lower max_entries",
    "ReadOnlyError": "the server is a read-only replica; name the primary",
    "BusyLoadingError": "the server is loading its data",
    "MovedError": "the server is one node of a cluster, and the stream is on another one",
    "MasterDownError": "the replica has lost its primary",
    "ClusterDownError": "the cluster is down",
    "TimeoutError": "there was no answer in time; mend the URL, or look at the server",
    "MaxConnectionsError": "the server takes no more connections",
    "ConnectionError": "there is no connection; start the server, or mend the URL",
}
"""What an error of the client means, by what it says and the names of its class and base classes;
the first that fits holds."""


class RedisLog(FixedSettings):
    """A log in a stream of a Redis or Valkey server, from version 5, for any number of machines.

    The log holds keyed digests; whoever can read it and has `secret` can tell whether a text that
    he guesses was sent. The server needs a `maxmemory-policy` that evicts no keys without a time to
    live ("noeviction" or "volatile-...").

    Args:
        url: "redis://host:6379/0", "rediss://..." for TLS, which checks certificate and host name,
            or "unix:///path". It may hold user and password, and as options (`?db=1`) `db`,
            `protocol`, `ssl_ca_certs`, `ssl_ca_path`, `ssl_certfile`, `ssl_keyfile`.
        secret: The key with which names become digests, the same in all processes: at least 16
            bytes, as `secrets.token_hex(32)` makes them. It is not kept on the server.
        stream: The name of the stream.
        max_entries: How many entries are kept, about 300 bytes each; at times some hundreds more.
        timeout_s: Seconds after which a server that does not answer counts as away.

    Attributes:
        secret: The key, derived from what was given.

    Raises:
        InvalidRequestError: a wrong type or value; the message shows no password.
        MissingExtraError: `redis` is not installed.
    """

    secret: bytes

    def __init__(
        self,
        url: str,
        *,
        secret: str | bytes,
        stream: str = DEFAULT_STREAM,
        max_entries: int = 200_000,
        timeout_s: float = 5.0,
    ) -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingExtraError("RedisLog", "redis") from error
        self._redis = redis
        self._url = checked_url(url)
        self._stream = checked_kind("stream", stream, str, "a string")
        self._options: dict[str, Any] = {
            "secret": _checked_secret(secret),
            "max_entries": checked_integer("max_entries", max_entries, 1),
            "timeout_s": checked_number("timeout_s", timeout_s, 0.001),
        }
        self.secret = hashlib.blake2b(
            self._options["secret"], digest_size=32, person=b"ctxreuse log"
        ).digest()
        # tells entries that were written with another secret, which would say nothing here
        fingerprint = hashlib.blake2b(b"fingerprint", digest_size=8, key=self.secret)
        self._field = FIELD_MARK + fingerprint.hexdigest().encode()
        self._has_warned = False
        self._client: Any = None
        renew_after_fork(self._leave_parent)

    def __repr__(self) -> str:
        return f"RedisLog({shown_url(self._url)!r}, stream={self._stream!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return made_with(RedisLog, self._url, stream=self._stream, **self._options)

    def _leave_parent(self) -> None:
        leave_to_parent(self._client)
        self._client = None

    def of_engine(self, name: str) -> RedisLog:
        """Return the log of one engine of a pool, by its name, in a stream of its own."""
        checked_kind("name", name, str, "a string")
        return RedisLog(self._url, stream=f"{self._stream}:{name}", **self._options)

    def append(self, entries: Sequence[bytes]) -> None:
        """Append entries, in order, all or none; SharedLogError if that fails."""
        listed = checked_each("entries", entries, bytes, "bytes")
        with self._errors("written"), self._connected().pipeline(transaction=True) as steps:
            for one in listed:
                steps.xadd(self._stream, {self._field: one}, maxlen=self._options["max_entries"])
            steps.execute()

    def read(self, position: str, most: int) -> LogRead:
        """Return what `SharedLog.read` says for a position; SharedLogError if that fails."""
        parts = checked_read(position, most, _POSITION)
        most = min(most, 2**31)
        last, length = parts.groups() if parts else ("", "0")
        size, found = self._behind(f"({last}" if last else "-", most)
        has_gap = bool(last) and size != int(length) + len(found) and not self._has(last)
        if has_gap and not found:  # the stream is an earlier state of itself, or another one
            size, found = self._behind("-", most)
        last = found[-1][0].decode() if found else "" if has_gap else last
        entries = [self._entry(fields) for _, fields in found]
        return LogRead(f"{last}+{size}" if last else "", entries, has_gap)

    def _behind(self, start: str, most: int) -> tuple[int, list[Any]]:
        """Return how many entries the stream holds, and those from a place on."""
        with self._errors("read"), self._connected().pipeline(transaction=True) as steps:
            size, found = steps.xlen(self._stream).xrange(self._stream, start, "+", most).execute()
            return size, found

    def _has(self, entry_id: str) -> bool:
        with self._errors("read"):
            return bool(self._connected().xrange(self._stream, entry_id, entry_id))

    def _entry(self, fields: Mapping[bytes, bytes]) -> bytes:
        """Return the entry in what the stream holds; b"", which is none, in what others wrote."""
        entry = fields.get(self._field)
        if entry is None and not self._has_warned:
            self._has_warned = any(name.startswith(FIELD_MARK) for name in fields)
            if self._has_warned:
                _log.warning(
                    "the stream of %r holds entries that were written with another secret; they "
                    "are left out. Give all processes that share it the same secret, or each "
                    "group a stream of its own.",
                    self,
                )
        return b"" if entry is None else entry

    def _connected(self) -> Any:
        if self._client is None:
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            # a connection that was idle for long may be closed
            again = Retry(NoBackoff(), 1, supported_errors=(self._redis.ConnectionError,))
            timeout_s = self._options["timeout_s"]
            options = {"retry": again, "socket_timeout": timeout_s}
            options["socket_connect_timeout"] = timeout_s
            if self._url.startswith("rediss:"):
                options["ssl_check_hostname"] = True
            self._client = self._redis.Redis.from_url(self._url, **options)
        return self._client

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        """Say what an error of the client means, without what it may show of entries."""
        try:
            yield
        except self._redis.RedisError as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            told = " ".join([str(error)[-1_000:], *names])
            reason = next((one for name, one in _REMEDIES.items() if name in told), names[0])
            raise SharedLogError(f"{self!r} cannot be {done}: {reason}") from error


def checked_url(url: Any) -> str:
    """Return the URL of a server, if it is one with options that are taken."""
    if not isinstance(url, str):
        raise InvalidRequestError(
            f"url must be a string such as 'redis://host:6379/0', not a {type(url).__name__}"
        )
    try:
        parts = urlsplit(url)
        options = parse_qs(parts.query, keep_blank_values=True)
        is_one = url.startswith(_SCHEMES) and parts.port != 0
        numbers = [*options.get("db", ()), *options.get("protocol", ())]
        is_one &= all(one.isascii() and one.isdigit() for one in numbers)
    except ValueError:
        is_one = False
    if not is_one:
        raise InvalidRequestError(
            f"url is {shown_url(url)!r}; give one such as 'redis://host:6379/0', "
            "'rediss://user:password@host:6379/0' or 'unix:///path?db=0'"
        )
    if unknown := sorted(set(options) - set(_URL_OPTIONS)):
        raise InvalidRequestError(
            f"url has the option {describe(unknown[0])}; leave it out, because these are taken: "
            f"{', '.join(_URL_OPTIONS)}"
        )
    return url


def _checked_secret(secret: Any) -> bytes:
    if isinstance(secret, str):
        secret = secret.encode("utf-8", "surrogatepass")
    if not isinstance(secret, bytes) or len(secret) < _LEAST_SECRET:
        raise InvalidRequestError(
            f"secret must be a string or bytes, at least {_LEAST_SECRET} of them, and the same in "
            "all processes; what was given is not shown. Make one with secrets.token_hex(32)"
        )
    return secret
