import copy
import dataclasses
import gc
import itertools
import pickle
import threading
from types import FunctionType, ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import (
    ODD_TEXTS,
    STRATEGIES,
    assistant,
    big_request,
    block,
    first_turns,
    plan_everything,
    user,
)
from sent_prompts import prompt

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.errors import InvalidRequestError
from ctxreuse.memory.explanations import Cause, Explanation
from ctxreuse.memory.sent_log import LoggedPrompt, SentLog

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def note(log, time, one):
    log.add(time, one)
    return LoggedPrompt(one, log, time, [])


@given(st.integers(1, 5), st.integers(0, 12))
def test_a_log_knows_what_was_planned_before_each_prompt_within_its_bound(size, number):
    log = SentLog()
    everything = [prompt(n, "a") for n in range(number)]
    logged = []
    for count, one in enumerate(everything, start=1):
        logged.append(note(log, count, one))
        if count > size:
            log.forget_oldest()
        for place, entry in enumerate(logged):
            remembered = range(max(0, count - size), place)
            assert entry.earlier() == [everything[n] for n in remembered]
    assert [entry.prompt for entry in logged] == everything
    assert log.before(10**6) == (everything[-size:] if number else [])


@pytest.mark.parametrize("size", [2, 10])
def test_a_prompt_is_not_among_those_before_it_while_another_thread_plans(size):
    log = SentLog()
    first, own, other = (prompt(name, "ab") for name in ("first", "own", "other"))
    note(log, 1, first)
    logged = note(log, 2, own)
    stop = threading.Event()

    def plan_on():
        for time in itertools.count(3):
            note(log, time, other)
            while log.size > 3 * size:
                log.forget_oldest()
            if stop.is_set():
                return

    thread = threading.Thread(target=plan_on)
    thread.start()
    seen = [logged.earlier() for _ in range(2_000)]
    stop.set()
    thread.join()
    assert all(earlier in ([first], []) for earlier in seen), "the bound may have pushed it out"
    assert log.before(10**9) == [other] * size


def test_a_plan_explains_itself(planner):
    first = planner.plan(big_request((1, 2, 3), request_id="a"))
    second = planner.plan(big_request((2, 9, 1), request_id="b"))
    assert first.explain().cause is Cause.new_blocks
    assert second.explain() == Explanation(
        request_id="b",
        cause=Cause.new_blocks,
        closest="a",
        shared_blocks=2,
        shared_tokens=200,
        block=9,
        other_block=3,
        lost_tokens=0,
        words="It begins as request 'a' does, for 2 of its 3 blocks (200 of 300 block tokens). "
        "They part at block 9, where the earlier prompt has 3. "
        "No block from there on stands in that prompt.",
    )


@pytest.mark.parametrize("evict", ["requests", "tokens", "capacity", "trim"])
def test_evictions_are_explained(evict):
    planner = ReusePlanner(capacity_tokens=300 if evict == "capacity" else None)
    plan = planner.plan(big_request((1, 2), request_id="a"))
    if evict == "requests":
        planner.evict([plan.request_id])
    elif evict == "tokens":
        planner.evict_tokens(200)
    elif evict == "trim":
        planner.trim(plan.request_id, 0)
    else:
        planner.plan(big_request((3, 4, 5)))
    explanation = planner.plan(big_request((1, 2))).explain()
    assert (explanation.cause, explanation.closest) == (Cause.evicted, "a")
    assert (explanation.shared_tokens, explanation.lost_tokens) == (200, 200)


@pytest.mark.parametrize(("one", "other"), [("A", "B"), (None, ""), ("\ud800", "\ud801")])
def test_other_system_texts_are_explained(one, other, planner):
    planner.plan(big_request((1, 2), request_id="a", system=one))
    explanation = planner.plan(big_request((1, 2), system=other)).explain()
    assert (explanation.cause, explanation.closest) == (Cause.other_system, "a")
    assert planner.plan(big_request((1, 2), system=one)).explain().cause is Cause.hit


def reachable_prompts(thing):
    """Return every prompt that can be got at from a thing by looking inside of it."""
    seen, waiting, found = set(), [thing], []
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        found += one.before(10**6) if isinstance(one, SentLog) else []
        waiting += gc.get_referents(one)
    return found


