"""The engine that the notebooks ask: emulated, or the server that CTXREUSE_BASE_URL names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import httpx

from ctxreuse.cache import CacheUsage
from ctxreuse.cache.metrics import PrefixCacheMetrics
from ctxreuse.context.rendering import message_texts
from ctxreuse.serving import EmulatedEngine

_LABEL = re.compile(r"\[Doc_\d+\]")
_SENTENCE = re.compile(r"(?<=[.:!?])\s+|\n\n+")
_WORD = re.compile(r"\w{4,}")


class NotebookEngine:
    """The engine that a notebook asks.

    Attributes:
        base_url: Its address, with `/v1`.
        model: The model's name.
        last_message: What `http_client` sent last: the end of the prompt.
    """

    def __init__(self, base_url: str, model: str, emulated: EmulatedEngine | None = None) -> None:
        self.base_url = base_url
        self.model = model
        self.last_message = ""
        self._options = {"transport": emulated and emulated.transport(httpx), "timeout": 600}

    def http_client(self) -> httpx.Client:
        """Return a client for the `http_client=` of OpenAI's, LangChain's or LlamaIndex's."""
        return httpx.Client(event_hooks={"request": [self._note]}, **self._options)

    def async_http_client(self) -> httpx.AsyncClient:
        """Return an asynchronous client."""
        return httpx.AsyncClient(**self._options)

    def _note(self, request: httpx.Request) -> None:
        if request.method == "POST":
            self.last_message = json.loads(request.content)["messages"][-1]["content"]

    def empty_cache(self) -> dict[str, Any]:
        """Return a new cache salt: requests with it find nothing that was cached before."""
        return {"cache_salt": uuid4().hex}

    def usage(self) -> CacheUsage:
        """Return the tokens of all prompts since the engine started, as its `/metrics` say."""
        with self.http_client() as client:
            page = client.get(self.base_url.removesuffix("/v1") + "/metrics").raise_for_status()
        read = PrefixCacheMetrics.parse(page.text)
        return CacheUsage(read.prefix_cache_queries or 0, read.prefix_cache_hits or 0)


def engine_or_real(**options: Any) -> NotebookEngine:
    """Return the server that CTXREUSE_BASE_URL names, or else an emulated engine.

    Args:
        options: Arguments of `EmulatedEngine`, which a server does without.
    """
    base_url = os.environ.get("CTXREUSE_BASE_URL")
    if base_url is None:
        emulated = EmulatedEngine(**{"answer": quoted, **options})
        return NotebookEngine("http://engine.invalid/v1", "emulated", emulated)
    base_url = base_url.rstrip("/")
    model = httpx.get(f"{base_url}/models").raise_for_status().json()["data"][0]["id"]
    return NotebookEngine(base_url, model)


def quoted(body: Mapping[str, Any]) -> str:
    """Answer a request with the sentence of its prompt that shares most words with the question.

    That is no language model, but what it says stands in the prompt, under the label that it names.
    """
    lines = _text(body, lambda role: role != "system").rstrip().split("\n")
    asking = [place for place, line in enumerate(lines) if line.endswith("?")] or [len(lines) - 1]
    context, question = "\n".join(lines[: asking[-1]]), lines[asking[-1]]
    asked = {word.lower() for word in _WORD.findall(question)}
    best, best_score, label = "I do not know.", 0.0, ""
    for sentence in _SENTENCE.split(context or _text(body, lambda role: role == "system")):
        label = (_LABEL.findall(sentence) or [label])[-1]
        words = {word.lower() for word in _WORD.findall(sentence)}
        score = len(asked & words) / (len(words) + 4) ** 0.5
        if score > best_score and not sentence.endswith("?"):
            said = " ".join(_LABEL.sub("", sentence).split())
            best, best_score = f"{said} {label}".strip(), score
    return best


def _text(body: Mapping[str, Any], takes: Callable[[str], bool]) -> str:
    messages = [message for message in body["messages"] if takes(message["role"])]
    return "\n\n".join(part for message in messages for part in message_texts(message))
