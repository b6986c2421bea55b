"""What ctxreuse says of LangChain's documents where nobody has asked for other words."""

from typing import Any

import pytest
from block_labels import labelled, located, ranked
from langchain_agent_helpers import agent_with, ask, calls, done, results, search_tool, sent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_document_helpers import LetterRetriever, documents, letters_of, no_sockets, text_of
from langchain_model_helpers import RecordingModel, model

from ctxreuse import ReusePlanner, Templates
from langchain_ctxreuse import ReuseMiddleware, ReuseRetriever, format_context

__all__ = ["no_sockets"]

A, B, C, D = map(text_of, "abcd")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("cab", "Read documents 3, 1, 2 first."),
        ("gabcdef", "Read documents 7, 1, 2 first."),
        ("abcd", None),
    ],
)
def test_documents_without_labels_are_ranked_by_their_places(found, words):
    retriever = ReuseRetriever(retriever=LetterRetriever(), annotation=True)
    retriever.invoke("".join(sorted(found)))
    shown = retriever.invoke(found)
    assert letters_of(shown[: len(found)]) == "".join(sorted(found))
    assert [one.page_content for one in shown[len(found) :]] == [words] * (words is not None)


@pytest.mark.parametrize("most_ranked", [1, 2, 5, None])
@pytest.mark.parametrize("labels", [False, True])
def test_a_prompt_ranks_as_many_as_the_templates_say(labels, most_ranked):
    inner = RecordingModel()
    templates = Templates(most_ranked=most_ranked)
    wrapped = model(inner, planner=ReusePlanner(templates=templates))
    for found in ("abcd", "dcba"):
        wrapped.invoke(f"{format_context(documents(found), labels=labels)}\n\nWhich?")
    names = list("4321") if not labels else [labelled(one).split()[0] for one in (D, C, B, A)]
    shown = format_context(documents("abcd"), labels=labels)
    expected = f"{shown}\n\n{templates.order_annotation(names)}\n\nWhich?"
    assert inner.calls[1].text == expected


@pytest.mark.parametrize("labels", [False, True])
def test_a_later_turn_says_in_one_line_where_labelled_documents_stand(labels):
    inner = RecordingModel()
    wrapped = model(inner)
    history: list[Any] = []
    for found in ("ab", "bca", "ba"):
        shown = format_context(documents(found), labels=labels)
        history += [HumanMessage(f"{shown}\n\nWhich?"), AIMessage("So.")]
        wrapped.invoke(history[:-1], {"configurable": {"thread_id": "t"}})
    last = [str(call.messages[-1].content) for call in inner.calls]
    if labels:
        assert last[1:] == [
            f"{labelled(C)}\n\n{located(B, A)}\n\nWhich?",
            f"{located(B, A)}\n\nWhich?",
        ]
    else:
        assert [one.count(" says: ") for one in last] == [2, 3, 2]


def test_a_context_of_labels_is_ranked_by_them_in_an_agents_first_question():
    middleware = ReuseMiddleware(retriever=LetterRetriever())
    agent, agents_model = agent_with(middleware, [done(), done()])
    for thread, question in enumerate(("ab", "ba")):
        ask(agent, question, str(thread))
    shown = [one[-1]["content"] for one in agents_model.seen]
    assert shown == [f"{labelled(A, B)}\n\nab", f"{labelled(A, B)}\n\n{ranked(B, A)}\n\nba"]


def test_a_tool_result_points_to_all_that_stands_above_in_one_line():
    script = [calls("ab"), calls("bca"), calls("ba"), done()]
    agent, agents_model = agent_with(ReuseMiddleware(), script, search_tool())
    messages = ask(agent, "First?")
    assert results(messages) == [f"{A}\n\n{B}", f"{B}\n\n{C}\n\n{A}", f"{B}\n\n{A}"], "as said"
    line = located(B, A)
    shown = [labelled(A, B), f"{labelled(C)}\n\n{line}", line]
    assert results(sent(messages))[1].endswith(line)
    assert [one["content"] for one in agents_model.seen[-1] if one["role"] == "tool"] == shown


def test_a_block_that_does_not_stand_above_any_more_is_shown_before_the_line():
    script = [calls("ab"), calls("c"), calls("acb"), done()]
    agent, _ = agent_with(ReuseMiddleware(), script, search_tool())
    messages = ask(agent, "First?")
    assert results(sent(messages))[2] == located(A, C, B)
    cleared = [
        one.model_copy(update={"content": "[cleared]"}) if one.content == C else one
        for one in messages
    ]
    assert results(sent(cleared))[2] == f"{labelled(C)}\n\n{located(A, B)}"


def test_what_a_retriever_tool_writes_on_documents_goes_under_their_label():
    named = PromptTemplate.from_template("Source: {source}\n{page_content}")
    tool = search_tool(document_prompt=named)
    agent, _ = agent_with(ReuseMiddleware(), [calls("ab"), calls("bca"), done()], tool)
    a, b, c = (f"Source: {letter}.txt\n{text_of(letter)}" for letter in "abc")
    assert results(sent(ask(agent, "First?"))) == [
        labelled(a, b),
        f"{labelled(c)}\n\n{located(b, a)}",
    ]
