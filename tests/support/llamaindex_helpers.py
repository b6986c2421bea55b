"""What the tests of the LlamaIndex integration share: retrievers and models that record."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import block_labels
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from llama_index.core.question_gen.types import BaseQuestionGenerator, SubQuestion
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus

from ctxreuse import Plan, ReusePlanner


class CountingPlanner(ReusePlanner):
    """Counts what it is asked to plan and to take back."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.plans = self.forgotten = 0

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        self.plans += 1
        return super().plan(*args, **kwargs)

    def forget(self, sent: Plan | str | int, tenant: str | None = None) -> bool:
        self.forgotten += 1
        return super().forget(sent, tenant)


def letter_text(letter: str) -> str:
    """Return a text that is long enough for reordering to pay."""
    return f"{letter} says: " + letter * 400


def labelled(letters: str) -> str:
    return block_labels.labelled(*map(letter_text, letters))


def located(letters: str) -> str:
    return block_labels.located(*map(letter_text, letters))


def ranked(letters: str) -> str:
    return block_labels.ranked(*map(letter_text, letters))


def letter_nodes(letters: str) -> list[NodeWithScore]:
    """Return a node for each letter, best first."""
    return [
        NodeWithScore(
            node=TextNode(
                id_=f"id-{letter}", text=letter_text(letter), metadata={"source": f"{letter}.txt"}
            ),
            score=1 - position / 10,
        )
        for position, letter in enumerate(letters)
    ]


class LetterRetriever(BaseRetriever):
    """Retrieves the nodes of the letters that a query begins with, up to the first space."""

    def __init__(self, *args: Any, change: Callable[[Any], Any] = list, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queries: list[str] = []
        self.change = change  # of what was retrieved

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.queries.append(query_bundle.query_str)
        return list(self.change(letter_nodes(query_bundle.query_str.partition(" ")[0])))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._retrieve(query_bundle)


class SubQuestions(BaseQuestionGenerator):
    """Asks a tool some questions, whatever was asked."""

    def __init__(self, tool: str, *questions: str) -> None:
        self._made = [SubQuestion(sub_question=one, tool_name=tool) for one in questions]

    def generate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        return self._made

    async def agenerate(self, tools: Any, query: QueryBundle) -> list[SubQuestion]:
        return self._made

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None:
        pass


class RecordingLLM(LLM):
    """Answers "answer 1", "answer 2", ... or what it was told to; keeps what it was sent.

    What `fails` returns for a prompt is raised, if it is an exception.
    """

    context_window: int = 100_000
    num_output: int = 256
    is_chat_model: bool = True
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    fails: Callable[[str], BaseException | None] = Field(default=lambda prompt: None, exclude=True)
    breaks_after: int | None = None
    answer: str | None = None
    _chats: list[list[ChatMessage]] = PrivateAttr(default_factory=list)
    _prompts: list[str] = PrivateAttr(default_factory=list)
    _options: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    @property
    def chats(self) -> list[list[ChatMessage]]:
        return self._chats

    @property
    def prompts(self) -> list[str]:
        """Every prompt as one text, in the order in which they were sent."""
        return self._prompts

    @property
    def options(self) -> list[dict[str, Any]]:
        return self._options

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.num_output,
            is_chat_model=self.is_chat_model,
        )

    def _answer(self, prompt: str, options: dict[str, Any]) -> str:
        error = self.fails(prompt)
        if error is not None:
            raise error
        self._prompts.append(prompt)
        self._options.append(options)
        return self.answer or f"answer {len(self._prompts)}"

    def _chat_answer(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> str:
        answer = self._answer(as_prompt(messages), options)
        self._chats.append([message.model_copy(deep=True) for message in messages])
        return answer

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return ChatResponse(message=said(self._chat_answer(messages, kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return ChatResponse(message=said(self._chat_answer(messages, kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chat_pieces(self._chat_answer(messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return _awaited(self._chat_pieces(self._chat_answer(messages, kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self._answer(prompt, {"formatted": formatted, **kwargs}))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return CompletionResponse(text=self._answer(prompt, {"formatted": formatted, **kwargs}))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return self._text_pieces(self._answer(prompt, {"formatted": formatted, **kwargs}))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        answer = self._answer(prompt, {"formatted": formatted, **kwargs})
        return _awaited(self._text_pieces(answer))

    def _chat_pieces(self, answer: str) -> ChatResponseGen:
        for text, delta in self._pieces(answer):
            yield ChatResponse(message=said(text), delta=delta)

    def _text_pieces(self, answer: str) -> CompletionResponseGen:
        for text, delta in self._pieces(answer):
            yield CompletionResponse(text=text, delta=delta)

    def _pieces(self, answer: str) -> Iterator[tuple[str, str]]:
        for number, word in enumerate([answer[:6], answer[6:]]):
            if self.breaks_after is not None and number >= self.breaks_after:
                raise ConnectionError("the engine is gone")
            yield answer[: 6 if number == 0 else None], word


async def _awaited(pieces: Iterator[Any]) -> AsyncGenerator[Any, None]:
    for piece in pieces:
        yield piece


class ListChatStore(AsyncDBChatStore):
    """Keeps messages in lists; the default store of LlamaIndex leaves a database open."""

    active: list[Any] = Field(default_factory=list)
    archived: list[Any] = Field(default_factory=list)

    async def get_messages(
        self, key: str, status: Any = None, limit: Any = None, offset: Any = None
    ) -> list[ChatMessage]:
        found = self.active if status is MessageStatus.ACTIVE else self.archived + self.active
        return [message.model_copy(deep=True) for message in found]  # as a database does

    async def count_messages(self, key: str, status: Any = None) -> int:
        return len(await self.get_messages(key, status))

    async def add_message(self, key: str, message: ChatMessage, status: Any = None) -> None:
        self.active.append(message)

    async def add_messages(self, key: str, messages: list[ChatMessage], status: Any = None) -> None:
        self.active.extend(messages)

    async def set_messages(self, key: str, messages: list[ChatMessage], status: Any = None) -> None:
        self.active = list(messages)

    async def delete_message(self, key: str, idx: int) -> ChatMessage | None:
        raise NotImplementedError

    async def delete_messages(self, key: str, status: Any = None) -> None:
        self.active, self.archived = [], []

    async def delete_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        raise NotImplementedError

    async def archive_oldest_messages(self, key: str, n: int) -> list[ChatMessage]:
        oldest, self.active = self.active[:n], self.active[n:]
        self.archived += oldest
        return oldest

    async def get_keys(self) -> list[str]:
        raise NotImplementedError


def said(text: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=text)


def as_prompt(messages: Sequence[ChatMessage]) -> str:
    """Return messages as one text; one prompt continues another if it begins with its text."""
    return "".join(f"<{message.role.value}>{message.content}</>" for message in messages)


def grow(prompts: Sequence[str]) -> bool:
    """Return whether each prompt begins with the whole prompt before it."""
    return all(later.startswith(earlier) for earlier, later in pairwise(prompts))
