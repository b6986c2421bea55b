"""Graphs, models' answers, agents and tools: what applications are made of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from random import Random
from typing import Any

from langchain_core.language_models import FakeListChatModel

from chain_of_agents import ChainOfAgents, Step
from chain_of_agents.segments import as_blocks, parcels_of, pieces_of, segments_of
from chain_of_agents.trace.answer import Trace
from chain_of_agents.trace.steps import outcome_of
from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.planning.prompt_records import made_of
from ctxreuse.workflow import (
    END,
    START,
    CallableRetriever,
    Piece,
    WorkflowEngine,
    WorkflowGraph,
    hyde,
    irg,
    multistep,
    one_shot,
    recomp,
)
from ctxreuse.workflow.library import asks_nothing
from fuzz_targets.memories import found_memories
from fuzz_targets.mutation import PIECES, Target, UsersError, junk, mutated, text
from langchain_ctxreuse.agents.planned_messages import result_pieces

_WORKFLOWS = {one.__name__: one for one in (one_shot, hyde, recomp, irg, multistep)}
_ANSWERS = ("None.", "Sub-question: Who?", "none\nmore", "no further questions", "[KWBC]", "? ? ?")
_NODES = (START, END, "search", "answer", "plan", "note", "", "a b", "{input}")


class _Says:
    """A model that says what it is told to."""

    def __init__(self, answers: list[str]) -> None:
        self._answers = answers

    async def stream(self, prompt: Any, params: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        answer = self._answers.pop() if self._answers else "None"
        yield Piece(answer[:3], 1)
        yield Piece(answer[3:], 1)


def _answer(source: Random) -> str:
    return source.choice((text(source), source.choice(_ANSWERS), source.choice(PIECES) * 200))


def _run(source: Random) -> dict[str, Any]:
    return {
        "workflow": source.choice(sorted(_WORKFLOWS)),
        "answers": [_answer(source) for _ in range(12)],
        "found": [text(source) for _ in range(source.randrange(4))],
        "input": text(source) if source.random() < 0.9 else junk(source),
        "planned": source.random() < 0.5,
    }


def _run_workflow(given: Mapping[str, Any]) -> None:
    for answer in given["answers"]:
        assert isinstance(asks_nothing(answer), bool)

    async def search(query: str, k: int) -> list[str]:
        assert isinstance(query, str)
        found: list[str] = given["found"]
        return found

    async def run() -> None:
        planner = ReusePlanner() if given["planned"] else None
        llm, retriever = _Says(list(given["answers"])), CallableRetriever(search)
        async with WorkflowEngine(llm, retriever, planner) as engine:
            result = await engine.run(_WORKFLOWS[given["workflow"]](), given["input"])
            assert isinstance(result.answer, str)

    asyncio.run(run())


def _graph(source: Random) -> list[tuple[str, dict[str, Any]]]:
    """Return the steps that make a graph: good ones, with some left out, repeated or changed."""
    steps: list[tuple[str, dict[str, Any]]] = [
        ("add_retrieval", {"name": "search", "query": "{input}"}),
        ("add_generation", {"name": "answer", "prompt": "{docs} {input}"}),
        ("add_edge", {"source": START, "target": "search"}),
        ("add_edge", {"source": "search", "target": "answer"}),
        ("add_edge", {"source": "answer", "target": END}),
    ]
    for _ in range(source.randrange(4)):
        number = source.randrange(len(steps))
        kind, fields = steps[number]
        action = source.randrange(5)
        if action == 0:
            del steps[number]
        elif action == 1:
            steps.insert(source.randrange(len(steps)), (kind, fields))
        elif action == 2:
            steps.append(
                ("add_edge", {"source": source.choice(_NODES), "target": source.choice(_NODES)})
            )
        else:
            name = source.choice((*fields, *_TAKEN[kind]))
            values = (junk(source), source.choice(_NODES), text(source), 1, 2, "{answer} {input}")
            steps[number] = (kind, {**fields, name: source.choice(values)})
        steps = steps or [("add_edge", {"source": START, "target": END})]
    return steps


_TAKEN = {
    "add_generation": ("max_visits", "otherwise", "output", "params", "llm", "system"),
    "add_retrieval": ("max_visits", "otherwise", "output", "k"),
    "add_edge": ("targets",),
}


def _compile(steps: list[tuple[str, dict[str, Any]]]) -> None:
    graph = WorkflowGraph(name="fuzzed")
    for kind, fields in steps:
        getattr(graph, kind)(**fields)
    graph.compile()
    assert graph.draw()


def _documents(source: Random) -> dict[str, Any]:
    documents = [
        source.choice((text(source), {"text": text(source), "id": source.choice(("a", 1, None))}))
        for _ in range(source.randrange(6))
    ]
    return {
        "documents": mutated(documents, source, 2),
        "question": text(source) if source.random() < 0.9 else junk(source),
        "answers": [_answer(source) for _ in range(12)],
        "mode": source.choice(("sequential", "parallel")),
        "workers": source.randrange(1, 4),
        "window": source.choice((1000, 2000, 8192)),
    }


def _ask(given: Mapping[str, Any]) -> None:
    async def ask() -> None:
        llm = FakeListChatModel(responses=list(given["answers"]))
        async with ChainOfAgents(
            llm, given["workers"], mode=given["mode"], context_window=given["window"]
        ) as chain:
            asked = {"question": given["question"], "documents": given["documents"]}
            answer = await chain.ainvoke(asked)
        read = [name for step in answer.trace.workers for name in step.documents]
        for block in as_blocks(given["documents"]):
            assert any(str(name).startswith(str(block.id)) for name in read), "not read"

    asyncio.run(ask())


def _texts(source: Random) -> dict[str, Any]:
    return {
        "documents": [text(source, 40) for _ in range(source.randrange(1, 5))],
        "budget": source.randrange(1, 60),
        "agents": source.randrange(1, 4),
    }


def _cut(given: Mapping[str, Any]) -> None:
    """Cut documents into pieces and put these together; no character is lost or doubled."""
    pieces = []
    for words in given["documents"]:
        block = ContextBlock(text=words)
        parts = pieces_of(block, given["budget"], estimate_tokens)
        assert "".join(part.text for part in parts) == words
        pieces += parts
    tokens = [estimate_tokens(piece.text) for piece in pieces]
    parcels = parcels_of(tokens, [n % 3 > 0 for n in range(len(pieces))], given["budget"], 4)
    agents = [number % given["agents"] for number in range(len(parcels))]
    segments = segments_of(pieces, parcels, agents, tokens, given["budget"], 4, False)
    read = [block for segment in segments for block in segment.blocks]
    assert sorted(map(id, read)) == sorted(map(id, pieces))


def _trace(source: Random) -> dict[str, Any]:
    step = {
        "role": "worker",
        "agent": 0,
        "position": 0,
        "documents": ["a", 1],
        "labels": {"[KWBC]": "a"},
        "note": text(source),
        "prompt_tokens": 10,
        "cached_tokens": 5,
        "began_s": 0.0,
        "ended_s": 1.0,
    }
    steps = [step, {**step, "role": "manager", "agent": -1, "note": text(source)}]
    for one in steps:
        one["note"] = source.choice((one["note"], source.choice(PIECES) * 100))
        one["outcome"] = source.choice(("answered", "empty", "garbage", "failed", "timed out"))
        one["error"] = text(source)
        one["ended_s"] = source.choice((0.0, 1.0, 1e9, 1e-9))
        one["cached_tokens"] = source.choice((None, 0, 5, 10**9))
    return {"question": text(source), "steps": steps}


def _draw(given: Mapping[str, Any]) -> None:
    steps = tuple(Step(**{**one, "documents": tuple(one["documents"])}) for one in given["steps"])
    page = Trace(question=given["question"], mode="parallel", steps=steps).to_html()
    assert "<script>alert" not in page
    assert all(isinstance(outcome_of(step.note), str) for step in steps)


def _tool_result(source: Random) -> dict[str, Any]:
    found = found_memories(source)
    artifact = source.choice((None, found, junk(source)))
    try:
        words = json.dumps(found) if source.random() < 0.6 else text(source)
    except (TypeError, ValueError, RecursionError, UsersError):
        words = text(source)
    return {"artifact": artifact, "text": words, "splits": source.random() < 0.5}


def _read_tool(given: Mapping[str, Any]) -> None:
    found: Any = None
    with suppress(UsersError):  # of a list of the user's; the middleware then changes nothing
        found = result_pieces(given["artifact"], given["text"], "\n\n", given["splits"])
    for one in found or ():
        assert one.block.text == made_of(given["text"], one.shown)


TARGETS = {
    "workflows": Target(_run, _run_workflow),
    "graphs": Target(_graph, _compile),
    "chain of agents": Target(_documents, _ask),
    "segments": Target(_texts, _cut),
    "chain traces": Target(_trace, _draw),
    "tool results": Target(_tool_result, _read_tool),
}
