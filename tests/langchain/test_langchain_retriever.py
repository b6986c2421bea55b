"""A retriever and a compressor give back the documents that came, in planned order."""

from collections.abc import Sequence
from typing import Any

import pytest
from adapter_conformance import AdapterConformance
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
)
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda
from langchain_document_helpers import (
    GivenRetriever,
    LetterRetriever,
    document,
    documents,
    letter_store,
    letters_of,
)
from langchain_runs import Runs
from langchain_tests.integration_tests import RetrieversIntegrationTests
from python_processes import python

import langchain_ctxreuse
from ctxreuse import ReusePlanner
from ctxreuse.errors import MissingExtraError
from langchain_ctxreuse import ReuseCompressor, ReuseMiddleware, ReuseRetriever
from langchain_ctxreuse.documents.document_plans import DOCUMENTS

BOTH = pytest.mark.parametrize("component", [ReuseRetriever, ReuseCompressor])


class Driven:
    def __init__(self, component: Any, **options: Any) -> None:
        inside = {"retriever": GivenRetriever()} if component is ReuseRetriever else {}
        self.made: Any = component(**inside, **options)

    @property
    def faults(self) -> int:
        return int(self.made.faults)

    def run(self, given: list[Document], query: str = "q?") -> Sequence[Document]:
        if isinstance(self.made, ReuseCompressor):
            return self.made.compress_documents(given, query)
        return list(self.made.invoke(query, documents=given))

    async def arun(self, given: list[Document], query: str = "q?") -> Sequence[Document]:
        if isinstance(self.made, ReuseCompressor):
            return await self.made.acompress_documents(given, query)
        return list(await self.made.ainvoke(query, documents=given))


class OfDocuments(AdapterConformance):
    component: type

    def adapter(self, planner: Any) -> Driven:
        return Driven(self.component, planner=planner)

    def item(self, letter: str) -> Document:
        return document(letter, tags=[letter, {"page": 1}])

    def text_of(self, item: Document) -> str:
        return item.page_content


class TestReuseRetriever(OfDocuments):
    component = ReuseRetriever


class TestReuseCompressor(OfDocuments):
    component = ReuseCompressor


