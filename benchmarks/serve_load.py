"""`ctxreuse serve` under load, over loopback: nothing lost, doubled, crossed, stuck; memory flat.

Clients send `--requests`, 64 at a time, for tenants whose conversations have the same names:
streams, whole answers, streams that are left early, and malformed bodies. The engines are emulated
processes, which break answers off, refuse, and are killed in turn. The model says which request it
reads, of which tenant, under which salt.

`--cost` sends requests of public traces, in turn, through the server and through a pass-through of
the same starlette and httpx, and plans them: printed is the processor time of each. Then they go
through the command with one worker, and with two that share a log: printed is the share of prompt
tokens that the engine had cached.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cli.serve_command import ServeCommand
from ctxreuse.serving import EmulatedEngine
from ctxreuse.serving.door.app import make_app
from shared import data_folder, new_parser, read_named_trace
from workers import TRACES

CHAT, TENANTS, AT_A_TIME, ENGINES, STUCK_S = "/v1/chat/completions", 8, 64, 3, 60.0
JSON = {"content-type": "application/json"}
FAILURES = {7: 500, 31: "break", 53: 429, 83: "refuse"}
SAID = re.compile(r"r(\d+) of (\S*) under (\S*)")
WRONG = (None, 0, -1.5, [], {}, [[]], [None], {"x": []}, "\ud800")


def serve_engine(port: int, log: str) -> None:
    """Serve an emulated engine until the process is killed; a log says whom it has answered."""

    async def say(body: dict[str, Any]) -> AsyncIterator[str]:
        text = json.dumps(body["messages"])
        tenants = ",".join(sorted(set(re.findall(r"(t\d+) document", text))))
        number = (re.findall(r"r\d+", text) or ["r0"])[-1]
        yield f"{number} of {tenants} "
        await asyncio.sleep(0.002)
        yield f"under {body.get('cache_salt')}"
        with open(log, "a") as file:
            file.write(f"{number}\n")

    def failing(number: int, body: object) -> Any:
        return FAILURES.get(number % 101)

    engine = EmulatedEngine(answer=say, fail=failing) if log else EmulatedEngine()
    transport = engine.transport(httpx)

    async def answer(request: Request) -> StreamingResponse:
        asked = httpx.Request(request.method, str(request.url), content=await request.body())
        try:
            reply = await transport.handle_async_request(asked)
        except httpx.TransportError:
            return StreamingResponse(iter([b"refused"]), 503)
        return StreamingResponse(reply.aiter_bytes(), reply.status_code, dict(reply.headers))

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    uvicorn.run(app, port=port, log_level="critical")


@contextmanager
def processes(engines: int, *options: str, fails: bool = False) -> Iterator[Any]:
    """Run the command before engines; yield its pid, all addresses, the logs, and what kills."""
    with ExitStack() as within:
        folder = Path(within.enter_context(TemporaryDirectory()))
        ports, logs = [], [folder / f"{n}.log" for n in range(engines)]
        for _ in logs:
            with socket.create_server(("127.0.0.1", 0)) as free:
                ports.append(str(free.getsockname()[1]))

        def start(n: int) -> Popen[bytes]:
            return Popen([sys.executable, __file__, "--engine", ports[n], str(logs[n]) * fails])

        async def kill(n: int) -> None:
            running[n].kill()
            await asyncio.sleep(1.0)
            running[n] = start(n)

        running = [start(n) for n in range(engines)]
        within.callback(lambda: [one.kill() for one in running])
        time.sleep(5.0)
        addresses = [f"http://127.0.0.1:{port}" for port in ports]
        named = [f"--engine={one}" for one in addresses]
        command = [sys.executable, "-m", "ctxreuse", "serve", "--port=0", *named, *options]
        serving = Popen(command, stdout=PIPE, text=True)
        within.callback(serving.wait)
        within.callback(serving.terminate)
        assert serving.stdout is not None
        yield serving.pid, serving.stdout.readline().split()[-1], addresses, logs, kill


class Load:
    """Sends requests, and counts what became of them."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client, self.random = client, random.Random(1)
        self.outcomes: Counter[str] = Counter()
        self.salts: dict[str, set[str]] = {}

    async def send(self, number: int) -> None:
        """Send a request; what became of it is counted."""
        tenant, kind, outcome = f"t{number % TENANTS}", self.random.random(), ""
        texts = [self.random.randrange(60) for _ in range(5)]
        shown = [{"id": n, "text": f"{tenant} document {n}: " + f"w{n} " * 60} for n in texts]
        asked = [{"role": "user", "content": f"Which, r{number}?"}]
        body = {"model": "emulated", "messages": asked, "documents": shown, "stream": kind < 0.55}
        body |= {"conversation": f"c{number % 50}"} if number % 10 == 0 else {}
        raw = json.dumps(body).encode()
        at = self.random.randrange(len(raw))
        if 0.90 < kind < 0.93:
            raw = raw[:at]
        elif 0.93 < kind < 0.96:
            raw = raw[:at] + self.random.randbytes(8) + raw[at:]
        elif kind > 0.96:
            name = self.random.choice([*body, "conversation", "ctxreuse", "tools"])
            raw = json.dumps({**body, name: self.random.choice(WRONG)}).encode()
        stream = self.client.stream("POST", CHAT, content=raw, headers={"x-tenant": tenant, **JSON})
        try:
            async with asyncio.timeout(kind if kind < 0.05 else STUCK_S), stream as answer:
                text = (await answer.aread()).decode()
        except TimeoutError:
            outcome = "left early" if kind < 0.05 else "stuck"
        except httpx.HTTPError as error:
            outcome = (
                "broken off by an engine" if "incomplete" in str(error) else f"lost: {error!r}"
            )
        if not outcome and kind > 0.9:
            outcome = "malformed: " + ("2xx to 4xx" if answer.status_code < 500 else "5xx")
        self.outcomes[outcome or self._judged(f"{number}", tenant, answer.status_code, text)] += 1

    def _judged(self, number: str, tenant: str, status: int, text: str) -> str:
        if status != 200:
            return f"error {status}" if status in (429, 500, 502, 503) else f"lost: {status}"
        said = SAID.search("".join(re.findall(r'"content": ?"([^"]*)"', text)))
        if said is None:
            return f"lost: {text}" if "[DONE]" in text else "broken off by an engine"
        self.salts.setdefault(tenant, set()).add(said[3])
        return "answered" if said.groups()[:2] == (number, tenant) else f"crossed: {text}"


