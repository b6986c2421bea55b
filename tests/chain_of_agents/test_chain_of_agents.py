"""The chain as its users meet it: answers, traces, engines, batches, streams."""

import asyncio
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import httpx
import pytest
from block_labels import label, labelled, ranked
from chain_helpers import (
    Busy,
    InTurn,
    Messages,
    SaysModel,
    chain_of,
    client_of,
    documents,
    is_managers,
    notes_in,
    pool_of,
    question,
)

from chain_of_agents import ChainOfAgents, ChainPrompts, Step, Trace, run
from ctxreuse import ReusePlanner
from ctxreuse.serving import EmulatedEngine

MODES = pytest.mark.parametrize("mode", ["sequential", "parallel"])


def numbered(messages: Messages) -> str:
    text = str(messages[-1]["content"])
    if is_managers(messages):
        return "From " + "; ".join(notes_in(text))
    return text.partition("] ")[2].partition(" says")[0] + " was read."


def test_all_that_is_sent_in_sequence_and_what_the_trace_says_of_it(monkeypatch):
    engine = EmulatedEngine(answer=lambda body: numbered(body["messages"]))
    ticks = map(float, count())
    monkeypatch.setattr(run, "perf_counter", ticks.__next__)
    chain = chain_of(
        engine,
        mode="sequential",
        workers=2,
        packing="single",
        planner=ReusePlanner(labels=True, annotate=False),
        assignment=InTurn,
        prompts=ChainPrompts(worker="Read.", manager="Several readers have each read."),
    )
    answer = chain.invoke(
        {"question": "Q?", "documents": [{"id": n, "text": f"D{n} says"} for n in (5, 7)]}
    )

    d5, d7 = label("D5 says"), label("D7 says")
    assert answer == "From D5 was read."
    roles = [[one["role"] for one in body["messages"]] for body in engine.requests]
    assert roles == [["system", "user"]] * 3
    assert [[one["content"] for one in body["messages"]] for body in engine.requests] == [
        ["Read.", f"{d5} D5 says\n\nQuestion: Q?\n\nWrite your note."],
        [
            "Read.",
            f"{d7} D7 says\n\nNote of the readers before you:\nD5 was read.\n\n"
            "Question: Q?\n\nWrite the note again, with what your part adds.",
        ],
        [
            "Several readers have each read.",
            "Notes:\nReader 2: D5 was read.\nD7 was read.\n\nQuestion: Q?\n\nAnswer:",
        ],
    ]
    assert [body["max_tokens"] for body in engine.requests] == [256, 256, 512]

    tokens = [len(engine.prompt_tokens(body["messages"])) for body in engine.requests]
    cached = answer.trace.steps[1].cached_tokens
    said = {"note": "D5 was read.", "completion_tokens": 4}
    read = {"role": "worker", "document_tokens": 2}
    steps = (
        Step(agent=0, position=0, documents=(5,), labels={d5: 5}, cached_tokens=0, **read, **said),
        Step(
            agent=1, position=1, documents=(7,), labels={d7: 7}, cached_tokens=cached,
            **read, **{**said, "note": "D7 was read."},
        ),
        Step(
            role="manager", agent=-1, position=-1, note="From D5 was read.", cached_tokens=0,
            completion_tokens=5,
        ),
    )  # fmt: skip
    times = ({"began_s": 1.0 + 2 * n, "ended_s": 2.0 + 2 * n} for n in range(3))
    expected = tuple(
        replace(one, replica="e0", prompt_tokens=length, **when)
        for one, length, when in zip(steps, tokens, times, strict=True)
    )
    assert answer.trace == Trace(question="Q?", mode="sequential", steps=expected)


