import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_agent_helpers import (
    PICTURE,
    A,
    B,
    C,
    D,
    E,
    Scripted,
    agent_with,
    ask,
    calls,
    done,
    is_append_only,
    numbers,
    result,
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
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool, tool
from langchain_document_helpers import (
    LetterRetriever,
    document,
    letters_of,
    no_sockets,
)
from langgraph.checkpoint.memory import InMemorySaver
from planning_helpers import location_words, order_words

from ctxreuse import ContextBlock, ReusePlanner
from ctxreuse.context.blocks import text_digest
from ctxreuse.errors import InvalidRequestError
from langchain_ctxreuse import ReuseMiddleware, ReuseRetriever
from langchain_ctxreuse.agents.middleware import (
    ResultStatistics,
    _log_nothing_planned,
    _log_too_many,
)

pytestmark = pytest.mark.usefixtures("paper_words")
__all__ = ["no_sockets"]


def test_tool_results_are_labelled_and_repeated_blocks_become_location_annotations():
    agent, model = agent_with(
        ReuseMiddleware(),
        [calls("ab"), calls("bc"), done(), calls("cda"), done(), done()],
        search_tool(),
    )
    ask(agent, "First?")
    ask(agent, "Second?")
    messages = ask(agent, "Third?")
    assert [message["content"] for message in model.seen[-1] if message["role"] == "tool"] == [
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}",
        f"{see('b')}\n\n[Doc_id-c] {C}",
        f"{see('c')}\n\n[Doc_id-d] {D}\n\n{see('a')}",
    ]
    assert len(model.seen) == 6
    assert is_append_only(model.seen)
    assert convert_to_openai_messages(sent(messages[:-1])) == model.seen[-1][1:]


def test_results_without_documents_are_counted_and_said_to_be_after_some(caplog):
    _log_nothing_planned.cache_clear()
    in_tags = {"document_prompt": PromptTemplate.from_template("<d>{page_content}</d>")}
    tool_of_text = search_tool(response_format="content", **in_tags)
    middleware = ReuseMiddleware()
    for count in range(1, 22):
        assert ("tool results" in caplog.text) == (count > 20)
        agent, model = agent_with(middleware, [calls("ab"), done()], tool_of_text)
        ask(agent, "Which?")
        assert model.seen[-1][-1]["content"] == f"<d>{A}</d>\n\n<d>{B}</d>"
        assert middleware.result_statistics == ResultStatistics(0, count)
    assert caplog.text.count("response_format") == 1


def test_results_with_documents_are_counted_and_nothing_is_said(caplog):
    _log_nothing_planned.cache_clear()
    middleware = ReuseMiddleware()
    agent, _ = agent_with(middleware, [calls("ab", "cd"), done()], search_tool())
    ask(agent, "Which?")
    assert middleware.result_statistics == ResultStatistics(planned=2)
    for _ in range(21):
        agent, _ = agent_with(middleware, [calls("ab"), done()], search_tool(EmptyRetriever()))
        ask(agent, "Which?")
    assert middleware.result_statistics == ResultStatistics(planned=2), "empty results say nothing"
    assert caplog.text == ""


class EmptyRetriever(LetterRetriever):
    """Finds nothing."""

    def _get_relevant_documents(self, query: str, **kwargs: Any) -> list[Document]:
        return []


def test_the_state_holds_every_block_in_whole():
    agent, _ = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()),
        [calls("ab"), calls("bc"), done(), done()],
        search_tool(),
    )
    ask(agent, "a")
    messages = ask(agent, "c")
    assert [one.content for one in messages if not isinstance(one, AIMessage)] == [
        f"[Doc_id-a] {A}\n\na",
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}",
        f"[Doc_id-b] {B}\n\n[Doc_id-c] {C}",
        f"[Doc_id-c] {C}\n\nc",
    ]


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


