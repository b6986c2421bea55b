"""Pools of several processes that share a log place documents alike."""

import asyncio
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from pool_helpers import Network, asking, index_tokens, pool_on
from shared_logs import MemoryLog

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EmulatedEngine, EnginePool
from ctxreuse.sharing import SharedLogs, SQLiteLog

ENGINES = "abcd"
FIRST = "ijklmnopqr"


class MemoryLogs(MemoryLog):
    def __init__(self) -> None:
        super().__init__()
        self._logs: dict[str, MemoryLog] = {}

    def of_engine(self, name: str) -> MemoryLog:
        return self._logs.setdefault(name, MemoryLog())


def network() -> Network:
    return Network(**{name: EmulatedEngine() for name in ENGINES})


def pools(number: int, log: Any) -> list[EnginePool]:
    engines = network()
    return [pool_on(engines, planner=ReusePlanner(shared_log=log)) for _ in range(number)]


async def caught_up(*all_pools: EnginePool) -> None:
    for _ in range(2):  # one may tell while another one reads
        for pool in all_pools:
            assert await pool.catch_up()


@pytest.mark.parametrize("shares", [True, False])
async def test_a_request_goes_where_another_pool_has_sent_its_documents(tmp_path, shares):
    log = SQLiteLog(tmp_path / "sent.sqlite") if shares else None
    one, other = pools(2, log)
    async with one, other:
        where = (await one.complete(asking("xyz"))).replica
        await caught_up(one, other)
        routes = {other.route(asking(f"{first}zxy")) for first in FIRST}
    assert routes == {where} if shares else len(routes) > 1


async def test_each_engine_has_a_log_of_its_own_also_one_that_is_added():
    one, other = pools(2, MemoryLogs())
    async with one, other:
        for first in FIRST:
            await one.complete(asking(f"{first}xyz"))
        await caught_up(one, other)
        assert index_tokens(one) == index_tokens(other)
        assert sum(replica.sharing.told for replica in one.statistics()) == len(FIRST)
        assert sum(replica.sharing.taken_in for replica in other.statistics()) == len(FIRST)

    one, other = pools(2, MemoryLogs())
    async with one, other:
        for pool in (one, other):
            assert pool.add("http://late") == "late"
        one._replicas["late"].planner.plan(asking("xyz"))
        await caught_up(one, other)
        assert other.route(asking("xyz")) == "late"


async def test_orders_and_places_are_those_of_one_pool_for_all():
    requests = [asking(names) for names in ("abc", "cab", "bxa", "axb", "xyz", "zxb", "yxz")]
    [alone] = pools(1, None)
    sharing = pools(3, MemoryLogs())
    async with alone, sharing[0], sharing[1], sharing[2]:
        for number, request in enumerate(requests):
            ours = await sharing[number % 3].complete(request)
            theirs = await alone.complete(request)
            assert (ours.replica, ours.plan.messages()) == (theirs.replica, theirs.plan.messages())
            assert ours.completion.cached_tokens == theirs.completion.cached_tokens
            await caught_up(*sharing)


async def test_what_failed_at_an_engine_is_expected_there_by_no_pool():
    engines = network()
    options = {"planner": ReusePlanner(shared_log=MemoryLogs()), "attempts": 2}
    one, other = pool_on(engines, **options), pool_on(engines, **options)
    async with one, other:
        down = one.route(asking("xyz"))
        engines.down.add(down)
        served = await one.complete(asking("xyz"))
        await caught_up(one, other)
        assert served.replica != down
        assert [name for name, tokens in index_tokens(other).items() if tokens] == [served.replica]


def _process(folder: str, names: str, answers: Any) -> None:
    async def work() -> list[str]:
        [pool] = pools(1, SQLiteLog(Path(folder) / "sent.sqlite"))
        async with pool:
            assert await pool.catch_up(20)
            served = [(await pool.complete(asking(one))).replica for one in names.split()]
            assert await pool.catch_up(20)
            return served

    answers.send(asyncio.run(work()))


@pytest.mark.slow
def test_processes_that_come_and_go_send_the_same_documents_to_the_same_engine(tmp_path):
    context = get_context("spawn")
    routes = []
    for names in ("xyz uvw rst", "zxy wuv tsr", "ayzx bwvu ctrs"):
        ours, theirs = context.Pipe()
        process = context.Process(target=_process, args=(str(tmp_path), names, theirs))
        process.start()
        routes.append(ours.recv())
        process.join(60)
        assert process.exitcode == 0
    assert routes[0] == routes[1] == routes[2]


async def test_logs_are_one_for_each_engine_or_none():
    with pytest.raises(InvalidRequestError, match=r"of_engine\(name\).*several engines"):
        pools(1, MemoryLog())
    assert not isinstance(MemoryLog(), SharedLogs)
    with pytest.raises(InvalidRequestError, match="engine must be"):
        ReusePlanner(shared_log=MemoryLogs()).sibling(3)

    [pool] = pools(1, None)
    async with pool:
        assert await pool.catch_up()
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            await pool.catch_up(-1)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("127.0.0.1_8000", "sent-127.0.0.1_8000.sqlite"),
        ("a", "sent-a.sqlite"),
        ("127.0.0.1:8000", "sent-127.0.0.1_8000-*.sqlite"),
        ("../../etc", "sent-.._.._etc-*.sqlite"),
        ("x" * 300, "sent-xxx*.sqlite"),
        ("\ud800\0", "sent-__-*.sqlite"),
    ],
    ids=range(6),
)
def test_the_file_of_an_engine_stands_beside_the_others(tmp_path, name, file):
    log = SQLiteLog(tmp_path / "sent.sqlite", max_entries=7)
    log.of_engine(name).append([b"one"])
    assert list(tmp_path.glob(file))
    assert log.of_engine(name).read("", 1).entries == [b"one"]
    assert log.of_engine(f"{name} ").read("", 1).entries == []
