"""Files that commands read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import typer

from ctxreuse.cli import app
from ctxreuse.measure.results.measured_savings import EstimateConfig, measure_savings
from ctxreuse.measure.results.results import Results
from fuzz_targets.mutation import Target, as_json_lines, mutated

_CORPUS: list[Any] = [
    {"id": name, "title": "", "text": f"{name} says: " + f"{name} " * 30, "tokens": 40}
    for name in "abcdef"
]
_TRACE: list[Any] = [
    {
        "request_id": f"r{number}",
        "conversation_id": "c" if number > 2 else None,
        "turn": max(0, number - 3),
        "query": "Which?",
        "blocks": list(names),
    }
    for number, names in enumerate(("abc", "cab", "bde", "ab", "abf"))
]
_HASHED: list[Any] = [
    {"session_id": n % 2, "delay": n, "input_length": 99, "output_length": 600, "hash_ids": [n]}
    for n in range(2, 6)
]


def _lines(file: str, limit: int) -> list[Any]:
    """Return the first lines of a real file in `$CTXREUSE_DATA`, if that is set."""
    path = Path(os.environ.get("CTXREUSE_DATA", ""), file)
    if not os.environ.get("CTXREUSE_DATA") or not path.is_file():
        return []
    with path.open(encoding="utf-8") as opened:
        return [json.loads(line) for line, _ in zip(opened, range(limit), strict=False)]


@cache
def _traces() -> list[tuple[list[Any], list[Any]]]:
    """Return pairs of trace and corpus."""
    pairs = [(_TRACE, _CORPUS)]
    real = _lines("xquad/trace_k5.jsonl", 6)
    names = {name for line in real for name in line["blocks"]}
    corpus = [line for line in _lines("xquad/corpus.jsonl", 10_000) if line["id"] in names]
    return [*pairs, (real, corpus)] if corpus else pairs


@cache
def _written() -> tuple[list[Any], Results]:
    """Return a plan's lines, and what a command measures of the same trace."""
    with _folder({"trace": _bytes(_TRACE), "corpus": _bytes(_CORPUS)}) as folder:
        traced = ["--corpus", f"{folder}/corpus"]
        _command("plan", "--trace", f"{folder}/trace", *traced, "--mode", "online", "--dedup",
                 "-o", f"{folder}/plan")  # fmt: skip
        config = EstimateConfig(trace=f"{folder}/trace", corpus=f"{folder}/corpus")
        plan = [json.loads(line) for line in Path(folder, "plan").read_text().splitlines()]
        return plan, measure_savings(config, for_report=True)


def written_results() -> Results:
    """Return results as a command has measured them."""
    return _written()[1]


def _bytes(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@contextlib.contextmanager
def _folder(files: dict[str, bytes]) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ctxreuse-fuzz-") as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield folder


def _command(*arguments: str) -> None:
    """Run a command in this process; its output goes nowhere."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    quiet = contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], contextlib.suppress(typer.Exit):
        app(list(arguments), standalone_mode=False)


def _traced(source: Random) -> dict[str, Any]:
    trace, corpus = source.choice(_traces())
    both = source.random()
    files = {
        "trace": as_json_lines(mutated(trace, source) if both > 0.3 else trace, source),
        "corpus": as_json_lines(mutated(corpus, source) if both < 0.6 else corpus, source),
    }
    kind = source.choice(("plan", "plan", "estimate"))
    traced = ["--trace", "{}/trace", "--corpus", "{}/corpus", "-o", "{}/plan"]
    mode = ["--mode", source.choice(("online", "offline"))]
    arguments = ["plan", *traced, *mode, *source.choice(([], ["--dedup"]))]
    if kind == "plan" and source.random() < 0.5:
        arguments += ["--strategy", source.choice(("paper", "none"))]
    if kind == "estimate":
        arguments = ["estimate", "{}/trace", "--corpus", "{}/corpus", "--json"]
    return {"files": files, "arguments": arguments}


def _replayed(source: Random) -> dict[str, Any]:
    plan, _ = _written()
    files = {
        "plan": as_json_lines(mutated(plan, source), source),
        "corpus": as_json_lines(mutated(_CORPUS, source, 1), source),
    }
    kind = source.choice(("simulate", "explain"))
    more = source.choice(([], ["--json"], ["--request", "r1"] if kind == "explain" else []))
    return {
        "files": files,
        "arguments": [kind, "--plan", "{}/plan", "--corpus", "{}/corpus", *more],
    }


def _linted(source: Random) -> dict[str, Any]:
    sent = {"model": "m", "tools": ["a#1"], "tool_tokens": 9, "marks": {"turn": 1, "system": 4}}
    lines = [
        {**line, "sent": sent, "marks": [0, 1], "timestamp": 400_000 * number}
        for number, line in enumerate(_traces()[0][0])
    ]
    files = {
        "trace": as_json_lines(mutated(lines, source), source),
        "corpus": as_json_lines(mutated(_traces()[0][1], source, 1), source),
    }
    cache = source.choice(("vllm", "anthropic(minimum=1)", "openai(minimum=5)", "deepseek"))
    more = ["--cache", cache, *source.choice(([], ["--json"]))]
    if source.random() < 0.5:
        return {"files": files, "arguments": ["lint", "{}/trace", "--corpus", "{}/corpus", *more]}
    return {
        "files": files,
        "arguments": ["explain", "--plan", "{}/trace", "--corpus", "{}/corpus", *more],
    }


def _hashed(source: Random) -> dict[str, Any]:
    files = {"trace": as_json_lines(mutated(_HASHED, source), source)}
    more = source.choice(([], ["--json"], ["--block-size", "16"]))
    return {"files": files, "arguments": ["simulate", "--plan", "{}/trace", *more]}


def _reported(source: Random) -> dict[str, Any]:
    given = _traced(source)
    arguments = ["report", "{}/trace", "--corpus", "{}/corpus", "-o", "{}/page.html"]
    return {**given, "arguments": arguments}


def _run_command(given: dict[str, Any]) -> None:
    with _folder(given["files"]) as folder:
        _command(*(one.replace("{}", folder) for one in given["arguments"]))


TARGETS = {
    "trace files": Target(_traced, _run_command),
    "plan files": Target(_replayed, _run_command),
    "recorded calls": Target(_linted, _run_command),
    "hashed traces": Target(_hashed, _run_command),
    "reports": Target(_reported, _run_command, most_seconds=15.0),  # it draws charts
}
