"""Models and agents in front of hosted caches: what leaves us, and what is billed and read."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from caching_server import CachingServer
from langchain.agents import create_agent
from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_hosted import chat_model, found, planner_for, wrapped

from langchain_ctxreuse import (
    ReuseChatModel,
    ReuseCompressor,
    ReuseMiddleware,
    ReuseRetriever,
    format_context,
)

OPENAI = pytest.mark.parametrize("server", ["openai"], indirect=True)
BOTH = pytest.mark.parametrize("server", ["openai", "anthropic"], indirect=True)
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def asked(question: str, names: str, system: Any = "Be brief.") -> list[BaseMessage]:
    return [
        SystemMessage(system),
        HumanMessage(f"{format_context(found(names, 400))}\n\n{question}"),
    ]


def marked(body: dict[str, Any]) -> list[str]:
    messages = [{"content": body.get("system", "")}, *body["messages"]]
    parts = [p for one in messages if isinstance(one["content"], list) for p in one["content"]]
    fields = ("cache_control", "prompt_cache_breakpoint")
    return [p["text"].split()[0] for p in parts if any(name in p for name in fields)]


ROUNDS = ["one two three", "two one four", "five one two", "one two"]


@pytest.mark.parametrize(
    ("server", "cache", "written"),
    [
        ("openai", "openai(minimum=1536)", "30m"),
        ("anthropic", "anthropic(minimum=1536, life=5m)", "5m"),
        ("anthropic", "anthropic(minimum=1536, life=1h)", "1h"),
    ],
    indirect=["server"],
)
def test_documents_that_prompts_share_are_read(server, cache, written):
    server.provider.minimum = 1_536  # with the system text, documents reach it
    model = wrapped(server, cache)
    for number, names in enumerate([*ROUNDS, *ROUNDS]):
        answer = model.invoke(asked(f"Question {number}?", names, "Be brief. " * 500))
        assert "In France [Doc_" in answer.text
    reads = [usage.read for usage in server.usages]
    assert reads[0] == 0
    assert reads[-1] > 1_800
    assert {ttl for usage in server.usages for ttl in usage.written} == {written}
    usage = model.planner.savings.reported
    assert usage.cached_tokens == sum(reads)
    assert usage.prompt_tokens == sum(one.total for one in server.usages)
    assert answer.usage_metadata["input_tokens"] == server.usages[-1].total
    assert answer.usage_metadata["input_token_details"]["cache_read"] == reads[-1]
    if written == "30m":
        assert server.bodies[-1]["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
        assert all(len(one["prompt_cache_key"]) == 32 for one in server.bodies)


def test_the_users_marks_stay_and_a_fifth_never_leaves_us(server):
    model = wrapped(server)
    users = [{"type": "text", "text": f"rule{n} holds", **EPHEMERAL} for n in range(4)]
    for number in range(3):
        model.invoke(asked(f"Question {number}?", "one two three", system=users))
        assert marked(server.bodies[-1]) == ["rule0", "rule1", "rule2", "rule3"]
    for number in range(3):
        model.invoke(asked(f"Question {number}?", "one two three", system=users[:3]))
    assert marked(server.bodies[-1])[:3] == ["rule0", "rule1", "rule2"]
    assert len(marked(server.bodies[-1])) == 4
    assert not server.refusals


@OPENAI
def test_prompts_without_a_context_and_modes_of_the_user_go_as_they_are(server):
    model = wrapped(server)
    model.invoke([SystemMessage("Be brief."), HumanMessage("Hello?"), AIMessage("Yes?"),
                  HumanMessage("Well.")])  # fmt: skip
    body = server.bodies[0]
    assert [one["content"] for one in body["messages"]] == ["Be brief.", "Hello?", "Yes?", "Well."]
    assert not any(key.startswith("prompt_cache") for key in body)

    options = {"mode": "implicit", "ttl": "30m"}
    model = wrapped(server, inner=chat_model(server, prompt_cache_options=options), salt_key="s")
    model.invoke(asked("Which?", "one two"), prompt_cache_key="mine")
    assert server.bodies[-1]["prompt_cache_options"] == options
    assert server.bodies[-1]["prompt_cache_key"] == "mine"


@OPENAI
@pytest.mark.parametrize("header", ["X-Session-ID", "x-smg-routing-key", "x-session-affinity"])
def test_a_group_is_named_in_the_header_that_a_router_reads(server, header):
    model = wrapped(server, "vllm", send_session_id="group", session_header=header)
    for names in ("one two", "one three", "four five"):
        model.invoke(asked("Which?", names))
    ids = [headers[header.lower()] for headers in server.headers]
    assert ids[0] == ids[1] != ids[2]
    for body in server.bodies:
        assert not any(key.startswith("prompt_cache") for key in body), "it has no marks"
        assert all(isinstance(one["content"], str) for one in body["messages"])


def bills(server: CachingServer, model: BaseChatModel, prompts: Sequence[Any]) -> float:
    """Return the bill of prompts as a multiple of what they cost uncached."""
    server.usages.clear()
    for prompt in prompts:
        model.invoke(prompt)
    return server.bill / sum(usage.total for usage in server.usages)


@OPENAI
def test_a_bill_is_lower_than_with_the_providers_default(server):
    prompts = [(f"Question {n}?", ROUNDS[n % 3]) for n in range(30)]
    default = bills(server, chat_model(server), [asked(*one) for one in prompts])
    assert default == pytest.approx(1.25)
    assert bills(server, wrapped(server), [asked(*one) for one in prompts]) < 0.8


@BOTH
def test_in_shadow_mode_the_provider_gets_what_the_plain_model_sends(server, monkeypatch):
    monkeypatch.setenv("CTXREUSE_MODE", "shadow")
    for model in (chat_model(server), wrapped(server)):
        history: list[BaseMessage] = []
        for names in ROUNDS[:2]:
            history += asked("Which?", names)[len(history) > 0 :]
            history.append(model.invoke(history))
    assert server.bodies[:2] == server.bodies[2:]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that adapters plan with, in seconds."""
    seconds = [1_000.0]
    monkeypatch.setattr("ctxreuse.pipeline.engine_options.now", lambda: seconds[0])
    return seconds


