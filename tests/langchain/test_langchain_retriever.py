import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
from adapter_conformance import AdapterConformance, FaultyPlanner, Retrieved, Shown
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    ConfigurableField,
    RunnableConfig,
    RunnableLambda,
    RunnablePassthrough,
)
from langchain_document_helpers import (
    GivenRetriever,
    LetterRetriever,
    as_documents,
    as_shown,
    document,
    documents,
    letter_store,
    letters_of,
    no_sockets,
)
from langchain_runs import Runs
from langchain_tests.integration_tests import RetrieversIntegrationTests
from planning_helpers import location_words, order_words

import ctxreuse
from ctxreuse import PAPER_TEMPLATES, ReusePlanner
from ctxreuse.adapters.document_planner import RetrievedItems
from ctxreuse.adapters.issued_plans import digest_of
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.scope import NO_SCOPE
from langchain_ctxreuse import ReuseRetriever, format_context
from langchain_ctxreuse.documents.document_plans import planned_document

pytestmark = pytest.mark.usefixtures("paper_words")

__all__ = ["no_sockets"]


class DrivenRetriever:
    def __init__(self, **arguments: Any) -> None:
        self.retriever = ReuseRetriever(retriever=GivenRetriever(), **arguments)
        self.given: list[tuple[list[Document], list[Document]]] = []

    @property
    def faults(self) -> int:
        return self.retriever.faults

    def run(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        return [as_shown(one) for one in self.retriever.invoke(query, **self.taking(retrieved))]

    async def arun(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        found = await self.retriever.ainvoke(query, **self.taking(retrieved))
        return [as_shown(one) for one in found]

    def taking(self, retrieved: Sequence[Retrieved]) -> dict[str, Any]:
        given = as_documents(retrieved)
        self.given.append((given, deepcopy(given)))
        return {"documents": given}

    def inputs_are_untouched(self) -> bool:
        return all(now == before for now, before in self.given)


class TestReuseRetrieverConforms(AdapterConformance):
    def adapter(self, planner: Any, annotation: Any = "metadata") -> DrivenRetriever:
        return DrivenRetriever(planner=planner, annotation=annotation)


class TestReuseRetrieverInLangChainsOwnSuite(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> Any:
        def reuse_retriever(k: int = 4) -> BaseRetriever:
            inner = letter_store().as_retriever(search_kwargs={"k": k})
            return ReuseRetriever(retriever=inner)

        return reuse_retriever

    @property
    def retriever_query_example(self) -> str:
        return "abba"


def reuse_retriever(**arguments: Any) -> ReuseRetriever:
    return ReuseRetriever(retriever=LetterRetriever(), **arguments)


def test_what_is_returned_shares_nothing_that_can_change_with_the_retrievers_store():
    inner = LetterRetriever(store={"a": document("a", tags=["x", {"y": 1}])})
    retriever = ReuseRetriever(retriever=inner, annotation="metadata")
    first, _ = retriever.invoke("ab")
    first.metadata["tags"][1]["y"] = 2
    first.metadata["ctxreuse"]["plan"]["blocks"].clear()
    assert inner.store["a"] == document("a", tags=["x", {"y": 1}])
    again, _ = retriever.invoke("ab")
    assert again.metadata["ctxreuse"]["plan"]["blocks"] == ["id-a", "id-b"]


def test_the_metadata_of_a_planned_document_is_plain_data():
    retriever = reuse_retriever(annotation="append")
    retriever.invoke("abc")
    found = retriever.invoke("dba")
    plan = {
        "request_id": "request-1",
        "blocks": ["id-a", "id-b", "id-d"],
        "references": [],
        "order_annotation": order_words("id-d", "id-b", "id-a"),
        "parts": [["[Doc_id-a]", "id-a"], ["[Doc_id-b]", "id-b"], ["[Doc_id-d]", "id-d"]],
        "expected_cached_tokens": found[0].metadata["ctxreuse"]["plan"]["expected_cached_tokens"],
    }
    digest = {"plan_id": digest_of(plan).hex()}
    words = text_digest(found[3].page_content).hex()
    assert [json.loads(json.dumps(one.metadata)) for one in found] == [
        {"source": "a.txt", "ctxreuse": {"rank": 2, "label": "[Doc_id-a]", "plan": plan} | digest},
        {"source": "b.txt", "ctxreuse": {"rank": 1, "label": "[Doc_id-b]"} | digest},
        {"source": "d.txt", "ctxreuse": {"rank": 0, "label": "[Doc_id-d]"} | digest},
        {"source": "", "ctxreuse": {"annotation": words} | digest},
    ]
    assert found[3].page_content == PAPER_TEMPLATES.order_annotation(list("321"))


def test_the_annotation_has_the_metadata_names_that_all_documents_have():
    retriever = ReuseRetriever(retriever=GivenRetriever())
    retriever.invoke("q", documents=documents("ab"))
    mixed = [document("b"), document("a", page=1)]
    *_, note = retriever.invoke("q", documents=mixed)
    assert {name: one for name, one in note.metadata.items() if name != "ctxreuse"} == {
        "source": ""
    }


def test_metadata_that_cannot_be_copied_goes_through_as_retrieved_and_is_counted():
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    documents = [
        Document("one", metadata={"ctxreuse": deep, "more": deep}),
        Document("two", metadata={"source": deep}),
    ]
    retriever = ReuseRetriever(retriever=RunnableLambda(lambda query: documents))
    assert [one.page_content for one in retriever.invoke("which?")][:2] == ["one", "two"]
    assert retriever.faults == 1


def test_anything_from_a_string_to_documents_can_be_inside():
    retriever = ReuseRetriever(retriever=RunnableLambda(documents))
    assert letters_of(retriever.invoke("abc")) == "abc"
    retriever = ReuseRetriever(retriever=letter_store().as_retriever())
    assert letters_of(retriever.invoke("aab", k=2)) == "ab"
    assert letters_of(reuse_retriever().invoke("abc", k=2)) == "abc"
    retriever = ReuseRetriever(retriever=RunnableLambda(lambda query: [Document("text")]))
    assert [one.id for one in retriever.invoke("q")] == [None]


def test_config_and_errors_of_the_retriever_inside_pass_through():
    inner = letter_store().as_retriever(search_kwargs={"k": 3})
    configurable = inner.configurable_fields(search_kwargs=ConfigurableField(id="search"))
    retriever = ReuseRetriever(retriever=configurable)
    config: RunnableConfig = {"configurable": {"search": {"k": 1}}}
    assert letters_of(retriever.invoke("aab", config)) == "a"

    runs = Runs()
    retriever = ReuseRetriever(retriever=BrokenRetriever())
    with pytest.raises(ConnectionError, match="no store for !"):
        retriever.invoke("!", {"callbacks": [runs]})
    assert [str(error) for _, error in runs.ended] == ["no store for !", "no store for !"]
    assert retriever.faults == 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_retriever_inside_is_a_child_run(is_async):
    runs = Runs()
    config: RunnableConfig = {"callbacks": [runs], "tags": ["mine"], "run_name": "outer"}
    if is_async:
        await reuse_retriever().ainvoke("ab", config)
    else:
        reuse_retriever().invoke("ab", config)
    assert runs.paths == ["outer", "outer > LetterRetriever"]
    assert [letters_of(found) for _, found in runs.ended] == ["ab", "ab"]
    assert runs.tags == [["mine"], ["mine"]]


class BrokenRetriever(LetterRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if "!" in query:
            raise ConnectionError(f"no store for {query}")
        return super()._get_relevant_documents(query, run_manager=run_manager)


def test_a_batch_is_planned_as_one_and_answered_in_the_callers_order():
    planner = ReusePlanner()
    found = reuse_retriever(planner=planner, annotation="metadata").batch(["abc", "xyz", "dcb"])
    batch = ReusePlanner().plan_batch(
        ctxreuse.ContextRequest(
            [ctxreuse.ContextBlock(id=one.id, text=one.page_content) for one in documents(query)],
            query,
        )
        for query in ("abc", "xyz", "dcb")
    )
    planned = ["".join(b.text[0] for b in plan.blocks) for plan in batch.in_input_order()]
    assert [letters_of(one) for one in found] == planned
    assert planned != ["abc", "xyz", "dcb"], "otherwise this shows nothing"


async def test_an_async_batch_gives_what_a_batch_gives_which_reaches_it_in_chains():
    queries = ["abc", "xyz", "dcb", "", "bca"]
    assert await reuse_retriever().abatch(queries) == reuse_retriever().batch(queries)
    chain = reuse_retriever() | format_context
    first, _, last = chain.batch(["abc", "xyz", "dcb"])
    assert first.split("\n\n")[:2] == last.split("\n\n")[:2]


def test_a_batchs_callbacks_see_the_documents_as_retrieved():
    runs = Runs()
    reuse_retriever().batch(["abc", "dcb"], {"callbacks": [runs], "max_concurrency": 1})
    assert [letters_of(found) for _, found in runs.ended] == ["abc", "abc", "dcb", "dcb"]


async def test_batches_return_exceptions_where_they_are_asked_to():
    retriever = ReuseRetriever(retriever=BrokenRetriever(), annotation="metadata")
    first, error, last = retriever.batch(["abc", "!", "dcb"], return_exceptions=True)
    assert isinstance(error, ConnectionError)
    assert sorted(letters_of(first)) == ["a", "b", "c"]
    assert letters_of(last)[:2] == letters_of(first)[:2], "planned together"
    with pytest.raises(ConnectionError):
        retriever.batch(["abc", "!"])
    retriever = ReuseRetriever(retriever=BrokenRetriever(), annotation="metadata")
    first, error = await retriever.abatch(["abc", "!"], return_exceptions=True)
    assert isinstance(error, ConnectionError)
    assert letters_of(first) == "abc"


async def test_tenants_are_those_of_the_config_in_batches_and_chains():
    configs: list[RunnableConfig] = [
        {"configurable": {"tenant": tenant}} for tenant in ("one", "two", "one")
    ]
    found = reuse_retriever(annotation="metadata").batch(["abc", "dcb", "dcb"], configs)
    assert letters_of(found[1]) == "dcb"
    assert letters_of(found[2]) != "dcb"

    retriever = reuse_retriever(annotation="metadata")
    # a function in a chain calls the retriever without a config
    chain = RunnableLambda(lambda query: query) | RunnableLambda(lambda q: retriever.invoke(q))
    chain.invoke("abc", {"configurable": {"tenant": "one"}})
    assert letters_of(chain.invoke("cba", {"configurable": {"tenant": "two"}})) == "cba"
    found = await chain.ainvoke("cba", {"configurable": {"tenant": "one"}})
    assert letters_of(found) != "cba"


def test_what_cannot_be_planned_goes_through_as_retrieved():
    retriever = reuse_retriever(planner=FaultyPlanner())
    found = retriever.batch(["abc", "dcb"])
    assert [letters_of(one) for one in found] == ["abc", "dcb"]
    assert all("ctxreuse" not in one.metadata for one in found[0])
    assert retriever.faults == 1
    retriever = ReuseRetriever(retriever=RunnableLambda(lambda query: ["just text"]))
    assert retriever.invoke("q") == ["just text"]
    assert retriever.faults == 1

    class Strict(list[Document]):
        def __iter__(self) -> Any:
            raise PermissionError("only by position")

    found = Strict([document("a"), document("b")])
    retriever = ReuseRetriever(retriever=RunnableLambda(lambda query: found))
    assert retriever.invoke("ab") is found
    assert retriever.faults == 1


CONVERSATION: RunnableConfig = {"configurable": {"thread_id": "t1", "history": []}}


def second_turn(retriever: ReuseRetriever, query: str) -> list[Document]:
    """Ask in a conversation whose first turn showed a and b."""
    first = format_context(retriever.invoke("ab", CONVERSATION))
    history = [HumanMessage(f"{first}\n\nWhich?"), AIMessage("This.")]
    config: RunnableConfig = {"configurable": {"thread_id": "t1", "history": history}}
    return retriever.invoke(query, config)


def test_documents_that_can_be_read_only_once_are_planned_and_all_come_back():
    retriever = ReuseRetriever(retriever=RunnableLambda(lambda query: map(document, query)))
    retriever.invoke("abc")
    planned = retriever.invoke("cab")
    assert letters_of(planned[:3]) == "abc"
    assert [len(found) for found in retriever.batch(["ab", "cd"])] == [2, 2]
    assert retriever.faults == 0


def test_what_the_history_shows_is_left_out_and_the_last_document_says_where_it_stands():
    found = second_turn(reuse_retriever(), "cb")
    assert [one.page_content for one in found] == [
        document("c").page_content,
        location_words("id-b"),
    ]
    assert found[0].metadata["ctxreuse"]["label"] == "[Doc_id-c]"


def test_where_the_history_shows_everything_one_document_with_their_names_says_so():
    [only] = second_turn(reuse_retriever(annotation="metadata"), "b")
    assert only.page_content == location_words("id-b")
    assert planned_document(only).is_annotation
    inner = LetterRetriever(store={"b": document("b", source="b.txt")})
    [only] = second_turn(ReuseRetriever(retriever=inner), "b")
    assert only.metadata["source"] == ""


@pytest.mark.parametrize("found", [None, "text", [1]])
def test_what_a_retriever_returns_instead_of_documents_comes_back_as_it_is(found):
    retriever = ReuseRetriever(retriever=RunnableLambda(lambda query: found))
    assert retriever._documents.plan(RetrievedItems(found, "?", NO_SCOPE)) == found
    assert retriever.faults == 1


def test_other_things_than_retrievers_and_misspelt_options_are_refused():
    with pytest.raises(ValueError, match=r"pass its as_retriever\(\)"):
        ReuseRetriever(retriever=letter_store())
    with pytest.raises(ValueError, match="pass a retriever or a runnable"):
        ReuseRetriever(retriever="store")
    with pytest.raises(ValueError, match="annotations"):
        reuse_retriever(annotations="off")


PROMPT = ChatPromptTemplate.from_messages([("system", "Use this:\n{context}"), ("user", "{input}")])


class Echo(FakeListChatModel):
    """Answers with its prompt."""

    responses: list[str] = []  # noqa: RUF012  # pydantic copies it

    def _call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        return "\n".join(str(message.content) for message in messages)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain_classic, on import
def test_an_unchanged_stuff_chain_shows_planned_documents_and_the_annotation():
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    chain = create_retrieval_chain(reuse_retriever(), create_stuff_documents_chain(Echo(), PROMPT))
    chain.invoke({"input": "abc"})
    a, b, c = (document(letter).page_content for letter in "abc")
    assert chain.invoke({"input": "cba"})["answer"] == (
        f"Use this:\n{a}\n\n{b}\n\n{c}\n\n{PAPER_TEMPLATES.order_annotation(list('321'))}\ncba"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain_classic, on import
def test_a_stuff_chain_whose_document_prompt_names_metadata_takes_the_annotation_too():
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    chain = create_stuff_documents_chain(
        Echo(), PROMPT, document_prompt=PromptTemplate.from_template("({source}) {page_content}")
    )
    retriever = reuse_retriever()
    retriever.invoke("ab")
    shown = chain.invoke({"context": retriever.invoke("ba"), "input": "?"})
    assert f"() {PAPER_TEMPLATES.order_annotation(list('21'))}" in shown


def test_an_lcel_chain_with_format_context_shows_labels_blocks_and_annotation():
    chain = (
        {"context": reuse_retriever() | format_context, "input": RunnablePassthrough()}
        | PROMPT
        | Echo()
        | StrOutputParser()
    )
    chain.invoke("ab")
    a, b = (document(letter).page_content for letter in "ab")
    assert chain.invoke("ba") == (
        f"Use this:\n[Doc_id-a] {a}\n\n[Doc_id-b] {b}\n\n{order_words('id-b', 'id-a')}\nba"
    )
