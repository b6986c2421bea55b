"""Documents that a retriever returned in a run are planned in the prompts of that run alone."""

import asyncio
import copy
import gc
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict
from uuid import uuid4

import pytest
from langchain.agents import create_agent
from langchain_agent_helpers import (
    Scripted,
    agent_with,
    ask,
    calls,
    done,
    is_append_only,
    results,
    search_tool,
    see,
)
from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import EnsembleRetriever, MultiQueryRetriever
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import tool
from langchain_document_helpers import LetterRetriever, document, no_sockets, text_of
from langchain_model_helpers import RecordingModel, StreamingModel, letters_in
from langgraph.graph import START, StateGraph

from ctxreuse import PAPER_TEMPLATES, request_context
from ctxreuse.adapters.prompt_planner import _log_joined_otherwise
from ctxreuse.adapters.rendered_contexts import ContextRegistry
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware, ReuseRetriever
from langchain_ctxreuse.documents.run_documents import RunDocuments, run_documents

pytestmark = pytest.mark.usefixtures("paper_words")

__all__ = ["no_sockets"]

PROMPT = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Forget runs whose end LangChain never told of, as of a test's cancelled retrievals."""
    run_documents()._forget_all()


def joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(one.page_content for one in documents)


def wrapped(inner: Any, **settings: Any) -> ReuseChatModel:
    settings = {"window_s": 0, "registry": ContextRegistry(), **settings}
    return ReuseChatModel(inner=inner, **settings)


def with_lcel(model: Any, retriever: BaseRetriever) -> Runnable[str, Any]:
    context = retriever | RunnableLambda(joined)
    return {"context": context, "question": RunnablePassthrough()} | PROMPT | model


def with_assign(model: Any, retriever: BaseRetriever) -> Runnable[str, Any]:
    named = RunnableParallel(docs=retriever, question=RunnablePassthrough())
    context = RunnableLambda(lambda given: joined(given["docs"]))
    return named | RunnablePassthrough.assign(context=context) | PROMPT | model


def with_retrieval_chain(model: Any, retriever: BaseRetriever) -> Runnable[str, Any]:
    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {input}")
    answer = create_stuff_documents_chain(model, prompt)
    return RunnableLambda(lambda text: {"input": text}) | create_retrieval_chain(retriever, answer)


def with_function(model: Any, retriever: BaseRetriever) -> Runnable[str, Any]:
    def ask(text: str) -> Any:
        return model.invoke(f"{joined(retriever.invoke(text))}\n\nQuestion: {text}")

    return RunnableLambda(ask)


class State(TypedDict, total=False):
    question: str
    context: list[Document]
    answer: str


def with_graph(model: Any, retriever: BaseRetriever, **compiled: Any) -> Any:
    def retrieve(state: State) -> State:
        return {"context": retriever.invoke(state["question"])}

    def generate(state: State) -> State:
        prompt = PROMPT.invoke({**state, "context": joined(state["context"])})
        return {"answer": model.invoke(prompt).content}

    graph = StateGraph(State)
    graph.add_sequence([retrieve, generate])
    graph.add_edge(START, "retrieve")
    return RunnableLambda(lambda text: {"question": text}) | graph.compile(**compiled)


PROGRAMS = pytest.mark.parametrize(
    "program", [with_lcel, with_assign, with_retrieval_chain, with_function, with_graph]
)


@PROGRAMS
def test_documents_that_a_chain_joins_itself_are_planned(program):
    inner = RecordingModel()
    model = wrapped(inner)
    chain = program(model, LetterRetriever())
    for letters in ("abc", "cab"):
        chain.invoke(letters)
    first, second = (call.text for call in inner.calls)
    assert first == joined([document(one) for one in "abc"]) + "\n\nQuestion: abc"
    assert second.startswith(joined([document(one) for one in "abc"]))
    assert "priority order: 3 > 1 > 2 and" in second
    assert second.endswith("\n\nQuestion: cab")
    assert model.prompt_statistics.planned == 2
    assert model.prompt_statistics.without_context == 0


@PROGRAMS
def test_batches_streams_and_event_loops_are_runs_of_their_own(program):
    inner = StreamingModel()
    model = wrapped(inner, window_s=0.001)
    chain = program(model, LetterRetriever())
    chain.batch(["abc", "cab", "xyz", "bca", "zxy"])
    list(chain.stream("bac"))

    async def asked() -> None:
        await chain.ainvoke("cba")
        await chain.abatch(["acb", "yxz"])
        assert [one async for one in chain.astream("yzx")]

    asyncio.run(asked())
    assert {letters_in(call.text) for call in inner.calls} <= {"abc", "xyz", "cab", "zxy", "bca"}
    assert model.prompt_statistics.planned == len(inner.calls) == 10
    assert run_documents().parts["characters"].entries == 0, "what was kept went with the runs"
    assert run_documents().parts["runs"].entries == 0


