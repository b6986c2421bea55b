"""A call whose prompt can show no context waits for no other: it has nothing to gain."""

import asyncio
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_document_helpers import LetterRetriever, document
from langchain_model_helpers import RecordingModel, configured, model, question

from ctxreuse.pipeline.micro_batch import MicroBatcher
from langchain_ctxreuse import ReuseChatModel, format_context

LONGEST_WINDOW_S = 60  # a call that waits shows in how long the tests take


def waiting(monkeypatch: pytest.MonkeyPatch) -> tuple[ReuseChatModel, list[str]]:
    """Return a model with a long window, and a list of the prompts that wait."""
    waited: list[str] = []

    def submit(batcher: MicroBatcher[Any, Any], prompt: Any) -> Any:
        waited.append(prompt.given.parts[-1].text.rsplit("\n", 1)[-1])
        return batcher._schedule([prompt])[0]

    monkeypatch.setattr(MicroBatcher, "submit", submit)
    return model(RecordingModel(), window_s=LONGEST_WINDOW_S), waited


def test_a_prompt_without_a_context_is_sent_at_once():
    wrapped = model(RecordingModel(), window_s=LONGEST_WINDOW_S)
    assert wrapped.invoke("Hi?").content == "Hi?"
    assert asyncio.run(wrapped.ainvoke("Ho?")).content == "Ho?"
    question("ab")
    assert wrapped.invoke("And now?").content == "And now?"
    assert wrapped.prompt_statistics.not_found == 3


def test_a_prompt_with_a_context_waits(monkeypatch):
    wrapped, waited = waiting(monkeypatch)
    wrapped.invoke(question("ab", "One?"))
    wrapped.invoke("None?")
    wrapped.invoke([("system", format_context([document("x"), document("y")])), ("user", "Two?")])
    wrapped.invoke(question("ab", "Three?", tenant="one"), configured(tenant="one"))
    wrapped.invoke("No other tenant's?", configured(tenant="two"))
    assert waited == ["One?", "Two?", "Three?"]
    assert wrapped.prompt_statistics.planned == 3


def test_a_prompt_of_a_run_that_has_retrieved_waits(monkeypatch):
    wrapped, waited = waiting(monkeypatch)

    def ask(asked: str) -> None:
        wrapped.invoke("A search query?")
        found = LetterRetriever().invoke(asked)
        wrapped.invoke("\n\n".join([*(one.page_content for one in found), "Which?"]))

    RunnableLambda(ask).invoke("abc")
    assert waited == ["Which?"]
    assert wrapped.prompt_statistics.planned == 1
