"""Contexts are planned where the application of this tenant put them, and nowhere else."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_model_helpers import RecordingModel, StreamingModel, letters_in
from langgraph.graph import END, START, StateGraph
from mem0_stores import FakeMemory

from chain_of_agents import ChainOfAgents
from ctxreuse import ReusePlanner, Templates, request_context
from ctxreuse.adapters import prompt_planner, rendered_contexts
from langchain_ctxreuse import ReuseChatModel, format_context
from mem0_ctxreuse import ReuseMemory

LIKED = (("she", "hi"), ("he", "ho"))
CONTEXT_FIRST = "{context}\n\nQuestion: {question}"
QUESTION_FIRST = "Question: {question}\n\n{context}"


@pytest.fixture(autouse=True)
def empty_registry() -> None:
    rendered_contexts._shared_registry.cache_clear()


def text_of(letter: str) -> str:
    return f"{letter} says: " + letter * 400


def documents(letters: str, source: str = "") -> list[Document]:
    return [Document(text_of(letter), id=f"{source}{letter}") for letter in letters]


def configured(tenant: str, **more: Any) -> Any:
    return {"configurable": {"tenant": tenant, **more}}


class Application:
    """Answers questions about documents, one tenant or several, as LangChain's tutorials do."""

    def __init__(self, template: str = CONTEXT_FIRST, inner: RecordingModel | None = None) -> None:
        self.inner = RecordingModel() if inner is None else inner
        self.model = ReuseChatModel(inner=self.inner, window_s=0)
        self.chain: Runnable[Any, Any] = (
            RunnablePassthrough.assign(context=lambda given: format_context(given["documents"]))
            | ChatPromptTemplate.from_messages([("human", template)])
            | self.model
        )

    def ask(self, found: list[Document], question: str, tenant: str = "", **more: Any) -> str:
        """Ask; return the text that was sent."""
        given = {"documents": found, "question": question}
        self.chain.invoke(given, configured(tenant, **more))
        return self.inner.calls[-1].text

    @property
    def sent(self) -> list[str]:
        return [letters_in(call.text) for call in self.inner.calls]


class TestStrangers:
    """What a tenant or a user can say to rewrite a prompt."""

    @pytest.mark.parametrize("other", ["A", "B"])
    def test_a_document_that_poses_as_two_does_not_merge_them(self, other):
        words = Templates(label="[Doc_{id}]")
        planner = ReusePlanner(templates=words, labels=True)
        application = Application()
        application.model = application.model.model_copy(update={"planner": planner})
        with request_context(tenant="A"):
            application.model.invoke(f"{format_context(documents('ab'), words)}\n\nWhich?")
            context = format_context(documents("ba"), words)
            with request_context(tenant=other):
                posing = Document(f"{text_of('b')}\n\n[Doc_a] {text_of('a')}", id="b")
                assert format_context([posing], words) == context
            labels = labels_of(application, f"{context}\n\nWhich?")
        if other == "B":
            assert labels == {"[Doc_a]": "a", "[Doc_b]": "b"}
        else:
            assert not labels, "it is not certain which of the two the prompt shows"

    def test_the_same_context_twice_in_a_prompt_is_left_alone(self):
        application = Application(QUESTION_FIRST)
        with request_context(tenant="A"):
            context = format_context(documents("ba"))
        application.ask(documents("ab"), "One?", "A")
        for _ in range(3):
            asked = f"{context} Why?"
            sent = application.ask(documents("ba"), asked, "A")
            assert sent == f"Question: {asked}\n\n{context}"
        assert application.model.prompt_statistics.left_alone == 6

    @pytest.mark.parametrize(
        "message",
        [SystemMessage, AIMessage, HumanMessage, partial(ToolMessage, tool_call_id="1")],
    )
    def test_no_message_that_quotes_a_context_is_rewritten(self, message):
        application = Application()
        application.ask(documents("ba"), "One?", "A")
        with request_context(tenant="B"):
            context = format_context(documents("ba"))
        for tenant in ("A", "C"):
            with request_context(tenant=tenant):
                honest = message(f"I read: {format_context(documents('ab'))}")
            application.model.invoke([honest, HumanMessage("Why?")], configured(tenant))
            quoting = message(f"I read: {context}")
            application.model.invoke([quoting, HumanMessage("Why?")], configured(tenant))
            assert application.inner.calls[-1].messages[0].content == quoting.content


