"""Documents that a retriever returned are planned where a prompt shows them."""

import asyncio
import copy
import gc
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_agent_helpers import (
    Scripted,
    agent_with,
    ask,
    calls,
    done,
    is_append_only,
    search_tool,
)
from langchain_classic.chains import RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import tool
from langchain_document_helpers import LetterRetriever, documents, text_of
from langchain_model_helpers import RecordingModel, StreamingModel, letters_in
from langchain_model_helpers import model as wrapped
from langgraph.graph import START, StateGraph

from ctxreuse import ReusePlanner, request_context
from ctxreuse.pipeline.known_texts import known_texts
from langchain_ctxreuse import ReuseMiddleware, ReuseRetriever, format_context
from langchain_ctxreuse.documents.run_documents import run_documents

PROMPT = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")


@pytest.fixture(autouse=True)
def no_runs() -> None:
    """Forget runs whose end LangChain never told of, as of a test's cancelled retrievals."""
    run_documents()._start_anew()


def joined(documents: Sequence[Document]) -> str:
    return "\n\n".join(one.page_content for one in documents)


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
def test_documents_that_a_chain_joins_itself_are_planned(program, inner):
    model = wrapped(inner)
    chain = program(model, LetterRetriever())
    for letters in ("abc", "cab"):
        chain.invoke(letters)
    first, second = (call.text for call in inner.calls)
    assert first == joined(documents("abc")) + "\n\nQuestion: abc"
    assert second == first.replace(
        "Question: abc", "Read documents 3, 1, 2 first.\n\nQuestion: cab"
    )
    assert model.prompt_statistics.planned == 2
    assert model.prompt_statistics.not_found == 0


@PROGRAMS
def test_batches_streams_and_event_loops_are_planned_and_leave_no_run(program):
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
    assert run_documents().parts["runs"].entries == 0


@pytest.mark.parametrize("run_id", [None, "text"])
def test_ids_of_runs_may_be_of_any_type(run_id, inner):
    """LangChain takes a text, and passes it on as it is."""
    model = wrapped(inner)
    chain = with_lcel(model, LetterRetriever())
    for number, letters in enumerate(("abc", "cab")):
        ids = {} if run_id is None else {"run_id": f"{run_id} {number}"}
        chain.invoke(letters, ids)
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]
    assert (model.prompt_statistics.planned, model.faults) == (2, 0)
    handler = run_documents()
    handler.on_chain_start(None, None, run_id="outer")
    handler.on_retriever_start(None, "", run_id="inner", parent_run_id="outer")
    assert handler.run_of("inner").root == "outer"
    handler.on_retriever_end(documents("xy"), run_id="inner")
    handler.on_chain_end(None, run_id="outer")
    assert known_texts().known("", text_of("x"))
    assert handler.parts["runs"].entries == 0


def test_observers_see_and_return_what_they_would_without_us(inner):
    class Kept(BaseCallbackHandler):
        seen: list[Any]

        def on_retriever_end(self, documents: Any, **_: Any) -> None:
            self.seen.append(documents)

    kept, found = Kept(), documents("abc")
    kept.seen = []
    before = copy.deepcopy(found)
    with_lcel(wrapped(inner), Fixed(found=found)).invoke("?", {"callbacks": [kept]})
    assert kept.seen == [before]
    assert found == before


def long_context_reorder(found: list[Document]) -> list[Document]:
    """Put the best first and last, as LangChain's transformer of this name does."""
    ordered: list[Document] = []
    for number, one in enumerate(reversed(found)):
        if number % 2:
            ordered.append(one)
        else:
            ordered.insert(0, one)
    return ordered


