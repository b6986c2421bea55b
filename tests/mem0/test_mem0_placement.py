"""Where memories stand: in every place each is shown once, and what was sent stays as it was."""

import itertools
import json
from typing import Any, get_args

import pytest
from adapter_conformance import FaultyPlanner
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from mem0_stores import ANSWER, TEXTS, AsyncFakeMemory, FakeMemory, lettered, memory, plain
from message_contents import check_kept, conversations

from ctxreuse import ReusePlanner
from ctxreuse.context.rendering import message_texts
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.memories import Placement
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory

PLACEMENTS = get_args(Placement)
SYSTEM = {"role": "system", "content": "Be brief."}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def asked(
    wrapped: ReuseMemory, letters: str, history: Any, query: str = "q?", **options: Any
) -> Any:
    wrapped.memory.found = lettered(letters)
    return wrapped.messages(query, history=history, **options)


def test_memories_stand_where_they_are_wanted():
    in_place = {
        "system": [{"role": "system", "content": f"Be brief.\n\n{plain('ab')}"}, user("q?")],
        "before_question": [SYSTEM, user(f"{plain('ab')}\n\nq?")],
        "after_history": [SYSTEM, user(plain("ab")), user("q?")],
    }
    for placement, messages in in_place.items():
        wrapped = ReuseMemory(FakeMemory(), placement=placement)
        for history in (None, [], [SYSTEM]):
            assert asked(wrapped, "ab", history, system="Be brief.") == messages
    assert (
        asked(ReuseMemory(FakeMemory()), "ab", None, system="Be brief.")
        == (in_place["before_question"])
    )


def test_without_a_system_text_the_system_message_is_memories_alone():
    wrapped = ReuseMemory(FakeMemory(), placement="system")
    assert asked(wrapped, "ab", None) == [{"role": "system", "content": plain("ab")}, user("q?")]
    own = [{"role": "system", "content": f"Be brief.\n\n{plain('ba')}"}, user("q?")]
    assert asked(ReuseMemory(FakeMemory(), placement="system"), "ba", [SYSTEM]) == own


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_without_memories_nothing_is_added(placement):
    wrapped = ReuseMemory(FakeMemory(), placement=placement)
    assert asked(wrapped, "", None, system="Be brief.") == [SYSTEM, user("q?")]
    assert asked(wrapped, "", [user("Hi."), ANSWER]) == [user("Hi."), ANSWER, user("q?")]


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_laid_out_anew_memories_stand_in_the_wanted_place_alone(system):
    for placement in PLACEMENTS:
        wrapped = ReuseMemory(FakeMemory(), placement=placement)
        history: list[Any] = []
        for letters in ("ab", "cd", "ef"):
            history = [*asked(wrapped, letters, history, letters, system=system), ANSWER]
        said = [] if system is None else [system]
        opening = [{"role": "system", "content": text} for text in said]
        talk = [user("ab"), ANSWER, user("cd"), ANSWER]
        assert (
            history[:-1]
            == {
                "system": [
                    {"role": "system", "content": "\n\n".join([*said, plain("ef")])},
                    *talk,
                    user("ef"),
                ],
                "before_question": [*opening, *talk, user(f"{plain('ef')}\n\nef")],
                "after_history": [*opening, *talk, user(plain("ef")), user("ef")],
            }[placement]
        )
        again = asked(wrapped, "fe", history, "again", system=system)
        assert again == [*history, user("again")]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_changed_is_quoted_in_every_place(placement):
    old, new = "Alice lives in Porto, in the old town.", "Alice lives in Lisbon, by the river."
    wrapped = ReuseMemory(FakeMemory(), placement=placement)
    wrapped.memory.found = [memory("1", old)]
    first = wrapped.messages("Where?", history=[])
    wrapped.memory.found = [memory("1", new)]
    second = wrapped.messages("And now?", history=[*first, ANSWER])
    assert second[: len(first) + 1] == [*first, ANSWER]
    added = "\n\n".join(one["content"] for one in second[len(first) + 1 :])
    assert f'"{old}" no longer holds' in added
    assert new in added


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_faults_and_awaited_memories_keep_to_the_place(placement):
    plainly = asked(ReuseMemory(FakeMemory(), placement=placement), "ab", [], system="Be brief.")
    faulty = ReuseMemory(FakeMemory(), placement=placement, planner=FaultyPlanner())
    assert asked(faulty, "ab", [], system="Be brief.") == plainly
    later = asked(faulty, "c", [*plainly, ANSWER], system="Be brief.")
    assert later[: len(plainly) + 1] == [*plainly, ANSWER]
    assert faulty.faults
    awaited = AsyncReuseMemory(AsyncFakeMemory(lettered("ab")), placement=placement)
    assert await awaited.messages("q?", history=[], system="Be brief.") == plainly


