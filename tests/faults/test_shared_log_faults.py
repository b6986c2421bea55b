"""Logs that are away, slow, full, damaged, newer or read-only cost hits, and no call.

Two processes use one engine. While the log fails, each goes on as without the other; afterwards
each knows what the other has sent meanwhile, without a restart.
"""

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from fault_programs import PROGRAMS, Program, no_room, told
from forked import in_children
from redis_servers import RedisServer, free_port, redis_server
from shared_logs import caught_up, until

from ctxreuse import ReusePlanner
from ctxreuse.sharing import RedisLog, SharedLog, SQLiteLog, sqlite_log

SECRET = "a secret of at least 16 bytes"


class Files:
    """Logs in a file, as two processes open them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log" / "sent.sqlite"
        self.path.parent.mkdir()
        self.logs: list[SQLiteLog] = []

    def open(self) -> SharedLog:
        self.logs.append(SQLiteLog(self.path))
        return self.logs[-1]

    def append(self, entry: bytes) -> None:
        self.logs[0].append([entry])

    def latest(self) -> bytes:
        return bytes(SQLiteLog(self.path).read("", 1_000).entries[-1])

    @contextmanager
    def away(self) -> Iterator[None]:
        elsewhere = self.path.parent.with_name("elsewhere")
        self.path.parent.rename(elsewhere)
        yield
        elsewhere.rename(self.path.parent)

    @contextmanager
    def slow(self) -> Iterator[None]:
        with sqlite3.connect(self.path, isolation_level=None) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield
            other.execute("ROLLBACK")
        other.close()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        self._tell("PRAGMA query_only = ON")
        yield
        self._tell("PRAGMA query_only = OFF")

    def _tell(self, words: str) -> None:
        for log in self.logs:
            with sqlite_log._at_work:
                assert log._connection is not None
                log._connection.execute(words)

    @contextmanager
    def dropped_table(self) -> Iterator[None]:
        self._write("DROP TABLE entries")
        yield

    @contextmanager
    def last_number(self) -> Iterator[None]:
        self._write(f"INSERT INTO entries VALUES ({2**63 - 1}, x'00')")
        yield
        for one in self.path.parent.glob("sent.sqlite*"):  # as the log says
            if one.suffix != ".key":
                one.unlink()

    def _write(self, words: str) -> None:
        with sqlite3.connect(self.path) as other:
            other.execute(words)
        other.close()

    @contextmanager
    def damaged(self) -> Iterator[None]:
        parts = set(self.path.parent.glob("sent.sqlite*")) - {self.path.with_suffix(".sqlite.key")}
        for one in parts:
            with one.open("r+b") as file:
                file.write(b"\xff" * one.stat().st_size)
        yield
        for one in parts:  # as the log says
            one.unlink(missing_ok=True)  # who closes it last takes the rest along


class Redis:
    """Logs in a stream of a server, as two processes open them."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._client = redis.Redis.from_url(server.url)

    def open(self) -> SharedLog:
        return RedisLog(self._server.url, secret=SECRET, timeout_s=1.0)

    def append(self, entry: bytes) -> None:
        [(_, fields)] = self._client.xrevrange("ctxreuse", count=1)
        self._client.xadd("ctxreuse", dict.fromkeys(fields, entry))

    def latest(self) -> bytes:
        [(_, fields)] = self._client.xrevrange("ctxreuse", count=1)
        [entry] = fields.values()
        return bytes(entry)

    @contextmanager
    def away(self) -> Iterator[None]:
        self._server.stop()
        yield
        self._server.start()

    @contextmanager
    def slow(self) -> Iterator[None]:
        self._server.signal(signal.SIGSTOP)
        yield
        self._server.signal(signal.SIGCONT)

    @contextmanager
    def full(self) -> Iterator[None]:
        self._client.config_set("maxmemory", "1")
        yield
        self._client.config_set("maxmemory", "0")

    @contextmanager
    def read_only(self) -> Iterator[None]:
        self._client.replicaof("127.0.0.1", str(free_port()))
        yield
        self._client.replicaof("NO", "ONE")

    @contextmanager
    def damaged(self) -> Iterator[None]:
        self._client.delete("ctxreuse")
        self._client.set("ctxreuse", "a text")
        yield
        self._client.delete("ctxreuse")


@contextmanager
def entries(store: Files | Redis, spoilt: Callable[[bytes], bytes]) -> Iterator[None]:
    """Have another process write entries that are damaged or newer."""
    for _ in range(3):
        store.append(spoilt(store.latest()))
    yield


