import logging
from typing import Any

import pytest
from adapter_conformance import FaultyPlanner
from block_labels import label, labelled, located, ranked
from mem0_stores import ANSWER, TEXTS, AsyncFakeMemory, FakeMemory, lettered, memory, plain

from ctxreuse import ReusePlanner, Templates, request_context
from ctxreuse.errors import InvalidRequestError
from mem0_ctxreuse import AsyncReuseMemory, MemoryContext, ReuseMemory


def texts(letters: str) -> list[str]:
    return [TEXTS[letter] for letter in letters]


def shown(letters: str) -> str:
    return labelled(*texts(letters))


def finding(*found: dict[str, Any], planner: ReusePlanner | None = None) -> ReuseMemory:
    """Return a wrapper whose prompts show labels and rankings, and may grow without end."""
    planner = planner or ReusePlanner()
    options: dict[str, Any] = {"labels": True, "annotate": True, "growth_limit": None}
    return ReuseMemory(FakeMemory(found), planner=planner, **options)


def test_memories_stand_without_labels_and_ranking_unless_these_are_asked_for():
    wrapped = ReuseMemory(FakeMemory(lettered("abc")))
    assert wrapped.context("q?").text == plain("abc")
    wrapped.memory.found = lettered("dba")
    second = wrapped.context("q?")
    assert (second.text, second.annotation, str(second)) == (plain("abd"), None, plain("abd"))
    assert second.plan is not None
    assert second.plan.labels == {}
    assert second.messages() == [{"role": "user", "content": f"{plain('abd')}\n\nq?"}]


def test_what_the_conversation_shows_is_found_without_labels_by_another_process_too():
    wrapped = ReuseMemory(FakeMemory(lettered("ab")))
    first = wrapped.messages("One?", history=[])
    wrapped.memory.found = lettered("cb")
    second = wrapped.messages("Two?", history=[*first, ANSWER])
    assert second == [*first, ANSWER, {"role": "user", "content": f"{plain('c')}\n\nTwo?"}]
    wrapped.memory.found = lettered("bac")
    third = wrapped.messages("Three?", history=[*second, ANSWER])
    assert third == [*second, ANSWER, {"role": "user", "content": "Three?"}]

    options: dict[str, Any] = {"filters": {"user_id": "alice"}}
    first = ReuseMemory(FakeMemory(lettered("ab"))).messages("One?", **options)
    other = ReuseMemory(FakeMemory(lettered("cb")))
    second = other.messages("Two?", history=[*first, ANSWER], **options)
    assert second[-1]["content"] == f"{plain('c')}\n\nTwo?"


@pytest.mark.parametrize("labels", [False, True])
def test_a_short_memory_stands_again_for_a_paragraph_may_be_like_it_by_chance(labels):
    wrapped = ReuseMemory(FakeMemory([memory("1", "likes tea")]), labels=labels)
    history = [{"role": "user", "content": "likes tea\n\nWho?"}, ANSWER]
    said = labelled("likes tea") if labels else "likes tea"
    sent = wrapped.messages("And?", history=history)
    assert sent[-1]["content"] == f"{said}\n\nAnd?"


@pytest.mark.parametrize("labels", [False, True])
def test_where_memories_of_earlier_turns_make_a_prompt_too_long_this_turn_s_stand_alone(labels):
    def contents(**options: Any) -> list[str]:
        wrapped = ReuseMemory(FakeMemory(), labels=labels, **options)
        history: list[dict[str, Any]] = []
        for letters in ("ab", "cd", "ef"):
            wrapped.memory.found = lettered(letters)
            history = [*wrapped.messages(letters, history=history), ANSWER]
        return [message["content"] for message in history if message["role"] == "user"]

    first, second, third = (
        f"{shown(letters) if labels else plain(letters)}\n\n{letters}"
        for letters in ("ab", "cd", "ef")
    )
    assert contents(growth_limit=None) == [first, second, third]
    assert contents(growth_limit=4) == [first, second, third]
    assert contents() == ["ab", "cd", third], "three times as long as with e and f alone"


def test_a_context_is_the_text_and_the_annotation():
    wrapped = finding(*lettered("abc"))
    first = wrapped.context("q?", filters={"user_id": "alice"})
    assert first.text == shown("abc")
    assert first.annotation is None
    assert str(first) == first.text

    wrapped.memory.found = lettered("dba")
    second = wrapped.context("q?", filters={"user_id": "alice"})
    assert second.text == shown("abd")
    assert second.annotation == ranked(*texts("dba"))
    assert str(second) == f"{second.text}\n\n{second.annotation}"
    assert second.plan is not None
    assert second.plan.labels == {label(TEXTS[letter]): f"id-{letter}" for letter in "abd"}
    assert [block.id for block in second.request.blocks] == ["id-d", "id-b", "id-a"]
    assert [call["filters"] for call in wrapped.memory.calls] == [{"user_id": "alice"}] * 2


