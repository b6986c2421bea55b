import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import CacheRules, ContextBlock, ContextRequest, ReusePlanner, TimeToLive
from ctxreuse.errors import InvalidRequestError

OWN = CacheRules(
    name="ours",
    granularity="marks",
    minimum=30,
    marks=3,
    times_to_live=(TimeToLive("", 100, 1.25),),
    read_factor=0.1,
)
LENGTHS = {letter: 10 + 3 * number for number, letter in enumerate("abcdefgh")}


def request(letters, system=None, **options):
    blocks = [ContextBlock(id=one, text=f"text {one}", tokens=LENGTHS[one]) for one in letters]
    return ContextRequest(blocks, query="Which?", system=system, **options)


letters = st.lists(st.sampled_from("abcdefgh"), max_size=7, unique=True).map("".join)
systems = st.sampled_from((None, "Be brief.", "rule " * 200))
times = st.lists(st.integers(0, 60), min_size=12, max_size=12)


def ids(plan):
    return [block.id for block in plan.blocks]


@given(st.lists(letters, max_size=12), times, systems, st.booleans())
@examples(80)
def test_marked_plans_keep_their_blocks_and_the_limits(found, gaps, system, is_batch):
    requests = [request(one, system) for one in found]

    def plans():
        planner = ReusePlanner(cache=OWN)
        if is_batch:
            for one in requests[:3]:
                planner.plan(one, now=0)
            return list(planner.plan_batch(requests, now=1).in_input_order())
        now, made = 0, []
        for one, gap in zip(requests, gaps, strict=False):
            now += gap
            made.append(planner.plan(one, now=now))
        return made

    made = plans()
    assert [sorted(ids(plan)) for plan in made] == [sorted(one) for one in found]
    for plan in made:
        assert len(plan.marks) <= OWN.marks
        assert list(plan.marks) == sorted(set(plan.marks))
        assert not plan.marks or 0 <= plan.marks[0] <= plan.marks[-1] <= len(plan.blocks)
    again = plans()
    assert [(ids(one), one.marks) for one in made] == [(ids(one), one.marks) for one in again]


def asked(names, number=0):
    blocks = [
        ContextBlock(id=name, text=f"The text of {name}. " * (20 + 7 * number)) for name in names
    ]
    return ContextRequest(blocks, f"Which {number}?", system="Answer from the documents. " * 200)


def test_what_a_batch_has_written_behind_a_system_text_is_read_by_later_requests():
    planner = ReusePlanner(cache="openai")
    written = planner.plan_batch([asked("ab"), asked("abc")]).plans
    assert [plan.marks[-1:] for plan in written] == [(2,), (2,)]
    later = planner.plan(asked("bad"))
    assert ids(later) == ["a", "b", "d"]
    assert later.expected_cached_tokens > 0


def test_marks_are_planned_on_while_the_lengths_of_texts_are_learnt():
    planner = ReusePlanner(cache="openai")
    for number in range(40):
        names = [f"{name}{number % 5}" for name in "abc"]
        plan = planner.plan(asked(names, number % 5))
        tokens = sum(len(block.text) for block in plan.blocks) // 2
        planner.report_usage(plan, prompt_tokens=tokens + 3_000, cached_tokens=0)
    assert planner.cached_tokens(asked(["a0"])) >= 0
    assert any(planner.plan(asked("ab", number)).marks for number in range(3))


@given(st.lists(letters, max_size=10), st.booleans())
@examples(40)
def test_the_profile_of_vllm_changes_nothing(found, is_batch):
    requests = [request(one) for one in found]

    def plans(**options):
        planner = ReusePlanner(**options)
        if is_batch:
            return planner.plan_batch(requests, now=5).plans
        return [planner.plan(one, now=5) for one in requests]

    expected = plans()
    assert all(plan.marks == () for plan in expected)
    assert plans(cache="vllm") == expected


@pytest.mark.parametrize("cache", ["gemini", "openai-before-5.6", "openai", "anthropic"])
def test_what_is_shorter_than_any_minimum_is_no_reason_to_move_anything(cache):
    texts = {name: f"{name} is a long river. " * 30 for name in ("Seine", "Loire", "Po")}
    contexts = [("Seine", "Loire"), ("Po", "Loire", "Seine"), ("Loire", "Seine"), ("Po", "Seine")]
    requests = [ContextRequest([texts[name] for name in names], "Which?") for names in contexts]
    planner = ReusePlanner(cache=cache)
    batch = ReusePlanner(cache=cache).plan_batch([*requests, *requests]).in_input_order()
    for plan in [*batch, *(planner.plan(one) for one in [*requests, *requests])]:
        assert [block.text for block in plan.blocks] == [one.text for one in plan.request.blocks]
        assert plan.order_annotation is None


def test_a_batch_moves_what_reaches_a_minimum_behind_its_system_text():
    texts = {name: f"{name} is a long river. " * 200 for name in ("Seine", "Loire", "Po")}

    def moved(system: str | None) -> bool:
        contexts = [("Seine", "Loire"), ("Po", "Loire", "Seine")]
        batch = ReusePlanner(cache="gemini").plan_batch(
            [ContextRequest([texts[n] for n in one], "Which?", system=system) for one in contexts]
        )
        return any(plan.order_annotation is not None for plan in batch.plans)

    assert not moved("Be brief.")
    assert moved("Rule. " * 1_500)


@pytest.mark.parametrize("now", ["noon", float("nan"), -1])
def test_a_time_that_cannot_be_is_refused(now):
    with pytest.raises(InvalidRequestError, match="now must be a number"):
        ReusePlanner(cache=OWN).plan(request("ab"), now=now)
