"""What waits to be told when a process or a planner ends is told still."""

import gc
import os
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.sharing import SQLiteLog
from ctxreuse.sharing.exchange import LogRead

PLANS = 20
PROGRAM = """
import logging, os, signal, sqlite3, sys, time
from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.sharing import SQLiteLog

planner = ReusePlanner(shared_log=SQLiteLog(sys.argv[1]))
planner.catch_up()
for number in range(int(sys.argv[2])):
    planner.plan(ContextRequest([f"text {number}"]))
"""


def told_in(path: Path) -> int:
    return len(SQLiteLog(path).read("", 1_000).entries)


def ran(path: Path, last_words: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + last_words, str(path), str(PLANS)],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode()


@pytest.mark.parametrize(("last_words", "status"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_what_waits_when_a_process_ends_is_appended(tmp_path, last_words, status):
    path = tmp_path / "log"
    assert ran(path, last_words) == (status, "")
    assert told_in(path) == PLANS


def test_a_process_that_is_killed_loses_only_what_waited(tmp_path):
    path = tmp_path / "log"
    killed, _ = ran(path, "planner.catch_up(); os.kill(os.getpid(), signal.SIGKILL)")
    assert killed < 0
    assert told_in(path) == PLANS


def test_a_process_waits_a_second_at_most_for_a_log_that_is_locked(tmp_path):
    path = tmp_path / "log"
    locks = """
planner.catch_up()
locked = sqlite3.connect(sys.argv[1], isolation_level=None)
locked.execute("BEGIN IMMEDIATE")
planner.plan(ContextRequest(["the last one"]))
logging.basicConfig(stream=sys.stdout)
print(time.monotonic())
"""
    status, printed = ran(path, locks)
    begun, _, logged = printed.partition("\n")
    assert status == 0
    assert 0.9 < time.monotonic() - float(begun) < 4
    assert "the last 1 entries of a planner that is gone are lost" in logged
    assert told_in(path) == PLANS


def test_a_process_does_not_wait_for_a_log_that_fails(tmp_path):
    fails = """
planner.catch_up()
class Failing:
    secret = b""
    def append(self, entries): raise OSError
    read = append
alone = ReusePlanner(shared_log=Failing())
for number in range(3):
    alone.plan(ContextRequest(["text"]))
print(time.monotonic())
"""
    status, begun = ran(tmp_path / "log", fails)
    assert status == 0
    assert time.monotonic() - float(begun) < 0.9


def _plans(path: Path) -> None:
    planner = ReusePlanner(shared_log=SQLiteLog(path))
    planner.catch_up()
    for number in range(PLANS):
        planner.plan(ContextRequest([f"text {number}"]))


@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_processes_of_multiprocessing_tell_what_waits(tmp_path, how):
    path = tmp_path / "log"
    child: Any = get_context(how).Process(target=_plans, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert told_in(path) == PLANS


def test_what_a_planner_that_is_gone_has_sent_is_told(tmp_path):
    path = tmp_path / "log"
    _plans(path)
    gc.collect()
    end = time.monotonic() + 20
    while told_in(path) < PLANS:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_a_planner_that_is_gone_could_not_tell_is_said_to_be_lost(caplog):
    class Failing:
        secret = b""

        def append(self, entries: object) -> None:
            raise OSError

        def read(self, position: str, most: int) -> LogRead:
            return LogRead(position, [])

    planner = ReusePlanner(shared_log=Failing())
    planner.plan(ContextRequest(["text"]))
    del planner
    gc.collect()
    end = time.monotonic() + 20
    while not any("the last 1 entries" in one.message for one in caplog.records):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_plan_does_not_fail_where_no_thread_can_be_started(tmp_path, monkeypatch):
    planner = ReusePlanner(shared_log=SQLiteLog(tmp_path / "log"))

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        planner.plan(ContextRequest(["text"]))
        assert not planner.catch_up(0.01)
    assert planner.sharing.faults == 2
    assert planner.sharing.untold == 1
    assert planner.catch_up()
    assert planner.sharing.told == 1


def test_exits_are_not_delayed_by_planners_without_anything_to_tell(tmp_path):
    status, begun = ran(tmp_path / "log", "planner.catch_up(); print(time.monotonic())")
    assert status == 0
    assert time.monotonic() - float(begun) < 0.9
    assert os.listdir(tmp_path)
