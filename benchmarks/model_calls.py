"""How long calls of a model wait for each other: many users at a time, in tasks and in threads.

Each user asks again as soon as the answer has come. The plain model gets the documents joined, the
wrapped one as `format_context` shows them; both are timed from the documents to the answer, in
turn, and compared round by round. Run with `make bench-calls`; `--quick` takes a minute. The
emulated models cost next to nothing, so what is printed is LangChain's work and ours; the last
table has OpenAI's client and a server in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import PrivateAttr, SecretStr
from rich.console import Console
from rich.progress import track

from ctxreuse import ReusePlanner
from ctxreuse.pipeline.ordered_release import DEFAULT_WINDOW_S
from langchain_ctxreuse import ReuseChatModel, format_context
from shared import new_table

K = 8
ENGINE_S = 0.2
SLOTS = 64
CALLS_EACH = 4
DOCUMENTS = [Document(f"document {n} " * 60, id=f"d{n}") for n in range(200)]


_SERVER = """
import asyncio, json

message = {"role": "assistant", "content": "So."}
usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
choice = {"index": 0, "finish_reason": "stop", "message": message}
answer = {"id": "a", "object": "chat.completion", "created": 0, "model": "m"}
body = json.dumps(answer | {"choices": [choice], "usage": usage}).encode()
head = "HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n"


async def main(seconds):
    async def serve(reader, writer):
        try:
            while True:
                asked = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
                length = asked.split(b"content-length:")[1].split(b"\\r")[0]
                await reader.readexactly(int(length))
                await asyncio.sleep(seconds)
                writer.write((head % len(body)).encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=2_000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
"""
_LOOP = asyncio.Runner()


class SleepingModel(BaseChatModel):
    """Answers after a time; so many calls at a time, the others wait."""

    seconds: float = ENGINE_S  # how long an answer takes
    slots: int = 1_000_000  # how many are answered at a time
    _free: threading.BoundedSemaphore = PrivateAttr()
    _afree: asyncio.BoundedSemaphore = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Have all slots free."""
        self._free = threading.BoundedSemaphore(self.slots)
        self._afree = asyncio.BoundedSemaphore(self.slots)

    @property
    def _llm_type(self) -> str:
        return "sleeping"

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        with self._free:
            time.sleep(self.seconds)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("So."))])

    async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
        async with self._afree:
            await asyncio.sleep(self.seconds)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("So."))])


class Asking(NamedTuple):
    """A model, and how its users show it documents."""

    model: BaseChatModel
    show: Callable[[Sequence[Document]], str]
    wait_s: float = 0

    @classmethod
    def plain(cls, model: BaseChatModel, wait_s: float = 0) -> Asking:
        """Return a model as it is; each user waits before a question, which counts."""
        return cls(model, lambda found: "\n\n".join(one.page_content for one in found), wait_s)

    @classmethod
    def wrapped(cls, inner: BaseChatModel, window_s: float = DEFAULT_WINDOW_S) -> Asking:
        """Return a model that plans."""
        planner = ReusePlanner()
        return cls(ReuseChatModel(inner=inner, planner=planner, window_s=window_s), format_context)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer users and rounds")
    quick = parser.parse_args().quick
    console = Console(width=130)
    rounds = 2 if quick else 5
    lone_calls(console, rounds)
    users = [1, 10, 100] if quick else [1, 10, 100, 400, 1_000]
    for words, model in (
        (f"{SLOTS} calls at a time", partial(SleepingModel, slots=SLOTS)),
        ("all calls at once", SleepingModel),
    ):
        title = f"users in tasks of one event loop; an engine that answers {words} in {ENGINE_S} s"
        many_users(console, title, rounds, users, model, in_tasks)
    title = "users in threads; all calls at once"
    many_users(console, title, rounds, [1, 8, 64], SleepingModel, in_threads)
    with answering_server() as url:
        title = "users in tasks; OpenAI's client and a server that answers all calls at once"
        many_users(console, title, rounds, users[:4], partial(openai_model, url), in_tasks)


