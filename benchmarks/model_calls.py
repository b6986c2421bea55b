"""How long calls of a model wait for each other: many users at a time, in tasks and in threads.

Each user asks again as soon as the answer has come. The plain model gets the documents joined, the
wrapped one as `format_context` shows them; both are timed from the documents to the answer, in
turn, and compared round by round. Run with `make bench-calls`; `--quick` takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import PrivateAttr
from rich.console import Console
from rich.progress import track
from shared import new_table

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseChatModel, format_context

K = 8
ENGINE_S = 0.2
SLOTS = 64
CALLS_EACH = 4
DOCUMENTS = [Document(f"document {n} " * 60, id=f"d{n}") for n in range(200)]


class SleepingModel(BaseChatModel):
    """Answers after a time; so many calls at a time, the others wait.

    Attributes:
        seconds: How long an answer takes.
        slots: How many are answered at a time.
    """

    seconds: float = ENGINE_S
    slots: int = 1_000_000
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

    @classmethod
    def plain(cls, **engine: Any) -> Asking:
        """Return a model as it is."""
        return cls(
            SleepingModel(**engine), lambda found: "\n\n".join(d.page_content for d in found)
        )

    @classmethod
    def wrapped(cls, window_s: float | None = None, **engine: Any) -> Asking:
        """Return a model that plans."""
        window = {} if window_s is None else {"window_s": window_s}
        inner = SleepingModel(**engine)
        return cls(ReuseChatModel(inner=inner, planner=ReusePlanner(), **window), format_context)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer users and rounds")
    quick = parser.parse_args().quick
    console = Console(width=130)
    rounds = 2 if quick else 5
    lone_calls(console, rounds)
    users = [1, 10, 100] if quick else [1, 10, 100, 400, 1_000]
    for slots in (SLOTS, None):
        engine = {} if slots is None else {"slots": slots}
        words = "all calls at once" if slots is None else f"{slots} calls at a time"
        title = f"users in tasks of one event loop; an engine that answers {words} in {ENGINE_S} s"
        many_users(console, title, rounds, users, engine, in_tasks)
    threads = [1, 8, 64]
    many_users(console, "users in threads; all calls at once", rounds, threads, {}, in_threads)


def lone_calls(console: Console, rounds: int, calls: int = 300) -> None:
    """Print what a call takes that nobody else waits for, of an engine that takes no time."""
    engine = {"seconds": 0.0}
    askings = {
        "plain": Asking.plain(**engine),
        "no window": Asking.wrapped(0, **engine),
        "window of 5 ms": Asking.wrapped(0.005, **engine),
    }
    medians: dict[str, list[float]] = {name: [] for name in askings}
    for turn in track(range(rounds + 1), "lone calls", transient=True):
        for name, asking in askings.items():
            times = in_tasks(asking, 1, calls)
            if turn:  # the first one warms up
                medians[name].append(statistics.median(times) * 1_000)
    table = new_table(f"a lone call, {K} documents; ms", ["model"], ["median", "more than plain"])
    for name, found in medians.items():
        more = [one - plain for one, plain in zip(found, medians["plain"], strict=True)]
        table.add_row(name, f"{statistics.median(found):.2f}", f"{statistics.median(more):.2f}")
    console.print(table)


def many_users(
    console: Console,
    title: str,
    rounds: int,
    users: Sequence[int],
    engine: dict[str, Any],
    ask: Callable[[Asking, int, int], list[float]],
) -> None:
    """Print how long calls take at some numbers of users."""
    columns = ["plain p50", "p99", "wrapped p50", "p99", "p99 ratio", "mean: more ms"]
    table = new_table(f"{title}; seconds", (), ["users", *columns])
    for number in track(users, "users", transient=True):
        plain, wrapped = [], []
        for _ in range(rounds):
            plain.append(ask(Asking.plain(**engine), number, CALLS_EACH))
            wrapped.append(ask(Asking.wrapped(**engine), number, CALLS_EACH))
        pairs = list(zip(plain, wrapped, strict=True))
        ratio = statistics.median(_percentile(b, 99) / _percentile(a, 99) for a, b in pairs)
        more = statistics.median(statistics.mean(b) - statistics.mean(a) for a, b in pairs)
        figures = [
            statistics.median(_percentile(times, percent) for times in of_model)
            for of_model in (plain, wrapped)
            for percent in (50, 99)
        ]
        row = [f"{one:.3f}" for one in figures]
        table.add_row(f"{number:,}", *row, f"{ratio:.2f}", f"{more * 1_000:.1f}")
    console.print(table)


def in_tasks(asking: Asking, users: int, calls_each: int) -> list[float]:
    """Return how long each call took, with users in tasks of one event loop."""

    async def all_users() -> list[float]:
        seen: list[float] = []
        await asyncio.gather(*(_user(asking, number, calls_each, seen) for number in range(users)))
        return seen

    return asyncio.run(all_users())


async def _user(asking: Asking, number: int, calls: int, seen: list[float]) -> None:
    ask: Callable[[str], Awaitable[Any]] = asking.model.ainvoke
    for found, question in _questions(number, calls):
        started = time.perf_counter()
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


def _questions(user: int, calls: int) -> list[tuple[list[Document], str]]:
    chance = random.Random(user)
    return [(chance.sample(DOCUMENTS, K), f"Which {user} {n}?") for n in range(calls)]


def _percentile(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) * percent // 100, len(times) - 1)]


if __name__ == "__main__":
    main()
