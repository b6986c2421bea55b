"""Calls of LlamaIndex's own OpenAI client and of the wrapper, and what becomes of them."""

from collections.abc import Callable
from typing import Any

from hostile_chat_servers import Handler, Outcome, clients
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llamaindex_llm_helpers import context
from openai_models import openai_like


class Looked(BaseModel):
    """What was found."""

    of: list[str]
    name: str


def look(of: list[str], name: str) -> str:
    """Look something up."""
    return f"{name}: {of}"


TOOL = FunctionTool.from_defaults(look)


def plain_model(answer: Handler, **options: Any) -> Any:
    return openai_like(*clients(answer), **{"is_function_calling_model": True, **options})


def asked(prompt: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=prompt)]


def read(pieces: Any, outcome: Outcome) -> Any:
    last = None
    for last in pieces:
        outcome.said += last.delta or ""
    return last


async def aread(pieces: Any, outcome: Outcome) -> Any:
    last = None
    async for last in await pieces:
        outcome.said += last.delta or ""
    return last


def structured(model: Any, prompt: str, outcome: Outcome) -> Any:
    return model.structured_predict(Looked, PromptTemplate("{asked}"), asked=prompt)


CALLS: dict[str, Callable[[Any, str, Outcome], Any]] = {
    "complete": lambda model, prompt, outcome: model.complete(prompt),
    "acomplete": lambda model, prompt, outcome: model.acomplete(prompt),
    "stream_complete": lambda model, prompt, outcome: read(model.stream_complete(prompt), outcome),
    "astream_complete": lambda model, prompt, outcome: aread(
        model.astream_complete(prompt), outcome
    ),
    "chat": lambda model, prompt, outcome: model.chat(asked(prompt)),
    "achat": lambda model, prompt, outcome: model.achat(asked(prompt)),
    "stream_chat": lambda model, prompt, outcome: read(model.stream_chat(asked(prompt)), outcome),
    "astream_chat": lambda model, prompt, outcome: aread(
        model.astream_chat(asked(prompt)), outcome
    ),
    "chat_with_tools": lambda model, prompt, outcome: model.chat_with_tools(
        [TOOL], chat_history=asked(prompt)
    ),
    "stream_chat_with_tools": lambda model, prompt, outcome: read(
        model.stream_chat_with_tools([TOOL], chat_history=asked(prompt)), outcome
    ),
    "predict_and_call": lambda model, prompt, outcome: (
        model.predict_and_call([TOOL], chat_history=asked(prompt)).response
    ),
    "structured_predict": structured,
}


def question(letters: str, words: str = "Which?") -> str:
    return f"{context(letters)}\n\n{words}"


OF_TEXTS = ("complete", "acomplete", "stream_complete", "astream_complete")
SINGLE = (*OF_TEXTS, "chat", "achat", "stream_chat", "astream_chat")
