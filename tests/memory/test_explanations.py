from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sent_prompts import prompt

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import PrefixCacheSimulator
from ctxreuse.memory.explanations import Cause, Explanation, explain
from ctxreuse.rules.cache_rules import cache_profile


def why(letters, *earlier, cached=None, tokens=100, across_tenants=False, **fields):
    """Explain a prompt called "now" behind others, given as letters and called 0, 1, ..."""
    before = [
        prompt(number, one) if isinstance(one, str) else one for number, one in enumerate(earlier)
    ]
    now = prompt("now", letters, tokens, **fields)
    return explain(now, before, cached, across_tenants=across_tenants)


def told(cause, words, shared=0, **fields):
    """Return what is told of "now", of which some blocks of 100 tokens each are shared."""
    fields = {"closest": None, "block": None, "other_block": None, "lost_tokens": 0} | fields
    return Explanation(
        "now", cause, shared_blocks=shared, shared_tokens=100 * shared, words=words, **fields
    )


def common_beginning(one, other):
    pairs = zip(one, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_a_prompt_that_an_earlier_one_begins_with_is_a_hit():
    assert why("ab", "xy", "abc", "a") == told(
        Cause.hit,
        "It begins as request 1 does, for 2 of its 2 blocks (200 of 200 block tokens): "
        "all of it can be served. This prompt ends there.",
        shared=2,
        closest=1,
        other_block="c",
    )


def test_the_first_prompt_has_none_to_compare_with():
    assert why("ab") == told(
        Cause.new_blocks,
        "No prompt compared is this tenant's and begins alike: everything is computed.",
        block="a",
    )


def test_the_same_blocks_in_another_order_are_computed_again():
    assert why("acbd", "abcx") == told(
        Cause.other_order,
        "It begins as request 0 does, for 1 of its 4 blocks (100 of 400 block tokens). "
        "They part at block 'c', where the earlier prompt has 'b'. "
        "From there on blocks with 200 tokens stand in the earlier prompt, too, but in another "
        "order or place: they are computed again.",
        shared=1,
        closest=0,
        block="c",
        other_block="b",
        lost_tokens=200,
    )


def test_where_no_prompt_begins_alike_the_closest_is_said_to_be_no_more_than_that():
    assert why("ba", "cd", "ab", "e").words == (
        "No earlier prompt begins as it does; the closest is request 1. "
        "They part at block 'b', where the earlier prompt has 'a'. "
        "From there on blocks with 200 tokens stand in the earlier prompt, too, but in another "
        "order or place: they are computed again."
    )
    assert why("ab", "cd", "ef") == told(
        Cause.new_blocks,
        "No earlier prompt begins as it does; the closest is request 1. "
        "They part at block 'a', where the earlier prompt has 'e'. "
        "No block from there on stands in that prompt.",
        closest=1,
        block="a",
        other_block="e",
    )


def test_a_block_with_another_text_under_its_id_is_said_so():
    explanation = why("aBc", "abx")
    assert (explanation.cause, explanation.closest) == (Cause.other_text, 0)
    assert (explanation.shared_tokens, explanation.block, explanation.lost_tokens) == (100, "b", 0)
    assert explanation.words.endswith("Block 'b' had another text when it was sent before.")


def test_an_id_of_another_type_is_no_other_text():
    before = replace(prompt(0, "ax"), ids=("a", 1))
    now = replace(prompt("now", "ay"), ids=("a", "1"))
    assert explain(now, [before]).cause is Cause.new_blocks
    now = replace(now, ids=("a", 1))
    assert explain(now, [before]).cause is Cause.other_text


def test_the_same_blocks_behind_another_system_text_are_computed_again():
    before = prompt("earlier", "abc", system="S")
    assert why("abd", before, "x") == told(
        Cause.other_system,
        "Request 'earlier' began with the same 2 blocks (200 tokens), but another text stands "
        "before them; they are computed again.",
        closest="earlier",
        block="a",
        other_block="a",
        lost_tokens=200,
    )


def test_the_same_blocks_under_labels_are_computed_again():
    before = prompt("earlier", "abc", is_labelled=True)
    explained = why("abd", before, "x")
    assert (explained.cause, explained.closest) == (Cause.other_labels, "earlier")
    assert explained.words == (
        "Request 'earlier' began with the same 2 blocks (200 tokens), but one of the two prompts "
        "shows them under labels and the other does not; they are computed again."
    )
    elsewhere = [prompt("s", "abc", system="S", is_labelled=True), before]
    assert explain(prompt("now", "abd"), elsewhere).cause is Cause.other_labels
    assert explain(prompt("now", "abd"), elsewhere[:1]).cause is Cause.other_system


def test_another_tenants_prompt_is_only_looked_at_on_demand_and_never_named():
    before = prompt("theirs", "abc", tenant="them", system="theirs, too")
    assert why("abd", before) == why("abd")
    assert why("abd", before, across_tenants=True) == told(
        Cause.other_tenant,
        "Another tenant's prompt began with the same 2 blocks (200 tokens), but tenants "
        "share nothing; they are computed again.",
        block="a",
        lost_tokens=200,
    )


def test_what_left_the_cache_since_is_evicted():
    assert why("abc", "abx", cached=100) == told(
        Cause.evicted,
        "It begins as request 0 does, for 2 of its 3 blocks (200 of 300 block tokens), "
        "but 100 of these tokens have left the cache since. "
        "They part at block 'c', where the earlier prompt has 'x'.",
        shared=2,
        closest=0,
        block="c",
        other_block="x",
        lost_tokens=100,
    )
    assert why("abc", "abx", cached=200).cause is Cause.new_blocks
    assert why("abc", "abx", cached=0).lost_tokens == 200
    gone = why("ab", "ab", cached=0)
    assert (gone.cause, gone.lost_tokens) == (Cause.evicted, 200)
    assert gone.words.endswith("have left the cache since. This prompt ends there.")


def test_a_later_turn_is_no_beginning_for_others():
    later = prompt("later", "ab", is_later_turn=True, after="x")
    assert why("ab", later) == why("ab")


def test_more_cached_than_any_given_prompt_shares_is_an_older_prompts_beginning():
    assert why("abcd", "axyz", "bcd", cached=200) == told(
        Cause.older_prompt,
        "A prompt that is not among those compared begins as it does: 200 of 400 block "
        "tokens are cached, 2 of its 4 blocks whole.",
        shared=2,
        block="c",
    )
    assert why("ab", cached=100).cause is Cause.older_prompt
    assert why("abcd", "axyz", cached=299).shared_tokens == 200  # whole blocks only
    assert why("abc", "axyz", cached=100).cause is Cause.new_blocks
    elsewhere = prompt("s", "abcd", system="S"), prompt("t", "abcd", tenant="T")
    assert why("abcd", *elsewhere, cached=200, across_tenants=True).cause is Cause.older_prompt


def test_a_system_text_that_alone_is_shared_and_shorter_than_an_engine_block_is_not_served():
    explanation = why("abc", prompt(0, "xyz"), front_tokens=9)
    assert explanation.words == (
        "It begins as request 0 does, for its system text alone (9 tokens), but that is less than "
        "an engine block of 16 tokens, the least that a cache serves. They part at block 'a', "
        "where the earlier prompt has 'x'."
    )
    assert (explanation.cause, explanation.lost_tokens) == (Cause.too_short, 0)
    assert why("abc", prompt(0, "xyz"), front_tokens=16).cause is Cause.new_blocks
    assert why("abc", prompt(0, "xya"), front_tokens=9).cause is Cause.other_order
    plan = ReusePlanner().plan(ContextRequest(["a text"], "Which?", system="Answer."))
    assert "engine block" not in plan.explain().words
    planner = ReusePlanner()
    for text in ("one text", "another text"):
        plan = planner.plan(ContextRequest([text * 99], "Which?", system="Answer briefly."))
    assert plan.explain().cause is Cause.too_short


def test_a_system_text_counts_for_the_first_engine_block():
    assert why("ab", "ab", tokens=(4, 4), front_tokens=8).cause is Cause.hit
    assert why("ab", "ab", tokens=(4, 4), front_tokens=7).cause is Cause.too_short


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


def test_a_later_turn_stands_behind_its_history():
    assert why("ab", "ab", is_later_turn=True, after=0) == told(
        Cause.later_turn,
        "It continues a conversation behind request 0 and repeats what was sent there; "
        "its own 2 blocks (200 tokens) stand behind that history, "
        "where no other prompt can have put them.",
        closest=0,
        block="a",
    )
    unknown = why("", is_later_turn=True)
    assert (unknown.cause, unknown.closest, unknown.block) == (Cause.later_turn, None, None)


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
    before = replace(prompt(name, "abc"), ids=(name, "b", name))
    parted = replace(prompt("now", "abD"), ids=("a", "b", name))
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
    for now in (parted, replace(parted, request_id=name), later):
        assert str(explain(now, [before])).encode()


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


@given(st.lists(prompts, min_size=1, max_size=12), st.none() | st.integers(0, 1100), st.booleans())
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
        replace(one, request_id=f"{one.tenant or 'own'}-{one.request_id}") for one in sent(named)
    ]
    *before, now = renamed
    now = replace(now, tenant="", request_id="now")
    told = repr(explain(now, before, across_tenants=across_tenants))
    assert "secret" not in told


