"""Turns of a conversation: what an agent has been shown is pointed to, its history is replayed."""

import asyncio
import uuid
from functools import partial
from typing import Any

import pytest
from block_labels import labelled, located
from chain_helpers import (
    Agents,
    Busy,
    InTurn,
    Messages,
    SaysModel,
    chain_of,
    documents,
    is_managers,
    worker_query,
)
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from chain_of_agents import ChainOfAgents, ManagerError, UnreadError
from ctxreuse import PAPER_TEMPLATES, ReusePlanner, request_context
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.serving import EmulatedEngine

MODES = pytest.mark.parametrize("mode", ["sequential", "parallel"])


def noting(messages: Messages) -> str:
    return "The answer." if is_managers(messages) else f"Note {len(messages)}."


@MODES
def test_in_shadow_mode_workers_read_in_the_order_given_and_see_no_labels(mode):
    model, planner = SaysModel(), ReusePlanner(mode="shadow")
    chain = ChainOfAgents(model, workers=2, planner=planner, mode=mode, context_window=4_000)
    for texts in (["apples " * 400, "pears " * 400], ["pears " * 400, "dates ", "apples " * 400]):
        model.prompts.clear()
        chain.invoke({"question": "Which?", "documents": texts, "conversation_id": "c"})
        read = "\n".join(str(prompt[-1].content) for prompt in model.prompts)
        assert sorted(texts, key=read.index) == texts
        assert "[" not in read


@MODES
def test_a_document_shown_before_is_pointed_to_behind_the_agent_s_own_history(mode):
    agents = Agents(noting, mode=mode, assignment=InTurn, workers=2)
    agents.run(["apples", "pears"], "First?", conversation_id="c")
    first = agents.model.prompts
    trace = agents.run(["pears", "apples", "plums"], "Second?", conversation_id="c")
    second = agents.model.prompts

    asked = partial(worker_query, agents.settings.prompts)
    notes = ["", "Note 4."] if mode == "sequential" else ["", ""]
    assert [prompt[1:] for prompt in second[:-1]] == [
        [
            *first[1][1:],
            {"role": "assistant", "content": "Note 2."},
            {"role": "user", "content": f"{located('pears')}\n\n{asked('Second?', notes[0])}"},
        ],
        [
            *first[0][1:],
            {"role": "assistant", "content": "Note 2."},
            {
                "role": "user",
                "content": (
                    f"{labelled('plums')}\n\n{located('apples')}\n\n{asked('Second?', notes[1])}"
                ),
            },
        ],
    ]
    assert [(step.agent, len(step.shown_before)) for step in trace.workers] == [(1, 1), (0, 1)]
    assert [len(step.documents) for step in trace.workers] == [1, 2]
    assert second[-1][: len(first[-1])] == first[-1]
    assert second[-1][len(first[-1])] == {"role": "assistant", "content": "The answer."}


turns = st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True), min_size=2, max_size=5)


@examples(40)
@given(turns, st.sampled_from(["sequential", "parallel"]), st.integers(1, 5))
def test_each_prompt_begins_with_its_agent_s_previous_one_and_answer(given_turns, mode, workers):
    answers: dict[str, str] = {}

    def answer(messages: Messages) -> str:
        return answers.setdefault(repr(messages), f" Note {len(answers)}.\n")

    agents = Agents(answer, mode=mode, workers=workers)
    before: dict[str, list[dict[str, Any]]] = {}
    texts = documents(10)
    for number, turn in enumerate(given_turns):
        if not turn and not number:
            return  # there is nothing to answer from
        trace = agents.run([texts[one] for one in turn], f"Turn {number}?", conversation_id="c")
        names = [step.name for step in trace.steps]
        assert len(set(names)) == len(names)
        shown = [block.text for plan in agents.model.plans for block in plan.blocks]
        for name, prompt in zip(names, agents.model.prompts, strict=True):
            earlier = before.get(name, prompt[:1])
            assert prompt[: len(earlier)] == earlier
            assert len(prompt) == len(earlier) + 1
            before[name] = [*prompt, {"role": "assistant", "content": answers[repr(prompt)]}]
        assert len(shown) == len(set(shown))
        read = sum(len(step.documents) for step in trace.workers)
        pointed = sum(len(step.shown_before) for step in trace.workers)
        assert read == len(turn) == len(shown) + pointed
        earlier_turns = {one for past in given_turns[:number] for one in past}
        assert pointed == len(earlier_turns & set(turn))


@MODES
def test_a_history_that_is_too_long_is_left_out_and_its_documents_are_sent_again(mode):
    agents = Agents(noting, mode=mode, workers=1, context_window=1_000)
    texts = documents(8, 10)
    remarks = []
    for turn in range(8):
        trace = agents.run(texts[turn : turn + 1], conversation_id="c")
        remarks.append(trace.workers[0].remark)
    dropped = "its history was left out to fit the model's context"
    assert dropped in remarks
    trace = agents.run(texts[:1], conversation_id="c")
    assert trace.workers[0].shown_before == ()
    assert texts[0] in agents.model.prompts[0][-1]["content"]


