"""Traces in Mooncake's format: read, simulated, and written from plans."""

import json
import os
from pathlib import Path

import pytest
from cli_helpers import run, words
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import block, write_jsonl

from ctxreuse import ReusePlanner
from ctxreuse.cache import BlockLevelCache, CacheUsage, PrefixCacheSimulator
from ctxreuse.errors import InputFileError, InvalidRequestError
from ctxreuse.measure.replay.hashed_trace import (
    HashedRequest,
    hashed_plan,
    hashed_requests,
    simulate_hashed,
)
from ctxreuse.measure.replay.plan_file import PlannedRequest, read_plan
from ctxreuse.measure.replay.plan_trace import plan_trace
from ctxreuse.measure.replay.prompts import prompt_blocks
from ctxreuse.measure.replay.simulate import simulate_blocks, simulate_tokens
from ctxreuse.measure.traces.json_lines import read_lines
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_trace
from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer

__all__ = ["run"]

MOONCAKE = Path(os.environ.get("CTXREUSE_DATA", "absent"), "mooncake", "conversation_trace.jsonl")

LINE = {"timestamp": 5, "input_length": 1_100, "output_length": 9, "hash_ids": [0, 1, 2]}


def hashed(length, *ids, timestamp=0, output=1):
    return HashedRequest(timestamp, length, output, ids)


def cached(requests, *capacities, block_tokens=512):
    results = simulate_hashed(requests, capacities or (None,), block_tokens)
    return [[usage.cached_tokens for usage in one.usages] for one in results]


# reading


