"""Contexts are planned where the application of this tenant put them, and nowhere else."""

import asyncio
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_document_helpers import documents, text_of
from langchain_model_helpers import RecordingModel, StreamingModel, letters_in
from langgraph.graph import END, START, StateGraph
from mem0_stores import FakeMemory, lettered

from chain_of_agents import ChainOfAgents
from ctxreuse import ReusePlanner, request_context
from langchain_ctxreuse import ReuseChatModel, format_context
from mem0_ctxreuse import ReuseMemory


def configured(tenant: str, **more: Any) -> Any:
    return {"configurable": {"tenant": tenant, **more}}


class Application:
    """Answers questions about documents, one tenant or several, as LangChain's tutorials do."""

    def __init__(self, inner: RecordingModel | None = None) -> None:
        self.inner = RecordingModel() if inner is None else inner
        self.model = ReuseChatModel(inner=self.inner, planner=ReusePlanner(), window_s=0)
        self.chain: Runnable[Any, Any] = (
            RunnablePassthrough.assign(context=lambda given: format_context(given["documents"]))
            | ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
            | self.model
        )

    def ask(self, found: list[Document], question: str, tenant: str = "", **more: Any) -> str:
        given = {"documents": found, "question": question}
        self.chain.invoke(given, configured(tenant, **more))
        return self.inner.calls[-1].text

    @property
    def sent(self) -> list[str]:
        return [letters_in(call.text) for call in self.inner.calls]


@pytest.fixture
def application():
    return Application()


@pytest.mark.parametrize("other", ["A", "B"])
def test_a_document_that_poses_as_two_leaves_theirs_where_they_are_or_is_not_known(other):
    application = Application()
    application.ask(documents("ab"), "One?", "A")
    posing = Document(f"{text_of('b')}\n\n{text_of('a')}")
    with request_context(tenant=other):
        assert format_context([posing]) == posing.page_content
    application.ask(documents("ba"), "Two?", "A")
    assert application.sent == ["ab", "ba" if other == "A" else "ab"]


def test_no_answer_and_no_message_before_one_is_rewritten(application):
    application.ask(documents("abc"), "One?", "A")
    context = format_context(documents("cab"))
    for first in (AIMessage, HumanMessage):
        asked = [first(context), AIMessage(context), HumanMessage("Why?")]
        application.model.invoke(asked, configured("A"))
        assert application.inner.calls[-1].messages == asked
    for letters in ("abc", "cab"):
        system = SystemMessage(format_context(documents(letters)))
        application.model.invoke([system, HumanMessage("Why?")], configured("A"))
        assert application.sent[-1] == "abc", "a new system message is the application's"


def given(letters: str) -> dict[str, Any]:
    return {"documents": documents(letters), "question": "Which?"}


def ask_plainly(application: Application, letters: str, config: Any = None) -> Any:
    return application.model.invoke(f"{format_context(documents(letters))}\n\nWhich?", config)


def around_the_chain(application: Application, tenant: str, letters: str) -> None:
    with request_context(tenant=tenant):
        application.chain.invoke(given(letters))


async def awaited_stream(application: Application, tenant: str, letters: str) -> None:
    async for _ in application.chain.astream(given(letters), configured(tenant)):
        pass


def in_a_step(application: Application, tenant: str, letters: str) -> None:
    step = RunnableLambda(lambda letters: ask_plainly(application, letters))
    step.invoke(letters, configured(tenant))


def generated_in_a_step(application: Application, tenant: str, letters: str) -> None:
    def generate(letters: str) -> Any:
        asked = HumanMessage(f"{format_context(documents(letters))}\n\nWhich?")
        return application.model.generate([[asked]])

    RunnableLambda(generate).invoke(letters, configured(tenant))


class State(TypedDict, total=False):
    documents: list[Document]
    context: str
    answer: str


def graph_of(application: Application) -> Any:
    def render(state: State) -> State:
        return {"context": format_context(state["documents"])}

    def answer(state: State) -> State:
        said = application.model.invoke(f"{state['context']}\n\nWhich?")
        return {"answer": str(said.content)}

    graph = StateGraph(State).add_node("render", render).add_node("answer", answer)
    graph.add_edge(START, "render").add_edge("render", "answer").add_edge("answer", END)
    return graph.compile()


