"""LangChain models and retrievers that note what reaches them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from threading import Lock
from typing import Any

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import BaseTool, create_retriever_tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from golden_cases.letters import text_of


def document(letter: str) -> Document:
    """Return a letter's document."""
    return Document(text_of(letter), id=f"id-{letter}", metadata={"source": f"{letter}.txt"})


def documents(word: str) -> list[Document]:
    """Return the documents of a word's letters."""
    return [document(letter) for letter in word]


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
    """A noting model that answers word by word."""

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        for word in self._note(messages, {"stop": stop, "streams": True, **kwargs}).split():
            yield ChatGenerationChunk(message=AIMessageChunk(word + " "))

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for piece in self._stream(messages, stop, **kwargs):
            yield piece


class ScriptedModel(FakeMessagesListChatModel):
    """Answers as it is told to, and notes the prompts."""

    _calls: list[Any] = PrivateAttr(default_factory=list)

    @property
    def calls(self) -> list[Any]:
        """The messages of each call."""
        return self._calls

    def bind_tools(self, tools: Any, **kwargs: Any) -> ScriptedModel:
        """Return the model: its answers are given."""
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self._calls.append([_as_json(message) for message in messages])
        return super()._generate(messages, *args, **kwargs)


def searching(number: int, *queries: str) -> AIMessage:
    """Return a model's answer that calls the search tool for each query, all at once."""
    calls: list[Any] = [
        {"name": "search", "args": {"query": query}, "id": f"call-{number}-{place}"}
        for place, query in enumerate(queries)
    ]
    return AIMessage("", tool_calls=calls)


def search_tool(**arguments: Any) -> BaseTool:
    """Return a tool that finds a document for each letter."""
    return create_retriever_tool(
        LetterRetriever(),
        "search",
        "Finds documents.",
        **{"response_format": "content_and_artifact", **arguments},
    )


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
