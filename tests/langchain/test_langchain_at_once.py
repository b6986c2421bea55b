"""What is asked at once is planned together, and what can gain nothing waits for nothing."""

import asyncio
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_document_helpers import LetterRetriever, document, letters_of
from langchain_model_helpers import RecordingModel, configured, model, question

from ctxreuse import ReusePlanner
from ctxreuse.pipeline.ordered_release import MicroBatcher
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context

WORDS = ["abc", "xyz", "cab", "zyx", "bca"]
TOGETHER = ["abc", "xyz", "abc", "xyz", "abc"]
LONG_S = 60.0


class LateRetriever(LetterRetriever):
    """Takes longer for later letters."""

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        await asyncio.sleep((ord(query[0]) - ord("a")) / 500)
        return self._get_relevant_documents(query, run_manager=run_manager)


def reusing(inner: Any = None) -> ReuseRetriever:
    retriever = ReuseRetriever(retriever=inner or LetterRetriever(store={}), planner=ReusePlanner())
    retriever._documents._batcher._window_s = LONG_S
    return retriever


def chain(retriever: ReuseRetriever) -> Runnable[str, Any]:
    """Return a chain that asks its retriever once per question."""
    shown = {"context": retriever | letters_of, "question": RunnablePassthrough()}
    return shown | ChatPromptTemplate.from_template("{context}: {question}")


@pytest.mark.parametrize("late", [False, True])
async def test_a_chains_batch_is_planned_together_where_it_retrieves(late):
    asked = chain(reusing(LateRetriever(store={}) if late else None))
    async with asyncio.timeout(30):
        prompts = await asked.abatch(WORDS)
    assert [one.to_string()[7:10] for one in prompts] == TOGETHER


async def test_calls_at_once_go_on_in_the_planned_order_and_who_is_alone_does_not_wait():
    async def ask(word: str) -> None:
        gone.append(letters_of(await retriever.ainvoke(word)))

    gone: list[str] = []
    retriever = reusing()
    async with asyncio.timeout(30):
        await asyncio.gather(*map(ask, WORDS))
    assert gone == ["abc", "abc", "abc", "xyz", "xyz"]

    retriever = reusing()
    async with asyncio.timeout(30):
        await retriever.ainvoke("abc")
        found = await asyncio.to_thread(retriever.invoke, "cba")
    assert letters_of(found) == "abc"


def waiting(monkeypatch: pytest.MonkeyPatch) -> tuple[ReuseChatModel, list[str]]:
    """Return a model with a long window, and a list of the prompts that wait."""
    waited: list[str] = []

    def submit(batcher: MicroBatcher[Any, Any], prompt: Any) -> Any:
        waited.append(prompt.given.parts[-1].text.rsplit("\n", 1)[-1])
        return batcher._schedule([prompt])[0]

    monkeypatch.setattr(MicroBatcher, "submit", submit)
    return model(RecordingModel(), window_s=LONG_S), waited


def test_a_prompt_without_a_context_is_sent_at_once():
    wrapped = model(RecordingModel(), window_s=LONG_S)
    assert wrapped.invoke("Hi?").content == "Hi?"
    assert asyncio.run(wrapped.ainvoke("Ho?")).content == "Ho?"
    question("ab")
    assert wrapped.invoke("And now?").content == "And now?"
    assert wrapped.prompt_statistics.not_found == 3


def test_a_prompt_with_a_context_or_with_what_its_run_has_retrieved_waits(monkeypatch):
    wrapped, waited = waiting(monkeypatch)
    wrapped.invoke(question("ab", "One?"))
    wrapped.invoke("None?")
    wrapped.invoke([("system", format_context([document("x"), document("y")])), ("user", "Two?")])
    wrapped.invoke(question("ab", "Three?", tenant="one"), configured(tenant="one"))
    wrapped.invoke("No other tenant's?", configured(tenant="two"))
    assert waited == ["One?", "Two?", "Three?"]

    def ask(asked: str) -> None:
        wrapped.invoke("A search query?")
        found = LetterRetriever().invoke(asked)
        wrapped.invoke("\n\n".join([*(one.page_content for one in found), "Which?"]))

    RunnableLambda(ask).invoke("abc")
    assert waited[3:] == ["Which?"]
    assert wrapped.prompt_statistics.planned == 4