def test_in_parallel_the_manager_reads_all_notes_in_the_documents_order():
    busy = Busy(numbered)
    slow = {"Document 0": 3, "Document 1": 2, "Document 2": 1}

    def holds(messages: Messages) -> bool:
        for name, left in slow.items():
            if f"{name} says" in str(messages) and left:
                slow[name] = left - 1
                return True
        return False

    busy.holds = holds
    chain = chain_of(EmulatedEngine(answer=busy), mode="parallel", packing="single")
    answer = chain.invoke(question(3))
    assert busy.most == 3
    assert answer == "From Document 0 was read.; Document 1 was read.; Document 2 was read."
    assert [step.position for step in answer.trace.steps] == [0, 1, 2, -1]


@MODES
def test_a_second_question_about_the_same_documents_finds_them_where_they_were_read(mode):
    engines = [EmulatedEngine(answer="A note.") for _ in range(3)]
    chain = chain_of(*engines, mode=mode, packing="single")
    first = chain.invoke(question(10))
    second = chain.invoke({**question(10), "question": "And which else?"})
    where = [
        {step.documents: (step.agent, step.replica) for step in answer.trace.workers}
        for answer in (first, second)
    ]
    assert where[0] == where[1]
    assert first.trace.cached_tokens < 0.4 * first.trace.prompt_tokens
    for step in second.trace.workers:
        assert step.prompt_tokens is not None
        assert step.cached_tokens is not None
        assert step.cached_tokens > 0.7 * step.prompt_tokens


@MODES
def test_every_way_to_ask_gives_the_same_answer_and_trace(mode):
    asked = [question(3), {**question(2), "question": "Other?"}]

    def without_times(answer: Any) -> Any:
        return str(answer), [
            (step.name, step.documents, step.note, step.outcome) for step in answer.trace.steps
        ]

    def chain() -> ChainOfAgents:
        model = SaysModel(says=lambda prompt: f"note {len(prompt)}")
        return ChainOfAgents(llm=model, mode=mode, assignment=InTurn)

    def streamed(pieces: list[Any]) -> Any:
        text, steps = without_times(pieces[-1])
        assert text == ""
        return "".join(pieces), steps

    async def arrived(pieces: Any) -> list[Any]:
        return [piece async for piece in pieces]

    async def as_they_end(one: ChainOfAgents) -> list[Any]:
        return [pair async for pair in one.abatch_as_completed(asked)]

    expected = [without_times(chain().invoke(one)) for one in asked]
    assert [without_times(asyncio.run(chain().ainvoke(one))) for one in asked] == expected
    assert [without_times(one) for one in chain().batch(asked)] == expected
    assert [without_times(one) for one in asyncio.run(chain().abatch(asked))] == expected
    assert [streamed(list(chain().stream(one))) for one in asked] == expected
    assert [streamed(asyncio.run(arrived(chain().astream(one)))) for one in asked] == expected
    in_order = sorted(chain().batch_as_completed(asked), key=lambda pair: pair[0])
    assert [without_times(one) for _, one in in_order] == expected
    in_order = sorted(asyncio.run(as_they_end(chain())), key=lambda pair: pair[0])
    assert [without_times(one) for _, one in in_order] == expected


async def test_sync_calls_and_empty_batches_work_inside_a_running_event_loop():
    for chain in (ChainOfAgents(llm=SaysModel()), chain_of(EmulatedEngine(answer="A note."))):
        assert chain.invoke(question(2)) == "A note."
        assert chain.batch([question(2)] * 2) == ["A note.", "A note."]
    assert "".join(chain.stream(question(2))) == "A note."
    assert ChainOfAgents(llm=SaysModel()).batch([]) == []


async def test_questions_of_a_batch_run_together_as_far_as_the_config_lets_them():
    busy = Busy()
    chain = chain_of(EmulatedEngine(answer=busy), mode="sequential")
    busy.holds = lambda messages: busy.running < 4 and busy.begun <= 4
    await chain.abatch([question(2)] * 4)
    assert busy.most == 4
    bounded = Busy()
    chain = chain_of(EmulatedEngine(answer=bounded), mode="sequential")
    await chain.abatch([question(2)] * 4, {"max_concurrency": 1})
    assert bounded.most == 1


