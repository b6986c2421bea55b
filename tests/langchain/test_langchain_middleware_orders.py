"""Agents with LangChain's own middleware before and behind ours: no document is lost on the way.

Middleware that takes messages away from a model call stands before ours.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from adapter_conformance import FaultyPlanner
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    LLMToolSelectorMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    ToolRetryMiddleware,
)
from langchain_agent_helpers import (
    A,
    B,
    C,
    D,
    E,
    Scripted,
    agent_with,
    ask,
    calls,
    done,
    is_append_only,
    result,
    results,
    search_tool,
    see,
    sent,
)
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langchain_document_helpers import LetterRetriever, text_of
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import PrivateAttr

from ctxreuse.context.blocks import text_digest
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware

pytestmark = pytest.mark.usefixtures("paper_words")
SEARCHES = 20
"""Each finds ten new documents, and six of the two searches before."""


DOCUMENTS = [
    Document(f"Text {n} of two hundred. " + f"It is about the matter {n}. " * 4, id=f"d{n}")
    for n in range(10 * SEARCHES)
]

POINTER = re.compile(r"Please refer to (\[Doc_[\w-]+\]) in the previous conversation\.")


def found(number: int) -> list[Document]:
    before = [*DOCUMENTS[max(0, 10 * number - 18) : 10 * number : 3]]
    return [*DOCUMENTS[10 * number : 10 * number + 5], *before, *DOCUMENTS[10 * number + 5 :][:5]]


@tool(response_format="content_and_artifact")
def search(query: str) -> tuple[str, list[Document]]:
    """Find documents."""
    documents = found(int(query))
    return "\n\n".join(one.page_content for one in documents), documents


class Strict(Scripted):
    """Fails a test where a prompt points to what does not stand before it in the prompt."""

    pointers: list[int] = []  # noqa: RUF012  # pydantic copies it
    fails_first: bool = False
    _failed: int = PrivateAttr(default=-1)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        if self.fails_first and self._failed != self.i:
            self._failed = self.i
            raise ConnectionError("try again")
        self.pointers.append(0)
        before = ""
        for message in messages:
            text = str(message.text)
            for label in POINTER.findall(text):
                assert f"{label} Text " in before, f"{label} points to nothing"
                self.pointers[-1] += 1
            before += text
        return super()._generate(messages, *args, **kwargs)

    def with_structured_output(self, schema: Any = None, **kwargs: Any) -> Runnable[Any, Any]:
        return RunnableLambda(lambda _: {"tools": ["search"]})


def strict(searches: int = SEARCHES, **arguments: Any) -> Strict:
    script = [*(calls(str(n)) for n in range(searches)), done()]
    arguments["custom_get_token_ids"] = lambda text: [0] * (len(text) // 4)
    return Strict(responses=script, seen=[], pointers=[], **arguments)


def clearing(method: Any = "approximate") -> AgentMiddleware[Any, Any, Any]:
    edits = [ClearToolUsesEdit(trigger=2_000, keep=2)]
    return ContextEditingMiddleware(edits=edits, token_count_method=method)


OTHERS: dict[str, Callable[[], AgentMiddleware[Any, Any, Any]]] = {
    "summarization": lambda: SummarizationMiddleware(
        FakeListChatModel(responses=["A summary."]), trigger=("messages", 9), keep=("messages", 4)
    ),
    "context editing": clearing,
    "context editing, counted by the model": lambda: clearing("model"),
    "tool call limit": lambda: ToolCallLimitMiddleware(run_limit=100),
    "model call limit": lambda: ModelCallLimitMiddleware(run_limit=100),
    "human in the loop": lambda: HumanInTheLoopMiddleware(interrupt_on={"other": True}),
    "to-do list": TodoListMiddleware,
    "PII": lambda: PIIMiddleware(
        "matter", detector=r"matter \d*7\b", apply_to_tool_results=True, apply_to_input=True
    ),
    "tool selector": LLMToolSelectorMiddleware,
    "tool retry": ToolRetryMiddleware,
    "model retry": lambda: ModelRetryMiddleware(initial_delay=0, jitter=False),
}

SHORTENED = ("summarization", "context editing", "context editing, counted by the model")


def run(model: Any, middleware: list[Any], **arguments: Any) -> list[BaseMessage]:
    agent = create_agent(model, [search], middleware=middleware, **arguments)
    return list(agent.invoke({"messages": [HumanMessage("?")]}, CONFIG)["messages"])


async def arun(model: Any, middleware: list[Any], **arguments: Any) -> list[BaseMessage]:
    agent = create_agent(model, [search], middleware=middleware, **arguments)
    return list((await agent.ainvoke({"messages": [HumanMessage("?")]}, CONFIG))["messages"])


CONFIG: RunnableConfig = {"recursion_limit": 1_000, "configurable": {"thread_id": "t"}}


@pytest.mark.filterwarnings("ignore:Counting tokens in tool schemas")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("is_first", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_nothing_is_pointed_to_that_is_not_there_in_any_order(other, is_first):
    seen = []
    is_first = is_first and "context editing" not in other
    for mode in (run, arun):
        both = [ReuseMiddleware(), OTHERS[other]()]
        model = strict(fails_first=other == "model retry")
        ran = mode(model, both if is_first else both[::-1])
        messages = ran if isinstance(ran, list) else await ran
        assert messages[-1].text == "Done."
        if other != "PII":  # what is redacted is not what was retrieved
            assert sum(model.pointers), "some are repeated"
        assert is_append_only(model.seen) or other in SHORTENED
        seen.append(model.seen)
    assert len(seen[0]) == len(seen[1]) == SEARCHES + 1


@pytest.mark.parametrize("is_first", [True, False])
def test_a_fallback_model_gets_every_document_in_whole_or_before(is_first):
    """`Strict` fails where a pointer points to nothing."""

    class Broken(Strict):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            raise ConnectionError("try another one")

    fallback = strict()
    both = [ReuseMiddleware(), ModelFallbackMiddleware(fallback)]
    run(Broken(responses=[], seen=[], pointers=[]), both if is_first else both[::-1])
    assert is_append_only(fallback.seen)
    assert sum(fallback.pointers)


def test_any_process_sends_the_same_bytes_from_the_checkpoint_of_another():
    serializer, model, another = JsonPlusSerializer(), strict(), strict(0)
    messages = run(model, [ReuseMiddleware()])
    restored = serializer.loads_typed(serializer.dumps_typed(messages))
    agent = create_agent(another, [search], middleware=[ReuseMiddleware()])
    agent.invoke({"messages": [*restored, HumanMessage("And?")]}, CONFIG)
    assert is_append_only([*model.seen, *another.seen])
    assert another.pointers == [sum(len(found(n)) for n in range(SEARCHES)) - len(DOCUMENTS)]


def test_a_wrapped_model_points_too_and_plans_nothing_again(planner):
    plain = strict()
    inner = Strict(responses=plain.responses, seen=[], pointers=[])
    run(plain, [ReuseMiddleware()])
    wrapped = ReuseChatModel(inner=inner, planner=planner, window_s=0)
    run(wrapped, [ReuseMiddleware(planner=planner)])
    assert inner.seen == plain.seen
    statistics = wrapped.prompt_statistics
    assert statistics.planned + statistics.in_history == SEARCHES, "each by the middleware"


def test_what_redaction_changed_is_sent_as_it_is():
    redacting = PIIMiddleware("says", detector="says: a{12}", apply_to_tool_results=True)
    both = [ReuseMiddleware(), redacting]
    agent, model = agent_with(both, [calls("ab"), calls("ab"), done()], search_tool())
    ask(agent, "?")
    first, second = (one["content"] for one in model.seen[-1] if one["role"] == "tool")
    assert first == second, "neither is what was planned"
    assert first.startswith("a [REDACTED_SAYS]")
    assert first.endswith(f"\n\n{B}")


@given(
    st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6),
    st.lists(st.sampled_from(["kept", "removed", "cleared"]), min_size=6, max_size=6),
)
def test_whatever_is_removed_or_cleared_everything_else_is_sent(searches, fates):
    middleware: Any = ReuseMiddleware()
    state: list[BaseMessage] = []
    for number, letters in enumerate(searches):
        state += [AIMessage("", id=f"a{number}"), result(f"m{number}", letters)]
        update = middleware.before_model({"messages": state}, None)
        state[-1:] = update["messages"]
        assert sent(state)[: len(state) - 1] == sent(state[:-1]), "nothing that was sent changes"
    kept: list[BaseMessage] = []
    for message, fate in zip(state[1::2], fates, strict=False):
        if fate != "removed":
            text = {"content": "[cleared]"} if fate == "cleared" else {}
            kept.append(message.model_copy(update=text))
    before = ""
    for message, shown in zip(kept, sent(kept), strict=True):
        for label in POINTER.findall(str(shown.text)):
            assert f"{label} " in before
        before += str(shown.text)
        assert all(text in before for text in TEXTS if text in str(message.text))
    assert max(map(before.count, TEXTS)) <= 1


TEXTS = [text_of(letter) for letter in "abcdef"]


SOUND = [[[0, 3]], [], [], []]


@pytest.mark.parametrize(
    "edit",
    [
        5,
        None,
        [],
        "text",
        [[[0, 99]], [], [], []],
        [[[3, 0]], [], [], []],
        [[[0, "3"]], [], [], []],
        [[3], [], [], []],
        [[{"left": 3, "separator": ""}], [], [], []],
        [[{"left": [[[[0, 3]], 5]], "separator": ""}], [], [], []],
        [[{"left": [[[{"left": [], "separator": ""}], "x"]], "separator": ""}], [], [], []],
        [[[0, 3]], [-1], [], []],
        [[[0, 3]], [], ["0"], []],
        [[[0, 3]], [], [], [5]],
    ],
)
@pytest.mark.parametrize("more", [{}, {"part": 1}, {"digest": "00"}, {"edit": SOUND, "part": "0"}])
def test_metadata_of_any_kind_keeps_no_agent_from_answering(edit, more):
    """Whoever may send messages to an agent may send this, too."""
    carried = {"edit": edit, "part": None, "digest": text_digest("Which?").hex(), **more}
    question = HumanMessage("Which?", id="m", additional_kwargs={"ctxreuse": carried})
    middleware = ReuseMiddleware()
    model = Scripted(responses=[calls("ab"), calls("ab"), done()], seen=[])
    agent = create_agent(model, [search_tool()], middleware=[middleware])
    agent.invoke({"messages": [question]})
    assert middleware.faults == 0
    assert model.seen[-1][0]["content"] == "Which?"
    assert [len(POINTER.findall(str(one["content"]))) for one in model.seen[-1][1:]] == [0, 0, 0, 2]


def test_a_message_whose_content_has_another_form_by_now_is_sent_whole():
    """Some middleware makes lists of parts of texts, such as to mark what is cached."""
    middleware: Any = ReuseMiddleware()
    state = [result("m1", "a"), result("m2", "ab")]
    first, second = middleware.before_model({"messages": state}, None)["messages"]
    whole = second.content
    assert sent([first, second])[1].content == f"{see('a')}\n\n[Doc_id-b] {B}"
    for content in (
        [{"type": "text", "text": whole}],
        f"As I said: {whole}",
        whole[1:],
        whole[:9],
        "",
    ):
        changed = second.model_copy(update={"content": content})
        assert sent([first, changed])[1] == changed


def test_a_planning_fault_loses_nothing_and_is_counted(caplog):
    middleware = ReuseMiddleware(planner=FaultyPlanner(), retriever=LetterRetriever())
    agent, _ = agent_with(middleware, [calls("ab", "c"), done()], search_tool())
    with caplog.at_level(logging.WARNING, "ctxreuse"):
        messages = ask(agent, "de")
    assert messages[0].content == f"{D}\n\n{E}\n\nde"
    assert results(messages) == [f"{A}\n\n{B}", C]
    assert middleware.faults == 3
    assert len(caplog.records) == 1
    assert "says" not in caplog.text


async def test_many_threads_of_one_agent_do_not_mix():
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done()])

    async def turns(thread: str) -> list[str]:
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        for question in ("ab", "bc"):
            state = await agent.ainvoke({"messages": [HumanMessage(question)]}, config)
        return [str(message.content) for message in sent(state["messages"])[::2]]

    for first, second in await asyncio.gather(*(turns(f"t{n}") for n in range(8))):
        assert first == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\nab"
        assert second == f"{see('b')}\n\n[Doc_id-c] {C}\n\nbc"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"planner": 3}, r"planner must be a ctxreuse\.ReusePlanner, not 3"),
        ({"retriever": "docs"}, "retriever must be a LangChain retriever, not 'docs'"),
        ({"tools": "search"}, "tools must be a list of tools or of their names, not 'search'"),
        ({"tools": [3]}, "tools must be a list of tools or of their names"),
        ({"document_separator": ""}, "document_separator must be a string that is not empty"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReuseMiddleware(**arguments)