WAYS: dict[str, Callable[[Application, str, str], Any]] = {
    "a config": lambda one, tenant, it: one.chain.invoke(given(it), configured(tenant)),
    "an awaited config": lambda one, tenant, it: one.chain.ainvoke(given(it), configured(tenant)),
    "a bound config": lambda one, tenant, it: one.chain.with_config(configured(tenant)).invoke(
        given(it)
    ),
    "a request context around the chain": around_the_chain,
    "a stream": lambda one, tenant, it: list(one.chain.stream(given(it), configured(tenant))),
    "an awaited stream": awaited_stream,
    "a step of a chain": in_a_step,
    "generated in a step": generated_in_a_step,
    "a graph": lambda one, tenant, it: graph_of(one).invoke(
        {"documents": documents(it)}, configured(tenant)
    ),
}


class TestSetUps:
    """Every usual way to say the tenant plans the contexts of this tenant."""

    def check(self, application: Application) -> None:
        assert sorted(application.sent) == ["abc", "abc", "cab"]
        statistics = application.model.prompt_statistics
        assert (statistics.planned, statistics.not_found) == (3, 0)

    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_the_tenants_context(self, way):
        application = Application(inner=StreamingModel())
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            done = WAYS[way](application, tenant, letters)
            if asyncio.iscoroutine(done):
                asyncio.run(done)
        self.check(application)


def test_a_models_stream_serves_the_tenant_of_the_call_however_late_it_is_read(application):
    with request_context(tenant="one"):
        streams = [
            application.model.stream(f"{format_context(documents(letters))}\n\nWhich?")
            for letters in ("abc", "cab")
        ]
    for stream in streams:
        list(stream)
    assert application.sent == ["abc", "abc"]


class TestHonestPrograms:
    """What programs do with a rendered context besides showing it once."""

    def test_contexts_that_were_rendered_once_or_are_tried_again_are_planned_again(self):
        application = Application()
        application.ask(documents("abc"), "One?")
        context = format_context(documents("cab"))
        for number in range(4):
            application.model.invoke(f"{context}\n\nQuestion {number}?")
        assert application.sent == ["abc"] * 5

        application = Application()
        application.ask(documents("abc"), "One?")
        failures = [TimeoutError("down"), TimeoutError("down")]
        application.inner.failing = lambda text: failures.pop() if failures else None
        chain = application.model.with_retry(wait_exponential_jitter=False)
        chain.invoke(f"{format_context(documents('cab'))}\n\nQuestion: Two?")
        assert application.sent == ["abc"] * 4


def test_memories_and_documents_in_one_prompt_are_both_in_order(application):
    memory = ReuseMemory(FakeMemory(lettered("xyz")), planner=application.model.planner)
    for turn, letters in enumerate(("abc", "cab")):
        memory.memory.found = lettered("zxy" if turn else "xyz")
        memories = str(memory.context("Which?", filters={"user_id": "alice"}))
        found = format_context(documents(letters))
        application.model.invoke(f"{memories}\n\n---\n\n{found}\n\nWhich?")
    assert [one[:3] for one in application.sent] == ["xyz"] * 2
    assert sorted(application.sent[1]) == list("abcxyz")


def test_a_document_of_a_chain_of_agents_may_quote_a_context(application):
    application.ask(documents("ab"), "One?", "A")
    shown = application.ask(documents("ba"), "One?", "A").partition("\n\nQuestion")[0]
    plain = Application()
    for one in (application, plain):
        one.inner.calls.clear()
        chain = ChainOfAgents(llm=one.model, workers=1)
        chain.invoke({"question": shown, "documents": [f"Quoted: {shown}"]}, configured("A"))
    texts = [call.text for call in application.inner.calls]
    assert texts == [call.text for call in plain.inner.calls]
    assert any(f"Quoted: {shown}" in text for text in texts)
