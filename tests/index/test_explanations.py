import copy
import dataclasses
import gc
import itertools
import pickle
import threading
from itertools import takewhile
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

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.context.templates import DEFAULT_TEMPLATES
from ctxreuse.errors import InvalidRequestError
from ctxreuse.index.explain import (
    Cause,
    Explanation,
    LoggedPrompt,
    PromptLog,
    SentPrompt,
    explain,
)

all_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def prompt(request_id, letters, tokens=100, **fields):
    """Return a prompt whose blocks are letters; a capital is another text under the same id."""
    counts = [tokens] * len(letters) if isinstance(tokens, int) else tokens
    known = {"tenant": "", "system": None, "is_later_turn": False, "after": None, **fields}
    return SentPrompt(
        request_id=request_id,
        keys=tuple(letter.encode() for letter in letters),
        ids=tuple(letters.lower()),
        tokens=tuple(counts),
        **known,
    )


def why(letters, *earlier, cached=None, tokens=100, across_tenants=False, **fields):
    """Explain a prompt called "now" behind others, given as letters and called 0, 1, ..."""
    before = [
        prompt(number, one) if isinstance(one, str) else one for number, one in enumerate(earlier)
    ]
    now = prompt("now", letters, tokens, **fields)
    return explain(now, before, cached, across_tenants=across_tenants)