def test_other_tenants_prompts_cannot_be_reached_from_a_plan(planner):
    plans = [
        planner.plan(big_request((1, 2), tenant=tenant, system="S"))
        for tenant in ("own", "theirs", "own", "theirs", "")
    ]
    reached = [reachable_prompts(plan) for plan in plans]
    assert [{one.tenant for one in prompts} for prompts in reached] == [
        {plan.request.tenant} for plan in plans
    ]
    assert [len(prompts) for prompts in reached] == [2, 2, 2, 2, 1]
    assert all(b"theirs" not in pickle.dumps(plan) for plan in plans[::2])
    assert plans[2].logged.log.before(10**6) == [plans[0].logged.prompt, plans[2].logged.prompt]


def test_later_turns_are_explained_by_what_they_send_themselves(planner):
    first = planner.plan(big_request((1, 2), "?", history=[], conversation_id="c", request_id="a"))
    history = [user(first.content), assistant("Yes.")]
    planner.plan(big_request((1, 2), request_id="other"))
    later = planner.plan(big_request((2, 3), "?", history=history, conversation_id="c"))
    assert later.references == (2,)
    assert later.logged.prompt.after is None
    assert later.explain() == Explanation(
        request_id=later.request_id,
        cause=Cause.later_turn,
        closest=None,
        shared_blocks=0,
        shared_tokens=0,
        block=3,
        other_block=None,
        lost_tokens=0,
        words="It continues a conversation and repeats what was sent there; its own 1 blocks "
        "(100 tokens) stand behind that history, where no other prompt can have put them.",
    )


@all_strategies
@pytest.mark.parametrize("batch", [False, True])
@given(
    contexts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 6), max_size=5),
            st.sampled_from(("", "t")),
            st.sampled_from((None, "S")),
        ),
        max_size=10,
    )
)
def test_what_was_expected_cached_is_what_the_closest_prompt_shares(strategy, batch, contexts):
    requests = [big_request(ids, tenant=tenant, system=system) for ids, tenant, system in contexts]
    for plan in plan_everything(ReusePlanner(), requests, strategy, batch=batch):
        explanation = plan.explain()
        assert explanation.shared_tokens == plan.expected_cached_tokens
        assert explanation.cause not in (Cause.evicted, Cause.older_prompt)


@all_strategies
@given(requests=st.lists(first_turns, max_size=8))
def test_odd_requests_are_explained_too(strategy, requests):
    planner = ReusePlanner()
    for plan in [planner.plan(one, strategy) for one in requests]:
        explanation = plan.explain()
        assert isinstance(explanation.cause, Cause)
        assert explanation.request_id == plan.request_id
        assert 0 <= explanation.shared_blocks <= len(plan.blocks)
        assert (explanation.cause is Cause.empty) == (not plan.blocks)
        assert "\n" not in str(explanation).encode().decode()


HUGE = 10**5000  # more digits than Python turns into decimals


@all_strategies
def test_huge_ids_and_token_counts_are_explained_too(strategy, planner):
    blocks = [ContextBlock(id=HUGE + n, text=f"text of {n}", tokens=HUGE) for n in range(3)]
    first = planner.plan(ContextRequest(blocks, request_id=HUGE), strategy)
    again = planner.plan(ContextRequest([*blocks[:2], block(1, 100)]), strategy)
    assert first.logged.prompt.tokens == (2**40, 2**40, 2**40)
    assert again.expected_cached_tokens == 2**41
    assert (again.explain().cause, again.explain().shared_tokens) == (Cause.new_blocks, 2**41)
    assert first.explain().cause is Cause.new_blocks
    named = hex(HUGE)[:59] + "…"
    assert str(again.explain()) == (
        f"It begins as request {named} does, for 2 of its 3 blocks "
        "(2,199,023,255,552 of 2,199,023,255,652 block tokens). They part at block 1, where the "
        f"earlier prompt has {named}. No block from there on stands in that prompt."
    )


