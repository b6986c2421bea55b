"""What ctxreuse says of LangChain's documents where nobody has asked for other words."""

from typing import Any

import pytest
from langchain_agent_helpers import agent_with, ask, calls, done, results, search_tool
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, convert_to_openai_messages
from langchain_core.prompts import PromptTemplate
from langchain_document_helpers import (
    LetterRetriever,
    document,
    documents,
    letters_of,
    no_sockets,
    text_of,
)
from langchain_model_helpers import RecordingModel

from ctxreuse import ContextBlock, ReusePlanner, Templates
from ctxreuse.adapters.document_planner import RetrievedItems
from ctxreuse.adapters.formatting import words_of
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, format_context
from langchain_ctxreuse.agents.sent_messages import PointingStep
from langchain_ctxreuse.documents.document_plans import LangChainDocumentPlanner, planned_document

__all__ = ["no_sockets"]


def label(text: str) -> str:
    return DEFAULT_TEMPLATES.label_of(ContextBlock(text=text))


def see_also(*texts: str) -> str:
    return f"See also {', '.join(map(label, texts))} above."


TEXT = {letter: text_of(letter) for letter in "abcdpq"}
A, B, C, D, P, Q = (f"{label(text)} {text}" for text in TEXT.values())
LINE = see_also(TEXT["b"], TEXT["a"])


def planner(annotation: Any = "append", **arguments: Any) -> LangChainDocumentPlanner:
    return LangChainDocumentPlanner(ReusePlanner(**arguments), annotation, "Test")


def moved(letters: str, annotation: Any = "append", **arguments: Any) -> list[Document]:
    """Return documents sorted by letter, retrieved in the order given."""
    used = planner(annotation, **arguments)
    used.plan(RetrievedItems(documents("".join(sorted(letters))), "?", NO_SCOPE))
    return used.plan(RetrievedItems(documents(letters), "?", NO_SCOPE))


def second_turn(letters: str, annotation: Any = "append") -> list[Document]:
    """Return the documents of a turn behind one that showed a and b."""
    used = planner(annotation)
    scope = RequestScope(conversation_id="t", history=())
    first = format_context(used.plan(RetrievedItems(documents("ab"), "?", scope)))
    scope = scope.inside(history=[{"role": "user", "content": f"{first}\n\n?"}])
    return used.plan(RetrievedItems(documents(letters), "?", scope))


def test_the_document_behind_the_others_ranks_the_best_five_by_their_places():
    *shown, note = moved("cab")
    assert letters_of(shown) == "abc"
    assert note.page_content == "Read documents 3, 1, 2 first."
    assert moved("gabcdef")[-1].page_content == "Read documents 7, 1, 2 first."


def test_a_document_that_comes_twice_has_two_places():
    used = planner()
    used.plan(RetrievedItems(documents("ab"), "?", NO_SCOPE))
    found = [document("b"), document("a", page=1), document("a", page=2)]
    *shown, note = used.plan(RetrievedItems(found, "?", NO_SCOPE))
    assert [(one.page_content[0], one.metadata.get("page")) for one in shown] == [
        ("a", 1),
        ("a", 2),
        ("b", None),
    ]
    assert note.page_content == "Read documents 3, 1, 2 first."
    assert [shown[place].metadata.get("page") for place in (2, 0, 1)] == [None, 1, 2]


def test_what_was_taken_away_has_no_place():
    a, b, c = moved("cba", "metadata")

    def ranking(*kept: Document) -> str | None:
        return words_of(list(map(planned_document, kept)), DEFAULT_TEMPLATES).ranking

    assert ranking(a, b, c) == "Read documents 3, 2, 1 first."
    assert ranking(a, c) == "Read documents 2, 1 first."
    assert ranking(b) is None


@pytest.mark.parametrize("annotation", ["append", "metadata"])
def test_one_line_says_where_all_left_out_documents_stand(annotation):
    assert format_context(second_turn("bca", annotation)) == f"{C}\n\n{LINE}"
    assert format_context(second_turn("ba", annotation)) == LINE
    [note] = second_turn("ba", annotation)
    assert note.page_content == LINE


def test_sorted_again_the_line_is_said_once():
    first, second, note = second_turn("cbda")
    assert format_context([second, first, note]) == f"{D}\n\n{C}\n\n{LINE}"


