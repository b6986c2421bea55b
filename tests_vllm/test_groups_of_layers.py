"""What vLLM's own cache manager hits, for models whose layers keep what they know in other ways."""

from __future__ import annotations

import base64
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kv_event_helpers import held_tokens
from vllm_environment import HOME, PYTHON

from ctxreuse import ReusePlanner
from ctxreuse.cache import PrefixCacheSimulator
from ctxreuse.cache.kv_events.engine_blocks import EngineBlocks, HeldRequests, RecordedRequests
from ctxreuse.cache.kv_events.event_stream import decode_batch
from ctxreuse.rules.cache_rules import States

PROGRAM = Path(__file__).resolve().parent.parent / "tools" / "cache_manager.py"
PROMPTS = 200
LOOKED_UP = 3
PLENTY = 60_000


def random_prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts that share documents, and which earlier ones to look up before each."""
    draw = random.Random(2)
    lengths = (100, 160, 320, 528, 700, 1_056)
    documents = [[draw.randrange(1_000) for _ in range(draw.choice(lengths))] for _ in range(12)]
    prompts, asked = [], []
    for number in range(PROMPTS):
        chosen = draw.sample(documents, draw.randint(1, 5))
        question = [draw.randrange(1_000) for _ in range(draw.choice((1, 2, 16, 33)))]
        prompts.append([*(token for one in chosen for token in one), *question])
        asked.append(draw.sample(range(number), min(LOOKED_UP, number)))
    return prompts, asked


CASES: list[tuple[list[str], int, int]] = [
    (["full"], 16, 1_000),
    (["full", "window"], 16, PLENTY),
    (["full", "window"], 16, 1_000),
    (["full", "recurrent"], 32, PLENTY),
    (["full", "recurrent"], 32, 700),
    (["full", "window", "short window"], 16, 1_500),
    (["full", "recurrent", "window"], 32, 900),
]
"""The groups, tokens of a block, and blocks of the cache."""


@pytest.fixture(scope="module")
def told() -> list[list[dict[str, Any]]]:
    """What vLLM says of each case."""
    if not (HOME / "installed").exists():
        pytest.skip("vLLM is not installed here: make vllm")
    prompts, asked = random_prompts()
    cases = [
        {"groups": groups, "block": block, "blocks": blocks, "prompts": prompts, "asked": asked}
        for groups, block, blocks in CASES
    ]
    run = subprocess.run(
        [PYTHON, PROGRAM],
        input=json.dumps(cases),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=300,
    )
    answer: list[list[dict[str, Any]]] = json.loads(run.stdout)
    return answer


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_held_and_simulated_is_what_the_engine_hits(
    told: list[list[dict[str, Any]]], number: int
) -> None:
    groups, block, blocks = CASES[number]
    held = EngineBlocks()
    requests = HeldRequests(RecordedRequests(ReusePlanner(), 1), held, settle_s=0.0)
    states: States = "everywhere" if groups == ["full"] else "junctions"
    cache = PrefixCacheSimulator(None, block, states=states)
    simulated = []
    prompts, asked = random_prompts()
    for prompt, earlier, result in zip(prompts, asked, told[number], strict=True):
        # a prompt's last token is always computed
        assert [held_tokens(held, prompts[one][:-1]) for one in earlier] == result["found"]
        assert held_tokens(held, prompt[:-1]) == result["hit"]
        batch = decode_batch(base64.b64decode(result["events"]))
        assert batch is not None
        assert batch.skipped == 0
        assert all(requests.apply(event) for event in batch.events)
        simulated.append(cache.serve(prompt).cached_tokens == result["hit"])
    if blocks == PLENTY:  # windows that overlap can be read between their ends, too
        assert sum(simulated) >= 0.9 * PROMPTS
        assert all(simulated) or "window" in groups
