"""What the tests of the chat model share: models that record their calls, and prompts."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from threading import Lock
from typing import Any

import httpx
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_document_helpers import documents
from langchain_openai import ChatOpenAI
from openai_models import chat_openai, clients_of
from pydantic import Field, PrivateAttr

from ctxreuse import ReusePlanner
from ctxreuse.pipeline.formatting import joined_forms
from ctxreuse.pipeline.known_texts import Form
from ctxreuse.serving import EmulatedEngine
from langchain_ctxreuse import ReuseChatModel

PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def context(letters: str, tenant: str = "") -> str:
    """Return a context of one block a letter in a planner's words, rendered for a tenant."""
    found, templates = documents(letters), ReusePlanner().templates
    texts, ids = [one.page_content for one in found], [one.id for one in found]
    forms = list(map(Form, texts))
    return joined_forms(forms, texts, "\n\n", tenant, templates, labels=True, ids=ids)


def question(letters: str, asked: str = "Which?", tenant: str = "") -> str:
    return f"{context(letters, tenant)}\n\n{asked}"


def letters_in(text: str) -> str:
    """Return the blocks that a prompt shows, in order."""
    order = [(text.find(f"{letter} says: "), letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return "".join(letter for place, letter in sorted(order) if place >= 0)


def text_of(messages: Sequence[BaseMessage]) -> str:
    return "\n".join(str(message.text) for message in messages)


class Recorded:
    """What a model was called with."""

    def __init__(self, messages: Sequence[BaseMessage], arguments: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.arguments = arguments

    @property
    def text(self) -> str:
        return text_of(self.messages)


class RecordingModel(BaseChatModel):
    """Answers with the last line of the prompt, and records what it is called with.

    `failing` raises what it returns for a prompt, if it returns something.
    """

    model_name: str = "recording"
    failing: Callable[[str], BaseException | None] = Field(default=lambda text: None)
    before_answer: Callable[[str], None] = Field(default=lambda text: None)
    _calls: list[Recorded] = PrivateAttr(default_factory=list)
    _lock: Any = PrivateAttr(default_factory=Lock)

    @property
    def calls(self) -> list[Recorded]:
        return self._calls

    @property
    def sent(self) -> list[str]:
        """The last line of each prompt, in the order in which they came."""
        return [call.text.rsplit("\n", 1)[-1] for call in self._calls]

    @property
    def _llm_type(self) -> str:
        return "recording"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name}

    def _record(self, messages: Sequence[BaseMessage], arguments: dict[str, Any]) -> str:
        recorded = Recorded(messages, arguments)
        with self._lock:
            self._calls.append(recorded)
        self.before_answer(recorded.text)
        error = self.failing(recorded.text)
        if error is not None:
            raise error
        return recorded.text.rsplit("\n", 1)[-1]

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        arguments = {"stop": stop, "run_manager": run_manager, **kwargs}
        return answer(self._record(messages, arguments))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return self._generate(messages, stop, run_manager, **kwargs)


class StreamingModel(RecordingModel):
    """A recording model that streams its answer letter by letter, with usage at the end."""

    pieces_before_failing: int | None = None

    def _pieces(self, messages: Sequence[BaseMessage], arguments: dict[str, Any]) -> Iterator[Any]:
        text = self._record(messages, arguments)
        for number, letter in enumerate(text):
            if number == self.pieces_before_failing:
                raise RuntimeError("the stream broke")
            yield ChatGenerationChunk(message=AIMessageChunk(content=letter))
        usage = {"input_tokens": 7, "output_tokens": len(text), "total_tokens": 7 + len(text)}
        yield ChatGenerationChunk(message=AIMessageChunk(content="", usage_metadata=usage))

    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        yield from self._pieces(messages, {"stop": stop, "run_manager": run_manager, **kwargs})

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for piece in self._pieces(messages, {"stop": stop, "run_manager": run_manager, **kwargs}):
            yield piece


def answer(text: str) -> ChatResult:
    usage = {
        "input_tokens": 7,
        "output_tokens": 1,
        "total_tokens": 8,
        "input_token_details": {"cache_read": 5},
    }
    return ChatResult(
        generations=[ChatGeneration(message=AIMessage(content=text, usage_metadata=usage))],
        llm_output={"asked": text},
    )


class CountingHandler(BaseCallbackHandler):
    """Counts the events of chat models."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.prompts: list[str] = []
        self.starts: list[dict[str, Any]] = []

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **kwargs: Any
    ) -> None:
        self.events.append("start")
        self.prompts += [text_of(prompt) for prompt in messages]
        self.starts.append(kwargs)

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.events.append("token")

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.events.append("end")

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.events.append("error")


def model(inner: BaseChatModel | None = None, **fields: Any) -> ReuseChatModel:
    """Return a wrapper without a window, so that single calls are sent at once."""
    fields = {"window_s": 0, "planner": ReusePlanner(), **fields}
    return ReuseChatModel(inner=RecordingModel() if inner is None else inner, **fields)


def openai_model(engine: EmulatedEngine, **fields: Any) -> ChatOpenAI:
    return chat_openai(*clients_of(engine.transport(httpx)), stream_usage=True, **fields)


def configured(**configurable: Any) -> dict[str, Any]:
    return {"configurable": configurable}
