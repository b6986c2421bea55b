"""A log in a file: forks at any moment, and files that others lock, replace or write to."""

import sqlite3
import time
from pathlib import Path

import pytest
from forked import in_children
from shared_logs import WAIT_S, asked, caught_up, order, sharing, until

from ctxreuse import ReusePlanner
from ctxreuse.errors import SharedLogError
from ctxreuse.sharing import SharingStatistics, SQLiteLog

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def test_children_that_are_forked_while_the_file_is_used_read_and_write_it(tmp_path):
    for number in range(8):  # while it is opened, made, written, read
        path = tmp_path / f"log {number}"
        planner = ReusePlanner(shared_log=SQLiteLog(path))
        planner.plan(asked("abc"))
        time.sleep(number / 2_000)

        def child(_: int, planner: ReusePlanner = planner, path: Path = path) -> int:
            [other] = sharing(SQLiteLog(path), 1)
            planner.plan(asked("xyz"))
            caught_up(planner, other)
            return planner.sharing.told

        assert in_children(2, child) == [1, 1]
        caught_up(planner)
        assert planner.sharing == SharingStatistics(told=1, taken_in=2)


def test_a_child_forked_while_the_file_is_locked_says_that_it_shares_nothing(tmp_path, caplog):
    [planner] = sharing(SQLiteLog(tmp_path / "log"), 1)
    planner.plan(asked("abc"))
    caught_up(planner)
    with sqlite3.connect(tmp_path / "log", isolation_level=None) as locked:
        locked.execute("BEGIN IMMEDIATE")
        planner.plan(asked("bca"))
        time.sleep(0.1)  # its thread waits for the lock, as long as SQLite waits

        def child(_: int) -> tuple[str, bool]:
            placed = order(planner.plan(asked("cab")))
            until(lambda: planner.sharing.faults > 0)
            return placed, planner.catch_up(0.1)

        assert in_children(1, child) == [("abc", False)]
        locked.execute("ROLLBACK")
    assert planner.catch_up(WAIT_S)


def test_a_process_that_changes_its_folder_goes_on_with_the_same_file(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    log = SQLiteLog("log")
    log.append([b"one"])
    monkeypatch.chdir(tmp_path / "elsewhere")
    log.append([b"two"])
    assert log.read("", 10).entries == [b"one", b"two"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_what_others_write_into_the_table_is_left_out(tmp_path):
    one, other = sharing(SQLiteLog(tmp_path / "log"))
    one.plan(asked("abc"))
    caught_up(one)
    with sqlite3.connect(tmp_path / "log") as connection:
        connection.executemany("INSERT INTO entries (entry) VALUES (?)", [("text",), (3,), (b"",)])
    connection.close()
    one.plan(asked("xyz"))
    caught_up(one, other)
    assert (other.sharing.unreadable, other.sharing.taken_in) == (3, 2)


def test_a_table_that_is_gone_is_made_anew_and_a_last_number_named(tmp_path):
    log = SQLiteLog(tmp_path / "log")
    log.append([b"before"] * 3)
    position = log.read("", 10).position
    connection = sqlite3.connect(tmp_path / "log")
    connection.executescript("DROP TABLE entries; DROP TABLE log")
    with pytest.raises(SharedLogError, match="no such table"):
        log.append([b"lost"])
    log.append([b"after"])
    assert log.read(position, 10)[1:] == ([b"after"], True)
    connection.execute("INSERT INTO entries VALUES (?, ?)", (2**63 - 1, b"last"))
    connection.commit()
    connection.close()
    read = log.read(position, 10)
    assert read.entries == [b"after", b"last"]
    assert log.read(read.position, 10) == (read.position, [], False)
    with pytest.raises(SharedLogError, match="if there is some, delete it"):
        log.append([b"none"])


@pytest.mark.parametrize("by_then", [1, 5])
def test_a_file_that_is_deleted_is_made_anew_and_read_from_its_beginning(tmp_path, by_then):
    log = SQLiteLog(tmp_path / "log")
    log.append([b"before"] * 3)
    position = log.read("", 10).position
    for path in tmp_path.glob("log*"):
        if path.suffix != ".key":
            path.unlink()
    log.append([b"after"] * by_then)
    read = log.read(position, 10)
    assert read.entries == [b"after"] * by_then
    assert read.has_gap
    assert log.read(read.position, 10) == (read.position, [], False)


def test_a_file_that_cannot_be_used_is_named_with_what_to_do(tmp_path, caplog):
    (tmp_path / "log").write_bytes(b"no database" * 500)
    (tmp_path / "log").chmod(0o600)
    planner = ReusePlanner(shared_log=SQLiteLog(tmp_path / "log"))
    planner.plan(asked("abc"))
    until(lambda: planner.sharing.faults > 1)
    [said] = [one.getMessage() for one in caplog.records if "log cannot be" in one.getMessage()]
    assert "file is not a database; delete it, or name another file" in said


def test_a_log_that_is_dropped_while_another_thread_forks_hinders_no_child(tmp_path):
    def appended(path: Path) -> int:
        log = SQLiteLog(path)
        log.append([b"entry"])
        return len(log.read("", 9).entries)  # and the log goes, with its connection

    for forks in range(8):
        paths = [tmp_path / f"{forks} {number}" for number in range(4)]
        answers = in_children(
            4, lambda n, paths=paths: appended(paths[n]), lambda n: appended(tmp_path / f"own {n}")
        )
        assert answers == [1] * 4
