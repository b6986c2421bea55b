"""A server as the tests see it: one request at a time, exact tokens, plain numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from ctxreuse.cache import CacheUsage
from ctxreuse.cache.metrics import PrefixCacheMetrics


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered.

    Attributes:
        text: The answer.
        usage: Prompt tokens, and how many of them the server says it had cached.
        prompt_tokens: The prompt's token ids.
        answer_tokens: The answer's token ids.
    """

    text: str
    usage: CacheUsage
    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]


class Engine:
    """A vLLM server.

    Args:
        base_url: Its address as OpenAI clients take it, with `/v1`.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.root_url = self.base_url.removesuffix("/v1")

    @cached_property
    def model(self) -> str:
        """The first model that it serves."""
        return str(self._json("GET", f"{self.base_url}/models")["data"][0]["id"])

    @cached_property
    def block_size(self) -> int:
        """Tokens of a cache block."""
        size = self.metrics().block_size
        assert size is not None, "the server does not report its cache"
        return size

    @cached_property
    def cache_tokens(self) -> int:
        """Tokens that its cache holds, the block that it keeps back included."""
        tokens = self.metrics().kv_cache_size_tokens
        assert tokens is not None, "the server does not report its cache"
        return tokens

    def metrics(self) -> PrefixCacheMetrics:
        """Return what the server's `/metrics` say."""
        return PrefixCacheMetrics.parse(self._send("GET", f"{self.root_url}/metrics").text)

    def metric(self, name: str) -> float:
        """Return a number of `/metrics` by its whole name, all engines added up."""
        page = self._send("GET", f"{self.root_url}/metrics").text
        values = re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", page, re.MULTILINE)
        assert values, f"the server has no metric {name}"
        return sum(map(float, values))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        salt: str | None = None,
        max_tokens: int = 1,
    ) -> Answer:
        """Send a chat prompt and wait for the answer; greedy, so that it can be repeated."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        answer = self._json("POST", f"{self.base_url}/chat/completions", body)
        choice, usage = answer["choices"][0], answer["usage"]
        details = usage.get("prompt_tokens_details")
        assert details is not None, "start the server with --enable-prompt-tokens-details"
        return Answer(
            text=choice["message"]["content"],
            usage=CacheUsage(usage["prompt_tokens"], details["cached_tokens"]),
            prompt_tokens=tuple(answer["prompt_token_ids"]),
            answer_tokens=tuple(choice["token_ids"]),
        )

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a piece of a prompt has, chat markup included."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return int(self._json("POST", f"{self.root_url}/tokenize", body)["count"])

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a chat prompt's text, as the server's chat template renders it."""
        body = {"model": self.model, "messages": [dict(message) for message in messages]}
        tokens = self._json("POST", f"{self.root_url}/tokenize", body)["tokens"]
        piece = {"model": self.model, "tokens": tokens}
        return str(self._json("POST", f"{self.root_url}/detokenize", piece)["prompt"])

    def _json(self, method: str, url: str, body: object = None) -> Any:
        return self._send(method, url, body).json()

    @staticmethod
    def _send(method: str, url: str, body: object = None) -> httpx.Response:
        with httpx.Client(timeout=300, trust_env=False) as client:
            answer = client.request(method, url, json=body)
        assert answer.is_success, f"{url}: {answer.status_code} {answer.text[:500]}"
        return answer