def test_a_line_is_a_request_whose_last_shorter_block_may_have_no_id(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", LINE, {**LINE, "timestamp": 6.5, "session": "x"})
    assert hashed_requests(read_lines(path)) == [
        hashed(1_100, 0, 1, 2, timestamp=5, output=9),
        hashed(1_100, 0, 1, 2, timestamp=6.5, output=9),
    ]
    path = write_jsonl(tmp_path / "t.jsonl", {**LINE, "hash_ids": [0, 1]})
    assert hashed_requests(read_lines(path)) == [hashed(1_100, 0, 1, timestamp=5, output=9)]


ANOTHER_SIZE = "if the trace has blocks of another size, say which (--block-size)"
MAKE_3 = f"1,100 tokens in blocks of 512 make 3; {ANOTHER_SIZE}"
ARE_INTEGERS = "ids are integers from 0, of at most 100 digits"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("timestamp", None, "is None (NoneType); it must be int or float"),
        ("timestamp", "5", "is '5' (str); it must be int or float"),
        ("timestamp", -1, "is -1 (int); it must be milliseconds from 0"),
        ("timestamp", float("nan"), "is nan (float); it must be milliseconds from 0"),
        ("timestamp", float("inf"), "is inf (float); it must be milliseconds from 0"),
        ("input_length", "5", "is '5' (str); it must be int"),
        ("input_length", 5.5, "is 5.5 (float); it must be int"),
        ("input_length", True, "is True (bool); it must be int"),
        ("input_length", -5, "must be an integer from 0"),
        ("output_length", -5, "must be an integer from 0"),
        ("output_length", [5], "is [5] (list); it must be int"),
        ("hash_ids", "012", "is '012' (str); it must be list"),
        ("hash_ids", [0, "1", 2], f"holds '1' (str); {ARE_INTEGERS}"),
        ("hash_ids", [0, True, 2], f"holds True (bool); {ARE_INTEGERS}"),
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


def test_an_empty_prompt_has_no_ids(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", {**LINE, "input_length": 0})
    problem = f"is of length 3, but 0 tokens in blocks of 512 make 0; {ANOTHER_SIZE}"
    with pytest.raises(InputFileError) as caught:
        hashed_requests(read_lines(path))
    assert str(caught.value) == f"{path}:1: field 'hash_ids' {problem}"


@pytest.mark.parametrize("field", LINE)
def test_a_line_without_a_field_names_it(tmp_path, field):
    fewer = {name: value for name, value in LINE.items() if name != field}
    path = write_jsonl(tmp_path / "t.jsonl", fewer)
    with pytest.raises(InputFileError, match=f"t.jsonl:1: field '{field}' is missing; it must be "):
        hashed_requests(read_lines(path))


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_huge_numbers_are_an_error_of_that_line(tmp_path, field):
    huge = 10**400
    value = [huge] if field == "hash_ids" else huge
    path = write_jsonl(tmp_path / "t.jsonl", {**LINE, field: value})
    with pytest.raises(InputFileError, match=f"t.jsonl:1: field '{field}'"):
        hashed_requests(read_lines(path))


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


def test_caches_keep_the_newest_full_blocks_behind_equal_ones():
    requests = [hashed(1_025, 0, 1, 2), hashed(1_025, 3, 4, 5), hashed(1_025, 0, 1, 2)]
    assert cached(requests, None, 3_072, 1_536, 1_024) == [
        [0, 0, 1_024],
        [0, 0, 1_024],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert cached([hashed(1_025, 0, 1, 2), hashed(1_025, 3, 1, 2)]) == [[0, 0]]

    requests = [hashed(600, 0, 1), hashed(1_200, 0, 1, 2), hashed(600, 0, 1)]
    assert cached(requests) == [[0, 512, 512]]
    # two blocks of room: after the first prompt one of them is free
    small = [hashed(600, 0, 1), hashed(500, 2), hashed(600, 0, 1)]
    assert cached(small, 1_024) == [[0, 0, 512]]


def test_the_second_half_is_counted_apart_and_progress_told():
    (result,) = simulate_hashed([hashed(513, 0, 1)] * 3, (None,))
    assert result.total == CacheUsage(1_539, 1_024)
    assert result.second_half == CacheUsage(1_026, 1_024)
    steps = []
    simulate_hashed([hashed(1, 0)] * 3, (None, 5), advance=lambda: steps.append(1))
    assert len(steps) == 6


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([hashed(600)],), "hashes must be one for each of the 1 full blocks of the prompt, not 0"),
        (([], (-1,)), "capacity_tokens must be an integer from 0 or None, not -1 (int)"),
        (([], (None,), 0), "block_size must be an integer from 1, not 0 (int)"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(arguments, problem):
    with pytest.raises(InvalidRequestError) as caught:
        simulate_hashed(*arguments)
    assert str(caught.value) == problem


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


# writing


CORPUS = {name: block(name, tokens) for name, tokens in (("a", 5), ("b", 3), ("c", 9), ("d", 0))}


def planned(*requests):
    """Return requests of (name, ids, more) as they were retrieved."""
    trace = [
        TraceRequest(name, "Which?", tuple(CORPUS[one] for one in ids), **more)
        for name, ids, more in requests
    ]
    return plan_trace(trace, ReusePlanner(), "online", "none", conversations=True)


def ids_of(requests, **options):
    return [list(one.hash_ids) for one in hashed_plan(requests, CORPUS, **options)]


def test_ids_count_prefixes_by_their_first_appearance():
    plan = planned(("x", "abc", {}), ("y", "abd", {}), ("z", "ac", {}), ("w", "", {}))
    assert list(hashed_plan(plan, CORPUS, block_tokens=4)) == [
        # aaaa abbb cccc cccc c
        hashed(17, 0, 1, 2, 3, 4, timestamp=0),
        hashed(8, 0, 1, timestamp=1_000),
        hashed(14, 0, 5, 6, 7, timestamp=2_000),  # aaaa accc cccc cc
        hashed(0, timestamp=3_000),
    ]


def test_blocks_without_tokens_tenants_and_system_texts_part_prompts_and_turns_continue_them():
    plan = planned(("x", "bd", {}), ("y", "bdc", {}), ("z", "bc", {}))
    assert ids_of(plan, block_tokens=3) == [[0], [0, 1, 2, 3], [0, 4, 5, 6]]
    a, b = {"conversation_id": "a"}, {"conversation_id": "b"}
    plan = planned(("a0", "a", a), ("b0", "a", b), ("a1", "b", a), ("b1", "b", b))
    assert ids_of(plan, block_tokens=4) == [[0, 1], [0, 1], [0, 2], [0, 3]]
    plan = planned(("x", "b", {}), ("y", "b", {"tenant": "t"}), ("z", "b", {"system": "s"}))
    assert ids_of(plan) == [[0], [1], [2]]


def test_requests_arrive_when_the_trace_says():
    plan = planned(
        ("x", "a", {"timestamp_ms": 7}),
        ("y", "a", {"timestamp_ms": 3.6}),  # runs second, so it cannot have arrived first
        ("z", "a", {"timestamp_ms": 5}),
    )
    assert [one.timestamp_ms for one in hashed_plan(plan, CORPUS)] == [4, 5, 7]
    even = hashed_plan(plan, CORPUS, requests_per_second=8, answer_tokens=20)
    assert [(one.timestamp_ms, one.output_tokens) for one in even] == [
        (0, 20),
        (125, 20),
        (250, 20),
    ]


def test_a_timestamp_goes_from_the_trace_through_the_plan(tmp_path):
    trace = write_jsonl(tmp_path / "t.jsonl", {"request_id": 1, "blocks": ["a"], "timestamp": 4.5})
    plans = plan_trace(read_trace(trace, CORPUS), ReusePlanner(), "online")
    path = write_jsonl(tmp_path / "plan.jsonl", *(one.as_json() for one in plans))
    assert [one.timestamp_ms for one in read_plan(path)] == [4.5]
    assert [one.timestamp_ms for one in read_plan(trace)] == [4.5]


def test_a_trace_in_which_some_requests_have_no_timestamp_is_refused(tmp_path):
    lines = ({"request_id": 1, "blocks": [], "timestamp": 4}, {"request_id": 2, "blocks": []})
    path = write_jsonl(tmp_path / "t.jsonl", *lines)
    with pytest.raises(InputFileError) as caught:
        list(hashed_plan(read_plan(path), CORPUS))
    assert str(caught.value) == (
        f"{path}:2: field 'timestamp' is missing, which other requests have; give it to all of "
        "them, or say how many arrive in a second"
    )
    assert len(list(hashed_plan(read_plan(path), CORPUS, requests_per_second=1))) == 2


@pytest.mark.parametrize("timestamp", ["now", -1, float("nan"), True, 10**400])
def test_a_timestamp_that_is_none_is_an_error_of_that_line(tmp_path, timestamp):
    path = write_jsonl(
        tmp_path / "t.jsonl", {"request_id": 1, "blocks": [], "timestamp": timestamp}
    )
    for read in (read_plan, lambda path: read_trace(path, CORPUS)):
        with pytest.raises(InputFileError, match=r"t.jsonl:1: field 'timestamp' is"):
            read(path)


def test_a_prompt_that_no_engine_takes_is_refused():
    corpus = {"a": block("a", 10**99)}
    plan = [PlannedRequest("r", (("[Doc_1]", "a", None),), None, "", None, "", None, 0, None, None)]
    with pytest.raises(InputFileError, match=r"plan: the prompt has 1000.* more than 1,048,576 bl"):
        list(hashed_plan(plan, corpus))


requests = st.lists(
    st.tuples(st.lists(st.sampled_from("abcd"), max_size=5), st.sampled_from((None, "t", "u"))),
    max_size=10,
)


@examples(100)
@given(requests, st.integers(1, 7), st.none() | st.integers(0, 60), st.booleans())
def test_a_plan_is_served_alike_when_it_is_written_and_read(
    tmp_path_factory, drawn, block_tokens, capacity, is_one_conversation
):
    conversation = "c" if is_one_conversation else None
    plan = planned(
        *(
            (number, ids, {"system": system, "conversation_id": conversation})
            for number, (ids, system) in enumerate(drawn)
        )
    )
    written = list(hashed_plan(plan, CORPUS, block_tokens=block_tokens))
    path = write_jsonl(
        tmp_path_factory.mktemp("trace") / "t.jsonl", *(one.as_json() for one in written)
    )
    again = hashed_requests(read_lines(path), block_tokens)
    assert again == written
    (result,) = simulate_hashed(again, (capacity,), block_tokens)
    assert list(result.usages) == served_token_by_token(plan, block_tokens, capacity)


def served_token_by_token(plan, block_tokens, capacity):
    """Serve made-up tokens, one for each token of each block and of what stands before it."""
    numbers = {}
    cache = PrefixCacheSimulator(capacity, block_tokens)
    usages = []
    for request, (keys, tokens) in zip(plan, prompt_blocks(plan, CORPUS), strict=True):
        prompt, before = [], (request.tenant, request.system)
        for key, length in zip(keys, tokens, strict=True):
            before = (before, key)
            places = ((before, place) for place in range(length))
            prompt.extend(numbers.setdefault(place, len(numbers)) for place in places)
        usages.append(cache.serve(prompt))
    return usages


@examples(30)
@given(requests, st.integers(1, 30), st.none() | st.integers(0, 400))
def test_whole_prompts_are_served_alike_when_they_are_written_and_read(
    drawn, block_tokens, capacity
):
    plan = planned(
        *(
            (number, ids, {"system": system, "tenant": system or ""})
            for number, (ids, system) in enumerate(drawn)
        )
    )
    tokenizer = WordTokenizer()
    written = list(hashed_plan(plan, CORPUS, tokenizer, block_tokens=block_tokens))
    (result,) = simulate_hashed(written, (capacity,), block_tokens)
    cache = PrefixCacheSimulator(capacity, block_tokens)
    assert list(result.usages) == list(simulate_tokens(plan, CORPUS, cache, tokenizer))


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
    nothing = {"cached_tokens": 0, "hit_ratio": 0.0}
    assert json.loads(out) == {
        "requests": 4,
        "level": "block",
        "sizes": [
            {
                "capacity_tokens": 16,
                "prompt_tokens": 80,
                "prefilled_tokens": 80,
                **nothing,
                "second_half": {"prompt_tokens": 40, "prefilled_tokens": 40, **nothing},
            },
            {
                "capacity_tokens": 64,
                "prompt_tokens": 80,
                "cached_tokens": 48,
                "prefilled_tokens": 32,
                "hit_ratio": 0.6,
                "second_half": {
                    "prompt_tokens": 40,
                    "cached_tokens": 32,
                    "prefilled_tokens": 8,
                    "hit_ratio": 0.8,
                },
            },
        ],
    }


@pytest.mark.parametrize("option", ["--corpus", "--tokenizer"])
def test_simulate_refuses_texts_beside_a_hashed_trace(run, trace, option):
    code, out, err = run("simulate", "--plan", trace, option, "c.jsonl")
    assert (code, out) == (2, "")
    assert err == (
        f"ctxreuse: {trace}: a trace in Mooncake's format has no texts; leave out {option}\n"
    )


def test_export_writes_what_simulate_replays(run, tmp_path):
    lines = [{"id": name, "text": name, "tokens": 40} for name in "abc"]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", *lines)
    retrieved = [
        {"request_id": n, "query": "?", "blocks": list(ids), "timestamp": 100 * n}
        for n, ids in enumerate(("ab", "ba", "cba"))
    ]
    trace = write_jsonl(tmp_path / "trace.jsonl", *retrieved)
    plan, out = tmp_path / "plan.jsonl", tmp_path / "out.jsonl"
    files = ("--trace", trace, "--corpus", corpus, "--mode", "online", "-o", plan)
    assert run("plan", *files)[0] == 0
    blocks = ("--corpus", corpus, "--block-tokens", 20)
    assert run("export", "--plan", plan, *blocks, "--answer-tokens", 7, "-o", out) == (0, "", "")
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["hash_ids"] for one in written] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]
    assert [one["timestamp"] for one in written] == [0, 100, 200]
    assert {one["output_length"] for one in written} == {7}
    simulated = run("simulate", "--plan", out, "--block-size", 20, "--json")[1]
    assert json.loads(simulated)["sizes"][-1]["cached_tokens"] == 60 + 80
    # a trace is written as it was retrieved, to standard output where nothing else is said
    code, as_sent, _ = run("export", "--plan", trace, *blocks, "--requests-per-second", 2)
    sent = [json.loads(line) for line in as_sent.splitlines()]
    assert code == 0
    assert [one["hash_ids"] for one in sent] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11, 12, 13],
    ]
    assert [one["timestamp"] for one in sent] == [0, 500, 1_000]


@pytest.mark.slow
@pytest.mark.skipif(not MOONCAKE.is_file(), reason="needs CTXREUSE_DATA")
def test_a_public_trace_is_served_at_blocks_of_one_token_as_context_blocks_are():
    folder = MOONCAKE.parent.parent / "xquad"
    corpus = read_corpus(str(folder / "corpus.jsonl"))
    trace = read_trace(str(folder / "trace_k5.jsonl"), corpus)
    plan = plan_trace(trace, ReusePlanner(), "offline")
    (written,) = simulate_hashed(list(hashed_plan(plan, corpus, block_tokens=1)), (None,), 1)
    whole = list(simulate_blocks(plan, corpus, BlockLevelCache()))
    assert [one.prompt_tokens for one in written.usages] == [one.prompt_tokens for one in whole]
    differences = {
        b.cached_tokens - a.cached_tokens for a, b in zip(written.usages, whole, strict=True)
    }
    assert differences == {0, 1}  # the last token of a prompt is always computed