def test_progress_is_told_of_every_question_that_ends():
    told: list[tuple[int, int]] = []
    questions: list[Any] = [question(1), {}, question(1)]
    chain = ChainOfAgents(llm=SaysModel())
    chain.batch(questions, return_exceptions=True, progress=lambda *ended: told.append(ended))
    assert told == [(1, 3), (2, 3), (3, 3)]


async def test_calls_that_wait_for_an_engine_run_back_to_back_if_they_read_the_same():
    busy = Busy()
    engine = EmulatedEngine(answer=busy)
    pool = pool_of(engine, concurrency=1)
    chain = ChainOfAgents(llm=pool, mode="parallel", packing="single")
    busy.holds = lambda messages: busy.begun == 1 and pool.statistics()[0].waiting < 15
    await chain.abatch([{**question(4), "question": f"Q{n}?"} for n in range(4)])
    read = [
        body["messages"][-1]["content"][:24]
        for body in engine.requests
        if not is_managers(body["messages"])
    ]
    assert len(read) == 16
    # planned in two parts, what had come when the first call went and the rest: of each part, the
    # four documents have a run each
    assert sum(one != other for one, other in pairwise(read)) <= 7


@MODES
def test_an_address_is_enough_and_each_agent_s_calls_carry_its_session_id(mode):
    engine = EmulatedEngine(answer="A note.")
    sessions: list[str | None] = []

    async def note(request: httpx.Request) -> None:
        if request.method == "POST":
            sessions.append(request.headers.get("X-Session-ID"))

    http = client_of(engine)
    http.event_hooks = {"request": [note]}
    chain = ChainOfAgents(
        llm="http://engine/v1",
        http_client=http,
        model="emulated",
        params={"temperature": 0.5},
        mode=mode,
        packing="single",
        workers=2,
        assignment=InTurn,
    )
    assert chain.invoke(question(2)) == "A note."
    workers = ["chain-of-agents-0", "chain-of-agents-1"]
    assert sessions == [*workers, None]  # a manager may go anywhere
    assert {body["temperature"] for body in engine.requests} == {0.5}

    sessions.clear()
    for _ in range(2):
        chain.invoke(question(2) | {"conversation_id": "c1"})
    *_, manager = sessions
    assert manager is not None
    assert "c1" not in manager
    assert sessions == [*workers, manager] * 2  # but in a conversation it has a history


async def test_engines_say_what_they_hold_and_pools_of_the_callers_stay_open():
    engine = EmulatedEngine(max_model_len=2_000, answer="A note.")
    chain = chain_of(engine, workers=1, packing="packed")
    answer = chain.invoke(question(12, documents=documents(12, 30)))
    assert len(answer.trace.workers) > 3
    assert answer.trace.failures == ()
    wide = chain_of(EmulatedEngine(answer="A note."), workers=1, packing="packed")
    assert len(wide.invoke(question(12, documents=documents(12, 30))).trace.workers) == 1

    pool = pool_of(EmulatedEngine())
    closed: list[bool] = []
    pool.aclose = lambda: closed.append(True)
    async with ChainOfAgents(llm=pool):
        pass
    assert closed == []


@pytest.mark.parametrize(
    ("packing", "calls", "of_short"), [("single", 6, 6), ("packed", 2, 2), ("auto", 2, 1)]
)
def test_documents_are_read_one_a_call_or_as_many_as_an_agent_has(packing, calls, of_short):
    chain = ChainOfAgents(llm=SaysModel(), workers=2, packing=packing, assignment=InTurn)
    assert len(chain.invoke(question(6)).trace.workers) == of_short
    asked = question(6, documents=documents(6, 60))
    assert len(chain.invoke(asked).trace.workers) == calls
    one_each = ChainOfAgents(llm=SaysModel(), workers=6, packing=packing, assignment=InTurn)
    assert len(one_each.invoke(asked).trace.workers) == 6


