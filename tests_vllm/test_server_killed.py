"""A server that dies in the middle of a batch, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from vllm_process import Server, kill, start

from ctxreuse import BatchPlan, ContextRequest, ReusePlanner
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace
from ctxreuse.serving import EngineClient, Outcome, dispatch

REQUESTS = 12
ANSWERED_BEFORE = 3
LONGEST_S = 600


def test_each_request_is_answered_once_or_reported_failed(
    small_server: Server, data_folder: Path
) -> None:
    asyncio.run(kill_in_the_middle(small_server, data_folder))


async def kill_in_the_middle(small_server: Server, data_folder: Path) -> None:
    impatient, patient = ReusePlanner(), ReusePlanner()
    hurried = impatient.plan_batch(requests(data_folder, "hurried"))
    waiting = patient.plan_batch(requests(data_folder, "waiting"))
    enough_answered = asyncio.Event()

    def note(ended: int, total: int) -> None:
        if ended >= ANSWERED_BEFORE:
            enough_answered.set()

    async def crash_and_return() -> None:
        await enough_answered.wait()
        await asyncio.to_thread(kill, small_server)
        await asyncio.to_thread(start, small_server.options)

    async with (
        asyncio.timeout(LONGEST_S),
        client(small_server, impatient, retries=1) as gives_up,
        client(small_server, patient, retries=20) as keeps_on,
    ):
        gone, came, _ = await asyncio.gather(
            dispatch(gives_up, hurried, concurrency=2, progress=note, max_tokens=8),
            dispatch(keeps_on, waiting, concurrency=2, max_tokens=8),
            crash_and_return(),
        )
        failed = [outcome.plan for outcome in gone if outcome.error is not None]
        again = await dispatch(gives_up, failed, concurrency=2, max_tokens=8)

    assert ids(gone) == in_input_order(hurried)
    assert all((outcome.completion is None) != (outcome.error is None) for outcome in gone)
    assert 0 < len(failed) <= REQUESTS - ANSWERED_BEFORE
    unknown = impatient.evict([plan.request_id for plan in failed]).unknown
    assert set(unknown) == {plan.request_id for plan in failed}

    assert ids(came) == in_input_order(waiting)
    assert [outcome.error for outcome in came] == [None] * REQUESTS

    assert ids(again) == [plan.request_id for plan in failed]
    assert [outcome.error for outcome in again] == [None] * len(failed)


def requests(data: Path, name: str) -> list[ContextRequest]:
    corpus = read_corpus(str(data / "xquad" / "corpus.jsonl"))
    trace = read_trace(str(data / "xquad" / "trace_k5.jsonl"), corpus)[:REQUESTS]
    return [
        ContextRequest(traced.blocks[:2], traced.query, request_id=f"{name} {number}")
        for number, traced in enumerate(trace)
    ]


def client(server: Server, planner: ReusePlanner, retries: int) -> EngineClient:
    return EngineClient(server.base_url, planner=planner, retries=retries, backoff_s=0.2)


def ids(outcomes: Sequence[Outcome]) -> list[object]:
    return [outcome.plan.request_id for outcome in outcomes]


def in_input_order(batch: BatchPlan) -> list[object]:
    return [plan.request_id for plan in batch.in_input_order()]
