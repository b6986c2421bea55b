"""`ctxreuse bench` on a real engine reports what that engine did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engine import Engine

from ctxreuse.cli import main

TOWNS = ("Porto", "Paris", "Prague", "Pisa")


def test_an_engine_serves_more_of_a_planned_batch(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = [
        {"id": town, "text": f"{town} has a river, a bridge and a market. " * 12} for town in TOWNS
    ]
    triples = [(a, b, c) for a in TOWNS for b in TOWNS for c in TOWNS if len({a, b, c}) == 3][::3]
    trace = [
        {"request_id": f"q{number}", "query": f"Which has a river, {number}?", "blocks": list(one)}
        for number, one in enumerate(triples)
    ]
    for name, lines in (("corpus.jsonl", corpus), ("trace.jsonl", trace)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    answers = tmp_path / "answers.jsonl"
    command = [
        "ctxreuse", "bench", str(tmp_path), "--base-url", engine.base_url, "--mode", "offline",
        "--answer-tokens", "4", "--answers", str(answers), "--json",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    plain, batch = json.loads(capsys.readouterr().out)["runs"]
    assert (plain["policy"], batch["policy"]) == ("as retrieved", "ctxreuse, batch")
    assert batch["hit_ratio"] > plain["hit_ratio"]
    assert all(0 < one["first_token_p50_s"] <= one["first_token_p95_s"] for one in (plain, batch))
    assert len(answers.read_text().splitlines()) == len(triples)
