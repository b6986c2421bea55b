"""What an active planner counts: what it sends, what engines report, and what it costs."""

import json
import logging
import random
from itertools import accumulate
from threading import Thread

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import assistant, big_request, plan_everything, requests_of_any_kind

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import CapacityTracker, PrefixCacheSimulator
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, word_tokens
from ctxreuse.errors import InvalidRequestError
from ctxreuse.planning.savings import PLANNING_BOUNDS_S, ReportedUsage
from ctxreuse.planning.savings_meter import RetrievedOrder, confirmed_tokens


@examples(150)
@given(requests_of_any_kind, st.booleans())
def test_what_is_counted_is_what_the_plans_say(requests, batch):
    planner = ReusePlanner()
    plans = plan_everything(planner, requests, "reuse", batch=batch)
    savings = planner.savings
    assert savings.requests == savings.planning.count == len(requests)
    assert savings.cached_as_sent == sum(plan.expected_cached_tokens for plan in plans)
    assert savings.references == sum(len(plan.references) for plan in plans)
    assert savings.changed == sum(
        tuple(plan.request.unique_blocks) != tuple(block.key for block in plan.blocks)
        for plan in plans
    )
    assert savings.cached_as_sent + savings.left_out <= savings.block_tokens
    assert 0 <= savings.cached_as_retrieved <= savings.block_tokens
    said = json.loads(json.dumps(savings.as_json()))
    assert (said["requests"], said["reported"]["confirmed_share"]) == (len(requests), None)


contexts = st.lists(st.sampled_from(range(8)), min_size=1, unique=True)
caches = "vllm", "gemini(minimum=200)", "openai(minimum=200)", "deepseek"


@examples(150)
@given(st.lists(contexts, max_size=8), st.booleans(), st.sampled_from(caches))
def test_what_the_retrievers_order_would_have_is_what_shadow_mode_counts(ids, batch, cache):
    requests = [big_request(one) for one in ids]
    active, shadow = (ReusePlanner(mode=mode, cache=cache) for mode in ("active", "shadow"))
    for planner in (active, shadow):
        plan_everything(planner, requests, "reuse", batch=batch)
    if cache in caches[2:]:  # unknown once anything differs
        assert active.savings.cached_as_retrieved == active.savings.cached_as_sent
        assert ("unknown while active" in str(active.savings)) == bool(active.savings.changed)
        return
    assert active.savings.cached_as_retrieved == shadow.savings.cached_as_sent
    assert shadow.savings.cached_as_retrieved == shadow.savings.cached_as_sent
    assert active.savings.cached_as_sent == shadow.savings.cached_if_planned
    numbers = ("requests", "changed", "block_tokens", "word_tokens", "saved_tokens", "saved_share")
    for name in numbers:
        assert getattr(active.savings, name) == getattr(shadow.savings, name), name


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 40_000])
def test_of_many_documents_it_is_an_estimate_with_its_error(capacity):
    chance = random.Random(3)
    active = ReusePlanner(capacity_tokens=capacity)
    shadow = ReusePlanner(capacity_tokens=capacity, mode="shadow")
    errors = []
    for count in (2_000, 6_000):
        for _ in range(count):
            ids = dict.fromkeys(int(chance.expovariate(1 / 400)) for _ in range(4))
            for planner in (active, shadow):
                planner.plan(big_request(ids))
        found, exact = active.savings, shadow.savings
        assert found.cached_as_sent == exact.cached_if_planned
        off = found.cached_as_retrieved - exact.cached_as_retrieved
        assert abs(off) <= 1.5 * found.error_tokens  # two standard errors: one in 20 is larger
        errors.append(found.error_share)
    assert 0 < errors[1] < errors[0] < 0.05
    assert f"(estimate for each process and tenant alone ± {errors[1]:.1%}" in str(active.savings)


def test_references_and_their_tokens_are_counted():
    planner = ReusePlanner()
    first = planner.plan(big_request((1, 2), "First?", history=[], conversation_id="c"))
    history = [*first.messages(), assistant("Yes.")]
    planner.plan(big_request((2, 4, 1), "Then?", history=history, conversation_id="c"))
    savings = planner.savings
    assert (savings.references, savings.left_out, savings.block_tokens) == (2, 200, 500)
    labels = 3 * DEFAULT_TEMPLATES.label_tokens
    assert savings.word_tokens == labels + word_tokens("See also [BCDF], [GHJK] above.")
    assert (savings.saved_tokens, savings.changed) == (200 - savings.word_tokens, 1)


