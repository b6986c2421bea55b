"""What is sent to engines, in which order, and what emulated engines say to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import CapacityTracker
from ctxreuse.serving import (
    Completion,
    EmulatedEngine,
    EngineClient,
    Outcome,
    ToolCall,
    dispatch,
)
from golden_cases.engines import pool_of
from golden_cases.planning import block, requests
from golden_cases.recording import Cases, digest

CASES = Cases()


class NotingTransport(httpx.AsyncBaseTransport):
    """Hands requests on to an emulated engine, and notes them."""

    def __init__(self, engine: EmulatedEngine) -> None:
        self.sent: list[Any] = []
        self._inner = engine.transport(httpx)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Hand a request on."""
        body = await request.aread()
        noted = [request.method, request.url.path, _sorted(json.loads(body)) if body else None]
        session = request.headers.get("X-Session-ID")
        self.sent.append(noted if session is None else [*noted, session])
        response: httpx.Response = await self._inner.handle_async_request(request)
        return response


def _sorted(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body in an order that is not the client library's."""
    return dict(sorted(body.items()))


def _last(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"]).rsplit("\n\n", 1)[-1]


def _answer(body: dict[str, Any]) -> str:
    return f"Said to {_last(body)}"


def _client(engine: EmulatedEngine, noting: NotingTransport | None = None, **options: Any) -> Any:
    transport = NotingTransport(engine) if noting is None else noting
    http = httpx.AsyncClient(transport=transport)
    return EngineClient("http://engine", http_client=http, backoff_s=0, **options)


def _completion(completion: Completion | None) -> Any:
    """Return what does not depend on how fast the machine is."""
    if completion is None:
        return None
    said = asdict(completion)
    return {name: one for name, one in said.items() if not name.endswith("_s")}


@CASES
def client_requests() -> Any:
    """Everything that goes over the wire, headers for routers included."""
    engine = EmulatedEngine(answer=_answer)
    noting = NotingTransport(engine)
    planner = ReusePlanner()

    async def main() -> list[Any]:
        told = []
        plain = _client(engine, noting, planner=planner)
        marked = _client(
            engine,
            noting,
            model="emulated",
            cache_salt="tenant",
            session_id="conversation",
            salt_key="secret",
        )
        for number, fields in enumerate(
            ({}, {"tenant": "one", "conversation_id": "c"}, {"conversation_id": 3, "system": "Hm."})
        ):
            request = ContextRequest([block(1), block(2 + number)], f"q{number}", **fields)
            told.append(await plain.complete(planner.plan(request), max_tokens=5))
            told.append(await marked.complete(planner.plan(request), temperature=0))
        messages = [{"role": "user", "content": "Which?"}]
        told.append(await marked.complete(messages, cache_salt="a salt", session_id="a session"))
        told.append(
            await plain.complete(
                messages, extra_body={"top_k": 1, "return_token_ids": True}, stop=["."]
            )
        )
        async with plain.stream(planner.plan(requests(1, seed=30)[0]), max_tokens=3) as stream:
            pieces = [piece async for piece in stream]
        told.append(stream.completion)
        sizes = [len(await plain.tokenize(messages)), await plain.context_window()]
        return [*map(_completion, told), pieces, sizes, asdict(await plain.metrics())]

    return {"answers": asyncio.run(main()), "sent": noting.sent}


@CASES
def client_failures() -> Any:
    """What is sent again, and what the planner hears of requests that failed."""
    engine = EmulatedEngine(answer=_answer, fail=[500, "refuse", None, "break", None, 400, 503])
    planner = ReusePlanner()

    async def main() -> list[Any]:
        client = _client(engine, model="emulated", planner=planner, retries=2)
        told: list[Any] = []
        for request in requests(5, seed=31):
            try:
                told.append(_completion(await client.complete(planner.plan(request))))
            except Exception as error:
                told.append(type(error).__name__)
            told.append(dict(zip(("nodes", "tokens", "requests"), _size(planner), strict=True)))
        return told

    return {"told": asyncio.run(main()), "sent": [_last(body) for body in engine.requests]}


@CASES
def shadow_cache() -> Any:
    """An index that is kept to what the engine has room for."""
    engine = EmulatedEngine(answer=_answer, capacity_tokens=1_600)
    planner = ReusePlanner()

    async def main() -> list[Any]:
        client = _client(engine, model="emulated", planner=planner)
        shadow = CapacityTracker.from_metrics(planner, engine.metrics())
        told = []
        for request in requests(30, seed=32):
            completion = await client.complete(planner.plan(request))
            told.append([completion.cached_tokens, *_size(planner)])
        return [shadow.capacity_tokens, *told]

    return asyncio.run(main())


def _dispatched(plans: Any, engine: EmulatedEngine, **options: Any) -> list[Outcome]:
    async def main() -> list[Outcome]:
        return await dispatch(_client(engine, model="emulated", retries=0), plans, **options)

    return asyncio.run(main())


def _outcomes(outcomes: Sequence[Outcome]) -> list[Any]:
    return [
        [one.plan.request_id, one.completion and one.completion.text, type(one.error).__name__]
        for one in outcomes
    ]


@CASES
def dispatched() -> Any:
    """Batches, one at a time and several, with and without leaders that go first."""
    made = requests(24, seed=33)
    made += [
        ContextRequest([block(n), block(n + 1)], f"turn {n}", conversation_id="c", system="Hm.")
        for n in range(3)
    ]
    found: dict[str, Any] = {}
    for name, concurrency, leader_first in (
        ("one at a time", 1, False),
        ("several", 5, False),
        ("several, leaders first", 5, True),
    ):
        batch = ReusePlanner().plan_batch(made)
        engine = EmulatedEngine(answer=_answer)
        heard: list[Any] = []
        outcomes = _dispatched(
            batch,
            engine,
            concurrency=concurrency,
            leader_first=leader_first,
            progress=lambda *ended, heard=heard: heard.append(ended),
            max_tokens=4,
        )
        sent = [[_last(body), digest(_sorted(body))] for body in engine.requests]
        found[name] = {
            "sent": sent if concurrency == 1 else sorted(sent),
            "outcomes": digest(_outcomes(outcomes)),
            "progress": digest(heard),
            "prompt_tokens": engine.usage.prompt_tokens,
        }
        if concurrency == 1:
            found[name] |= {
                "cached_tokens": engine.usage.cached_tokens,
                "completions": [_completion(one.completion) for one in outcomes[:2]],
                "all outcomes": _outcomes(outcomes),
            }
    planner = ReusePlanner()
    failing = EmulatedEngine(answer=_answer, fail=[None, 400, None, "break", 500])
    plans = [planner.plan(request) for request in made[:6]]
    found["failures"] = _outcomes(_dispatched(plans, failing, concurrency=1))
    return found


class Waves:
    """Answers of an engine that are held back until no more requests come."""

    def __init__(self) -> None:
        self.waves: list[list[str]] = []
        self._arrived: list[str] = []
        self._released = asyncio.Event()

    async def answer(self, body: dict[str, Any]) -> str:
        """Answer when the wave that the request is part of is complete."""
        released = self._released
        self._arrived.append(_last(body))
        await released.wait()
        return "OK."

    async def let_go(self, total: int) -> None:
        """Answer wave after wave, until all requests have come."""
        while sum(map(len, self.waves)) < total:
            seen = -1
            while seen != len(self._arrived) or not seen:
                seen = len(self._arrived)
                for _ in range(500):  # rounds of the event loop, not seconds: machines differ
                    await asyncio.sleep(0)
            self.waves.append(sorted(self._arrived))
            self._arrived = []
            released, self._released = self._released, asyncio.Event()
            released.set()


@CASES.takes_long
def leaders() -> Any:
    """Followers wait for the first token of the request that they share most with."""
    made = requests(14, seed=36, size=4, system="Be brief.") + requests(10, seed=37, size=4)
    made += [ContextRequest([block(n)], f"turn {n}", conversation_id="c") for n in range(3)]

    async def main(leader_first: bool, concurrency: int) -> list[Any]:
        waves = Waves()
        client = _client(EmulatedEngine(answer=waves.answer), model="emulated")
        await client.context_window()  # a client's first call asks a thread for the platform
        batch = ReusePlanner().plan_batch(made)
        sending = dispatch(client, batch, concurrency=concurrency, leader_first=leader_first)
        await asyncio.gather(sending, waves.let_go(len(made)))
        return waves.waves

    return {
        "all": asyncio.run(main(True, 99)),
        "some": asyncio.run(main(True, 6)),
        "in order": asyncio.run(main(False, 6)),
    }


@CASES
def pool() -> Any:
    """Where requests go, one after the other, and in which order those that wait are sent."""

    async def one_by_one(strategy: Any) -> list[Any]:
        engines = [EmulatedEngine(answer=_answer, capacity_tokens=4_000) for _ in range(3)]
        async with pool_of(*engines, strategy=strategy) as engine_pool:
            told = []
            for request in requests(24, seed=34):
                routed = engine_pool.route(request)
                served = await engine_pool.complete(request, max_tokens=3)
                told.append([routed, served.replica, _last({"messages": served.plan.messages()})])
                told[-1] += [digest(served.plan.messages()), served.completion.cached_tokens]
            return told

    async def plans_and_turns() -> list[Any]:
        engines = [EmulatedEngine(answer=_answer) for _ in range(3)]
        planner = ReusePlanner()
        told: list[Any] = []
        histories: dict[int, list[dict[str, Any]]] = {}
        async with pool_of(*engines) as engine_pool:
            for number, request in enumerate(requests(24, seed=38)):
                if number % 2:
                    prompt: Any = planner.plan(request)
                else:
                    name = number % 6
                    prompt = ContextRequest(
                        request.blocks,
                        "And?",
                        history=histories.get(name, []),
                        conversation_id=name,
                    )
                routed = engine_pool.route(prompt)
                served = await engine_pool.complete(prompt, max_tokens=3)
                sent = served.plan.messages()
                told.append([routed, served.replica, digest(sent), served.completion.cached_tokens])
                if not number % 2:
                    answer = {"role": "assistant", "content": served.completion.text}
                    histories[name] = [*sent, answer]
        return told

    async def slow_at_first(body: dict[str, Any]) -> str:
        if len(engine.requests) == 1:  # until all others wait, and have waited long enough
            await asyncio.sleep(0.4)
        return _answer(body)

    engine = EmulatedEngine(answer=slow_at_first)

    async def together() -> list[str]:
        made: list[Any] = requests(20, seed=35)
        made += [ContextRequest([], f"no blocks {n}?") for n in range(5)]
        async with pool_of(engine, concurrency=1, window_s=0.1) as engine_pool:
            served = await asyncio.gather(*map(engine_pool.complete, made))
        assert [one.completion.text for one in served] == [f"Said to {one.query}" for one in made]
        return [f"{_last(body)} {digest(body['messages'])}" for body in engine.requests]

    ways = ("reuse", "paper", "none")
    return {
        "one by one": {way: asyncio.run(one_by_one(way)) for way in ways},
        "plans and turns": asyncio.run(plans_and_turns()),
        "together": asyncio.run(together()),
    }


@CASES
def emulated_replies() -> Any:
    """The bytes that an emulated engine answers."""
    call = ToolCall("look", '{"where": "here"}', "call-1")
    engine = EmulatedEngine(
        block_size=4,
        capacity_tokens=256,
        answer=lambda body: call if body.get("tools") else "It says this. And that.",
        max_model_len=60,
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which one?"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 3, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": chat, "stream": True, "cache_salt": "s"}),
        (
            "/v1/chat/completions",
            {"messages": chat, "stream": True, "stream_options": {"include_usage": True}},
        ),
        ("/v1/chat/completions", {"messages": chat, "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"messages": "none"}),
        ("/v1/completions", {"prompt": "One and two"}),
        ("/v1/completions", {"prompt": "One and two", "stream": True, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "long " * 99}]}),
        ("/tokenize", {"messages": chat}),
        ("/nowhere", {}),
    ]
    told: list[Any] = []
    with httpx.Client(transport=engine.transport(httpx), base_url="http://engine") as client:
        for path, body in bodies:
            reply = client.post(path, json=body)
            told.append([path, reply.status_code, reply.text])
        replies = {path: client.get(path) for path in ("/v1/models", "/metrics", "/health")}
        told += [[path, reply.status_code, reply.text] for path, reply in replies.items()]
    return told


def _size(planner: ReusePlanner) -> tuple[int, int, int]:
    size = planner.statistics()
    return size.nodes, size.tokens, size.requests