@pytest.mark.parametrize(
    "change",
    [lambda found: found, long_context_reorder, lambda found: found[:3], lambda found: found[1:]],
)
def test_what_is_done_with_a_planned_retrievers_documents_keeps_their_ranking(change):
    inner, planner = RecordingModel(), ReusePlanner()
    model = wrapped(inner, planner=planner)
    retriever = ReuseRetriever(retriever=LetterRetriever(), planner=planner)
    chain = with_lcel(model, RunnableLambda(lambda text: change(retriever.invoke(text))))
    for word in ("abcd", "dcab"):
        chain.invoke(word)
    shown = letters_in(inner.calls[1].text)
    best = [str(shown.index(one) + 1) for one in "dcab" if one in shown][:3]
    words = f"\n\nRead documents {', '.join(best)} first." if best != ["1", "2", "3"] else ""
    assert inner.calls[1].text == f"{joined(documents(shown))}{words}\n\nQuestion: dcab"
    assert words
    assert model.prompt_statistics.planned == 2
    assert planner.statistics().requests == 2, "the retriever's plans are taken back"


def test_each_prompt_is_ranked_as_its_own_retriever_has_ranked_it(inner):
    planner, questions = ReusePlanner(), ["abcd", "dcab", "bdca", "cadb", "dbac", "acbd"]
    model = wrapped(inner, planner=planner)
    context = ReuseRetriever(retriever=LetterRetriever(), planner=planner) | (
        lambda found: format_context(found, document_prompt="# {source}\n{page_content}")
    )
    ({"context": context, "question": RunnablePassthrough()} | PROMPT | model).batch(questions)
    with_lcel(model, LetterRetriever()).invoke("cbad")  # nobody has planned it
    for call in inner.calls:
        shown = letters_in(call.text)
        best = ", ".join(str(shown.index(one) + 1) for one in call.text[-4:-1])
        assert (f"Read documents {best} first." in call.text) is (best != "1, 2, 3")


def test_documents_that_were_retrieved_for_another_tenant_are_not_known(inner):
    model = wrapped(inner)

    def other(text: str) -> Any:
        with request_context(tenant="one"):
            found = LetterRetriever().invoke(text)
        with request_context(tenant="other"):
            return model.invoke(f"{joined(found)}\n\nWhich?")

    for letters in ("xyz", "zxy"):
        RunnableLambda(other).invoke(letters)
    assert [letters_in(call.text) for call in inner.calls] == ["xyz", "zxy"]
    assert model.prompt_statistics.not_found == 2


@pytest.mark.parametrize("ids", [("1", "2", "3", "4"), (None,) * 4, ("1", "1", "3", "4")])
def test_a_document_that_is_retrieved_twice_stays_as_often_as_it_came(ids, inner):
    a, again, b, c = (
        Document(text_of(letter), id=one) for letter, one in zip("aabc", ids, strict=True)
    )
    model = wrapped(inner)
    for found in ([a, b], [a, again, b], [c, a, again, b], [again, b, a]):
        with_lcel(model, Fixed(found=found)).invoke("Which?")
    moved = f"{joined([a, b, c, a])}\n\nRead documents 3, 1, 2 first."
    shown = [joined([a, b]), joined([a, a, b]), moved, joined([a, b, a])]
    assert [call.text for call in inner.calls] == [f"{one}\n\nQuestion: Which?" for one in shown]
    assert model.prompt_statistics.planned == 2
    assert model.prompt_statistics.in_place == {"twice": 2}


class Fixed(BaseRetriever):
    found: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.found


def test_of_retrievers_inside_each_other_the_outermost_ones_documents_are_found():
    for inside in (LetterRetriever(), ReuseRetriever(retriever=LetterRetriever())):
        outer = EnsembleRetriever(retrievers=[inside, LetterRetriever()], weights=[0.5, 0.5])
        inner = RecordingModel()
        model = wrapped(inner)
        chain = with_lcel(model, outer)
        for letters in ("abc", "cab"):
            chain.invoke(letters)
        assert model.prompt_statistics.planned == 2
        assert inner.calls[1].text.endswith("Read documents 3, 1, 2 first.\n\nQuestion: cab")