def test_places_share_no_order_and_there_is_no_other(planner):
    before = ReuseMemory(FakeMemory(), planner=planner)
    within = ReuseMemory(FakeMemory(), planner=planner, placement="system")
    asked(before, "abc", None)
    assert asked(within, "cba", None)[0]["content"] == plain("cba")
    assert asked(within, "bac", None)[0]["content"] == plain("cba")
    with pytest.raises(InvalidRequestError, match="there is no placement 'user'"):
        ReuseMemory(FakeMemory(), placement="user")


@examples(60)
@given(
    placement=st.sampled_from(PLACEMENTS),
    turns=st.lists(st.text("abcdefgh", max_size=5), min_size=1, max_size=6),
    system=st.sampled_from([None, "Be brief."]),
    growth_limit=st.sampled_from([None, 1, 2]),
    named=st.booleans(),
    labels=st.booleans(),
    elsewhere=st.text("abcdefgh", max_size=8),
)
def test_every_found_memory_stands_in_the_prompt_once_and_nothing_else_changes(
    placement, turns, system, growth_limit, named, labels, elsewhere
):
    wrapped = ReuseMemory(
        FakeMemory(), placement=placement, growth_limit=growth_limit, labels=labels
    )
    asked(wrapped, elsewhere, None, system=system)
    history: list[Any] = []
    for number, letters in enumerate(turns):
        query = f"Question {number}?"
        options: Any = {"conversation_id": "c"} if named else {}
        wrapped.memory.found = lettered(letters)
        context = wrapped.context(query, history=history, system=system, **options)
        messages = context.messages()
        assert prompt_texts(context.body("openai")) == prompt_texts({"messages": messages})
        shown = "\n\n".join(text for one in messages for text in message_texts(one))
        counts = {letter: shown.count(TEXTS[letter]) for letter in TEXTS}
        assert all(counts[letter] == 1 for letter in letters)
        assert max(counts.values()) <= 1
        assert [shown.count(f"Question {n}?") for n in range(number + 1)] == [1] * (number + 1)
        assert shown.count("Be brief.") == (system is not None)
        roles = [one["role"] for one in messages]
        assert roles.count("assistant") == number
        assert messages[-1]["content"].endswith(query)
        if growth_limit is None:
            assert messages[: len(history)] == history
        history = [*messages, ANSWER]
    assert wrapped.faults == 0


SHARED = "abcd"
LONGER = {one: f"{one} says: " + one * 2_000 for one in SHARED}


def prompt_texts(body: dict[str, Any]) -> str:
    opening = [one["text"] for one in body.get("system", ())]
    return "".join([*opening, *(text for one in body["messages"] for text in message_texts(one))])


def known_elsewhere(wrapped: ReuseMemory) -> None:
    """Let another conversation begin with four long memories."""
    wrapped.memory.found = [memory(one, text) for one, text in LONGER.items()]
    wrapped.messages("Before?", system="Be brief.", conversation_id="another")


def third_turn(wrapped: ReuseMemory, first: Any, **options: Any) -> Any:
    """Return the turn in which a conversation gets too long, and finds what another began with."""
    history = [first, ANSWER]
    for letters in ("ef", "gh"):
        history = [*asked(wrapped, letters, history, letters, system="Be brief."), ANSWER]
    wrapped.memory.found = [memory(one, LONGER[one]) for one in reversed(SHARED)]
    return wrapped.context("And?", history=history, system="Be brief.", **options)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("conversation_id", [None, "c"])
