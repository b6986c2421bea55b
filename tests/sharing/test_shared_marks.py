"""What is written into a hosted cache is known to all planners and after a restart."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_servers import redis_server
from shared_logs import caught_up, sharing

from ctxreuse import ContextBlock, ContextRequest, Plan, ReusePlanner
from ctxreuse.pipeline import engine_options
from ctxreuse.sharing import RedisLog, SharedLog, SQLiteLog

LIFE_S = 300  # of entries in "anthropic"
LETTERS = "abcde"


@pytest.fixture(params=["a file", "Redis"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedLog]:
    if request.param == "a file":
        yield SQLiteLog(tmp_path / "sent.sqlite")
        return
    with redis_server(tmp_path) as server:
        yield RedisLog(server.url, secret="a secret of the test")


def asked(letters: str, system: str | None = None, **fields: Any) -> ContextRequest:
    blocks = [ContextBlock(id=one, text=f"text {one}", tokens=900) for one in letters]
    return ContextRequest(blocks, "Which?", system=system, **fields)


def written(planner: ReusePlanner, letters: str = "abc", now: float = 0.0) -> Plan:
    for _ in range(6):
        plan = planner.plan(asked(letters), now=now)
        if plan.marks:
            assert plan.expected_cached_tokens == 0
            return plan
    raise AssertionError("nothing was written")


def shown(plan: Plan) -> tuple[Any, ...]:
    return [one.id for one in plan.blocks], plan.marks, plan.expected_cached_tokens


def test_a_second_worker_reads_what_the_first_has_written(log):
    one, other = sharing(log, cache="anthropic")
    written(one)
    caught_up(one, other)
    plan = other.plan(asked("cab"), now=10)
    assert shown(plan) == (["a", "b", "c"], (3,), 2_700)
    assert one.plan(asked("abc", tenant="B"), now=10).expected_cached_tokens == 0


def test_planners_that_share_a_log_mark_as_one_planner_for_all(log):
    alone, planners = ReusePlanner(cache="anthropic"), sharing(log, cache="anthropic")
    read = 0
    for number, letters in enumerate(["abc", "abd", "cab", "bae", "abd", "abc", "dab"] * 3):
        plan = planners[number % 2].plan(asked(letters), now=50.0 * number)
        caught_up(*planners)
        assert shown(plan) == shown(alone.plan(asked(letters), now=50.0 * number))
        read += plan.expected_cached_tokens
    assert read > 20_000


def test_adapters_of_all_processes_plan_by_one_clock():
    assert abs(engine_options.now() - time.time()) < 60
    assert engine_options.now() <= engine_options.now()


def test_what_another_worker_has_written_expires(log):
    one, other = sharing(log, cache="anthropic")
    written(one, now=1_000)
    caught_up(one, other)
    other.plan(asked("abc"), "none", now=1_000 + LIFE_S - 1)
    caught_up(one, other)  # read by the other, it lives on
    assert one.plan(asked("abc"), now=1_000 + 2 * LIFE_S - 2).expected_cached_tokens == 2_700
    caught_up(one, other)
    assert other.plan(asked("abc"), now=1_000 + 3 * LIFE_S).expected_cached_tokens == 0


@pytest.mark.parametrize("apart", [-5_000_000, 5_000_000])
def test_nothing_is_expected_of_a_worker_whose_clock_is_another(log, apart):
    one, other = sharing(log, cache="anthropic")
    written(one, now=6_000_000)
    caught_up(one, other)
    assert other.plan(asked("abc"), now=6_000_000 + apart).expected_cached_tokens == 0


@pytest.mark.parametrize(("taken_back", "ends"), [([0], 500), ([1], 300), ([0, 1], 0), ([1, 0], 0)])
def test_what_is_taken_back_was_never_written_and_what_was_sent_is(taken_back, ends):
    for now in (ends - 1, ends + 1):
        planner = ReusePlanner(cache="anthropic")
        plans = [written(planner), planner.plan(asked("abc"), now=200)]
        assert plans[1].expected_cached_tokens == 2_700
        for number in taken_back:
            planner.evict([plans[number].request_id])
        plan = planner.plan(asked("abc"), now=max(now, 201))
        assert plan.expected_cached_tokens == (2_700 if now < ends and ends else 0)


@pytest.mark.parametrize(("blocks", "expected"), [(0, 0), (2, 0), (3, 2_700)])
def test_what_is_told_as_trimmed_is_expected_up_to_there(blocks, expected):
    planner = ReusePlanner(cache="anthropic")
    planner.trim(written(planner).request_id, blocks)
    assert planner.plan(asked("abc"), now=1).expected_cached_tokens == expected


steps = st.lists(
    st.tuples(
        st.sampled_from(["plan", "batch", "evict"]),
        st.permutations(LETTERS).map(lambda letters: "".join(letters[:3])),
        st.sampled_from([None, "Be brief."]),
        st.integers(0, 200),
    ),
    max_size=25,
)


def do(planner: ReusePlanner, wanted: list[Any], now: float) -> tuple[list[Any], float]:
    plans: list[Plan] = []
    for step, letters, system, gap in wanted:
        now += gap
        if step == "plan":
            plans.append(planner.plan(asked(letters, system), now=now))
        elif step == "batch":
            both = [asked(letters, system), asked(letters[::-1][:2] + "f", system)]
            plans += planner.plan_batch(both, now=now).plans
        elif plans:
            planner.evict([plans[gap % len(plans)].request_id])
    return [shown(plan) for plan in plans], now


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, steps)
def test_a_process_that_goes_on_from_a_file_marks_as_the_one_before(tmp_path, first, second):
    def counter(text: str) -> int:
        return 1_100

    before = ReusePlanner(cache="anthropic", token_counter=counter)
    _, now = do(before, first, 1_000)
    before.save(tmp_path / "sent")
    after = ReusePlanner.load(
        tmp_path / "sent", strict=True, cache="anthropic", token_counter=counter
    )
    assert do(after, second, now) == do(before, second, now)
