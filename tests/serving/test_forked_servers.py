"""Children that are forked under load: while calls, workflows and chats are under way.

The programs are users': threads and event loops keep the parent busy, and each child asks the same
objects in all the ways that there are.
"""

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
from chain_helpers import documents
from forked import in_children
from hostile_servers import END, event
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.runnables import RunnableLambda
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import MockLLM
from llamaindex_helpers import LetterRetriever, letter_text
from workflow_engines import BLOCKS, WordEmbedder, corpus_index

from chain_of_agents import ChainOfAgents
from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool
from ctxreuse.serving.aio import sync_bridge
from ctxreuse.workflow import WorkflowEngine, one_shot
from ctxreuse.workflow.vector_search.hot_tier import HotTier
from ctxreuse.workflow.vector_search.ivf import IVFIndex
from ctxreuse.workflow.vector_search.vector_retriever import VectorRetriever
from langchain_ctxreuse import (
    LangChainLLM,
    RetrieverStage,
    ReuseChatModel,
    WorkflowRetriever,
    WorkflowRunnable,
    format_context,
)
from llamaindex_ctxreuse import ReuseChatEngine, ReuseLLM, ReuseMemoryBlock
from llamaindex_ctxreuse import WorkflowRetriever as WorkflowNodeRetriever
from mem0_ctxreuse import ReuseMemory

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
CHILDREN = 10


def slow() -> FakeListChatModel:
    return FakeListChatModel(responses=["Yes."], sleep=0.002)


def context() -> str:
    found = [Document(letter_text(letter)) for letter in "abc"]
    return f"{format_context(found)}\n\nWhich?"


def vector_engine() -> WorkflowEngine:
    index = IVFIndex(corpus_index())
    hot = HotTier(index, 10_000, every=3)  # it is filled anew again and again, in a thread
    retriever = VectorRetriever(index, BLOCKS, WordEmbedder(), hot=hot)
    return WorkflowEngine(LangChainLLM(slow()), retriever, ReusePlanner())


def test_a_workflow_engine_runs_in_children_forked_while_its_runs_are_under_way():
    engine, graph = vector_engine(), one_shot(k=2)

    async def together(query: str, runs: int) -> list[str]:
        results = [engine.run(graph, f"{query} {number}") for number in range(runs)]
        return [result.answer for result in await asyncio.gather(*results)]

    def load(number: int) -> None:  # all in the event loop of sync callers, which does not end
        engine.run_batch([(graph, f"passage {n}") for n in range(6)], progress=False)

    def child(number: int) -> list[str]:
        assert (engine.metrics().in_flight, engine.metrics().waiting) == (0, 0)
        results = engine.run_batch([(graph, f"child {n}") for n in range(3)], progress=False)
        return [*asyncio.run(together("child", 3)), *(result.answer for result in results)]

    load(0)
    assert in_children(CHILDREN, child, load) == [["Yes."] * 6] * CHILDREN


def test_what_frameworks_run_on_a_workflow_engine_answers_in_children():
    found = RunnableLambda(lambda query: [Document("one"), Document("two")])
    engine = WorkflowEngine(LangChainLLM(slow()), RetrieverStage(found), ReusePlanner())
    documents_, nodes = WorkflowRetriever(engine=engine), WorkflowNodeRetriever(engine=engine)
    runnable = WorkflowRunnable(engine=engine, graph=one_shot(k=2))

    def ask(number: int) -> list[Any]:
        return [
            [document.page_content for document in documents_.invoke("Which?")],
            [document.page_content for document in asyncio.run(documents_.ainvoke("Which?"))],
            [node.text for node in nodes.retrieve("Which?")],
            [str(answer) for answer in runnable.batch(["Which?", "What?"])],
        ]

    def load(number: int) -> None:
        documents_.invoke("Which?")
        nodes.retrieve("Which?")
        runnable.batch(["Which?", "What?"])

    wanted = ask(0)
    assert in_children(CHILDREN, ask, load) == [wanted] * CHILDREN


def emulated_pool() -> EnginePool:
    transport = EmulatedEngine(answer="Yes.").transport()

    def connect() -> EngineClient:
        return EngineClient("http://engine", http_client=httpx.AsyncClient(transport=transport))

    return EnginePool({"a": connect, "b": connect}, planner=ReusePlanner(), concurrency=2)


