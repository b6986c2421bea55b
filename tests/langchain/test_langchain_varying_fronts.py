"""Documents behind words that change from prompt to prompt stay in place, and the log says why."""

import logging
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_document_helpers import LetterRetriever
from langchain_model_helpers import configured, model, question

from ctxreuse.pipeline.prompt_turn import _log_nothing_planned
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

DOCUMENTS = ["abc", "bca", "cab"]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Return what the log says of words in front, of which nothing was said before."""
    _log_nothing_planned.cache_clear()
    caplog.set_level(logging.WARNING, "ctxreuse")
    return lambda: [one for one in caplog.messages if "{context} before {question}" in one]


def asked(wrapped: ReuseChatModel, template: str, number: int, retriever: Any = None) -> None:
    """Ask questions about the documents that their first words name."""
    prompt = ChatPromptTemplate.from_template(template)
    context = (lambda asked: asked.split()[0]) | (retriever or LetterRetriever()) | format_context
    chain = {"context": context, "question": RunnablePassthrough()} | prompt | wrapped
    for one in range(number):
        chain.invoke(f"{DOCUMENTS[one % 3]} and {one}?")


@pytest.mark.parametrize("is_planned_before", [False, True])
def test_questions_before_the_documents_are_counted_and_said_once(is_planned_before, said):
    wrapped = model()
    inside = LetterRetriever()
    retriever = ReuseRetriever(retriever=inside) if is_planned_before else inside
    asked(wrapped, "Question: {question}\n\n{context}", 41, retriever)
    assert wrapped.prompt_statistics.planned <= 2, "until two prompts were seen"
    assert wrapped.prompt_statistics.in_place["behind_changing_words"] >= 39
    assert len(said()) == 1


def few_templates(wrapped: ReuseChatModel) -> None:
    for one in range(60):
        wrapped.invoke(f"Task {one % 3}:\n\n{question('abc')}")


def tenants(wrapped: ReuseChatModel) -> None:
    for one in range(60):
        name = str(one % 30)
        text = f"You serve customer {name}.\n\n{question('abc', tenant=name)}"
        wrapped.invoke(text, configured(tenant=name))


def later_turns(wrapped: ReuseChatModel) -> None:
    for one in range(30):
        config = configured(thread_id=str(one))
        turn = question("abc", f"What about {one}?")
        answer = wrapped.invoke(turn, config)
        wrapped.invoke([("user", turn), answer, ("user", question("cde", "And then?"))], config)


@pytest.mark.parametrize(
    "use",
    [
        lambda wrapped: asked(wrapped, "{context}\n\n{question}", 60),
        lambda wrapped: asked(wrapped, "Answer from this:\n\n{context}\n{question}", 60),
        few_templates,
        tenants,
        later_turns,
    ],
)
def test_the_same_words_before_the_documents_are_fine(use, said):
    wrapped = model()
    use(wrapped)
    assert wrapped.prompt_statistics.planned >= 59
    assert sum(wrapped.prompt_statistics.in_place.values()) <= 1, "a third template is new once"
    assert not said()