@pytest.mark.parametrize("mode", ["active", "shadow"])
def test_labels_are_words_that_prompts_as_retrieved_would_not_have(mode):
    """A prompt of format_context has labels; those of blocks in the cache are in it, too."""
    planner = ReusePlanner(mode=mode)
    for ids in ((1, 2, 3), (1, 2, 4)):
        planner.plan(big_request(ids, labels=True))
    assert planner.savings.word_tokens == planner.savings.saved_tokens == 0, "none is otherwise"
    planner.plan(big_request((4, 1, 2), labels=True))
    words = planner.savings.word_tokens - DEFAULT_TEMPLATES.order_tokens(3, is_labelled=True)
    assert words == 4 * DEFAULT_TEMPLATES.label_tokens
    assert planner.savings.saved_tokens == 300 - planner.savings.word_tokens


def test_people_read_two_sentences_what_was_measured_first():
    planner = ReusePlanner()
    assert str(planner.savings) == "No request has been planned."
    planner.plan(big_request((1, 2, 3)))
    plan = planner.plan(big_request((3, 1, 2)))
    words = planner.savings.word_tokens
    estimate = (
        f"48.0% fewer context tokens to compute (estimate for each process and tenant alone, "
        f"{words} tokens of added words counted): 1 of 2 requests sent otherwise than retrieved"
    )
    assert str(planner.savings) == f"{estimate}."
    planner.report_usage(plan, 400, 300)
    measured = "As reported by the engine: 1 answer, 75.0% of their prompt tokens from its cache."
    assert str(planner.savings) == f"{measured}\n{estimate}."
    assert repr(planner.savings).startswith("Savings(requests=2, changed=1, block_tokens=600")
    planner.note_failure()
    planner.note_without_context(3)
    planner.report_primes(plan, 1, 50)
    primed = estimate.replace("48.0%", "39.7%")
    assert str(planner.savings) == (
        f"{measured}\n{primed}; 1 prime computed 50 tokens, taken off; planning failed 1 time; "
        "no context found in 3 prompts."
    )
    planner.report_usage(plan, None, None)
    assert "50 tokens, taken off; 1 answer came without usage; planning" in str(planner.savings)
    shadow = ReusePlanner(mode="shadow")
    shadow.plan(big_request((1, 2, 3)))
    assert str(shadow.savings) == (
        "0.0% fewer context tokens to compute (estimate for each process and tenant alone, 0 "
        "tokens of added words counted): 0 of 1 request would be sent otherwise than retrieved."
    )


@pytest.mark.parametrize(("rows", "words"), [("dcb dab", "0.6% more"), ("dcb cdb", "49.5% fewer")])
def test_more_or_fewer_is_what_an_engine_computes(rows, words):
    texts = {one: " ".join(f"{one}{n}" for n in range(400)) for one in "abcd"}
    planner, computed = ReusePlanner(token_counter=lambda text: len(text.split())), [0, 0]
    engines = [PrefixCacheSimulator(block_size=1) for _ in computed]
    for row in rows.split():
        found = [texts[one] for one in row]
        sent = planner.plan(ContextRequest(found)).messages()[-1]["content"]
        for n, prompt in enumerate(("\n\n".join(found), sent)):
            tokens = [hash(word) for word in prompt.split()]
            computed[n] += engines[n].serve(tokens).prefilled_tokens
    assert f"{words} context tokens to compute (estimate" in str(planner.savings)
    assert (computed[1] > computed[0]) == ("more" in words)
    assert planner.savings.saved_share == pytest.approx(1 - computed[1] / computed[0], abs=0.01)


def test_what_is_ordered_where_nobody_sees_the_prompt_is_unknown():
    planner = ReusePlanner()
    plans = [planner.provisional.plan(big_request(ids)) for ids in ((1, 2, 3), (3, 1, 2))]
    assert planner.savings.unseen == 2
    assert planner.savings.requests == planner.savings.saved_tokens == 0
    unknown = "2 contexts ordered where nobody sees the prompt."
    assert str(planner.savings) == (
        f"What is saved is unknown until an answer's usage is reported: {unknown}"
    )
    planner.report_usage((), 400, 300)
    assert str(planner.savings).endswith(f"its cache.\nWhat is saved is unknown: {unknown}")
    assert planner.provisional.forget(plans[0])
    assert not planner.provisional.forget(plans[0])
    assert planner.savings.unseen == 1