Fault = Callable[[Any], AbstractContextManager[None]]
FAULTS: dict[tuple[str, str], Fault] = {
    **{
        ("file", name): getattr(Files, name)
        for name in ("away", "slow", "read_only", "damaged", "dropped_table", "last_number")
    },
    **{
        ("Redis", name): getattr(Redis, name)
        for name in ("away", "slow", "full", "read_only", "damaged")
    },
    **{
        (store, name): lambda one, spoilt=spoilt: entries(one, spoilt)
        for store in ("file", "Redis")
        for name, spoilt in {
            "damaged entries": lambda entry: entry[:-1],
            "newer entries": lambda entry: b"\x09" + entry[1:],
        }.items()
    },
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the log wait for locks, and the thread between attempts, for less than a second."""
    monkeypatch.setattr(sqlite_log, "_BUSY_S", 0.5)
    monkeypatch.setattr("ctxreuse.sharing.exchange._LONGEST_PAUSE_S", 0.2)


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[Files | Redis]:
    if kind == "file":
        yield Files(folder)
        return
    with redis_server(folder) as server:
        yield Redis(server)


def noticed(planner: ReusePlanner) -> bool:
    return planner.sharing.faults + planner.sharing.unreadable > 0


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize(("where", "fault"), FAULTS)
def test_a_log_that_fails_costs_no_call_and_is_caught_up_with(kind, where, fault, tmp_path, caplog):
    with store_of(where, tmp_path) as store:
        one, other = (ReusePlanner(shared_log=store.open()) for _ in range(2))
        ours, theirs, plain = (PROGRAMS[kind](planner) for planner in (one, other, None))
        assert ours.order("abc") == plain.order("abc") == "abc"
        caught_up(one, other)
        assert theirs.order("bca") == "abc"
        caught_up(one, other)
        with FAULTS[where, fault](store):
            goes_on(ours, plain)
            until(lambda: noticed(one))
        caught_up(one, other)
        knows_what_was_sent(theirs, ours)
        for planner in (one, other):
            assert (planner.sharing.untold, planner.sharing.lost) == (0, 0)
            assert planner.savings.planning_failures == 0
        assert ours.faults == theirs.faults == 0
        lines = [line.getMessage() for line in caplog.records if line.name == "ctxreuse"]
        # planners of the tests before may lose their servers only now
        lines = [line for line in lines if "cannot be" not in line or str(tmp_path) in line]
        for words in ("goes on alone", "it is left out", "no longer holds"):
            assert sum(words in line for line in lines) <= 2, "each planner says it once"
        assert lines
        assert "says: " not in caplog.text


def goes_on(ours: Program, plain: Program) -> None:
    """Ask about what was asked about, and about what nobody has."""
    for letters in ("cab", "bca", "def", "fed"):
        assert ours.ask(letters) == plain.ask(letters)
    assert ours.engine.prompts[-4:] == ["abc", "abc", "def", "def"]


def knows_what_was_sent(theirs: Program, ours: Program) -> None:
    """Check that each learns what the other sends, and has sent while the log failed."""
    assert theirs.order("efd") == "def"
    assert theirs.order("xyz") == "xyz"
    assert ours.planner is not None
    assert theirs.planner is not None
    caught_up(ours.planner, theirs.planner)
    assert ours.order("zyx") == "xyz"
    caught_up(ours.planner, theirs.planner)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_disk_that_is_full_costs_no_call_and_is_caught_up_with(kind, tmp_path):
    """In a process of its own, whose files may not grow for a while."""

    def run(_: int) -> list[str]:
        store = Files(tmp_path)
        one, other = (ReusePlanner(shared_log=store.open()) for _ in range(2))
        ours, theirs, plain = (PROGRAMS[kind](planner) for planner in (one, other, None))
        for letters in ("abc", "bca"):
            ours.order(letters)
            plain.order(letters)
        caught_up(one, other)
        largest = max(os.path.getsize(file) for file in store.path.parent.iterdir())
        with told() as lines:
            with no_room(largest):
                goes_on(ours, plain)
                for number in range(50):  # there may be some room in the file
                    assert ours.order(f"gh{'ijklmno'[number % 7]}")
                    until(lambda: noticed(one) or not one.sharing.untold)
                assert noticed(one)
            caught_up(one, other)
            knows_what_was_sent(theirs, ours)
        assert (one.sharing.untold, one.sharing.lost, ours.faults) == (0, 0, 0)
        return [line for line in lines if "goes on alone" in line]

    [said] = in_children(1, run)
    assert len(said) == 1
    assert "make room" in said[0]