@pytest.mark.parametrize(
    ("server", "labels", "is_planned_before"),
    [
        ("openai", False, False),
        ("openai", True, False),
        ("openai", True, True),
        ("anthropic", False, False),
        ("anthropic", True, True),
    ],
    indirect=["server"],
)
def test_a_late_turn_reads_what_others_keep_alive(server, labels, is_planned_before, clock):
    model = wrapped(server)
    life = 1_800 if server.provider.protocol == "openai" else 300

    def context(config: Any, names: str) -> str:
        documents = found(names, 400)
        if is_planned_before:
            lookup = RunnableLambda(lambda _: documents)
            retriever = ReuseRetriever(retriever=lookup, planner=model.planner)
            documents = retriever.invoke("?", config)
        return format_context(documents, labels=labels)

    def ask(name: str, before: list[BaseMessage], names: str = "one two three") -> int:
        config: Any = {"configurable": {"thread_id": name}}
        question = f"\n\nQuestion {len(server.bodies)}?"
        before.append(HumanMessage(context(config, names) + question))
        answer = model.invoke([SystemMessage("Be brief."), *before], config)
        before.append(AIMessage(answer.content))
        return server.usages[-1].read

    mine: list[BaseMessage] = []
    for name in ("a", "b", "c"):
        shared = ask(name, [])
    assert shared > 1_000
    assert ask("mine", mine) == shared
    for turn, name in enumerate(("four", "five", "six")):
        server.now, clock[0] = server.now + life - 10, clock[0] + life - 10
        assert ask(f"d{turn}", []) == shared
        server.now, clock[0] = server.now + 20, clock[0] + 20
        assert ask("mine", mine, name) == shared
    assert not server.refusals


QUERIES = ["one two three", "two one four", "five one two", "one two", "two one six", "one two"]


class Named(BaseRetriever):
    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return found(query)


PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n\n{context}"), ("human", "{input}?")]
)


def formatted(retriever: Any, model: Any) -> Any:
    begin = {"context": retriever | format_context, "input": RunnableLambda(str)}
    return RunnableLambda(lambda given: given["input"]) | begin | PROMPT | model


def stuffed(retriever: Any, model: Any) -> Any:
    return create_retrieval_chain(retriever, create_stuff_documents_chain(model, PROMPT))


RETRIEVERS: dict[str, Any] = {
    "plain": lambda planner: Named(),
    "ReuseRetriever": lambda planner: ReuseRetriever(retriever=Named(), planner=planner),
    "ReuseCompressor": lambda planner: ContextualCompressionRetriever(
        base_retriever=Named(), base_compressor=ReuseCompressor(planner=planner)
    ),
}


