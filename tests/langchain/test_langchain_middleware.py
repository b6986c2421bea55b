from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from copy import deepcopy
from itertools import count, pairwise
from typing import Any

import pytest
from adapter_conformance import FaultyPlanner
from helpers import contexts_in
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelRequest,
    ModelResponse,
)
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool, create_retriever_tool, tool
from langchain_document_helpers import (
    LetterRetriever,
    document,
    letters_of,
    no_sockets,
    text_of,
)
from langgraph.checkpoint.memory import InMemorySaver

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, ReuseRetriever, format_context

__all__ = ["no_sockets"]

A, B, C, D, E = (text_of(letter) for letter in "abcde")
_numbers = count()


def see(ordinal: int) -> str:
    return f"Please refer to [Doc_{ordinal}] in the previous conversation."


class Scripted(FakeMessagesListChatModel):
    """Answers as scripted, and notes what a provider would be sent."""

    seen: list[list[dict[str, Any]]] = []  # noqa: RUF012  # pydantic copies it

    def bind_tools(self, tools: Any, **kwargs: Any) -> Scripted:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.seen.append(deepcopy(convert_to_openai_messages(messages)))
        return super()._generate(messages, *args, **kwargs)


def calls(*queries: str, name: str = "search") -> AIMessage:
    """Return a model's answer that calls a tool for each query, all at once."""
    return AIMessage(
        "",
        tool_calls=[
            {"name": name, "args": {"query": query}, "id": f"call-{next(_numbers)}"}
            for query in queries
        ],
    )


def search_tool(retriever: Any = None, **arguments: Any) -> BaseTool:
    """Return a retriever tool for one document a letter of the query."""
    arguments = {"response_format": "content_and_artifact", **arguments}
    return create_retriever_tool(
        retriever or LetterRetriever(), "search", "Finds documents.", **arguments
    )


def agent_with(
    middleware: ReuseMiddleware | Sequence[AgentMiddleware[Any, Any, Any]],
    answers: Sequence[AIMessage],
    *tools: BaseTool,
    checkpointer: Any = None,
) -> tuple[Any, Scripted]:
    model = Scripted(responses=list(answers), seen=[])
    agent = create_agent(
        model,
        list(tools),
        system_prompt="Be brief.",
        middleware=[middleware] if isinstance(middleware, ReuseMiddleware) else list(middleware),
        checkpointer=checkpointer or InMemorySaver(),
    )
    return agent, model


def ask(agent: Any, text: Any, thread: str = "t1", **configurable: Any) -> list[BaseMessage]:
    """Ask an agent; return the messages of its state."""
    config: RunnableConfig = {"configurable": {"thread_id": thread, **configurable}}
    messages: list[BaseMessage] = agent.invoke({"messages": [HumanMessage(text)]}, config)[
        "messages"
    ]
    return messages


def results(messages: Sequence[BaseMessage]) -> list[Any]:
    """Return the contents of the tool results."""
    return [message.content for message in messages if isinstance(message, ToolMessage)]


def is_append_only(seen: Sequence[Sequence[Any]]) -> bool:
    """Return whether each call's messages begin with all of the call before."""
    return all(list(after[: len(before)]) == list(before) for before, after in pairwise(seen))


def done(text: str = "Done.") -> AIMessage:
    return AIMessage(text)


def test_tool_results_are_labelled_and_repeated_blocks_become_location_annotations():
    agent, model = agent_with(
        ReuseMiddleware(),
        [calls("ab"), calls("bc"), done(), calls("cda"), done(), done()],
        search_tool(),
    )
    ask(agent, "First?")
    ask(agent, "Second?")
    messages = ask(agent, "Third?")
    assert results(messages) == [
        f"[Doc_1] {A}\n\n[Doc_2] {B}",
        f"{see(2)}\n\n[Doc_3] {C}",
        f"{see(3)}\n\n[Doc_4] {D}\n\n{see(1)}",
    ]
    assert len(model.seen) == 6
    assert is_append_only(model.seen)
    assert [message["content"] for message in model.seen[-1] if message["role"] == "tool"] == (
        results(messages)
    )


