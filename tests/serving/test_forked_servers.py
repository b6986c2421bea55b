"""A server that loads its application first and then forks its workers, under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
from forked import in_children

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.context.fork_safety import process_name
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool, dispatch
from ctxreuse.serving.aio import sync_bridge

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

PROMPT = [{"role": "user", "content": "Which?"}]
BLOCKS = [ContextBlock(id=number, text=f"Fact {number}. " * 12) for number in range(60)]


def some_request(random_: random.Random, **fields: Any) -> ContextRequest:
    return ContextRequest(random_.sample(BLOCKS, 8), "Which?", **fields)


def is_right(plan: Any) -> bool:
    """Whether a plan sends each block of its request once, under the label that it names."""
    sent = [block.id for block in plan.blocks]
    content = plan.messages()[-1]["content"]
    return sorted(sent) == sorted(block.id for block in plan.request.blocks) and all(
        f"{label} {BLOCKS[id_].text}" in content for label, id_ in plan.labels.items()
    )


def test_children_that_are_forked_while_threads_plan_plan_rightly_under_ids_of_their_own():
    planner = ReusePlanner()
    conversation = planner.conversation("c", system="Be brief.")
    randoms = [random.Random(number) for number in range(4)]

    def load(number: int) -> None:
        planner.plan(some_request(randoms[number]))
        planner.plan_batch([some_request(randoms[number]) for _ in range(5)])
        conversation.plan(randoms[number].sample(BLOCKS, 3), "Which?")
        planner.evict_tokens(100)

    def child(number: int) -> list[str]:
        random_ = random.Random(100 + number)
        plans = [planner.plan(some_request(random_)) for _ in range(5)]
        plans += planner.plan_batch([some_request(random_) for _ in range(5)]).plans
        chat = planner.conversation(f"of child {number}")
        plans.append(chat.plan(BLOCKS[:4], "Which?"))
        chat.record("This.")
        conversation.plan(BLOCKS[:2], "Which?")
        conversation.record("That.")
        assert all(map(is_right, plans))
        return [str(plan.request_id) for plan in plans]

    ids_of_children = in_children(30, child, load)
    later = [str(planner.plan(some_request(random.Random(5))).request_id) for _ in range(2_000)]
    everyone = [*later, *(id_ for ids in ids_of_children for id_ in ids)]
    assert len(set(everyone)) == len(everyone)


def test_shadow_mode_goes_on_in_children():
    planner = ReusePlanner(mode="shadow")
    randoms = [random.Random(number) for number in range(4)]

    def child(number: int) -> bool:
        before = planner.savings.requests
        planner.plan_batch([some_request(random.Random(number)) for _ in range(3)])
        return planner.savings.requests == before + 3

    assert all(in_children(30, child, lambda number: planner.plan(some_request(randoms[number]))))


def test_children_dispatch_to_an_emulated_engine():
    engine = EmulatedEngine(answer="In France.")
    transport = engine.transport()

    def client() -> EngineClient:
        return EngineClient("http://engine", http_client=httpx.AsyncClient(transport=transport))

    planner = ReusePlanner()
    pool = EnginePool({"a": client, "b": client}, planner=planner, concurrency=2)
    randoms = [random.Random(number) for number in range(4)]

    async def ask(random_: random.Random, requests: int) -> list[str]:
        answers = await asyncio.gather(
            *(pool.complete(some_request(random_)) for _ in range(requests))
        )
        await pool.disconnect()
        return [answer.completion.text for answer in answers]

    def child(number: int) -> list[str]:
        random_ = random.Random(number)
        batch = planner.plan_batch([some_request(random_) for _ in range(4)])
        outcomes = asyncio.run(dispatch(client(), batch, concurrency=2))
        answers = asyncio.run(ask(random_, 5))
        assert pool.faults == 0
        return [*answers, *(one.completion.text for one in outcomes)]

    assert asyncio.run(ask(randoms[0], 1)) == ["In France."]  # loaded before it forks
    answers = in_children(20, child, lambda number: asyncio.run(ask(randoms[number], 4)))
    assert answers == [["In France."] * 9] * 20


class CountingServer(ThreadingHTTPServer):
    """An engine that notes which processes have spoken on which connection."""

    daemon_threads = True
    speakers: defaultdict[tuple[str, int], set[str]]


class CountingHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the library names it so
        self.rfile.read(int(self.headers["content-length"]))
        self.server.speakers[self.client_address].add(self.headers["x-process"])
        chunk = {
            "id": "1",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": "Yes."},
                    "finish_reason": "stop",
                }
            ],
        }
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[CountingServer]:
    server = CountingServer(("127.0.0.1", 0), CountingHandler)
    server.speakers = defaultdict(set)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asking(client: EngineClient) -> Callable[[int], str]:
    def ask(number: int) -> str:
        headers = {"x-process": str(os.getpid())}
        plan = [{"role": "user", "content": f"Question {number}?"}]
        return sync_bridge.run(
            lambda: client.complete(plan, extra_headers=headers), lasting=True
        ).text

    return ask


def test_no_two_processes_speak_on_one_connection_and_a_child_does_not_stop_the_parents_loop(
    server,
):
    client = EngineClient(f"http://127.0.0.1:{server.server_port}", "m")
    ask = asking(client)
    assert ask(0) == "Yes."
    assert in_children(10, ask, ask) == ["Yes."] * 10
    assert ask(0) == "Yes."
    assert all(len(processes) == 1 for processes in server.speakers.values())
    assert len(set().union(*server.speakers.values())) == 11
    sync_bridge.run(client.aclose, lasting=True)


def test_a_users_http_client_serves_the_process_that_has_sent_with_it_first(server):
    """A connection that two processes share gives each the other's replies."""
    http = httpx.AsyncClient()
    url = f"http://127.0.0.1:{server.server_port}"
    client, pool = EngineClient(url, "m", http_client=http), EnginePool(url, "m", http_client=http)
    ask = asking(client)
    assert in_children(3, ask) == ["Yes."] * 3  # it was loaded before the fork, and not used yet

    def refused(number: int) -> list[str]:
        sent_before = [len(processes) for processes in server.speakers.values()]
        errors = []
        again = EngineClient(url, "m", http_client=http)
        request = ContextRequest(BLOCKS[:2], "Which?")
        for send, prompt in (
            (client.complete, PROMPT),
            (again.complete, PROMPT),
            (pool.complete, request),
        ):
            with pytest.raises(InvalidRequestError, match="make the http_client in each") as error:
                asyncio.run(send(prompt))
            errors.append(str(error.value))
        with pytest.raises(InvalidRequestError, match="make the http_client in each process"):
            asyncio.run(client.check_health())
        assert [len(processes) for processes in server.speakers.values()] == sent_before
        return errors

    assert ask(0) == "Yes."
    assert len(in_children(3, refused, ask)) == 3
    assert ask(0) == "Yes."
    assert all(len(processes) == 1 for processes in server.speakers.values())
    sync_bridge.run(http.aclose, lasting=True)


def test_a_recorder_writes_what_each_child_sends_into_files_of_its_own(tmp_path):
    recorder = TraceRecorder(tmp_path)

    def child(number: int) -> str:
        recorder.record(BLOCKS[:3], f"of child {number}", conversation_id="c")
        recorder.close()
        return process_name()

    names = in_children(5, child, lambda number: recorder.record(BLOCKS[:4], "of the parent"))
    recorder.close()
    assert recorder.faults == 0
    for number, name in enumerate(names):
        folder = tmp_path / f"forked-{name.rstrip('.')}"
        corpus = read_corpus(folder / "corpus.jsonl")
        [request] = read_trace(folder / "trace.jsonl", corpus)
        assert request.query == f"of child {number}"
    corpus = read_corpus(tmp_path / "corpus.jsonl")
    trace = read_trace(tmp_path / "trace.jsonl", corpus)
    assert len(trace) == recorder.requests
    assert {request.query for request in trace} == {"of the parent"}
