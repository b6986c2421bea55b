"""What Prometheus is shown of planners and pools."""

import re
import sys

import httpx
import pytest
from planning_helpers import big_request
from pool_helpers import Network, asking, pool_on
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ctxreuse import ReusePlanner
from ctxreuse.cache import PrefixCacheMetrics
from ctxreuse.cache.telemetry import PlannerCollector
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.serving import EmulatedEngine


def page_of(*args, **kwargs):
    registry = CollectorRegistry()
    PlannerCollector(*args, **kwargs).register(registry)
    return generate_latest(registry).decode()


def values(page, **labels):
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if labels.items() <= sample.labels.items() and "le" not in sample.labels
    }


def used_planner(**settings):
    planner = ReusePlanner(**settings)
    planner.plan(big_request((1, 2, 3), tenant="anna"))
    plan = planner.plan(big_request((3, 1, 2), tenant="anna"))
    planner.report_usage(plan, 400, 288)
    planner.note_failure()
    planner.note_without_context(2)
    return planner


def test_expected_and_reported_hits_stand_apart_in_vllms_pairs():
    found = values(page_of(used_planner()), planner="default")
    assert found["ctxreuse_expected_prefix_cache_queries_tokens_total"] == 600
    assert found["ctxreuse_expected_prefix_cache_hits_tokens_total"] == 300
    assert found["ctxreuse_reported_prefix_cache_queries_tokens_total"] == 400
    assert found["ctxreuse_reported_prefix_cache_hits_tokens_total"] == 288
    assert found["ctxreuse_reported_prefix_cache_expected_hits_tokens_total"] == 300
    assert found["ctxreuse_reported_prefix_cache_confirmed_tokens_total"] == 288
    assert found["ctxreuse_retrieved_prefix_cache_hits_tokens"] == 0
    assert found["ctxreuse_planned_prefix_cache_hits_tokens_total"] == 300
    assert found["ctxreuse_planning_failures_total"] == 1
    assert found["ctxreuse_prompts_without_context_total"] == 2
    assert found["ctxreuse_planning_seconds_count"] == 2
    assert found["ctxreuse_planning_seconds_sum"] > 0


def test_no_engine_takes_them_for_its_own():
    assert PrefixCacheMetrics.parse(page_of(used_planner())) == PrefixCacheMetrics()


def test_in_shadow_mode_everything_is_sent_as_retrieved():
    found = values(page_of(used_planner(mode="shadow")), planner="default")
    assert found["ctxreuse_shadow_mode"] == 1
    assert found["ctxreuse_expected_prefix_cache_hits_tokens_total"] == 0
    assert found["ctxreuse_planned_prefix_cache_hits_tokens_total"] == 300


def test_parts_limits_and_the_log_are_those_of_the_planner(tmp_path):
    from ctxreuse.sharing import SQLiteLog

    planner = used_planner(shared_log=SQLiteLog(tmp_path / "log.sqlite"))
    assert planner.catch_up()
    page = page_of(planner)
    for name, size in planner.statistics().parts.items():
        found = values(page, part=name)
        assert found["ctxreuse_remembered_entries"] == size.entries
        assert found["ctxreuse_remembered_entries_limit"] == size.bound
    for name, number in planner.statistics().limits_reached.items():
        assert values(page, search=name) == {"ctxreuse_limits_reached_total": number}
    assert values(page, outcome="told") == {"ctxreuse_shared_log_entries_total": 2}


def test_labels_hold_classes_and_never_a_tenant_a_request_or_a_text():
    planner = used_planner(tenant_class=lambda tenant: "paid" if tenant == "anna" else tenant)
    planner.plan(big_request((1,), query="a secret question", tenant="ben", request_id="r-17"))
    page = page_of({"support": planner})
    assert values(page, tenant_class="paid")["ctxreuse_requests_total"] == 2
    assert values(page, tenant_class="other")["ctxreuse_requests_total"] == 1
    assert not re.search("anna|ben|secret|r-17|text of", page)


async def test_a_pool_shows_its_engines_and_their_planners():
    network = Network(a=EmulatedEngine(), b=EmulatedEngine(), c=EmulatedEngine())
    network.down.add("b")
    network.statuses["c", "/v1/chat/completions"] = 404
    async with pool_on(network, failures=1, attempts=2) as pool:
        for names in ("xyz", "zyx", "pqr"):
            await pool.complete(asking(names), replica="c")
        await pool.check()
        page = page_of({"other": ReusePlanner()}, {"main": pool})
    found = values(page, pool="main", replica="a")
    assert found["ctxreuse_replica_answered_requests_total"] == 3
    assert values(page, replica="b", state="resting") == {"ctxreuse_replica_state": 1}
    assert values(page, replica="b", state="up") == {"ctxreuse_replica_state": 0}
    assert values(page, replica="c", state="refuses") == {"ctxreuse_replica_state": 1}
    of_planner = values(page, planner="main/a")
    usage = network.engines["a"].usage
    assert of_planner["ctxreuse_reported_prefix_cache_hits_tokens_total"] == usage.cached_tokens
    assert values(page, planner="other")["ctxreuse_requests_total"] == 0


def test_openmetrics_takes_them_as_well():
    registry = CollectorRegistry()
    PlannerCollector(used_planner()).register(registry)
    page = generate_openmetrics(registry).decode()
    assert page.endswith("# EOF\n")
    assert "ctxreuse_requests_total{" in page


def test_counters_never_fall(planner):
    before = {}
    for number in range(60):
        planner.plan(big_request((number % 7, number % 3, number % 5)))
        if number % 20 == 10:
            planner.evict_tokens(300)
        found = values(page_of(planner))
        for name, value in found.items():
            if name.endswith(("_total", "_count", "_sum")):
                assert value >= before.get(name, 0), name
        before = found


def test_two_collectors_in_one_registry_are_refused():
    registry = CollectorRegistry()
    PlannerCollector(ReusePlanner()).register(registry)
    with pytest.raises(InvalidRequestError, match="make one for all planners"):
        PlannerCollector(ReusePlanner()).register(registry)


@pytest.mark.parametrize("name", ["", "a" * 65, "a\nb", 3])
def test_names_that_are_no_labels_are_refused(name):
    with pytest.raises(InvalidRequestError, match="a name in planners must be"):
        PlannerCollector({name: ReusePlanner()})


def test_wrong_kinds_are_named():
    with pytest.raises(InvalidRequestError, match="each of planners must be a ReusePlanner"):
        PlannerCollector(3)
    with pytest.raises(InvalidRequestError, match="each of pools must be an EnginePool"):
        PlannerCollector(pools={"a": httpx.Client})
    with pytest.raises(InvalidRequestError, match="registry must be a CollectorRegistry"):
        PlannerCollector().register(3)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"\[metrics\]"):
        PlannerCollector(ReusePlanner())