async def test_an_async_agent_sends_what_a_sync_one_sends():
    script = [calls("ab"), calls("bc"), done(), calls("cda"), done()]
    agent, model = agent_with(ReuseMiddleware(), script, search_tool())
    ask(agent, "First?")
    ask(agent, "Second?")
    asynchronous, asynchronous_model = agent_with(ReuseMiddleware(), script, search_tool())
    config: RunnableConfig = {"configurable": {"thread_id": "t1"}}
    for question in ("First?", "Second?"):
        await asynchronous.ainvoke({"messages": [HumanMessage(question)]}, config)
    assert asynchronous_model.seen == model.seen


def test_tools_that_are_called_together_have_labels_that_count_on():
    agent, model = agent_with(
        ReuseMiddleware(), [calls("ab", "bc", "ad"), calls("e", "e"), done()], search_tool()
    )
    assert results(ask(agent, "All?")) == [
        f"[Doc_1] {A}\n\n[Doc_2] {B}",
        f"{see(2)}\n\n[Doc_3] {C}",
        f"{see(1)}\n\n[Doc_4] {D}",
        f"[Doc_5] {E}",
        see(5),
    ]
    assert is_append_only(model.seen)


def test_without_thread_and_checkpointer_a_run_still_shows_a_block_once():
    model = Scripted(responses=[calls("ab"), calls("ba"), done()], seen=[])
    agent = create_agent(model, [search_tool()], middleware=[ReuseMiddleware()])
    messages = agent.invoke({"messages": [HumanMessage("First?")]})["messages"]
    assert results(messages)[1] == f"{see(2)}\n\n{see(1)}"


def test_threads_know_nothing_of_each_others_blocks():
    agent, _ = agent_with(
        ReuseMiddleware(), [calls("ab"), done(), calls("ab"), done()], search_tool()
    )
    first, second = ask(agent, "First?", "t1"), ask(agent, "First?", "t2")
    assert results(first) == results(second) == [f"[Doc_1] {A}\n\n[Doc_2] {B}"]


def test_what_a_tool_writes_around_its_documents_is_kept():
    prompt = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")
    agent, _ = agent_with(
        ReuseMiddleware(), [calls("ab"), calls("b"), done()], search_tool(document_prompt=prompt)
    )
    assert results(ask(agent, "First?")) == [
        f"[Doc_1] Source: a.txt\nContent: {A}\n\n[Doc_2] Source: b.txt\nContent: {B}",
        see(2),
    ]


def test_the_artifacts_documents_say_their_label_and_the_retrievers_own_stay_as_they_are():
    retriever = LetterRetriever()
    agent, _ = agent_with(
        ReuseMiddleware(), [calls("ab"), calls("ca"), done()], search_tool(retriever)
    )
    artifacts = [one.artifact for one in ask(agent, "?") if isinstance(one, ToolMessage)]
    assert [[one.metadata["ctxreuse"] for one in artifact] for artifact in artifacts] == [
        [{"rank": 0, "label": "[Doc_1]"}, {"rank": 1, "label": "[Doc_2]"}],
        [{"rank": 0, "label": "[Doc_3]"}, {"rank": 1, "label": "[Doc_1]"}],
    ]
    assert letters_of(artifacts[1]) == "ca"
    assert retriever.store["a"] == document("a")


def test_the_mark_of_a_message_says_what_it_shows_and_nothing_that_changes_from_run_to_run():
    planner = ReusePlanner()
    marks = []
    for thread in ("t1", "t2"):
        agent, _ = agent_with(
            ReuseMiddleware(planner=planner), [calls("ab"), calls("bc"), done()], search_tool()
        )
        messages = ask(agent, "?", thread)
        marks.append([message.additional_kwargs.get("ctxreuse") for message in messages])
    assert marks[0] == [
        None,
        None,
        {"labels": {"[Doc_1]": "id-a", "[Doc_2]": "id-b"}, "left_out": [], "part": None},
        None,
        {
            "labels": {"[Doc_3]": "id-c"},
            "left_out": [{"label": "[Doc_2]", "id": "id-b", "text": B, "start": 0}],
            "part": None,
        },
        None,
    ]
    assert marks[1] == marks[0]


def test_a_tool_around_a_reuse_retriever_is_planned_once():
    planner = ReusePlanner()
    retriever = ReuseRetriever(planner=planner, retriever=LetterRetriever())
    retriever.invoke("ab")
    agent, model = agent_with(
        ReuseMiddleware(planner=planner), [calls("ba"), calls("ca"), done()], search_tool(retriever)
    )
    assert results(ask(agent, "?")) == [f"[Doc_1] {B}\n\n[Doc_2] {A}", f"[Doc_3] {C}\n\n{see(2)}"]
    assert is_append_only(model.seen)


