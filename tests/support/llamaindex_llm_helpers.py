"""What the tests of the planned LlamaIndex model share: prompts with contexts, served models."""

import asyncio
import json
import re
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import MetadataMode
from llama_index.core.tools import FunctionTool
from llamaindex_helpers import RecordingLLM, labelled, letter_nodes, ranked
from openai_models import clients_of, openai_like

from ctxreuse import ReusePlanner
from ctxreuse.serving.emulation.emulated_engine import EmulatedEngine, ToolCall
from llamaindex_ctxreuse import ReuseLLM, format_context


def context(word: str) -> str:
    return format_context(letter_nodes(word), metadata_mode=MetadataMode.NONE, labels=True)


def planned(word: str, best: str) -> str:
    """Return a context as it is sent, and which letters it says are best."""
    return f"{labelled(word)}\n\n{ranked(best)}"


def question(word: str, words: str = "Which?") -> list[ChatMessage]:
    return [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content=f"{context(word)}\n\n{words}"),
    ]


CHATS = ["chat", "stream_chat", "achat", "astream_chat"]
COMPLETIONS = ["complete", "stream_complete", "acomplete", "astream_complete"]
"""Ways to call a model."""


def called(llm: LLM, way: str, *given: Any, **more: Any) -> Any:
    """Return the whole answer of a model that is called in a way."""

    async def awaited() -> Any:
        answer = await getattr(llm, way)(*given, **more)
        return [one async for one in answer][-1] if "stream" in way else answer

    if way.startswith("a"):
        return asyncio.run(awaited())
    answer = getattr(llm, way)(*given, **more)
    return list(answer)[-1] if "stream" in way else answer


def answer_to(llm: LLM, way: str, text: str) -> str:
    """Return the text of a model's answer to one message, or to a prompt."""
    if way in CHATS:
        messages = [ChatMessage(role="user", content=text)]
        return str(called(llm, way, messages).message.content)
    return str(called(llm, way, text).text)


def say(chat: Any, way: str, question: Any) -> str:
    """Return what a chat engine answers that is asked in a way."""

    async def asynchronously() -> str:
        answer = await getattr(chat, way)(question)
        if way == "astream_chat":
            return "".join([one async for one in answer.async_response_gen()])
        return str(answer)

    if way.startswith("a"):
        return asyncio.run(asynchronously())
    answer = getattr(chat, way)(question)
    return "".join(answer.response_gen) if way == "stream_chat" else str(answer)


def sent_words(inner: RecordingLLM) -> list[str]:
    """Return the letters of each prompt that was sent, in order."""
    return ["".join(re.findall(r"\] (\w) says", prompt)) for prompt in inner.prompts]


class FaultyPlanner(ReusePlanner):
    def plan(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a fault of ours")

    plan_batch = evict = plan


class City(BaseModel):
    """A city."""

    name: str = ""


class Weather:
    """A tool for tests."""

    tool = FunctionTool.from_defaults(lambda city: f"sunny in {city}", name="weather")


def engine_answer(body: dict[str, Any]) -> Any:
    """Call the tool that is offered, else say a City as JSON."""
    if body.get("tools"):
        name = body["tools"][0]["function"]["name"]
        return ToolCall(name, json.dumps({"name": "Rome", "city": "Rome"}))
    return '{"name": "Rome"}'


class Served:
    """An OpenAILike model on an engine without a socket, bare and wrapped."""

    def __init__(self, **options: Any) -> None:
        self.engine = EmulatedEngine(answer=engine_answer)
        self.bare = openai_like(*clients_of(self.engine.transport()), **options)
        self.llm = ReuseLLM(inner=self.bare, window_s=0)

    def requests(self) -> list[dict[str, Any]]:
        taken = list(self.engine.requests)
        self.engine.requests.clear()
        return taken

    def prompt_of(self, request: dict[str, Any]) -> str:
        if "prompt" in request:
            return str(request["prompt"])
        contents = [message["content"] for message in request["messages"]]
        return "\n".join(
            part if isinstance(part, str) else "".join(one["text"] for one in part)
            for part in contents
        )
