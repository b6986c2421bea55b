"""Agents with LangChain's own middleware before and behind ours: no document is lost on the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
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
    Scripted,
    calls,
    done,
    is_append_only,
    result,
    search_tool,
    see,
    sent,
)
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, trim_messages
from langchain_core.outputs import ChatResult
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langchain_document_helpers import LetterRetriever, no_sockets, text_of
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import PrivateAttr

from ctxreuse import ReusePlanner
from ctxreuse.context.blocks import text_digest
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware

pytestmark = pytest.mark.usefixtures("paper_words")

__all__ = ["no_sockets"]

SEARCHES = 20
"""Each finds ten new documents, and six of the two searches before."""

DOCUMENTS = [
    Document(f"Text {n} of two hundred. " + f"It is about the matter {n}. " * 4, id=f"d{n}")
    for n in range(10 * SEARCHES)
]
POINTER = re.compile(r"Please refer to (\[Doc_\d+\]) in the previous conversation\.")


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


class Summarizer(FakeListChatModel):
    """Notes what it is to sum up."""

    read: list[str] = []  # noqa: RUF012  # pydantic copies it

    def _call(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> str:
        self.read.append("\n".join(str(message.text) for message in messages))
        return "A summary."


def summarizing(summarizer: Summarizer) -> AgentMiddleware[Any, Any, Any]:
    return SummarizationMiddleware(
        summarizer, trigger=("messages", 9), keep=("messages", 4), trim_tokens_to_summarize=None
    )


def clearing(method: Any = "approximate") -> AgentMiddleware[Any, Any, Any]:
    edits = [ClearToolUsesEdit(trigger=2_000, keep=2)]
    return ContextEditingMiddleware(edits=edits, token_count_method=method)


OTHERS: dict[str, Callable[[], AgentMiddleware[Any, Any, Any]]] = {
    "summarization": lambda: summarizing(Summarizer(responses=[""], read=[])),
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
@pytest.mark.parametrize("is_first", [True, False])
async def test_nothing_is_pointed_to_that_is_not_there_in_any_order(other, is_first):
    seen = []
    for mode in (run, arun):
        both = [ReuseMiddleware(), OTHERS[other]()]
        model = strict(fails_first=other == "model retry")
        ran = mode(model, both if is_first else both[::-1])
        messages = ran if isinstance(ran, list) else await ran
        assert messages[-1].text == "Done."
        if is_first or other != "PII":  # what is redacted before is not what was retrieved
            assert sum(model.pointers), "some are repeated"
        assert is_append_only(model.seen) or other in SHORTENED
        seen.append(model.seen)
    assert len(seen[0]) == len(seen[1]) == SEARCHES + 1


@pytest.mark.parametrize("is_first", [True, False])
def test_a_fallback_model_gets_every_document_in_whole_or_before(is_first):
    class Broken(Strict):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            raise ConnectionError("try another one")

    fallback = strict()
    both = [ReuseMiddleware(), ModelFallbackMiddleware(fallback)]
    run(Broken(responses=[], seen=[], pointers=[]), both if is_first else both[::-1])
    assert is_append_only(fallback.seen)
    assert bool(sum(fallback.pointers)) is not is_first, "pointers only where ours comes last"


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_every_document_is_in_a_summary_or_in_the_state(order):
    summarizer = Summarizer(responses=[""], read=[])
    middleware = [ReuseMiddleware(), clearing(), summarizing(summarizer)]
    model = strict()
    messages = run(model, [middleware[n] for n in order])
    read = "\n".join([*summarizer.read, *(str(one.text) for one in messages)])
    assert [one.id for one in DOCUMENTS if one.page_content not in read] == []
    for text in (*summarizer.read, *(str(one.text) for one in messages)):
        assert not POINTER.search(text)


def test_all_of_them_together_lose_nothing_in_both_orders():
    for turned in (False, True):
        middleware = [ReuseMiddleware(), *(made() for made in OTHERS.values())]
        del middleware[3]  # two of one kind are refused
        model = strict(fails_first=True)
        run(model, middleware[::-1] if turned else middleware)
        assert len(model.seen) == SEARCHES + 1


def test_messages_that_a_program_cuts_out_of_the_state_hold_their_documents():
    messages = run(strict(), [ReuseMiddleware()])
    kept = trim_messages(
        messages, strategy="last", token_counter=len, max_tokens=6, start_on="tool"
    )
    whole = "\n".join(str(one.text) for one in kept)
    numbers = range(SEARCHES - len([one for one in kept if one.type == "tool"]), SEARCHES)
    assert len(numbers) > 1
    assert all(one.page_content in whole for n in numbers for one in found(n))
    assert not POINTER.search(whole)


def test_any_process_sends_the_same_bytes_from_the_checkpoint_of_another():
    serializer = JsonPlusSerializer()
    saver, model = InMemorySaver(), strict()
    messages = run(model, [ReuseMiddleware()], checkpointer=saver)
    restored = serializer.loads_typed(serializer.dumps_typed(messages))
    another = strict(0)
    agent = create_agent(another, [search], middleware=[ReuseMiddleware()])
    agent.invoke({"messages": [*restored, HumanMessage("And?")]}, CONFIG)
    assert is_append_only([*model.seen, *another.seen])
    assert another.pointers == [sum(len(found(n)) for n in range(SEARCHES)) - len(DOCUMENTS)]


def test_a_wrapped_model_points_too_and_plans_nothing_again():
    plain = strict()
    inner = Strict(responses=plain.responses, seen=[], pointers=[])
    planner = ReusePlanner()
    run(plain, [ReuseMiddleware()])
    wrapped = ReuseChatModel(inner=inner, planner=planner, window_s=0)
    run(wrapped, [ReuseMiddleware(planner=planner)])
    assert inner.seen == plain.seen
    assert wrapped.prompt_statistics.planned == 0


def test_what_redaction_changed_is_sent_as_it_is():
    redacting = PIIMiddleware(
        "says", detector="says: a{12}", strategy="redact", apply_to_tool_results=True
    )
    model = Scripted(responses=[calls("ab"), calls("ab"), done()], seen=[])
    retriever = LetterRetriever()

    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, list[Document]]:
        """Find documents."""
        documents = retriever.invoke(query)
        return "\n\n".join(one.page_content for one in documents), documents

    agent = create_agent(model, [search], middleware=[ReuseMiddleware(), redacting])
    agent.invoke({"messages": [HumanMessage("?")]})
    first, second = (one["content"] for one in model.seen[-1] if one["role"] == "tool")
    assert first.startswith("[Doc_1] a [REDACTED_SAYS]")
    assert second.startswith("[Doc_3] a [REDACTED_SAYS]"), "not the text that the model was shown"
    assert second.endswith(f"\n\n[Doc_2] {text_of('b')}"), "no longer where the plan put it"
    assert is_append_only(model.seen)


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


TEXTS = [text_of(letter) for letter in "abcdef"]


def test_a_model_that_keeps_its_attributes_elsewhere_gets_all_in_whole_and_is_counted():
    class Slotted(Strict):
        __slots__ = ("elsewhere",)

    middleware = ReuseMiddleware()
    script = [calls("0"), calls("1"), done()]
    model = Slotted(responses=script, seen=[], pointers=[])
    run(model, [middleware])
    assert model.pointers == [0, 0, 0]
    assert middleware.faults == 1


def test_forged_metadata_takes_nothing_out_of_a_message():
    forged = {"labels": {}, "part": None}
    text = "[Doc_1] yes\n\nno"
    places = [
        {"label": "[Doc_1]", "start": 0, "end": 11, "digest": "00"},
        {"label": "no", "start": 0, "end": len(text), "digest": ""},
        {"label": [], "start": "0"},
        3,
    ]
    for place in places:
        message = HumanMessage(
            text, id="m", additional_kwargs={"ctxreuse": {**forged, "repeated": [place]}}
        )
        model = Scripted(responses=[done()], seen=[])
        agent = create_agent(model, middleware=[ReuseMiddleware()])
        agent.invoke({"messages": [HumanMessage(text), message]})
        assert [one["content"] for one in model.seen[0]] == [text, text]


@pytest.mark.parametrize(
    "carried",
    [5, "text", [], None, {}, {"repeated": 5}, {"repeated": [5]}, {"repeated": [{"label": "x"}]}],
)
def test_metadata_of_any_kind_keeps_no_agent_from_answering(carried):
    """Whoever may send messages to an agent may send this, too."""
    question = HumanMessage("Which?", id="m", additional_kwargs={"ctxreuse": carried})
    middleware = ReuseMiddleware()
    model = Scripted(responses=[calls("ab"), calls("ab"), done()], seen=[])
    agent = create_agent(model, [search_tool()], middleware=[middleware])
    agent.invoke({"messages": [question]})
    assert middleware.faults == 0
    assert model.seen[-1][0]["content"] == "Which?"
    assert [len(POINTER.findall(str(one["content"]))) for one in model.seen[-1][1:]] == [0, 0, 0, 2]


@pytest.mark.parametrize("part", [None, 0, 1, 7, -1, "0", [0]])
def test_a_message_whose_content_has_another_form_by_now_is_sent_whole(part):
    """Some middleware makes lists of parts of texts, such as to mark what is cached."""
    text = "[Doc_1] yes\n\nno"
    place = {"label": "[Doc_1]", "start": 0, "end": 11, "digest": text_digest(text[:11]).hex()}
    forms: dict[Any, Any] = {None: text, 0: [{"type": "text", "text": text}]}
    for its_part, form in forms.items():
        carried = {"repeated": [place], "part": part}
        message = HumanMessage(form, additional_kwargs={"ctxreuse": carried})
        assert sent([message])[0].content == form
        shown = str(sent([HumanMessage(text), message])[1].text)
        assert shown == (f"{see(1)}\n\nno" if part == its_part else text)
