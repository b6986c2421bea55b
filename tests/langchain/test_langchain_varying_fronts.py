"""What differs from prompt to prompt in front of the documents is counted, and said once."""

import logging
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_document_helpers import LetterRetriever
from langchain_model_helpers import RecordingModel, configured, model, question

from ctxreuse.adapters.prompt_planner import _log_varying_front
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

DOCUMENTS = ["abc", "bca", "cab"]


@pytest.fixture(autouse=True)
def not_said_yet() -> None:
    _log_varying_front.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.getMessage()
        for one in caplog.records
        if one.levelno >= logging.WARNING and "{context} before {question}" in one.getMessage()
    ]


def asked(wrapped: ReuseChatModel, template: str, number: int, retriever: Any = None) -> None:
    """Ask questions about the documents that their first words name."""
    prompt = ChatPromptTemplate.from_template(template)
    retriever = retriever or LetterRetriever()
    context = (lambda asked: asked.split()[0]) | retriever | format_context
    chain = {"context": context, "question": RunnablePassthrough()} | prompt | wrapped
    for one in range(number):
        chain.invoke(f"{DOCUMENTS[one % 3]} and {one}?")


def test_questions_before_the_documents_are_said_once(caplog):
    wrapped = model()
    asked(wrapped, "Question: {question}\n\n{context}", 20)
    assert wrapped.prompt_statistics.planned == 20
    assert wrapped.prompt_statistics.varying_front == 19
    assert not said(caplog)
    asked(wrapped, "Now: {question}\n\n{context}", 20)
    assert wrapped.prompt_statistics.varying_front == 39
    assert len(said(caplog)) == 1


def test_a_batch_says_it_too(caplog):
    wrapped = model()
    wrapped.batch([f"Question {one}?\n\n{question('abc')}" for one in range(40)])
    assert wrapped.prompt_statistics.varying_front == 39
    assert len(said(caplog)) == 1


def test_documents_that_a_retriever_planned_count_too(caplog):
    wrapped = model()
    retriever = ReuseRetriever(retriever=LetterRetriever(), planner=wrapped.planner)
    asked(wrapped, "Question: {question}\n\n{context}", 40, retriever)
    assert wrapped.prompt_statistics.planned_before == 40
    assert wrapped.prompt_statistics.varying_front == 39
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    "template", ["{context}\n\n{question}", "Answer from these documents:\n\n{context}\n{question}"]
)
def test_the_same_words_before_the_documents_are_fine(template, caplog):
    wrapped = model()
    asked(wrapped, template, 40)
    assert wrapped.prompt_statistics.varying_front == 0
    assert not said(caplog)


def test_prompts_for_each_tenant_and_a_few_templates_are_fine(caplog):
    wrapped = model()
    for _ in range(2):
        for one in range(30):
            text = f"You serve customer {one}.\n\n{question('abc', tenant=str(one))}"
            wrapped.invoke(text, configured(tenant=str(one)))
    assert wrapped.prompt_statistics.planned == 60
    assert wrapped.prompt_statistics.varying_front == 0
    assert not said(caplog)

    wrapped = model()
    for one in range(60):
        wrapped.invoke(f"Task {one % 10}:\n\n{question('abc')}")
    assert wrapped.prompt_statistics.varying_front == 9
    assert not said(caplog)


def test_later_turns_of_conversations_begin_as_they_should(caplog):
    wrapped = model(RecordingModel())
    for one in range(30):
        config = configured(thread_id=str(one))
        turn = question("abc", f"What about {one}?")
        answer = wrapped.invoke(turn, config)
        wrapped.invoke([("user", turn), answer, ("user", question("cde", "And then?"))], config)
    assert wrapped.prompt_statistics.planned == 60
    assert wrapped.prompt_statistics.varying_front == 0
    assert not said(caplog)
