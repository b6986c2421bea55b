"""Marks of a conversation's turns: of the first one, of later ones, and of previews."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from caching_provider import count_tokens
from caching_server import CachingServer, caching_server
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner

SYSTEM = "Answer from these. " * 10


@pytest.fixture(params=["openai", "anthropic"])
def server(request: pytest.FixtureRequest) -> Iterator[CachingServer]:
    with caching_server(request.param) as server:
        yield server


def blocks(*names: str) -> list[ContextBlock]:
    return [ContextBlock(id=one, text=f"{one} says: {'well ' * 700}") for one in names]


def planner_for(server: CachingServer) -> ReusePlanner:
    return ReusePlanner(cache=server.provider.protocol, token_counter=count_tokens)


def send(server: CachingServer, plan: Plan) -> int:
    """Send a plan; return how many tokens the provider read."""
    form: Any = server.provider.protocol
    server.reckon(plan.body(form), {})
    return server.usages[-1].read


def share(server: CachingServer, planner: ReusePlanner, *names: str, times: int = 3) -> int:
    """Have others ask about documents; return how many tokens they read in the end."""
    for _ in range(times):
        chat = planner.conversation(f"{len(server.bodies)}", system=SYSTEM)
        plan = chat.plan(blocks(*names), f"Question {len(server.bodies)}?", now=server.now)
        read = send(server, plan)
    return read


def test_a_turn_that_comes_late_reads_what_others_keep_alive(server):
    planner, life = planner_for(server), 300 if server.provider.protocol == "anthropic" else 1_800
    shared = share(server, planner, "one", "two")
    assert shared > 1_400
    chat = planner.conversation("c", system=SYSTEM)

    def turn(question: str, *names: str) -> int:
        plan = chat.plan(blocks(*names), question, now=server.now)
        read = send(server, plan)
        chat.record("Yes.")
        return read

    assert turn("Which?", "one", "two") == shared
    for question in ("And?", "Well?"):
        server.now += life - 10
        assert share(server, planner, "one", "two", times=1) == shared
        server.now += 20
        assert turn(question, f"{question} three") == shared
        assert turn(f"{question} now", f"{question} four") > shared
    assert not server.refusals


def test_a_turn_asked_in_other_words_reads_its_documents(server):
    planner = planner_for(server)
    chat = planner.conversation("c", system=SYSTEM)
    send(server, chat.plan(blocks("one", "two"), "Which?"))
    chat.record("Yes.")
    first = server.usages[-1].total
    send(server, chat.plan(blocks("three"), "And this?"))
    read = send(server, chat.plan(blocks("three"), "What of this?"))
    assert read > first + 700
    assert chat.plan([], "Sure?").marks == ()


@pytest.mark.parametrize("names", [("one", "two"), ()])
def test_turns_whose_history_holds_the_marks_that_were_sent_read_the_turn_before(server, names):
    planner = planner_for(server)
    if names:
        share(server, planner, *names)
    history: list[Any] = []
    for number in range(9):
        found = blocks(*names) if not number else blocks(f"new {number}")
        before = server.usages[-1].total if number else 0
        request = ContextRequest(
            found, f"Turn {number}?", system=SYSTEM, history=history, conversation_id="c"
        )
        plan = planner.plan(request, now=server.now)
        read = send(server, plan)
        assert not number or read == (before if before >= 1_024 else 0)
        sent = plan.messages(parts=True)
        history = [one for one in sent if one["role"] != "system"]
        history.append({"role": "assistant", "content": "Yes."})
    assert not server.refusals


def test_the_end_of_a_first_turn_does_not_push_out_what_is_read(server):
    planner = planner_for(server)
    names = ["one", "two", "three", "four", "five"]
    for depth in (1, 2, 3, 4, 5):
        share(server, planner, *names[:depth], times=4)
    chat = planner.conversation("c", system=SYSTEM)
    plan = chat.plan(blocks(*names, "mine"), "Which?", now=server.now)
    assert send(server, plan) > 3_000


contexts = st.lists(
    st.lists(st.sampled_from("abcdef"), unique=True, max_size=4), min_size=1, max_size=8
)


@given(contexts, contexts, st.sampled_from(["openai", "anthropic"]))
@examples(40)
def test_a_preview_shows_the_marks_that_a_plan_would_have(found, tried, cache):
    planner = ReusePlanner(cache=cache, token_counter=count_tokens)
    plain = ReusePlanner(cache=cache, token_counter=count_tokens)
    history: list[Any] = []
    for number, names in enumerate(found):
        for other in tried[:2]:
            planner.preview(ContextRequest(blocks(*other), "Other?"), now=number)
        fields: Any = {"history": history, "conversation_id": "c"} if number % 2 else {}
        request = ContextRequest(blocks(*names), "Which?", **fields)
        preview, plan = planner.preview(request, now=number), planner.plan(request, now=number)
        assert preview.marks == plan.marks
        assert preview.body() == plan.body()
        assert plan.marks == plain.plan(request, now=number).marks
        history = [*plan.messages(), {"role": "assistant", "content": "Yes."}]
