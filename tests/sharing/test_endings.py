"""What waits to be told when a process or a planner ends is told still."""

import gc
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from shared_logs import MemoryLog, until

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.sharing import SQLiteLog

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


FAILS = """
class Failing:
    secret = b""
    def append(self, entries): raise OSError
    read = append
alone = ReusePlanner(shared_log=Failing())
for number in range(3):
    alone.plan(ContextRequest(["text"]))
"""


@pytest.mark.parametrize("words", ["", FAILS], ids=["nothing to tell", "a log that fails"])
def test_a_process_does_not_wait_for_nothing(tmp_path, words):
    last_words = f"planner.catch_up()\n{words}\nprint(time.monotonic())"
    status, begun = ran(tmp_path / "log", last_words)
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
    until(lambda: told_in(path) == PLANS)


def test_what_a_planner_that_is_gone_could_not_tell_is_said_to_be_lost(caplog):
    log = MemoryLog()
    log.error = OSError()
    planner = ReusePlanner(shared_log=log)
    planner.plan(ContextRequest(["text"]))
    del planner
    gc.collect()
    until(lambda: "the last 1 entries" in caplog.text)


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
