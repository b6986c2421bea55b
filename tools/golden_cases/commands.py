"""What measures: `ctxreuse record`, `estimate`, and public data; all but what clocks say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from golden_cases.command import command
from golden_cases.planning import block, contexts
from golden_cases.recording import Cases, digest
from public_data.benchmark import BenchConfig, Part, run

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


def _measured(folder: Path, **options: Any) -> dict[str, Any]:
    """Return what is measured of a data set, times aside."""
    found = run(BenchConfig(dataset="jsonl", data=folder, **options)).results
    runs = [
        [
            *(one.part, one.policy, one.strategy, one.mode, one.deduplicated),
            *(one.capacity_tokens, one.k, one.sessions),
            *(one.total.prompt_tokens, one.total.cached_tokens),
            digest([one.prompt_tokens, one.cached_tokens, one.request_ids]),
        ]
        for one in found.runs
    ]
    return {
        "trace": asdict(found.trace),
        "runs": runs,
        "tree": digest(asdict(found.tree)),
        "misses": [[one.request_id, one.cause, one.lost_tokens] for one in found.misses],
        "bounds": found.bounds,
        "settings": found.settings,
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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_data(folder)
        found = {
            level: _measured(folder, k=5, capacity_tokens=[2000], tokenizer=level)
            for level in ("words", "blocks")
        }
        alone = {"independent": True, "in_order": True, "part": [Part.policies]}
        found["independent"] = _measured(folder, requests=30, **alone)
    return found
