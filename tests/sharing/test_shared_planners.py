"""Planners that share a log order alike, and plan alone where the log does not answer."""

import gc
import json
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from planning_helpers import assert_keeps_the_promises
from shared_logs import WAIT_S, MemoryLog, asked, caught_up, order, sharing, until

from ctxreuse import ReusePlanner
from ctxreuse.errors import InputFileError, InvalidRequestError
from ctxreuse.memory.prefix_index import PrefixIndex
from ctxreuse.sharing import SharingStatistics, SQLiteLog

pytestmark = pytest.mark.usefixtures("paper_words")


@pytest.fixture
def log(tmp_path: Path) -> SQLiteLog:
    return SQLiteLog(tmp_path / "sent.sqlite")


@pytest.mark.parametrize("first", [0, 1])
def test_what_two_planners_sent_differently_at_once_is_sent_alike_from_then_on(first):
    log = MemoryLog()
    log.error = TimeoutError()  # so that neither knows of the other, however slow this machine is
    planners = one, other = sharing(log)
    one.plan(asked("bax"), "none")  # what each of them alone has in its cache
    other.plan(asked("cab"), "none")
    orders = {order(planner.plan(asked("abc"))) for planner in (planners[first], planners[~first])}
    assert orders == {"bac", "cab"}
    log.error = None
    caught_up(*planners)
    [late] = sharing(log, 1)
    caught_up(late)
    prompts = [planner.plan(asked("abc")).messages() for planner in (*planners, late)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_tenants_stay_apart(log):
    one, other = sharing(log)
    one.plan(asked("abc", tenant="A"))
    caught_up(one, other)
    assert other.cached_tokens(asked("abc", tenant="B")) == 0
    assert order(other.plan(asked("cba", tenant="B"))) == "cba"
    assert order(other.plan(asked("cba", tenant="A"))) == "abc"


def test_conversations_are_not_shared(log):
    one, other = sharing(log)
    chat = one.conversation("c")
    chat.plan(asked("ab").blocks, "Which?")
    chat.record("So.")
    caught_up(one, other)
    elsewhere = other.conversation("c")
    assert not elsewhere.plan(asked("ab").blocks, "Which?").references
    assert one.sharing.told == 1
    chat.plan(asked("bc").blocks, "And?")
    caught_up(one)
    assert one.sharing.told == 1


@pytest.mark.parametrize("how", ["evicted", "trimmed"])
def test_what_the_engine_has_lost_is_told(log, how):
    one, other = sharing(log)
    plan = one.plan(asked("abc"))
    caught_up(one, other)
    whole = other.cached_tokens(asked("abc"))
    if how == "evicted":
        one.evict([plan.request_id])
    else:
        one.trim(plan.request_id, 1)
    caught_up(one, other)
    left = other.cached_tokens(asked("abc"))
    assert left == (0 if how == "evicted" else other.cached_tokens(asked("a"))) < whole


def test_ids_of_requests_are_each_planners_own(log):
    one, other = sharing(log)
    for planner, letters in ((one, "abc"), (other, "xyz")):
        planner.plan(asked(letters, request_id="request-0"))
    caught_up(one, other)
    one.evict(["request-0"])
    caught_up(one, other)
    assert other.cached_tokens(asked("xyz")) > 0
    assert other.cached_tokens(asked("abc")) == 0


def test_the_file_is_for_its_owner_and_shows_no_text(log, tmp_path):
    [one] = sharing(log, 1)
    one.plan(asked("abc", tenant="a tenant", system="a system text"))
    caught_up(one)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        content = path.read_bytes()
        for text in (b"says", b"a tenant", b"a system text", b"aaaa", b"request-0"):
            assert text not in content
        assert asked("a").blocks[0].key not in content, "digests are keyed"


def test_an_entry_that_cannot_be_taken_in_stops_none_behind_it(monkeypatch):
    log = MemoryLog()
    one, other = sharing(log)
    for letters in ("abc", "xyz", "def"):
        one.plan(asked(letters))
    caught_up(one)
    insert, calls = PrefixIndex.insert, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError
        return insert(*args)

    monkeypatch.setattr(PrefixIndex, "insert", failing)
    caught_up(other)
    assert other.sharing == SharingStatistics(taken_in=2, faults=1)
    assert other.cached_tokens(asked("def")) > 0


def test_what_is_dropped_while_a_log_is_slow_is_the_oldest_that_waits(monkeypatch):
    from ctxreuse.sharing import exchange

    monkeypatch.setattr(exchange, "_MAX_UNTOLD", 3)
    log, is_appending, go_on = MemoryLog(), threading.Event(), threading.Event()
    append = log.append

    def slowly(entries: Sequence[bytes]) -> None:
        is_appending.set()
        assert go_on.wait(WAIT_S)
        append(entries)

    log.append = slowly
    planner = ReusePlanner(shared_log=log)
    planner.plan(asked("a"))
    assert is_appending.wait(WAIT_S)
    for letter in "bcdef":
        planner.plan(asked(letter))
    go_on.set()
    caught_up(planner)
    assert planner.sharing == SharingStatistics(told=4, lost=2)
    assert len(log.entries) == 4


def test_the_thread_ends_with_the_planner():
    log = MemoryLog()
    planners = sharing(log, 3)
    for planner in planners:
        planner.plan(asked("abc"))
    threads = [one._exchange._thread for one in planners if one._exchange is not None]
    assert all(one is not None and one.is_alive() for one in threads)
    del planners, planner
    gc.collect()
    until(lambda: not any(one is not None and one.is_alive() for one in threads))


@pytest.mark.parametrize("before", [0, 3])
def test_planners_with_a_copied_name_take_new_ones_and_know_of_each_other(log, caplog, before):
    """As when the image of a running process, a snapshot or a container, goes on twice."""
    one, other, third = sharing(log, 3)
    for _ in range(before):
        one.plan(asked("ihg"))
    caught_up(one, other, third)
    first, second = one._exchange, other._exchange
    second._writer, second._numbers, second._given = first._writer, first._numbers, first._given
    one.plan(asked("bac"), "none")
    other.plan(asked("fed"), "none")
    caught_up(one, other, third)
    assert order(other.plan(asked("abc"))) == "bac"
    assert order(one.plan(asked("def"))) == "fed"
    assert first._writer != second._writer
    assert "under the name of this planner" in caplog.text
    for planner, letters in ((one, "onm"), (other, "srq")):
        planner.plan(asked(letters), "none")
    caught_up(one, other, third)
    assert order(third.plan(asked("mno"))) == "onm"
    assert order(third.plan(asked("qrs"))) == "srq"


@pytest.mark.parametrize("log", [3, "a path", object()])
def test_what_is_no_log_is_refused(log):
    with pytest.raises(InvalidRequestError, match="shared_log"):
        ReusePlanner(shared_log=log)
    with pytest.raises(InvalidRequestError, match="shadow"):
        ReusePlanner(shared_log=MemoryLog(), mode="shadow")
    with pytest.raises(InvalidRequestError, match="path"):
        SQLiteLog(3)


def test_a_key_that_cannot_be_kept_is_an_error_at_the_start(tmp_path):
    with pytest.raises(InvalidRequestError, match="a folder that exists"):
        SQLiteLog(tmp_path / "nowhere" / "log")


def test_a_log_that_fails_is_not_tried_again_for_each_request():
    log, tried = MemoryLog(), []
    log.append = lambda entries: tried.append(entries) or log.read("", 1)
    log.error = TimeoutError()
    [planner] = sharing(log, 1)
    for number in range(300):
        planner.plan(asked("abc", request_id=number))
        time.sleep(0.001)
    assert 0 < len(tried) < 30, "each pause is twice as long"


@pytest.mark.parametrize("key", [b"", b"short", b"k" * 40])
def test_a_damaged_key_is_replaced_once_and_its_log_set_aside(tmp_path, caplog, key):
    path = tmp_path / "log"
    SQLiteLog(path).append([b"before"])
    (tmp_path / "log.key").write_bytes(key)
    logs = [SQLiteLog(path) for _ in range(2)]
    logs[0].append([b"after"])
    assert logs[1].read("", 10).entries == [b"after"]
    assert logs[0].secret == logs[1].secret == (tmp_path / "log.key").read_bytes() != key
    assert [f"the key of {path} was damaged" in said for said in caplog.messages].count(True) == 1
    connection = sqlite3.connect(f"{path}.damaged")
    assert connection.execute("SELECT entry FROM entries").fetchall() == [(b"before",)]
    connection.close()
    (tmp_path / "log.key").unlink()
    SQLiteLog(path)
    assert f"{path} has lost its key" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="modes and owners say nothing here")