def test_memories_laid_out_anew_open_a_conversation_as_others_have_begun(
    placement, conversation_id
):
    wrapped = ReuseMemory(FakeMemory(), placement=placement, growth_limit=1.1)
    known_elsewhere(wrapped)
    context = third_turn(wrapped, user("Hi.") | {"name": "alice"}, conversation_id=conversation_id)
    memories = "\n\n".join(LONGER.values())  # in the order of the other conversation
    opening = {
        "system": [
            {"role": "system", "content": f"Be brief.\n\n{memories}"},
            user("Hi.") | {"name": "alice"},
        ],
        "before_question": [SYSTEM, user(f"{memories}\n\nHi.") | {"name": "alice"}],
        "after_history": [SYSTEM, user(memories), user("Hi.") | {"name": "alice"}],
    }[placement]
    talk = [ANSWER, user("ef"), ANSWER, user("gh"), ANSWER, user("And?")]
    assert context.messages() == [*opening, *talk]
    assert context.opens
    assert context.plan.expected_cached_tokens == sum(
        wrapped.planner.count_tokens(one) for one in LONGER.values()
    )
    # what follows is appended
    wrapped.memory.found += lettered("e")
    history = [*context.messages(), ANSWER]
    later = wrapped.messages("q?", history=history, system="Be brief.")
    is_alone = placement == "after_history"
    added = [plain("e"), "q?"] if is_alone else [f"{plain('e')}\n\nq?"]
    assert later == [*history, *map(user, added)]


@pytest.mark.parametrize(
    "first", [user([{"type": "text", "text": "Hi."}]), {"role": "assistant", "content": "Hi."}]
)
def test_a_conversation_whose_first_message_is_no_text_of_the_user_keeps_it(first):
    for placement in PLACEMENTS:
        wrapped = ReuseMemory(FakeMemory(), placement=placement, growth_limit=1.1)
        known_elsewhere(wrapped)
        context = third_turn(wrapped, first)
        messages = context.messages()
        assert first in messages
        assert context.opens == (placement == "system")
        said = "".join(text for one in messages for text in message_texts(one))
        assert all(said.count(text) == 1 for text in LONGER.values())
        assert "e says" not in said


def test_where_more_was_said_than_is_found_what_was_said_stays_in_front():
    wrapped = ReuseMemory(FakeMemory(), growth_limit=1.1)
    known_elsewhere(wrapped)
    first = user("Let me tell you a long story. " * 700)
    context = third_turn(wrapped, first)
    assert not context.opens
    assert context.messages()[1] == first


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("form", ["openai", "anthropic"])
def test_parts_of_a_conversation_that_memories_open_say_what_its_messages_say(placement, form):
    planner = ReusePlanner(cache="anthropic(minimum=1024)")
    wrapped = ReuseMemory(FakeMemory(), planner=planner, placement=placement, growth_limit=1.1)
    known_elsewhere(wrapped)
    known_elsewhere(wrapped)
    context = third_turn(wrapped, user("Hi."), conversation_id="c")
    assert context.opens
    body = context.body(form)
    assert prompt_texts(body) == prompt_texts({"messages": context.messages()})
    marked = json.dumps(body)
    assert 0 < marked.count("cache_control") + marked.count("prompt_cache_breakpoint") <= 4
    assert "cache" in json.dumps(body["messages"][-1])


@pytest.mark.parametrize("placement", get_args(Placement))
@given(conversations(), st.sampled_from(["openai", "anthropic", "vllm"]))
@examples(40)
def test_histories_are_kept(placement, messages, cache):
    history = [
        {"role": one.role, "content": one.content, **one.beside}
        for one in messages[:-1]
        if one.role != "system"
    ]
    found = FakeMemory([memory(one, one * 5_000, score=1.0) for one in ("a", "b")])
    wrapped = ReuseMemory(found, planner=ReusePlanner(cache=cache), placement=placement)
    roles = [one["role"] for one in history]
    pairs = itertools.pairwise(roles)
    answered = [number for number, pair in enumerate(pairs) if pair == ("user", "assistant")]
    for number in range(3):
        context = wrapped.context(
            f"Which {number}?", system="Be brief.", history=history, conversation_id=f"c{number}"
        )
        # messages carry the marks that the user gave, however many; a body those that are taken
        for sent, marked in ((context.messages(), "vllm"), (context.body()["messages"], cache)):
            earlier = [one for one in sent if one["role"] != "system"][: len(history)]
            check_kept(
                [one["content"] for one in history],
                [one["content"] for one in earlier],
                answered[:-1],
                marked,
            )
            for one, other in zip(earlier, history, strict=True):
                assert {**one, "content": 0} == {**other, "content": 0}