def test_an_explanation_does_not_change_with_what_is_planned_later(planner):
    plans = [planner.plan(big_request(ids), "none") for ids in ((1, 2), (2, 1), (1, 2, 3), (3,))]
    before = [plan.explain() for plan in plans]
    assert [explanation.cause for explanation in before] == [
        Cause.new_blocks,
        Cause.other_order,
        Cause.new_blocks,
        Cause.other_order,
    ]
    planner.plan_batch([big_request((2, 1, 3)), big_request((1,))])
    planner.evict_tokens(10**6)
    assert [plan.explain() for plan in plans] == before


def test_a_prompt_is_compared_with_the_256_of_its_tenant_before_it(planner):
    planner.plan(big_request((1, 2), request_id="old"), "none")
    for number in range(255):
        planner.plan(big_request((10 + number,)), "none")
        planner.plan(big_request((10 + number,), tenant="another, as busy"), "none")
    plans = [planner.plan(big_request((1, 3)), "none") for _ in range(2)]
    assert (plans[0].explain().closest, len(plans[0].logged.earlier())) == ("old", 256)
    assert "old" not in {one.request_id for one in plans[1].logged.earlier()}


def test_what_an_older_prompt_left_in_the_cache_is_explained_when_that_is_forgotten(planner):
    planner.plan(big_request((1, 2)), "none")
    for number in range(256):
        planner.plan(big_request((10 + number,)), "none")
    half = planner.plan(big_request((1, 3)), "none").explain()
    assert (half.cause, half.closest, half.shared_tokens) == (Cause.older_prompt, None, 100)
    assert (half.block, half.lost_tokens) == (3, 0)
    whole = planner.plan(big_request((1, 2)), "none").explain()
    assert (whole.cause, whole.closest, whole.shared_tokens) == (Cause.hit, None, 200)


def test_a_copied_plan_is_explained_as_the_original(planner):
    planner.plan(big_request((1, 2), request_id="a"), "none")
    plan = planner.plan(big_request((2, 1), history=[]), "none")
    for copied in (copy.deepcopy(plan), copy.copy(plan), dataclasses.replace(plan)):
        assert copied == plan
        assert copied.explain() == plan.explain()
        assert copied.logged.log is plan.logged.log
    fields = dataclasses.asdict(plan)
    assert (fields["request_id"], fields["logged"].time) == (plan.request_id, 2)
    assert fields["logged"].prompt["ids"] == (2, 1)
    planner.plan(big_request((3,)))  # the log goes on
    assert [one.request_id for one in plan.logged.log.before(4)] == ["a", "request-0", "request-1"]


def test_an_unpickled_plan_takes_no_other_prompt_along(planner):
    planner.plan(big_request((1, 2), request_id="a secret name"), "none")
    for ids, cause in (((2, 1), Cause.new_blocks), ((1, 2), Cause.hit)):
        plan = planner.plan(big_request(ids), "none")
        pickled = pickle.dumps(plan)
        assert b"secret" not in pickled
        again = pickle.loads(pickled)
        assert again == plan
        assert again.logged.prompt == plan.logged.prompt
        assert again.logged.earlier() == again.logged.log.before(10**6) == []
        explanation = again.explain()
        assert (explanation.cause, explanation.closest) == (cause, None)
        assert explanation.shared_tokens == plan.expected_cached_tokens
    assert plan.explain().closest == "a secret name"


def test_a_plan_made_by_hand_cannot_be_explained():
    plan = ReusePlanner().preview(ContextRequest([]))
    with pytest.raises(InvalidRequestError) as caught:
        plan.explain()
    assert str(caught.value) == (
        "this plan was made by hand; only a planner knows what was sent before it"
    )


@all_strategies
def test_no_text_of_documents_questions_system_or_history_is_told(strategy, planner):
    texts = [f"a secret {number} {text}" for number, text in enumerate(ODD_TEXTS)]
    told = []
    history = [user("a secret answer")]
    for blocks in (texts, texts[::-1], texts[2:], [*texts[:2], "a secret of its own"], []):
        for system, past in ((None, None), ("a secret system", []), (None, history)):
            asked = ContextRequest(
                blocks, "a secret question", system=system, history=past, conversation_id="c"
            )
            plan = planner.plan(asked, strategy)
            told += [plan.explain(), plan.logged.prompt, reachable_prompts(plan.logged)]
    assert "secret" not in repr(told)
