"""LangChain's and LlamaIndex's retrievers as atomic stages of a workflow."""

import threading

import langchain_document_helpers as langchain_helpers
import llamaindex_helpers
import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from ctxreuse import ContextBlock, ReusePlanner, request_context
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow.retrievers import checked_retriever
from langchain_ctxreuse import ReuseRetriever as LangChainReuse
from langchain_ctxreuse.workflow.served_components import RetrieverStage as LangChainStage
from llamaindex_ctxreuse import ReuseRetriever as LlamaIndexReuse
from llamaindex_ctxreuse.workflow.engine_components import RetrieverStage as LlamaIndexStage


def ids(found):
    return [block.id for block in found]


class Documents(LangChainRetriever):
    """Has only a blocking search; says in which thread and whose context it ran."""

    found: list[object]
    ran: list[object] = []  # noqa: RUF012  # pydantic copies it

    def _get_relevant_documents(self, query, *, run_manager):
        self.ran.append((threading.current_thread(), current_scope().tenant))
        return self.found


class AsyncDocuments(Documents):
    async def _aget_relevant_documents(self, query, *, run_manager):
        return self._get_relevant_documents(query, run_manager=run_manager)


DOCUMENTS = [
    Document("one", id="d1", metadata={"source": "a.txt"}),
    Document("two"),
    Document("three", id="d3"),
]


async def test_langchain_documents_become_blocks_with_their_ids_and_untouched_texts():
    stage = LangChainStage(Documents(found=DOCUMENTS))
    assert await stage.retrieve("Which?", 2) == (
        ContextBlock(id="d1", text="one"),
        ContextBlock(text="two"),
    )
    assert len(await stage.retrieve("Which?", 9)) == 3
    assert checked_retriever(stage) is stage
    stage = LangChainStage(RunnableLambda(lambda query: [Document(query.upper())]))
    assert [block.text for block in await stage.retrieve("which?", 5)] == ["WHICH?"]


async def test_a_vector_store_is_asked_for_k_documents_whatever_its_search_kwargs_say():
    store = InMemoryVectorStore(langchain_helpers.LetterEmbeddings())
    texts = ["a", "aa b", "bb", "ccc", "ab"]
    await store.aadd_documents([Document(text, id=text) for text in texts])
    stage = LangChainStage(store.as_retriever(search_kwargs={"k": 2}))
    assert len(await stage.retrieve("a", 5)) == 5
    assert ids(await stage.retrieve("a", 1)) == ["a"]


@pytest.mark.parametrize(
    ("found", "kind"), [("text", "not str"), ([Document("a"), "b"], "not one with str in it")]
)
async def test_a_runnable_that_returns_no_documents_is_refused(found, kind):
    with pytest.raises(InvalidRequestError, match=f"must return a list of Document, {kind}$"):
        await LangChainStage(RunnableLambda(lambda query: found)).retrieve("Which?", 2)


class Nodes(LlamaIndexRetriever):
    """Has only a blocking search; says in which thread and whose context it ran."""

    def __init__(self, found):
        super().__init__()
        self.found = found
        self.ran = []

    def _retrieve(self, query_bundle):
        self.ran.append((threading.current_thread(), current_scope().tenant))
        return self.found


class AsyncNodes(Nodes):
    async def _aretrieve(self, query_bundle):
        return self._retrieve(query_bundle)


def nodes():
    shown = TextNode(id_="n1", text="one", metadata={"source": "a.txt"})
    hidden = TextNode(
        id_="n2", text="two", metadata={"secret": "b"}, excluded_llm_metadata_keys=["secret"]
    )
    return [NodeWithScore(node=shown, score=0.9), NodeWithScore(node=hidden, score=0.5)]


async def test_nodes_become_blocks_with_their_ids_and_the_text_that_a_model_is_shown():
    stage = LlamaIndexStage(Nodes(nodes()))
    assert await stage.retrieve("Which?", 5) == (
        ContextBlock(id="n1", text="source: a.txt\n\none"),
        ContextBlock(id="n2", text="two"),
    )
    assert ids(await stage.retrieve("Which?", 1)) == ["n1"]
    bare = LlamaIndexStage(Nodes(nodes()), metadata_mode=MetadataMode.NONE)
    assert [block.text for block in await bare.retrieve("Which?", 5)] == ["one", "two"]
    assert checked_retriever(stage) is stage


@pytest.mark.parametrize(
    ("stage", "retriever", "in_loop"),
    [
        (LangChainStage, Documents(found=DOCUMENTS), False),
        (LangChainStage, AsyncDocuments(found=DOCUMENTS), True),
        (LlamaIndexStage, Nodes(nodes()), False),
        (LlamaIndexStage, AsyncNodes(nodes()), True),
    ],
)
async def test_a_retriever_runs_in_a_thread_unless_it_is_async(stage, retriever, in_loop):
    with request_context(tenant="t"):
        await stage(retriever).retrieve("Which?", 2)
    ((thread, tenant),) = retriever.ran
    assert ((thread is threading.current_thread()), tenant) == (in_loop, "t")


async def test_what_reuse_retrievers_planned_comes_back_as_it_was_retrieved(planner):
    documents = LangChainReuse(retriever=langchain_helpers.LetterRetriever(), planner=planner)
    nodes = LlamaIndexReuse(llamaindex_helpers.LetterRetriever(), planner=ReusePlanner())
    for stage, retrieve, id_of in (
        (LangChainStage(documents), documents.ainvoke, lambda one: one.id),
        (LlamaIndexStage(nodes), nodes.aretrieve, lambda one: one.node.node_id),
    ):
        await retrieve("abc")
        shown = await retrieve("cba")
        assert [id_of(one) for one in shown] == ["id-a", "id-b", "id-c"]  # it was reordered
        assert ids(await stage.retrieve("cba", 5)) == ["id-c", "id-b", "id-a"]


async def test_an_empty_answer_is_no_error_and_an_error_is_raised_as_it_is():
    assert await LlamaIndexStage(Nodes([])).retrieve("Which?", 5) == ()
    assert await LangChainStage(Documents(found=[])).retrieve("Which?", 5) == ()

    class Failing(Nodes):
        def _retrieve(self, query_bundle):
            raise LookupError("the store is down")

    for stage in (
        LangChainStage(RunnableLambda(Failing([])._retrieve)),
        LlamaIndexStage(Failing([])),
    ):
        with pytest.raises(LookupError, match="the store is down"):
            await stage.retrieve("Which?", 2)


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        (LangChainStage, {"retriever": None}, "pass a retriever or a runnable"),
        (LangChainStage, {"retriever": len}, "pass a retriever or a runnable"),
        (LlamaIndexStage, {"retriever": None}, "retriever must be a LlamaIndex BaseRetriever"),
        (LlamaIndexStage, {"metadata_mode": "every"}, "there is no metadata mode 'every'"),
    ],
)
def test_wrong_arguments_are_refused(stage, arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        stage(**{"retriever": Nodes([]), **arguments})
