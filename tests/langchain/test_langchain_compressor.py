import asyncio
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from adapter_conformance import AdapterConformance, Retrieved, Shown
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_document_helpers import (
    LetterRetriever,
    as_documents,
    as_shown,
    documents,
    letters_of,
    no_sockets,
)

import ctxreuse
from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseCompressor, ReuseRetriever

__all__ = ["no_sockets"]

# langchain_classic warns of its own parts when it is imported
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("paper_words"),
]


class DrivenCompressor:
    def __init__(self, **arguments: Any) -> None:
        self.compressor = ReuseCompressor(**arguments)
        self.given: list[tuple[list[Document], list[Document]]] = []

    @property
    def faults(self) -> int:
        return self.compressor.faults

    def run(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        found = self.compressor.compress_documents(self.taking(retrieved), query)
        return [as_shown(one) for one in found]

    async def arun(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        found = await self.compressor.acompress_documents(self.taking(retrieved), query)
        return [as_shown(one) for one in found]

    def taking(self, retrieved: Sequence[Retrieved]) -> list[Document]:
        given = as_documents(retrieved)
        self.given.append((given, deepcopy(given)))
        return given

    def inputs_are_untouched(self) -> bool:
        return all(now == before for now, before in self.given)


class TestReuseCompressorConforms(AdapterConformance):
    def adapter(self, planner: Any, annotation: Any = "metadata") -> DrivenCompressor:
        return DrivenCompressor(planner=planner, annotation=annotation)


class First(BaseDocumentCompressor):
    """Keeps the first documents, best last."""

    number: int

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        return list(reversed(documents[: self.number]))


def compression_retriever(compressor: BaseDocumentCompressor, inner: Any = None) -> Any:
    from langchain_classic.retrievers import ContextualCompressionRetriever

    return ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=inner or LetterRetriever()
    )


async def test_it_works_in_compression_retrievers_and_behind_others_in_a_pipeline():
    retriever = compression_retriever(ReuseCompressor())
    assert letters_of(retriever.invoke("abc")) == "abc"
    assert letters_of(retriever.invoke("dba")) == "abdP", "P: Please read ..."
    assert retriever.invoke("") == []
    retriever = compression_retriever(ReuseCompressor(annotation="off"))
    assert letters_of(await retriever.ainvoke("abc")) == "abc"
    assert letters_of(await retriever.ainvoke("dba")) == "abd"

    from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline

    pipeline = DocumentCompressorPipeline(transformers=[First(number=3), ReuseCompressor()])
    retriever = compression_retriever(pipeline)
    assert letters_of(retriever.invoke("cbaxyz")) == "abc"
    found = retriever.invoke("abdxyz")
    assert letters_of(found) == "abdP"
    assert [one.metadata["ctxreuse"]["rank"] for one in found[:3]] == [2, 1, 0]


def test_compressor_and_retriever_together_make_one_plan():
    planner = ReusePlanner()
    retriever = compression_retriever(
        ReuseCompressor(planner=planner),
        ReuseRetriever(planner=planner, retriever=LetterRetriever()),
    )
    retriever.invoke("abc")
    found = retriever.invoke("cba")
    assert letters_of(found) == "abcP"
    assert [one.metadata["ctxreuse"]["rank"] for one in found[:3]] == [2, 1, 0]
    assert found[3].page_content.endswith("3 > 2 > 1 and answer the question.")
    assert "ctxreuse" not in str(found[0].metadata["ctxreuse"])


def test_the_config_of_the_chain_around_it_says_whose_request_it_is():
    retriever = compression_retriever(ReuseCompressor(annotation="off"))
    chain = RunnableLambda(lambda query: query) | retriever
    one: RunnableConfig = {"configurable": {"tenant": "one"}}
    two: RunnableConfig = {"configurable": {"tenant": "two"}}
    chain.invoke("abc", one)
    assert letters_of(chain.invoke("cba", two)) == "cba"
    assert letters_of(chain.invoke("cba", one)) != "cba"


async def test_concurrent_requests_of_tenants_do_not_mix():
    compressor = ReuseCompressor(annotation="off")

    async def ask(tenant: str, letters: str) -> str:
        with ctxreuse.request_context(tenant=tenant):
            await asyncio.sleep(0)
            return letters_of(await compressor.acompress_documents(documents(letters), "?"))

    await asyncio.gather(ask("one", "abc"), ask("two", "xyz"))
    assert await asyncio.gather(ask("one", "cba"), ask("two", "cba")) != ["cba", "cba"]
    assert await ask("three", "cba") == "cba"