def text_tool(function: Any) -> BaseTool:
    """Return a tool named search that returns what a function makes of the query."""

    @tool
    def search(query: str) -> Any:
        """Find something."""
        return function(query)

    return search


def test_a_named_tools_plain_text_is_split_into_blocks():
    plain = search_tool(response_format="content", document_separator="\n---\n")
    script = [calls("ab"), calls("bc"), done()]
    for tools in (["search"], [plain]):
        middleware = ReuseMiddleware(tools=tools, document_separator="\n---\n")
        agent, _ = agent_with(middleware, script, plain)
        assert results(ask(agent, "?")) == [
            f"[Doc_1] {A}\n\n[Doc_2] {B}",
            f"{see(2)}\n\n[Doc_3] {C}",
        ]


def test_any_other_result_is_not_touched():
    answers = {
        "text": "one\n\ntwo",
        "number": "42",
        "json": '{"answer": [1, 2]}',
        "empty": "",
    }
    agent, model = agent_with(
        ReuseMiddleware(), [calls(*answers), done()], text_tool(answers.__getitem__)
    )
    messages = ask(agent, "?")
    assert results(messages) == list(answers.values())
    assert not any("ctxreuse" in message.additional_kwargs for message in messages)
    assert is_append_only(model.seen)


def test_a_result_that_does_not_show_its_documents_is_not_touched():
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, list[Document]]:
        """Find something."""
        return f"Found {len(query)} documents.", [document(letter) for letter in query]

    agent, _ = agent_with(ReuseMiddleware(), [calls("ab"), done()], search)
    messages = ask(agent, "?")
    assert results(messages) == ["Found 2 documents."]
    assert messages[2].artifact == [document("a"), document("b")]  # type: ignore[attr-defined]


def test_results_that_were_planned_are_not_planned_again():
    middleware = ReuseMiddleware()
    state: Any = {"messages": [result("m1", "ab"), result("m2", "bc")]}
    planned = middleware.before_model(state, None)  # type: ignore[arg-type]
    assert planned is not None
    assert results(planned["messages"]) == [
        f"[Doc_1] {A}\n\n[Doc_2] {B}",
        f"{see(2)}\n\n[Doc_3] {C}",
    ]
    assert middleware.before_model(planned, None) is None  # type: ignore[arg-type]
    more: Any = {"messages": [*planned["messages"], result("m3", "cd")]}
    again = middleware.before_model(more, None)  # type: ignore[arg-type]
    assert again is not None
    assert results(again["messages"]) == [f"{see(3)}\n\n[Doc_4] {D}"]


def test_a_result_that_stands_before_a_planned_one_stays_as_it_is():
    middleware = ReuseMiddleware()
    planned = middleware.before_model({"messages": [result("m2", "b")]}, None)  # type: ignore[arg-type]
    assert planned is not None
    state: Any = {"messages": [result("m1", "a"), *planned["messages"]]}
    assert middleware.before_model(state, None) is None  # type: ignore[arg-type]


def result(message_id: str, letters: str) -> ToolMessage:
    return ToolMessage(
        "\n\n".join(map(text_of, letters)),
        artifact=[document(letter) for letter in letters],
        tool_call_id=f"call-{message_id}",
        name="search",
        id=message_id,
    )


def test_a_failed_tools_message_is_not_touched():
    failed = ToolMessage("one\n\ntwo", tool_call_id="c1", name="search", status="error", id="m1")
    middleware = ReuseMiddleware(tools=["search"])
    assert middleware.before_model({"messages": [failed]}, None) is None  # type: ignore[arg-type]


def memories(*texts: str) -> dict[str, Any]:
    return {
        "results": [
            {"id": f"m-{text.split()[0]}", "memory": text, "score": 0.1 * next(_numbers)}
            for text in texts
        ]
    }


def test_memories_keep_a_stable_place_and_a_changed_one_is_shown_again():
    found = {
        "1": memories("tea is liked", "cats are kept"),
        "2": memories("cats are kept", "tea is liked"),
        "3": memories("tea is not liked any more"),
    }
    agent, _ = agent_with(
        ReuseMiddleware(),
        [calls("1"), calls("2"), calls("3"), done()],
        text_tool(lambda query: json.dumps(found[query])),
    )
    assert results(ask(agent, "?")) == [
        '[Doc_1] {"id": "m-tea", "memory": "tea is liked"}\n\n'
        '[Doc_2] {"id": "m-cats", "memory": "cats are kept"}',
        f"{see(2)}\n\n{see(1)}",
        '[Doc_3] {"id": "m-tea", "memory": "tea is not liked any more"}',
    ]


