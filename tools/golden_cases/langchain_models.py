"""LangChain models and retrievers that note what reaches them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from threading import Lock
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_document_helpers import documents
from pydantic import PrivateAttr


def shown(found: Sequence[Document]) -> list[Any]:
    """Return documents as JSON."""
    return [[one.id, one.page_content, one.metadata] for one in found]


class LetterRetriever(BaseRetriever):
    """Finds a document for each letter of the query's first word."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return documents(query.partition(" ")[0])


class NotingModel(BaseChatModel):
    """Answers with the prompt's last line, and notes what it is called with."""

    _calls: list[Any] = PrivateAttr(default_factory=list)
    _lock: Any = PrivateAttr(default_factory=Lock)

    @property
    def calls(self) -> list[Any]:
        """The messages of each call, and its arguments if it has any."""
        return self._calls

    @property
    def _llm_type(self) -> str:
        return "noting"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """Return what calls this model with the tools."""
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _note(self, messages: list[BaseMessage], arguments: dict[str, Any]) -> str:
        said: list[Any] = [_as_json(message) for message in messages]
        given = {name: one for name, one in arguments.items() if one is not None}
        with self._lock:
            self._calls.append([*said, {"arguments": given}] if given else said)
        last = messages[-1].text.rsplit("\n", 1)[-1]
        if "fail" in last:
            raise ConnectionError("the model is gone")
        return f"Said to {last}"

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        text = self._note(messages, {"stop": stop, **kwargs})
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return self._generate(messages, stop, **kwargs)


class NotingStream(NotingModel):
    """A noting model that answers word by word, and may break after some."""

    breaks_after: int | None = None

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        text = self._note(messages, {"stop": stop, "streams": True, **kwargs})
        for number, word in enumerate(text.split()):
            if number == self.breaks_after:
                raise TimeoutError("the stream broke")
            yield ChatGenerationChunk(message=AIMessageChunk(word + " "))

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for piece in self._stream(messages, stop, **kwargs):
            yield piece


def searching(number: int, *queries: str) -> AIMessage:
    """Return a model's answer that calls the search tool for each query, all at once."""
    calls: list[Any] = [
        {"name": "search", "args": {"query": query}, "id": f"call-{number}-{place}"}
        for place, query in enumerate(queries)
    ]
    return AIMessage("", tool_calls=calls)


def messages_of(state: dict[str, Any]) -> list[Any]:
    """Return an agent's messages as JSON, with what ctxreuse says of each."""
    return [
        [_as_json(one), one.additional_kwargs.get("ctxreuse"), _artifact(one)]
        for one in state["messages"]
    ]


def _artifact(message: BaseMessage) -> Any:
    artifact = getattr(message, "artifact", None)
    if not isinstance(artifact, list):
        return None
    # as dicts where a checkpointer gave them back
    return [one["metadata"] if isinstance(one, dict) else one.metadata for one in artifact]


def _as_json(message: BaseMessage) -> Any:
    return convert_to_openai_messages(message)