def test_tools_that_are_called_together_point_to_each_others_results():
    agent, model = agent_with(
        ReuseMiddleware(), [calls("ab", "bc", "ad"), calls("e", "e"), done()], search_tool()
    )
    assert results(sent(ask(agent, "All?"))) == [
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}",
        f"{see('b')}\n\n[Doc_id-c] {C}",
        f"{see('a')}\n\n[Doc_id-d] {D}",
        f"[Doc_id-e] {E}",
        see("e"),
    ]
    assert is_append_only(model.seen)


def test_a_run_shows_a_block_once_and_threads_know_nothing_of_each_other():
    model = Scripted(responses=[calls("ab"), calls("ba"), done()], seen=[])
    agent = create_agent(model, [search_tool()], middleware=[ReuseMiddleware()])
    messages = agent.invoke({"messages": [HumanMessage("First?")]})["messages"]
    assert results(sent(messages))[1] == f"{see('b')}\n\n{see('a')}"

    agent, _ = agent_with(
        ReuseMiddleware(), [calls("ab"), done(), calls("ab"), done()], search_tool()
    )
    first, second = ask(agent, "First?", "t1"), ask(agent, "First?", "t2")
    assert results(first) == results(second) == [f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}"]


def test_the_artifacts_documents_carry_their_label_and_the_retrievers_own_stay_as_they_are():
    retriever = LetterRetriever()
    agent, _ = agent_with(
        ReuseMiddleware(), [calls("ab"), calls("ca"), done()], search_tool(retriever)
    )
    artifacts = [one.artifact for one in ask(agent, "?") if isinstance(one, ToolMessage)]
    assert [[one.metadata["ctxreuse"] for one in artifact] for artifact in artifacts] == [
        [{"rank": 0, "label": "[Doc_id-a]"}, {"rank": 1, "label": "[Doc_id-b]"}],
        [{"rank": 0, "label": "[Doc_id-c]"}, {"rank": 1, "label": "[Doc_id-a]"}],
    ]
    assert letters_of(artifacts[1]) == "ca"
    assert retriever.store["a"] == document("a")