def plain_chain(send, texts, asked, mode, depth):
    """Answer with so many workers, in the words of the paper (Zhang et al., 2024, appendix)."""
    notes, each = [], -(-len(texts) // depth)
    for at in range(0, len(texts), each):
        before = f"Here is the summary of the previous source text: {notes[-1]}" if notes else ""
        text = "\n\n".join(texts[at : at + each])
        said = (
            "You need to read current source text and summary of previous source text (if any) and "
            "generate a summary to include them both. Later, this summary will be used for other "
            "agents to answer the Query, if any. So please write the summary that can include the "
            "evidence for answering the Query:"
        )
        notes.append(send(f"{text}\n{before * (mode == 'sequential')}\nQuestion: {asked}\n{said}"))
    shown = "\n".join(notes if mode == "parallel" else notes[-1:])
    said = (
        "The following are given passages. However, the source text is too long and has been "
        "summarized. You need to answer based on the summary:"
    )
    send(f"{said}\n{shown}\nQuestion: {asked}\nAnswer:")


@MODES
@pytest.mark.parametrize("number", [1, 5, 15, 40])
@pytest.mark.parametrize("length", [40, 120])
def test_short_documents_compute_no_more_than_a_plain_chain_as_deep(mode, number, length):
    asked, note = "Which mill was built by whom?", "Mill 7 was built by weavers in 1877."
    texts = [
        " ".join(f"mill {n} ground {n * m * 7919 % 9973}" for m in range(length // 4))
        for n in range(number)
    ]
    plain, ours = (EmulatedEngine(answer=note, max_model_len=6_000) for _ in range(2))
    client = httpx.Client(transport=plain.transport(), base_url="http://engine")

    def send(text):
        messages = [{"role": "user", "content": text}]
        reply = client.post(
            "/v1/chat/completions", json={"model": "emulated", "messages": messages}
        )
        return reply.json()["choices"][0]["message"]["content"]

    trace = chain_of(ours, mode=mode).invoke({"question": asked, "documents": texts}).trace
    assert len(trace.workers) == (2 if number * length > 4_000 else 1)
    plain_chain(send, texts, asked, mode, len(trace.workers))
    assert ours.usage.prefilled_tokens <= 1.02 * plain.usage.prefilled_tokens


def test_planners_of_the_callers_tell_orders_and_give_labels_or_none(planner):
    model = SaysModel()
    chain = ChainOfAgents(llm=model, planner=planner, workers=1, packing="packed")
    read = documents(4)
    chain.invoke(question(4, documents=read))
    chain.invoke(question(4, documents=read[::-1]))
    sent = str(model.prompts[-2][-1].content)
    first, *best = read
    assert sent.startswith(labelled(first))
    assert f"\n\n{ranked(*best[::-1])}\n\nQuestion: Which?" in sent

    model = SaysModel()
    chain = ChainOfAgents(llm=model, planner=ReusePlanner(labels=False), workers=1)
    for conversation in (None, "c"):
        answer = chain.invoke(
            {"question": "Which?", "documents": ["text"], "conversation_id": conversation}
        )
        assert model.prompts[-2][-1].content == "text\n\nQuestion: Which?\n\nWrite your note."
        assert answer.trace.workers[0].labels == {}


def test_one_chain_may_be_shared_by_threads():
    from concurrent.futures import ThreadPoolExecutor

    for chain in (
        chain_of(EmulatedEngine(answer=lambda body: numbered(body["messages"]))),
        ChainOfAgents(llm=SaysModel(says=lambda prompt: prompt[-12:])),
    ):
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(chain.invoke, [question(3)] * 12))
        assert len(set(answers)) == 1
        assert all(answer.trace.failures == () for answer in answers)
