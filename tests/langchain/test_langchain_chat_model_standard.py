"""LangChain's own tests of chat models, run on the wrapper; no socket is opened."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_model_helpers import openai_model
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from ctxreuse import ReusePlanner
from ctxreuse.serving import EmulatedEngine, ToolCall
from langchain_ctxreuse import ReuseChatModel

pytestmark = [
    # openai serializes parsed answers against a schema that has no type for them
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    # ChatOpenAI says how it treats schemas of pydantic 1, which the suite tries
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning"),
]


def example(schema: Mapping[str, Any], text: str) -> Any:
    """Return a value that a JSON schema allows; each string in it is the text."""
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(schema["anyOf"][0], text)
    kind = schema.get("type", "object")
    if kind == "object":
        inside = schema.get("properties", {})
        return {name: example(one, text) for name, one in inside.items()}
    return {"integer": 3, "number": 3, "boolean": True, "array": []}.get(kind, text)


def obedient(body: Mapping[str, Any]) -> str | ToolCall:
    """Answer as asked: with JSON, with a call of the first tool, or with words."""
    answers = body.get("response_format", {})
    asked = str(body["messages"][-1]["content"])
    if answers.get("type") == "json_schema":
        return json.dumps(example(answers["json_schema"]["schema"], asked))
    if answers.get("type") == "json_object":
        return json.dumps({"setup": "some text", "punchline": "some text"})
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        functions = [tool["function"] for tool in body["tools"]]
        choice = body.get("tool_choice")
        if isinstance(choice, Mapping):
            functions = [one for one in functions if one["name"] == choice["function"]["name"]]
        arguments = json.dumps(example(functions[0]["parameters"], asked))
        return ToolCall(functions[0]["name"], arguments, id="call-1")
    return "Some words."


class OfTheWrapper:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ReuseChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        engine = EmulatedEngine(answer=obedient)
        inner = openai_model(engine, temperature=0, max_tokens=100)
        return {"inner": inner, "planner": ReusePlanner()}


class TestUnit(OfTheWrapper, ChatModelUnitTests):
    pass


class TestIntegration(OfTheWrapper, ChatModelIntegrationTests):
    @property
    def supports_json_mode(self) -> bool:
        return True