def common_beginning(one, other):
    pairs = zip(one, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


# causes


def test_the_causes_in_words():
    assert [str(cause) for cause in Cause] == [
        "hit",
        "new blocks",
        "other order",
        "other text",
        "other system text",
        "other tenant",
        "later turn",
        "older prompt",
        "evicted",
        "shorter than an engine block",
        "no blocks",
    ]


def test_a_prompt_that_an_earlier_one_begins_with_is_a_hit():
    assert why("ab", "xy", "abc", "a") == Explanation(
        request_id="now",
        cause=Cause.hit,
        closest=1,
        shared_blocks=2,
        shared_tokens=200,
        block=None,
        other_block="c",
        lost_tokens=0,
        words="It begins as request 1 does, for 2 of its 2 blocks (200 of 200 block tokens): "
        "all of it can be served. This prompt ends there.",
    )


def test_blocks_that_no_close_prompt_has_are_new():
    assert why("abcd", "abxy", "cd") == Explanation(
        request_id="now",
        cause=Cause.new_blocks,
        closest=0,
        shared_blocks=2,
        shared_tokens=200,
        block="c",
        other_block="x",
        lost_tokens=0,
        words="It begins as request 0 does, for 2 of its 4 blocks (200 of 400 block tokens). "
        "They part at block 'c', where the earlier prompt has 'x'. "
        "No block from there on stands in that prompt.",
    )


def test_a_longer_prompt_goes_on_where_the_earlier_one_ends():
    explanation = why("abc", "ab")
    assert (explanation.cause, explanation.shared_tokens) == (Cause.new_blocks, 200)
    assert (explanation.block, explanation.other_block) == ("c", None)
    assert "The earlier prompt ends there." in explanation.words


def test_the_first_prompt_has_none_to_compare_with():
    assert why("ab") == Explanation(
        request_id="now",
        cause=Cause.new_blocks,
        closest=None,
        shared_blocks=0,
        shared_tokens=0,
        block="a",
        other_block=None,
        lost_tokens=0,
        words="No earlier prompt with this tenant and system text is known: "
        "everything is computed.",
    )


def test_the_same_blocks_in_another_order_are_computed_again():
    assert why("acbd", "abcx") == Explanation(
        request_id="now",
        cause=Cause.other_order,
        closest=0,
        shared_blocks=1,
        shared_tokens=100,
        block="c",
        other_block="b",
        lost_tokens=200,
        words="It begins as request 0 does, for 1 of its 4 blocks (100 of 400 block tokens). "
        "They part at block 'c', where the earlier prompt has 'b'. "
        "From there on blocks with 200 tokens stand in the earlier prompt, too, but in another "
        "order or place: they are computed again.",
    )


def test_where_no_prompt_begins_alike_the_closest_is_said_to_be_no_more_than_that():
    assert why("ba", "cd", "ab", "e").words == (
        "No earlier prompt begins as it does; the closest is request 1. "
        "They part at block 'b', where the earlier prompt has 'a'. "
        "From there on blocks with 200 tokens stand in the earlier prompt, too, but in another "
        "order or place: they are computed again."
    )
    assert why("ab", "cd", "ef") == Explanation(
        request_id="now",
        cause=Cause.new_blocks,
        closest=1,
        shared_blocks=0,
        shared_tokens=0,
        block="a",
        other_block="e",
        lost_tokens=0,
        words="No earlier prompt begins as it does; the closest is request 1. "
        "They part at block 'a', where the earlier prompt has 'e'. "
        "No block from there on stands in that prompt.",
    )


def test_a_block_with_another_text_under_its_id_is_said_so():
    explanation = why("aBc", "abx")
    assert (explanation.cause, explanation.closest) == (Cause.other_text, 0)
    assert (explanation.shared_tokens, explanation.block, explanation.lost_tokens) == (100, "b", 0)
    assert explanation.words.endswith("Block 'b' had another text when it was sent before.")


def test_an_id_of_another_type_is_no_other_text():
    before = dataclasses.replace(prompt(0, "ax"), ids=("a", 1))
    now = dataclasses.replace(prompt("now", "ay"), ids=("a", "1"))
    assert explain(now, [before]).cause is Cause.new_blocks
    now = dataclasses.replace(now, ids=("a", 1))
    assert explain(now, [before]).cause is Cause.other_text


def test_a_text_that_came_back_is_not_another_one():
    assert why("ab", "aB", "xb").cause is Cause.new_blocks


def test_the_same_blocks_behind_another_system_text_are_computed_again():
    before = prompt("earlier", "abc", system="S")
    assert why("abd", before, "x") == Explanation(
        request_id="now",
        cause=Cause.other_system,
        closest="earlier",
        shared_blocks=0,
        shared_tokens=0,
        block="a",
        other_block="a",
        lost_tokens=200,
        words="Request 'earlier' began with the same 2 blocks (200 tokens), but its system text is "
        "another one and stands before them; they are computed again.",
    )


@pytest.mark.parametrize(("one", "other"), [(None, ""), ("", None), ("A", "B"), ("A", "A ")])
def test_system_texts_are_told_apart(one, other):
    before = [prompt("x", "ab", system=one), prompt("y", "ab", system=other)]
    now = prompt("now", "ab", system=one)
    assert explain(now, before[1:]).cause is Cause.other_system
    assert explain(now, before).cause is Cause.hit


def test_another_tenants_prompt_is_only_looked_at_on_demand_and_never_named():
    before = prompt("theirs", "abc", tenant="them", system="theirs, too")
    assert why("abd", before) == why("abd")
    assert why("abd", before, across_tenants=True) == Explanation(
        request_id="now",
        cause=Cause.other_tenant,
        closest=None,
        shared_blocks=0,
        shared_tokens=0,
        block="a",
        other_block=None,
        lost_tokens=200,
        words="Another tenant's prompt began with the same 2 blocks (200 tokens), but tenants "
        "share nothing; they are computed again.",
    )


def test_ones_own_prompts_explain_before_other_system_texts_and_those_before_other_tenants():
    system, tenant = prompt("s", "abc", system="S"), prompt("t", "abcd", tenant="T")
    causes = [
        why("abcd", *before, across_tenants=True).cause
        for before in (("ax", system, tenant), ("x", system, tenant), ("x", tenant))
    ]
    assert causes == [Cause.new_blocks, Cause.other_system, Cause.other_tenant]


def test_what_left_the_cache_since_is_evicted():
    assert why("abc", "abx", cached=100) == Explanation(
        request_id="now",
        cause=Cause.evicted,
        closest=0,
        shared_blocks=2,
        shared_tokens=200,
        block="c",
        other_block="x",
        lost_tokens=100,
        words="It begins as request 0 does, for 2 of its 3 blocks (200 of 300 block tokens), "
        "but 100 of these tokens have left the cache since. "
        "They part at block 'c', where the earlier prompt has 'x'.",
    )
    assert why("abc", "abx", cached=200).cause is Cause.new_blocks
    assert why("abc", "abx", cached=0).lost_tokens == 200
    gone = why("ab", "ab", cached=0)
    assert (gone.cause, gone.lost_tokens) == (Cause.evicted, 200)
    assert gone.words.endswith("have left the cache since. This prompt ends there.")


@pytest.mark.parametrize(
    ("cached", "cause", "lost"),
    [
        (None, Cause.other_order, 100),
        (200, Cause.other_order, 100),
        (150, Cause.other_order, 150),
        (100, Cause.other_order, 200),
        (99, Cause.evicted, 201),
        (0, Cause.evicted, 300),
    ],
)
def test_what_was_moved_and_what_was_evicted_add_up_and_the_larger_part_is_the_cause(
    cached, cause, lost
):
    explanation = why("abdc", "abcx", cached=cached)
    assert (explanation.cause, explanation.lost_tokens) == (cause, lost)
    assert (explanation.shared_tokens, explanation.block, explanation.other_block) == (
        200,
        "d",
        "c",
    )


@pytest.mark.parametrize(
    ("moved", "cause", "lost"), [(7, Cause.too_short, 15), (8, Cause.other_order, 16)]
)
def test_what_was_moved_and_what_is_too_short_add_up_and_the_larger_part_is_the_cause(
    moved, cause, lost
):
    explanation = why("acb", "abx", tokens=(8, 50, moved))
    assert (explanation.cause, explanation.lost_tokens) == (cause, lost)
    assert (explanation.shared_tokens, explanation.block, explanation.other_block) == (8, "c", "b")


def test_more_cached_than_any_given_prompt_shares_is_an_older_prompts_beginning():
    assert why("abcd", "axyz", "bcd", cached=200) == Explanation(
        request_id="now",
        cause=Cause.older_prompt,
        closest=None,
        shared_blocks=2,
        shared_tokens=200,
        block="c",
        other_block=None,
        lost_tokens=0,
        words="A prompt that is not among those compared begins as it does: 200 of 400 block "
        "tokens are cached, 2 of its 4 blocks whole.",
    )
    assert why("ab", cached=100).cause is Cause.older_prompt
    assert why("abcd", "axyz", cached=299).shared_tokens == 200  # whole blocks only
    assert why("abc", "axyz", cached=100).cause is Cause.new_blocks
    elsewhere = prompt("s", "abcd", system="S"), prompt("t", "abcd", tenant="T")
    assert why("abcd", *elsewhere, cached=200, across_tenants=True).cause is Cause.older_prompt


@pytest.mark.parametrize("cached", [200, 201, 10**9])
def test_an_older_prompt_that_begins_with_all_of_it_is_a_hit(cached):
    assert why("ab", "ax", cached=cached) == Explanation(
        request_id="now",
        cause=Cause.hit,
        closest=None,
        shared_blocks=2,
        shared_tokens=200,
        block=None,
        other_block=None,
        lost_tokens=0,
        words="A prompt that is not among those compared begins as it does: 200 of 200 block "
        "tokens are cached, 2 of its 2 blocks whole.",
    )


def test_a_beginning_shorter_than_an_engine_block_is_not_served():
    explanation = why("abc", prompt(0, "abx", tokens=4), tokens=4)
    assert (explanation.cause, explanation.closest) == (Cause.too_short, 0)
    assert (explanation.shared_blocks, explanation.shared_tokens) == (2, 8)
    assert (explanation.block, explanation.other_block, explanation.lost_tokens) == ("c", "x", 8)
    assert explanation.words == (
        "It begins as request 0 does, for 2 of its 3 blocks (8 of 12 block tokens), but that is "
        "less than an engine block of 16 tokens, the least that a cache serves. "
        "They part at block 'c', where the earlier prompt has 'x'."
    )
    assert why("ab", "ab", tokens=(8, 7)).cause is Cause.too_short
    assert why("ab", "ab", tokens=(8, 8)).cause is Cause.hit
    elsewhere = prompt("s", "ab", system="S"), prompt("t", "ab", tenant="T")
    for before, cause in zip(elsewhere, (Cause.other_system, Cause.other_tenant), strict=True):
        assert why("ab", before, tokens=(8, 7), across_tenants=True).cause is Cause.new_blocks
        assert why("ab", before, tokens=(8, 8), across_tenants=True).cause is cause


def test_engines_with_other_block_sizes_can_be_explained():
    now, before = prompt("now", "ab"), [prompt(0, "ab")]
    assert explain(now, before, engine_block_tokens=200).cause is Cause.hit
    explanation = explain(now, before, engine_block_tokens=201)
    assert explanation.cause is Cause.too_short
    assert "an engine block of 201 tokens" in explanation.words
    other_system = [prompt(0, "ab", system="S")]
    assert explain(now, other_system, engine_block_tokens=201).cause is Cause.new_blocks


def test_a_prompt_without_blocks_has_nothing_to_reuse():
    assert why("", "ab", "") == Explanation(
        request_id="now",
        cause=Cause.empty,
        closest=None,
        shared_blocks=0,
        shared_tokens=0,
        block=None,
        other_block=None,
        lost_tokens=0,
        words="The prompt has no blocks: there is nothing to reuse.",
    )


def test_a_later_turn_stands_behind_its_history():
    assert why("ab", "ab", is_later_turn=True, after=0) == Explanation(
        request_id="now",
        cause=Cause.later_turn,
        closest=0,
        shared_blocks=0,
        shared_tokens=0,
        block="a",
        other_block=None,
        lost_tokens=0,
        words="It continues a conversation behind request 0 and repeats what was sent there; "
        "its own 2 blocks (200 tokens) stand behind that history, "
        "where no other prompt can have put them.",
    )
    unknown = why("", is_later_turn=True)
    assert (unknown.cause, unknown.closest, unknown.block) == (Cause.later_turn, None, None)


def test_a_later_turn_is_no_beginning_for_others():
    later = prompt("later", "ab", is_later_turn=True, after="x")
    assert why("ab", later) == why("ab")


def test_the_closest_prompt_is_the_one_of_the_longest_beginning_the_latest_of_equals():
    assert why("abc", "abx", "ayc", "abz", "bac").closest == 2
    assert why("abc", "xbc", "ya", "zc").closest == 0  # no beginning: the most blocks
    assert why("abc", "xbc", "ya", "zbc").closest == 2
    assert why("abc", "x", "y").closest == 1
    weights = why("ab", prompt("short", "bx"), prompt("long", "ax"), tokens=(5, 500))
    assert weights.closest == "long"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("x" * 58, repr("x" * 58)),
        ("x" * 59, "'" + "x" * 58 + "…"),
        ("ü" * 10_000, "'" + "ü" * 58 + "…"),
        (10**5000, hex(10**5000)[:59] + "…"),
        (-(10**5000), hex(-(10**5000))[:59] + "…"),
        ("\ud800", r"'\ud800'"),
        ("\x1b[31m\n", r"'\x1b[31m\n'"),
    ],
    ids=["short", "long", "very long", "huge", "negative", "surrogate", "escape"],
)
def test_huge_and_odd_ids_are_named_so_that_anyone_can_print_them(name, named):
    before = dataclasses.replace(prompt(name, "abc"), ids=(name, "b", name))
    parted = dataclasses.replace(prompt("now", "abD"), ids=("a", "b", name))
    assert explain(parted, [before]).words == (
        f"It begins as request {named} does, for 2 of its 3 blocks (200 of 300 block tokens). "
        f"They part at block {named}, where the earlier prompt has {named}. "
        f"Block {named} had another text when it was sent before."
    )
    assert explain(prompt("now", "ab", system="S"), [before]).words.startswith(
        f"Request {named} began with the same 2 blocks (200 tokens), "
    )
    later = prompt("now", "a", is_later_turn=True, after=name)
    assert explain(later, []).words.startswith(
        f"It continues a conversation behind request {named} and repeats what was sent there; "
    )
    for now in (parted, dataclasses.replace(parted, request_id=name), later):
        assert str(explain(now, [before])).encode()