def test_a_memory_tool_may_return_the_result_itself():
    agent, _ = agent_with(
        ReuseMiddleware(), [calls("1"), done()], text_tool(lambda _: memories("tea is liked"))
    )
    assert results(ask(agent, "?")) == ['[Doc_1] {"id": "m-tea", "memory": "tea is liked"}']


def test_memories_in_the_artifact_are_found_in_the_text_that_lists_them():
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, Any]:
        """Find something."""
        result = memories("tea is liked", "cats are kept")
        lines = "\n".join(f"- {one['memory']}" for one in result["results"])
        return f"About the user:\n{lines}", result

    agent, _ = agent_with(ReuseMiddleware(), [calls("1"), calls("2"), done()], search)
    assert results(ask(agent, "?")) == [
        "About the user:\n[Doc_1] - tea is liked\n\n[Doc_2] - cats are kept",
        f"About the user:\n{see(1)}\n\n{see(2)}",
    ]


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}


def test_the_other_parts_of_a_result_survive():
    def parts(query: str) -> list[Any]:
        return [PICTURE, {"type": "text", "text": "\n\n".join(query), "extra": 1}]

    agent, model = agent_with(
        ReuseMiddleware(tools=["search"]), [calls("xy"), calls("yz"), done()], text_tool(parts)
    )
    assert results(ask(agent, "?")) == [
        [PICTURE, {"type": "text", "text": "[Doc_1] x\n\n[Doc_2] y", "extra": 1}],
        [PICTURE, {"type": "text", "text": f"{see(2)}\n\n[Doc_3] z", "extra": 1}],
    ]
    assert is_append_only(model.seen)


def test_a_result_with_several_texts_is_not_touched():
    parts = [{"type": "text", "text": "x\n\ny"}, {"type": "text", "text": "z"}]
    middleware = ReuseMiddleware(tools=["search"])
    agent, _ = agent_with(middleware, [calls("1"), done()], text_tool(lambda _: parts))
    assert results(ask(agent, "?")) == [parts]
    assert middleware.faults == 0


def test_results_that_a_model_has_seen_are_never_touched():
    saver = InMemorySaver()
    plain, _ = agent_with([], [calls("ab"), done()], search_tool(), checkpointer=saver)
    before = ask(plain, "First?")
    agent, model = agent_with(
        ReuseMiddleware(), [calls("ab"), done()], search_tool(), checkpointer=saver
    )
    after = ask(agent, "Second?")
    assert model.seen[0][1:5] == convert_to_openai_messages(before)
    assert results(after) == [f"{A}\n\n{B}", f"[Doc_1] {A}\n\n[Doc_2] {B}"]


def test_a_process_that_starts_anew_replays_the_history_and_counts_the_labels_on():
    saver = InMemorySaver()
    agent, model = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()),
        [calls("cd"), done()],
        search_tool(),
        checkpointer=saver,
    )
    ask(agent, "ab")
    again, model_again = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()),
        [calls("d"), done()],
        search_tool(),
        checkpointer=saver,
    )
    messages = ask(again, "e")
    assert is_append_only([*model.seen, *model_again.seen])
    assert messages[4].content == f"[Doc_5] {E}\n\ne"
    assert results(messages)[1] == f"[Doc_6] {D}", "who showed d is forgotten: it is shown again"