def test_messages_are_system_history_and_this_turn():
    wrapped = finding(*lettered("abc"))
    history = [{"role": "user", "content": "Hello."}, {**ANSWER, "name": "bot"}]
    assert wrapped.messages("q?", system="Be brief.", history=history, top_k=3) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "An answer.", "name": "bot"},
        {"role": "user", "content": f"{shown('abc')}\n\nq?"},
    ]
    wrapped.memory.found = lettered("dba")
    assert wrapped.messages("q?") == [{"role": "user", "content": f"{shown('dba')}\n\nq?"}], (
        "what was sent behind another system text and a history is no prefix of this"
    )
    wrapped.memory.found = lettered("abd")
    assert wrapped.messages("And?")[-1]["content"] == (
        f"{shown('dba')}\n\n{ranked(*texts('abd'))}\n\nAnd?"
    )
    assert wrapped.memory.calls[0]["top_k"] == 3


async def test_awaited_contexts_and_messages_are_the_same():
    store = FakeMemory()
    wrapped = ReuseMemory(store, planner=ReusePlanner())
    awaited = AsyncReuseMemory(AsyncFakeMemory(), planner=ReusePlanner())
    for letters in ("abc", "dba", "", "cb"):
        store.found = awaited.memory.found = lettered(letters)
        options: list[dict[str, Any]] = [
            {},
            {"system": "Be brief.", "history": [], "conversation_id": "c"},
        ]
        for more in options:
            assert await awaited.context("q?", **more) == wrapped.context("q?", **more)
            assert await awaited.messages("q?", **more) == wrapped.messages("q?", **more)


def test_without_memories_or_texts_there_is_no_context():
    wrapped = finding()
    context = wrapped.context("q?")
    assert (str(context), context.annotation) == ("", None)
    assert wrapped.faults == 0
    wrapped = finding(memory("blank", " \n"), *lettered("ab"), memory("empty", ""))
    assert wrapped.messages("q?")[-1]["content"] == f"{shown('ab')}\n\nq?"
    wrapped.memory.found = [memory("empty", "")]
    assert wrapped.messages("q?")[-1]["content"] == "q?"


def test_duplicates_are_shown_once_in_the_place_of_the_best_and_stale_hashes_are_none():
    found = [memory("1", "likes tea"), memory("2", "has cats"), memory("3", "likes tea")]
    context = finding(*found).context("q?")
    assert context.text == labelled("likes tea", "has cats")
    assert context.plan is not None
    assert context.plan.labels == {label("likes tea"): "1", label("has cats"): "2"}
    without_hash = [{"id": one["id"], "memory": one["memory"]} for one in found]
    assert finding(*without_hash).context("q?").text == context.text
    stale = memory("1", "likes tea")["hash"]
    found = [memory("1", "likes tea"), {**memory("2", "likes coffee now"), "hash": stale}]
    assert finding(*found).context("q?").text == labelled("likes tea", "likes coffee now")


def test_a_memory_that_the_conversation_shows_is_referred_to_or_shown_again():
    wrapped = finding(*lettered("ab"))
    first = wrapped.messages("One?", history=[], conversation_id="c")
    wrapped.memory.found = lettered("cb")
    second = wrapped.messages("Two?", history=[*first, ANSWER], conversation_id="c")
    assert second[:-1] == [*first, ANSWER]
    assert second[-1]["content"] == f"{shown('c')}\n\n{located(TEXTS['b'])}\n\nTwo?"
    wrapped = finding(*lettered("a"), planner=ReusePlanner(deduplicate=False))
    first = wrapped.messages("One?", history=[], conversation_id="c")
    second = wrapped.messages("Two?", history=[*first, ANSWER], conversation_id="c")
    assert second[-1]["content"] == f"{shown('a')}\n\nTwo?"


def test_conversation_and_history_may_come_from_the_surroundings():
    wrapped = finding(*lettered("ab"))
    with request_context(conversation_id="c", history=[]):
        first = wrapped.messages("One?", filters={"user_id": "alice"})
    with request_context(conversation_id="c", history=[*first, ANSWER]):
        second = wrapped.messages("Two?", filters={"user_id": "alice"})
        other = wrapped.messages("Two?", conversation_id="d", filters={"user_id": "alice"})
    assert second == [
        *first,
        ANSWER,
        {"role": "user", "content": f"{located(*texts('ab'))}\n\nTwo?"},
    ]
    assert len(other) == 1, "another conversation's history is not this one's"


