"""LlamaIndex models, retrievers and memories that note what reaches them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import NodeWithScore


def shown(found: Sequence[NodeWithScore]) -> list[Any]:
    """Return nodes as JSON; an annotation's id is left out, for it is another in each run."""
    return [
        [one.node_id if one.node_id.startswith("id-") else None, one.score, one.text, one.metadata]
        for one in found
    ]


class NotingLLM(LLM):
    """Answers "answer 1", "answer 2", ..., and notes what it is called with.

    Where it `breaks`, streamed chats do after their first piece.
    """

    context_window: int = 100_000
    num_output: int = 256
    is_chat_model: bool = True
    breaks: bool = False
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    _calls: list[Any] = PrivateAttr(default_factory=list)
    _lock: Any = PrivateAttr(default_factory=Lock)

    @property
    def calls(self) -> list[Any]:
        """The messages, or the prompt, of each call, and its arguments if it has any."""
        return self._calls

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks a model about itself."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.num_output,
            is_chat_model=self.is_chat_model,
        )

    def _note(self, said: Any, arguments: dict[str, Any]) -> str:
        given = {name: one for name, one in arguments.items() if one not in (None, False)}
        with self._lock:
            self._calls.append({"prompt": said, **({"arguments": given} if given else {})})
            number = len(self._calls)
        if "fail" in str(said)[-40:]:
            raise ConnectionError("the model is gone")
        return f"answer {number}"

    def _chat(self, messages: Sequence[ChatMessage], arguments: dict[str, Any]) -> ChatResponse:
        said = [[one.role.value, *(_part(part) for part in one.blocks)] for one in messages]
        answer = self._note(said, arguments)
        return ChatResponse(message=ChatMessage(role="assistant", content=answer))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return self._chat(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        return self._chat(messages, kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        """Answer messages in pieces."""
        return self._chat_pieces(self._chat(messages, {**kwargs, "streams": True}))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        """Answer messages in pieces."""
        answer = self._chat(messages, {**kwargs, "streams": True})

        async def pieces() -> Any:
            for piece in self._chat_pieces(answer):
                yield piece

        return pieces()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt."""
        return CompletionResponse(text=self._note(prompt, {"formatted": formatted, **kwargs}))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Complete a prompt."""
        return CompletionResponse(text=self._note(prompt, {"formatted": formatted, **kwargs}))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        """Complete a prompt in pieces."""
        text = self._note(prompt, {"formatted": formatted, "streams": True, **kwargs})
        return (CompletionResponse(text=text[:end], delta=text[end - 1]) for end in (1, 2))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        """Complete a prompt in pieces."""
        text = self._note(prompt, {"formatted": formatted, "streams": True, **kwargs})

        async def pieces() -> Any:
            for end in (1, 2):
                yield CompletionResponse(text=text[:end], delta=text[end - 1])

        return pieces()

    def _chat_pieces(self, answer: ChatResponse) -> Iterator[ChatResponse]:
        text = str(answer.message.content)
        for end in (6, len(text)):
            if self.breaks and end > 6:
                raise TimeoutError("the stream broke")
            message = ChatMessage(role="assistant", content=text[:end])
            yield ChatResponse(message=message, delta=text[end - 6 if end == 6 else 6 : end])


def _part(part: Any) -> Any:
    return part.text if hasattr(part, "text") else type(part).__name__


def pieces_of(stream: Any) -> list[str]:
    """Return the texts of a stream's pieces."""
    return [str(piece.delta) for piece in stream]


async def apieces_of(stream: Any) -> list[str]:
    """Return the texts of an asynchronous stream's pieces."""
    return [str(piece.delta) async for piece in await stream]
