"""The README's examples run as they stand; an emulated engine answers instead of a server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import mem0_stores  # noqa: F401  # before mem0, which reads its environment at import
import pytest

from ctxreuse.serving import EmulatedEngine

README = Path(__file__).resolve().parent.parent / "README.md"
MODEL = "smollm2-135m-instruct"
KNOWN = {"Mem0": "Alice", "Chain-of-Agents": "in Porto"}


def example(heading: str) -> str:
    """Return the Python code under a heading."""
    section = README.read_text().split(f"\n### {heading}\n", 1)[1].split("\n### ", 1)[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EmulatedEngine:
    """An engine that answers whatever goes through httpx, at any address."""
    emulated = EmulatedEngine(model=MODEL, answer="The Seine.")
    transport = emulated.transport()
    monkeypatch.setenv("CTXREUSE_BASE_URL", "http://engine.invalid/v1")
    monkeypatch.setattr(
        httpx.HTTPTransport, "handle_request", lambda _, request: transport.handle_request(request)
    )

    async def handle(_: object, request: httpx.Request) -> httpx.Response:
        return await transport.handle_async_request(request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    return emulated


@pytest.mark.filterwarnings("ignore")  # the frameworks' own, in code that users copy
@pytest.mark.parametrize(
    "heading",
    [
        "vLLM",
        "LangChain",
        "LlamaIndex",
        "Mem0",
        "Chain-of-Agents",
        "RAG workflows",
        "Several engines",
    ],
)
def test_the_example_runs_and_its_blocks_reach_the_engine(
    heading: str,
    engine: EmulatedEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example(heading), f"README.md, {heading}", "exec"), {"__name__": "__main__"})
    assert "The Seine." in capsys.readouterr().out
    assert engine.requests
    known = KNOWN.get(heading, "The Seine flows through Paris.")
    assert all(
        known in body["messages"][-1]["content"]
        for body in engine.requests
        if "readers have each read" not in body["messages"][0]["content"]  # a manager reads notes
        and "Write a sentence" not in body["messages"][0]["content"]  # a hypothesis reads nothing
    )