@PROGRAMS
def test_it_can_be_switched_off(program):
    inner = RecordingModel()
    model = wrapped(inner, find_retrieved=False)
    chain = program(model, LetterRetriever())
    for letters in ("abc", "cab"):
        chain.invoke(letters)
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab"]
    assert model.prompt_statistics.without_context == 2


def test_documents_that_a_retriever_planned_count_as_planned_before():
    model = wrapped(RecordingModel())
    chain = with_lcel(model, ReuseRetriever(retriever=LetterRetriever()))
    for letters in ("abc", "cab", "bca"):
        chain.invoke(letters)
    statistics = model.prompt_statistics
    assert statistics.planned_before == 2, "the first has no words that rank it"
    assert (statistics.without_context, statistics.not_recognised) == (1, 0)


@pytest.mark.parametrize("ids", [("1", "2", "3", "4"), (None,) * 4, ("1", "1", "3", "4")])
def test_a_document_that_is_retrieved_twice_keeps_no_prompt_from_being_planned(ids):
    a, again, b, c = (
        Document(text_of(letter), id=one) for letter, one in zip("aabc", ids, strict=True)
    )
    inner = RecordingModel()
    model = wrapped(inner)
    for found in ([a, b], [a, again, b], [c, a, again, b], [again, b, a]):
        with_lcel(model, Fixed(found=found)).invoke("Which?")
    ranking = PAPER_TEMPLATES.order_annotation(list("312"))
    assert [call.text for call in inner.calls] == [
        f"{joined([a, b])}\n\nQuestion: Which?",
        f"{joined([a, b, a])}\n\nQuestion: Which?",
        f"{joined([a, b, c, a])}\n\n{ranking}\n\nQuestion: Which?",
        f"{joined([a, b, a])}\n\nQuestion: Which?",
    ]
    assert model.prompt_statistics.planned == 4
    assert model.prompt_statistics.without_context == 0


def test_documents_that_are_shown_in_another_way_are_counted_and_logged(caplog):
    _log_joined_otherwise.cache_clear()
    model = wrapped(RecordingModel())
    with_lcel(model, LetterRetriever()).invoke("abc")

    def ask(letters: str) -> Any:
        found = LetterRetriever().invoke(letters)
        return model.invoke(f"{joined(found[::-1])}\n\nWhich?")

    for letters in ("abc", "cab"):
        RunnableLambda(ask).invoke(letters)
    statistics = model.prompt_statistics
    assert (statistics.planned, statistics.joined_otherwise) == (1, 2)
    assert statistics.without_context == 2
    [said] = [one.getMessage() for one in caplog.records if one.name == "ctxreuse"]
    assert "format_context" in said
    assert "a says" not in said


def test_a_prompt_that_shows_one_of_the_documents_is_no_case_for_the_log():
    model = wrapped(RecordingModel())

    def grade(letters: str) -> Any:
        return [model.invoke(one.page_content) for one in LetterRetriever().invoke(letters)]

    RunnableLambda(grade).invoke("abc")
    assert model.prompt_statistics.joined_otherwise == 0
    assert model.prompt_statistics.without_context == 3


def test_documents_of_another_run_are_not_known():
    inner = RecordingModel()
    model = wrapped(inner)
    with_lcel(model, LetterRetriever()).invoke("abc")
    retrieved = LetterRetriever().invoke("cab")
    model.invoke(f"{joined(retrieved)}\n\nWhich?")
    chain = RunnableLambda(lambda text: f"{joined(retrieved)}\n\n{text}") | model
    chain.invoke("Which?")
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab", "cab"]


