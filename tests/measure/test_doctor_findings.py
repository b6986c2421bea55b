"""Whatever an engine has reported, each check comes to a verdict, and each problem to a remedy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cache import CacheUsage, PrefixCacheMetrics
from ctxreuse.measure.doctor.engine_findings import (
    engine_findings,
    metrics_finding,
    processes_finding,
)
from ctxreuse.measure.doctor.findings import (
    Finding,
    Verdict,
    finding_lines,
    findings_json,
    is_healthy,
)
from ctxreuse.measure.doctor.probe import (
    MOST_TOKENS,
    NOT_ASKED,
    EngineReadings,
    LogWatch,
    PromptReading,
    made_up_prompts,
)

counts = st.integers(0, 3_000)
counters = st.builds(CacheUsage, counts, counts) | st.none()
answered = st.builds(PromptReading, counts | st.none(), counts | st.none(), counters)
answers = answered | st.just(NOT_ASKED)
metrics = st.builds(
    PrefixCacheMetrics,
    prefix_cache_queries=counts | st.none(),
    prefix_cache_hits=counts | st.none(),
    block_size=st.sampled_from([None, 16, 3_584]),
    kv_cache_size_tokens=counts | st.none(),
    prefix_caching=st.none() | st.booleans(),
)
readings = st.builds(
    EngineReadings,
    host=st.just("engine:8000"),
    error=st.none() | st.just("the engine did not answer"),
    status=st.sampled_from([None, 400, 401, 404, 429, 500, 600]),
    metrics_error=st.none() | st.just("no page"),
    metrics=metrics | st.just(PrefixCacheMetrics()),
    first=answers,
    again=answers,
    half=answers,
    later=answers,
    quiet=counters,
)


@st.composite
def logs(draw: st.DrawFn) -> LogWatch | None:
    if draw(st.booleans()):
        return None
    log = LogWatch("sent.sqlite")
    log.entries, log.writers, log.appended, log.unreadable = draw(
        st.tuples(*[st.integers(0, 9)] * 4)
    )
    log.error = draw(st.none() | st.just("there is no such log"))
    return log


@given(readings, logs(), st.none() | st.integers(1, 8), st.booleans())
def test_each_check_comes_to_a_verdict_with_a_number_and_each_problem_to_a_remedy(
    read: EngineReadings, log: LogWatch | None, workers: int | None, is_asked_for: bool
) -> None:
    findings = [
        *engine_findings(read),
        metrics_finding(read, is_asked_for),
        processes_finding(read, log, workers),
    ]
    assert len({one.check for one in findings}) == len(findings) == 7
    for one in findings:
        assert one.verdict in Verdict
        assert one.found
        assert one.remedy or one.verdict is Verdict.OK
        assert len(list(finding_lines([one]))) == 1 + bool(one.remedy)
    assert findings_json(findings)["healthy"] == is_healthy(findings)


def healthy() -> EngineReadings:
    return EngineReadings(
        host="engine:8000",
        metrics=PrefixCacheMetrics(prefix_cache_queries=0, prefix_cache_hits=0),
        first=PromptReading(2_800, 0, CacheUsage(2_800, 0)),
        again=PromptReading(2_800, 2_784, CacheUsage(2_800, 2_784)),
        half=PromptReading(2_800, 1_392, CacheUsage(2_800, 1_392)),
        later=PromptReading(2_800, 2_784, CacheUsage(2_800, 2_784)),
        quiet=CacheUsage(0, 0),
        quiet_s=2.0,
    )


def found(read: EngineReadings, check: str) -> Finding:
    [one] = [one for one in engine_findings(read) if one.check == check]
    return one


def test_readings_of_a_healthy_engine_are_well_and_one_named_process_needs_no_counters() -> None:
    findings = [*engine_findings(healthy()), processes_finding(healthy(), None, None)]
    assert {one.verdict for one in findings} == {Verdict.OK}
    silent = EngineReadings(host="engine:8000")
    assert processes_finding(silent, None, 1).found == (
        "1 process uses the engine, as --workers says"
    )


@given(st.text("0123456789abcdef", min_size=8, max_size=32), st.integers(64, MOST_TOKENS))
def test_made_up_prompts_share_their_first_half_and_no_more(name: str, tokens: int) -> None:
    one, other, third, shared_part = made_up_prompts(name, tokens)
    common = round(shared_part * len(other))
    assert one[:common] == other[:common] == third[:common]
    assert len({one[common], other[common], third[common]}) == 3
    assert 0.4 < shared_part < 0.7
    assert name in one[:40]
    assert 0.9 * tokens < len(one) / 4 < 1.3 * tokens + 40


def test_an_answer_that_says_0_where_the_metrics_count_hits_is_the_problem() -> None:
    read = healthy()
    read.again = PromptReading(2_800, 0, CacheUsage(2_800, 2_784))
    assert found(read, "usage").found == (
        "an answer says 0 of 2,800 tokens cached, where /metrics have counted 2,784"
    )
    assert found(read, "prefix cache").verdict is Verdict.UNKNOWN
    read.again = PromptReading(2_800, 0, CacheUsage(2_900, 2_784))  # somebody else's, too
    assert found(read, "prefix cache").verdict is Verdict.PROBLEM
