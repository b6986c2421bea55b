"""A LlamaIndex model that sends cache points to a server of Anthropic's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anthropic
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms import MockLLM


class Anthropic(MockLLM):
    """Sends blocks and cache points as LlamaIndex's class of this name does.

    That one does not work with the anthropic package of November 2026.
    """

    url: str = ""
    cache_idx: int | None = None

    @classmethod
    def at(cls, url: str, cache_idx: int | None = None) -> Anthropic:
        model = cls()
        model.url, model.cache_idx = url, cache_idx
        return model

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=100_000, is_chat_model=True)

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        system: list[str] = []
        sent: list[Any] = []
        for number, message in enumerate(messages):
            if message.role is MessageRole.SYSTEM:
                system += [b.text for b in message.blocks if isinstance(b, TextBlock)]
                continue
            content: list[Any] = []
            for block in message.blocks:
                if isinstance(block, TextBlock):
                    content.append({"type": "text", "text": block.text})
                elif isinstance(block, CachePoint):
                    control = block.cache_control
                    content[-1]["cache_control"] = {"type": control.type, "ttl": control.ttl}
            index = self.cache_idx
            if index is not None and (number <= index or index == -1):
                content[-1]["cache_control"] = {"type": "ephemeral"}
            sent.append({"role": message.role.value, "content": content})
        with anthropic.Anthropic(base_url=self.url, api_key="k", max_retries=0) as client:
            raw = client.messages.create(
                model="m", max_tokens=9, messages=sent, system="\n".join(system)
            )
        return ChatResponse(
            message=ChatMessage(role="assistant", content=raw.content[0].text), raw=raw
        )

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        def pieces() -> ChatResponseGen:
            whole = self.chat(messages)
            yield ChatResponse(message=whole.message, delta=whole.message.content, raw=whole.raw)

        return pieces()

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        async def pieces() -> ChatResponseAsyncGen:
            for piece in self.stream_chat(messages):
                yield piece

        return pieces()

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await asyncio.to_thread(self.chat, messages)