def test_an_explanation_prints_as_its_words():
    explanation = why("ab", "ab")
    assert str(explanation) == f"{explanation}" == explanation.words


# invariants

words_of_blocks = st.lists(st.sampled_from("abcdeABC"), unique_by=str.lower, max_size=5).map(
    "".join
)
token_of = dict(zip("abcdeABC", (0, 3, 16, 40, 1000, 1, 16, 7), strict=True))
prompts = st.builds(
    lambda letters, fields: (letters, fields),
    words_of_blocks,
    st.fixed_dictionaries(
        {
            "tenant": st.sampled_from(("", "", "", "secret tenant")),
            "system": st.sampled_from((None, None, "secret system")),
            "is_later_turn": st.sampled_from((False, False, False, True)),
        }
    ),
)


def sent(named):
    """Return prompts with numbers as request ids and each block's own tokens."""
    return [
        prompt(number, letters, [token_of[letter] for letter in letters], **fields)
        for number, (letters, fields) in enumerate(named)
    ]


def looked_at(now, before, across_tenants):
    """Return the prompts that the closest one may be, by system text, the latest last."""
    opening = [one for one in before if not one.is_later_turn]
    mine = [one for one in opening if one.tenant == now.tenant]
    return (
        [one for one in mine if one.system == now.system],
        mine,
        opening if across_tenants else [],
    )


