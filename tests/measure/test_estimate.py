"""`ctxreuse estimate`: what a recorded trace would save."""

import json
import random
from dataclasses import replace

import pytest
from cli_helpers import words
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import block, tokenizer_file, write_jsonl

from ctxreuse import ContextBlock
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, word_tokens
from ctxreuse.errors import BatchTooLargeError
from ctxreuse.measure.replay.policies import AS_SENT, POLICIES
from ctxreuse.measure.replay.simulate import Replay, TraceSummary, estimate
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.measure.traces.trace_files import TraceRequest


def turns(*contexts, conversation_id=None):
    return [
        TraceRequest(
            request_id=f"{conversation_id}-{number}",
            query="Why?",
            blocks=tuple(block(one, 100) for one in context),
            conversation_id=conversation_id,
            turn=number,
        )
        for number, context in enumerate(contexts)
    ]


def replay(trace):
    return Replay(trace, {one.id: one for request in trace for one in request.blocks})


contexts = st.lists(st.integers(1, 8), max_size=5, unique=True)


@examples(60)
@given(st.lists(contexts, max_size=8), st.booleans(), st.sampled_from((None, 300)))
def test_no_policy_loses_a_request_or_serves_more_than_sent(
    all_contexts, is_conversation, capacity
):
    trace = turns(*all_contexts, conversation_id="c" if is_conversation else None)
    summary = TraceSummary.of(trace)
    results = list(estimate(replay(trace), [capacity]))
    assert len(results) == len(POLICIES) * (2 if is_conversation and trace else 1)
    for result in results:
        assert {one.request_id for one in result.planned} == {one.request_id for one in trace}
        if not is_conversation:
            assert result.total.prompt_tokens == summary.block_tokens + result.word_tokens
            assert result.total.cached_tokens <= summary.repeated_tokens


def test_a_summary_counts_each_block_once_a_request():
    trace = [*turns((1, 2, 2), (2, 3), conversation_id="c"), *turns((3, 1))]
    assert TraceSummary.of(trace) == TraceSummary(
        requests=3,
        conversations=1,
        turns=2,
        blocks=3,
        distinct_tokens=300,
        block_tokens=600,
        repeated_tokens=300,
    )
    assert TraceSummary.of(trace).reuse_bound == 0.5
    assert TraceSummary.of([]).reuse_bound == 0.0


def test_other_tenants_blocks_are_no_repetition_and_sizes_less_than_what_is_sent():
    trace = [TraceRequest(number, "", (block(1, 100),), tenant=f"t{number}") for number in range(2)]
    assert TraceSummary.of(trace).repeated_tokens == 0
    heavy = [TraceRequest(n, "", (ContextBlock(id=n, text="", tokens=200_000),)) for n in range(4)]
    assert TraceSummary.of(heavy).cache_sizes() == [None, 10_000, 30_000, 100_000, 300_000]
    assert TraceSummary.of(turns((1, 2))).cache_sizes() == [None]


@pytest.fixture
def folder(tmp_path):
    with TraceRecorder(tmp_path / "recording", hash_only=True) as recorder:
        for order in ((1, 2, 3), (3, 2, 1), (2, 1, 3)):
            recorder.record([block(one, 100) for one in order], "Why?", conversation_id=order[0])
    return tmp_path / "recording"


def test_a_recording_without_texts_is_enough(run, folder):
    code, out, _ = run("estimate", folder, "--json")
    result = json.loads(out)
    assert (code, result["trace"]["reuse_bound"]) == (0, 0.666667)
    by_name = {(one["policy"], one["deduplicated"]): one for one in result["runs"]}
    assert len(by_name) == 2 * len(POLICIES)
    assert by_name["as retrieved", False]["hit_ratio"] == 0
    assert by_name["ctxreuse, online", False]["cached_tokens"] == 600
    _, out, _ = run("estimate", folder)
    assert "67% of them had been sent before" in words(out)
    assert words(out).startswith("64% fewer document tokens to compute with ctxreuse, online (one")
    _, out, _ = run("estimate", folder / "trace.jsonl", "--capacity-tokens", "100", "--json")
    assert {one["capacity_tokens"] for one in json.loads(out)["runs"]} == {None, 100}