class TestReuseRetrieverInLangChainsOwnSuite(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> Any:
        return lambda k=4: ReuseRetriever(
            retriever=letter_store().as_retriever(search_kwargs={"k": k})
        )

    @property
    def retriever_query_example(self) -> str:
        return "abba"


def reuse_retriever(inner: Any = None, **arguments: Any) -> ReuseRetriever:
    """Return a retriever that has shown a, b and c, in this order."""
    made = ReuseRetriever(retriever=inner or LetterRetriever(store={}), **arguments)
    made.invoke("abc")
    return made


@BOTH
def test_who_asks_for_it_gets_the_ranking_as_one_more_document(component):
    driven = Driven(component, annotation=True)
    assert letters_of(driven.run(documents("abc"))) == "abc", "nothing was moved"
    *shown, note = driven.run(documents("dba"))
    assert letters_of(shown) == "abd"
    assert note == Document("Read documents 3, 2, 1 first.", metadata={"source": ""})
    given = [document("b"), document("a", page=1), document("c", page=2)]
    assert driven.run(given)[-1].metadata == {"source": ""}, "the names that all have"


def test_inside_other_retrievers_the_order_is_the_one_given(caplog):
    def queries(text: str) -> Any:
        return FakeListChatModel(responses=[text])

    def around(inner: BaseRetriever) -> list[BaseRetriever]:
        return [
            EnsembleRetriever(retrievers=[inner, LetterRetriever()], weights=[0.5, 0.5]),
            MultiQueryRetriever.from_llm(inner, queries("cab\nbca")),
            MultiQueryRetriever(
                retriever=inner, llm_chain=RunnableLambda(lambda _: ["abc", "bca", "cbd"])
            ),
        ]

    for plain, ours in zip(around(LetterRetriever()), around(reuse_retriever()), strict=True):
        assert ours.invoke("cab") == plain.invoke("cab")
    assert letters_of(reuse_retriever().invoke("cab")) == "abc"
    assert letters_of(reuse_retriever(around(LetterRetriever())[0]).invoke("cab")) == "abc"


@pytest.mark.parametrize("is_async", [False, True])
async def test_lists_of_a_map_stay_apart_and_are_planned_together(is_async):
    words = ["abc", "xyz", "dcb", "", "bca"]
    retriever: Any = ReuseRetriever(retriever=LetterRetriever())
    for made in (retriever, retriever.map()):
        if made is retriever:
            found = await made.abatch(words) if is_async else made.batch(words)
        else:
            found = await made.ainvoke(words) if is_async else made.invoke(words)
        assert [sorted(letters_of(one)) for one in found] == [sorted(one) for one in words]
        assert len({letters_of(found[n])[:2] for n in (0, 2, 4)}) == 1


async def test_a_batch_returns_exceptions_where_it_is_asked_to():
    class Broken(LetterRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            if "!" in query:
                raise ConnectionError(f"no store for {query}")
            return super()._get_relevant_documents(query, run_manager=run_manager)

    retriever = ReuseRetriever(retriever=Broken(store={}))
    first, error, last = retriever.batch(["abc", "!", "dcb"], return_exceptions=True)
    assert isinstance(error, ConnectionError)
    assert letters_of(last)[:2] == letters_of(first)[:2], "planned together"
    _, error = await retriever.abatch(["abc", "!"], return_exceptions=True)
    assert isinstance(error, ConnectionError)
    runs = Runs()
    with pytest.raises(ConnectionError):
        retriever.batch(["abc", "!"])
    with pytest.raises(ConnectionError, match="no store for !"):
        retriever.invoke("!", {"callbacks": [runs]})
    assert [str(error) for _, error in runs.ended] == ["no store for !"] * 2
    assert retriever.faults == 0


async def test_tenants_are_those_of_the_config_in_batches_and_chains():
    configs: list[RunnableConfig] = [
        {"configurable": {"tenant": tenant}} for tenant in ("one", "two", "one")
    ]
    first, other, again = ReuseRetriever(retriever=LetterRetriever()).batch(
        ["abc", "dcb", "dcb"], configs
    )
    assert letters_of(first)[:2] == letters_of(again)[:2] != "dc"
    assert letters_of(other) == "dcb"

    retriever = ReuseRetriever(retriever=LetterRetriever(), planner=ReusePlanner())
    compressing = ContextualCompressionRetriever(
        base_compressor=ReuseCompressor(planner=ReusePlanner()), base_retriever=LetterRetriever()
    )
    for inside in (retriever, compressing):
        # a function in a chain calls the retriever without a config
        made: Any = RunnableLambda(str) | RunnableLambda(lambda q, one=inside: one.invoke(q))
        made.invoke("abc", configs[0])
        assert letters_of(made.invoke("cba", configs[1])) == "cba"
        assert letters_of(await made.ainvoke("cba", configs[0])) == "abc"


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_retriever_inside_is_a_child_run(is_async):
    runs = Runs()
    config: RunnableConfig = {"callbacks": [runs], "tags": ["mine"], "run_name": "outer"}
    retriever = reuse_retriever()
    found = await retriever.ainvoke("ba", config) if is_async else retriever.invoke("ba", config)
    assert letters_of(found) == "ab"
    assert runs.paths == ["outer", "outer > LetterRetriever"]
    assert [letters_of(found) for _, found in runs.ended] == ["ba", "ab"]
    assert runs.tags == [["mine"], ["mine"]]


def test_anything_from_a_string_to_documents_can_be_inside():
    assert letters_of(reuse_retriever(RunnableLambda(documents)).invoke("cab")) == "abc"
    stored = letter_store().as_retriever(search_kwargs={"k": 3})
    retriever = ReuseRetriever(retriever=stored)
    assert letters_of(retriever.invoke("aab", k=2)) == "ab"
    configurable = stored.configurable_fields(search_kwargs=ConfigurableField(id="search"))
    config: RunnableConfig = {"configurable": {"search": {"k": 1}}}
    assert letters_of(ReuseRetriever(retriever=configurable).invoke("aab", config)) == "a"
    once = reuse_retriever(RunnableLambda(lambda query: map(document, query)))
    assert letters_of(once.invoke("cab")) == "abc", "what can be read only once is there"
    assert [len(found) for found in once.batch(["ab", "cd"])] == [2, 2]
    assert once.faults == 0


@pytest.mark.parametrize("found", [["text"], [1]])
def test_what_cannot_be_planned_comes_back_as_it_is(found):
    retriever = ReuseRetriever(retriever=RunnableLambda(lambda query: found))
    assert retriever.invoke("q") == found
    assert retriever.faults == 1


def test_other_things_than_retrievers_and_misspelt_options_are_refused():
    with pytest.raises(ValueError, match=r"pass its as_retriever\(\)"):
        ReuseRetriever(retriever=letter_store())
    with pytest.raises(ValueError, match="pass a retriever or a runnable"):
        ReuseRetriever(retriever="store")
    for options in ({"annotations": True}, {"annotation": "append"}, {"drop_repeats": 1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ReuseRetriever(retriever=LetterRetriever(), **options)
        with pytest.raises(ValueError, match=next(iter(options))):
            ReuseCompressor(**options)


class First(BaseDocumentCompressor):
    """Keeps the first documents, best last."""

    number: int

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        return list(reversed(documents[: self.number]))


async def test_it_works_in_compression_retrievers_and_behind_others_in_a_pipeline():
    pipeline = DocumentCompressorPipeline(transformers=[First(number=3), ReuseCompressor()])
    for compressor, word, another in (
        (ReuseCompressor(), "abc", "dba"),
        (pipeline, "cbaxyz", "abdxyz"),
    ):
        retriever = ContextualCompressionRetriever(
            base_compressor=compressor, base_retriever=LetterRetriever()
        )
        assert letters_of(retriever.invoke(word)) == "abc"
        assert letters_of(retriever.invoke(another)) == "abd"
        assert letters_of(await retriever.ainvoke(another)) == "abd"
        assert retriever.invoke("") == []


def test_exports_and_representations_say_where_they_are_defined_and_no_planner():
    assert ReuseMiddleware.__module__ == "langchain_ctxreuse.agents.middleware"
    with pytest.raises(AttributeError, match="no attribute 'ReuseNothing'"):
        langchain_ctxreuse.ReuseNothing  # noqa: B018
    assert "planner" not in repr(ReuseRetriever(retriever=LetterRetriever()))


@pytest.mark.parametrize(
    ("missing", "works", "fails", "named"),
    [
        (["langchain", "langgraph"], "ReuseRetriever, format_context", "ReuseMiddleware", ""),
        (["langchain_core"], "", "ReuseMiddleware", "langchain_ctxreuse"),
    ],
)
def test_what_is_missing_is_named_with_the_pip_command(missing, works, fails, named):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        f"{f'from langchain_ctxreuse import {works}' if works else ''}\n"
        "try:\n"
        f"    from langchain_ctxreuse import {fails}\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert python(code).stdout == f"{MissingExtraError(named or fails, 'langchain')}\n"


def test_a_document_is_to_the_index_what_its_text_is():
    named, same, new = (Document("text", id="d"), Document("text"), Document("new"))
    keys = [DOCUMENTS.block_of(one).key for one in (named, same, new)]
    assert keys[0] == keys[1] != keys[2]