@given(
    st.lists(prompts, min_size=1, max_size=12),
    st.none() | st.integers(0, 1100),
    st.booleans(),
)
def test_the_numbers_add_up_and_the_closest_is_the_closest(named, cached, across_tenants):
    *before, now = sent(named)
    explanation = explain(now, before, cached, across_tenants=across_tenants)
    shared = explanation.shared_blocks
    total = sum(now.tokens)
    assert explanation.request_id == now.request_id
    assert explanation.shared_tokens == sum(now.tokens[:shared])
    assert explanation.block == (now.ids[shared] if shared < len(now.ids) else None)
    assert 0 <= explanation.lost_tokens <= total

    same_root, mine, theirs = looked_at(now, before, across_tenants)
    longest = max((common_beginning(now.keys, one.keys) for one in same_root), default=0)
    best = sum(now.tokens[:longest])
    by_id = {one.request_id: one for one in before}
    is_older = cached is not None and cached > best
    match explanation.cause:
        case Cause.later_turn:
            assert now.is_later_turn
            assert (explanation.closest, shared) == (now.after, 0)
        case Cause.empty:
            assert not now.keys
        case cause if is_older:
            assert cause is (Cause.hit if cached >= total else Cause.older_prompt)
            assert explanation.closest is None
            assert (explanation.other_block, explanation.lost_tokens) == (None, 0)
            assert explanation.shared_tokens <= cached
            assert sum(now.tokens[: shared + 1]) > cached or shared == len(now.keys)
        case Cause.other_system | Cause.other_tenant:
            others = mine if explanation.cause is Cause.other_system else theirs
            there = max(common_beginning(now.keys, one.keys) for one in others)
            assert explanation.lost_tokens == sum(now.tokens[:there]) >= 16 > best
            assert (shared, explanation.shared_tokens) == (0, 0)
        case _ if not same_root:
            assert (explanation.cause, explanation.closest) == (Cause.new_blocks, None)
        case cause:
            closest = by_id[explanation.closest]
            assert closest in same_root
            assert explanation.shared_tokens == best
            assert shared == common_beginning(now.keys, closest.keys)
            assert explanation.other_block == (
                closest.ids[shared] if shared < len(closest.ids) else None
            )
            rest = set(now.keys[shared:]) & set(closest.keys)
            moved = sum(token_of[key.decode()] for key in rest)
            too_short = best if best < 16 else 0
            evicted = 0 if cached is None or best - cached < 16 else best - cached
            assert explanation.lost_tokens == moved + max(evicted, too_short)
            assert (cause is Cause.evicted) == (evicted > moved)
            assert (cause is Cause.too_short) == (too_short > moved)
            if moved >= max(evicted, too_short):
                assert (cause is Cause.hit) == (shared == len(now.keys))
                assert (cause is Cause.other_order) == (moved > 0)


