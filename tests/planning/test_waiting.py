"""Who waits for whom: a call waits for short steps of its own tenant's calls only.

And what happens to a plan, and to the bounds that all tenants share, while others go on.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from example_counts import examples
from forked import in_children
from helpers import size_of
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assert_keeps_the_promises, big_request, user
from tenant_sizes import SMALL, act, bounded, measured, steps

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.memory import conversations, prefix_index
from ctxreuse.memory.prefix_index import PartSize, PrefixIndex
from ctxreuse.memory.sent_log import Cooccurrence, SentLog
from ctxreuse.memory.tenants import Bounds
from ctxreuse.planning import tenant_planner
from ctxreuse.policy import paper, reuse

pytestmark = pytest.mark.usefixtures("paper_words")

WAIT_S = 60
MODES = ("active", "shadow")
some_ids = st.lists(st.integers(0, 5), max_size=4, unique=True)


class Held:
    """Stops a function in threads whose names begin with "slow" until it is told to go on."""

    def __init__(self, monkeypatch, owner, name):
        function = getattr(owner, name)
        self._is_inside, self._go_on = threading.Event(), threading.Event()

        def slowly(*args, **options):
            if threading.current_thread().name.startswith("slow"):
                self._is_inside.set()
                assert self._go_on.wait(WAIT_S)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, slowly)

    @contextmanager
    def during(self, work, *args):
        """Have another thread work, up to the function that is held, and finish behind this."""
        with ThreadPoolExecutor(1, thread_name_prefix="slow") as pool:
            slow = pool.submit(work, *args)
            try:
                assert self._is_inside.wait(WAIT_S)
                yield slow
            finally:
                self._go_on.set()
            slow.result(WAIT_S)


def calls_of_others(planner):
    """Call all that others do meanwhile, as a tenant that has requests and as one that has none."""
    for tenant in ("", "other"):
        new = ContextRequest(["a text", "b text"], "Why?", tenant=tenant)
        plan = planner.plan(new)
        assert_keeps_the_promises(plan)
        planner.plan_batch([new, new])
        planner.preview(new)
        planner.cached_tokens(new)
        planner.block_tokens(new.blocks, tenant)
        planner.count_tokens("text")
        chat = planner.conversation("c", tenant)
        chat.plan(["a text"])
        chat.record("Yes.")
        chat.plan(["a text"])
        planner.end_conversation("c", tenant)
        planner.trim(plan.request_id, 1, tenant)
        planner.evict([plan.request_id], tenant)
        planner.evict_tokens(1)
        plan.explain()
        planner.statistics()


BATCH = [big_request(ids) for ids in ((1, 2), (2, 3), (3, 1))]
SLOW_WORK = {
    "plan": lambda planner, new: planner.plan(new),
    "preview": lambda planner, new: planner.preview(new),
    "batch": lambda planner, new: planner.plan_batch([big_request((1,)), new]),
    "batch as retrieved": lambda planner, new: planner.plan_batch([big_request((1,)), new], "none"),
    "cached tokens": lambda planner, new: planner.cached_tokens(new),
    "block tokens": lambda planner, new: planner.block_tokens(new.blocks, "a"),
    "count": lambda planner, new: planner.count_tokens(new.blocks[0].text),
}


class Counter:
    def count(self, text):
        return len(text)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("work", SLOW_WORK)
def test_nobody_waits_for_a_slow_token_counter(monkeypatch, work, mode):
    held = Held(monkeypatch, Counter, "count")
    planner = ReusePlanner(token_counter=Counter().count, mode=mode)
    planner.plan(of_a((1, 2)))
    slow = ContextRequest(["slow text"], "Why?", tenant="a")
    with ThreadPoolExecutor(1) as pool, held.during(SLOW_WORK[work], planner, slow):
        assert pool.submit(planner.evict_tokens, 150).result(WAIT_S).tokens == 200
        pool.submit(calls_of_others, planner).result(WAIT_S)


def of_a(ids, **fields):
    return big_request(ids, tenant="a", **fields)


def later_turn():
    return of_a((1,), history=[user("Why?")], conversation_id="c")


PLACES = {
    "searching": (PrefixIndex, "search", lambda one: one.plan(of_a((3, 1)))),
    "looking up": (Cooccurrence, "members", lambda one: one.plan(of_a((3, 1)))),
    "ordering as the papers": (paper, "paper_order", lambda one: one.plan(of_a((3, 1)), "paper")),
    "recording": (PrefixIndex, "insert", lambda one: one.plan(of_a((3, 1)))),
    "recording a turn": (PrefixIndex, "extend", lambda one: one.plan(later_turn())),
    "recording a batch": (PrefixIndex, "insert", lambda one: one.plan_batch([of_a((3, 1))] * 2)),
    "searching for a batch": (
        PrefixIndex,
        "search",
        lambda one: one.plan_batch([of_a((3, 1))] * 2),
    ),
    "evicting": (PrefixIndex, "evict", lambda one: one.evict(["mine"], "a")),
    "trimming": (PrefixIndex, "trim", lambda one: one.trim("mine", 1, "a")),
}
PLACES_OF_MODES = [
    *[("active", place) for place in PLACES],
    *[("shadow", place) for place in PLACES if place != "searching for a batch"],
]


@pytest.mark.parametrize(("mode", "place"), PLACES_OF_MODES)
def test_no_other_tenant_waits_for_a_tenants_step(monkeypatch, mode, place):
    planner = ReusePlanner(mode=mode)
    planner.plan(big_request(range(9), tenant="old"))
    mine = planner.plan(of_a((1, 2), request_id="mine"))
    owner, name, work = PLACES[place]
    held = Held(monkeypatch, owner, name)
    with ThreadPoolExecutor(1) as pool, held.during(work, planner):
        pool.submit(calls_of_others, planner).result(WAIT_S)
        pool.submit(mine.explain).result(WAIT_S)


MINE = {
    "plan": lambda planner: planner.plan(of_a((1, 2))),
    "evict": lambda planner: planner.evict(["mine"]),
    "trim": lambda planner: planner.trim("mine", 1),
    "end": lambda planner: planner.end_conversation("c", "a"),
    "all tokens": lambda planner: planner.evict_tokens(10**9),
    "cached": lambda planner: planner.cached_tokens(of_a((1, 2))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", MINE)
def test_no_other_tenant_waits_for_who_waits_for_a_tenant(monkeypatch, mode, call):
    planner = ReusePlanner(mode=mode)
    planner.plan(of_a((1, 2), request_id="mine"))
    planner.plan(big_request(range(9), tenant="old"))
    held = Held(monkeypatch, Cooccurrence, "members")
    is_calling = threading.Event()

    def wait():
        is_calling.set()
        MINE[call](planner)

    with ThreadPoolExecutor(2) as pool:
        with held.during(planner.plan, of_a((3, 1))):
            waiting = pool.submit(wait)
            assert is_calling.wait(WAIT_S)
            new = big_request((1, 2), tenant="other")
            for _ in range(20):
                pool.submit(planner.plan, new).result(WAIT_S)
                pool.submit(planner.statistics).result(WAIT_S)
        waiting.result(WAIT_S)


HELD_WITHOUT_A_LOCK = {
    "batch": (tenant_planner, "arrange", lambda one: one.plan_batch(BATCH)),
    "papers' batch": (tenant_planner, "arrange", lambda one: one.plan_batch(BATCH, "paper")),
    "history": (
        conversations.Reading,
        "read",
        lambda one: one.plan(big_request((1,), history=[user("Why?")], conversation_id="c")),
    ),
    "order": (reuse, "continuation", lambda one: one.plan(big_request(range(199, -1, -1)))),
}


@pytest.mark.parametrize("place", HELD_WITHOUT_A_LOCK)
def test_not_even_the_own_tenant_waits_for_what_takes_long(monkeypatch, place, planner):
    planner.plan(big_request(range(100)))
    owner, name, work = HELD_WITHOUT_A_LOCK[place]
    held = Held(monkeypatch, owner, name)
    with ThreadPoolExecutor(1) as pool, held.during(work, planner) as slow:
        pool.submit(calls_of_others, planner).result(WAIT_S)
    result = slow.result(WAIT_S)
    for plan in getattr(result, "plans", [result]):
        assert_keeps_the_promises(plan)


@pytest.mark.parametrize(
    ("bounds", "place", "work"),
    [
        (
            Bounds(index_blocks=20),
            (PrefixIndex, "insert"),
            lambda one: one.plan(of_a((20, 21)), "none"),
        ),
        (Bounds(logged_blocks=20), (PrefixIndex, "evict_oldest"), lambda one: one.evict_tokens(10)),
        (
            Bounds(recent_blocks=20, logged_blocks=10),
            (SentLog, "forget_oldest"),
            lambda one: one.plan(of_a(range(20, 30)), "none"),
        ),
    ],
    ids=["planning", "evicting", "brought back within another bound"],
)
def test_a_busy_tenant_that_has_most_gives_it_up_when_it_is_done(monkeypatch, bounds, place, work):
    planner = bounded(bounds)
    planner.plan(of_a(range(10 if bounds.recent_blocks == 20 else 16)), "none")
    held = Held(monkeypatch, *place)
    with ThreadPoolExecutor(1) as pool, held.during(work, planner):
        other = big_request(range(5), tenant="other")
        pool.submit(planner.plan, other, "none").result(WAIT_S)
        assert any(part.entries > part.bound for part in planner.statistics().parts.values())
    assert not any(part.entries > part.bound for part in planner.statistics().parts.values())
    assert planner.cached_tokens(other) == 500


@pytest.mark.parametrize("place", [one for one in PLACES if "ing" in one])
def test_a_tenant_forgotten_while_it_plans_gets_its_plan_and_leaves_nothing(monkeypatch, place):
    planner = bounded(Bounds(tenants=2))
    tenants = planner._planning._tenants
    planner.plan(of_a((1, 2), request_id="mine", history=[], conversation_id="c"))
    owner, name, work = PLACES[place]
    held = Held(monkeypatch, owner, name)
    with held.during(work, planner) as slow:
        for other in ("b", "c"):
            planner.plan(big_request((1,), tenant=other))
        assert tenants.known("a") is None
    result = slow.result(WAIT_S)
    if place not in ("evicting", "trimming"):
        for plan in getattr(result, "plans", [result]):
            assert_keeps_the_promises(plan)
    assert parts_of(planner) == measured(tenants)
    planner.evict_tokens(10**9)
    while tenants._states:
        tenants._forget_oldest()
    assert set(parts_of(planner).values()) == {0}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forgets_the_tenant_that_was_planning_when_it_was_forked_and_no_other(monkeypatch):
    planner = bounded(SMALL)
    planner.plan(of_a((1, 2)))
    other = big_request((1, 2), tenant="other")
    planner.plan(other)
    held = Held(monkeypatch, Cooccurrence, "members")

    def child(number):
        assert_keeps_the_promises(planner.plan(of_a((2, 3))))
        assert parts_of(planner) == measured(planner._planning._tenants)
        return planner.cached_tokens(of_a((1, 2))), planner.cached_tokens(other)

    with held.during(planner.plan, of_a((3, 1))):
        assert in_children(1, child) == [(100, 200)]
    assert planner.cached_tokens(of_a((1, 2))) == 200


def parts_of(planner):
    parts = planner.statistics().parts
    return {name: size.entries for name, size in parts.items() if name != "tenants"}


@examples(40)
@given(st.lists(steps(12), min_size=2, max_size=4))
def test_whatever_threads_do_the_totals_are_the_sums_of_what_is_held_and_within_bounds(threads):
    planner = bounded(SMALL)
    tenants = planner._planning._tenants
    start = threading.Barrier(len(threads))

    def work(steps):
        start.wait(WAIT_S)
        for number, step in enumerate(steps):
            act(planner, step, number)
            assert all(size.entries >= 0 for size in planner.statistics().parts.values())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(threads)) as pool:
            for done in [pool.submit(work, steps) for steps in threads]:
                done.result(WAIT_S)
    finally:
        sys.setswitchinterval(before)
    assert parts_of(planner) == measured(tenants)
    statistics = planner.statistics()
    assert all(size.entries <= size.bound for size in statistics.parts.values())
    assert statistics.parts["tenants"] == PartSize(len(tenants._states), SMALL.tenants)
    indexes = [size_of(state.index) for state in tenants._states.values()]
    assert statistics.tokens == sum(index.tokens for index in indexes)
    assert statistics.requests == sum(index.requests for index in indexes)
    assert planner.evict_tokens(10**9).tokens == statistics.tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_history_that_is_not_read_to_its_end_is_counted(monkeypatch, mode):
    monkeypatch.setattr(conversations, "_LEAST_WORK", -1_000)
    planner = ReusePlanner(mode=mode)
    plan = planner.plan(of_a((1, 2), history=[], conversation_id="c"))
    later = of_a((1,), history=[user(plan.content)], conversation_id="c")
    assert_keeps_the_promises(planner.plan(later))
    assert planner.statistics().limits_reached["shown_blocks"] == 1


def limits(planner):
    return {name: number for name, number in planner.statistics().limits_reached.items() if number}


def test_each_bound_on_the_work_is_counted_by_its_name(monkeypatch, planner):
    planner.plan(big_request(range(64)), "none")
    assert limits(planner) == {}
    monkeypatch.setattr(paper, "_STEPS", -10_000)
    planner.plan(big_request((1, 2)), "paper")
    assert limits(planner) == {"paper_orders": 1}
    for pair in ((1, 3), (1, 4), (2, 3), (2, 4), (2, 4)):
        planner.plan(big_request(pair), "none")
    monkeypatch.setattr(prefix_index, "_VISITS", 0)
    planner.cached_tokens(big_request((1, 2, 3)))
    assert limits(planner) == {"paper_orders": 1, "greedy_paths": 1}
    monkeypatch.setattr(reuse, "_STEPS", -10_000)
    planner.preview(big_request((4, 3)))
    assert limits(planner).pop("continuations") == 1


meanwhile = st.lists(
    st.sampled_from(["evict", "evict tokens", "trim", "plan", "turn", "end", "forget tenant"]),
    max_size=5,
)


@examples(100)
@given(
    st.lists(st.tuples(some_ids, st.booleans()), min_size=1, max_size=6),
    st.sampled_from(["reuse", "paper"]),
    meanwhile,
)
def test_a_batch_loses_nothing_whatever_happens_while_it_is_arranged(contexts, strategy, events):
    planner = ReusePlanner()
    before = [planner.plan(big_request(ids, request_id=i)) for i, (ids, _) in enumerate(contexts)]
    chat = planner.conversation("c")
    first = chat.plan(big_request((0, 1)).blocks, "Why?")
    chat.record("Yes.")
    history = [user(first.content), {"role": "assistant", "content": "Yes."}]
    requests = [
        big_request(ids, history=history, conversation_id="c") if is_later else big_request(ids)
        for ids, is_later in contexts
    ]
    happens = {
        "evict": lambda: planner.evict([plan.request_id for plan in before]),
        "evict tokens": lambda: planner.evict_tokens(150),
        "trim": lambda: planner.trim(0, 1),
        "plan": lambda: planner.plan(big_request((5, 4, 3, 2, 1, 0))),
        "turn": lambda: chat.plan(big_request((2, 3)).blocks, "And?"),
        "end": lambda: planner.end_conversation("c"),
        "forget tenant": lambda: planner._planning._tenants._forget_oldest(),
    }
    arrange = tenant_planner.arrange

    def meanwhile(*args):
        arrangement = arrange(*args)
        for event in events:
            if event != "forget tenant" or planner._planning._tenants._states:
                happens[event]()
        return arrangement

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tenant_planner, "arrange", meanwhile)
        batch = planner.plan_batch(requests, strategy)
    assert sorted(batch.order) == list(range(len(requests)))
    for plan, position in zip(batch.plans, batch.order, strict=True):
        assert plan.request is requests[position]
        assert_keeps_the_promises(plan)
    size = planner.statistics()
    assert planner.evict_tokens(10**9).tokens == size.tokens