def test_texts_are_needed_to_count_token_by_token(run, folder, tmp_path):
    code, _, err = run("estimate", folder, "--tokenizer", tokenizer_file(tmp_path))
    assert code == 2
    assert "the corpus has no text of it, only its length; leave out --tokenizer" in err


def test_a_policy_that_cannot_hold_the_trace_is_named(run, folder, monkeypatch):
    whole = Replay.measure

    def some(self, measured):
        if measured.policy.name == "papers' order, batch":
            raise BatchTooLargeError("too large")
        return whole(self, measured)

    monkeypatch.setattr(Replay, "measure", some)
    code, out, _ = run("estimate", folder)
    assert code == 0
    assert "Left out, for the trace is too large for it: papers' order, batch." in words(out)


def short_memories(requests=30):
    orders = random.Random(1)
    return turns(*(orders.sample(range(10), 6) for _ in range(requests)))


def test_words_that_ctxreuse_adds_are_computed_without_a_tokenizer_too():
    trace = [
        replace(one, blocks=tuple(replace(each, tokens=10) for each in one.blocks))
        for one in short_memories()
    ]
    summary = TraceSummary.of(trace)
    for result in estimate(replay(trace), [None]):
        said = [one.order_annotation for one in result.planned if one.order_annotation]
        by_hand = sum(DEFAULT_TEMPLATES.order_tokens(6) for _ in said)
        assert result.word_tokens == by_hand
        assert result.total.prompt_tokens == summary.block_tokens + by_hand
        assert bool(said) == (result.policy not in ("as retrieved", "CacheWeaver, online"))


def test_labels_are_words_too_and_those_of_cached_blocks_are_cached():
    trace = turns((1, 2), (1, 2, 3), conversation_id="c")
    plain = next(estimate(replay(trace[:1]), [None], [AS_SENT]))
    shown = next(one for one in estimate(replay(trace), [None], [AS_SENT]) if one.deduplicated)
    assert (plain.word_tokens, plain.total.prompt_tokens) == (0, 200)
    label = DEFAULT_TEMPLATES.label_tokens
    see_also = word_tokens("See also [BCDF], [GHJK] above.")
    assert shown.prompt_tokens == (200 + 2 * label, 300 + 3 * label + see_also)
    assert shown.cached_tokens == (0, 200 + 2 * label)
    assert shown.word_tokens == 3 * label + see_also


def test_an_estimate_says_what_is_left_where_the_best_block_stays_in_front(run, tmp_path):
    names = "abcd"
    write_jsonl(
        tmp_path / "corpus.jsonl", *({"id": one, "text": one, "tokens": 100} for one in names)
    )
    found = ("abcd", "adbc", "dcba")  # in another order behind the same best block, and another
    write_jsonl(
        tmp_path / "trace.jsonl",
        *({"request_id": n, "query": f"{n}?", "blocks": list(one)} for n, one in enumerate(found)),
    )
    served = []
    for more in ((), ("--keep-best",)):
        code, out, err = run("estimate", tmp_path / "trace.jsonl", "--json", *more)
        assert code == 0, err
        result = json.loads(out)
        by_policy = {one["policy"]: one["cached_tokens"] for one in result["runs"]}
        served.append([by_policy[name] for name in ("ctxreuse, online", "ctxreuse, batch")])
        shown = words(run("estimate", tmp_path / "trace.jsonl", *more)[1])
        assert bool(more) == ("ReusePlanner(keep_best=True)" in shown) == ("keep_best" in result)
        assert bool(more) == ("keep_best=True" in result["verdict"]["next_step"])
    assert served == [[800, 800], [400, 400]]