@pytest.mark.parametrize(("templates", "most"), [(DEFAULT_TEMPLATES, 150), (PAPER_TEMPLATES, 85)])
def test_pointing_to_very_many_tiny_documents_counts_too(templates, most):
    planner = ReusePlanner(templates=templates, annotate=False)
    for number in (most // 2, most):
        agents = Agents(noting, workers=1, context_window=2_000, planner=planner)
        for _ in range(2):
            trace = agents.run([f"d{n}" for n in range(number)], conversation_id=number)
            for prompt in agents.model.prompts:
                length = sum(agents.planner.count_tokens(message["content"]) for message in prompt)
                assert length + 16 <= 0.75 * 2_000
        [step] = trace.workers
        if number < most:
            assert (step.remark, len(step.shown_before)) == ("", number)
        else:
            assert step.remark == "its history was left out to fit the model's context"
            assert step.shown_before == ()


def test_a_manager_s_conversation_that_is_too_long_is_left_out():
    agents = Agents(lambda messages: "answer " * 10 + "x", workers=1, context_window=800)
    remarks = [
        agents.run(["text"], "q? " * 100, conversation_id="c").steps[-1].remark for _ in range(6)
    ]
    assert remarks[0] == ""
    assert "the conversation was left out to fit the model's context" in remarks
    assert len(agents.model.prompts[-1]) < 6


def test_a_worker_that_fails_keeps_its_history_from_before():
    fails = False

    def answer(messages: Messages) -> str:
        if fails and not is_managers(messages):
            raise ValueError
        return noting(messages)

    agents = Agents(answer, workers=1)
    agents.run(["a"], conversation_id="c")
    fails = True
    with pytest.raises(UnreadError):
        agents.run(["a", "b"], conversation_id="c")
    fails = False
    agents.run(["a", "b"], conversation_id="c")
    assert [message["role"] for message in agents.model.prompts[0]][1:] == [
        "user",
        "assistant",
        "user",
    ]
    assert f"{labelled('b')}\n\n{located('a')}\n\n" in agents.model.prompts[0][-1]["content"]


def test_where_the_manager_fails_the_turn_has_not_been():
    fails = True

    def answer(messages: Messages) -> str:
        if fails and is_managers(messages):
            raise ValueError
        return noting(messages)

    agents = Agents(answer, workers=1)
    with pytest.raises(ManagerError):
        agents.run(["a"], conversation_id="c")
    fails = False
    agents.run(["a"], conversation_id="c")
    assert [len(prompt) for prompt in agents.model.prompts] == [2, 2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"conversation_id": 1}, {"conversation_id": "1"}),
        ({"conversation_id": "c"}, {"conversation_id": "d"}),
        ({"conversation_id": "c", "tenant": "s"}, {"conversation_id": "c", "tenant": "t"}),
        ({"conversation_id": "c"}, {}),
    ],
)
def test_other_conversations_and_tenants_are_apart(one, other):
    agents = Agents(noting)
    agents.run(["a"], **one)
    agents.run(["a"], **other)
    assert [len(prompt) for prompt in agents.model.prompts] == [2, 2]
    agents.run(["a"], **one)
    assert [len(prompt) for prompt in agents.model.prompts] == [4, 4]


def messages_sent(model: SaysModel) -> int:
    return len(model.prompts[-2])


ASK: dict[str, Any] = {"question": "Which?", "documents": ["a"]}


def test_conversation_and_tenant_come_from_input_config_or_context():
    model = SaysModel()
    chain = ChainOfAgents(llm=model)
    chain.invoke({**ASK, "conversation_id": "c", "tenant": "t"})
    chain.invoke(ASK, {"configurable": {"thread_id": "c", "tenant": "t"}})
    assert messages_sent(model) == 4
    with request_context(tenant="t", conversation_id="c"):
        chain.invoke(ASK)
        assert messages_sent(model) == 6
        list(chain.stream(ASK))
        chain.batch([ASK])
        assert messages_sent(model) == 10
        chain.invoke({**ASK, "conversation_id": "other"})
        assert messages_sent(model) == 2
        chain.invoke({**ASK, "tenant": "other"})
        assert messages_sent(model) == 2
    chain.invoke({**ASK, "tenant": "t"}, {"configurable": {"thread_id": "c", "tenant": "no"}})
    assert messages_sent(model) == 12


@pytest.mark.parametrize("conversation_id", ["c", 1, uuid.UUID(int=7)])
def test_a_conversation_that_has_ended_begins_anew(conversation_id):
    model = SaysModel()
    chain = ChainOfAgents(llm=model)
    chain.invoke({**ASK, "conversation_id": conversation_id, "tenant": "t"})
    assert not chain.end_conversation(conversation_id)
    assert chain.end_conversation(conversation_id, tenant="t")
    assert not chain.end_conversation(conversation_id, tenant="t")
    chain.invoke({**ASK, "conversation_id": conversation_id, "tenant": "t"})
    assert messages_sent(model) == 2


async def test_turns_of_one_conversation_at_the_same_time_do_not_mix():
    busy = Busy(noting)
    engine = EmulatedEngine(answer=busy)
    chain = chain_of(engine, workers=1, mode="parallel")
    ask = {**ASK, "conversation_id": "c"}
    await chain.ainvoke(ask)
    await asyncio.gather(
        *(chain.ainvoke({**ask, "question": f"Q{n}?", "documents": ["a", f"d{n}"]}) for n in (1, 2))
    )
    await chain.ainvoke({**ask, "documents": ["a", "d1", "d2"]})
    worker = next(
        body["messages"] for body in engine.requests[::-1] if not is_managers(body["messages"])
    )
    earlier = [body["messages"] for body in engine.requests[:-2]]
    assert worker[:-3] in [messages[:-1] for messages in earlier]
    assert worker[:-2] in earlier
    assert len(worker) == 6
    text = "\n".join(message["content"] for message in worker)
    assert [text.count(f"] {name}\n") for name in ("a", "d1", "d2")] == [1, 1, 1]