def test_context_stands_before_the_newest_question_and_behind_the_history():
    agent, model = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()), [done("One."), done("Two.")]
    )
    ask(agent, "ab")
    messages = ask(agent, "bc")
    assert [message.content for message in messages] == [
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
    assert results(ask(agent, "ab")) == [f"[Doc_3] {C}\n\n{see(2)}"]


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
    assert ask(agent, "b")[2].content == f"{see(2)}\n\nb"
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
    assert results(ask(agent, "Third?"))[1] == f"[Doc_3] {C}\n\n{see(2)}"
    assert is_append_only(model.seen)


def test_labels_of_such_a_result_and_of_the_next_context_differ():
    direct = search_tool()
    direct.return_direct = True
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    agent, model = agent_with(middleware, [calls("cb"), done()], direct)
    ask(agent, "ab")
    messages = ask(agent, "cd")
    assert [message.content for message in messages if not isinstance(message, AIMessage)] == [
        f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nab",
        f"[Doc_3] {C}\n\n{see(2)}",
        f"{see(3)}\n\n[Doc_4] {D}\n\ncd",
    ]
    assert is_append_only(model.seen)


def test_a_chat_model_that_plans_contexts_leaves_planned_messages_alone():
    # the same blocks, rendered without a plan somewhere, would be taken for a context
    for letters in ("p", "q", "pq"):
        format_context([document(letter) for letter in letters])
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done()])
    question = ask(agent, "pq")[0].content
    middleware = [DropsTheStart(at=7, number=3), ReuseMiddleware()]
    agent, model = agent_with(
        middleware, [calls("pr"), calls("qp"), calls("s"), done()], search_tool()
    )
    ask(agent, "?")
    result = next(one["content"] for one in model.seen[1] if one["role"] == "tool")
    whole = next(one["content"] for one in model.seen[3] if one["role"] == "tool")
    P, Q, R = (text_of(letter) for letter in "pqr")  # noqa: N806  # as A and B
    assert question == f"[Doc_1] {P}\n\n[Doc_2] {Q}\n\npq"
    assert result == f"[Doc_1] {P}\n\n[Doc_2] {R}"
    assert whole == f"[Doc_3] {Q}\n\n[Doc_1] {P}"
    for text in (question, result, whole):
        assert [found.blocks for found in contexts_in(text)] == [()]


def test_an_agents_wrapped_model_sends_what_the_middleware_planned():
    script = [calls("cb"), done(), calls("c", "bd"), done()]
    agent, plain = agent_with(ReuseMiddleware(retriever=LetterRetriever()), script, search_tool())
    planner = ReusePlanner()
    inner = Scripted(responses=script, seen=[])
    wrapped = create_agent(
        ReuseChatModel(inner=inner, planner=planner, window_s=0),
        [search_tool()],
        system_prompt="Be brief.",
        middleware=[ReuseMiddleware(planner=planner, retriever=LetterRetriever())],
        checkpointer=InMemorySaver(),
    )
    for question in ("ab", "ba"):
        ask(agent, question)
        ask(wrapped, question)
    assert inner.seen == plain.seen