async def load(requests: int, seconds: float, serving: Any) -> None:
    """Send the requests, and print what became of them."""
    (pid, url, _, logs, kill), began, deaths = serving, time.monotonic(), 0
    client = httpx.AsyncClient(base_url=url, timeout=STUCK_S, trust_env=False)
    sender, numbers, memory = Load(client), iter(range(1, requests + 1)), dict[int, str]()

    async def work() -> None:
        for number in numbers:
            if time.monotonic() - began > seconds:
                return
            if number % 5_000 == 0:
                memory[number] = re.findall(r"VmRSS:\s+(\d+)", status.read_text())[0]
            await sender.send(number)

    status = Path(f"/proc/{pid}/status")
    async with client:
        work_done = asyncio.gather(*(work() for _ in range(AT_A_TIME)))
        while not (await asyncio.wait([work_done], timeout=15.0))[0]:
            await kill(deaths % ENGINES)
            deaths += 1
        await work_done
    answered = Counter(line for log in logs if log.exists() for line in log.read_text().split())
    seconds = time.monotonic() - began
    print(f"{sender.outcomes.total():,} requests, {seconds:.0f} s, {deaths} deaths")
    print("\n".join(f"  {one}: {count:,}" for one, count in sender.outcomes.most_common()))
    twice = sum(count > 1 for one, count in answered.items() if one != "r0")
    print(f"answered by engines twice, to the end: {twice}")
    salts = [one for own in sender.salts.values() for one in own]
    print(f"salts of {TENANTS} tenants: {len(salts)}, different: {len(set(salts))}")
    print("kB of memory: " + ", ".join(f"{kb} at {at:,}" for at, kb in memory.items()))


