"""What workflows ask their model and find, and what the frameworks' ends of them give."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from random import Random
from typing import Any

import faiss
import numpy as np
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.prompts import PromptTemplate

from ctxreuse import ContextBlock, Plan, ReusePlanner
from ctxreuse.workflow import (
    END,
    START,
    CallableRetriever,
    EmulatedLLM,
    FusedRetriever,
    IVFIndex,
    KeywordRetriever,
    Piece,
    VectorRetriever,
    WorkflowEngine,
    WorkflowGraph,
    WorkflowOptions,
    WorkflowResult,
    hyde,
    irg,
    multistep,
    one_shot,
    recomp,
)
from golden_cases.langchain_models import NotingStream
from golden_cases.llamaindex_models import NotingLLM as LlamaIndexNotingLLM
from golden_cases.planning import block
from golden_cases.recording import Cases, digest
from langchain_ctxreuse import (
    LangChainLLM,
    RetrieverStage,
    SpeculativeRAGChain,
    WorkflowRetriever,
    WorkflowRunnable,
)
from llamaindex_ctxreuse import LlamaIndexLLM, SpeculativeRAGQueryEngine
from llamaindex_ctxreuse import WorkflowRetriever as LlamaIndexWorkflowRetriever

CASES = Cases()
_DIMENSION = 8
_BLOCKS = tuple(
    ContextBlock(id=f"d{number}", text=f"{block(number).text} {block(number + 500).text}" * 4)
    for number in range(200)
)
_QUESTIONS = ("amber birch?", "cedar delta ember?", "fjord?", "grove heath islet?", "jetty amber?")
_GRAPHS = {
    "one_shot": one_shot(k=3),
    "hyde": hyde(k=3),
    "recomp": recomp(k=3),
    "irg": irg(k=3, rounds=3),
    "multistep": multistep(k=2, max_steps=3),
}
_IN_ORDER = WorkflowOptions(speculation="off", speculative_retrieval=False, workers=1)
"""Nothing is asked before it is known to be needed, so that the same is asked in each run."""


class WordEmbedder:
    """Adds up a vector for each word, of whole numbers, which any machine adds up alike."""

    dimension = _DIMENSION

    def embed(self, texts: Sequence[str]) -> Any:
        """Return a vector for each text."""
        return np.array([_text_vector(text) for text in texts], np.float32)


def _text_vector(text: str) -> list[int]:
    words = {word.strip("?.,:") for word in text.lower().split()}
    vectors = [
        [Random(f"{word} {place}").randrange(-4, 5) for place in range(_DIMENSION)]
        for word in sorted(words) or [""]
    ]
    return [sum(column) for column in zip(*vectors, strict=True)]


def _vector_retriever() -> VectorRetriever:
    vectors = WordEmbedder().embed([one.text for one in _BLOCKS])
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(_DIMENSION), _DIMENSION, 8)
    index.cp.min_points_per_centroid = 1
    index.train(vectors)
    index.add(vectors)
    # all clusters: which of them is near depends on how faiss makes them
    return VectorRetriever(IVFIndex(index), _BLOCKS, WordEmbedder(), nprobe=8)


def _said(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what the model says: a few words that can be searched for, always the same."""
    content = str(messages[-1]["content"])
    if content.endswith("Sub-question:") and content.count("\n- ") > 1:
        return "None"
    random = Random(zlib.crc32(str(messages).encode()))
    words = " ".join(one.text for one in _BLOCKS[:20]).split()
    return " ".join(random.choice(words) for _ in range(random.randrange(2, 7)))


