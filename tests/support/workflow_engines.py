"""What the tests of the workflow engine share: a small corpus, a model, and looks inside.

The corpus is random vectors in a real faiss index. The model's answers follow from the documents
(as a set), the question, the system text and the parameters, so that a wrong prompt shows.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import faiss
import numpy as np
from ivf_helpers import build_index
from virtual_time import run_by
from workflow_interpreter import Asked, Interpreted, interpret

from ctxreuse import ContextBlock
from ctxreuse.serving.client.request import Prompt, messages_of
from ctxreuse.workflow.engine import WorkflowEngine, WorkflowOptions
from ctxreuse.workflow.graph.builder import WorkflowGraph
from ctxreuse.workflow.graph.compiled import Graph
from ctxreuse.workflow.graph.nodes import END, START
from ctxreuse.workflow.models.language_model import Piece
from ctxreuse.workflow.runtime.events import (
    DocumentsFound,
    Event,
    NodeFinished,
    NodeStarted,
    TextDelta,
)
from ctxreuse.workflow.vector_search.executor import SearchExecutor
from ctxreuse.workflow.vector_search.hot_tier import HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever
from virtual_clock import run_in_virtual_time

DIMENSION, SIZE, NLIST, NPROBE = 8, 600, 16, 12
BLOCKS = tuple(ContextBlock(id=f"d{number}", text=f"passage {number}.") for number in range(SIZE))
EAGER = WorkflowOptions(max_wasted_share=1.0, workers=2)


@cache
def corpus_index(metric: str = "L2") -> Any:
    """Return an index over the corpus that many tests search and none changes."""
    vectors = np.random.default_rng(0).normal(size=(SIZE, DIMENSION)).astype(np.float32)
    index = build_index(metric, vectors, NLIST)
    index.nprobe = NPROBE
    return index


class WordEmbedder:
    """Adds up a random vector for each word: texts with common words are near to each other."""

    dimension = DIMENSION

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.batches.append(list(texts))
        return np.stack([_text_vector(text) for text in texts])


@cache
def _word_vector(word: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(word.encode())).normal(size=DIMENSION)


def _text_vector(text: str) -> np.ndarray:
    words = re.findall(r"\w+", text) or [""]  # a zero vector is as near to all as to any
    return sum(map(_word_vector, words), np.zeros(DIMENSION)).astype(np.float32)


def of_function(function: Callable[[Any], Any], **options: Any) -> WorkflowGraph:
    graph = WorkflowGraph(**options).add_function("own", function)
    return graph.add_edge(START, "own").add_edge("own", END)


def corpus_retriever(
    metric: str = "L2", hot: tuple[int, int] | None = None, **options: Any
) -> VectorRetriever:
    """Return a retriever over the corpus.

    Args:
        metric: "L2" or "inner product".
        hot: The bytes of a hot tier, and after how many scans it is filled anew.
        options: Of the retriever.
    """
    searched = IVFIndex(corpus_index(metric))
    tier = None if hot is None else HotTier(searched, hot[0], every=hot[1])
    return VectorRetriever(searched, BLOCKS, WordEmbedder(), hot=tier, **options)


def plain_search(query: str, k: int, metric: str = "L2") -> list[ContextBlock]:
    """Search as faiss does, in one go; more clusters where these hold fewer than k."""
    index = corpus_index(metric)
    for nprobe in range(index.nprobe, index.nlist + 1):
        wide = faiss.SearchParametersIVF(nprobe=nprobe)
        _, ids = index.search(_text_vector(query)[None], k, params=wide)
        found = [BLOCKS[number] for number in ids[0].tolist() if number >= 0]
        if len(found) == k:
            break
    return found


def said(
    passages: Iterable[int], question: str, system: str | None, params: Mapping[str, Any]
) -> str:
    """Return the model's answer: up to a dozen words, few different ones in all."""
    told = repr((sorted(set(passages)), question, system, sorted(params.items())))
    draw = Random(zlib.crc32(told.encode()))
    return " ".join(f"w{draw.randrange(40)}" for _ in range(draw.randrange(1, 13)))