@BOTH
@pytest.mark.parametrize("retriever", RETRIEVERS)
@pytest.mark.parametrize("chained", [formatted, stuffed])
async def test_what_prompts_share_is_read_again(server, chained, retriever):
    planner = planner_for(server)
    chain = chained(RETRIEVERS[retriever](planner), wrapped(server, planner=planner))
    for query in [*QUERIES, *QUERIES]:
        [piece async for piece in chain.astream({"input": query})]
    assert server.usages[-1].read > 1_600
    assert not server.refusals
    if server.provider.protocol == "openai":
        assert server.bodies[-1]["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
        keys = {body["prompt_cache_key"] for body in server.bodies}
        assert len(keys) < len(QUERIES)


@BOTH
@pytest.mark.parametrize("is_async", [False, True])
def test_a_chains_batch_sends_the_one_first_that_writes_what_others_read(server, is_async):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    begin: Any = RunnableLambda(lambda query: {"question": query})
    chain = (
        retriever
        | {"context": format_context, "input": begin}
        | PROMPT
        | wrapped(server, planner=planner)
    )
    server.let_all_come()
    queries = ["one two three"] * 4
    if is_async:
        asyncio.run(chain.abatch(queries))
    else:
        chain.batch(queries)
    assert sum(usage.read == 0 for usage in server.usages) == 1


@BOTH
@pytest.mark.parametrize("shown", [{}, {"labels": True}])
@pytest.mark.parametrize("is_planned_before", [False, True])
def test_later_turns_read_the_turn_before(server, shown, is_planned_before):
    planner = planner_for(server)
    retriever = RETRIEVERS["ReuseRetriever" if is_planned_before else "plain"](planner)
    model = wrapped(server, planner=planner)
    messages: list[BaseMessage] = [AIMessage("How can I help?")] if shown else []

    def turn(query: str) -> BaseMessage:
        context = format_context(retriever.invoke(query), **shown)
        messages.append(HumanMessage(f"{context}\n\n{query}?"))
        return model.invoke(messages)

    config: Any = {"configurable": {"thread_id": "c1"}}
    for query in ("one two", "three four", "one five"):
        before = server.usages[-1].total if server.usages else 0
        messages.append(AIMessage(RunnableLambda(turn).invoke(query, config).content))
        assert server.usages[-1].read == before


@BOTH
@pytest.mark.parametrize("system", [[], [SystemMessage("Be brief.")]])
def test_words_before_documents_in_their_message_are_read(server, system):
    model, words = wrapped(server), "Rule: be brief. " * 400
    documents = [format_context(found(f"u{n} v{n}", 400)) for n in range(40)]
    prompts = [[*system, HumanMessage(f"{words}\n\n{one}\n\nWhich?")] for one in documents]
    assert bills(server, model, prompts) < 0.6
    tool = {"name": "look", "description": "Look. " * 3_000, "parameters": {}}
    again = [[HumanMessage(f"{documents[n % 3]}\n\n{n}?")] for n in range(40)]
    assert bills(server, model.bind_tools([tool]), again) <= 1, "no breakpoint stands behind tools"


@BOTH
def test_turns_that_no_later_one_begins_with_are_not_written(server):
    asked_before = [HumanMessage("Why?"), AIMessage("So.")]  # without its documents
    turns = [asked(f"{names}?", names) for names in ("one two three", "four five six")]
    prompts = [[system, *asked_before, question] for system, question in turns]
    assert bills(server, wrapped(server), prompts) == 1


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def agent_at(
    server: CachingServer,
    *others: Any,
    cache: str | None = None,
    is_first: bool = False,
    is_wrapped: bool = False,
) -> Any:
    planner = planner_for(server, cache)
    ours = ReuseMiddleware(planner=planner, retriever=RunnableLambda(found))
    every = [ours, *others] if is_first else [*others, ours]
    model = wrapped(server, planner=planner) if is_wrapped else chat_model(server)
    return create_agent(model, tools=[add], middleware=every, system_prompt="Be brief.")


def ask(agent: Any, query: str, before: list[Any] | None = None) -> list[Any]:
    messages = [*(before or []), {"role": "user", "content": query}]
    answered: list[Any] = agent.invoke({"messages": messages})["messages"]
    return answered


def said(body: dict[str, Any]) -> str:
    contents = [one["content"] for one in body["messages"]]
    parts = [[one] if isinstance(one, str) else one for one in contents]
    return "".join(p if isinstance(p, str) else p["text"] for part in parts for p in part)


@BOTH
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_users_who_share_documents_read_them(server, is_wrapped):
    agent = agent_at(server, is_wrapped=is_wrapped)
    for query in [*QUERIES, *QUERIES]:
        ask(agent, query)
        shown = said(server.bodies[-1])
        assert all(one.page_content in shown for one in found(query))
        assert shown.endswith(f"\n\n{query}")
    assert server.usages[-1].read > 1_600
    assert not server.refusals


@BOTH
def test_each_turn_reads_the_turn_before(server):
    agent = agent_at(server)
    messages: list[Any] = []
    for query in ("one two", "three four", "one five"):
        before = server.usages[-1].total if server.usages else 0
        messages = ask(agent, query, messages)
        assert server.usages[-1].read == before


@pytest.mark.parametrize("is_first", [False, True])
def test_beside_anthropics_middleware_a_fifth_mark_never_leaves_us(server, is_first):
    agent = agent_at(server, AnthropicPromptCachingMiddleware(), is_first=is_first)
    messages: list[Any] = []
    for query in QUERIES:
        ask(agent, query)
        messages = ask(agent, query, messages)
    assert not server.refusals
    body = server.bodies[-1]
    for marked in (body, body["system"][-1], body["tools"][-1]):
        assert marked["cache_control"] == {"type": "ephemeral", "ttl": "5m"}


def test_the_default_profile_sends_texts(server):
    ask(agent_at(server, cache="vllm"), "one two")
    assert isinstance(server.bodies[-1]["messages"][0]["content"], str)


WINDOW_S = 0.2  # wide, so that all come in it on a busy machine


def patient(server: CachingServer, **settings: Any) -> ReuseChatModel:
    """Return a model in whose window single calls wait for each other."""
    return wrapped(server, **{"window_s": WINDOW_S, **settings})


def prompts(number: int = 4) -> list[list[BaseMessage]]:
    context = format_context(found("a b"))
    return [[HumanMessage(f"{context}\n\nQuestion {n}?")] for n in range(number)]


def ask_in_threads(model: ReuseChatModel) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(model.invoke, prompts()))) == 4


