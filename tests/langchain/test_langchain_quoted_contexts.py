"""Contexts are planned where the application of this tenant put them, and nowhere else."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_model_helpers import RecordingModel, StreamingModel, letters_in
from langgraph.graph import END, START, StateGraph
from mem0_stores import FakeMemory

from chain_of_agents import ChainOfAgents
from ctxreuse import request_context
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

    def test_an_empty_chunk_rewrites_no_question(self) -> None:
        application = Application()
        for tenant in ("", "A", "B"):
            application.ask([Document("")], "Hi", tenant)
        asked = "What exactly does [Doc_1] say?"
        sent = application.ask(documents("ab"), asked, "A")
        assert sent.endswith(f"\n\nQuestion: {asked}")

    @pytest.mark.parametrize("other", ["A", "B"])
    def test_a_match_ends_where_the_context_ends(self, other: str) -> None:
        application = Application("{context}\n\n{question}")
        with request_context(tenant=other):
            format_context([Document("The T")])
        own_words = "[Doc_1] The Tagus\n\n[Doc_2] The Tiber"
        sent = application.ask(documents("ab"), own_words, "A")
        assert sent.endswith(f"\n\n{own_words}")

    def test_another_tenants_ids_are_not_in_a_plan(self) -> None:
        application = Application()
        with request_context(tenant="A"):
            context = format_context(documents("ab", "A's "))
            with request_context(tenant="B"):
                format_context(documents("ab", "B's "))
            labels = labels_of(application, f"{context}\n\nWhich?")
        assert labels == {"[Doc_1]": "A's a", "[Doc_2]": "A's b"}

    @pytest.mark.parametrize("other", ["A", "B"])
    def test_a_document_that_poses_as_two_does_not_merge_them(self, other: str) -> None:
        application = Application()
        application.ask(documents("ab"), "One?", "A")
        with request_context(tenant="A"):
            context = format_context(documents("ba"))
            with request_context(tenant=other):
                format_context([Document(f"{text_of('b')}\n\n[Doc_2] {text_of('a')}", id="posing")])
            labels = labels_of(application, f"{context}\n\nWhich?")
        if other == "B":
            assert labels == {"[Doc_1]": "a", "[Doc_2]": "b"}
        else:
            assert not labels, "it is not certain which of the two the prompt shows"

    def test_texts_of_two_sources_keep_the_ids_of_theirs(self) -> None:
        application = Application()
        for source in ("one ", "two ", "one "):
            context = format_context(documents("ab", source))
            labels = labels_of(application, f"{context}\n\nWhich?")
            assert labels == {"[Doc_1]": f"{source}a", "[Doc_2]": f"{source}b"}

    def test_a_context_in_a_question_is_no_context(self) -> None:
        application = Application()
        shown = application.ask(documents("ab"), "One?", "A", thread_id="t")
        pasted = shown.partition("\n\nQuestion")[0]
        history = [HumanMessage(shown), AIMessage("So.")]
        for template in (CONTEXT_FIRST, QUESTION_FIRST, "{question}"):
            later = Application(template)
            later.chain = (
                RunnablePassthrough.assign(context=lambda one: format_context(one["documents"]))
                | ChatPromptTemplate.from_messages(
                    [MessagesPlaceholder("history"), ("human", template)]
                )
                | later.model
            )
            given = {"documents": documents("cd"), "question": f"{pasted} Why?", "history": history}
            later.chain.invoke(given, configured("A", thread_id="t"))
            assert f"{pasted} Why?" in str(later.inner.calls[-1].messages[-1].content)

    def test_the_same_context_twice_in_a_prompt_is_left_alone(self) -> None:
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
        [
            SystemMessage,
            AIMessage,
            HumanMessage,
            lambda text: ToolMessage(text, tool_call_id="1"),
        ],
    )
    def test_no_message_that_quotes_a_context_is_rewritten(
        self, message: Callable[[str], BaseMessage]
    ) -> None:
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

    def test_a_document_that_quotes_a_context_stays_whole(self) -> None:
        application = Application()
        shown = application.ask(documents("ab"), "One?", "A").partition("\n\nQuestion")[0]
        quoting = Document(f"He said: {shown.replace('[Doc_2]', '[Doc_2]')} and left.", id="q")
        sent = application.ask([*documents("c"), quoting], "One?", "A")
        assert quoting.page_content in sent


def labels_of(application: Application, prompt: str) -> dict[str, object]:
    """Return the labels in the plans for a prompt."""
    labels: dict[str, object] = {}
    planner = application.model.planner
    plan = planner.plan

    def noting(*arguments: Any) -> Any:
        made = plan(*arguments)
        labels.update(made.labels)
        return made

    planner.plan = noting  # type: ignore[method-assign]
    application.model.invoke(prompt)
    planner.plan = plan  # type: ignore[method-assign]
    return labels


class TestSetUps:
    """Every usual way to say the tenant plans the contexts of this tenant."""

    def given(self, letters: str) -> dict[str, Any]:
        return {"documents": documents(letters), "question": "Which?"}

    def check(self, application: Application) -> None:
        assert sorted(application.sent) == ["abc", "abc", "cab"]
        statistics = application.model.prompt_statistics
        assert (statistics.planned, statistics.left_alone) == (3, 0)
        assert statistics.in_other_scope == 0

    def test_a_config(self) -> None:
        application = Application()
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            application.chain.invoke(self.given(letters), configured(tenant))
        self.check(application)

    async def test_a_config_awaited(self) -> None:
        application = Application()
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            await application.chain.ainvoke(self.given(letters), configured(tenant))
        self.check(application)

    def test_a_request_context_around_the_chain(self) -> None:
        application = Application()
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            with request_context(tenant=tenant):
                application.chain.invoke(self.given(letters))
        self.check(application)

    def test_a_request_context_around_plain_functions(self) -> None:
        application = Application()
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            with request_context(tenant=tenant):
                context = format_context(documents(letters))
                application.model.invoke(f"{context}\n\nWhich?")
        self.check(application)

    def test_a_bound_config(self) -> None:
        application = Application()
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            chain = application.chain.with_config(configured(tenant))
            chain.invoke(self.given(letters))
        self.check(application)

    def test_a_batch_with_a_config_each(self) -> None:
        application = Application()
        application.chain.invoke(self.given("abc"), configured("one"))
        configs = [configured("two"), configured("one")]
        application.chain.batch([self.given("cab"), self.given("bca")], configs)
        self.check(application)

    async def test_an_awaited_batch_with_a_config_each(self) -> None:
        application = Application()
        await application.chain.ainvoke(self.given("abc"), configured("one"))
        configs = [configured("two"), configured("one")]
        await application.chain.abatch([self.given("cab"), self.given("bca")], configs)
        self.check(application)

    async def test_streams(self) -> None:
        application = Application(inner=StreamingModel())
        list(application.chain.stream(self.given("abc"), configured("one")))
        async for _ in application.chain.astream(self.given("cab"), configured("two")):
            pass
        async for _ in application.chain.astream(self.given("bca"), configured("one")):
            pass
        self.check(application)

    def test_threads(self) -> None:
        application = Application()
        application.chain.invoke(self.given("abc"), configured("one"))

        def ask(tenant: str, letters: str) -> None:
            with request_context(tenant=tenant):
                application.chain.invoke(self.given(letters))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask, ["two", "one"], ["cab", "bca"]))
        self.check(application)

    @pytest.mark.parametrize("is_awaited", [False, True])
    def test_nodes_of_a_graph(self, is_awaited: bool) -> None:
        class State(TypedDict, total=False):
            documents: list[Document]
            context: str
            answer: str

        application = Application()

        def render(state: State) -> State:
            return {"context": format_context(state["documents"])}

        def answer(state: State) -> State:
            said = application.model.invoke(f"{state['context']}\n\nWhich?")
            return {"answer": str(said.content)}

        graph = StateGraph(State)
        graph.add_node("render", render)
        graph.add_node("answer", answer)
        graph.add_edge(START, "render")
        graph.add_edge("render", "answer")
        graph.add_edge("answer", END)
        compiled = graph.compile()
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            state: State = {"documents": documents(letters)}
            if is_awaited:
                asyncio.run(compiled.ainvoke(state, configured(tenant)))
            else:
                compiled.invoke(state, configured(tenant))
        self.check(application)

    def test_a_context_that_was_rendered_without_the_tenant_is_counted_and_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
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

    def test_a_context_whose_tenant_the_model_does_not_know_is_counted(self) -> None:
        application = Application()
        with request_context(tenant="one"):
            context = format_context(documents("abc"))
        application.model.invoke(f"{context}\n\nWhich?")
        assert application.model.prompt_statistics.in_other_scope == 1


def test_a_rendering_that_two_prompts_use_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_models_stream_serves_the_tenant_of_the_call_however_late_it_is_read() -> None:
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

    def test_a_context_that_was_rendered_once_serves_many_questions(self) -> None:
        application = Application()
        application.ask(documents("abc"), "One?")
        context = format_context(documents("cab"))
        for number in range(4):
            application.model.invoke(f"{context}\n\nQuestion {number}?")
        assert application.sent == ["abc"] * 5

    def test_a_fallback_model_plans_the_same_prompt(self) -> None:
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

    def test_a_retry_is_planned_again(self) -> None:
        application = Application()
        application.ask(documents("abc"), "One?")
        failures = [TimeoutError("down"), TimeoutError("down")]
        application.inner.failing = lambda text: failures.pop() if failures else None
        chain = application.model.with_retry(wait_exponential_jitter=False)
        chain.invoke(f"{format_context(documents('cab'))}\n\nQuestion: Two?")
        assert application.sent == ["abc"] * 4

    def test_a_batch_may_hold_a_context_several_times(self) -> None:
        application = Application()
        application.ask(documents("abc"), "One?")
        asked = [{"documents": documents("cab"), "question": f"{n}?"} for n in range(4)]
        application.chain.batch(asked)
        assert application.sent == ["abc"] * 5

    def test_a_question_may_stand_before_its_context(self) -> None:
        application = Application(QUESTION_FIRST)
        application.chain.batch(
            [{"documents": documents("cab"), "question": f"{n}?"} for n in range(4)]
        )
        assert application.model.prompt_statistics.planned == 4

    @pytest.mark.parametrize(
        "template",
        [
            "<context>{context}</context>\n{question}",
            "Context: {context} \nAnswer: {question}",
            "```{context}```{question}",
            "{context}. {question}",
        ],
    )
    def test_what_stands_around_a_context_does_not_matter(self, template: str) -> None:
        application = Application(template)
        for letters in ("abc", "cab"):
            application.ask(documents(letters), "Which?", "A")
        assert application.sent == ["abc", "abc"]

    def test_a_tool_may_render_a_context(self) -> None:
        application = Application()
        call = AIMessage("", tool_calls=[{"name": "find", "args": {}, "id": "1"}])
        for letters in ("abc", "cab"):
            messages: list[BaseMessage] = [HumanMessage("Which?"), call]
            messages.append(ToolMessage(format_context(documents(letters)), tool_call_id="1"))
            application.model.invoke(messages)
            messages += [AIMessage("So."), HumanMessage("Why?")]
            application.model.invoke(messages)
        assert application.sent == ["abc"] * 4

    def test_two_tool_calls_of_one_step_may_find_the_same(self) -> None:
        application = Application()
        calls = [{"name": "search", "args": {}, "id": one} for one in "12"]
        messages: list[BaseMessage] = [HumanMessage("Which?"), AIMessage("", tool_calls=calls)]
        messages += [ToolMessage(format_context(documents("ab")), tool_call_id=one) for one in "12"]
        application.model.invoke(messages, configured("", thread_id="t"))
        assert application.sent == ["ab"]
        assert application.model.prompt_statistics.planned == 2

    def test_a_loop_that_shows_its_context_again_keeps_the_beginning_that_was_sent(self) -> None:
        application = Application()
        application.ask(documents("ab"), "One?")
        first = application.ask(documents("ba"), "Two?")
        asked = f"Two?\n\nNo JSON. Again, read:\n{format_context(documents('ba'))}"
        again = application.ask(documents("ba"), asked)
        assert letters_in(first) == "ab"
        assert again.startswith(first)

    def test_two_models_share_what_was_rendered_for_each(self) -> None:
        first, second = Application(), Application("Check this: {context} {question}")
        for letters in ("abc", "cab"):
            first.ask(documents(letters), "Which?")
            second.ask(documents(letters), "Which?")
        assert first.sent == second.sent == ["abc", "abc"]

    def test_a_history_may_be_trimmed_from_the_front(self) -> None:
        application = Application()
        messages: list[BaseMessage] = []
        with request_context(tenant="A"):
            for letters in ("abc", "bad", "cab", "abd"):
                context = format_context(documents(letters))
                messages = [*messages, HumanMessage(f"{context}\n\nWhich?")][-3:]
                application.model.invoke(messages)
                messages.append(AIMessage("So."))
        assert application.model.prompt_statistics.planned == 4

    def test_a_step_of_the_chain_may_ask_with_the_config_of_the_chain(self) -> None:
        application = Application()

        def answer(given: dict[str, Any]) -> Any:
            context = format_context(given["documents"])
            return application.model.invoke(f"{context}\n\nWhich?")

        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            RunnableLambda(answer).invoke({"documents": documents(letters)}, configured(tenant))
        assert application.sent == ["abc", "cab", "abc"]


class TestOtherAdapters:
    """Texts of adapters that plan without a registry pass a planning model as they are."""

    def test_a_context_of_mem0_is_sent_as_planned(self) -> None:
        application = Application()
        application.ask([Document("he says: ho"), Document("she says: hi")], "One?", "A")
        found = [{"id": name, "memory": f"{name} says: {word}"} for name, word in LIKED]
        planned = ReuseMemory(FakeMemory(found)).context("q?", filters={"user_id": "alice"})
        application.model.invoke(f"{planned}\n\nQuestion: Two?", configured("A"))
        assert application.inner.calls[-1].text == f"{planned}\n\nQuestion: Two?"

    def test_a_document_of_a_chain_of_agents_may_quote_a_context(self) -> None:
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
