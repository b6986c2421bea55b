"""Chains and agents whose model is wrapped send marks that a provider's cache reads again."""

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_hosted import found, planner_for, wrapped

from langchain_ctxreuse import ReuseCompressor, ReuseMiddleware, ReuseRetriever, format_context

pytestmark = pytest.mark.parametrize("server", ["openai", "anthropic"], indirect=True)
QUERIES = ["one two three", "two one four", "five one two", "one two", "two one six", "one two"]


class Named(BaseRetriever):
    """Finds the documents that a question names."""

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


def in_tags(retriever: Any, model: Any) -> Any:
    shape = PromptTemplate.from_template("<doc>{page_content}</doc>")
    stuff = create_stuff_documents_chain(
        model, PROMPT, document_prompt=shape, document_separator="\n"
    )
    return create_retrieval_chain(retriever, stuff)


RETRIEVERS: dict[str, Any] = {
    "plain": lambda planner: Named(),
    "ReuseRetriever": lambda planner: ReuseRetriever(retriever=Named(), planner=planner),
    "ReuseCompressor": lambda planner: ContextualCompressionRetriever(
        base_retriever=Named(), base_compressor=ReuseCompressor(planner=planner)
    ),
}


@pytest.mark.parametrize("retriever", RETRIEVERS)
@pytest.mark.parametrize("chained", [formatted, stuffed, in_tags])
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


@pytest.mark.parametrize("shown", [{}, {"labels": True}])
@pytest.mark.parametrize("is_planned_before", [False, True])
def test_later_turns_read_the_turn_before(server, shown, is_planned_before):
    planner = planner_for(server)
    retriever = RETRIEVERS["ReuseRetriever" if is_planned_before else "plain"](planner)
    model = wrapped(server, planner=planner)
    messages: list[BaseMessage] = []

    def turn(query: str) -> BaseMessage:
        context = format_context(retriever.invoke(query), **shown)
        messages.append(HumanMessage(f"{context}\n\n{query}?"))
        return model.invoke(messages)

    config: Any = {"configurable": {"thread_id": "c1"}}
    for query in ("one two", "three four", "one five"):
        before = server.usages[-1].total if server.usages else 0
        messages.append(AIMessage(RunnableLambda(turn).invoke(query, config).content))
        assert server.usages[-1].read == before


def test_an_agents_context_is_sent_with_marks_by_a_wrapped_model(server):
    planner = planner_for(server)
    ours = ReuseMiddleware(planner=planner, retriever=RunnableLambda(found))
    agent: Any = create_agent(wrapped(server, planner=planner), middleware=[ours])
    for query in [*QUERIES, *QUERIES]:
        agent.invoke({"messages": [{"role": "user", "content": query}]})
    assert server.usages[-1].read > 1_600
    assert not server.refusals