def plain_answer(asked: Asked) -> str:
    """Answer as `SteadyLLM` does, for the plain interpreter."""
    passages = [int(block.text[len("passage ") : -1]) for block in asked.blocks]
    return said(passages, _question(asked.query), asked.system, asked.params)


def plainly(graph: WorkflowGraph, question: str) -> Interpreted:
    """Run a graph over the corpus, one stage after the other."""
    return interpret(graph.compile(), question, plain_answer, plain_search)


def answer_to(messages: list[dict[str, Any]], params: Mapping[str, Any] | None = None) -> str:
    """Answer chat messages: documents come first, and the question stands in << >>."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    content = messages[-1]["content"]
    passages = [int(number) for number in re.findall(r"passage (\d+)\.", content.split("<<")[0])]
    return said(passages, _question(content), system, params or {})


def _question(text: str) -> str:
    return text[text.index("<<") : text.rindex(">>")]


class SteadyLLM:
    """Always says the same to the same: see `said`.

    Args:
        pause: Called for how long each piece takes, in seconds of the event loop.
        fail: From a request's number, from 1, to how many pieces come before it breaks; None lets
            it end.

    Attributes:
        requests: How many answers were begun.
        open: How many streams are open.
        tokens: Tokens that were given out.
    """

    def __init__(
        self,
        pause: Callable[[], float] = lambda: 0.01,
        fail: Callable[[int], int | None] = lambda number: None,
    ) -> None:
        self.requests = self.open = self.tokens = 0
        self._pause = pause
        self._fail = fail

    async def stream(
        self, prompt: Prompt, params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        self.requests += 1
        self.open += 1
        breaks_at = self._fail(self.requests)
        words = re.findall(r"\s*\S+", answer_to(messages_of(prompt), params))
        try:
            for number in range(0, len(words), 2):
                await asyncio.sleep(self._pause())
                if breaks_at is not None and number // 2 >= breaks_at:
                    break
                part = words[number : number + 2]
                self.tokens += len(part)
                yield Piece("".join(part), len(part))
            await asyncio.sleep(self._pause())
            yield Piece("", 0)  # as engines end their streams
            if breaks_at is not None:
                raise ConnectionError("the stream broke")
        finally:
            self.open -= 1


class Clock:
    """The event loop's time, and a little more with each look, as if looking took that long."""

    def __init__(self, tick: Callable[[], float] = lambda: 1e-6) -> None:
        self._tick = tick
        self._ticks = 0.0

    def __call__(self) -> float:
        self._ticks += self._tick()
        return asyncio.get_running_loop().time() + self._ticks


def executing(pause: Callable[[], float]) -> Callable[[Callable[[], Any]], Any]:
    """Return an `execute` that works at once, and then takes a while of the event loop's time."""

    async def execute(work: Callable[[], Any]) -> Any:
        result = work()
        await asyncio.sleep(pause())
        return result

    return execute


def engine_over(
    retriever: Any = None,
    llm: Any = None,
    *,
    pause: Callable[[], float] = lambda: 0.005,
    **options: Any,
) -> WorkflowEngine:
    """Return an engine for virtual time; a model and the corpus where none are given."""
    return WorkflowEngine(
        SteadyLLM() if llm is None else llm,
        corpus_retriever() if retriever is None else retriever,
        execute=executing(pause),
        clock=Clock(),
        **options,
    )


def in_virtual_time(main: Any) -> Any:
    """Run a coroutine in virtual time; what an event loop would only log fails the test.

    Tasks that are left when it ends fail it, too.
    """
    told: list[str] = []

    async def guarded() -> Any:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: told.append(f"{context['message']}: {context.get('exception')!r}")
        )
        result = await main
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    result = run_in_virtual_time(guarded())
    assert not told, told
    return result


virtual_time = run_by(in_virtual_time)


def executors_of(engine: WorkflowEngine) -> list[SearchExecutor]:
    return list(engine._services.executors.values())