def test_documents_that_can_be_read_only_once_are_left_to_the_application():
    class Lazy(LetterRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return iter(super()._get_relevant_documents(query, run_manager=run_manager))

    for retriever in (Lazy(), ReuseRetriever(retriever=Lazy(), annotation="off")):
        inner = RecordingModel()
        with_lcel(wrapped(inner), retriever).invoke("ab")
        assert letters_in(inner.calls[0].text) == "ab"


def test_what_another_tenant_retrieved_is_not_known():
    inner = RecordingModel()
    model = wrapped(inner)

    def ask(text: str) -> Any:
        with request_context(tenant="one"):
            documents = LetterRetriever().invoke(text)
        with request_context(tenant="other"):
            return model.invoke(f"{joined(documents)}\n\nWhich?")

    for letters in ("abc", "cab"):
        RunnableLambda(ask).invoke(letters)
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab"]
    assert model.prompt_statistics.planned == 0


class Fixed(BaseRetriever):
    """Returns given documents."""

    found: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.found


def queries_of(text: str) -> Any:
    return FakeListChatModel(responses=[text])


class TestNested:
    """A retriever of ours inside another one leaves the order alone, which counts as a ranking."""

    def outer(self, ours: BaseRetriever) -> Iterator[BaseRetriever]:
        yield EnsembleRetriever(retrievers=[ours, LetterRetriever()], weights=[0.5, 0.5])
        yield MultiQueryRetriever.from_llm(ours, queries_of("cab\nbca"))

    def plain(self) -> list[list[str]]:
        return [
            [one.page_content for one in outer.invoke("cab")]
            for outer in self.outer(LetterRetriever())
        ]

    def test_its_documents_are_those_of_the_plain_one(self, caplog):
        ours = ReuseRetriever(retriever=LetterRetriever())
        ours.invoke("abc")
        ours.batch(["abc", "bca"])
        for outer, expected in zip(self.outer(ours), self.plain(), strict=True):
            for found in (outer.invoke("cab"), asyncio.run(outer.ainvoke("cab"))):
                assert [one.page_content for one in found] == expected
                assert not any("ctxreuse" in one.metadata for one in found)

    def test_around_another_one_it_plans_and_the_outermost_ones_documents_are_found(self):
        for outer in self.outer(LetterRetriever()):
            ours = ReuseRetriever(retriever=outer)
            ours.invoke("abc")
            assert all("ctxreuse" in one.metadata for one in ours.invoke("cab"))

        for outer in self.outer(ReuseRetriever(retriever=LetterRetriever())):
            inner = RecordingModel()
            model = wrapped(inner)
            chain = with_lcel(model, outer)
            for letters in ("abc", "cab"):
                chain.invoke(letters)
            assert model.prompt_statistics.planned == 2


@pytest.mark.parametrize("annotation", ["append", "metadata", "off"])
def test_what_a_retriever_planned_is_not_planned_again(annotation):
    inner = RecordingModel()
    model = wrapped(inner)
    ours = ReuseRetriever(retriever=LetterRetriever(), annotation=annotation)
    chain = with_lcel(model, ours)
    for letters in ("abc", "cab"):
        chain.invoke(letters)

    def ask(_: str) -> None:
        for documents in ours.batch(["bca", "xyz"]):
            model.invoke(joined(documents))

    RunnableLambda(ask).invoke("?")
    assert model.prompt_statistics.planned == 0


def test_runs_that_fail_or_are_left_leave_nothing_behind():
    inner = RecordingModel(failing=lambda text: ValueError("no") if "zyx" in text else None)
    chain = with_lcel(wrapped(inner), LetterRetriever())
    with pytest.raises(ValueError, match="no"):
        chain.invoke("zyx")
    stream = with_lcel(wrapped(StreamingModel()), LetterRetriever()).stream("abc")
    next(iter(stream))
    del stream
    gc.collect()
    parts = run_documents().parts
    assert (parts["runs"].entries, parts["characters"].entries) == (0, 0)


def test_many_threads_find_each_their_own():
    inner = RecordingModel()
    model = wrapped(inner)
    chain = with_function(model, LetterRetriever())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(chain.invoke, ["abc", "cab", "bca", "xyz", "zyx"] * 8))
    assert model.prompt_statistics.planned == 40
    for call in inner.calls:
        asked = call.text.rsplit(" ", 1)[1]
        assert sorted(letters_in(call.text)) == sorted(asked)


def test_an_end_that_comes_in_the_middle_of_a_change_waits_for_it():
    """Python's collector ends streams that nobody reads at any time, in any thread."""
    handler, run_id = RunDocuments(), uuid4()
    handler.on_chain_start(None, None, run_id=run_id)
    with handler._changing():
        handler.on_chain_end(None, run_id=run_id)
        assert len(handler._runs) == 1
    assert handler.parts["runs"].entries == 0


def test_what_is_kept_is_bounded_and_whoever_keeps_most_loses_first():
    handler = RunDocuments()
    large, small = Document("x" * 5_000_000), Document("y" * 1_000)
    runs = {}
    for tenant, found in (("small", small), *[("large", large)] * 4):
        runs[tenant] = root = uuid4()
        inside = uuid4()
        handler.on_chain_start(None, None, run_id=root)
        handler.on_retriever_start(None, "", run_id=inside, parent_run_id=root)
        with request_context(tenant=tenant):
            handler.on_retriever_end([found], run_id=inside)
    size = handler.parts["characters"]
    assert size.entries <= size.bound
    [[kept]] = handler._documents.get("small", runs["small"])
    assert kept.text == small.page_content