PATHS = st.tuples(st.text("01", min_size=1, max_size=4), st.sampled_from([0, 0, 1, 2, 3]))


@given(st.lists(PATHS, min_size=1, max_size=12))
def test_where_states_are_kept_what_is_lost_is_what_an_engine_computes_again(prompts):
    rules = cache_profile("vllm(states=junctions, block_tokens=1)")
    engine, earlier = PrefixCacheSimulator(None, 1, states="junctions"), []
    for number, (path, prime) in enumerate(prompts):
        # a block is named by all before it, so that none comes again elsewhere
        letters = "".join(chr(0x4E00 + int(f"1{path[:end]}", 2)) for end in range(1, len(path) + 1))
        whole = [10 * ord(letter) + n for letter in letters for n in range(10)] + [number, 99]
        if prime <= len(path) and prime:
            engine.serve(whole[: 10 * prime + 1])
        read = engine.serve(whole).cached_tokens // 10 * 10  # a prime has one token more
        one = prompt(number, letters, 10, marks=(prime,) if 0 < prime <= len(path) else None)
        found = explain(one, earlier, cache=rules)
        if one.marks is None:  # else its own prime has just computed that
            assert found.lost_tokens == found.shared_tokens - read
            assert (found.cause is Cause.never_written) == (found.lost_tokens > 0)
        earlier.append(one)
    second = explain(prompt("now", "ab"), [prompt(0, "ac")], cache=rules)
    assert "from its third sight on" in second.words
