"""Traces in Mooncake's format: read and simulated."""

import json
import os
from pathlib import Path

import pytest
from cli_helpers import words
from planning_helpers import block, plan_trace, write_jsonl

from ctxreuse import ReusePlanner
from ctxreuse.cache import CacheUsage
from ctxreuse.errors import InputFileError
from ctxreuse.measure.replay.hashed_trace import HashedRequest, hashed_requests, simulate_hashed
from ctxreuse.measure.replay.plan_file import read_plan
from ctxreuse.measure.traces.json_lines import read_lines
from ctxreuse.measure.traces.trace_files import read_trace

MOONCAKE = Path(os.environ.get("CTXREUSE_DATA", "absent"), "mooncake", "conversation_trace.jsonl")

LINE = {"timestamp": 5, "input_length": 1_100, "output_length": 9, "hash_ids": [0, 1, 2]}


def hashed(length, *ids):
    return HashedRequest(length, ids)


def cached(requests, *capacities, block_tokens=512):
    results = simulate_hashed(requests, capacities or (None,), block_tokens)
    return [[usage.cached_tokens for usage in one.usages] for one in results]


# reading


def test_a_line_is_a_request_whose_last_shorter_block_may_have_no_id(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", LINE, {**LINE, "timestamp": 6.5, "session": "x"})
    assert hashed_requests(read_lines(path)) == [hashed(1_100, 0, 1, 2), hashed(1_100, 0, 1, 2)]
    path = write_jsonl(tmp_path / "t.jsonl", {**LINE, "hash_ids": [0, 1]})
    assert hashed_requests(read_lines(path)) == [hashed(1_100, 0, 1)]


ANOTHER_SIZE = "if the trace has blocks of another size, say which (--block-size)"
MAKE_3 = f"1,100 tokens in blocks of 512 make 3; {ANOTHER_SIZE}"
ARE_INTEGERS = "ids are integers from 0, of at most 100 digits"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("input_length", "5", "is '5' (str); it must be int"),
        ("input_length", True, "is True (bool); it must be int"),
        ("input_length", -5, "is -5 (int); it must be an integer from 0, with at most 100 digits"),
        ("input_length", None, "is None (NoneType); it must be int"),
        ("hash_ids", [0, 1, 10**400], f"holds {'1' + '0' * 58}… (int); {ARE_INTEGERS}"),
        ("hash_ids", "012", "is '012' (str); it must be list"),
        ("hash_ids", [0, "1", 2], f"holds '1' (str); {ARE_INTEGERS}"),
        ("hash_ids", [0, -1, 2], f"holds -1 (int); {ARE_INTEGERS}"),
        ("hash_ids", [0], f"is of length 1, but {MAKE_3}"),
        ("hash_ids", [0, 1, 2, 3], f"is of length 4, but {MAKE_3}"),
    ],
)
def test_a_broken_line_names_the_value_and_the_remedy(tmp_path, field, value, problem):
    path = write_jsonl(tmp_path / "t.jsonl", LINE, "", {**LINE, field: value})
    with pytest.raises(InputFileError) as caught:
        hashed_requests(read_lines(path))
    assert str(caught.value) == f"{path}:3: field '{field}' {problem}"


# sessions


def turn(session, length, *ids, answer=5, **fields):
    line = {"session_id": session, "input_length": length, "output_length": answer}
    return {**line, "hash_ids": list(ids), **fields}


def sessions_of(tmp_path, *lines):
    return hashed_requests(read_lines(write_jsonl(tmp_path / "t.jsonl", *lines)), 16)


def test_sessions_of_whole_prompts_are_read_as_they_stand(tmp_path):
    requests = sessions_of(
        tmp_path,
        turn("a", 20, 0, 1, timestamp=0),
        turn("a", 40, 0, 2, 3, delay=4),
        turn("b", 20, 0, 1, timestamp=0),
        turn("a", 16, 0, timestamp=9),
    )
    assert [one.input_tokens for one in requests] == [20, 40, 20, 16]
    assert requests == [hashed(20, 0, 1), hashed(40, 0, 2, 3), hashed(20, 0, 1), hashed(16, 0)]


