"""What Chain-of-Agents sends to its workers and its manager."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.documents import Document

from chain_of_agents import ChainOfAgents, ChainPrompts, Trace
from ctxreuse import ContextBlock, ReusePlanner, request_context
from ctxreuse.serving import EmulatedEngine
from golden_cases.engines import pool_of, sent_to
from golden_cases.langchain_models import NotingModel
from golden_cases.llamaindex_models import NotingLLM
from golden_cases.recording import Cases, digest

CASES = Cases()
_MANAGER = "The manager answers."
_PROMPTS = ChainPrompts(worker="Read.", manager=_MANAGER)
_QUESTIONS = (
    ("First?", (0, 1, 2, 3, 4)),
    ("Second?", (3, 1, 7, 0)),
    ("Third?", (8, 4, 2, 7, 1, 9)),
)


def _document(number: int) -> dict[str, Any]:
    return {"id": f"d{number}", "text": f"Document {number} says " + f"{number}" * 600 + "."}


def _asked(question: str, numbers: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"question": question, "documents": [_document(n) for n in numbers], **more}


def _answer(body: dict[str, Any]) -> str:
    """Say which documents a prompt shows, or, as the manager, how long the notes are."""
    messages = body["messages"]
    text = str(messages[-1]["content"])
    if messages[0]["content"] == _MANAGER:
        return f"Answer from {len(text)} letters."
    read = [str(n) for n in range(10) if f"Document {n} says" in text]
    return f"Read {', '.join(read) or 'nothing new'}."


def _steps(trace: Trace, with_usage: bool) -> list[Any]:
    return [
        [
            step.name,
            list(step.documents),
            list(step.shown_before),
            step.note,
            step.outcome,
            step.remark,
            step.replica,
            [step.prompt_tokens, step.cached_tokens] if with_usage else [],
            dict(step.labels),
        ]
        for step in trace.steps
    ]


def _talk(engines: int, **options: Any) -> dict[str, Any]:
    """Return what is sent in a conversation, as digests and, of the last question, whole."""
    emulated = [EmulatedEngine(answer=_answer) for _ in range(engines)]
    in_parallel = options.get("mode") == "parallel"
    pool = pool_of(*emulated, window_s=0.1 if in_parallel else 0)
    chain = ChainOfAgents(llm=pool, workers=3, prompts=_PROMPTS, **options)
    told: dict[str, Any] = {}
    seen = [0] * engines
    for question, numbers in _QUESTIONS:
        answer = chain.invoke(_asked(question, numbers, conversation_id="c", tenant="one"))
        prompts = []
        for number, engine in enumerate(emulated):
            prompts += [[f"e{number}", one] for one in sent_to(engine)[seen[number] :]]
            seen[number] = len(engine.requests)
        if in_parallel:  # workers are asked at the same time
            prompts.sort(key=str)
        told[question] = {
            "answer": str(answer),
            "steps": _steps(answer.trace, with_usage=not in_parallel),
            "prompts": [[name, digest(prompt)] for name, prompt in prompts],
        }
    told["Third?"]["last turns"] = [[name, prompt[-1]] for name, prompt in prompts]
    return told


@CASES
def sequential() -> Any:
    """A conversation in which each worker reads the note of the one before."""
    return _talk(1)


@CASES
def sequential_on_two_engines() -> Any:
    """Agents live on engines, and documents go to who has read them."""
    return _talk(2, packing="packed", mode="sequential")


@CASES
def parallel() -> Any:
    """A conversation in which all workers read at the same time."""
    return _talk(1, mode="parallel")


@CASES
def one_question_after_the_other() -> Any:
    """Questions without a conversation, of tenants, one document a call; other kinds of input."""
    engine = EmulatedEngine(answer=_answer)
    planner = ReusePlanner(annotate=True)
    chain = ChainOfAgents(llm=pool_of(engine, planner=planner), workers=2, packing="single")
    for question, numbers in (*_QUESTIONS, *_QUESTIONS[::-1]):
        for tenant in ("one", "two"):
            with request_context(tenant=tenant):
                chain.invoke(_asked(question, numbers[:3]))
    kinds = [
        "plain text",
        ContextBlock(id=5, text="a block"),
        Document("a document", id="d"),
        {"text": "a dict", "id": "e"},
    ]
    answer = chain.invoke({"question": "Kinds?", "documents": kinds})
    sent = sent_to(engine)
    return {
        "all": [[digest(one), one[-1]["content"][-60:]] for one in sent],
        "last": sent[-5:],
        "parameters": [
            {name: one for name, one in body.items() if name not in ("messages", "model")}
            for body in engine.requests[-2:]
        ],
        "steps": _steps(answer.trace, with_usage=True),
    }


@CASES.takes_long
def small_windows() -> Any:
    """Documents that are cut, and histories that are left out, where the model holds little."""
    found = {}
    for mode in ("sequential", "parallel"):
        engine = EmulatedEngine(answer=_answer)
        chain = ChainOfAgents(
            llm=pool_of(engine, window_s=0.1 if mode == "parallel" else 0),
            workers=2,
            mode=mode,
            prompts=_PROMPTS,
            context_window=900,
            note_tokens=16,
            answer_tokens=16,
        )
        told = []
        for question, numbers in _QUESTIONS:
            long = {"id": "long", "text": "long " * 900}
            asked = _asked(question, numbers[:2], conversation_id="c")
            asked["documents"].append(long)
            trace = chain.invoke(asked).trace
            told.append(_steps(trace, with_usage=False))
        sent = sent_to(engine)
        found[mode] = {"steps": told, "prompts": sorted(digest(one) for one in sent)}
    return found


@CASES
def other_models() -> Any:
    """Models of LangChain and LlamaIndex, in batches and streams."""
    langchain, llamaindex = NotingModel(), NotingLLM()

    async def streamed(chain: ChainOfAgents) -> list[str]:
        return [str(piece) async for piece in chain.astream(_asked(*_QUESTIONS[1]))]

    found: dict[str, Any] = {}
    for name, model in (("langchain", langchain), ("llamaindex", llamaindex)):
        chain = ChainOfAgents(llm=model, workers=2, prompts=_PROMPTS, mode="sequential")
        answers = [str(chain.invoke(_asked(*one, conversation_id=1))) for one in _QUESTIONS[:2]]
        answers += ["".join(asyncio.run(streamed(chain)))]
        one_by_one = {"max_concurrency": 1}
        answers += map(str, chain.batch([_asked(*one) for one in _QUESTIONS], one_by_one))
        found[name] = {"calls": [digest(call) for call in model.calls], "answers": answers}
        found[name]["last"] = model.calls[-1]
    return found
