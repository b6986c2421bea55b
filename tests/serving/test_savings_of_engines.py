"""What `planner.savings` says where answers come through a client or a pool of engines."""

import httpx
import pytest
from client_helpers import MESSAGES, connected, planned
from pool_helpers import Network, asking, pool_on

from ctxreuse import ReusePlanner
from ctxreuse.planning.savings import ReportedUsage
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

TEXT = "Paris is in France. " * 40


def reported(engine, planner):
    found = planner.savings.reported
    usage = engine.usage
    assert (found.prompt_tokens, found.cached_tokens) == (usage.prompt_tokens, usage.cached_tokens)
    return found


async def test_a_client_tells_its_planner_what_answers_report():
    engine, planner = EmulatedEngine(block_size=4), ReusePlanner()
    async with connected(engine, planner=planner) as client:
        for _ in range(2):
            await client.complete(planned(planner, TEXT))
        async with client.stream(planned(planner, TEXT)) as stream:
            _ = [piece async for piece in stream]
        await client.complete(MESSAGES)
    found = reported(engine, planner)
    assert found.answers == 4
    assert found.cached_tokens > found.expected_cached_tokens > 0


async def test_a_pool_counts_for_each_engine_once_and_not_what_fails():
    network = Network(a=EmulatedEngine(block_size=4), b=EmulatedEngine(block_size=4))
    async with pool_on(network) as pool:
        for names in ("xyz", "zyx", "pqr", "rqp"):
            await pool.complete(asking(names))
        planners = pool.planners
    assert list(planners) == list(pool.names)
    for name, engine in network.engines.items():
        found = reported(engine, planners[f"{name}"])
        assert found.answers == len(engine.requests)

    engine, planner = EmulatedEngine(fail=[400]), ReusePlanner()
    async with connected(engine, planner=planner) as client:
        with pytest.raises(Exception, match="400"):
            await client.complete(planned(planner, TEXT))
    assert planner.savings.reported == ReportedUsage()


async def test_a_pool_counts_for_clients_of_the_users_own():
    engine = EmulatedEngine(block_size=4)

    def connect():
        return EngineClient("http://a", http_client=httpx.AsyncClient(transport=engine.transport()))

    async with EnginePool({"a": connect}, window_s=0) as pool:
        for names in ("xyz", "zyx"):
            await pool.complete(asking(names))
    assert reported(engine, pool.planners["a"]).answers == 2
    assert pool.planners["a"].savings.requests == 2
