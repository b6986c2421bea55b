"""Clocks that jump by hours, and metrics and spans that fail, change nothing that users see."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fault_programs import PROGRAMS, Broken, Chain, Client, assert_profits, broken
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler
from prometheus_client import CollectorRegistry, Counter, generate_latest
from shared_logs import caught_up

from ctxreuse import ReusePlanner
from ctxreuse.cache.telemetry import PlannerCollector, PlannerSpans
from ctxreuse.sharing import SQLiteLog

HOURS = 3600.0
JUMPS = [5 * HOURS, -5 * HOURS]


class Clock:
    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real: Callable[[], float] = getattr(time, name)
        monkeypatch.setattr(time, name, lambda: real() + self.ahead_s)
        if name == "time":
            real_ns = time.time_ns
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(self.ahead_s * 1e9))


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("name", ["time", "monotonic"])
@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_between_calls_changes_nothing(kind, name, jump, tmp_path, monkeypatch, caplog):
    exporter = InMemorySpanExporter()
    provider = provided("", Failing(), exporter)
    log = tmp_path / "sent.sqlite"
    one = ReusePlanner(shared_log=SQLiteLog(log), tracing=PlannerSpans(provider))
    other = ReusePlanner(shared_log=SQLiteLog(log))
    ours, plain = PROGRAMS[kind](one), PROGRAMS[kind](None)
    clock = Clock(name, monkeypatch)
    assert ours.ask("abc") == plain.ask("abc")
    clock.ahead_s = jump
    assert ours.ask("cab") == plain.ask("cab")
    clock.ahead_s = 0.0
    assert ours.ask("bca") == plain.ask("bca")
    assert ours.engine.prompts == ["abc"] * 3
    clock.ahead_s = jump
    caught_up(one, other)
    assert PROGRAMS[kind](other).order("cba") == "abc"
    assert_profits(ours)
    assert ours.faults == one.savings.planning_failures == one.sharing.faults == 0
    assert not [line for line in caplog.records if line.name == "ctxreuse"]
    plans = [span for span in exporter.get_finished_spans() if span.name == "ctxreuse plan"]
    assert len(plans) >= 5
    for span in plans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0 <= span.end_time - span.start_time < 60e9


@pytest.mark.parametrize("name", ["time", "monotonic"])
@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_while_calls_wait_for_each_other_holds_none(name, jump, monkeypatch, planner):
    program = Chain(planner)
    program.with_window(0.05)
    clock = Clock(name, monkeypatch)

    def jumping(request: httpx.Request) -> None:
        clock.ahead_s += jump

    program.engine.fault = jumping
    contexts = ["abc", "cab", "bca", "xyz", "zyx", "yxz"]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(program.ask, contexts))
    assert {one.error for one in answers} == {""}
    assert sorted(map(sorted, program.engine.prompts)) == [[*"abc"]] * 3 + [[*"xyz"]] * 3
    assert len(set(program.engine.prompts)) == 2, "they are planned together"
    assert program.faults == 0


def test_spans_begin_at_no_time_that_exporters_cannot_write(monkeypatch):
    """A machine that has just started may know no better than 1970."""
    exporter = InMemorySpanExporter()
    provider = provided("", Failing(), exporter)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000)
    assert Client(ReusePlanner(tracing=PlannerSpans(provider))).order("abc") == "abc"
    assert {span.start_time for span in exporter.get_finished_spans()} == {0}


class Failing(SpanProcessor, SpanExporter, Sampler):
    """Parts of a tracing pipeline that raise while they are told to."""

    def __init__(self) -> None:
        self.is_on = False

    def _check(self, *_: Any, **__: Any) -> None:
        if self.is_on:
            raise LookupError("says: a text of a user's document")

    on_start = on_end = export = _check

    def should_sample(self, *given: Any, **named: Any) -> Any:
        self._check()
        return ALWAYS_ON.should_sample(*given, **named)

    def get_description(self) -> str:
        return "failing"

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


def provided(part: str, failing: Failing, exporter: InMemorySpanExporter) -> TracerProvider:
    sampler = failing if part == "sampler" else ALWAYS_ON
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    if part == "processor":
        provider.add_span_processor(failing)
    if part == "exporter":
        provider.add_span_processor(SimpleSpanProcessor(failing))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("part", ["sampler", "processor", "exporter"])
def test_tracing_that_fails_fails_no_call(kind, part, caplog):
    failing, exporter = Failing(), InMemorySpanExporter()
    planner = ReusePlanner(tracing=PlannerSpans(provided(part, failing, exporter)))
    ours, plain = PROGRAMS[kind](planner), PROGRAMS[kind](None)
    failing.is_on = True
    for letters in ("abc", "cab", "bca"):
        assert ours.ask(letters) == plain.ask(letters)
    failing.is_on = False
    exporter.clear()
    lines = [line.getMessage() for line in caplog.records if line.name == "ctxreuse"]
    assert len(lines) == (part != "exporter"), "of an exporter OpenTelemetry itself tells"
    assert "says: " not in "".join(lines)
    assert ours.engine.prompts == ["abc"] * 3, "what cannot be traced is planned all the same"
    assert_profits(ours)
    assert {span.name for span in exporter.get_finished_spans()} >= {"ctxreuse plan"}
    assert ours.faults == planner.savings.planning_failures == 0


@pytest.mark.parametrize("name", ["_planning", "_meter", "_exchange"])
def test_a_planner_that_cannot_be_read_hides_no_other_metric(name, caplog):
    registry = CollectorRegistry()
    Counter("users_own", "Of the application.", registry=registry).inc()
    one, other = Client(ReusePlanner()), Client(ReusePlanner())
    assert one.planner is not None
    assert other.planner is not None
    collector = PlannerCollector({"one": one.planner, "other": other.planner})
    collector.register(registry)
    for program in (one, other):
        program.order("abc")

    def shown() -> list[tuple[str, float | None]]:
        requests = "ctxreuse_requests_total"
        labels = [{"planner": planner, "tenant_class": ""} for planner in ("one", "other")]
        assert b"users_own_total 1.0" in generate_latest(registry)
        return [(one["planner"], registry.get_sample_value(requests, one)) for one in labels]

    assert shown() == [("one", 1.0), ("other", 1.0)]
    with broken(one.planner, name):
        assert shown() == [("one", None), ("other", 1.0)]
    [line] = [line.getMessage() for line in caplog.records if line.name == "ctxreuse"]
    assert line.startswith("PlannerCollector: reading metrics failed with LookupError")
    assert collector.faults > 0
    assert shown() == [("one", 1.0), ("other", 1.0)]


STATES: dict[str, Callable[[], Any]] = {
    "raises": lambda: Broken().state,
    "no list": lambda: 3,
    "other things": lambda: [SimpleNamespace(name="one")],
    "no names": lambda: [SimpleNamespace()],
}


@pytest.mark.parametrize("kind", STATES)
def test_a_pool_that_cannot_be_read_hides_no_other_metric(kind):
    registry = CollectorRegistry()
    Counter("users_own", "Of the application.", registry=registry).inc()
    pool = SimpleNamespace(planners={"engine": ReusePlanner()}, statistics=STATES[kind])
    collector = PlannerCollector(ReusePlanner(), {"pool": pool})
    collector.register(registry)
    page = generate_latest(registry)
    assert b"users_own_total 1.0" in page
    assert b'ctxreuse_requests_total{planner="pool/engine",tenant_class=""} 0.0' in page
    assert b"ctxreuse_replica_state{" not in page
    assert collector.faults == 1