def test_the_metadata_of_a_message_holds_what_it_shows_and_nothing_that_changes_from_run_to_run():
    planner = ReusePlanner()
    marks = []
    for thread in ("t1", "t2"):
        agent, _ = agent_with(
            ReuseMiddleware(planner=planner), [calls("ab"), calls("bc"), done()], search_tool()
        )
        messages = ask(agent, "?", thread)
        marks.append([message.additional_kwargs.get("ctxreuse") for message in messages])
    b = f"[Doc_id-b] {B}"
    end = len(b)
    assert marks[0] == [
        None,
        None,
        {"labels": {"[Doc_id-a]": "id-a", "[Doc_id-b]": "id-b"}, "repeated": [], "part": None},
        None,
        {
            "labels": {"[Doc_id-b]": "id-b", "[Doc_id-c]": "id-c"},
            "repeated": [
                {"label": "[Doc_id-b]", "start": 0, "end": end, "digest": text_digest(b).hex()}
            ],
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
    assert results(sent(ask(agent, "?"))) == [
        f"[Doc_id-b] {B}\n\n[Doc_id-a] {A}",
        f"[Doc_id-c] {C}\n\n{see('a')}",
    ]
    assert is_append_only(model.seen)


def text_tool(function: Any) -> BaseTool:
    """Return a tool named search that returns what a function makes of the query."""

    @tool
    def search(query: str) -> Any:
        """Find something."""
        return function(query)

    return search


def labelled(text: str) -> str:
    """Return a text without an id as it is shown."""
    block = ContextBlock(text=text)
    return f"{ReusePlanner().templates.label_of(block)} {text}"


def pointed_to(text: str) -> str:
    return f"Please refer to {labelled(text).split()[0]} in the previous conversation."


def test_a_named_tools_plain_text_is_split_into_blocks():
    plain = search_tool(response_format="content", document_separator="\n---\n")
    script = [calls("ab"), calls("bc"), done()]
    for tools in (["search"], [plain]):
        middleware = ReuseMiddleware(tools=tools, document_separator="\n---\n")
        agent, _ = agent_with(middleware, script, plain)
        assert results(sent(ask(agent, "?"))) == [
            f"{labelled(A)}\n\n{labelled(B)}",
            f"{pointed_to(B)}\n\n{labelled(C)}",
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


def test_results_that_were_planned_are_not_planned_again():
    middleware = ReuseMiddleware()
    state: Any = {"messages": [result("m1", "ab"), result("m2", "bc")]}
    planned = middleware.before_model(state, None)
    assert planned is not None
    assert results(sent(planned["messages"])) == [
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}",
        f"{see('b')}\n\n[Doc_id-c] {C}",
    ]
    assert middleware.before_model(planned, None) is None
    more: Any = {"messages": [*planned["messages"], result("m3", "cd")]}
    again = middleware.before_model(more, None)
    assert again is not None
    shown = sent([*planned["messages"], *again["messages"]])
    assert results(shown)[2:] == [f"{see('c')}\n\n[Doc_id-d] {D}"]


def test_results_that_failed_or_stand_before_a_planned_one_stay_as_they_are():
    failed = ToolMessage("one\n\ntwo", tool_call_id="c1", name="search", status="error", id="m1")
    middleware = ReuseMiddleware(tools=["search"])
    assert middleware.before_model({"messages": [failed]}, None) is None

    middleware = ReuseMiddleware()
    planned = middleware.before_model({"messages": [result("m2", "b")]}, None)
    assert planned is not None
    state: Any = {"messages": [result("m1", "a"), *planned["messages"]]}
    assert middleware.before_model(state, None) is None


def memories(*texts: str) -> dict[str, Any]:
    return {
        "results": [
            {"id": f"m-{text.split()[0]}", "memory": text, "score": 0.1 * next(numbers)}
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
    assert results(sent(ask(agent, "?"))) == [
        '[Doc_m-tea] {"id": "m-tea", "memory": "tea is liked"}\n\n'
        '[Doc_m-cats] {"id": "m-cats", "memory": "cats are kept"}',
        f"{location_words('m-cats')}\n\n{location_words('m-tea')}",
        '[Doc_m-tea] {"id": "m-tea", "memory": "tea is not liked any more"}',
    ]


def test_memory_tools_may_return_the_result_and_several_texts_are_not_touched():
    agent, _ = agent_with(
        ReuseMiddleware(), [calls("1"), done()], text_tool(lambda _: memories("tea is liked"))
    )
    assert results(ask(agent, "?")) == ['[Doc_m-tea] {"id": "m-tea", "memory": "tea is liked"}']

    parts = [{"type": "text", "text": "x\n\ny"}, {"type": "text", "text": "z"}]
    middleware = ReuseMiddleware(tools=["search"])
    agent, _ = agent_with(middleware, [calls("1"), done()], text_tool(lambda _: parts))
    assert results(ask(agent, "?")) == [parts]
    assert middleware.faults == 0


def test_the_other_parts_of_a_result_survive():
    def parts(query: str) -> list[Any]:
        return [PICTURE, {"type": "text", "text": "\n\n".join(query), "extra": 1}]

    agent, model = agent_with(
        ReuseMiddleware(tools=["search"]), [calls("xy"), calls("yz"), done()], text_tool(parts)
    )
    assert results(sent(ask(agent, "?"))) == [
        [PICTURE, {"type": "text", "text": f"{labelled('x')}\n\n{labelled('y')}", "extra": 1}],
        [PICTURE, {"type": "text", "text": f"{pointed_to('y')}\n\n{labelled('z')}", "extra": 1}],
    ]
    assert is_append_only(model.seen)


def test_results_that_a_model_has_seen_are_never_touched():
    saver = InMemorySaver()
    plain, _ = agent_with([], [calls("ab"), done()], search_tool(), checkpointer=saver)
    before = ask(plain, "First?")
    agent, model = agent_with(
        ReuseMiddleware(), [calls("ab"), done()], search_tool(), checkpointer=saver
    )
    after = ask(agent, "Second?")
    assert model.seen[0][1:5] == convert_to_openai_messages(before)
    assert results(after) == [f"{A}\n\n{B}", f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}"]


def test_a_process_that_starts_anew_points_to_the_history():
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
        [calls("df"), done()],
        search_tool(),
        checkpointer=saver,
    )
    messages = ask(again, "e")
    assert is_append_only([*model.seen, *model_again.seen])
    assert messages[4].content == f"[Doc_id-e] {E}\n\ne"
    f = f"[Doc_id-f] {document('f').page_content}"
    assert results(messages)[1] == f"[Doc_id-d] {D}\n\n{f}"
    assert results(sent(messages))[1] == f"{see('d')}\n\n{f}"
    assert model_again.seen[-1][-1]["content"] == f"{see('d')}\n\n{f}"


def test_of_the_results_of_one_step_the_first_64_are_planned_and_the_log_says_so(caplog):
    middleware: Any = ReuseMiddleware(tools=["search"])
    _log_too_many.cache_clear()
    results = [
        ToolMessage(f"one {n}\n\ntwo {n}", tool_call_id=f"{n}", id=f"{n}", name="search")
        for n in range(66)
    ]
    calls = [{"name": "search", "args": {}, "id": f"{n}"} for n in range(66)]
    messages = [HumanMessage("Why?", id="q"), AIMessage("", id="a", tool_calls=calls), *results]
    planned = middleware.before_model({"messages": messages}, None)["messages"]
    assert [message.id for message in planned] == [f"{n}" for n in range(64)]
    assert planned[-1].content == f"{labelled('one 63')}\n\n{labelled('two 63')}"
    assert ["more than 64" in one.getMessage() for one in caplog.records] == [True]


def test_context_stands_before_the_newest_question_and_behind_the_history():
    agent, model = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()), [done("One."), done("Two.")]
    )
    ask(agent, "ab")
    messages = ask(agent, "bc")
    assert [message.content for message in sent(messages)] == [
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\nab",
        "One.",
        f"{see('b')}\n\n[Doc_id-c] {C}\n\nbc",
        "Two.",
    ]
    assert is_append_only(model.seen)
    assert [one.additional_kwargs["ctxreuse"]["question"] for one in messages[::2]] == ["ab", "bc"]


def test_threads_first_contexts_share_their_beginning_in_each_tenant():
    agent, model = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done(), done()])
    ask(agent, "abc", "t1")
    [question, _] = ask(agent, "dba", "t2")
    assert question.content == (
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n[Doc_id-d] {D}\n\n"
        f"{order_words('id-d', 'id-b', 'id-a')}\n\ndba"
    )
    assert [message["role"] for message in model.seen[1]] == ["system", "user"]

    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done(), done(), done()])
    ask(agent, "abc", "t1", tenant="one")
    other = ask(agent, "cba", "t2", tenant="two")[0].content
    assert other == f"[Doc_id-c] {C}\n\n[Doc_id-b] {B}\n\n[Doc_id-a] {A}\n\ncba"
    assert ask(agent, "cba", "t3", tenant="one")[0].content != other


