"""What a caller can send takes work that grows with its size, and no faster.

`benchmarks/input_size.py` prepares the inputs and prints their times; here their steps are counted.
"""

import sys
import time
from pathlib import Path

import pytest
from steps import growth

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from ctxreuse.measure.replay import explain_plan
from ctxreuse.memory import prefix_index
from ctxreuse.policy import paper, reuse
from input_size import CASES

LINEAR = 2.6
SIZES = {
    "retried_first_turn": 300,
    "many_labels": 20_000,
    "tied_paths": 200,
    "tied_orders": 200,
    "tied_paper_paths": 200,
    "batch_of_shuffled_contexts": 50,
    "batch_behind_a_long_context": 200,
    "trimmed_subtree": 500,
    "trimmed_repetitions_of_a_prompt": 300,
    "evicted_conversation": 500,
    "room_for_a_large_request": 500,
    "repeated_documents": 40,
    "pieces_of_one_agent": 500,
    "shown_again": 100,
    "results_of_many_tools": 80,
    "prompts_of_many_tenants": 400,
    "calls_given_up": 100,
    "ends_of_blocks": 100,
    "workflow_chain": 60,
    "workflow_side_by_side": 60,
    "recorded_prompts": 200,
    "dropped_cache_blocks": 200,
    "growing_cache_chain": 200,
    "followed_prompt": 20,
    "cache_blocks_of_all_sizes": 100,
    "explained_prompts": 150,
    "simulated_conversations": 200,
    "hashed_prompts": 200,
    "template_of_braces": 1_000,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_the_work_grows_no_faster_than_the_input(name, size, monkeypatch):
    for searching in (prefix_index, paper, reuse):  # small inputs are enough to reach the bound
        monkeypatch.setattr(searching, "_STEPS", 1_000)
    monkeypatch.setattr(prefix_index, "_STEPS_A_BATCH", 1_000)
    monkeypatch.setattr(explain_plan, "_MOST_COMPARED", 50)
    prepare, _ = CASES[name]
    assert growth(lambda number: prepare(number).call, size) < LINEAR


def seconds(call):
    """Return the processor's time for a call, the best of three."""
    times = []
    for _ in range(3):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return min(times)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("labels_of_metrics", 3_000),
        ("blank_subquestion", 3_000),
        ("edited_document", 50_000),
        ("unbroken_document", 20_000),
    ],
)
def test_what_libraries_do_at_once_grows_no_faster_than_the_input(name, size):
    prepare, _ = CASES[name]
    smaller, larger = seconds(prepare(size).call), seconds(prepare(8 * size).call)
    assert larger < 28 * smaller  # 8 times if linear, 64 times if quadratic