class NotingLLM:
    """Answers with some words, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def stream(
        self, prompt: Plan | Sequence[Mapping[str, Any]], params: Mapping[str, Any]
    ) -> AsyncGenerator[Piece, None]:
        """Answer a prompt in two pieces."""
        messages = prompt.messages() if isinstance(prompt, Plan) else list(map(dict, prompt))
        self.asked.append([messages, dict(params)])
        text = _said(messages)
        for piece in (text[:5], text[5:]):
            yield Piece(piece, max(1, len(piece) // 4))


def _result(result: WorkflowResult) -> Any:
    state = {
        key: [one.id for one in value] if isinstance(value, tuple) else value
        for key, value in result.state.items()
    }
    return {"answer": result.answer, "visited": list(result.visited), "state": state}


def _run_each(
    retriever: Any, planner: ReusePlanner | None, options: WorkflowOptions = _IN_ORDER
) -> tuple[dict[str, Any], NotingLLM]:
    """Run each graph with each question, one after the other."""
    llm = NotingLLM()

    async def main() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with WorkflowEngine(llm, retriever, planner, options=options) as engine:
            for name, graph in _GRAPHS.items():
                found[name] = [
                    _result(await engine.run(graph, question, session="s", tenant="one"))
                    for question in _QUESTIONS
                ]
        return found

    return asyncio.run(main()), llm


@CASES
def graphs_of_the_literature() -> Any:
    """All prompts and all documents of the five workflows, with a planner and without."""
    planned, llm = _run_each(_vector_retriever(), ReusePlanner())
    plain, plain_llm = _run_each(_vector_retriever(), None)
    return {
        "drawn": {name: graph.draw() for name, graph in _GRAPHS.items()},
        "results": planned,
        "prompts": [digest(one) for one in llm.asked],
        "some prompts": llm.asked[1::11],
        "without a planner": {
            "results": {name: [digest(one) for one in results] for name, results in plain.items()},
            "prompts": [digest(one) for one in plain_llm.asked],
        },
    }


@CASES
def results_with_speculation() -> Any:
    """What is guessed early changes no result, one after the other or many at a time."""
    options = WorkflowOptions(speculation="always")
    found, _ = _run_each(_vector_retriever(), ReusePlanner(), options)
    jobs = [(graph, question) for graph in _GRAPHS.values() for question in _QUESTIONS]

    async def main() -> list[Any]:
        async with WorkflowEngine(NotingLLM(), _vector_retriever()) as engine:
            return list(map(_result, await engine.arun_batch(jobs)))

    together = asyncio.run(main())
    return {
        # with a planner the documents' order, and so the answer, depends on what is asked meanwhile
        "visited": {name: [one["visited"] for one in results] for name, results in found.items()},
        "together": [[one["answer"], digest(one)] for one in together],
    }


@CASES
def retrievers() -> Any:
    """What each kind of retriever finds, and several of them fused."""
    words = KeywordRetriever(_BLOCKS)
    vectors = _vector_retriever()
    named = CallableRetriever(lambda query, k: [one for one in _BLOCKS if query[0] in one.text][:k])
    fused = FusedRetriever({"words": words, "vectors": vectors, "named": named})

    async def main() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, one in (
            ("words", words),
            ("vectors", vectors),
            ("function", named),
            ("fused", fused),
        ):
            found[name] = [[b.id for b in await one.retrieve(asked, 5)] for asked in _QUESTIONS]
        async with WorkflowEngine(None, {"default": vectors, "words": words}) as engine:
            results = [await engine.retrieve(asked, 4, session=1) for asked in _QUESTIONS]
            found["engine"] = [
                [[b.id for b in result.documents], [round(s, 3) for s in result.scores or ()]]
                for result in results
            ]
            other = [await engine.retrieve(asked, 4, retriever="words") for asked in _QUESTIONS]
            found["named"] = [[b.id for b in result.documents] for result in other]
        shuffled = FusedRetriever({f"r{seed}": _shuffling(seed) for seed in range(4)})
        found["shuffled"] = [b.id for b in await shuffled.retrieve("?", 30)]
        return found

    return asyncio.run(main())


def _shuffling(seed: int) -> CallableRetriever:
    """Return a retriever that finds some blocks in an order of its own."""
    chosen = sorted(range(40), key=lambda number: Random(f"{seed} {number}").random())
    return CallableRetriever(lambda query, k: [_BLOCKS[number] for number in chosen][:k])


@CASES
def graph_of_ones_own() -> Any:
    """A router, a function, branches side by side, events."""
    graph = WorkflowGraph(name="own", inputs=["input", "style"], defaults={"notes": "(none)"})
    graph.add_generation("ask", prompt="<<{input}>> in {style}", system="Ask.", output="query")
    graph.add_retrieval("search", query="{query}", k=2)
    graph.add_retrieval("also", query="{input}", k=2, output="more", retriever="words")
    graph.add_function("note", lambda state: f"{len(state['docs'])} found", output="notes")
    graph.add_generation("answer", prompt="{{x}} {notes}\n{docs}\n{input}", max_visits=2)
    graph.add_edge(START, "ask").add_edge(START, "also").add_edge("ask", "search")
    graph.add_edge("search", "note").add_edge("note", "answer").add_edge("also", END)
    graph.add_edge("answer", lambda state: END if state.visits("answer") else "ask", ["ask", END])
    llm = NotingLLM()
    retrievers = {"default": _vector_retriever(), "words": KeywordRetriever(_BLOCKS)}

    async def main() -> list[Any]:
        async with WorkflowEngine(llm, retrievers, ReusePlanner(), options=_IN_ORDER) as engine:
            result = await engine.run(graph, "amber?", style="prose")
            events = [event async for event in engine.stream(one_shot(k=2), "birch?")]
        kinds = [type(event).__name__ for event in events]
        return [_result(result)["state"], sorted(result.visited), kinds]

    return [asyncio.run(main()), graph.draw(), llm.asked]


@CASES
def emulated_model() -> Any:
    """The pieces of an emulated model, and what its cache serves."""

    async def main() -> list[Any]:
        told: list[Any] = []
        llm = EmulatedLLM(_said, speed=10_000, chunk_tokens=3, capacity_tokens=600)
        for number in range(8):
            content = f"{_BLOCKS[number % 3].text} {_BLOCKS[number % 2].text}\n\nq{number}"
            messages = [{"role": "user", "content": content}]
            pieces = [tuple(one) async for one in llm.stream(messages, {"max_tokens": 4 + number})]
            told.append([pieces, llm.usage.prompt_tokens, llm.usage.cached_tokens])
        return [*told, llm.generated_tokens, llm.requests]

    return asyncio.run(main())


@CASES
def in_langchain() -> Any:
    """A retriever, a chain that begins early, a graph as a runnable; models and retrievers."""
    model = NotingStream()
    engine = WorkflowEngine(
        LangChainLLM(model), _vector_retriever(), ReusePlanner(), options=_IN_ORDER
    )
    retriever = WorkflowRetriever(engine=engine, k=3)
    template = ChatPromptTemplate.from_messages(
        [("system", "Be brief."), ("human", "{context}\n\n{input}")]
    )
    chain = SpeculativeRAGChain(retriever=retriever, prompt=template, llm=model)
    graph = WorkflowRunnable(engine, hyde(k=2), outputs=["hypothesis", "docs", "answer"])
    found = [[d.id for d in retriever.invoke(question, k=4)] for question in _QUESTIONS]
    answers = [chain.invoke({"input": question}) for question in _QUESTIONS]
    answers += [graph.invoke(question) for question in _QUESTIONS[:2]]
    stage = RetrieverStage(retriever)
    staged = asyncio.run(_staged(stage))
    return {
        "found": found,
        "batch": [[d.id for d in one] for one in retriever.batch(list(_QUESTIONS))],
        "answers": [
            {
                name: [one.id for one in value] if isinstance(value, list) else value
                for name, value in answer.items()
            }
            for answer in answers
        ],
        "calls": [digest(call) for call in model.calls],
        "some calls": model.calls[2:9:3],
        "stage": staged,
    }


async def _staged(stage: RetrieverStage) -> list[Any]:
    return [[one.id for one in await stage.retrieve(asked, 2)] for asked in _QUESTIONS]


@CASES
def in_llamaindex() -> Any:
    """A retriever, and a query engine that begins early."""
    llm = LlamaIndexNotingLLM()
    engine = WorkflowEngine(
        LlamaIndexLLM(llm), _vector_retriever(), ReusePlanner(), options=_IN_ORDER
    )
    retriever = LlamaIndexWorkflowRetriever(engine, k=3)
    template = PromptTemplate("Known:\n{context_str}\nAsked: {query_str}")
    linked = SpeculativeRAGQueryEngine(retriever, llm=llm, text_qa_template=template)
    responses = [linked.query(question) for question in _QUESTIONS]
    jobs = [(one_shot(k=2), question) for question in _QUESTIONS[:2]]
    results = [engine.run_batch([job], progress=False)[0] for job in jobs]
    return {
        "found": [[one.node_id for one in retriever.retrieve(asked)] for asked in _QUESTIONS],
        "answers": [
            [str(response), [node.node_id for node in response.source_nodes]]
            for response in responses
        ],
        "results": list(map(_result, results)),
        "calls": [digest(call) for call in llm.calls],
        "some calls": llm.calls[1::3],
    }
