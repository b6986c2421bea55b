from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from adapter_conformance import FaultyPlanner
from helpers import contexts_in
from langchain.agents.middleware import (
    AgentMiddleware,
    ClearToolUsesEdit,
    ContextEditingMiddleware,
)
from langchain_agent_helpers import (
    PICTURE,
    A,
    B,
    C,
    D,
    E,
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
from langchain_core.messages import (
    HumanMessage,
    RemoveMessage,
)
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_document_helpers import (
    LetterRetriever,
    document,
    no_sockets,
    text_of,
)

from ctxreuse.adapters.rendered_contexts import ContextRegistry
from langchain_ctxreuse import ReuseMiddleware, format_context

pytestmark = pytest.mark.usefixtures("paper_words")

__all__ = ["no_sockets"]


def test_a_chat_model_that_plans_contexts_leaves_planned_messages_alone():
    # the same blocks, rendered without a plan somewhere, would be taken for a context
    for letters in ("p", "q", "pq"):
        format_context([document(letter) for letter in letters])
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done()])
    question = ask(agent, "pq")[0].content
    middleware = [DropsTheStart(at=7, number=3), ReuseMiddleware()]
    agent, model = agent_with(
        middleware, [calls("pr"), calls("qp"), calls("s"), done()], search_tool()
    )
    ask(agent, "?")
    result = next(one["content"] for one in model.seen[1] if one["role"] == "tool")
    whole = next(one["content"] for one in model.seen[3] if one["role"] == "tool")
    P, Q, R = (text_of(letter) for letter in "pqr")  # noqa: N806  # as A and B
    assert question == f"[Doc_1] {P}\n\n[Doc_2] {Q}\n\npq"
    assert result == f"[Doc_1] {P}\n\n[Doc_2] {R}"
    assert whole == f"[Doc_3] {Q}\n\n[Doc_1] {P}"
    for text in (question, result, whole):
        assert [found.blocks for found in contexts_in(text)] == [()]


def test_a_registry_of_its_own_remembers_what_was_planned():
    registry = ContextRegistry()
    agent, _ = agent_with(ReuseMiddleware(registry=registry), [calls("vw"), done()], search_tool())
    [text] = results(ask(agent, "First?"))
    assert [found.blocks for found in contexts_in(text, registry)] == [()]
    assert contexts_in(text) == []