def body_of(one: Any) -> bytes:
    """Return a trace's request as a client sends it."""
    documents = [{"id": str(block.id), "text": block.text} for block in one.blocks]
    messages = [{"role": "user", "content": one.query}]
    return json.dumps({"model": "emulated", "messages": messages, "documents": documents}).encode()


async def cost(requests: Sequence[Any], url: str) -> list[list[float]]:
    """Return the milliseconds of each request: passed through, served, and planned alone."""
    http, planner = httpx.AsyncClient(timeout=60, trust_env=False), ReusePlanner()

    async def chat(request: Request) -> StreamingResponse:
        asked = http.build_request("POST", url + CHAT, json=await request.json())
        answer = await http.send(asked, stream=True)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, dict(answer.headers))

    door: Any = make_app(ReusePlanner(), ServeCommand(engines=(url,)))
    apps = (Starlette(routes=[Route(CHAT, chat, methods=["POST"])]), door)
    clients = [
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door", headers=JSON)
        for app in apps
    ]
    spent: list[list[float]] = []
    async with door.router.lifespan_context(door):
        for one in requests:
            at = [time.process_time()]
            for client in clients:
                assert (await client.post(CHAT, content=body_of(one))).status_code == 200
                at.append(time.process_time())
            planner.plan(ContextRequest(one.blocks, one.query))
            at.append(time.process_time())
            spent.append([1e3 * (end - begin) for begin, end in pairwise(at)])
    return spent


async def hits(requests: Sequence[Any], rate: float, url: str) -> float:
    """Return the share of prompt tokens that the engine had cached."""
    await asyncio.sleep(4.0)  # until all workers are there
    began = time.monotonic()

    async def send(number: int, one: Any) -> tuple[int, int]:
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        # any worker takes it
        async with httpx.AsyncClient(timeout=60, trust_env=False, headers=JSON) as client:
            usage = (await client.post(url + CHAT, content=body_of(one))).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    told = await asyncio.gather(*(send(number, one) for number, one in enumerate(requests)))
    return sum(cached for cached, _ in told) / sum(prompt for _, prompt in told)


def print_cost(name: str, requests: Sequence[Any], rate: float) -> None:
    """Print what the server adds to a trace's requests, and what two workers reach."""
    hit = []
    for workers in (1, 2):
        with processes(1, f"--workers={workers}") as (_, url, engines, _, _):
            hit.append(asyncio.run(hits(requests, rate, url)))
            spent = asyncio.run(cost(requests, engines[0]))[20:]
    through, served, planned = (median(column) for column in zip(*spent, strict=True))
    ratio = median((with_plan - without) / plan for without, with_plan, plan in spent)
    print(f"{name}: hits of one worker {hit[0]:.4f}, of two {hit[1]:.4f}: {hit[1] / hit[0]:.3f}")
    print(f"  ms: passed through {through:.2f}, served {served:.2f}, planner.plan {planned:.2f}")
    print(f"  beyond the pass-through, of planner.plan: {ratio:.2f}", flush=True)


def main() -> None:
    """Run the load, or what `--cost` says; or an engine of either."""
    parser = new_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3_600.0, help="begin no more after these")
    parser.add_argument("--cost", nargs="*", metavar="TRACE", help=f"such as {' '.join(TRACES)}")
    parser.add_argument("--rate", type=float, default=20.0, help="with --cost: requests a second")
    parser.add_argument("--engine", nargs=2, metavar=("PORT", "LOG"), help="serve as an engine")
    options = parser.parse_args()
    if options.engine:
        return serve_engine(int(options.engine[0]), options.engine[1])
    if options.cost is None:
        with processes(ENGINES, "--tenant-header=x-tenant", fails=True) as serving:
            return asyncio.run(load(options.requests, options.seconds, serving))
    for name in options.cost or TRACES:
        requests = read_named_trace(data_folder(), name)[0][: options.requests]
        print_cost(name, requests, options.rate)
    return None


if __name__ == "__main__":
    main()
