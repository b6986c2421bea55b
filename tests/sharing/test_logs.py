"""What holds for every log: the contract of `SharedLog`, and planners that share through it."""

import copy
import pickle
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from forked import in_children
from redis_servers import RedisServer, redis_server
from shared_logs import WAIT_S, MemoryLog, asked, caught_up, order, sharing

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.memory.sent_log import LostEntry
from ctxreuse.sharing import RedisLog, SharedLog, SharingStatistics, SQLiteLog
from ctxreuse.sharing.entries import encode

KINDS = ("memory", "sqlite", "redis")
SECRET = "a secret of at least 16 bytes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture(params=KINDS)
def make(request: Any, tmp_path: Path) -> Callable[[], SharedLog]:
    if request.param == "memory":
        one = MemoryLog()
        return lambda: one
    if request.param == "sqlite":
        return lambda: SQLiteLog(tmp_path / "log")
    url = request.getfixturevalue("server").url
    return lambda: RedisLog(url, secret=SECRET, stream=tmp_path.name)


@pytest.fixture
def make_shared(make: Callable[[], SharedLog]) -> Callable[[], SharedLog]:
    if isinstance(make(), MemoryLog):
        pytest.skip("other processes do not see this one's memory")
    return make


def entries(numbers: range) -> list[bytes]:
    return [b"entry %d" % number for number in numbers]


def test_what_is_appended_is_read_in_order_from_any_position(make):
    log, other = make(), make()
    assert isinstance(log, SharedLog)
    empty = log.read("", 10)
    assert (empty.entries, empty.has_gap) == ([], False)
    assert log.read(empty.position, 10) == empty
    log.append(entries(range(5)))
    other.append(entries(range(5, 7)))
    first = other.read("", 3)
    assert (first.entries, first.has_gap) == (entries(range(3)), False)
    rest = log.read(first.position, 10)
    assert (rest.entries, rest.has_gap) == (entries(range(3, 7)), False)
    assert log.read(rest.position, 10) == (rest.position, [], False)
    log.append(entries(range(7, 8)))
    assert other.read(rest.position, 10).entries == entries(range(7, 8))


def test_any_bytes_come_back_as_they_were(make):
    log = make()
    written = [b"", bytes(range(256)), b"\xff" * 3, b"x" * 100_000]
    log.append(written)
    log.append([])
    assert log.read("", 10).entries == written


def test_prompts_are_those_of_one_planner_for_all(make):
    requests = [asked("".join(letters)) for letters in ("abc", "cab", "bxa", "axb", "cxb", "abc")]
    alone, planners = ReusePlanner(), sharing(make(), 3)
    for number, request in enumerate(requests):
        plan = planners[number % 3].plan(request)
        caught_up(*planners)
        assert plan.messages() == alone.plan(request).messages()


def test_a_process_that_starts_again_gives_the_prompts_that_it_would_have_given(make):
    [before] = sharing(make(), 1)
    for letters in ("abc", "cab", "bca", "xyz", "zab"):
        before.plan(asked(letters, system="Be brief."))
    before.plan_batch([asked(letters) for letters in ("abd", "dba", "bcd")])
    caught_up(before)
    [after] = sharing(make(), 1)
    caught_up(after)
    for letters in ("cbax", "yzx", "dcba", "abc"):
        for fields in ({}, {"system": "Be brief."}):
            ours, theirs = (one.plan(asked(letters, **fields)) for one in (after, before))
            assert ours.messages() == theirs.messages()


def test_an_entry_that_was_appended_twice_is_taken_in_once(make):
    """As when the answer of a store was lost, and its client tries again."""
    log = make()
    append = log.append

    def twice(written: list[bytes]) -> None:
        append(written)
        append(written)

    log.append = twice
    one, other = sharing(log)
    for letters in ("abc", "bca", "abc"):
        one.plan(asked(letters))
    caught_up(one, other)
    assert other.sharing.taken_in == 3


def test_a_batch_is_appended_whole_or_not_at_all(make):
    log = make()
    if isinstance(log, MemoryLog):
        pytest.skip("it takes anything")
    with pytest.raises(InvalidRequestError, match="each of entries must be bytes"):
        log.append([b"one", "two"])
    assert log.read("", 10).entries == []


