"""`ctxreuse bench --base-url` on a real engine reports what that engine did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engine import Engine

from ctxreuse.cli import main
from ctxreuse.measure.results.results_file import Results

TOWNS = ("Porto", "Paris", "Prague", "Pisa")


def test_an_engine_serves_more_of_a_planned_batch(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "towns"
    data.mkdir()
    corpus = [
        {"id": town, "text": f"{town} has a river, a bridge and a market. " * 12} for town in TOWNS
    ]
    pairs = [(a, b, c) for a in TOWNS for b in TOWNS for c in TOWNS if len({a, b, c}) == 3][::3]
    queries = [
        {"id": f"q{number}", "question": f"{a}, {b} or {c}: which has a river?", "answers": [a]}
        for number, (a, b, c) in enumerate(pairs)
    ]
    for name, lines in (("corpus.jsonl", corpus), ("queries.jsonl", queries)):
        (data / name).write_text("\n".join(map(json.dumps, lines)))
    command = [
        "ctxreuse", "bench", "jsonl", "--data", str(data), "--k", "3", "-o", str(tmp_path / "out"),
        "--base-url", engine.base_url, "--part", "policies", "--policy", "ctxreuse, batch",
        "--answer-tokens", "4",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    plain, batch = Results.read(tmp_path / "out" / "results.json").runs
    assert plain.failures == batch.failures == 0
    assert len(plain.request_ids) == len(batch.request_ids) == len(pairs)
    assert plain.usages[0].cached_tokens == batch.usages[0].cached_tokens == 0
    assert batch.total.hit_ratio > plain.total.hit_ratio
    assert all(seconds > 0 for seconds in batch.first_token_s)
    assert len(batch.scores) == len(pairs)