@pytest.mark.parametrize("name", ["log", "log.key"])
def test_files_that_others_may_have_written_are_refused_by_name(tmp_path, monkeypatch, name):
    path = tmp_path / "log"
    planner = ReusePlanner()
    planner.plan(asked("abc"))
    planner.save(path)
    (tmp_path / name).chmod(0o640)
    for opened in (SQLiteLog, lambda path: ReusePlanner.load(path, strict=True)):
        with pytest.raises(InvalidRequestError, match=f"{name} may be read by others"):
            opened(path)
    (tmp_path / name).chmod(0o600)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    for opened in (SQLiteLog, lambda path: ReusePlanner.load(path, strict=True)):
        with pytest.raises(InvalidRequestError, match="belongs to another user"):
            opened(path)


def test_a_link_leads_to_a_log_for_its_owner_only_and_is_no_key(tmp_path):
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    SQLiteLog(tmp_path / "log").append([b"x"])
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o600
    (tmp_path / "other.key").symlink_to(tmp_path / "log.key")
    with pytest.raises(InvalidRequestError, match=r"other\.key is no file, or a link"):
        SQLiteLog(tmp_path / "other")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputFileError, match="Too many levels of symbolic links"):
        SQLiteLog(tmp_path / "loop")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root makes such links")
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_of_another_user_leads_to_no_log(tmp_path, exists):
    """The attack: where all may write, a link leads the log into another file of the user's own."""
    own, link = tmp_path / "own", tmp_path / "log"
    used = SQLiteLog(link)
    if exists:
        ReusePlanner().save(own)
    link.symlink_to(own)
    os.lchown(link, 12_345, -1)
    for opened in (SQLiteLog, lambda path: ReusePlanner.load(path, strict=True)):
        with pytest.raises(InputFileError, match="is a link of another user"):
            opened(link)
    with pytest.raises(InputFileError, match="is a link of another user"):
        used.append([b"x"])
    assert own.exists() == exists