@examples(60)
@given(
    st.lists(contexts, max_size=12),
    st.sampled_from(("active", "shadow")),
    st.sampled_from((None, 300)),
)
def test_nothing_sent_otherwise_saves_nothing_whatever_was_counted(ids, mode, capacity):
    planner = ReusePlanner(mode=mode, capacity_tokens=capacity)
    for one in ids:
        plan = planner.plan(big_request(one), "none")
        planner.report_usage(plan, 900, 100)
    savings = planner.savings
    assert savings.changed == savings.saved_tokens == savings.error_tokens == 0
    assert savings.saved_share == 0


def test_what_the_engine_drops_is_gone_in_the_retrievers_order_too():
    planner = ReusePlanner()
    planner.plan(big_request((1, 2)))
    planner.evict_tokens(200)
    planner.plan(big_request((1, 2)))
    assert planner.savings.cached_as_retrieved == planner.savings.cached_as_sent == 0


@pytest.mark.parametrize("mode", ["active", "shadow"])
def test_a_tracker_leaves_as_much_room_for_either_order(mode):
    known, tracked = ReusePlanner(mode=mode, capacity_tokens=1_000), ReusePlanner(mode=mode)
    CapacityTracker(tracked, capacity_tokens=1_000)
    for seed in range(200):
        request = big_request(random.Random(seed).sample(range(8), 3))
        known.plan(request)
        tracked.report_usage(tracked.plan(request), 300)
    assert tracked.savings.saved_share == pytest.approx(known.savings.saved_share, abs=0.02)


@pytest.mark.parametrize(
    "tenant_class",
    [{"anna": "paid", "ben": "paid"}, lambda tenant: "paid" if tenant in ("anna", "ben") else 1],
)
def test_tenants_are_counted_by_class_and_never_by_name(tenant_class):
    planner = ReusePlanner(tenant_class=tenant_class)
    for tenant in ("anna", "ben", "carl"):
        plan = planner.plan(big_request((1, 2), tenant=tenant))
        planner.report_usage([plan], 250, 100)
    by_class = planner.savings.by_class
    assert {name: one.requests for name, one in by_class.items()} == {"paid": 2, "other": 1}
    assert {name: one.reported.cached_tokens for name, one in by_class.items()} == {
        "paid": 200,
        "other": 100,
    }
    written = json.dumps(planner.savings.as_json())
    assert not any(name in written for name in ("anna", "ben", "carl"))


def test_a_function_that_returns_names_fills_no_list_of_them():
    named, numbered = (
        ReusePlanner(tenant_class=function) for function in (str, lambda tenant: f"c{tenant}")
    )
    for number in range(100):
        for planner in (named, numbered):
            planner.plan(big_request((1,), tenant=str(number)))
    assert {name: one.requests for name, one in named.savings.by_class.items()} == {"other": 100}
    assert len(numbered.savings.by_class) == 17
    assert numbered.savings.by_class["other"].requests == 84
    assert numbered.savings.parts["tenant_classes"] == (17, 17)


@pytest.mark.parametrize("returned", [None, "", "x" * 65, "a\nb", 7, KeyError("anna")])
def test_a_class_that_is_none_counts_as_other(returned, caplog):
    def class_of(tenant):
        if isinstance(returned, Exception):
            raise returned
        return returned

    planner = ReusePlanner(tenant_class=class_of)
    for _ in range(3):
        planner.plan(big_request((1,), tenant="anna"))
    assert planner.savings.by_class["other"].requests == 3
    assert len(caplog.records) == 1
    assert "anna" not in caplog.text


def test_without_classes_there_are_none():
    planner = ReusePlanner()
    planner.plan(big_request((1,), tenant="anna"))
    assert planner.savings.by_class == {}
    with pytest.raises(InvalidRequestError, match="tenant_class must be a function"):
        ReusePlanner(tenant_class="paid")


def test_copies_have_the_classes_and_no_counts():
    planner = ReusePlanner(tenant_class={"a": "paid"})
    planner.plan(big_request((1,), tenant="a"))
    sibling = planner.sibling()
    assert sibling.savings.requests == 0
    sibling.plan(big_request((1,), tenant="a"))
    assert sibling.savings.by_class["paid"].requests == 1