def test_of_a_store_that_cannot_be_asked_deleted_memories_are_not_mentioned():
    porto, cat = "Alice lives in Porto.", "Alice has a cat."
    wrapped = finding(memory("1", porto), memory("2", cat))
    first = wrapped.messages("One?", history=[], conversation_id="c")
    wrapped.memory.found = [memory("2", cat)]
    second = wrapped.context("Two?", history=[*first, ANSWER], conversation_id="c")
    assert second.text == located(cat)
    assert second.annotation is None
    alone = wrapped.context("Two?")
    assert str(alone) == labelled(cat)


def test_the_planners_templates_are_used():
    templates = Templates(label="<m{id}>", separator="\n", order_position="after_question")
    wrapped = finding(*lettered("ab"), planner=ReusePlanner(templates=templates))
    wrapped.context("q?")
    wrapped.memory.found = lettered("ca")
    context = wrapped.context("q?")
    memories = f"<mid-a> {TEXTS['a']}\n<mid-c> {TEXTS['c']}"
    annotation = "Read documents <mid-c>, <mid-a> first."
    assert str(context) == f"{memories}\n{annotation}"
    assert context.messages()[-1]["content"] == f"{memories}\nq?\n{annotation}"


async def test_a_fault_shows_the_memories_as_found(caplog):
    found = [memory("2", "has cats"), memory("1", "likes tea"), memory("3", "has cats")]
    history = [{"role": "user", "content": "Hello."}, ANSWER]
    wrapped = finding(*found, planner=FaultyPlanner())
    awaited = AsyncReuseMemory(AsyncFakeMemory(found), planner=FaultyPlanner())
    with caplog.at_level(logging.WARNING, "ctxreuse"):
        context = wrapped.context("a secret?", system="Be brief.", history=history)
        messages = wrapped.messages("a secret?", system="Be brief.", history=history)
        assert wrapped.search("a secret?") == {"results": found}
    assert str(context) == "has cats\n\nlikes tea"
    assert (context.annotation, context.plan) == (None, None)
    assert messages == [
        {"role": "system", "content": "Be brief."},
        *history,
        {"role": "user", "content": "has cats\n\nlikes tea\n\na secret?"},
    ]
    assert wrapped.faults == 3
    assert [record.message for record in caplog.records] == [
        "ReuseMemory: planning failed with RuntimeError at adapter_conformance.py:"
        f"{FaultyPlanner.plan.__code__.co_firstlineno + 1}; memories go through as retrieved. "
        "Further faults are only counted."
    ]
    assert await awaited.messages("a secret?", system="Be brief.", history=history) == messages
    assert awaited.faults == 1


@pytest.mark.parametrize("found", [{"message": "accepted"}, {"results": [{"id": "1"}, "no"]}])
def test_memories_without_text_add_nothing(found):
    wrapped = ReuseMemory(FakeMemory(found))
    assert wrapped.messages("q?") == [{"role": "user", "content": "q?"}]
    assert wrapped.faults == 1


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"query": 3}, "query must be a string"),
        ({"query": "q?", "system": 3}, "system must be a string"),
        ({"query": "q?", "history": "Hello."}, "history must be a list"),
        ({"query": "q?", "history": ["Hello."]}, "a chat message in history must be a dict"),
        ({"query": "q?", "conversation_id": 1.5}, "conversation_id must be a string or an integer"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_searched(wrong, named):
    wrapped = finding()
    for call in (wrapped.context, wrapped.messages):
        with pytest.raises(InvalidRequestError, match=named):
            call(**wrong)
    assert wrapped.memory.calls == []
    assert wrapped.faults == 0


def test_messages_share_nothing_that_can_change():
    wrapped = finding(*lettered("a"))
    history = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
    context = wrapped.context("q?", history=history)
    context.messages()[0]["content"][0]["text"] = "changed"
    assert isinstance(context, MemoryContext)
    assert (
        context.messages()[0]
        == history[0]
        == {"role": "user", "content": [{"type": "text", "text": "Hello."}]}
    )


def test_a_returned_history_and_its_other_system_messages_go_in_again():
    wrapped = finding(*lettered("ab"))
    options: dict[str, Any] = {"system": "Be brief.", "conversation_id": "c"}
    first = wrapped.messages("q?", **options)
    wrapped.memory.found = lettered("b")
    second = wrapped.messages("And?", history=[*first, ANSWER], **options)
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[:3] == [*first, ANSWER]
    assert second[3]["content"] == f"{located(TEXTS['b'])}\n\nAnd?"

    summary = {"role": "system", "content": "So far: a greeting."}
    sent = finding(*lettered("a")).messages("q?", system="Be brief.", history=[summary, ANSWER])
    assert [message["content"] for message in sent[:3]] == [
        "Be brief.",
        "So far: a greeting.",
        "An answer.",
    ]