def test_documents_that_can_be_read_only_once_are_left_to_the_application():
    class Lazy(LetterRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return iter(super()._get_relevant_documents(query, run_manager=run_manager))

    for retriever in (Lazy(), ReuseRetriever(retriever=Lazy())):
        inner = RecordingModel()
        with_lcel(wrapped(inner), retriever).invoke("ab")
        assert letters_in(inner.calls[0].text) == "ab"


def test_runs_that_fail_are_left_or_cancelled_keep_nothing_but_an_id():
    class Waiting(LetterRetriever):
        async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            await asyncio.sleep(60)
            return []

    async def cancelled() -> None:
        asked = asyncio.ensure_future(with_lcel(wrapped(), Waiting()).ainvoke("abc"))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    inner = RecordingModel(failing=lambda text: ValueError("no") if "zyx" in text else None)
    with pytest.raises(ValueError, match="no"):
        with_lcel(wrapped(inner), LetterRetriever()).invoke("zyx")
    stream = with_lcel(wrapped(StreamingModel()), LetterRetriever()).stream("abc")
    next(iter(stream))
    del stream
    gc.collect()
    assert run_documents().parts["runs"].entries == 0
    asyncio.run(cancelled())
    assert run_documents().parts["runs"].entries <= 1


def test_many_threads_find_each_their_own(inner):
    model = wrapped(inner)
    chain = with_function(model, LetterRetriever())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(chain.invoke, ["abc", "cab", "bca", "xyz", "zyx"] * 8))
    assert model.prompt_statistics.planned == 40
    for call in inner.calls:
        asked = call.text.rsplit(" ", 1)[1]
        assert sorted(letters_in(call.text)) == sorted(asked)


def test_chains_that_hand_callbacks_over_instead_of_a_config_are_planned(inner):
    model = wrapped(inner)
    for letters in ("abc", "cab"):
        RetrievalQA.from_chain_type(model, retriever=LetterRetriever()).invoke(letters)
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]


def test_copies_may_switch_it_on_and_share_the_handler():
    model = wrapped(find_retrieved=False)
    for made, planned in ((model, 0), (model.model_copy(update={"find_retrieved": True}), 1)):
        with_lcel(made, LetterRetriever()).invoke("abc")
        assert made.prompt_statistics.planned == planned
    handler = run_documents()
    assert copy.deepcopy(handler) is handler
    assert pickle.loads(pickle.dumps(handler)) is handler


def test_a_fault_of_the_handler_reaches_nobody_and_shows_no_text(monkeypatch, caplog, inner):
    def broken(*_: Any) -> Any:
        raise RuntimeError(text_of("a"))

    chain = with_lcel(wrapped(inner), LetterRetriever())
    monkeypatch.setattr(run_documents(), "run_of", broken)
    monkeypatch.setattr("langchain_ctxreuse.documents.run_documents.seen_forms", broken)
    chain.invoke("abc")
    assert letters_in(inner.calls[0].text) == "abc"
    assert text_of("a") not in caplog.text


def tool_texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "tool"]


def test_a_tools_text_that_is_more_than_what_was_retrieved_stays_or_is_not_looked_for():
    @tool
    def search(query: str) -> str:
        """Find documents."""
        return "Found: " + joined(LetterRetriever().invoke(query))

    plain = search_tool(response_format="content")
    for middleware, used, before in (
        (ReuseMiddleware(), search, "Found: "),
        (ReuseMiddleware(find_retrieved=False), plain, ""),
    ):
        agent, model = agent_with(middleware, [calls("ab"), done()], used)
        ask(agent, "Which?")
        assert tool_texts(model.seen[-1]) == [before + joined(documents("ab"))]


def test_an_agents_retriever_tools_results_stay_in_order_and_are_replayed_in_later_calls():
    scripted = Scripted(responses=[calls("abc"), calls("cab"), done()], seen=[])
    model = wrapped(scripted)
    agent = create_agent(model, [search_tool(response_format="content")])
    agent.invoke({"messages": [HumanMessage("Which?")]})
    assert is_append_only(scripted.seen)
    assert [letters_in(one) for one in tool_texts(scripted.seen[-1])] == ["abc", "cab"]
    assert model.prompt_statistics.planned == 0
    assert set(model.prompt_statistics.in_place) <= {"behind_changing_words"}