def test_documents_that_a_history_shows_without_labels_are_not_left_out():
    scope = RequestScope(
        history=[{"role": "user", "content": f"{TEXT['a']}\n\n{TEXT['b']}\n\nWhich?"}]
    )
    used = planner()
    shown = used.plan(RetrievedItems(documents("ba"), "?", scope))
    assert letters_of(shown) == "ba"
    labels = [one.metadata["ctxreuse"]["label"] for one in shown]
    assert labels == [label(TEXT["b"]), label(TEXT["a"])]
    assert used.faults == 0
    assert format_context(shown) == f"{B}\n\n{A}"


@pytest.mark.parametrize("most_ranked", [1, 2, 5, None])
def test_a_prompt_that_ranks_documents_without_labels_counts_as_planned_before(most_ranked):
    templates = Templates(most_ranked=most_ranked)
    used = ReusePlanner(templates=templates)
    model = ReuseChatModel(inner=RecordingModel(), planner=used, window_s=0)
    texts = [one.page_content for one in moved("cba", templates=templates)]
    model.invoke("\n\n".join([*texts, "Which?"]))
    assert model.prompt_statistics.planned_before == 1
    assert model.prompt_statistics.without_context == 0


def test_a_wrapped_model_ranks_documents_by_the_labels_that_its_prompt_shows():
    inner = RecordingModel()
    model = ReuseChatModel(inner=inner, window_s=0)
    for letters in ("pq", "qp"):  # no other test has planned these
        model.invoke(f"{format_context(documents(letters))}\n\nWhich?")
    shown = f"{P}\n\n{Q}\n\n"
    ranking = f"Read documents {label(TEXT['q'])}, {label(TEXT['p'])} first."
    assert [call.text for call in inner.calls] == [
        f"{shown}Which?",
        f"{shown}{ranking}\n\nWhich?",
    ]


def sent(messages: Any) -> list[Any]:
    return PointingStep(DEFAULT_TEMPLATES, ContextRegistry(), FailOpen("test")).messages(messages)


def test_a_tool_result_points_to_all_that_stands_above_in_one_line():
    agent, model = agent_with(
        ReuseMiddleware(), [calls("ab"), calls("bca"), calls("ba"), done()], search_tool()
    )
    messages = ask(agent, "First?")
    first = f"{A}\n\n{B}"
    assert results(messages) == [first, f"{C}\n\n{B}\n\n{A}", f"{B}\n\n{A}"], (
        "the state holds every block in whole"
    )
    shown = [first, f"{C}\n\n{LINE}", LINE]
    assert results(sent(messages)) == shown
    assert [one["content"] for one in model.seen[-1] if one["role"] == "tool"] == shown


def test_a_block_that_does_not_stand_above_any_more_is_shown_between_two_lines():
    agent, _ = agent_with(
        ReuseMiddleware(), [calls("ab"), calls("c"), calls("acb"), done()], search_tool()
    )
    messages = ask(agent, "First?")
    assert results(sent(messages))[2] == see_also(*(TEXT[letter] for letter in "acb"))
    cleared = [
        one.model_copy(update={"content": "[cleared]"}) if one.content == C else one
        for one in messages
    ]
    assert results(sent(cleared))[2] == f"{see_also(TEXT['a'])}\n\n{C}\n\n{see_also(TEXT['b'])}"


def test_what_is_sent_is_known_as_planned_by_a_wrapped_model():
    registry = ContextRegistry()
    middleware = ReuseMiddleware(registry=registry, retriever=LetterRetriever())
    agent, _ = agent_with(middleware, [calls("ba"), done()], search_tool())
    messages = ask(agent, "ab")
    inner = RecordingModel()
    model = ReuseChatModel(inner=inner, window_s=0, registry=registry)
    turn = [HumanMessage(messages[0].content), AIMessage("So."), *sent(messages)[2:3]]
    asked = [*turn[:2], HumanMessage(f"{turn[2].content}\n\nWhich?")]
    assert asked[2].content == f"{LINE}\n\nWhich?"
    model.invoke(asked)
    assert convert_to_openai_messages(inner.calls[-1].messages) == convert_to_openai_messages(asked)
    assert model.prompt_statistics.planned == 0
    assert model.prompt_statistics.not_recognised == 0


def test_a_retriever_tool_with_a_document_prompt_of_its_own_ends_in_the_line():
    named = PromptTemplate.from_template("Source: {source}\n{page_content}")
    tool = search_tool(document_prompt=named)
    agent, _ = agent_with(ReuseMiddleware(), [calls("ab"), calls("bca"), done()], tool)
    a, b, c = (f"Source: {letter}.txt\n{text_of(letter)}" for letter in "abc")
    assert results(sent(ask(agent, "First?")))[1] == f"{label(c)} {c}\n\n{see_also(b, a)}"