def lone_calls(console: Console, rounds: int, calls: int = 300) -> None:
    """Print what a call takes that nobody else waits for, of an engine that takes no time."""
    model = SleepingModel(seconds=0)
    askings = {
        "plain": Asking.plain(model),
        "no window": Asking.wrapped(model, 0),
        "plain, behind a sleep of 5 ms": Asking.plain(model, 0.005),
        "window of 5 ms": Asking.wrapped(model, 0.005),
    }
    medians: dict[str, list[float]] = {name: [] for name in askings}
    for turn in track(range(rounds + 1), "lone calls", transient=True):
        for name, asking in askings.items():
            times = in_tasks(asking, 1, calls)
            if turn:  # the first one warms up
                medians[name].append(statistics.median(times) * 1_000)
    table = new_table(f"a lone call, {K} documents; ms", ["model"], ["median", "more than plain"])
    base = ""
    for name, found in medians.items():
        base = name if name.startswith("plain") else base
        more = [one - plain for one, plain in zip(found, medians[base], strict=True)]
        table.add_row(name, f"{statistics.median(found):.2f}", f"{statistics.median(more):.2f}")
    console.print(table)


def many_users(
    console: Console,
    title: str,
    rounds: int,
    users: Sequence[int],
    model: Callable[[], BaseChatModel],
    ask: Callable[[Asking, int, int], list[float]],
) -> None:
    """Print how long calls take at some numbers of users, and the whole run for each call."""
    columns = [
        "plain p50",
        "p99",
        "wrapped p50",
        "p99",
        "p99 ratio",
        "mean: more ms",
        "run: more ms a call",
    ]
    table = new_table(f"{title}; seconds", (), ["users", *columns])
    for number in track(users, "users", transient=True):
        plain, wrapped, runs = [], [], []
        for _ in range(rounds):
            times = [time.perf_counter()]
            plain.append(ask(Asking.plain(model()), number, CALLS_EACH))
            times.append(time.perf_counter())
            wrapped.append(ask(Asking.wrapped(model()), number, CALLS_EACH))
            times.append(time.perf_counter())
            longer = times[2] - 2 * times[1] + times[0]
            runs.append(longer / (number * CALLS_EACH) * 1_000)
        pairs = list(zip(plain, wrapped, strict=True))
        ratio = statistics.median(_percentile(b, 99) / _percentile(a, 99) for a, b in pairs)
        more = statistics.median(statistics.mean(b) - statistics.mean(a) for a, b in pairs)
        figures = [
            statistics.median(_percentile(times, percent) for times in of_model)
            for of_model in (plain, wrapped)
            for percent in (50, 99)
        ]
        row = [f"{one:.3f}" for one in figures]
        table.add_row(
            f"{number:,}",
            *row,
            f"{ratio:.2f}",
            f"{more * 1_000:.1f}",
            f"{statistics.median(runs):.2f}",
        )
    console.print(table)


def in_tasks(asking: Asking, users: int, calls_each: int) -> list[float]:
    """Return how long each call took, with users in tasks of one event loop."""

    async def all_users() -> list[float]:
        seen: list[float] = []
        await asyncio.gather(*(_user(asking, number, calls_each, seen) for number in range(users)))
        return seen

    return _LOOP.run(all_users())  # one for all: OpenAI's clients share their connections


async def _user(asking: Asking, number: int, calls: int, seen: list[float]) -> None:
    ask: Callable[[str], Awaitable[Any]] = asking.model.ainvoke
    for found, question in _questions(number, calls):
        started = time.perf_counter()
        if asking.wait_s:
            await asyncio.sleep(asking.wait_s)
        await ask(f"{asking.show(found)}\n\n{question}")
        seen.append(time.perf_counter() - started)


def in_threads(asking: Asking, users: int, calls_each: int) -> list[float]:
    """Return how long each call took, with each user in a thread."""

    def user(number: int) -> list[float]:
        seen = []
        for found, question in _questions(number, calls_each):
            started = time.perf_counter()
            asking.model.invoke(f"{asking.show(found)}\n\n{question}")
            seen.append(time.perf_counter() - started)
        return seen

    with ThreadPoolExecutor(users) as pool:
        return [one for times in pool.map(user, range(users)) for one in times]


@contextmanager
def answering_server() -> Iterator[str]:
    """Run a server that answers everything after a time; yield its base URL."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{_SERVER}\nasyncio.run(main({ENGINE_S}))"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        finally:
            server.terminate()


def openai_model(url: str) -> BaseChatModel:
    """Return a model that asks a server."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=url, api_key=SecretStr("EMPTY"), timeout=60)


def _questions(user: int, calls: int) -> list[tuple[list[Document], str]]:
    chance = random.Random(user)
    return [(chance.sample(DOCUMENTS, K), f"Which {user} {n}?") for n in range(calls)]


def _percentile(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) * percent // 100, len(times) - 1)]


if __name__ == "__main__":
    main()
