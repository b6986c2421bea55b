"""Single calls that run at the same time in front of hosted caches: the first of them leads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from caching_server import CachingServer
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_hosted import found
from langchain_hosted import wrapped as wrapped_at

from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

WINDOW_S = 0.2  # wide, so that all come in it on a busy machine


def wrapped(server: CachingServer, **settings: Any) -> ReuseChatModel:
    return wrapped_at(server, **{"window_s": WINDOW_S, **settings})


def prompts(number: int = 4) -> list[list[BaseMessage]]:
    context = format_context(found("a b"))
    return [[HumanMessage(f"{context}\n\nQuestion {n}?")] for n in range(number)]


def ask_in_threads(model: ReuseChatModel) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(model.invoke, prompts()))) == 4


def have_all_meet(server: CachingServer) -> None:
    """Have no call answered before four have come."""
    everybody = threading.Barrier(4)
    server.before_first_token = lambda: everybody.wait(60)


def unread(server: CachingServer) -> int:
    return sum(usage.read == 0 for usage in server.usages)


@pytest.mark.parametrize("in_threads", [False, True])
async def test_calls_wait_for_the_one_that_writes_what_they_read(server, in_threads):
    server.let_all_come()
    model = wrapped(server)
    ask: Any = partial(asyncio.to_thread, model.invoke) if in_threads else model.ainvoke
    await asyncio.gather(*map(ask, prompts()))
    assert (unread(server), len(server.usages)) == (1, 4)


async def test_a_leader_that_fails_lets_its_followers_go(server):
    fails = [True]

    def fail() -> None:
        if fails.pop() if fails else False:
            raise ConnectionError

    server.before_first_token = fail
    model = wrapped(server)
    answers = await asyncio.gather(*map(model.ainvoke, prompts()), return_exceptions=True)
    assert sum(isinstance(one, Exception) for one in answers) == 1
    assert len(server.usages) == 3


async def test_a_leader_that_is_cancelled_lets_its_followers_go(server):
    arrived, go_on = threading.Event(), threading.Event()
    holds = [True]

    def hold() -> None:
        if holds.pop() if holds else False:
            arrived.set()
            go_on.wait()

    server.before_first_token = hold
    model = wrapped(server)
    tasks = [asyncio.create_task(model.ainvoke(one)) for one in prompts()]
    await asyncio.to_thread(arrived.wait)
    tasks[0].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    go_on.set()
    assert sum(isinstance(one, BaseException) for one in answers) == 1


async def test_a_stream_leads_until_its_first_token(server):
    model = wrapped(server)
    first, *rest = prompts()
    held: list[Any] = []

    async def stream() -> None:
        pieces = model.astream(first)
        held.append(await anext(pieces))
        await asyncio.gather(*others)
        held.extend([piece async for piece in pieces])

    others = [asyncio.create_task(model.ainvoke(one)) for one in rest]
    leader = asyncio.create_task(stream())
    others.insert(0, asyncio.create_task(asyncio.sleep(0)))
    await leader
    assert unread(server) == 1


@pytest.mark.parametrize("settings", [{"window_s": 0}, {"cache": "vllm"}])
def test_without_a_window_or_for_the_default_cache_nobody_waits(server, settings):
    have_all_meet(server)
    ask_in_threads(wrapped(server, **settings))


def test_what_is_written_already_makes_nobody_wait(server):
    model = wrapped(server, window_s=0.01)
    for one in prompts(3):
        model.invoke(one)
    have_all_meet(server)
    ask_in_threads(model)
    assert unread(server) == 2


async def test_chains_whose_retriever_has_planned_wait_too(server):
    server.let_all_come()
    model = wrapped(server)
    lookup = RunnableLambda(lambda query: found("a b"))
    retriever = ReuseRetriever(retriever=lookup, planner=model.planner)
    ask = RunnableLambda(lambda context: [HumanMessage(f"{context}\n\nWhich?")])
    chain = retriever | format_context | ask | model
    await chain.ainvoke("first")
    server.usages.clear()
    await asyncio.gather(*(chain.ainvoke(f"question {n}") for n in range(4)))
    assert unread(server) == 1