def labels_of(application: Application, prompt: str) -> dict[str, object]:
    """Return the labels in the plans for a prompt."""
    labels: dict[str, object] = {}
    planner = application.model.planner
    plan = planner.plan

    def noting(*arguments: Any) -> Any:
        made = plan(*arguments)
        labels.update(made.labels)
        return made

    planner.plan = noting
    application.model.invoke(prompt)
    planner.plan = plan
    return labels


def given(letters: str) -> dict[str, Any]:
    return {"documents": documents(letters), "question": "Which?"}


def ask_plainly(application: Application, letters: str, config: Any = None) -> Any:
    return application.model.invoke(f"{format_context(documents(letters))}\n\nWhich?", config)


def around_the_chain(application: Application, tenant: str, letters: str) -> None:
    with request_context(tenant=tenant):
        application.chain.invoke(given(letters))


def around_functions(application: Application, tenant: str, letters: str) -> None:
    with request_context(tenant=tenant):
        ask_plainly(application, letters)


async def awaited_stream(application: Application, tenant: str, letters: str) -> None:
    async for _ in application.chain.astream(given(letters), configured(tenant)):
        pass


def in_a_thread(application: Application, tenant: str, letters: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(around_the_chain, application, tenant, letters).result()


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
    "a request context around functions": around_functions,
    "a stream": lambda one, tenant, it: list(one.chain.stream(given(it), configured(tenant))),
    "an awaited stream": awaited_stream,
    "a thread": in_a_thread,
    "a step of a chain": in_a_step,
    "generated in a step": generated_in_a_step,
    "a graph": lambda one, tenant, it: graph_of(one).invoke(
        {"documents": documents(it)}, configured(tenant)
    ),
    "an awaited graph": lambda one, tenant, it: graph_of(one).ainvoke(
        {"documents": documents(it)}, configured(tenant)
    ),
}


class TestSetUps:
    """Every usual way to say the tenant plans the contexts of this tenant."""

    def check(self, application: Application) -> None:
        assert sorted(application.sent) == ["abc", "abc", "cab"]
        statistics = application.model.prompt_statistics
        assert (statistics.planned, statistics.left_alone) == (3, 0)
        assert statistics.in_other_scope == 0

    @pytest.mark.parametrize("way", WAYS)
    def test_it_is_the_tenants_context(self, way):
        application = Application(inner=StreamingModel())
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            done = WAYS[way](application, tenant, letters)
            if asyncio.iscoroutine(done):
                asyncio.run(done)
        self.check(application)

    @pytest.mark.parametrize("is_awaited", [False, True])
    def test_a_batch_has_a_config_each(self, is_awaited):
        application = Application()
        application.chain.invoke(given("abc"), configured("one"))
        asked = [given("cab"), given("bca")], [configured("two"), configured("one")]
        if is_awaited:
            asyncio.run(application.chain.abatch(*asked))
        else:
            application.chain.batch(*asked)
        self.check(application)

    def test_a_context_that_was_rendered_without_the_tenant_is_counted_and_logged_once(
        self, caplog
    ):
        prompt_planner._log_other_scope.cache_clear()
        application = Application()
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            for letters in ("abc", "cab"):
                context = format_context(documents(letters))
                application.model.invoke(f"{context}\n\nWhich?", configured("one"))
        assert application.sent == ["abc", "cab"]
        assert application.model.prompt_statistics.in_other_scope == 2
        [line] = caplog.messages
        assert "request_context(tenant=" in line
        assert "says" not in line
        with request_context(tenant="one"):
            context = format_context(documents("xyz"))
        application.model.invoke(f"{context}\n\nWhich?")
        assert application.model.prompt_statistics.in_other_scope == 3


def test_a_rendering_that_two_prompts_use_is_said_once(caplog):
    prompt_planner._log_left_alone.cache_clear()
    application = Application()
    for letters in ("abc", "cab"):
        context = format_context(documents(letters))
        for words in ("Is it of use?", "Answer:"):
            with caplog.at_level(logging.WARNING, "ctxreuse"):
                application.model.invoke(f"{words} {context}")
    statistics = application.model.prompt_statistics
    assert (statistics.planned, statistics.left_alone) == (2, 2)
    [line] = caplog.messages
    assert "format_context for each prompt" in line
    assert "says" not in line
    for words in ("Is it of use?", "Answer:"):
        application.model.invoke(f"{words} {format_context(documents('bca'))}")
    assert application.model.prompt_statistics.planned == 4