def test_a_cancelled_retrieval_keeps_no_documents():
    """LangChain tells of no end of it, so its run is known until the bound; nothing else is."""

    class Waiting(BaseRetriever):
        async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            await asyncio.sleep(60)
            return [document("a")]

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            raise NotImplementedError

    async def cancelled() -> None:
        model = wrapped(RecordingModel())
        asked = asyncio.ensure_future(with_lcel(model, Waiting()).ainvoke("abc"))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(cancelled())
    parts = run_documents().parts
    assert parts["runs"].entries <= 1
    assert parts["characters"].entries == 0


def test_chains_that_hand_callbacks_over_instead_of_a_config_are_planned():
    inner = RecordingModel()
    model = wrapped(inner)
    for letters in ("abc", "cab"):
        RetrievalQA.from_chain_type(model, retriever=LetterRetriever()).invoke(letters)
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]
    assert model.prompt_statistics.planned == 2


def test_copies_may_switch_it_on_and_share_the_handler():
    inner = RecordingModel()
    model = wrapped(inner, find_retrieved=False).model_copy(update={"find_retrieved": True})
    with_lcel(model, LetterRetriever()).invoke("abc")
    assert model.prompt_statistics.planned == 1
    handler = run_documents()
    assert copy.deepcopy(handler) is handler
    assert pickle.loads(pickle.dumps(handler)) is handler


def test_a_fault_of_the_handler_reaches_nobody_and_shows_no_text(monkeypatch, caplog):
    def broken(*_: Any) -> Any:
        raise RuntimeError(text_of("a"))

    inner = RecordingModel()
    chain = with_lcel(wrapped(inner), LetterRetriever())
    for name in ("_start", "_end", "_keep", "of_request"):
        monkeypatch.setattr(run_documents(), name, broken)
    chain.invoke("abc")
    assert letters_in(inner.calls[0].text) == "abc"
    assert text_of("a") not in caplog.text


def tool_texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "tool"]


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
def test_an_agents_retriever_tool_is_planned_by_the_middleware(response_format):
    answers = [calls("ab"), calls("bc", "d"), done()]
    agent, model = agent_with(
        ReuseMiddleware(), answers, search_tool(response_format=response_format)
    )
    state = ask(agent, "Which?")
    a, b, c, d = map(text_of, "abcd")
    assert tool_texts(model.seen[-1]) == [
        f"[Doc_id-a] {a}\n\n[Doc_id-b] {b}",
        f"{see('b')}\n\n[Doc_id-c] {c}",
        f"[Doc_id-d] {d}",
    ]
    assert [b in text for text in results(state)] == [True, True, False], "the state is whole"


def test_a_tools_text_that_is_more_than_what_was_retrieved_stays_or_is_not_looked_for():
    @tool
    def search(query: str) -> str:
        """Find documents."""
        return "Found: " + joined(LetterRetriever().invoke(query))

    agent, model = agent_with(ReuseMiddleware(), [calls("ab"), done()], search)
    ask(agent, "Which?")
    assert tool_texts(model.seen[-1]) == [f"Found: {text_of('a')}\n\n{text_of('b')}"]

    middleware = ReuseMiddleware(find_retrieved=False)
    agent, model = agent_with(
        middleware, [calls("ab"), done()], search_tool(response_format="content")
    )
    ask(agent, "Which?")
    assert tool_texts(model.seen[-1]) == [f"{text_of('a')}\n\n{text_of('b')}"]


def test_what_another_run_of_the_thread_retrieved_is_no_tool_result_of_this_one():
    @tool
    def repeat(query: str) -> str:
        """Say again what was found before."""
        return f"{text_of('a')}\n\n{text_of('b')}"

    answers = [calls("ab"), done(), calls("ab", name="repeat"), done()]
    agent, model = agent_with(
        ReuseMiddleware(), answers, search_tool(response_format="content"), repeat
    )
    ask(agent, "Which?")
    ask(agent, "Again?")
    assert tool_texts(model.seen[-1])[1] == f"{text_of('a')}\n\n{text_of('b')}"


def test_an_agents_retriever_tool_is_planned_by_the_model_and_replayed_in_later_calls():
    scripted = Scripted(responses=[calls("abc"), calls("xy"), done()], seen=[])
    model = wrapped(scripted)
    agent = create_agent(model, [search_tool(response_format="content")])
    agent.invoke({"messages": [HumanMessage("Which?")]})
    assert is_append_only(scripted.seen)
    assert model.prompt_statistics.planned == 1, "of the first result"
    for text, letters in zip(tool_texts(scripted.seen[-1]), ("abc", "xy"), strict=True):
        assert letters_in(text) == letters
