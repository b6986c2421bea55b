"""Ids by which requests with a common prefix are kept together."""

from dataclasses import replace

import pytest

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.planning.plan import GroupRates, group_of


def block(name: str | int) -> ContextBlock:
    return ContextBlock(id=name, text=f"text {name}")


def key(*names: str | int, secret: str = "", **request: object) -> str:
    given = ContextRequest([block(name) for name in names], **request)
    return ReusePlanner().plan(given, "none").affinity_id(secret)


def test_requests_that_begin_alike_have_the_same_id_and_no_others():
    assert key("a", "b") == key("a", "c")
    ids = {
        key("a"), key("b"), key(1), key("1"), key("a", tenant="t"), key("a", secret="s"),
        key("a", system="S"), key(),
    }  # fmt: skip
    assert len(ids) == 8
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


def test_later_turns_belong_where_the_first_turn_was():
    chat = ReusePlanner(labels=True).conversation("c1")
    first = chat.plan([block("a")], "one?").affinity_id()
    chat.record("Yes.")
    assert chat.plan([block("b")], "two?").affinity_id() == first == key("a")


def test_turns_whose_blocks_have_no_labels_belong_to_their_conversation(planner):
    ids = set()
    for name in ("c1", "c2"):
        chat = planner.conversation(name)
        first = chat.plan([block("a")], "one?").affinity_id()
        chat.record("Yes.")
        assert chat.plan([block("b")], "two?").affinity_id() == first
        ids.add(first)
    assert len(ids) == 2


def test_a_system_text_that_is_kept_on_its_own_leads_its_group():
    planner = ReusePlanner(cache="openai")
    plans = [
        replace(planner.plan(ContextRequest([block(name)], system="S"), "none"), marks=(0,))
        for name in "ab"
    ]
    assert plans[0].prompt_cache_key == plans[1].prompt_cache_key
    assert plans[0].body()["prompt_cache_key"] == plans[0].prompt_cache_key
    assert len({replace(plan, shards=64).prompt_cache_key for plan in plans}) == 2
    assert group_of(plans[0])[2] != "S", "names of groups stand in logs and messages"


def test_a_group_that_is_asked_for_too_often_is_divided_by_its_next_blocks():
    planner = ReusePlanner(cache="openai")

    def asked(second: str, now: float | None) -> str:
        request = ContextRequest([block("a"), block(second)])
        return planner.plan(request, "none", now=now).prompt_cache_key

    assert len({asked(str(n), None) for n in range(50)}) == 1
    assert len({asked(str(n), 0.0) for n in range(15)}) == 1
    keys = [asked(str(n % 5), 1.0) for n in range(45)]
    assert 1 < len(set(keys[-5:])) <= 5
    assert keys[-5:] == keys[-10:-5], "what shares more stays together"
    assert len({asked(str(n % 5), 61.0) for n in range(5)}) > 1, "as often as a minute before"
    assert len({asked(str(n % 5), 1_000.0) for n in range(5)}) == 1


@pytest.mark.parametrize(("count", "shards"), [(15, 1), (16, 2), (31, 4), (60, 4), (61, 8)])
def test_shards_are_as_many_as_the_rate_needs(count, shards):
    rates = GroupRates(15)
    assert [rates.shards(("g",), 0.0) for _ in range(count)][-1] == shards
    assert rates.shards(("other",), 0.0) == 1