def have_all_meet(server: CachingServer) -> None:
    """Have no call answered before four have come."""
    everybody = threading.Barrier(4)
    server.before_first_token = lambda: everybody.wait(60)


def unread(server: CachingServer) -> int:
    return sum(usage.read == 0 for usage in server.usages)


@pytest.mark.parametrize("in_threads", [False, True])
async def test_calls_wait_for_the_one_that_writes_what_they_read(server, in_threads):
    server.let_all_come()
    model = patient(server)
    ask: Any = partial(asyncio.to_thread, model.invoke) if in_threads else model.ainvoke
    await asyncio.gather(*map(ask, prompts()))
    assert (unread(server), len(server.usages)) == (1, 4)


async def test_a_leader_that_fails_lets_its_followers_go(server):
    fails = [True]

    def fail() -> None:
        if fails.pop() if fails else False:
            raise ConnectionError

    server.before_first_token = fail
    model = patient(server)
    answers = await asyncio.gather(*map(model.ainvoke, prompts()), return_exceptions=True)
    assert sum(isinstance(one, Exception) for one in answers) == 1
    assert len(server.usages) == 3


async def test_a_stream_leads_until_its_first_token(server):
    model = patient(server)
    first, *rest = prompts()
    held: list[Any] = []

    async def stream() -> None:
        pieces = model.astream(first)
        held.append(await anext(pieces))
        await asyncio.gather(*others)
        held.extend([piece async for piece in pieces])

    others = [asyncio.create_task(model.ainvoke(one)) for one in rest]
    leader = asyncio.create_task(stream())
    others.insert(0, asyncio.create_task(asyncio.sleep(0)))
    await leader
    assert unread(server) == 1


@pytest.mark.parametrize("settings", [{"window_s": 0}, {"cache": "vllm"}])
def test_without_a_window_or_for_the_default_cache_nobody_waits(server, settings):
    have_all_meet(server)
    ask_in_threads(patient(server, **settings))


def test_what_is_written_already_makes_nobody_wait(server):
    model = patient(server, window_s=0.01)
    for one in prompts(3):
        model.invoke(one)
    have_all_meet(server)
    ask_in_threads(model)
    assert unread(server) == 2
