"""Chains whose retriever is ours plan together what is asked at once."""

import asyncio
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_document_helpers import LetterRetriever, documents, letters_of, no_sockets

from ctxreuse import ReusePlanner, request_context
from langchain_ctxreuse import ReuseCompressor, ReuseRetriever

__all__ = ["no_sockets"]

WORDS = ["abc", "xyz", "cab", "zyx", "bca"]
TOGETHER = ["abc", "xyz", "abc", "xyz", "abc"]
LONG_S = 60.0


class LateRetriever(LetterRetriever):
    """Takes longer for later letters."""

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        await asyncio.sleep((ord(query[0]) - ord("a")) / 500)
        return self._get_relevant_documents(query, run_manager=run_manager)


def reusing(inner: Any = None) -> ReuseRetriever:
    retriever = ReuseRetriever(
        retriever=inner or LetterRetriever(store={}),
        planner=ReusePlanner(),
    )
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


async def test_tenants_are_planned_apart():
    async def ask(tenant: str, word: str) -> str:
        with request_context(tenant=tenant):
            return letters_of(await retriever.ainvoke(word))

    retriever = reusing()
    async with asyncio.timeout(30):
        found = await asyncio.gather(ask("one", "abc"), ask("two", "cab"), ask("one", "bca"))
    assert found == ["abc", "cab", "abc"]


async def test_compressors_plan_together_what_comes_together():
    compressor = ReuseCompressor(planner=ReusePlanner())
    compressor._documents._batcher._window_s = LONG_S
    async with asyncio.timeout(30):
        found = await asyncio.gather(
            *(compressor.acompress_documents(documents(word), "Which?") for word in WORDS)
        )
    assert list(map(letters_of, found)) == TOGETHER
