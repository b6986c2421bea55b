"""Why hosted caches hit or miss: shortest prefixes, marks, lifetimes, and what stands in front."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sent_prompts import prompt

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.context.reported_usage import MissReason, ReportedMiss, reported_miss
from ctxreuse.memory.explanations import Cause, explain
from ctxreuse.rules.cache_rules import READY_PROFILES, cache_profile

ANTHROPIC = cache_profile("anthropic(minimum=150)")
GEMINI = replace(cache_profile("gemini"), minimum=150)


def why(letters, *earlier, cache=ANTHROPIC, cached=None, **fields):
    return explain(prompt("now", letters, **fields), earlier, cached, cache=cache)


def figures(explanation):
    return explanation.cause, explanation.reason, explanation.lost_tokens


def test_a_beginning_shorter_than_the_minimum_is_below_it():
    explanation = why("ax", prompt("before", "ay", marks=(1,)), marks=(1,))
    assert figures(explanation) == (Cause.below_minimum, MissReason.below_minimum, 100)
    assert explanation.words == (
        "It begins as request 'before' does, for 1 of its 2 blocks (100 of 200 block tokens), but "
        "with what stands in front that is less than 150 tokens, the shortest prefix that the "
        "cache (anthropic) keeps. They part at block 'x', where the earlier prompt has 'y'."
    )


def test_what_stands_in_front_counts_for_the_minimum():
    before = prompt("before", "ay", marks=(1,), front_tokens=50)
    assert figures(why("ax", before, marks=(1,), front_tokens=50))[0] is Cause.new_blocks


def test_what_nobody_marked_was_never_written():
    explanation = why("abcx", prompt("before", "abcy", marks=()), marks=())
    assert figures(explanation) == (Cause.never_written, MissReason.never_written, 300)
    assert "300 of these tokens have no mark behind them in both prompts" in explanation.words


def test_a_provider_that_looks_back_from_marks_reads_what_was_marked_before_them():
    before = prompt("before", "abcy", marks=(2,))
    assert figures(why("abx", before, marks=(3,)))[0] is Cause.new_blocks
    assert figures(why("abx", before, marks=(3,), cache=cache_profile("openai(minimum=150)"))) == (
        Cause.never_written,
        MissReason.never_written,
        200,
    )


@pytest.mark.parametrize(
    ("seconds", "cause"),
    [
        (0, Cause.new_blocks),
        (300, Cause.new_blocks),
        (301, Cause.expired),
        (None, Cause.new_blocks),
    ],
)
@pytest.mark.parametrize("cache", [ANTHROPIC, GEMINI])
def test_what_was_sent_too_long_before_is_expired(cache, seconds, cause):
    before = prompt("before", "aby", marks=(2,), time_s=1_000.0)
    now = None if seconds is None else 1_000.0 + seconds
    explanation = why("abx", before, marks=(2,), time_s=now, cache=cache)
    assert explanation.cause is cause
    if cause is Cause.expired:
        assert (explanation.reason, explanation.lost_tokens) == (MissReason.expired, 200)
        assert (
            f"200 of these tokens were sent more than 300 seconds before, and the cache "
            f"({cache.name}) keeps them no longer" in explanation.words
        )


def test_a_prefix_that_was_read_in_between_lives_on():
    first = prompt("first", "aby", marks=(2,), time_s=0.0)
    between = prompt("between", "abz", marks=(2,), time_s=250.0)
    explanation = why("abx", first, between, marks=(2,), time_s=500.0)
    assert explanation.cause is Cause.new_blocks


@pytest.mark.parametrize(
    ("fields", "cause", "reason"),
    [
        ({"model": "other"}, Cause.other_model, MissReason.model),
        ({"tools": "other"}, Cause.other_tools, MissReason.tools),
        ({"system": "other"}, Cause.other_system, MissReason.system),
        ({"key": "other"}, Cause.other_key, MissReason.key),
        ({"is_labelled": True}, Cause.other_labels, MissReason.messages),
        ({"model": "other", "system": "other"}, Cause.other_model, MissReason.model),
        ({"tools": "other", "system": "other"}, Cause.other_tools, MissReason.tools),
    ],
)
def test_what_differs_in_front_is_the_reason(fields, cause, reason):
    before = prompt("before", "abx", marks=(2,), **fields)
    explanation = why("aby", before, marks=(2,), cache=cache_profile("openai(minimum=150)"))
    assert figures(explanation) == (cause, reason, 200)
    assert explanation.closest == "before"


def test_a_key_counts_only_where_it_routes():
    before = prompt("before", "abx", marks=(2,), key="other")
    assert why("aby", before, marks=(2,), cache=ANTHROPIC).cause is Cause.new_blocks


def test_the_first_prompt_was_never_written_and_the_same_blocks_in_another_order_are_messages():
    assert why("ab").reason is MissReason.never_written
    assert why("bay", prompt("before", "abx", marks=(2,)), marks=(2,)).reason is MissReason.messages


def test_a_conversation_that_became_shorter_was_compacted():
    turns = [prompt(n, "a", is_later_turn=True, conversation=b"c", history=n) for n in (2, 4, 6)]
    explanation = why("b", *turns, is_later_turn=True, conversation=b"c", history=1)
    assert (explanation.cause, explanation.reason) == (Cause.compacted, MissReason.compacted)
    assert (explanation.closest, explanation.lost_tokens) == (6, 100)
    assert explanation.words == (
        "It continues a conversation behind request 6, but its history of 6 messages was shortened "
        "to 1, which is another beginning: what was sent there is computed again."
    )
    going_on = why("b", *turns, is_later_turn=True, conversation=b"c", history=8)
    another = why("b", *turns, is_later_turn=True, conversation=b"d", history=1)
    unnamed = why("b", *turns, is_later_turn=True, history=1)
    theirs = why("b", *turns, is_later_turn=True, conversation=b"c", history=1, tenant="t")
    for one in (going_on, another, unnamed, theirs):
        assert (one.cause, one.reason) == (Cause.later_turn, None)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"tools": "other"}, Cause.other_tools),
        ({"model": "other", "tools": "other"}, Cause.other_model),
        ({"system": "other", "history": 1}, Cause.other_system),
        ({"time_s": 301.0}, Cause.expired),
        ({"time_s": 300.0}, Cause.later_turn),
        ({"key": "other"}, Cause.later_turn),
        ({"is_labelled": True}, Cause.later_turn),
    ],
)
def test_a_turn_with_another_front_or_too_late_reads_nothing_of_the_last_one(fields, cause):
    turn = {"is_later_turn": True, "conversation": b"c", "history": 4, "time_s": 1.0}
    last = prompt("last", "ab", conversation=b"c", history=2, time_s=0.0)
    explanation = why("c", last, **turn | fields)
    assert explanation.cause is cause
    if cause is not Cause.later_turn:
        assert (explanation.closest, explanation.lost_tokens) == ("last", 200)
        assert explanation.words.startswith(
            "It continues a conversation behind request 'last', but"
        )


def test_the_provider_stands_beside_the_planner():
    explanation = why("abcx", prompt("before", "abcy", marks=()), marks=())
    assert explanation.comparison == ""
    same = replace(explanation, reported=ReportedMiss("cache_hit"))
    assert same.comparison == (
        "The provider says: no difference (cache_hit); the planner: never written."
    )
    assert str(same) == f"{explanation.words} {same.comparison}"
    other = replace(explanation, reported=ReportedMiss("tools_changed", (MissReason.tools,)))
    assert other.comparison == (
        "The provider says: tools (tools_changed); the planner: never written."
    )


def documents(*names):
    return [ContextBlock(id=name, text=f"{name} text", tokens=600) for name in names]


def test_a_plan_says_its_own_reason_and_its_providers():
    planner = ReusePlanner(cache="anthropic")
    for now, system in ((0, "Help."), (1, "Help. It is Monday.")):
        plan = planner.plan(ContextRequest(documents("a", "b"), "?", system=system), now=now)
    response = {"diagnostics": {"cache_miss_reason": {"type": "system_changed"}}}
    explanation = plan.explain(response)
    assert (explanation.cause, explanation.reason) == (Cause.other_system, MissReason.system)
    assert plan.explain().reported is None
    assert plan.explain(response).words == plan.explain().words


@pytest.mark.parametrize(
    ("cache", "cause"),
    [("anthropic", Cause.expired), ("openai-before-5.6", Cause.expired), ("vllm", Cause.hit)],
)
def test_a_plan_made_after_the_lifetime_says_so(cache, cause):
    planner = ReusePlanner(cache=cache)
    for now in (0, 1, 2, 1_000):
        plan = planner.plan(ContextRequest(documents("a", "b"), "?"), "none", now=now)
    assert plan.explain().cause is cause


def test_a_conversation_that_is_compacted_says_so():
    chat = ReusePlanner().conversation("c")
    for name in "abc":
        plan = chat.plan(documents(name), query="?")
        assert plan.explain().cause is not Cause.compacted
        chat.record("Yes.")
    chat.compact("They spoke of a, b and c.")
    assert chat.plan(documents("d"), query="?").explain().reason is MissReason.compacted


def test_an_engine_of_coarse_blocks_is_explained_by_its_own():
    planner = ReusePlanner(cache=cache_profile("vllm(block_tokens=1_536)"))
    for _ in range(2):
        plan = planner.plan(ContextRequest(documents("a", "b"), "?"))
    assert plan.explain().cause is Cause.too_short
    assert "an engine block of 1536 tokens" in plan.explain().words


prompts = st.builds(
    lambda letters, marks, time_s, model, tools, key: prompt(
        "any",
        "".join(letters),
        marks=None if marks is None else tuple(sorted(marks)),
        time_s=time_s,
        model=model,
        tools=tools,
        key=key,
        front_tokens=20,
    ),
    st.lists(st.sampled_from("abcde"), unique=True, max_size=5),
    st.none() | st.sets(st.integers(0, 5), max_size=4),
    st.none() | st.floats(0, 10_000),
    st.sampled_from(["", "m"]),
    st.sampled_from(["", "t"]),
    st.sampled_from(["", "k"]),
)


@given(
    prompts, st.lists(prompts, max_size=6), st.sampled_from(sorted(READY_PROFILES)), st.booleans()
)
def test_no_more_is_lost_than_the_prompt_has_and_a_hit_loses_nothing(now, earlier, name, is_low):
    cache = cache_profile(name)
    if is_low:
        cache = replace(cache, minimum=min(cache.minimum, 150))
    explanation = explain(now, earlier, cache=cache)
    assert 0 <= explanation.lost_tokens <= sum(now.tokens)
    if explanation.cause is Cause.hit:
        assert explanation.lost_tokens == 0
    assert (explanation.reason is None) == (explanation.cause in (Cause.hit, Cause.empty))
    assert reported_miss({"diagnostics": None}) is None
