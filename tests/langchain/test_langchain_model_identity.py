"""What frameworks look at to see which model they have: name, profile, type, class."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_model_helpers import RecordingModel, openai_model, question
from pydantic import BaseModel

from ctxreuse.serving import EmulatedEngine
from langchain_ctxreuse import ReuseChatModel


class Answer(BaseModel):
    """An answer."""

    text: str


@tool
def search(query: str) -> str:
    """Find documents."""
    return query


def answering() -> EmulatedEngine:
    return EmulatedEngine(model="gpt-5", answer=lambda body: '{"text": "yes"}')


def wrapped(inner: Any) -> ReuseChatModel:
    return ReuseChatModel(inner=inner, window_s=0)


def test_frameworks_read_of_a_wrapper_what_they_read_of_the_model():
    inner = openai_model(answering(), model="gpt-5")
    model = wrapped(inner)
    for name in ("model_name", "model", "temperature", "use_responses_api", "profile", "_llm_type"):
        assert getattr(model, name, "none") == getattr(inner, name, "none")
    assert model._get_ls_params() == inner._get_ls_params()
    assert not hasattr(model, "no_such_setting")


@pytest.mark.parametrize("tools", [[], [search]])
def test_an_agents_structured_output_is_the_providers_own(tools):
    engine = answering()
    plain = openai_model(engine, model="gpt-5")
    for model in (plain, wrapped(plain)):
        model.profile = None  # so that the name alone tells it
        agent = create_agent(model, tools, response_format=Answer)
        # an agent that wants a tool's call instead would ask again and again
        state = agent.invoke({"messages": [HumanMessage("Yes?")]}, {"recursion_limit": 5})
        assert state["structured_response"] == Answer(text="yes")
    native, sent = engine.requests
    assert native["response_format"]["type"] == "json_schema"
    assert sent == native


def test_copies_have_settings_of_their_own_which_take_effect_on_the_inner_one():
    engine = EmulatedEngine()
    model = wrapped(openai_model(engine))
    model.model_copy(update={"temperature": 0.5}).invoke("Warm?")
    model.invoke("As it was?")
    assert [one.get("temperature") for one in engine.requests] == [0.5, None]
    assert "_serialized" in vars(model), "made once for all calls"
    assert "0.5" in model.model_copy(update={"temperature": 0.5})._serialized["repr"]


class BoundByMethod(RecordingModel):
    def with_effort(self, effort: str) -> Any:
        return self.bind(effort=effort)

    def as_copy(self) -> Any:
        return self.model_copy()

    def name_of_it(self) -> str:
        return "it"


def test_what_a_method_of_the_inner_model_makes_is_called_through_the_wrapper():
    inner = BoundByMethod()
    model = wrapped(inner)
    assert model.name_of_it() == "it"
    model.with_effort("high").invoke(question("abc"))
    assert inner.calls[0].arguments["effort"] == "high"
    assert model.prompt_statistics.planned == 1
    assert isinstance(model.as_copy(), ReuseChatModel)


class ChatAnthropic(RecordingModel):
    """Named as the class for which middleware for prompt caching asks."""


def test_an_agent_that_may_lose_cache_marks_says_so_once(caplog):
    class OfThisTest(ChatAnthropic):  # a class of its own: each is named once a process
        pass

    model = wrapped(OfThisTest())
    model.invoke("1")
    assert not caplog.messages, "outside of agents nothing is lost"
    agent = create_agent(model)
    for text in ("1", "2"):
        agent.invoke({"messages": [HumanMessage(text)]})
    [line] = caplog.messages
    assert "ReusePlanner(cache=...)" in line
