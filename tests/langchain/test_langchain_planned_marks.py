"""Marks of documents that a retriever or compressor has planned, sent by a wrapped chat model."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from langchain_anthropic import ChatAnthropic
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from ctxreuse import ReusePlanner
from langchain_ctxreuse import (
    ReuseChatModel,
    ReuseCompressor,
    ReuseMiddleware,
    ReuseRetriever,
    format_context,
)

QUERIES = ["one two three", "two one four", "five one two", "one two", "two one six", "one two"]


class Named(BaseRetriever):
    """Finds the documents that a question names."""

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return found(query)


def found(query: str) -> list[Document]:
    names = query.rstrip("?").split()
    return [Document(id=name, page_content=f"{name} says: {'well ' * 800}{name}") for name in names]


@pytest.fixture(params=["openai", "anthropic"])
def server(request: pytest.FixtureRequest) -> Iterator[CachingServer]:
    with caching_server(request.param) as server:
        yield server


def planner_for(server: CachingServer, cache: str | None = None) -> ReusePlanner:
    return ReusePlanner(cache=cache or server.provider.protocol, token_counter=count_tokens)


def model_at(server: CachingServer) -> Any:
    if server.provider.protocol == "openai":
        return ChatOpenAI(model="m", base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    return ChatAnthropic(model="m", base_url=server.url, api_key="k", max_retries=0, max_tokens=9)


def wrapped(server: CachingServer, planner: ReusePlanner) -> ReuseChatModel:
    return ReuseChatModel(inner=model_at(server), planner=planner, window_s=0)


def parts_of(body: dict[str, Any]) -> list[Any]:
    contents = [body.get("system", ""), *(one["content"] for one in body["messages"])]
    return [p for c in contents for p in ([c] if isinstance(c, str) else c)]


def text_of(part: Any) -> str:
    return part if isinstance(part, str) else str(part["text"])


def marked(body: dict[str, Any]) -> list[str]:
    """Return which document each marked part of a request shows."""
    fields = ("cache_control", "prompt_cache_breakpoint")
    return [
        text_of(part).split(" says:")[0].split()[-1]
        for part in parts_of(body)
        if not isinstance(part, str) and any(name in part for name in fields)
    ]


PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n\n{context}"), ("human", "{input}?")]
)


def test_format_context_keeps_the_marks_of_the_retrievers_plan(server):
    planner = planner_for(server)
    chain = (
        {
            "context": ReuseRetriever(retriever=Named(), planner=planner) | format_context,
            "input": RunnableLambda(str),
        }
        | PROMPT
        | wrapped(server, planner)
    )
    for query in [*QUERIES, *QUERIES]:
        chain.invoke(query)
    assert server.usages[-1].read > 1_600
    assert marked(server.bodies[-1])[-1] in ("one", "two")
    assert not server.refusals
    if server.provider.protocol == "openai":
        assert server.bodies[-1]["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
        keys = {body["prompt_cache_key"] for body in server.bodies}
        assert len(keys) < len(QUERIES)


def test_an_unchanged_stuff_chain_sends_the_marks_of_the_retrievers_plan(server):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    stuff = create_stuff_documents_chain(wrapped(server, planner), PROMPT)
    chain = create_retrieval_chain(retriever, stuff)
    for query in [*QUERIES, *QUERIES]:
        answer = chain.invoke({"input": query})
        shown = "\n\n".join(one.page_content for one in answer["context"])
        said = "".join(map(text_of, parts_of(server.bodies[-1])))
        assert said == f"Answer from this:\n\n{shown}{query}?"
    assert server.usages[-1].read > 1_600
    assert not server.refusals


async def test_stuff_chains_and_compressors_send_the_marks_of_their_plans(server):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner, annotation="metadata")
    shape = PromptTemplate.from_template("<doc>{page_content}</doc>")
    stuff = create_stuff_documents_chain(
        wrapped(server, planner), PROMPT, document_prompt=shape, document_separator="\n"
    )
    chain = create_retrieval_chain(retriever, stuff)
    for query in [*QUERIES, *QUERIES]:
        [piece async for piece in chain.astream({"input": query})]
    assert server.usages[-1].read > 1_600

    planner = planner_for(server)
    retriever = ContextualCompressionRetriever(
        base_retriever=Named(), base_compressor=ReuseCompressor(planner=planner)
    )
    stuff = create_stuff_documents_chain(wrapped(server, planner), PROMPT)
    chain = create_retrieval_chain(retriever, stuff)
    for query in [*QUERIES, *QUERIES]:
        chain.invoke({"input": query})
    assert server.usages[-1].read > 1_600


@pytest.mark.parametrize("is_async", [False, True])
def test_a_chains_batch_sends_the_one_first_that_writes_what_others_read(server, is_async):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    begin: Any = RunnableLambda(lambda query: {"question": query})
    chain = (
        retriever | {"context": format_context, "input": begin} | PROMPT | wrapped(server, planner)
    )
    server.let_all_come()
    queries = ["one two three"] * 4
    if is_async:
        asyncio.run(chain.abatch(queries))
    else:
        chain.batch(queries)
    assert sum(usage.read == 0 for usage in server.usages) == 1


def test_behind_a_document_that_was_taken_away_nothing_is_marked(server):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    model = wrapped(server, planner)
    for query in ["one two three", "one two three", "one two three"]:
        documents = retriever.invoke(query)
    assert len(documents) == 3
    for gone, expected in ((2, 2), (1, 1), (0, 0)):
        kept = [one for number, one in enumerate(documents) if number != gone]
        names = [one.id for one in documents[:expected]]
        model.invoke([HumanMessage(f"{format_context(kept)}\n\nWhich?")])
        assert set(marked(server.bodies[-1])) <= set(names)
    model.invoke([HumanMessage(f"{format_context(documents)}\n\nWhich?")])
    assert marked(server.bodies[-1])


def test_later_turns_read_the_turn_before(server):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    model = wrapped(server, planner)
    messages: list[BaseMessage] = []
    for query in ("one two", "three four", "one five"):
        config: Any = {"configurable": {"thread_id": "c1"}}
        context = format_context(retriever.invoke(query, config))
        messages.append(HumanMessage(f"{context}\n\n{query}?"))
        before = server.usages[-1].total if server.usages else 0
        messages.append(AIMessage(model.invoke(messages, config).content))
        assert server.usages[-1].read == before


def test_later_turns_of_a_stuff_chain_read_the_turn_before(server):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    model = wrapped(server, planner)
    messages: list[BaseMessage] = []

    def turn(query: str) -> BaseMessage:
        context = "\n\n".join(one.page_content for one in retriever.invoke(query))
        messages.append(HumanMessage(f"{context}\n\n{query}?"))
        return model.invoke(messages)

    for query in ("one two", "three four", "one five"):
        before = server.usages[-1].total if server.usages else 0
        config: Any = {"configurable": {"thread_id": "c1"}}
        messages.append(RunnableLambda(turn).invoke(query, config))
        assert server.usages[-1].read == before


def test_an_agents_context_is_sent_with_marks_by_a_wrapped_model(server):
    from langchain.agents import create_agent

    planner = planner_for(server)
    ours = ReuseMiddleware(planner=planner, retriever=RunnableLambda(found))
    agent: Any = create_agent(wrapped(server, planner), middleware=[ours])
    for query in [*QUERIES, *QUERIES]:
        agent.invoke({"messages": [{"role": "user", "content": query}]})
    assert server.usages[-1].read > 1_600
    assert not server.refusals


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Yield what the log says once, said anew."""
    from ctxreuse.adapters import issued_plans

    issued_plans.log_marks_unsent.cache_clear()
    issued_plans.ISSUED_PLANS.forget_marks()
    caplog.set_level(logging.WARNING, "ctxreuse")
    lines: list[str] = []
    yield lines
    lines += [one.getMessage() for one in caplog.records]


