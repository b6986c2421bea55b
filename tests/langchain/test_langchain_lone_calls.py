"""Single calls that run at the same time in front of hosted caches: the first of them leads."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from langchain_anthropic import ChatAnthropic
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

WINDOW_S = 0.2  # wide, so that all come in it on a busy machine


@pytest.fixture
def server() -> Iterator[CachingServer]:
    with caching_server("anthropic") as server:
        yield server


def wrapped(server: CachingServer, cache: str = "anthropic", **settings: Any) -> ReuseChatModel:
    inner = ChatAnthropic(model="m", base_url=server.url, api_key="k", max_retries=0, max_tokens=9)
    planner = ReusePlanner(cache=cache, token_counter=count_tokens)
    return ReuseChatModel(inner=inner, planner=planner, **{"window_s": WINDOW_S, **settings})


def prompts(number: int = 4) -> list[list[BaseMessage]]:
    found = [Document(id=one, page_content=f"{one} " * 700) for one in ("a", "b")]
    return [[HumanMessage(f"{format_context(found)}\n\nQuestion {n}?")] for n in range(number)]


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
    everybody = threading.Barrier(4)
    server.before_first_token = lambda: everybody.wait(60)
    model = wrapped(server, **settings)
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(model.invoke, prompts()))) == 4


def test_what_is_written_already_makes_nobody_wait(server):
    model = wrapped(server, window_s=0.01)
    for one in prompts(3):
        model.invoke(one)
    everybody = threading.Barrier(4)
    server.before_first_token = lambda: everybody.wait(60)
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(model.invoke, prompts()))) == 4
    assert unread(server) == 2


async def test_chains_whose_retriever_has_planned_wait_too(server):
    server.let_all_come()
    model = wrapped(server)
    found = [Document(id=one, page_content=f"{one} " * 700) for one in ("a", "b")]
    lookup = RunnableLambda(lambda query: found)
    retriever = ReuseRetriever(retriever=lookup, planner=model.planner)
    ask = RunnableLambda(lambda context: [HumanMessage(f"{context}\n\nWhich?")])
    chain = retriever | format_context | ask | model
    await chain.ainvoke("first")
    server.usages.clear()
    await asyncio.gather(*(chain.ainvoke(f"question {n}") for n in range(4)))
    assert unread(server) == 1