def test_a_session_whose_lines_hold_only_what_is_new_is_refused_with_the_remedy(run, tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", turn("a", 20, 0, 1), turn("a", 16, 2, delay=1))
    said = (
        f"{path}:2: it does not begin with the hash that its session's line before begins with, so "
        "it may hold only what is new; make each line a whole prompt, or leave 'session_id' out of "
        "whole prompts"
    )
    assert run("simulate", path, "--block-size", 16) == (2, "", f"ctxreuse: {said}\n")


# simulation


def test_full_blocks_behind_equal_ones_are_served():
    requests = [
        hashed(1_100, 0, 1, 2),
        hashed(1_100, 0, 1, 2),  # the last block is not full
        hashed(1_536, 0, 1, 3),
        hashed(1_536, 0, 1, 3),  # the last token is computed, and its block with it
        hashed(1_537, 0, 1, 3, 4),
        hashed(1_024, 0, 5),
        hashed(512, 1),  # known behind another block only
        hashed(0),
    ]
    assert cached(requests) == [[0, 1_024, 1_024, 1_024, 1_536, 512, 0, 0]]


def test_the_second_half_is_counted_apart_and_progress_told():
    (result,) = simulate_hashed([hashed(513, 0, 1)] * 3, (None,))
    assert result.total == CacheUsage(1_539, 1_024)
    assert result.second_half == CacheUsage(1_026, 1_024)
    steps = []
    simulate_hashed([hashed(1, 0)] * 3, (None, 5), advance=lambda: steps.append(1))
    assert len(steps) == 6


@pytest.mark.slow
@pytest.mark.skipif(not MOONCAKE.is_file(), reason="needs CTXREUSE_DATA")
def test_the_public_conversation_trace_is_served_as_an_independent_profiler_says(run):
    code, out, err = run("simulate", "--plan", MOONCAKE, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["requests"] == 12_031
    by_size = {one["capacity_tokens"]: one["second_half"]["hit_ratio"] for one in result["sizes"]}
    assert list(by_size) == [16_000, 64_000, 256_000, 1_000_000, 4_000_000, 16_000_000, None]
    profiler = [0.036, 0.045, 0.045, 0.056, 0.188, 0.356, 0.398]
    assert list(by_size.values()) == pytest.approx(profiler, abs=0.001)


# times


def test_a_timestamp_goes_from_the_trace_through_the_plan(tmp_path):
    trace = write_jsonl(tmp_path / "t.jsonl", {"request_id": 1, "blocks": ["a"], "timestamp": 4.5})
    plans = plan_trace(read_trace(trace, {"a": block("a", 5)}), ReusePlanner(), "online")
    path = write_jsonl(tmp_path / "plan.jsonl", *(one.as_json() for one in plans))
    assert [one.timestamp_ms for one in read_plan(path)] == [4.5]
    assert [one.timestamp_ms for one in read_plan(trace)] == [4.5]


@pytest.mark.parametrize("timestamp", ["now", -1, float("nan"), True, 10**400])
def test_a_timestamp_that_is_none_is_an_error_of_that_line(tmp_path, timestamp):
    path = write_jsonl(
        tmp_path / "t.jsonl", {"request_id": 1, "blocks": [], "timestamp": timestamp}
    )
    for read in (read_plan, lambda path: read_trace(path, {"a": block("a", 5)})):
        with pytest.raises(InputFileError, match=r"t.jsonl:1: field 'timestamp' is"):
            read(path)


# the commands


@pytest.fixture
def trace(tmp_path):
    lines = [
        {"timestamp": n, "input_length": 20, "output_length": 1, "hash_ids": [0, n]}
        for n in range(1, 5)
    ]
    return write_jsonl(tmp_path / "mooncake.jsonl", *lines)


def test_simulate_shows_cache_sizes_and_names_the_option_for_blocks_of_another_size(run, trace):
    code, out, err = run("simulate", "--plan", trace, "--block-size", 16)
    assert (code, err) == (0, "")
    assert words(out).startswith(
        "4 requests with 80 prompt tokens Hit ratio by cache size tokens that the cache holds "
        "all requests the second half 16,000 0.600 0.800 64,000 0.600 0.800 "
    )
    assert words(out).endswith("unlimited 0.600 0.800")

    code, out, err = run("simulate", "--plan", trace)
    assert (code, out) == (2, "")
    assert err == (
        f"ctxreuse: {trace}:1: field 'hash_ids' is of length 2, but 20 tokens in blocks of "
        f"512 make 1; {ANOTHER_SIZE}\n"
    )


def test_simulate_reads_a_hashed_trace_from_standard_input_with_sizes_of_ones_own(run, trace):
    text = Path(trace).read_text()
    sizes = ("--capacity-tokens", 16, "--capacity-tokens", 64)
    code, out, err = run(
        "simulate", "--plan", "-", "--block-size", 16, *sizes, "--json", stdin=text
    )
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["requests"], told["level"]) == (4, "block")
    assert [(one["capacity_tokens"], one["cached_tokens"]) for one in told["sizes"]] == [
        (16, 0),
        (64, 48),
    ]
    assert told["sizes"][1]["second_half"] == {
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "prefilled_tokens": 8,
        "hit_ratio": 0.8,
    }


@pytest.mark.parametrize("option", ["--corpus", "--tokenizer"])
def test_simulate_refuses_texts_beside_a_hashed_trace(run, trace, option):
    code, out, err = run("simulate", "--plan", trace, option, "c.jsonl")
    assert (code, out) == (2, "")
    assert err == (
        f"ctxreuse: {trace}: a trace in Mooncake's format has no texts; leave out {option}\n"
    )