async def assert_idle(engine: WorkflowEngine) -> None:
    """Check that nothing is left of runs that have ended, once the last scan has."""
    for executor in executors_of(engine):
        await executor.close()
    for executor in executors_of(engine):
        queue = executor.scheduler._queue
        assert len(executor.scheduler) == len(queue) == 0
        assert not executor._workers
        assert not queue._states.any()
        assert not queue._demand.any()
        assert sorted(queue._free) == list(range(len(queue._found)))
    await asyncio.sleep(0)  # tasks that have ended are noted in the event loop's next round
    assert not len(engine._services.generations)
    assert engine.metrics().in_flight == engine.metrics().waiting == 0


def assert_in_order(events: Sequence[Event]) -> None:
    """Check that each visit of a node begins, says what it has to say, and ends, once."""
    state: dict[tuple[str, int], list[Any]] = {}
    for event in events:
        if isinstance(event, NodeStarted):
            assert (event.node, event.visit) not in state
            state[event.node, event.visit] = []
        elif isinstance(event, TextDelta):
            assert event.text
            state[event.node, event.visit].append(event.text)
        elif isinstance(event, DocumentsFound):
            state[event.node, event.visit].append(event.documents)
        elif isinstance(event, NodeFinished):
            shown = state.pop((event.node, event.visit))
            if shown and isinstance(shown[0], str):
                assert "".join(shown) == event.value
            elif shown:
                assert shown == [event.value]
    assert not state


@dataclass(frozen=True)
class Outcome:
    """What a run gave, in a form that says all in a comparison."""

    values: dict[str, Any]
    visited: list[str]
    visits: dict[str, int]
    answer: Any

    @classmethod
    def of(cls, graph: Graph, state: Any, visited: Iterable[str], answer: Any) -> Outcome:
        values = {
            key: [block.id for block in value] if isinstance(value, tuple) else value
            for key, value in state.items()
        }
        return cls(
            values, list(visited), {name: state.visits(name) for name in graph.nodes}, answer
        )


def rag(k: int = 3, **options: Any) -> WorkflowGraph:
    """Return a search, and an answer from what it finds."""
    graph = WorkflowGraph(**options)
    graph.add_retrieval("search", query="{input}", k=k)
    graph.add_generation("answer", prompt="<<{input}>> {docs}")
    graph.add_edge(START, "search").add_edge("search", "answer")
    return graph.add_edge("answer", END)


def guess_first(k: int = 3) -> WorkflowGraph:
    """Return a generation that writes a search's query, the search, and an answer."""
    graph = WorkflowGraph(name="guess_first")
    graph.add_generation("guess", prompt="<<{input}>>")
    graph.add_retrieval("search", query="{guess}", k=k)
    graph.add_generation("answer", prompt="<<{input}>> {docs}")
    graph.add_edge(START, "guess").add_edge("guess", "search").add_edge("search", "answer")
    return graph.add_edge("answer", END)


def rounds(most: int = 3) -> WorkflowGraph:
    """Return a search and an answer, round after round: the next query is question and answer."""
    graph = WorkflowGraph(name="rounds", defaults={"answer": ""})
    graph.add_retrieval("search", query="{input} {answer}", k=2, max_visits=most, otherwise=END)
    graph.add_generation("answer", prompt="<<{input}>> {docs}")
    graph.add_edge(START, "search").add_edge("search", "answer")
    return graph.add_edge("answer", "search")


def engine_of(llm: Any = None, retriever: Any = None, **options: Any) -> WorkflowEngine:
    """Return an engine that speculates only where a test says so: when, is a matter of time."""
    plain = {"speculation": "off", "speculative_retrieval": False}
    return WorkflowEngine(
        llm, retriever or corpus_retriever(), options=WorkflowOptions(**plain | options)
    )


def plain_ids(query: str, k: int) -> list[Any]:
    return [block.id for block in plain_search(query, k)]


def shown(query: str, k: int = 2) -> str:
    """Return what a prompt says of the documents that are found."""
    return "\n\n".join(block.text for block in plain_search(query, k))
