"""Wrapped chat models in front of hosted caches: what leaves us, and what the provider bills."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from langchain_anthropic import ChatAnthropic
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

PASSAGES = {name: f"{name} " * 400 for name in ("one", "two", "three", "four", "five", "six")}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def openai_server() -> Iterator[CachingServer]:
    with caching_server("openai") as server:
        yield server


@pytest.fixture
def claude_server() -> Iterator[CachingServer]:
    with caching_server("anthropic") as server:
        yield server


def chat_openai(server: CachingServer, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="m", base_url=f"{server.url}/v1", api_key="k", max_retries=0, **settings
    )


def chat_anthropic(server: CachingServer, **settings: Any) -> ChatAnthropic:
    return ChatAnthropic(
        model="m", base_url=server.url, api_key="k", max_retries=0, max_tokens=9, **settings
    )


def wrapped(inner: BaseChatModel, cache: str, **settings: Any) -> ReuseChatModel:
    planner = ReusePlanner(cache=cache, token_counter=count_tokens)
    return ReuseChatModel(inner=inner, planner=planner, window_s=0, **settings)


def context(*names: str) -> str:
    return format_context([Document(id=name, page_content=PASSAGES[name]) for name in names])


def asked(question: str, *names: str, system: Any = "Be brief.") -> list[BaseMessage]:
    return [SystemMessage(system), HumanMessage(f"{context(*names)}\n\n{question}")]


def said(body: dict[str, Any]) -> str:
    """Return all texts of a request, one after the other."""
    messages = [{"content": body.get("system", "")}, *body["messages"]]
    contents = [message["content"] for message in messages]
    parts = [[one] if isinstance(one, str) else one for one in contents]
    return "".join(p if isinstance(p, str) else p["text"] for part in parts for p in part)


def marked(body: dict[str, Any]) -> list[str]:
    messages = [{"content": body.get("system", "")}, *body["messages"]]
    parts = [p for one in messages if isinstance(one["content"], list) for p in one["content"]]
    fields = ("cache_control", "prompt_cache_breakpoint")
    return [p["text"].split()[0] for p in parts if any(name in p for name in fields)]


ROUNDS = [("one", "two", "three"), ("two", "one", "four"), ("five", "one", "two"), ("one", "two")]


def test_chat_openai_reads_documents_that_prompts_share(openai_server):
    model = wrapped(chat_openai(openai_server), "openai(minimum=512)")
    openai_server.provider.minimum = 512
    for number, names in enumerate([*ROUNDS, *ROUNDS]):
        answer = model.invoke(asked(f"Question {number}?", *names))
        assert "In France [Doc_" in answer.text
    reads = [usage.read for usage in openai_server.usages]
    assert reads[0] == 0
    assert reads[-1] > 800
    body = openai_server.bodies[-1]
    assert body["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
    assert all(len(one["prompt_cache_key"]) == 32 for one in openai_server.bodies)
    details = answer.usage_metadata["input_token_details"]
    assert details["cache_read"] == reads[-1]


def test_what_is_sent_in_parts_says_what_is_sent_in_one(openai_server):
    with caching_server("openai") as other:
        pairs = [
            (wrapped(chat_openai(openai_server), "openai", strategy="none"), openai_server),
            (wrapped(chat_openai(other), "vllm", strategy="none"), other),
        ]
        for model, _ in pairs:
            for number, names in enumerate(ROUNDS):
                model.invoke(asked(f"Question {number}?", *names))
        with_parts, plain = ([said(body) for body in server.bodies] for _, server in pairs)
        assert with_parts == plain
        assert not any(key.startswith("prompt_cache") for body in other.bodies for key in body)
        assert all(isinstance(one["content"], str) for b in other.bodies for one in b["messages"])


@pytest.mark.parametrize("ttl", ["5m", "1h"])
def test_chat_anthropic_reads_documents_that_prompts_share(claude_server, ttl):
    claude_server.provider.minimum = 512
    model = wrapped(chat_anthropic(claude_server), f"anthropic(minimum=512, life={ttl})")
    for number, names in enumerate([*ROUNDS, *ROUNDS]):
        answer = model.invoke(asked(f"Question {number}?", *names))
    reads = [usage.read for usage in claude_server.usages]
    assert reads[0] == 0
    assert reads[-1] > 800
    assert {ttl for usage in claude_server.usages for ttl in usage.written} == {ttl}
    usage = model.planner.savings.reported
    assert usage.cached_tokens == sum(reads)
    assert usage.prompt_tokens == sum(one.total for one in claude_server.usages)
    assert answer.usage_metadata["input_tokens"] == claude_server.usages[-1].total


def test_the_users_marks_stay_and_a_fifth_never_leaves_us(claude_server):
    model = wrapped(chat_anthropic(claude_server), "anthropic")
    users = [{"type": "text", "text": f"rule{n} holds", **EPHEMERAL} for n in range(4)]
    for number in range(3):
        model.invoke(asked(f"Question {number}?", "one", "two", "three", system=users))
        assert marked(claude_server.bodies[-1]) == ["rule0", "rule1", "rule2", "rule3"]
    for number in range(3):
        model.invoke(asked(f"Question {number}?", "one", "two", "three", system=users[:3]))
    assert marked(claude_server.bodies[-1])[:3] == ["rule0", "rule1", "rule2"]
    assert len(marked(claude_server.bodies[-1])) == 4
    assert not claude_server.refusals


def test_prompts_without_a_context_and_modes_of_the_user_go_as_they_are(openai_server):
    model = wrapped(chat_openai(openai_server), "openai")
    model.invoke([SystemMessage("Be brief."), HumanMessage("Hello?"), AIMessage("Yes?"),
                  HumanMessage("Well.")])  # fmt: skip
    body = openai_server.bodies[0]
    assert [one["content"] for one in body["messages"]] == ["Be brief.", "Hello?", "Yes?", "Well."]
    assert not any(key.startswith("prompt_cache") for key in body)

    options = {"mode": "implicit", "ttl": "30m"}
    model = wrapped(
        chat_openai(openai_server, prompt_cache_options=options), "openai", salt_key="s"
    )
    model.invoke(asked("Which?", "one", "two"), prompt_cache_key="mine")
    assert openai_server.bodies[-1]["prompt_cache_options"] == options
    assert openai_server.bodies[-1]["prompt_cache_key"] == "mine"


@pytest.mark.parametrize("header", ["X-Session-ID", "x-smg-routing-key", "x-session-affinity"])
def test_a_group_is_named_in_the_header_that_a_router_reads(openai_server, header):
    model = wrapped(
        chat_openai(openai_server), "vllm", send_session_id="group", session_header=header
    )
    for names in (("one", "two"), ("one", "three"), ("four", "five")):
        model.invoke(asked("Which?", *names))
    ids = [headers[header.lower()] for headers in openai_server.headers]
    assert ids[0] == ids[1] != ids[2]


def bills(server: CachingServer, model: BaseChatModel, prompts: Sequence[Any]) -> float:
    """Return the bill of prompts as a multiple of what they cost uncached."""
    server.usages.clear()
    for prompt in prompts:
        model.invoke(prompt)
    return server.bill / sum(usage.total for usage in server.usages)


def test_a_bill_is_lower_than_with_the_providers_default(openai_server):
    prompts = [(f"Question {n}?", *ROUNDS[n % 3]) for n in range(30)]
    plain = chat_openai(openai_server)
    default = bills(openai_server, plain, [asked(*one) for one in prompts])
    assert default == pytest.approx(1.25)
    model = wrapped(plain, "openai")
    ours = [asked(*one) for one in prompts]
    assert bills(openai_server, model, ours) < 0.8


def batch_prompts() -> list[list[BaseMessage]]:
    return [asked(f"Question {n}?", "one", "two", "three") for n in range(4)]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_followers_of_a_batch_wait_for_their_leader(claude_server, is_async):
    began: list[int] = []
    claude_server.before_first_token = lambda: began.append(len(claude_server.usages))
    model = wrapped(chat_anthropic(claude_server), "anthropic")
    if is_async:
        answers = asyncio.run(model.abatch(batch_prompts()))
    else:
        answers = model.batch(batch_prompts())
    assert len(answers) == 4
    assert began.count(0) == 1, "the leader was answered before another one was sent"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that adapters plan with, in seconds."""
    seconds = [1_000.0]
    monkeypatch.setattr("ctxreuse.pipeline.clock.now", lambda: seconds[0])
    return seconds