def test_a_models_stream_serves_the_tenant_of_the_call_however_late_it_is_read():
    application = Application()
    with request_context(tenant="one"):
        streams = [
            application.model.stream(f"{format_context(documents(letters))} Which?")
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

    def test_a_fallback_model_plans_the_same_prompt(self):
        application = Application()
        application.ask(documents("abc"), "One?")
        failing = ReuseChatModel(
            inner=RecordingModel(failing=lambda text: TimeoutError("down")), window_s=0
        )
        application.chain = (
            RunnablePassthrough.assign(context=lambda given: format_context(given["documents"]))
            | ChatPromptTemplate.from_messages([("human", CONTEXT_FIRST)])
            | failing.with_fallbacks([application.model])
        )
        application.ask(documents("cab"), "Two?")
        assert application.sent == ["abc", "abc"]

    def test_tools_may_render_contexts_and_find_the_same(self):
        application = Application()
        call = AIMessage("", tool_calls=[{"name": "find", "args": {}, "id": "1"}])
        for letters in ("abc", "cab"):
            messages: list[BaseMessage] = [HumanMessage("Which?"), call]
            messages.append(ToolMessage(format_context(documents(letters)), tool_call_id="1"))
            application.model.invoke(messages)
            messages += [AIMessage("So."), HumanMessage("Why?")]
            application.model.invoke(messages)
        assert application.sent == ["abc"] * 4

        application = Application()
        calls = [{"name": "search", "args": {}, "id": one} for one in "12"]
        messages: list[BaseMessage] = [HumanMessage("Which?"), AIMessage("", tool_calls=calls)]
        messages += [ToolMessage(format_context(documents("ab")), tool_call_id=one) for one in "12"]
        application.model.invoke(messages, configured("", thread_id="t"))
        assert application.sent == ["ab"]
        assert application.model.prompt_statistics.planned == 2

    def test_a_loop_that_shows_its_context_again_keeps_the_beginning_that_was_sent(self):
        application = Application()
        application.ask(documents("ab"), "One?")
        first = application.ask(documents("ba"), "Two?")
        asked = f"Two?\n\nNo JSON. Again, read:\n{format_context(documents('ba'))}"
        again = application.ask(documents("ba"), asked)
        assert letters_in(first) == "ab"
        assert again.startswith(first)

    def test_two_models_share_what_was_rendered_for_each(self):
        first, second = Application(), Application("Check this: {context} {question}")
        for letters in ("abc", "cab"):
            first.ask(documents(letters), "Which?")
            second.ask(documents(letters), "Which?")
        assert first.sent == second.sent == ["abc", "abc"]

    def test_a_history_may_be_trimmed_from_the_front(self):
        application = Application()
        messages: list[BaseMessage] = []
        with request_context(tenant="A"):
            for letters in ("abc", "bad", "cab", "abd"):
                context = format_context(documents(letters))
                messages = [*messages, HumanMessage(f"{context}\n\nWhich?")][-3:]
                application.model.invoke(messages)
                messages.append(AIMessage("So."))
        assert application.model.prompt_statistics.planned == 4


class TestOtherAdapters:
    """Texts of adapters that plan without a registry pass a planning model as they are."""

    def test_a_context_of_mem0_is_sent_as_planned(self):
        application = Application()
        application.ask([Document("he says: ho"), Document("she says: hi")], "One?", "A")
        found = [{"id": name, "memory": f"{name} says: {word}"} for name, word in LIKED]
        planned = ReuseMemory(FakeMemory(found)).context("q?", filters={"user_id": "alice"})
        application.model.invoke(f"{planned}\n\nQuestion: Two?", configured("A"))
        assert application.inner.calls[-1].text == f"{planned}\n\nQuestion: Two?"

    def test_a_document_of_a_chain_of_agents_may_quote_a_context(self):
        application = Application()
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


@pytest.mark.parametrize("word", ["[INST] ", "[NOTE] ", "[INFO] "])
def test_words_that_look_like_labels_stop_no_planning(word):
    application = Application("{context}\n\n" + word + "{question}")
    for letters in ("abc", "cab"):
        application.ask(documents(letters), "Which?")
    assert application.model.prompt_statistics.planned == 2