def test_a_system_message_before_the_first_question_is_no_history():
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    for letters in ("ab", "ba"):
        messages = [SystemMessage("Be brief.", id=f"s{letters}"), HumanMessage(letters, id=letters)]
        update = middleware.before_agent({"messages": messages}, None)
    assert update is not None
    assert update["messages"][0].content.startswith(
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\nPlease read"
    )


def test_a_tool_result_does_not_repeat_the_context_of_the_question():
    agent, _ = agent_with(
        ReuseMiddleware(retriever=LetterRetriever()), [calls("cb"), done()], search_tool()
    )
    assert results(sent(ask(agent, "ab"))) == [f"[Doc_id-c] {C}\n\n{see('b')}"]


async def test_async_agents_retrieve_context_and_retrievers_may_return_iterators():
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    agent, model = agent_with(middleware, [done()])
    config: RunnableConfig = {"configurable": {"thread_id": "t1"}}
    await agent.ainvoke({"messages": [HumanMessage("ab")]}, config)
    assert model.seen[0][1]["content"] == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\nab"
    middleware = ReuseMiddleware(retriever=RunnableLambda(lambda query: map(document, query)))
    agent, _ = agent_with(middleware, [done()])
    assert ask(agent, "ab")[0].content == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\nab"


def test_context_is_retrieved_once_for_a_question():
    queries: list[str] = []

    def retrieve(query: str) -> list[Document]:
        queries.append(query)
        return [document("a")]

    middleware = ReuseMiddleware(retriever=RunnableLambda(retrieve))
    state: Any = {"messages": [HumanMessage("first", id="1")]}
    update = middleware.before_agent(state, None)
    assert update is not None
    assert middleware.before_agent(update, None) is None
    answered = {"messages": [*state["messages"], AIMessage("Yes.", id="2")]}
    assert middleware.before_agent(answered, None) is None
    assert queries == ["first"]


