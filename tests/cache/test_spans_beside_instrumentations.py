"""Beside other instrumentations, all spans together hold the tokens of a call once."""

import json

import pytest
from python_processes import python

TRACELOOP, ARIZE = "opentelemetry.instrumentation.", "openinference.instrumentation."


@pytest.mark.slow
@pytest.mark.parametrize(
    "instrumentations",
    [
        [],
        [TRACELOOP + "langchain", TRACELOOP + "openai"],
        [TRACELOOP + "llamaindex"],
        [ARIZE + "langchain", ARIZE + "llama_index"],
        [ARIZE + "openai"],
    ],
    ids=lambda names: "+".join(names) or "none",
)
def test_the_sum_over_all_spans_is_what_the_engine_counted(instrumentations):
    for one in instrumentations:
        pytest.importorskip(one, reason="needs the dependency group `instrumentations`")
    arguments = ["instrumented_calls", *instrumentations]
    ran = python(
        f"import sys, runpy; sys.argv[:] = {arguments}; "
        "runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    calls = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(calls) == 12
    for name, in_spans, counted, ours in calls:
        assert (name, in_spans, ours) == (name, counted, 1)