@pytest.mark.parametrize(
    ("llm", "answer"),
    [
        (slow, "Yes."),
        (lambda: ReuseChatModel(inner=slow()), "Yes."),
        (lambda: MockLLM(max_tokens=2), "text text"),
        (emulated_pool, "Yes."),
    ],
    ids=["LangChain", "wrapped", "LlamaIndex", "pool"],
)
def test_a_chain_of_agents_answers_in_children(llm, answer):
    chain = ChainOfAgents(llm=llm(), workers=2, concurrency=2)

    def ask(number: int) -> list[str]:
        question = {"question": "Which?", "documents": documents(3), "conversation_id": number}
        return [
            str(chain.invoke(question)),
            str(asyncio.run(chain.ainvoke(question))),
            "".join(map(str, chain.stream(question))),
            *map(str, chain.batch([question, {**question, "conversation_id": "other"}])),
        ]

    assert ask(0) == [answer] * 5
    assert in_children(CHILDREN, ask, ask) == [[answer] * 5] * CHILDREN


def test_langchain_models_answer_in_children_forked_while_loops_and_threads_call():
    model = ReuseChatModel(inner=slow(), window_s=0.005)

    async def in_a_loop() -> list[str]:
        answers = await asyncio.gather(*(model.ainvoke(context()) for _ in range(4)))
        streamed = "".join([piece.text async for piece in model.astream(context())])
        return [*(answer.text for answer in answers), streamed]

    def in_threads() -> list[str]:
        return [
            *(answer.text for answer in model.batch([context() for _ in range(4)])),
            "".join(piece.text for piece in model.stream(context())),
        ]

    def child(number: int) -> list[str]:
        answers = [*asyncio.run(in_a_loop()), *in_threads()]
        assert not model.faults
        return answers

    def load(number: int) -> None:
        assert asyncio.run(in_a_loop()) if number % 2 else in_threads()

    load(0)
    assert in_children(CHILDREN, child, load) == [["Yes."] * 10] * CHILDREN


def test_llamaindex_models_answer_in_children_forked_while_loops_and_threads_call():
    model = ReuseLLM(inner=MockLLM(max_tokens=2), window_s=0.005)
    messages = [ChatMessage(role="user", content="Which?")]

    async def in_a_loop() -> list[str | None]:
        answers = await asyncio.gather(*(model.achat(messages) for _ in range(4)))
        return [answer.message.content for answer in answers]

    def ask(number: int) -> list[str | None]:
        last = list(model.stream_chat(messages))[-1].message.content
        return [model.chat(messages).message.content, last, *asyncio.run(in_a_loop())]

    # the line on prompts without a context is said before: a child that is forked while another
    # thread writes to stderr waits for that stream's own lock for ever
    wanted = [ask(0) for _ in range(4)][-1]
    assert in_children(CHILDREN, ask, ask) == [wanted] * CHILDREN
    assert set(wanted) == {"text", "text text"}


def test_chat_engines_go_on_in_children_under_ids_of_their_own():
    planner, model = ReusePlanner(), ReuseLLM(inner=MockLLM(max_tokens=2))
    engines = [
        ReuseChatEngine(LetterRetriever(), model, planner=planner, system_prompt="Be brief.")
        for _ in range(4)
    ]

    async def in_a_loop(engine: ReuseChatEngine) -> list[str]:
        streamed = await engine.astream_chat("cd Which?")
        pieces = [piece async for piece in streamed.async_response_gen()]
        return [str(await engine.achat("ab Which?")), "".join(pieces)]

    def load(number: int) -> None:
        engine = engines[number]
        engine.reset()
        engine.chat("abc Which?")
        "".join(engine.stream_chat("bcd Which?").response_gen)
        asyncio.run(in_a_loop(engine))

    def child(number: int) -> str:
        engine = engines[number % 4]
        before = len(engine.chat_history)
        engine.chat("abc Which?")
        "".join(engine.stream_chat("bcd Which?").response_gen)
        asyncio.run(in_a_loop(engine))
        history = engine.chat_history
        assert len(history) == before + 8
        assert before % 2 == 0
        shown = "".join(message.content or "" for message in history[::2])
        assert all(letter_text(letter) in shown for letter in "abcd")
        assert engine.faults == 0
        return str(planner.plan(ContextRequest(["A text."])).request_id)

    assert len(set(in_children(CHILDREN, child, load))) == CHILDREN