def test_a_question_with_a_picture_keeps_it():
    agent, model = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done(), done()])
    parts = [{"type": "text", "text": "ab"}, PICTURE]
    [question, _] = ask(agent, parts)
    context = {"type": "text", "text": f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}"}
    assert question.content == [context, *parts]
    assert sent(ask(agent, "b"))[2].content == f"{see('b')}\n\nb"
    assert is_append_only(model.seen)


@pytest.mark.parametrize("content", ["", "  ", [PICTURE]])
def test_nothing_is_retrieved_for_a_question_without_text(content):
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done()])
    assert ask(agent, content)[0].content == content


def test_a_question_for_which_nothing_is_found_stays_and_an_error_is_not_caught():
    agent, _ = agent_with(ReuseMiddleware(retriever=RunnableLambda(lambda _: [])), [done()])
    [question, _] = ask(agent, "ab")
    assert question.content == "ab"
    assert question.additional_kwargs == {}

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


def test_a_reuse_retriever_may_retrieve_the_context():
    planner = ReusePlanner()
    retriever = ReuseRetriever(planner=planner, retriever=LetterRetriever())
    middleware = ReuseMiddleware(planner=planner, retriever=retriever)
    agent, _ = agent_with(middleware, [done(), done()])
    ask(agent, "ab", "t1")
    [question, _] = ask(agent, "ba", "t2")
    assert question.content == (
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n{order_words('id-b', 'id-a')}\n\nba"
    )


def test_a_result_that_ended_a_run_is_planned_when_the_next_one_shows_it():
    direct = search_tool()
    direct.return_direct = True
    agent, model = agent_with(ReuseMiddleware(), [calls("ab"), calls("cb"), done()], direct)
    assert results(ask(agent, "First?")) == [f"{A}\n\n{B}"]
    messages = ask(agent, "Second?")
    assert results(messages) == [f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}", f"{C}\n\n{B}"]
    assert results(sent(ask(agent, "Third?")))[1] == f"[Doc_id-c] {C}\n\n{see('b')}"
    assert is_append_only(model.seen)


def test_the_next_context_points_to_such_a_result():
    direct = search_tool()
    direct.return_direct = True
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    agent, model = agent_with(middleware, [calls("cb"), done()], direct)
    ask(agent, "ab")
    messages = ask(agent, "cd")
    assert [
        message.content for message in sent(messages) if not isinstance(message, AIMessage)
    ] == [
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\nab",
        f"[Doc_id-c] {C}\n\n{see('b')}",
        f"{see('c')}\n\n[Doc_id-d] {D}\n\ncd",
    ]
    assert is_append_only(model.seen)