@given(st.lists(prompts, min_size=1, max_size=10), st.none() | st.integers(0, 1100))
def test_other_tenants_prompts_change_nothing(named, cached):
    *before, now = sent(named)
    own = [one for one in before if one.tenant == now.tenant]
    assert explain(now, before, cached) == explain(now, own, cached)


@given(st.lists(prompts, min_size=1, max_size=10), st.booleans())
def test_no_system_text_and_no_other_tenants_name_or_request_is_told(named, across_tenants):
    renamed = [
        dataclasses.replace(one, request_id=f"{one.tenant or 'own'}-{one.request_id}")
        for one in sent(named)
    ]
    *before, now = renamed
    now = dataclasses.replace(now, tenant="", request_id="now")
    told = repr(explain(now, before, across_tenants=across_tenants))
    assert "secret" not in told


@given(st.lists(prompts, min_size=1, max_size=10))
def test_nothing_given_is_changed_and_any_iterable_will_do(named):
    *before, now = sent(named)
    assert explain(now, iter(before)) == explain(now, before) == explain(now, tuple(before))
    assert before == sent(named)[:-1]


# the log


def note(log, time, one):
    log.append((time, one))
    return LoggedPrompt(one, log, time)


@given(st.integers(1, 5), st.integers(0, 12))
def test_a_log_knows_what_was_planned_before_each_prompt_within_its_bound(size, number):
    log = PromptLog(size)
    everything = [prompt(n, "a") for n in range(number)]
    logged = []
    for count, one in enumerate(everything, start=1):
        logged.append(note(log, count, one))
        for place, entry in enumerate(logged):
            remembered = range(max(0, count - size), place)
            assert entry.earlier() == [everything[n] for n in remembered]
    assert [entry.prompt for entry in logged] == everything
    assert log.before(10**6) == everything[-size:] if number else log.before(10**6) == []


