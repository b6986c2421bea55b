"""A real Redis server for tests: on a socket in a folder, or on a free port with TLS."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "pass-word-of-the-server"
_START_S = 20.0


def redis_program() -> str:
    """Return redis-server or valkey-server: what CTXREUSE_REDIS names, or what is found."""
    named = os.environ.get("CTXREUSE_REDIS")
    found = shutil.which(named or "redis-server") or (not named and shutil.which("valkey-server"))
    if named and not found:
        pytest.fail(
            f"CTXREUSE_REDIS is {named!r}, and there is no such program; unset it or mend it"
        )
    if not found:
        pytest.skip("needs redis-server or valkey-server")
    return str(found)


class RedisServer:
    """A server that keeps nothing on disk; it can be stopped, started again and frozen.

    Args:
        folder: Where its socket stands.
        *options: Further options of the program.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 'redis.sock'}"
        self.start()

    def start(self) -> None:
        path = self._folder / "redis.sock"
        self._process = subprocess.Popen(
            [
                redis_program(), "--port", "0", "--unixsocket", str(path), "--save", "",
                "--appendonly", "no", "--dir", str(self._folder), "--daemonize", "no",
                *self._options,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + _START_S
        while not _listens(path):
            assert self._process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < end, "redis-server does not start"
            time.sleep(0.01)

    def stop(self) -> None:
        """End it; what it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            (self._folder / "redis.sock").unlink(missing_ok=True)

    def signal(self, number: int) -> None:
        """Send it a signal: SIGSTOP freezes it, SIGCONT lets it go on."""
        assert self._process is not None
        self._process.send_signal(number)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for "localhost" that signs itself; return it and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    made, key = folder / "server.crt", folder / "server.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-keyout", str(key), "-out", str(made), "-days", "2", "-subj",
            "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return made, key


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(str(path)) == 0