class DropsTheStart(AgentMiddleware[Any, Any, Any]):
    """Removes the first messages before a model call, as a summary does, once."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number, self.did = at, number, False

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if self.did or len(state["messages"]) != self.at:
            return None
        self.did = True
        dropped = [RemoveMessage(one.id) for one in state["messages"][: self.number]]
        return {"messages": [*dropped, HumanMessage("They talked about a and b.")]}


def test_blocks_that_a_summary_cut_away_are_shown_where_they_were_pointed_to():
    agent, _ = agent_with(
        [DropsTheStart(at=5, number=3), ReuseMiddleware()],
        [calls("ab"), calls("cb"), calls("a"), done(), done()],
        search_tool(),
    )
    # after the second result: question, call, ab, call, cb; the first three go
    messages = ask(agent, "?")
    assert results(messages) == [f"[Doc_1] {C}\n\n[Doc_2] {B}", f"[Doc_3] {A}"]


def test_blocks_that_were_cut_away_later_come_back_under_their_label():
    agent, model = agent_with(
        [DropsTheStart(at=7, number=3), ReuseMiddleware()],
        [calls("ab"), calls("cba"), calls("bd"), done(), done()],
        search_tool(),
    )
    messages = ask(agent, "?")
    # the state keeps what was sent
    assert results(messages)[0] == f"[Doc_3] {C}\n\n{see(2)}\n\n{see(1)}"
    sent = [one["content"] for one in model.seen[3] if one["role"] == "tool"]
    assert sent[0] == f"[Doc_3] {C}\n\n[Doc_2] {B}\n\n[Doc_1] {A}"
    ask(agent, "And now?")
    assert is_append_only(model.seen[3:])


def test_a_block_that_was_cut_away_comes_back_once():
    agent, model = agent_with(
        [DropsTheStart(at=7, number=3), ReuseMiddleware()],
        [calls("a"), calls("ba"), calls("ac"), done()],
        search_tool(),
    )
    ask(agent, "?")
    sent = [one["content"] for one in model.seen[3] if one["role"] == "tool"]
    assert sent == [f"[Doc_2] {B}\n\n[Doc_1] {A}", f"{see(1)}\n\n[Doc_3] {C}"]


def test_a_block_comes_back_behind_what_its_tool_says_first():
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, Any]:
        """Find something."""
        return f"Found:\n- {query}", {"results": [{"id": query, "memory": query}]}

    middleware = [DropsTheStart(at=7, number=3), ReuseMiddleware()]
    agent, model = agent_with(middleware, [calls("tea"), calls("tea"), calls("x"), done()], search)
    ask(agent, "?")
    sent = [one["content"] for one in model.seen[3] if one["role"] == "tool"]
    assert sent == ["Found:\n[Doc_1] - tea", "Found:\n[Doc_2] - x"]


def test_a_text_that_was_changed_since_is_left_alone():
    middleware = ReuseMiddleware()
    state: Any = {"messages": [result("m1", "a"), result("m2", "a")]}
    planned = middleware.before_model(state, None)  # type: ignore[arg-type]
    assert planned is not None
    changed = planned["messages"][1].model_copy(update={"content": f"As I said: {see(1)}"})
    request = ModelRequest(model=Scripted(responses=[]), messages=[changed])
    seen: list[Any] = []
    middleware.wrap_model_call(request, lambda one: seen.append(one) or ModelResponse([]))  # type: ignore[func-returns-value]
    assert seen == [request]


async def test_blocks_in_cleared_tool_results_come_back_too():
    clearing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    agent, model = agent_with(
        [clearing, ReuseMiddleware()], [calls("ab"), calls("b"), done(), done()], search_tool()
    )
    config: RunnableConfig = {"configurable": {"thread_id": "t1"}}
    await agent.ainvoke({"messages": [HumanMessage("?")]}, config)
    sent = [one["content"] for one in model.seen[2] if one["role"] == "tool"]
    assert sent == ["[cleared]", f"[Doc_2] {B}"]


def test_a_document_that_speaks_like_an_annotation_is_not_taken_for_one():
    liar = Document(f"x {see(1)}", id="liar")
    retriever = LetterRetriever(store={"l": liar})
    agent, _ = agent_with(
        [DropsTheStart(at=5, number=3), ReuseMiddleware()],
        [calls("a"), calls("la"), done()],
        search_tool(retriever),
    )
    assert results(ask(agent, "?")) == [f"[Doc_1] x {see(1)}\n\n[Doc_2] {A}"]


def test_a_planning_fault_loses_nothing_and_is_counted(caplog):
    middleware = ReuseMiddleware(planner=FaultyPlanner(), retriever=LetterRetriever())
    agent, _ = agent_with(middleware, [calls("ab", "c"), done()], search_tool())
    with caplog.at_level(logging.WARNING, "ctxreuse"):
        messages = ask(agent, "de")
    assert messages[0].content == f"{D}\n\n{E}\n\nde"
    assert results(messages) == [f"{A}\n\n{B}", C]
    assert middleware.faults == 3
    assert len(caplog.records) == 1
    assert "says" not in caplog.text


def test_a_fault_with_a_picture_in_the_question_loses_nothing():
    middleware = ReuseMiddleware(planner=FaultyPlanner(), retriever=LetterRetriever())
    agent, _ = agent_with(middleware, [done()])
    parts = [{"type": "text", "text": "ab"}, PICTURE]
    assert ask(agent, parts)[0].content == [{"type": "text", "text": f"{A}\n\n{B}"}, *parts]


async def test_many_threads_of_one_agent_do_not_mix():
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done()])

    async def turns(thread: str) -> list[str]:
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        for question in ("ab", "bc"):
            state = await agent.ainvoke({"messages": [HumanMessage(question)]}, config)
        return [str(message.content) for message in state["messages"][::2]]

    for first, second in await asyncio.gather(*(turns(f"t{n}") for n in range(8))):
        assert first == f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nab"
        assert second == f"{see(2)}\n\n[Doc_3] {C}\n\nbc"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": 3}, r"planner must be a ctxreuse\.ReusePlanner, not 3"),
        ({"retriever": "docs"}, "retriever must be a LangChain retriever, not 'docs'"),
        ({"tools": "search"}, "tools must be a list of tools or of their names, not 'search'"),
        ({"tools": [3]}, "tools must be a list of tools or of their names"),
        ({"document_separator": ""}, "document_separator must be a string that is not empty"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReuseMiddleware(**arguments)
