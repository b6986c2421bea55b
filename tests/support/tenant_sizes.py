"""Planners that remember little, what is done with them, and their sizes, counted anew."""

from dataclasses import replace

from helpers import nodes_of
from hypothesis import strategies as st
from planning_helpers import assert_keeps_the_promises, user

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.memory.tenants import Bounds, Tenants

SMALL = Bounds(
    tenants=3,
    index_nodes=12,
    index_blocks=30,
    request_ids=10,
    recent_blocks=20,
    conversations=4,
    shown_blocks=15,
    logged_blocks=25,
    sent_messages=6,
    token_counts=12,
)


def bounded(bounds: Bounds = SMALL) -> ReusePlanner:
    planner = ReusePlanner(token_counter=lambda text: len(text) + 20)
    planner._planning._tenants = Tenants(None, bounds)
    return planner


def measured(tenants: Tenants) -> dict[str, int]:
    """Return the size of every part, counted anew."""
    states = tenants._states.values()
    return {
        "index_nodes": sum(
            sum(node.parent is not None for node in nodes_of(state.index)) for state in states
        ),
        "index_blocks": sum(len(node.run) for state in states for node in nodes_of(state.index)),
        "request_ids": sum(state.index.ids_size for state in states),
        "recent_blocks": sum(len(one or ()) for state in states for one in state.recent._requests),
        "conversations": sum(len(state.conversations._records) for state in states),
        "shown_blocks": sum(
            sum(len(rows) for shown in known._shown.values() for rows in shown.values())
            + sum(reading.size for reading in known._readings.values())
            for known in (state.conversations for state in states)
        ),
        "logged_blocks": sum(size for state in states for _, size, *_ in state.log._logged),
        "sent_messages": sum(len(state.log.edits) for state in states),
        "token_counts": sum(len(state.token_counts) for state in states),
    }


STEPS = ["plan", "batch", "conversation", "later", "edit", "evict", "evict tokens", "trim", "end"]


def steps(most: int) -> st.SearchStrategy[list[tuple[str, str, list[int]]]]:
    """Return what draws steps of four tenants, each for `act`."""
    step = st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(STEPS),
        st.lists(st.integers(0, 30), max_size=8, unique=True),
    )
    return st.lists(step, max_size=most)


def act(planner: ReusePlanner, step: tuple[str, str, list[int]], number: int) -> None:
    tenant, kind, numbers = step
    new = ContextRequest([f"text {n}" for n in numbers], tenant=tenant, request_id=number % 7)
    if kind == "edit":
        planner.note_edit(tenant, [bytes([one]) for one in numbers], b"[]")
    elif kind == "plan":
        assert_keeps_the_promises(planner.plan(new))
    elif kind == "batch":
        for plan in planner.plan_batch([new, new]).plans:
            assert_keeps_the_promises(plan)
    elif kind == "conversation":
        chat = planner.conversation(number % 5, tenant)
        for _ in range(2):
            assert_keeps_the_promises(chat.plan(new.blocks))
            chat.record("Yes.")
    elif kind == "later":
        history = [user("[Doc_1] text 1")]
        later = replace(new, history=history, conversation_id=number % 5)
        assert_keeps_the_promises(planner.plan(later))
    elif kind == "evict":
        planner.evict(range(3), tenant if number % 2 else None)
    elif kind == "evict tokens":
        planner.evict_tokens(30)
    elif kind == "trim":
        planner.trim(number % 7, 1, tenant)
    else:
        planner.end_conversation(number % 5, tenant)
        planner.cached_tokens(new)