def test_memories_are_found_in_children():
    class Notes:
        def search(self, query: str, **options: Any) -> dict[str, Any]:
            return {"results": [{"id": n, "memory": letter_text(n)} for n in "abc"]}

    block, memory = ReuseMemoryBlock(memory=LetterRetriever()), ReuseMemory(Notes())
    question = [ChatMessage(role="user", content="abc Which?")]

    def ask(number: int) -> bool:
        [message] = memory.messages("Which?", filters={"user_id": "alice"})
        text = asyncio.run(block.aget(question))
        assert not memory.faults + block.faults
        return all(
            letter_text(one) in shown for one in "abc" for shown in (text, message["content"])
        )

    assert all(in_children(CHILDREN, ask, ask))


PROMPT = [{"role": "user", "content": "Which?"}]
FACTS = [ContextBlock(id=number, text=f"Fact {number}. " * 12) for number in range(60)]


def some_request(random_: random.Random, **fields: Any) -> ContextRequest:
    return ContextRequest(random_.sample(FACTS, 8), "Which?", **fields)


def is_right(plan: Any) -> bool:
    """Whether a plan sends each block of its request once, under the label that it names."""
    sent = [block.id for block in plan.blocks]
    content = plan.messages()[-1]["content"]
    return sorted(sent) == sorted(block.id for block in plan.request.blocks) and all(
        f"{label} {FACTS[id_].text}" in content for label, id_ in plan.labels.items()
    )


def test_children_that_are_forked_while_threads_plan_plan_rightly_under_ids_of_their_own(planner):
    conversation = planner.conversation("c", system="Be brief.")
    randoms = [random.Random(number) for number in range(4)]

    def load(number: int) -> None:
        planner.plan(some_request(randoms[number]))
        planner.plan_batch([some_request(randoms[number]) for _ in range(5)])
        conversation.plan(randoms[number].sample(FACTS, 3), "Which?")
        planner.evict_tokens(100)

    def child(number: int) -> list[str]:
        random_ = random.Random(100 + number)
        plans = [planner.plan(some_request(random_)) for _ in range(5)]
        plans += planner.plan_batch([some_request(random_) for _ in range(5)]).plans
        chat = planner.conversation(f"of child {number}")
        plans.append(chat.plan(FACTS[:4], "Which?"))
        chat.record("This.")
        conversation.plan(FACTS[:2], "Which?")
        conversation.record("That.")
        assert all(map(is_right, plans))
        return [str(plan.request_id) for plan in plans]

    ids_of_children = in_children(30, child, load)
    later = [str(planner.plan(some_request(random.Random(5))).request_id) for _ in range(2_000)]
    everyone = [*later, *(id_ for ids in ids_of_children for id_ in ids)]
    assert len(set(everyone)) == len(everyone)


class CountingServer(ThreadingHTTPServer):
    daemon_threads = True
    speakers: defaultdict[tuple[str, int], set[str]]


class CountingHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the library names it so
        self.rfile.read(int(self.headers["content-length"]))
        self.server.speakers[self.client_address].add(self.headers["x-process"])
        body = event(END)
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
    assert ask(0) == "Hi"
    assert in_children(10, ask, ask) == ["Hi"] * 10
    assert ask(0) == "Hi"
    assert all(len(processes) == 1 for processes in server.speakers.values())
    assert len(set().union(*server.speakers.values())) == 11
    sync_bridge.run(client.aclose, lasting=True)


def test_a_users_http_client_serves_the_process_that_has_sent_with_it_first(server):
    """A connection that two processes share gives each the other's replies."""
    http = httpx.AsyncClient()
    url = f"http://127.0.0.1:{server.server_port}"
    client, pool = EngineClient(url, "m", http_client=http), EnginePool(url, "m", http_client=http)
    ask = asking(client)
    assert in_children(3, ask) == ["Hi"] * 3  # it was loaded before the fork, and not used yet

    def refused(number: int) -> list[str]:
        sent_before = [len(processes) for processes in server.speakers.values()]
        errors = []
        again = EngineClient(url, "m", http_client=http)
        request = ContextRequest(FACTS[:2], "Which?")
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

    assert ask(0) == "Hi"
    assert len(in_children(3, refused, ask)) == 3
    assert ask(0) == "Hi"
    assert all(len(processes) == 1 for processes in server.speakers.values())
    sync_bridge.run(http.aclose, lasting=True)