class TestReportedUsage:
    def test_it_stands_beside_what_was_expected(self):
        planner = ReusePlanner()
        planner.plan(big_request((1, 2)))
        plans = [planner.plan(big_request((1, 2))), planner.plan(big_request((2, 3)))]
        planner.report_usage(plans, 900, 250, completion_tokens=5, seconds=0.5)
        expected = sum(plan.expected_cached_tokens for plan in plans)
        assert planner.savings.reported == ReportedUsage(1, 0, 900, 250, expected, 200)
        assert planner.savings.reported.hit_ratio == 250 / 900

    def test_what_is_not_reported_is_unknown_until_something_was(self):
        planner = ReusePlanner()
        plan = planner.plan(big_request((1, 2)))
        planner.report_usage(plan, None, 5)
        planner.report_usage(plan, 300)
        assert planner.savings.reported == ReportedUsage(unreported=2)
        planner.report_usage(plan, 300, 200)
        planner.report_usage(plan, 300)  # vLLM leaves out a 0
        assert planner.savings.reported == ReportedUsage(2, 2, 600, 200)

    @pytest.mark.parametrize("wrong", [-1, True, 1.5, "12", float("nan"), 2**60, [1]])
    def test_what_cannot_be_right_is_not_counted(self, wrong):
        planner = ReusePlanner()
        plan = planner.plan(big_request((1, 2)))
        planner.report_usage(plan, wrong, 5)
        assert planner.savings.reported == ReportedUsage(unreported=1)
        planner.report_usage(plan, 300, 100)
        planner.report_usage(plan, 300, wrong)
        planner.report_usage(plan, 300, 301)  # more than were sent
        assert planner.savings.reported == ReportedUsage(1, 3, 300, 100)

    @given(*[st.integers(0, 1_000)] * 4)
    def test_what_is_confirmed_is_part_of_what_is_expected(self, expected, before, prompt, cached):
        confirmed = confirmed_tokens(expected, before, prompt, cached)
        assert 0 <= confirmed <= expected
        if 0 < prompt <= cached or 0 < expected + before <= min(cached, prompt):
            assert confirmed == expected
        if expected + before <= prompt:
            assert confirmed <= cached

    def test_a_prompt_without_a_plan_counts_as_well(self):
        planner = ReusePlanner(tenant_class={"a": "paid"})
        planner.report_usage((), 40, 16, tenant="a")
        assert planner.savings.by_class["paid"].reported == ReportedUsage(1, 0, 40, 16)


class TestWarning:
    def answered(self, reports, planner=None, system=None):
        """Plan one request again and again; report as many cached tokens as a function says."""
        planner = planner or ReusePlanner()
        planner.plan(big_request((1, 2), system=system))
        for number in range(len(reports)):
            plan = planner.plan(big_request((1, 2), system=system))
            assert plan.expected_cached_tokens == 200
            planner.report_usage(plan, 300, reports[number])
        return planner

    def lines(self, caplog):
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        return [record.getMessage() for record in caplog.records]

    def test_it_comes_once_after_two_hundred_answers(self, caplog):
        planner = self.answered([16] * 199)
        assert not caplog.records
        self.answered([16] * 601, planner)
        [line] = self.lines(caplog)
        assert "of 40000 tokens that a planner expected" in line
        assert "200 answers report 3200" in line
        assert "another process may share this engine" in line
        assert "shared_log" in line
        assert "ctxreuse doctor" in line

    def test_none_comes_where_the_cache_holds_what_is_expected(self, caplog):
        chance = random.Random(1)
        self.answered([192] * 1_000)
        self.answered([chance.choice((0, 200, 200, 200)) for _ in range(1_000)])
        self.answered([300] * 100 + [0] * 90 + [300] * 210)
        assert not caplog.records

    def test_it_comes_where_that_ends(self, caplog):
        self.answered([200] * 1_000 + [0, 60] * 200)
        assert len(caplog.records) == 1

    def test_what_is_cached_in_some_prompts_hides_no_others(self, caplog):
        planner = ReusePlanner()
        for request in (big_request((1, 2)), big_request(range(10, 200))):
            planner.plan(request)
        for _ in range(200):
            planner.report_usage(planner.plan(big_request((1, 2))), 300, 8)
        planner.report_usage(planner.plan(big_request(range(10, 200))), 20_000, 19_000)
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("reported", [None, 0])
    def test_an_engine_without_any_hit_has_another_remedy(self, caplog, reported):
        self.answered([reported] * 600)
        [line] = self.lines(caplog)
        assert "no cached token in 200 answers, where a planner expected 40000" in line
        assert "--enable-prefix-caching" in line
        assert "another process" not in line

    def test_a_provider_without_any_hit_has_another_remedy_than_an_engine(self, caplog):
        planner = ReusePlanner(cache="gemini(minimum=64)")
        for _ in range(300):
            planner.report_usage(planner.plan(big_request((1, 2))), 300, 0)
        [line] = self.lines(caplog)
        assert "by the rules of 'gemini'" in line
        assert "vLLM" not in line

    def test_small_expectations_are_no_evidence(self, caplog):
        planner = ReusePlanner()
        for _ in range(500):
            plan = planner.plan(ContextRequest(["a short text"], "Which?"))
            planner.report_usage(plan, 300, 0)
        assert plan.expected_cached_tokens > 0
        assert not caplog.records

    def test_a_system_text_that_is_cached_hides_nothing(self, caplog):
        self.answered([90] * 200, system="Be brief. " * 40)
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("cached", [0, 16])
    @pytest.mark.parametrize("cache", ["vllm", "vllm(states=junctions)"])
    def test_a_model_that_keeps_states_is_thought_of_unless_known(self, cached, cache, caplog):
        planner = ReusePlanner(cache=cache)
        for number in range(3):  # from the third sight on
            planner.plan(big_request((1, 2), query=f"{number}"))
        self.answered([cached] * 200, planner)
        [line] = self.lines(caplog)
        assert ("its model keeps states" in line) == (cache == "vllm")

    def test_a_planner_with_a_log_is_not_told_to_take_one(self, caplog, tmp_path):
        from ctxreuse.sharing import SQLiteLog

        planner = ReusePlanner(shared_log=SQLiteLog(tmp_path / "log.sqlite"))
        self.answered([16] * 200, planner)
        [line] = self.lines(caplog)
        assert "another process may share this engine" in line
        assert "shared_log" not in line


