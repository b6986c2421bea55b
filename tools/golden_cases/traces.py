"""Plans of real traces, by the commands: digests and hit ratios, none of the data itself."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from golden_cases.command import command
from golden_cases.recording import Cases

CASES = Cases()
_SMALL_CACHE = "20000"
_EVERY = 100
"""After how many lines of a plan there is another digest of all lines so far."""

_MODES = ("online", "offline")
_ALONE = [f"{mode} --strategy {way}" for way in ("reuse", "paper", "none") for mode in _MODES]
_TURNS = [f"{options} --dedup" for options in _ALONE]
_BOUNDED = [f"{mode} --capacity-tokens {_SMALL_CACHE}" for mode in _MODES]
_OURS = [f"{mode} --dedup" for mode in _MODES]
_PLANS = {
    "xquad/trace_k5": [*_ALONE, *_BOUNDED, *_OURS],
    "xquad/trace_k15": [*_ALONE, *_BOUNDED],
    "mtrag/trace_k5": [*_ALONE, *_TURNS, *_BOUNDED],
    "mtrag/trace_k10": [*_ALONE, *_TURNS],
    "locomo/trace_k20": [*_ALONE, *_TURNS, *_BOUNDED],
    "locomo/trace_k100": [*_ALONE, *_OURS],  # one plan of whole conversations takes 5 s
}


def _case(trace: str, plans: list[str]) -> Callable[[], Any]:
    return lambda: {options: _planned(trace, options) for options in plans}


CASES["quick"] = _case("xquad/trace_k5", [*_ALONE[:4], "online --dedup"])
for _trace, _plans in _PLANS.items():
    CASES[_trace] = _case(_trace, _plans)
    CASES.slow.add(_trace)


def _planned(trace: str, options: str) -> dict[str, Any]:
    data = Path(os.environ["CTXREUSE_DATA"])
    requests = data / f"{trace}.jsonl"
    corpus = str(requests.with_name("corpus.jsonl"))
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan.jsonl")
        command(
            "plan", "--trace", str(requests), "--corpus", corpus, "-o", plan, "--mode",
            *options.split(),
        )  # fmt: skip
        simulated = ("simulate", "--plan", plan, "--corpus", corpus, "--json")
        unlimited = json.loads(command(*simulated))
        small = json.loads(command(*simulated, "--capacity-tokens", _SMALL_CACHE))
        return {
            **_digests(Path(plan)),
            "prompt_tokens": unlimited["prompt_tokens"],
            "hit_ratio": unlimited["hit_ratio"],
            "hit_ratio_of_a_small_cache": small["hit_ratio"],
        }


def _digests(plan: Path) -> dict[str, Any]:
    digest, after = hashlib.sha256(), []
    lines = plan.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        digest.update(line)
        if number % _EVERY == 0:
            after.append(digest.hexdigest()[:8])
    return {"sha256": digest.hexdigest(), "lines": len(lines), f"after each {_EVERY} lines": after}
