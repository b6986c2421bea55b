"""What several worker processes on one engine reach, with a shared log and without."""

from __future__ import annotations

import json
from collections.abc import Sequence

from cli_helpers import run, words
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_helpers import block, write_jsonl

from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.measure.replay.policies import OURS_ONLINE
from ctxreuse.measure.replay.simulate import Replay
from ctxreuse.measure.replay.workers import estimate_workers
from ctxreuse.measure.results.results_file import Results
from ctxreuse.measure.traces.trace_files import TraceRequest

__all__ = ["run"]


def replay(*contexts: Sequence[object], conversations: int = 0) -> Replay:
    """Return a replay of contexts, as independent requests or turns of some conversations."""
    trace = [
        TraceRequest(
            request_id=str(number),
            query="Why?",
            blocks=tuple(block(one, 100) for one in context),  # type: ignore[arg-type]
            conversation_id=number % conversations if conversations else None,
            turn=number // conversations if conversations else 0,
        )
        for number, context in enumerate(contexts)
    ]
    return Replay(trace, {one.id: one for request in trace for one in request.blocks})


def cached(replayed: Replay, workers: int) -> dict[str, int]:
    found = estimate_workers(replayed, [None], workers)
    return {f"{one.policy} {one.deduplicated}": one.total.cached_tokens for one in found}


def test_workers_order_by_logs_and_take_the_turns_of_their_conversations() -> None:
    others = ["uvw", "xyz"]
    contexts = ["abc", *others, "cab", *others, "bca", *others, "acb"]
    assert cached(replay(*contexts), 2) == {
        "2 workers, no log False": 4 * 300 + 2 * 300,  # each has computed an order of its own
        "2 workers, shared log False": 4 * 300 + 3 * 300,
    }

    by_name = cached(replay("abc", "xyz", "cab", "zxy", conversations=2), 3)
    assert by_name["3 workers, no log False"] == 600  # the histories
    assert by_name["3 workers, no log True"] == 6 * (100 + DEFAULT_TEMPLATES.label_tokens)
    [*_, last] = estimate_workers(replay("abc", "xyz", "cab", "zxy", conversations=2), [None], 3)
    again = 6 * DEFAULT_TEMPLATES.label_tokens  # of the first turns, in front of the later ones
    assert last.total.prompt_tokens == 4 * 300 + last.word_tokens + again


def test_what_is_under_way_is_not_known_yet() -> None:
    assert cached(replay("abc", "cab"), 2)["2 workers, shared log False"] == 0
    assert cached(replay("abc", "xyz", "cab"), 2)["2 workers, shared log False"] == 300


contexts = st.lists(st.integers(1, 8), min_size=1, max_size=5, unique=True)


@examples(40)
@given(st.lists(contexts, max_size=10), st.integers(2, 4), st.integers(0, 2))
def test_whatever_workers_do_each_request_is_sent_once(
    all_contexts: list[list[int]], workers: int, conversations: int
) -> None:
    replayed = replay(*all_contexts, conversations=conversations)
    for result in estimate_workers(replayed, [None, 300], workers):
        assert [one.request_id for one in result.planned] == [
            one.request_id for one in replayed.trace
        ]
        if not conversations:
            blocks = 100 * sum(map(len, all_contexts))
            assert result.total.prompt_tokens == blocks + result.word_tokens


def test_the_command_compares_workers_with_one_planner_and_with_the_retriever(run, tmp_path):  # type: ignore[no-untyped-def]
    letters = "abcdef"
    write_jsonl(
        tmp_path / "corpus.jsonl",
        *({"id": one, "text": one, "tokens": 100} for one in letters),
    )
    trace = tmp_path / "trace.jsonl"
    lines = ["abc", "def", "cab", "fed", "bca", "efd", "acb", "dfe"] * 2
    write_jsonl(
        trace,
        *(
            {"request_id": str(number), "query": "Why?", "blocks": list(context)}
            for number, context in enumerate(lines)
        ),
    )
    code, out, _ = run("estimate", trace, "--workers", "3", "--json")
    by_name = {one["policy"]: one["cached_tokens"] for one in json.loads(out)["runs"]}
    assert code == 0
    alone, shared = by_name["3 workers, no log"], by_name["3 workers, shared log"]
    assert alone < shared <= by_name[OURS_ONLINE.name]
    results = tmp_path / "results.json"
    _, out, _ = run("estimate", trace, "--workers", "3", "--results", results)
    assert "with 3 workers as they are, which share no log;" in words(out)
    assert "with a shared one (an unlimited cache)" in words(out)
    assert "shared_log=SQLiteLog(path)" in words(out)
    assert {run.policy for run in Results.read(results).part()} == set(by_name)
    _, out, _ = run("estimate", trace)
    assert "workers" not in words(out)


def test_a_command_for_less_than_two_workers_is_refused(run, tmp_path):  # type: ignore[no-untyped-def]
    code, _, err = run("estimate", tmp_path, "--workers", "1")
    assert code == 2
    assert "'--workers': Input should be greater than or equal to 2" in words(err)