@pytest.mark.parametrize("size", [2, 10])
def test_a_prompt_is_not_among_those_before_it_while_another_thread_plans(size):
    log = PromptLog(size)
    first, own, other = (prompt(name, "ab") for name in ("first", "own", "other"))
    note(log, 1, first)
    logged = note(log, 2, own)
    stop = threading.Event()

    def plan_on():
        for time in itertools.count(3):
            note(log, time, other)
            if stop.is_set():
                return

    thread = threading.Thread(target=plan_on)
    thread.start()
    seen = [logged.earlier() for _ in range(2_000)]
    stop.set()
    thread.join()
    assert all(earlier in ([first], []) for earlier in seen), "the bound may have pushed it out"
    assert log.before(10**9) == [other] * size


def test_prompts_of_two_threads_each_have_their_own_place():
    planner = ReusePlanner()
    plans = []

    def serve():
        plans.extend([planner.plan(big_request((n,)), "none") for n in range(50)])

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = sorted(len(plan.logged.earlier()) for plan in plans)
    assert places == list(range(100))


# plans


def test_a_plan_explains_itself():
    planner = ReusePlanner()
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


def test_the_retrievers_order_is_explained_as_the_cause_where_it_is_kept():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2, 3), request_id="a"), "none")
    explanation = planner.plan(big_request((3, 2, 1)), "none").explain()
    assert (explanation.cause, explanation.lost_tokens) == (Cause.other_order, 300)
    assert planner.plan(big_request((3, 2, 1)), "reuse").explain().cause is Cause.hit


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


def test_what_was_moved_behind_an_evicted_beginning_is_counted_too():
    planner = ReusePlanner()
    plan = planner.plan(big_request((1, 2, 3, 4), request_id="a"), "none")
    planner.trim(plan.request_id, 1)
    explanation = planner.plan(big_request((1, 2, 4, 3)), "none").explain()
    assert (explanation.cause, explanation.closest) == (Cause.other_order, "a")
    assert (explanation.shared_tokens, explanation.lost_tokens) == (200, 300)


@pytest.mark.parametrize(("one", "other"), [("A", "B"), (None, ""), ("\ud800", "\ud801")])
def test_other_system_texts_are_explained(one, other):
    planner = ReusePlanner()
    planner.plan(big_request((1, 2), request_id="a", system=one))
    explanation = planner.plan(big_request((1, 2), system=other)).explain()
    assert (explanation.cause, explanation.closest) == (Cause.other_system, "a")
    assert planner.plan(big_request((1, 2), system=one)).explain().cause is Cause.hit


def test_a_record_holds_a_digest_instead_of_the_system_text():
    planner = ReusePlanner()
    systems = [None, "", "a secret system", "a secret system", "\ud800"]
    plans = [planner.plan(big_request((1, 2), system=system)) for system in systems]
    digests = [plan.logged.prompt.system for plan in plans]
    assert digests[0] is None
    assert digests[2] == digests[3]
    assert len(set(digests)) == 4
    assert [len(digest) for digest in digests[1:]] == [16] * 4
    assert all(isinstance(digest, bytes) for digest in digests[1:])


def test_a_plan_is_explained_by_its_own_tenants_prompts_only():
    shared, alone = ReusePlanner(), ReusePlanner()
    shared.plan(big_request((1, 2), tenant="theirs"))
    plan = shared.plan(big_request((1, 2), tenant="own"))
    assert plan.explain() == dataclasses.replace(
        alone.plan(big_request((1, 2))).explain(), request_id=plan.request_id
    )
    assert plan.explain().cause is Cause.new_blocks


def reachable_prompts(thing):
    """Return every prompt that can be got at from a thing by looking inside of it."""
    seen, waiting, found = set(), [thing], []
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        found += [one] if isinstance(one, SentPrompt) else []
        waiting += gc.get_referents(one)
    return found


def test_other_tenants_prompts_cannot_be_reached_from_a_plan():
    planner = ReusePlanner()
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


