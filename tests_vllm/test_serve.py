"""`ctxreuse serve` before a real engine: what it plans is what the engine finds in its cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine import Engine


@pytest.fixture
def door(engine: Engine) -> Iterator[httpx.Client]:
    """The command as a process; a client of it."""
    command = [sys.executable, "-m", "ctxreuse", "serve", "--port", "0"]
    options = ["--engine", engine.base_url, "--tenant-header", "x-tenant"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        said = [next(running.stdout) for _ in range(4)]
        assert said[1].endswith(": ready\n")
        url = said[0].split()[-1]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            yield client
        running.terminate()
        running.stdout.read()


def test_documents_are_served_from_the_cache_and_tenants_share_nothing(door: httpx.Client) -> None:
    model = door.get("/v1/models").json()["data"][0]["id"]
    texts = {name: f"{name}: " + " ".join(f"{name}{n}" for n in range(120)) for name in "abcd"}

    def ask(names: str, tenant: str, **fields: Any) -> httpx.Response:
        documents = [{"id": name, "text": texts[name]} for name in names]
        messages = [{"role": "user", "content": "Which is it?"}]
        body = {"model": model, "messages": messages, "documents": documents, "max_tokens": 4}
        headers = {"x-tenant": tenant}
        return door.post("/v1/chat/completions", json={**body, **fields}, headers=headers)

    first = ask("abcd", "one").json()
    again = ask("cbad", "one", ctxreuse=True).json()
    other = ask("abcd", "two").json()
    stream = ask("dabc", "one", stream=True, stream_options={"include_usage": True}, ctxreuse=True)
    refused = ask("ab", "one", max_tokens=-1)
    cached = [
        (one["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for one in (first, again, other)
    ]
    prompt = again["usage"]["prompt_tokens"]
    assert cached[0] == cached[2] == 0
    assert prompt > cached[1] > 0.8 * prompt
    assert again["ctxreuse"]["order"] == ["a", "b", "c", "d"]
    events = [json.loads(one[6:]) for one in stream.text.splitlines() if one[:7] == "data: {"]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * prompt
    assert events[-1]["ctxreuse"]["order"] == ["a", "b", "c", "d"]
    assert refused.status_code == 400
    assert "max_tokens" in refused.text
