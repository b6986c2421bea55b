"""What measures: `ctxreuse record`, `estimate`, and public data; all but what clocks say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from golden_cases.command import command
from golden_cases.planning import block, contexts
from golden_cases.recording import Cases, digest
from public_data.commands import main

CASES = Cases()
_PROGRAM = """
import httpx, llamaindex_helpers, openai
from golden_cases import langchain_models, letters
from ctxreuse import request_context
from ctxreuse.serving import EmulatedEngine

first, other = langchain_models.LetterRetriever(), llamaindex_helpers.LetterRetriever()
for word in ("abc", "cab", "", "bd"):
    first.invoke(word)
with request_context(tenant="one", conversation_id="c"):
    first.invoke("abc")
    other.retrieve("xb")
    first.batch(["ab"])
client = openai.OpenAI(
    base_url="http://engine/v1",
    api_key="none",
    http_client=httpx.Client(transport=EmulatedEngine().transport(httpx)),
)
for word in ("abc", "cab"):
    text = "\\n\\n".join([*(letters.text_of(letter) for letter in word), "Which?"])
    client.chat.completions.create(model="emulated", messages=[{"role": "user", "content": text}])
"""


def _results(file: Path) -> dict[str, Any]:
    """Return what measured results say, times aside."""
    said = json.loads(file.read_text(encoding="utf-8"))
    runs = [
        [
            *(run[name] for name in ("part", "policy", "strategy", "mode", "deduplicated")),
            *(run[name] for name in ("capacity_tokens", "k", "sessions")),
            sum(run["prompt_tokens"]),
            sum(run["cached_tokens"]),
            digest([run["prompt_tokens"], run["cached_tokens"], run["request_ids"]]),
        ]
        for run in said["runs"]
    ]
    return {
        "trace": said["trace"],
        "runs": runs,
        "tree": digest(said["tree"]),
        "misses": [[one["request_id"], one["cause"], one["lost_tokens"]] for one in said["misses"]],
        "bounds": said["bounds"],
        "settings": said["settings"],
    }


@CASES.takes_long
def recorded() -> Any:
    """What is written down of a program that uses LangChain, LlamaIndex and OpenAI's client."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(_PROGRAM, encoding="utf-8")
        for source in ("langchain", "llamaindex", "openai"):
            output = Path(folder) / source
            arguments = ["record", "-o", str(output), "--source", source, str(program)]
            subprocess.run(
                [sys.executable, "-m", "ctxreuse", *arguments],
                capture_output=True,
                check=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            estimated = json.loads(command("estimate", str(output), "--json"))
            for run in estimated["runs"]:
                del run["planning_ms"]
            found[source] = {
                "corpus": digest((output / "corpus.jsonl").read_text(encoding="utf-8")),
                # all but the times
                "trace": re.sub(
                    r'"timestamp": [\d.]+, ',
                    "",
                    (output / "trace.jsonl").read_text(encoding="utf-8"),
                ),
                "estimate": estimated,
            }
    return found


def _write_data(folder: Path) -> None:
    used = contexts(60, seed=40, size=5)
    numbers = sorted({number for context in used for number in context})
    corpus = [{"id": f"b{number}", "text": block(number).text * 5} for number in numbers]
    questions: list[dict[str, Any]] = []
    for number, context in enumerate(used):
        asked = " ".join(block(one).text for one in context[:2])
        line = {"id": str(number), "question": asked, "gold": [f"b{context[0]}"]}
        if number % 2:
            line |= {"conversation_id": f"c{number % 7}", "turn": number // 7}
        questions.append(line)
    for name, lines in (("corpus", corpus), ("queries", questions)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


@CASES.takes_long
def benched() -> Any:
    """All parts of the benchmark on public data, by blocks and by tokens."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_data(folder)
        for level in ("words", "blocks"):
            output = folder / level
            options = ["--k", "5", "--capacity-tokens", "2000", "--tokenizer", level]
            command("bench", "jsonl", "--data", name, *options, "-o", str(output), main=main)
            found[level] = _results(output / "results.json")
        independent = ["--independent", "--in-order", "--requests", "30", "--part", "policies"]
        options = [*independent, "-o", str(folder / "more")]
        command("bench", "jsonl", "--data", name, *options, main=main)
        found["independent"] = _results(folder / "more" / "results.json")
    return found