def test_without_a_wrapped_model_the_log_says_once_that_no_marks_are_sent(server, said, caplog):
    retriever = ReuseRetriever(retriever=Named(), planner=planner_for(server))
    stuff = create_stuff_documents_chain(model_at(server), PROMPT)
    chain = create_retrieval_chain(retriever, stuff)
    for query in QUERIES * 7:
        chain.invoke({"input": query})
    told = [one.getMessage() for one in caplog.records if "marks" in one.getMessage()]
    assert len(told) == 1
    assert "ReuseChatModel(inner=" in told[0]


def test_with_a_wrapped_model_the_log_says_nothing(server, said, caplog):
    planner = planner_for(server)
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    chain = create_retrieval_chain(
        retriever, create_stuff_documents_chain(wrapped(server, planner), PROMPT)
    )
    for query in QUERIES * 7:
        chain.invoke({"input": query})
    assert not [one for one in caplog.records if "marks" in one.getMessage()]


def test_a_retriever_whose_planner_knows_no_marks_is_named_once(server, caplog):
    from ctxreuse.adapters import prompt_planner

    prompt_planner._log_planned_without_marks.cache_clear()
    caplog.set_level(logging.WARNING, "ctxreuse")
    retriever = ReuseRetriever(retriever=Named(), planner=planner_for(server, "vllm"))
    model = wrapped(server, planner_for(server))
    for query in QUERIES:
        model.invoke([HumanMessage(f"{format_context(retriever.invoke(query))}\n\nWhich?")])
    told = [one.getMessage() for one in caplog.records]
    assert sum("were planned without marks" in one for one in told) == 1


def test_documents_planned_for_the_default_cache_go_as_texts(server):
    planner = planner_for(server, "vllm")
    retriever = ReuseRetriever(retriever=Named(), planner=planner)
    model = wrapped(server, planner)
    for query in QUERIES:
        model.invoke([HumanMessage(f"{format_context(retriever.invoke(query))}\n\nWhich?")])
    assert isinstance(server.bodies[-1]["messages"][0]["content"], str)
