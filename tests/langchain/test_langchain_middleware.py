"""What an agent's model gets of tool results and retrieved context, and what its state keeps."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_agent_helpers import (
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
from langchain_document_helpers import LetterRetriever, document, documents, text_of
from langchain_model_helpers import PIXEL, letters_in
from langgraph.checkpoint.memory import InMemorySaver
from planning_helpers import location_words, order_words

from ctxreuse import PAPER_TEMPLATES, ContextBlock, ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.known_texts import known_texts
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, ReuseRetriever
from langchain_ctxreuse.agents.middleware import (
    ResultStatistics,
    _log_nothing_planned,
    _log_too_many,
)

pytestmark = pytest.mark.usefixtures("paper_words")

F = text_of("f")
TEMPLATES = replace(PAPER_TEMPLATES, label="[Doc_{id}]")


def text_tool(function: Any) -> BaseTool:
    """Return a tool named search that returns what a function makes of the query."""

    @tool
    def search(query: str) -> Any:
        """Find something."""
        return function(query)

    return search


def shown(*texts: str) -> str:
    return "\n\n".join(f"[Doc_id-{text[0]}] {text}" for text in texts)


def labelled(text: str) -> str:
    block = ContextBlock(text=text)
    return f"{TEMPLATES.label_of(block)} {text}"


def pointed_to(text: str) -> str:
    return f"Please refer to {labelled(text).split()[0]} in the previous conversation."


def memories(*texts: str) -> dict[str, Any]:
    return {
        "results": [
            {"id": f"m-{text.split()[0]}", "memory": text, "score": 0.1 * next(numbers)}
            for text in texts
        ]
    }


FOUND = {
    "1": memories("tea is liked", "cats are kept"),
    "2": memories("cats are kept", "tea is liked"),
    "3": memories("tea is not liked any more"),
}
LINES = {"response_format": "content", "document_separator": "\n---\n"}
TEA, CATS, NO_TEA = (
    f'[Doc_m-{one.split()[0]}] {{"id": "m-{one.split()[0]}", "memory": "{one}"}}'
    for one in ("tea is liked", "cats are kept", "tea is not liked any more")
)


def parts(query: str) -> list[Any]:
    return [PIXEL, {"type": "text", "text": "\n\n".join(query), "extra": 1}]


SEVERAL = [{"type": "text", "text": "x\n\ny"}, {"type": "text", "text": "z"}]
RESULTS: dict[str, tuple[Any, BaseTool, list[tuple[str, ...]], list[Any]]] = {
    "documents": (
        {},
        search_tool(),
        [("ab",), ("bc",), ("cda",)],
        [shown(A, B), f"{see('b')}\n\n{shown(C)}", f"{see('c')}\n\n{shown(D)}\n\n{see('a')}"],
    ),
    "tools that are called together": (
        {},
        search_tool(),
        [("ab", "bc"), ("e", "e")],
        [shown(A, B), f"{see('b')}\n\n{shown(C)}", shown(E), see("e")],
    ),
    "text of a named tool": (
        {"tools": ["search"], "document_separator": "\n---\n"},
        search_tool(**LINES),
        [("ab",), ("bc",)],
        [f"{labelled(A)}\n\n{labelled(B)}", f"{pointed_to(B)}\n\n{labelled(C)}"],
    ),
    "text of a tool that is given": (
        {"tools": [search_tool(**LINES)], "document_separator": "\n---\n"},
        search_tool(**LINES),
        [("ab",)],
        [f"{labelled(A)}\n\n{labelled(B)}"],
    ),
    "memories as JSON, one of them changed": (
        {},
        text_tool(lambda query: json.dumps(FOUND[query])),
        [("1",), ("2",), ("3",)],
        [f"{TEA}\n\n{CATS}", f"{location_words('m-cats')}\n\n{location_words('m-tea')}", NO_TEA],
    ),
    "memories": ({}, text_tool(FOUND.__getitem__), [("1",)], [f"{TEA}\n\n{CATS}"]),
    "a picture beside": (
        {"tools": ["search"]},
        text_tool(parts),
        [("xy",), ("yz",)],
        [
            [PIXEL, {"type": "text", "text": f"{labelled('x')}\n\n{labelled('y')}", "extra": 1}],
            [PIXEL, {"type": "text", "text": f"{pointed_to('y')}\n\n{labelled('z')}", "extra": 1}],
        ],
    ),
    "several texts": ({"tools": ["search"]}, text_tool(lambda _: SEVERAL), [("x",)], [SEVERAL]),
    "anything else": (
        {},
        text_tool(lambda query: query),
        [("one\n\ntwo", "42", '{"answer": [1, 2]}', "")],
        ["one\n\ntwo", "42", '{"answer": [1, 2]}', ""],
    ),
}


@pytest.mark.parametrize("kind", RESULTS)
async def test_results_are_labelled_and_what_stands_above_is_pointed_to(kind):
    options, used, queries, expected = RESULTS[kind]
    script = [*(calls(*one) for one in queries), done(), done()]
    middleware = ReuseMiddleware(**options)
    agent, model = agent_with(middleware, script, used)
    ask(agent, "First?")
    messages = ask(agent, "Second?")
    assert results(sent(messages)) == expected
    assert is_append_only(model.seen)
    assert convert_to_openai_messages(sent(messages[:-1])) == model.seen[-1][1:]
    assert middleware.faults == 0

    asynchronous, other = agent_with(ReuseMiddleware(**options), script, used)
    config: RunnableConfig = {"configurable": {"thread_id": "t1"}}
    for question in ("First?", "Second?"):
        await asynchronous.ainvoke({"messages": [HumanMessage(question)]}, config)
    assert other.seen == model.seen


def test_results_without_documents_are_counted_and_said_to_be_after_some(caplog):
    _log_nothing_planned.cache_clear()
    middleware, tool_of_text = ReuseMiddleware(), text_tool(lambda _: "one\n\ntwo")
    for count in range(1, 22):
        assert ("tool results" in caplog.text) == (count > 20)
        agent, model = agent_with(middleware, [calls("ab"), done()], tool_of_text)
        ask(agent, "Which?")
        assert model.seen[-1][-1]["content"] == "one\n\ntwo"
        assert middleware.result_statistics == ResultStatistics(0, count)
    assert caplog.text.count("response_format") == 1
    agent, _ = agent_with(middleware, [calls(""), done()], text_tool(str))
    ask(agent, "Which?")
    assert middleware.result_statistics == ResultStatistics(0, count), "an empty one says nothing"


@pytest.mark.parametrize(
    "prompt", ["{page_content}", "<d>{page_content}</d>", "T:\n{page_content}"]
)
def test_what_a_retriever_returned_is_planned_without_an_artifact_too(prompt):
    in_words = {"document_prompt": PromptTemplate.from_template(prompt)}
    seen = []
    for form in ("content", "content_and_artifact"):
        middleware = ReuseMiddleware()
        tool_of_texts = search_tool(response_format=form, **in_words)
        script = [calls("ab"), calls("bb"), calls("ba"), done(), done()]
        agent, model = agent_with(middleware, script, tool_of_texts)
        ask(agent, "First?")
        ask(agent, "Second?")
        assert middleware.result_statistics == ResultStatistics(3, 0)
        contents = [one["content"] for call in model.seen for one in call]
        seen.append([re.sub(r"\[Doc_[^]]*\]", "[label]", one) for one in contents])
    assert seen[0] == seen[1]


def test_artifacts_and_results_stay_as_they_are_and_metadata_says_how_they_are_sent():
    retriever = LetterRetriever(store={})
    planner, carried = ReusePlanner(), []
    script = [calls("ab"), calls("ca"), done()]
    for thread in ("t1", "t2"):
        agent, _ = agent_with(ReuseMiddleware(planner=planner), script, search_tool(retriever))
        messages = ask(agent, "?", thread)
        found = [one for one in messages if isinstance(one, ToolMessage)]
        assert [one.artifact for one in found] == [documents("ab"), documents("ca")]
        assert results(messages) == [f"{A}\n\n{B}", f"{C}\n\n{A}"]
        carried.append([one.additional_kwargs.pop("ctxreuse", None) for one in messages])
        assert all(one.additional_kwargs == {} for one in messages)
    assert carried[0] == carried[1], "nothing in it changes from run to run"
    names = [None if one is None else sorted(one) for one in carried[0]]
    assert names == [None, None, names[2], None, names[2], None]
    assert names[2] == ["digest", "edit", "part"]
    assert json.loads(json.dumps(carried[0])) == carried[0]
    assert "says" not in json.dumps(carried[0]), "no text"


def test_a_result_of_a_reuse_retriever_keeps_the_order_in_which_it_came(planner):
    retriever = ReuseRetriever(planner=planner, retriever=LetterRetriever())
    retriever.invoke("abc")
    script = [calls("cba"), calls("ca"), done()]
    agent, model = agent_with(ReuseMiddleware(planner=planner), script, search_tool(retriever))
    first, second = results(sent(ask(agent, "?")))
    assert first == shown(A, B, C)
    assert sorted(second.split("\n\n")) == sorted([see("c"), see("a")])
    assert is_append_only(model.seen)


def test_results_are_planned_once_and_never_behind_what_a_model_has_seen():
    middleware = ReuseMiddleware()
    state: Any = {"messages": [result("m1", "ab"), result("m2", "bc")]}
    planned = middleware.before_model(state, None)
    assert planned is not None
    assert middleware.before_model(planned, None) is None
    more: Any = {"messages": [*planned["messages"], result("m3", "cd")]}
    again = middleware.before_model(more, None)
    assert again is not None
    assert results(sent([*planned["messages"], *again["messages"]])) == [
        shown(A, B),
        f"{see('b')}\n\n{shown(C)}",
        f"{see('c')}\n\n{shown(D)}",
    ]
    before: Any = {"messages": [result("m0", "e"), *planned["messages"]]}
    assert middleware.before_model(before, None) is None

    failed = ToolMessage("one\n\ntwo", tool_call_id="c1", name="search", status="error", id="m1")
    named = ReuseMiddleware(tools=["search"])
    assert named.before_model({"messages": [failed]}, None) is None


def test_results_that_a_model_has_seen_are_never_touched():
    saver = InMemorySaver()
    plain, _ = agent_with([], [calls("ab"), done()], search_tool(), checkpointer=saver)
    before = ask(plain, "First?")
    agent, model = agent_with(
        ReuseMiddleware(), [calls("ab"), done()], search_tool(), checkpointer=saver
    )
    after = ask(agent, "Second?")
    assert model.seen[0][1:5] == convert_to_openai_messages(before)
    assert results(sent(after)) == [f"{A}\n\n{B}", shown(A, B)]


def test_a_process_that_starts_anew_points_to_the_history_and_sends_it_as_it_was_sent():
    saver = InMemorySaver()
    seen = []
    for script, question in (([calls("cd"), done()], "ab"), ([calls("df"), done()], "e")):
        known_texts().forget_all()
        agent, model = agent_with(
            ReuseMiddleware(retriever=LetterRetriever()), script, search_tool(), checkpointer=saver
        )
        messages = ask(agent, question)
        seen += model.seen
    assert is_append_only(seen)
    assert messages[4].content == f"{shown(E)}\n\ne"
    assert results(messages)[1] == f"{D}\n\n{F}"
    assert seen[-1][-1]["content"] == f"{see('d')}\n\n{shown(F)}"


@pytest.mark.parametrize("before", [None, "shadow"])
def test_in_shadow_mode_the_model_gets_what_the_state_holds_and_it_is_counted(before):
    shadow, saver = ReusePlanner(mode="shadow"), InMemorySaver()
    for planner in (ReusePlanner(mode=before), shadow):  # what was planned before, too
        middleware = ReuseMiddleware(planner=planner, retriever=LetterRetriever())
        script = [calls("ab"), calls("bc"), done()]
        agent, model = agent_with(middleware, script, search_tool(), checkpointer=saver)
        messages = ask(agent, "ad")
        assert middleware.faults == 0
    assert model.seen[-1][1:] == convert_to_openai_messages(messages[:-1])
    assert results(messages)[-2:] == [f"{A}\n\n{B}", f"{B}\n\n{C}"]
    assert messages[6].content == f"{A}\n\n{D}\n\nad"
    assert shadow.savings.left_out > 0


@pytest.mark.parametrize("mode", ["active", "shadow"])
def test_a_wrapped_model_knows_what_the_middleware_has_planned(mode):
    planner = ReusePlanner(mode=mode)
    model = ReuseChatModel(
        inner=Scripted(responses=[calls("ab"), calls("bc"), done()]), planner=planner
    )
    agent: Any = create_agent(model, [search_tool()], middleware=[ReuseMiddleware(planner=planner)])
    ask(agent, "ad")
    assert (model.prompt_statistics.planned, model.prompt_statistics.not_found) == (2, 1)


def test_of_the_results_of_one_step_the_first_64_are_planned_and_the_log_says_so(caplog):
    middleware: Any = ReuseMiddleware(tools=["search"])
    _log_too_many.cache_clear()
    found = [
        ToolMessage(f"one {n}\n\ntwo {n}", tool_call_id=f"{n}", id=f"{n}", name="search")
        for n in range(66)
    ]
    planned = middleware.before_model({"messages": found}, None)["messages"]
    assert [message.id for message in planned] == [f"{n}" for n in range(64)]
    assert ["more than 64" in one.getMessage() for one in caplog.records] == [True]


def test_context_stands_before_the_newest_question_and_behind_the_history():
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    agent, model = agent_with(middleware, [done("One."), calls("cb"), done("Two.")], search_tool())
    ask(agent, "ab")
    messages = ask(agent, "bc")
    assert [message.content for message in sent(messages)] == [
        f"{shown(A, B)}\n\nab",
        "One.",
        f"{see('b')}\n\n{shown(C)}\n\nbc",
        "",
        f"{see('c')}\n\n{see('b')}",
        "Two.",
    ]
    assert is_append_only(model.seen)
    questions = [one for one in messages if isinstance(one, HumanMessage)]
    assert [one.additional_kwargs["ctxreuse"]["question"] for one in questions] == ["ab", "bc"]


@pytest.mark.parametrize("is_reusing", [False, True])
def test_threads_first_contexts_share_their_beginning_in_each_tenant(is_reusing):
    planner, retriever = ReusePlanner(), LetterRetriever()
    wrapped: Any = ReuseRetriever(planner=planner, retriever=retriever) if is_reusing else retriever
    agent, model = agent_with(
        ReuseMiddleware(planner=planner, retriever=wrapped), [done() for _ in range(4)]
    )
    ask(agent, "abc", "t1", tenant="one")
    [question, _] = ask(agent, "dba", "t2", tenant="one")
    assert is_reusing or question.content == f"{shown(D, B, A)}\n\ndba"
    assert (
        sent([question])[0].content
        == model.seen[1][1]["content"]
        == (f"{shown(A, B, D)}\n\n{order_words('id-d', 'id-b', 'id-a')}\n\ndba")
    )
    assert [message["role"] for message in model.seen[1]] == ["system", "user"]
    for tenant, order in (("two", "cba"), ("one", "abc")):
        [question] = sent(ask(agent, "cba", f"t {tenant}", tenant=tenant))[:1]
        assert letters_in(str(question.content)) == order


def test_a_system_message_before_the_first_question_is_no_history():
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    for letters in ("ab", "ba"):
        messages = [SystemMessage("Be brief.", id=f"s{letters}"), HumanMessage(letters, id=letters)]
        update = middleware.before_agent({"messages": messages}, None)
    assert update is not None
    assert sent(update["messages"])[0].content.startswith(f"{shown(A, B)}\n\nPlease read")


async def test_async_agents_retrieve_context_and_retrievers_may_return_iterators():
    for retriever in (LetterRetriever(), RunnableLambda(lambda query: map(document, query))):
        agent, model = agent_with(ReuseMiddleware(retriever=retriever), [done(), done()])
        config: RunnableConfig = {"configurable": {"thread_id": "t1"}}
        await agent.ainvoke({"messages": [HumanMessage("ab")]}, config)
        ask(agent, "ab", "t2")
        assert [one[1]["content"] for one in model.seen] == [f"{shown(A, B)}\n\nab"] * 2


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
    content = [{"type": "text", "text": "ab"}, PIXEL]
    [question, _] = ask(agent, content)
    assert question.content == [{"type": "text", "text": shown(A, B)}, *content]
    assert sent(ask(agent, "b"))[2].content == f"{see('b')}\n\nb"
    assert is_append_only(model.seen)


@pytest.mark.parametrize("content", ["", "  ", [PIXEL], "!"])
def test_a_question_without_text_or_for_which_nothing_is_found_stays(content):
    found = RunnableLambda(lambda query: [] if query == "!" else documents("ab"))
    agent, _ = agent_with(ReuseMiddleware(retriever=found), [done()])
    [question, _] = ask(agent, content)
    assert question.content == content
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


@pytest.mark.parametrize("retriever", [None, LetterRetriever()])
def test_a_result_that_ended_a_run_is_planned_when_the_next_one_shows_it(retriever):
    direct = search_tool()
    direct.return_direct = True
    agent, model = agent_with(
        ReuseMiddleware(retriever=retriever), [calls("cb"), calls("ce"), done()], direct
    )
    before = "" if retriever is None else f"{shown(A, B)}\n\n"
    assert results(ask(agent, "ab")) == [f"{C}\n\n{B}"]
    messages = sent(ask(agent, "cd"))
    first = shown(C, B) if retriever is None else f"{shown(C)}\n\n{see('b')}"
    asked = "" if retriever is None else f"{see('c')}\n\n{shown(D)}\n\n"
    assert [one.content for one in messages if not isinstance(one, AIMessage)][:3] == [
        f"{before}ab",
        first,
        f"{asked}cd",
    ]
    assert is_append_only(model.seen)


def test_a_history_without_metadata_is_sent_as_it_was_sent():
    """A client holds it as OpenAI's JSON, and sends it with each request."""
    middleware, seen = ReuseMiddleware(), []
    history: list[Any] = []
    for script, question in (([calls("cd"), done()], "One?"), ([calls("df"), done()], "Two?")):
        agent, model = agent_with(middleware, script, search_tool())
        history.append({"role": "user", "content": question})
        messages = agent.invoke({"messages": history}, {"configurable": {"thread_id": question}})[
            "messages"
        ]
        history = json.loads(json.dumps(convert_to_openai_messages(messages)))
        seen += model.seen
    assert is_append_only(seen)
    assert seen[-1][-1]["content"] == f"{see('d')}\n\n{shown(F)}"