@pytest.mark.parametrize(
    ("kind", "labels", "is_planned_before"),
    [
        ("openai", False, False),
        ("openai", True, False),
        ("openai", True, True),
        ("anthropic", False, False),
        ("anthropic", True, True),
    ],
)
def test_a_late_turn_reads_what_others_keep_alive(kind, labels, is_planned_before, clock):
    with caching_server(kind) as server:
        inner = (chat_openai if kind == "openai" else chat_anthropic)(server)
        model = wrapped(inner, kind)
        life = 1_800 if kind == "openai" else 300

        def found(config: Any, *names: str) -> str:
            documents = [Document(id=name, page_content=PASSAGES[name]) for name in names]
            if is_planned_before:
                lookup = RunnableLambda(lambda _: documents)
                documents = ReuseRetriever(retriever=lookup, planner=model.planner).invoke(
                    "?", config
                )
            return format_context(documents, labels=labels)

        def ask(name: str, before: list[BaseMessage], *names: str) -> int:
            config: Any = {"configurable": {"thread_id": name}}
            question = f"\n\nQuestion {len(server.bodies)}?"
            before.append(HumanMessage(found(config, *names) + question))
            answer = model.invoke([SystemMessage("Be brief."), *before], config)
            before.append(AIMessage(answer.content))
            return server.usages[-1].read

        mine: list[BaseMessage] = []
        for name in ("a", "b", "c"):
            shared = ask(name, [], "one", "two", "three")
        assert shared > 1_000
        assert ask("mine", mine, "one", "two", "three") == shared
        for turn, name in enumerate(("four", "five", "six")):
            server.now, clock[0] = server.now + life - 10, clock[0] + life - 10
            assert ask(f"d{turn}", [], "one", "two", "three") == shared
            server.now, clock[0] = server.now + 20, clock[0] + 20
            assert ask("mine", mine, name) == shared
        assert not server.refusals
