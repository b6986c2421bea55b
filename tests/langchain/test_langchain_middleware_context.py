from __future__ import annotations

from typing import Any

import pytest
from langchain_agent_helpers import (
    PICTURE,
    A,
    B,
    C,
    D,
    agent_with,
    ask,
    calls,
    done,
    is_append_only,
    results,
    search_tool,
    see,
    sent,
)
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
)
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_document_helpers import (
    LetterRetriever,
    document,
    no_sockets,
)

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse import ReuseMiddleware, ReuseRetriever

pytestmark = pytest.mark.usefixtures("paper_words")

__all__ = ["no_sockets"]


def test_context_stands_before_the_newest_question_and_behind_the_history():
    agent, model = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()), [done("One."), done("Two.")]
    )
    ask(agent, "ab")
    messages = ask(agent, "bc")
    assert [message.content for message in sent(messages)] == [
        f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nab",
        "One.",
        f"{see(2)}\n\n[Doc_3] {C}\n\nbc",
        "Two.",
    ]
    assert is_append_only(model.seen)
    assert [one.additional_kwargs["ctxreuse"]["question"] for one in messages[::2]] == ["ab", "bc"]


def test_another_threads_first_context_shares_its_beginning():
    agent, model = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done(), done()])
    ask(agent, "abc", "t1")
    [question, _] = ask(agent, "dba", "t2")
    assert question.content == (
        f"[Doc_1] {A}\n\n[Doc_2] {B}\n\n[Doc_3] {D}\n\nPlease read the context in the following "
        "priority order: [Doc_3] > [Doc_2] > [Doc_1] and answer the question.\n\ndba"
    )
    assert [message["role"] for message in model.seen[1]] == ["system", "user"]


def test_a_system_message_before_the_first_question_is_no_history():
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    for letters in ("ab", "ba"):
        messages = [SystemMessage("Be brief.", id=f"s{letters}"), HumanMessage(letters, id=letters)]
        update = middleware.before_agent({"messages": messages}, None)  # type: ignore[arg-type]
    assert update is not None
    assert update["messages"][0].content.startswith(f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nPlease read")


def test_a_tool_result_does_not_repeat_the_context_of_the_question():
    agent, _ = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()), [calls("cb"), done()], search_tool()
    )
    assert results(sent(ask(agent, "ab"))) == [f"[Doc_3] {C}\n\n{see(2)}"]


async def test_an_async_agent_retrieves_context_too():
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    agent, model = agent_with(middleware, [done()])
    config: RunnableConfig = {"configurable": {"thread_id": "t1"}}
    await agent.ainvoke({"messages": [HumanMessage("ab")]}, config)
    assert model.seen[0][1]["content"] == f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nab"


def test_context_is_retrieved_once_for_a_question():
    queries: list[str] = []

    def retrieve(query: str) -> list[Document]:
        queries.append(query)
        return [document("a")]

    middleware = ReuseMiddleware(retriever=RunnableLambda(retrieve))
    state: Any = {"messages": [HumanMessage("first", id="1")]}
    update = middleware.before_agent(state, None)  # type: ignore[arg-type]
    assert update is not None
    assert middleware.before_agent(update, None) is None  # type: ignore[arg-type]
    answered = {"messages": [*state["messages"], AIMessage("Yes.", id="2")]}
    assert middleware.before_agent(answered, None) is None  # type: ignore[arg-type]
    assert queries == ["first"]


def test_a_question_with_a_picture_keeps_it():
    agent, model = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done(), done()])
    parts = [{"type": "text", "text": "ab"}, PICTURE]
    [question, _] = ask(agent, parts)
    context = {"type": "text", "text": f"[Doc_1] {A}\n\n[Doc_2] {B}"}
    assert question.content == [context, *parts]
    assert sent(ask(agent, "b"))[2].content == f"{see(2)}\n\nb"
    assert is_append_only(model.seen)


@pytest.mark.parametrize("content", ["", "  ", [PICTURE]])
def test_nothing_is_retrieved_for_a_question_without_text(content):
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done()])
    assert ask(agent, content)[0].content == content


def test_a_question_for_which_nothing_is_found_stays_as_it_is():
    agent, _ = agent_with(ReuseMiddleware(retriever=RunnableLambda(lambda _: [])), [done()])
    [question, _] = ask(agent, "ab")
    assert question.content == "ab"
    assert question.additional_kwargs == {}


def test_an_error_of_the_retriever_is_not_caught():
    def retrieve(query: str) -> list[Document]:
        raise ConnectionError("no store")

    agent, _ = agent_with(ReuseMiddleware(retriever=RunnableLambda(retrieve)), [done()])
    with pytest.raises(ConnectionError, match="no store"):
        ask(agent, "ab")


@pytest.mark.parametrize("found", [True, None, "text", ["text"], {"documents": []}])
def test_what_is_no_documents_is_named(found):
    middleware = ReuseMiddleware(retriever=RunnableLambda(lambda query: found))
    agent, _ = agent_with(middleware, [done()])
    with pytest.raises(InvalidRequestError, match="the retriever must return a list of Document"):
        ask(agent, "Which?")


def test_a_retriever_may_return_an_iterator():
    middleware = ReuseMiddleware(retriever=RunnableLambda(lambda query: map(document, query)))
    agent, _ = agent_with(middleware, [done()])
    assert ask(agent, "ab")[0].content == f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nab"


def test_a_reuse_retriever_may_retrieve_the_context():
    planner = ReusePlanner()
    retriever = ReuseRetriever(planner=planner, retriever=LetterRetriever())
    middleware = ReuseMiddleware(planner=planner, retriever=retriever)
    agent, _ = agent_with(middleware, [done(), done()])
    ask(agent, "ab", "t1")
    [question, _] = ask(agent, "ba", "t2")
    assert question.content == (
        f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nPlease read the context in the following "
        "priority order: [Doc_2] > [Doc_1] and answer the question.\n\nba"
    )


def test_tenants_do_not_influence_each_others_order():
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done(), done(), done()])
    ask(agent, "abc", "t1", tenant="one")
    other = ask(agent, "dcb", "t2", tenant="two")[0].content
    assert other == f"[Doc_1] {D}\n\n[Doc_2] {C}\n\n[Doc_3] {B}\n\ndcb"
    assert ask(agent, "dcb", "t3", tenant="one")[0].content != other


def test_a_result_that_ended_a_run_is_planned_when_the_next_one_shows_it():
    direct = search_tool()
    direct.return_direct = True
    agent, model = agent_with(ReuseMiddleware(), [calls("ab"), calls("cb"), done()], direct)
    assert results(ask(agent, "First?")) == [f"{A}\n\n{B}"]
    messages = ask(agent, "Second?")
    assert results(messages) == [f"[Doc_1] {A}\n\n[Doc_2] {B}", f"{C}\n\n{B}"]
    assert results(sent(ask(agent, "Third?")))[1] == f"[Doc_3] {C}\n\n{see(2)}"
    assert is_append_only(model.seen)


def test_labels_of_such_a_result_and_of_the_next_context_differ():
    direct = search_tool()
    direct.return_direct = True
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    agent, model = agent_with(middleware, [calls("cb"), done()], direct)
    ask(agent, "ab")
    messages = ask(agent, "cd")
    assert [
        message.content for message in sent(messages) if not isinstance(message, AIMessage)
    ] == [
        f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nab",
        f"[Doc_3] {C}\n\n{see(2)}",
        f"{see(3)}\n\n[Doc_4] {D}\n\ncd",
    ]
    assert is_append_only(model.seen)
