"""Calls of LangChain's own OpenAI client and of the wrapper, and what becomes of them."""

from collections.abc import Callable
from functools import reduce
from typing import Any

from hostile_chat_servers import WORDS, Handler, Outcome, clients
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool
from langchain_model_helpers import question
from openai_models import chat_openai

LOOK = {
    "title": "look",
    "description": "What was found.",
    "type": "object",
    "properties": {
        "of": {"type": "array", "items": {"type": "string"}},
        "name": {"type": "string"},
    },
    "required": ["of", "name"],
    "additionalProperties": False,
}


@tool
def look(of: list[str], name: str) -> str:
    """Look something up."""
    return f"{name}: {of}"


def plain_model(answer: Handler) -> Any:
    return chat_openai(*clients(answer), stream_usage=True)


def shown(value: Any) -> Any:
    """Return what can be compared of an answer: not its ids."""
    if isinstance(value, BaseMessage):
        fields = {**value.model_dump(), "id": None, "text": value.text}
        return {name: fields[name] for name in sorted(fields)}
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(one) for one in value]
    return f"{type(value).__name__}: {value}" if isinstance(value, Exception) else value


def stream(model: Any, prompt: str, outcome: Outcome) -> Any:
    pieces = []
    for piece in model.stream(prompt):
        pieces.append(piece)
        outcome.said += piece.text
    return shown(reduce(lambda one, other: one + other, pieces))


async def astream(model: Any, prompt: str, outcome: Outcome) -> Any:
    pieces = []
    async for piece in model.astream(prompt):
        pieces.append(piece)
        outcome.said += piece.text
    return shown(reduce(lambda one, other: one + other, pieces))


async def ainvoke(model: Any, prompt: str, outcome: Outcome) -> Any:
    return shown(await model.ainvoke(prompt))


def both(answers: list[Any]) -> Any:
    """Return the answers of a batch whose first prompt is answered as it should be."""
    first, second = answers
    if isinstance(second, Exception):
        assert first.text == WORDS
        raise second
    return shown(answers)


def batch(model: Any, prompt: str, outcome: Outcome) -> Any:
    return both(model.batch([question("cab"), prompt], return_exceptions=True))


async def abatch(model: Any, prompt: str, outcome: Outcome) -> Any:
    return both(await model.abatch([question("cab"), prompt], return_exceptions=True))


def structured(method: str) -> Callable[[Any, str, Outcome], Any]:
    return lambda model, prompt, outcome: shown(
        model.with_structured_output(LOOK, method=method).invoke(prompt)
    )


CALLS: dict[str, Callable[[Any, str, Outcome], Any]] = {
    "invoke": lambda model, prompt, outcome: shown(model.invoke(prompt)),
    "ainvoke": ainvoke,
    "stream": stream,
    "astream": astream,
    "batch": batch,
    "abatch": abatch,
    "bind_tools": lambda model, prompt, outcome: shown(model.bind_tools([look]).invoke(prompt)),
    "bind_tools streamed": lambda model, prompt, outcome: stream(
        model.bind_tools([look]), prompt, outcome
    ),
    "json_schema": structured("json_schema"),
    "function_calling": structured("function_calling"),
    "json_mode": structured("json_mode"),
}
