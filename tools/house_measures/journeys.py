"""The programs whose way through the product code is measured.

A journey is counted from the public call to the inner model and back, by a profiler hook: the
distinct functions and methods of product code that are entered, nested ones and properties
included, without lambdas, comprehensions, dunder methods and what a dataclass generates. Each runs
several times on objects of its own, first once without counting, so that imports and filled caches
do not count; the median is taken. Threads that the call starts count; threads that stood before it
(workers of a warm engine) do not, since timing decides what they get to do, nor does the inner
model (a framework's fake one, or the emulated engine, which stands for a server).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from house_measures.recorder import Recorder, Trip

_TIMES = 21  # a workflow differs by ten functions from run to run
_CONTEXTS = ("abc", "xyz", "bca", "zyx", "mno", "cab")


def plan_journey(recorder: Recorder, cache: str = "vllm") -> None:
    """Plan one context of four blocks, one of them new, on an index of four others."""
    from ctxreuse import ContextBlock, ContextRequest, ReusePlanner

    def request(letters: str) -> ContextRequest:
        blocks = [ContextBlock(id=letter, text=_passage(letter)) for letter in letters]
        return ContextRequest(blocks, "Which?")

    planner = ReusePlanner(cache=cache)
    for letters in ("abc", "bcd", "xyz", "abx"):
        planner.plan(request(letters))
    arriving = request("cabq")
    with recorder.recording():
        planner.plan(arriving)


def langchain_journey(recorder: Recorder) -> None:
    """Format six contexts, wrap a model, and send a batch."""
    with recorder.recording():
        prompts = _langchain_prompts()
        _langchain_model().batch(prompts)


def batch_journey(recorder: Recorder) -> None:
    """Send a batch."""
    model, prompts = _langchain_model(), _langchain_prompts()
    with recorder.recording():
        model.batch(prompts)


def invoke_journey(recorder: Recorder) -> None:
    """Send one prompt, behind five others."""
    model, (*others, last) = _langchain_model(), _langchain_prompts()
    for prompt in others:
        model.invoke(prompt)
    with recorder.recording():
        model.invoke(last)


def _langchain_model() -> Any:
    from langchain_core.language_models import FakeListChatModel

    from langchain_ctxreuse import ReuseChatModel

    return ReuseChatModel(inner=FakeListChatModel(responses=["In France."]))


def _langchain_prompts() -> list[Any]:
    from langchain_core.documents import Document

    from langchain_ctxreuse import format_context

    return [
        f"{format_context([Document(_passage(letter)) for letter in letters])}\n\nWhich?"
        for letters in _CONTEXTS
    ]


def llamaindex_journey(recorder: Recorder) -> None:
    """Ask a query engine with a wrapped model and a postprocessor, behind five other questions."""
    from llama_index.core import get_response_synthesizer
    from llama_index.core.llms import MockLLM
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

    from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor

    class Found(BaseRetriever):
        """Finds the passages that a question names by their letters."""

        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return [
                NodeWithScore(node=TextNode(id_=letter, text=_passage(letter)), score=1.0)
                for letter in query_bundle.query_str
            ]

    model = ReuseLLM(inner=MockLLM(max_tokens=8))
    engine = RetrieverQueryEngine(
        Found(),
        get_response_synthesizer(llm=model),
        node_postprocessors=[ReusePostprocessor(planner=model.planner)],
    )
    *others, last = _CONTEXTS
    for letters in others:
        engine.query(letters)
    with recorder.recording():
        engine.query(last)


def mem0_journey(recorder: Recorder) -> None:
    """Ask for the messages of a turn, behind five others."""
    from mem0_ctxreuse import ReuseMemory

    class Found:
        """Finds the memories that a question names by their letters, as mem0 does."""

        def search(self, query: str, **kwargs: Any) -> dict[str, Any]:
            """Return the memories."""
            return {"results": [{"id": one, "memory": _passage(one)} for one in query]}

    memory = ReuseMemory(Found())
    *others, last = _CONTEXTS
    for letters in others:
        memory.messages(letters, filters={"user_id": "alice"})
    with recorder.recording():
        memory.messages(last, filters={"user_id": "alice"})


async def workflow_journey(recorder: Recorder) -> None:
    """Answer a question from what a search finds."""
    import faiss

    from ctxreuse import ReusePlanner, request_context
    from ctxreuse.workflow import (
        EmulatedLLM,
        TfidfEmbedder,
        VectorRetriever,
        WorkflowEngine,
        one_shot,
    )

    texts = [
        "Paris is the capital of France.",
        "The Seine flows through Paris into the English Channel.",
        "Rome is the capital of Italy.",
        "The Tiber flows through Rome.",
        "Lisbon is the capital of Portugal.",
        "The Tagus flows through Lisbon into the Atlantic.",
    ]
    embedder = TfidfEmbedder(texts, dimensions=5)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(embedder.dimension), embedder.dimension, 2)
    index.cp.min_points_per_centroid = 1  # there are few texts
    vectors = embedder.embed(texts)
    index.train(vectors)
    index.add(vectors)
    llm = EmulatedLLM(lambda messages: "The Seine flows through Paris.", speed=100)
    retriever = VectorRetriever(index, texts, embedder, nprobe=2)
    graph = one_shot(k=2)
    async with WorkflowEngine(llm, retriever, ReusePlanner()) as engine:
        await engine.run(graph, "Which river flows through Rome?")
        with recorder.recording(), request_context(conversation_id="c", tenant="t"):
            await engine.run(graph, "Which river flows through Paris?")


async def agents_journey(recorder: Recorder) -> None:
    """Answer the second question of a conversation about documents."""
    import httpx

    from chain_of_agents import ChainOfAgents
    from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool

    def connector(engine: EmulatedEngine) -> Callable[[], EngineClient]:
        transport = engine.transport()
        return lambda: EngineClient(
            "http://engine", http_client=httpx.AsyncClient(transport=transport)
        )

    engines = {name: connector(EmulatedEngine(answer="A note.")) for name in ("a", "b")}
    conversation = {"documents": list(map(_passage, "abcdef")), "conversation_id": "c"}
    async with ChainOfAgents(llm=EnginePool(engines), workers=2) as chain:
        await chain.ainvoke({"question": "Who?", **conversation})
        with recorder.recording():
            await chain.ainvoke({"question": "Which?", **conversation})


def _passage(letter: str) -> str:
    return f"{letter} says: " + letter * 400  # long enough that moving it pays


Journey: TypeAlias = Callable[[Recorder], Coroutine[Any, Any, None] | None]


JOURNEYS: dict[str, Journey] = {
    "plan": plan_journey,
    "plan-hosted": partial(plan_journey, cache="anthropic"),
    "langchain": langchain_journey,
    "batch": batch_journey,
    "invoke": invoke_journey,
    "llamaindex": llamaindex_journey,
    "mem0": mem0_journey,
    "workflow": workflow_journey,
    "agents": agents_journey,
}


def lower_trip(journey: Journey, root: Path, folders: tuple[str, ...], times: int = _TIMES) -> Trip:
    """Return the trip at the lower quartile of several, after one that is not counted.

    How far speculation gets depends on the machine's load, which only adds functions.
    """
    recorder = Recorder(root, folders)
    trips = []
    with recorder.installed():
        for _ in range(times + 1):
            if (running := journey(recorder)) is not None:
                asyncio.run(running)
            trips.append(recorder.trip())
    return sorted(trips[1:], key=lambda trip: trip.size)[times // 4]