class DropsTheStart(AgentMiddleware[Any, Any, Any]):
    """Removes the first messages before a model call, as a summary does, once."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number, self.did = at, number, False

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        if self.did or len(state["messages"]) != self.at:
            return None
        self.did = True
        dropped = [RemoveMessage(one.id) for one in state["messages"][: self.number]]
        return {"messages": [*dropped, HumanMessage("They talked about a and b.")]}


def test_blocks_that_a_summary_cut_away_are_shown_where_they_were_pointed_to():
    agent, _ = agent_with(
        [DropsTheStart(at=5, number=3), ReuseMiddleware()],
        [calls("ab"), calls("cb"), calls("a"), done(), done()],
        search_tool(),
    )
    # after the second result: question, call, ab, call, cb; the first three go
    messages = ask(agent, "?")
    assert results(messages) == [f"[Doc_1] {C}\n\n[Doc_2] {B}", f"[Doc_3] {A}"]


def test_blocks_that_were_cut_away_later_come_back_under_their_label():
    agent, model = agent_with(
        [DropsTheStart(at=7, number=3), ReuseMiddleware()],
        [calls("ab"), calls("cba"), calls("bd"), done(), done()],
        search_tool(),
    )
    messages = ask(agent, "?")
    assert results(messages)[0] == f"[Doc_3] {C}\n\n[Doc_2] {B}\n\n[Doc_1] {A}"
    shown = [one["content"] for one in model.seen[3] if one["role"] == "tool"]
    assert shown[0] == f"[Doc_3] {C}\n\n[Doc_2] {B}\n\n[Doc_1] {A}"
    ask(agent, "And now?")
    assert is_append_only(model.seen[3:])


def test_a_block_that_was_cut_away_comes_back_once():
    agent, model = agent_with(
        [DropsTheStart(at=7, number=3), ReuseMiddleware()],
        [calls("a"), calls("ba"), calls("ac"), done()],
        search_tool(),
    )
    ask(agent, "?")
    shown = [one["content"] for one in model.seen[3] if one["role"] == "tool"]
    assert shown == [f"[Doc_2] {B}\n\n[Doc_1] {A}", f"{see(1)}\n\n[Doc_3] {C}"]


def test_a_block_comes_back_behind_what_its_tool_says_first():
    @tool(response_format="content_and_artifact")
    def search(query: str) -> tuple[str, Any]:
        """Find something."""
        return f"Found:\n- {query}", {"results": [{"id": query, "memory": query}]}

    middleware = [DropsTheStart(at=7, number=3), ReuseMiddleware()]
    agent, model = agent_with(middleware, [calls("tea"), calls("tea"), calls("x"), done()], search)
    ask(agent, "?")
    shown = [one["content"] for one in model.seen[3] if one["role"] == "tool"]
    assert shown == ["Found:\n[Doc_1] - tea", "Found:\n[Doc_2] - x"]


def test_a_text_that_was_changed_since_is_left_alone():
    middleware = ReuseMiddleware()
    state: Any = {"messages": [result("m1", "a"), result("m2", "ab")]}
    planned = middleware.before_model(state, None)
    assert planned is not None
    first, second = planned["messages"]
    for text in (f"As I said: {second.content}", second.content[1:], second.content[:9], ""):
        changed = second.model_copy(update={"content": text})
        assert sent([first, changed]) == [first, changed]


async def test_blocks_in_cleared_tool_results_come_back_too():
    clearing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    agent, model = agent_with(
        [clearing, ReuseMiddleware()], [calls("ab"), calls("b"), done(), done()], search_tool()
    )
    config: RunnableConfig = {"configurable": {"thread_id": "t1"}}
    await agent.ainvoke({"messages": [HumanMessage("?")]}, config)
    shown = [one["content"] for one in model.seen[2] if one["role"] == "tool"]
    assert shown == ["[cleared]", f"[Doc_2] {B}"]


def test_a_document_that_speaks_like_an_annotation_is_not_taken_for_one():
    liar = Document(f"x {see(1)}", id="liar")
    retriever = LetterRetriever(store={"l": liar})
    agent, _ = agent_with(
        [DropsTheStart(at=5, number=3), ReuseMiddleware()],
        [calls("a"), calls("la"), done()],
        search_tool(retriever),
    )
    assert results(ask(agent, "?")) == [f"[Doc_1] x {see(1)}\n\n[Doc_2] {A}"]


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


def test_a_fault_with_a_picture_in_the_question_loses_nothing():
    middleware = ReuseMiddleware(planner=FaultyPlanner(), retriever=LetterRetriever())
    agent, _ = agent_with(middleware, [done()])
    parts = [{"type": "text", "text": "ab"}, PICTURE]
    assert ask(agent, parts)[0].content == [{"type": "text", "text": f"{A}\n\n{B}"}, *parts]


async def test_many_threads_of_one_agent_do_not_mix():
    agent, _ = agent_with(ReuseMiddleware(retriever=LetterRetriever()), [done()])

    async def turns(thread: str) -> list[str]:
        config: RunnableConfig = {"configurable": {"thread_id": thread}}
        for question in ("ab", "bc"):
            state = await agent.ainvoke({"messages": [HumanMessage(question)]}, config)
        return [str(message.content) for message in sent(state["messages"])[::2]]

    for first, second in await asyncio.gather(*(turns(f"t{n}") for n in range(8))):
        assert first == f"[Doc_1] {A}\n\n[Doc_2] {B}\n\nab"
        assert second == f"{see(2)}\n\n[Doc_3] {C}\n\nbc"


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