def test_what_is_no_file_gets_no_key(tmp_path):
    (tmp_path / "log").mkdir()
    with pytest.raises(InvalidRequestError, match="log is no file"):
        SQLiteLog(tmp_path / "log")
    assert os.listdir(tmp_path) == ["log"]


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.text("abcd", max_size=4), st.sampled_from(["", "A"])),
        max_size=12,
    )
)
def test_whoever_plans_nothing_is_lost_or_doubled(asked_of):
    log = MemoryLog()
    planners = sharing(log, 3)
    for number, letters, tenant in asked_of:
        assert_keeps_the_promises(planners[number].plan(asked(letters, tenant=tenant)))
    caught_up(*planners)
    tokens = {planner.statistics().tokens for planner in planners}
    assert len(tokens) <= 1 or len({letters for _, letters, _ in asked_of}) > 1
    assert {one.sharing.told + one.sharing.taken_in for one in planners} <= {len(asked_of), 0}


def test_the_first_history_in_a_process_is_sent_as_another_one_sent_it(tmp_path):
    path = tmp_path / "log.sqlite"
    sending = ReusePlanner(shared_log=SQLiteLog(path))
    sending.note_edit("", [b"a message"], b"[null, [], [], []]")
    assert sending.catch_up()
    assert ReusePlanner(shared_log=SQLiteLog(path)).edit_of("", b"a message") is not None


class LosesReplies(MemoryLog):
    """A log that keeps what it says that it cannot."""

    def append(self, entries: Sequence[bytes]) -> None:
        self.entries += entries
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", [MemoryLog, LosesReplies])
def test_of_two_ways_in_which_a_message_was_sent_at_once_all_processes_keep_one(kind):
    log = kind()
    log.error = TimeoutError()  # so that neither knows of the other
    planners = sharing(log)
    for letter, planner in zip("ab", planners, strict=True):
        for way in (f"at first {letter}", letter):
            edit = json.dumps([[way], [], [], []]).encode()
            planner.note_edit("", [b"a message"], edit)
            until(lambda planner=planner: planner.sharing.faults)
        assert planner.edit_of("", b"a message") == edit
    log.error = None
    caught_up(*planners)
    [late] = sharing(log, 1)
    caught_up(late)
    kept = {planner.edit_of("", b"a message") for planner in (*planners, late)}
    assert kept < {b'[["a"], [], [], []]', b'[["b"], [], [], []]'}
