"""Memories of a LangGraph store in prompts: each once, where they are wanted, ids kept."""

from copy import copy
from typing import Any, get_args

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langgraph.store.memory import InMemoryStore

from ctxreuse import ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.memories import Placement
from langchain_ctxreuse import ReuseStore

PORTO, CAT, CELLO = (
    {"data": "Alice lives in Porto, in the old town."},
    {"data": "Alice has a cat that is called Tiber."},
    {"data": "Alice plays the cello on Sundays."},
)
ALICE = ("memories", "alice")


def store(*values: dict[str, Any], **options: Any) -> ReuseStore:
    wrapped = ReuseStore(InMemoryStore(), **options)
    for number, value in enumerate(values):
        wrapped.put(ALICE, str(number), value)
    return wrapped


def said(messages: list[BaseMessage]) -> list[tuple[str, Any]]:
    return [(one.type, one.content) for one in messages]


@pytest.mark.parametrize("placement", get_args(Placement))
async def test_memories_stand_where_they_are_wanted_and_come_once(placement):
    wrapped = store(PORTO, placement=placement)
    asking = [SystemMessage("Be brief.", id="s"), HumanMessage("Where?", id="q")]
    first = wrapped.messages(ALICE, asking)
    text = PORTO["data"]
    assert (
        said(first)
        == {
            "system": [("system", f"Be brief.\n\n{text}"), ("human", "Where?")],
            "before_question": [("system", "Be brief."), ("human", f"{text}\n\nWhere?")],
            "after_history": [("system", "Be brief."), ("human", text), ("human", "Where?")],
        }[placement]
    )
    assert (first[0].id, first[-1].id) == ("s", "q")
    assert said(asking) == [("system", "Be brief."), ("human", "Where?")]
    wrapped.put(ALICE, "1", CAT)
    later = [*first, AIMessage("In Porto.", id="a"), HumanMessage("And?", id="q2")]
    second = wrapped.messages(ALICE, later)
    assert second[: len(first) + 1] == later[:-1]
    new = [("human", f"{CAT['data']}\n\nAnd?")]
    if placement == "after_history":
        new = [("human", CAT["data"]), ("human", "And?")]
    assert said(second[len(first) + 1 :]) == new
    assert await wrapped.amessages(ALICE, later) == second
    assert wrapped.faults == 0


def test_what_was_changed_or_deleted_is_said_not_to_hold():
    wrapped = store(PORTO, CAT, growth_limit=None)
    first = wrapped.messages(ALICE, [("user", "Where?")])
    wrapped.delete(ALICE, "0")
    second = wrapped.messages(ALICE, [*first, ("assistant", "So."), ("user", "And?")])
    assert second[-1].content == f'"{PORTO["data"]}" no longer holds; do not use it.\n\nAnd?'


def test_in_shadow_mode_no_memory_is_taken_out_of_the_history():
    wrapped = store(*[{"data": f"Alice has seen {n}. " * 40} for n in range(8)], growth_limit=1)
    wrapped = ReuseStore(wrapped.store, growth_limit=1, planner=ReusePlanner(mode="shadow"))
    history: list[BaseMessage] = []
    for turn in range(4):
        asking = [*history, HumanMessage(f"Which, {turn}?")]
        history = wrapped.messages(ALICE, asking, limit=2, offset=2 * turn)
        assert history[: len(asking) - 1] == asking[:-1]
        history.append(AIMessage("So."))
    assert wrapped.faults == 0


def test_it_is_the_wrapped_store_for_all_else_and_keeps_parts_of_a_question():
    wrapped = store(PORTO)
    assert isinstance(copy(wrapped).store, InMemoryStore)
    item = wrapped.get(ALICE, "0")
    assert item is not None
    assert item.value == PORTO
    assert [one.value for one in wrapped.search(("memories",))] == [PORTO]
    assert wrapped.list_namespaces() == [ALICE]

    parts: Any = [{"type": "text", "text": "What is it?"}, {"type": "image", "url": "http://x"}]
    [sent] = store(CELLO).messages(ALICE, [HumanMessage(parts)])
    assert sent.content == [{"type": "text", "text": CELLO["data"]}, *parts]
    for wrong in (3, store()):
        with pytest.raises(InvalidRequestError, match="store"):
            ReuseStore(wrong)


def test_values_without_a_known_text_are_shown_whole():
    value = {"town": "Porto", "since": 1999, "name": "a long enough name"}
    assert store(value).messages(ALICE, [("user", "q?")])[-1].content == (
        '{"name": "a long enough name", "since": 1999, "town": "Porto"}\n\nq?'
    )


@pytest.mark.parametrize("messages", [[], [("assistant", "So.")], "Where?"])
def test_a_question_is_needed(messages):
    with pytest.raises(InvalidRequestError):
        store().messages(ALICE, messages)