@pytest.mark.parametrize("position", ["x", "-1", "1-", "٣", 3, None, "9" * 50])
def test_what_is_no_position_is_refused(make, position):
    log = make()
    if isinstance(log, MemoryLog):
        pytest.skip("it takes anything")
    with pytest.raises(InvalidRequestError, match="position"):
        log.read(position, 10)
    with pytest.raises(InvalidRequestError, match="most"):
        log.read("", 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_children_that_are_forked_know_what_their_parent_knew_and_go_on(make_shared):
    planner, other = sharing(make_shared())
    planner.plan(asked("abc"))
    other.plan(asked("xyz"))
    caught_up(planner, other)

    def child(number: int) -> tuple[str, SharingStatistics]:
        plan = planner.plan(asked("cab" + "xyz"[number]))
        assert planner.catch_up(WAIT_S)
        return order(plan), planner.sharing

    for (placed, statistics), letter in zip(in_children(3, child), "xyz", strict=True):
        assert placed == f"abc{letter}"
        assert statistics.told == 1
        assert statistics.taken_in <= 2, "only what other children have told since the fork"
    caught_up(planner)
    assert planner.sharing.taken_in == 4


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_a_parent_tells_after_a_fork_is_taken_in_by_the_child(make_shared):
    [planner] = sharing(make_shared(), 1)
    planner.plan(asked("abc"))  # may wait to be told while the child is made

    def child(_: int) -> int:
        [other] = sharing(make_shared(), 1)
        other.plan(asked("xyz"))
        caught_up(other, planner)
        return planner.sharing.taken_in

    assert in_children(1, child) == [1]


def _spawned(log: SharedLog, letters: str) -> None:
    [planner] = sharing(log, 1)
    planner.plan(asked(letters))
    caught_up(planner)


def test_processes_that_are_spawned_share_it(make_shared):
    context = get_context("spawn")
    arguments = [(make_shared(), letters) for letters in ("abc", "xyz")]
    children = [context.Process(target=_spawned, args=one) for one in arguments]
    for one in children:
        one.start()
    for one in children:
        one.join(60)
        assert one.exitcode == 0
    [planner] = sharing(make_shared(), 1)
    caught_up(planner)
    assert order(planner.plan(asked("cba"))) == "abc"
    assert order(planner.plan(asked("zyx"))) == "xyz"


def test_copies_and_pickles_open_the_same_log(make_shared):
    log = make_shared()
    log.append([b"one"])
    for other in (copy.copy(log), copy.deepcopy(log), pickle.loads(pickle.dumps(log))):
        assert other.secret == log.secret
        assert other.read("", 10).entries == [b"one"]


def test_what_is_kept_is_bounded_and_a_reader_that_is_behind_learns_it(make_shared, tmp_path):
    log: Any = make_shared()
    if isinstance(log, SQLiteLog):
        log = SQLiteLog(tmp_path / "small", max_entries=10)
    else:
        log = RedisLog(log._url, secret=SECRET, stream=f"{tmp_path.name} small", max_entries=10)
    log.append(entries(range(2)))
    behind = log.read("", 10).position
    for _ in range(400):
        log.append([b"x"] * 2)
    read = log.read(behind, 10_000)
    assert read.has_gap
    assert len(read.entries) < (11 if isinstance(log, SQLiteLog) else 500)
    assert log.read(read.position, 10) == (read.position, [], False)


def test_a_planner_says_once_that_it_is_behind(caplog, tmp_path):
    log = SQLiteLog(tmp_path / "log")
    one, other = sharing(log)
    one.plan(asked("abc"))
    caught_up(one, other)
    for path in tmp_path.glob("log*"):
        if path.suffix != ".key":
            path.unlink()
    one.plan(asked("xyz"))
    caught_up(one, other)
    assert order(other.plan(asked("zyx"))) == "xyz"
    assert order(other.plan(asked("cba"))) == "abc"
    assert (other.sharing.gaps, other.sharing.faults) == (1, 0)
    said = [one for one in caplog.records if "emptied or replaced" in one.getMessage()]
    assert len(said) == 2, "each planner says it once"


def test_entries_that_come_again_behind_a_gap_are_not_doubled():
    """As when a server is replaced by a replica that had not got the last ones."""
    log = MemoryLog()
    one, other = sharing(log)
    for letters in ("abc", "bca", "cab"):
        one.plan(asked(letters))
    caught_up(one, other)
    tokens = other.statistics()
    read, entries = log.read, list(log.entries)
    log.entries[:] = [entries[0]]
    log.read = lambda position, most: (
        read("", most)._replace(has_gap=True) if int(position or 0) > len(log.entries)
        else read(position, most)
    )  # fmt: skip
    caught_up(other)
    assert other.sharing == SharingStatistics(taken_in=3, gaps=1)
    assert other.statistics() == tokens
    one.plan(asked("xyz"))
    caught_up(one, other)
    assert other.sharing.taken_in == 4


def test_a_log_that_can_only_be_read_is_read(make):
    log = make()
    one, other = sharing(log, 1)[0], None
    one.plan(asked("abc"))
    caught_up(one)
    log = make()
    other = ReusePlanner(shared_log=log)

    def refuse(written: object) -> None:
        raise OSError("the disk is full")

    log.append = refuse
    other.plan(asked("xyz"))
    assert not other.catch_up(0.3)
    assert order(other.plan(asked("cab"))) == "abc"
    assert other.sharing.taken_in == 1
    assert other.sharing.untold == 2


def test_garbage_of_any_size_is_logged_once(caplog):
    log = MemoryLog()
    log.entries += [bytes(size) for size in range(50)]
    log.entries.append(b"\x09" + encode(bytes(8), 1, LostEntry(bytes(16), bytes(16).hex(), 0))[1:])
    [planner] = sharing(log, 1)
    caught_up(planner)
    assert planner.sharing.unreadable == 51
    # a planner of a test before may end meanwhile
    assert len([one for one in caplog.records if "left out" in one.getMessage()]) == 1