class TestPlanningTime:
    @given(st.lists(st.floats(1e-6, 100), min_size=1, max_size=30))
    def test_each_time_is_counted_in_its_bucket(self, times):
        meter = ReusePlanner()._meter
        for one in times:
            meter._took(one)
        time = meter.savings().planning
        assert time.count == sum(time.buckets) == len(times)
        assert time.max_s == max(times)
        up_to = [sum(one <= bound for one in times) for bound in PLANNING_BOUNDS_S]
        assert [*accumulate(time.buckets)] == [*up_to, len(times)]

    def test_a_batch_counts_each_request_with_its_share(self):
        planner = ReusePlanner()
        planner.plan_batch([big_request((1, 2)), big_request((2, 3)), big_request((1, 3))])
        planner.plan_batch([])
        time = planner.savings.planning
        assert time.count == 3
        assert time.max_s == pytest.approx(time.total_s / 3)


def test_threads_lose_no_count():
    planner = ReusePlanner(tenant_class=lambda tenant: tenant + "!")

    def work(number):
        for turn in range(50):
            plan = planner.plan(big_request((turn, number), tenant=f"t{number % 3}"))
            planner.report_usage(plan, 300, 100)
            planner.note_without_context(1)

    threads = [Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    savings = planner.savings
    assert savings.requests == savings.planning.count == savings.prompts_without_context == 400
    assert savings.reported.cached_tokens == 40_000
    assert sum(one.requests for one in savings.by_class.values()) == 400


def test_a_plan_may_be_taken_back_while_others_are_counted(monkeypatch):
    """The collector may close a stream anywhere, which takes its plan back."""
    planner, follow = ReusePlanner(), RetrievedOrder.follow
    plans = [planner.plan(big_request((1, number))) for number in range(9)]
    both = lambda *given: (planner.forget(plans[-1]), follow(*given))[1]  # noqa: E731
    monkeypatch.setattr(RetrievedOrder, "follow", both)
    assert planner.savings.requests == 8


def test_tracing_that_fails_changes_no_plan(caplog):
    class Broken:
        def planned(self, plans, seconds):
            raise ValueError("a secret")

        def answered(self, call):
            raise ValueError("a secret")

    planner = ReusePlanner(tracing=Broken())
    plan = planner.plan(big_request((1, 2)))
    planner.report_usage(plan, 300, 100)
    assert planner.savings.requests == planner.savings.reported.answers == 1
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text
    with pytest.raises(InvalidRequestError, match="tracing must be"):
        ReusePlanner(tracing=3)


def test_what_another_planner_has_sent_counts_in_the_retrievers_order(tmp_path):
    from ctxreuse.sharing import SQLiteLog

    path = tmp_path / "log.sqlite"
    one, other = (ReusePlanner(shared_log=SQLiteLog(path)) for _ in range(2))
    one.plan(big_request((1, 2), tenant="a", system="Be brief."))
    assert one.catch_up()
    assert other.catch_up()
    other.plan(big_request((1, 2, 3), tenant="a", system="Be brief."))
    assert other.savings.cached_as_retrieved == other.savings.cached_as_sent == 200