def test_a_changed_memory_is_explained():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    updated = ContextBlock(id=2, text="text of 2, updated", tokens=100)
    explanation = planner.plan(ContextRequest([block(1, 100), updated])).explain()
    assert (explanation.cause, explanation.block) == (Cause.other_text, 2)


def test_later_turns_are_explained_by_what_they_send_themselves():
    planner = ReusePlanner()
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
def test_the_plans_of_a_batch_are_explained_in_execution_order(strategy):
    contexts = [(1, 2), (7, 8), (2, 1), (8, 7), (3, 2, 1)]
    requests = [big_request(ids, request_id=n) for n, ids in enumerate(contexts)]
    batch = ReusePlanner().plan_batch(requests, strategy)
    before = set()
    for plan in batch.plans:
        explanation = plan.explain()
        assert explanation.request_id == plan.request_id
        assert explanation.closest in before | {None}
        assert explanation.shared_tokens == plan.expected_cached_tokens
        before.add(plan.request_id)


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
def test_huge_ids_and_token_counts_are_explained_too(strategy):
    planner = ReusePlanner()
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


def test_an_explanation_does_not_change_with_what_is_planned_later():
    planner = ReusePlanner()
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


def test_the_planner_remembers_the_latest_256_prompts_of_each_tenant():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2), request_id="old"), "none")
    for number in range(254):
        planner.plan(big_request((10 + number,)), "none")
        planner.plan(big_request((10 + number,), tenant="another, as busy"), "none")
    plan = planner.plan(big_request((1, 3)), "none")
    assert (plan.explain().closest, len(plan.logged.earlier())) == ("old", 255)
    planner.plan(big_request((1,), tenant="another, as busy"))
    assert len(plan.logged.earlier()) == 255
    planner.plan(big_request((4,)))
    assert len(plan.logged.earlier()) == 254


def test_what_an_older_prompt_left_in_the_cache_is_explained_when_that_is_forgotten():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)), "none")
    for number in range(256):
        planner.plan(big_request((10 + number,)), "none")
    half = planner.plan(big_request((1, 3)), "none").explain()
    assert (half.cause, half.closest, half.shared_tokens) == (Cause.older_prompt, None, 100)
    assert (half.block, half.lost_tokens) == (3, 0)
    whole = planner.plan(big_request((1, 2)), "none").explain()
    assert (whole.cause, whole.closest, whole.shared_tokens) == (Cause.hit, None, 200)


def test_a_copied_plan_is_explained_as_the_original():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2), request_id="a"), "none")
    plan = planner.plan(big_request((2, 1), history=[]), "none")
    for copied in (copy.deepcopy(plan), copy.copy(plan), dataclasses.replace(plan)):
        assert copied == plan
        assert copied.explain() == plan.explain()
        assert copied.logged.log is plan.logged.log
    fields = dataclasses.asdict(plan)
    assert (fields["request_id"], fields["logged"]["time"]) == (plan.request_id, 2)
    assert fields["logged"]["prompt"]["ids"] == (2, 1)
    planner.plan(big_request((3,)))  # the log goes on
    assert [one.request_id for one in plan.logged.log.before(4)] == ["a", "request-0", "request-1"]


def test_an_unpickled_plan_takes_no_other_prompt_along():
    planner = ReusePlanner()
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
    plan = Plan(ContextRequest([]), "r", (), {}, None, 0, DEFAULT_TEMPLATES)
    with pytest.raises(InvalidRequestError) as caught:
        plan.explain()
    assert str(caught.value) == (
        "this plan was made by hand; only a planner knows what was sent before it"
    )


def test_the_record_for_explanations_is_no_part_of_a_plans_value():
    plan = ReusePlanner().plan(big_request((1, 2)))
    assert dataclasses.replace(plan, logged=None) == plan
    assert "logged" not in repr(plan)


@all_strategies
def test_no_text_of_documents_questions_system_or_history_is_told(strategy):
    planner = ReusePlanner()
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


def test_plans_are_explained_by_many_threads_while_others_plan():
    planner = ReusePlanner()
    answers, errors = [], []

    def serve(number):
        try:
            for n in range(50):
                own = planner.plan(big_request((number, 100 + n)))
                answers.append((own.request_id, own.explain()))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(answers) == 200
    for own, explained in answers:
        assert own == explained.request_id != explained.closest
        assert explained.cause is not Cause.hit
