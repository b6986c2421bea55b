"""What frameworks look at to see which model they have: name, profile, type, class."""

import asyncio
import copy
import json
import pickle
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_document_helpers import no_sockets
from langchain_model_helpers import (
    CountingHandler,
    RecordingModel,
    StreamingModel,
    letters_in,
    question,
)
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware

__all__ = ["no_sockets"]


class Answer(BaseModel):
    """An answer."""

    text: str


@tool
def search(query: str) -> str:
    """Find documents."""
    return query


class Server(httpx.MockTransport):
    """Answers as a provider does, and keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        super().__init__(self._reply)

    def _reply(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(json.loads(request.content))
        message = {"role": "assistant", "content": '{"text": "yes"}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "choices": [choice]}
        return httpx.Response(200, json=reply)


def gpt(server: Server | None = None) -> ChatOpenAI:
    client = httpx.Client(transport=server or Server())
    return ChatOpenAI(model="gpt-5", api_key="none", http_client=client)


def wrapped(inner: Any) -> ReuseChatModel:
    return ReuseChatModel(inner=inner, window_s=0)


def in_class(inner: Any) -> Any:
    return wrapped(inner).as_inner()


EITHER = pytest.mark.parametrize("outer", [wrapped, in_class])


@EITHER
def test_frameworks_read_of_a_wrapper_what_they_read_of_the_model(outer):
    inner = gpt()
    model = outer(inner)
    for name in ("model_name", "model", "temperature", "use_responses_api", "profile", "_llm_type"):
        assert getattr(model, name, "none") == getattr(inner, name, "none")
    assert model._get_ls_params() == inner._get_ls_params()
    assert not hasattr(model, "no_such_setting")


@EITHER
@pytest.mark.parametrize("tools", [[], [search]])
def test_an_agents_structured_output_is_the_providers_own(outer, tools):
    server = Server()
    for model in (gpt(server), outer(gpt(server))):
        model.profile = None  # so that the name alone tells it
        agent = create_agent(model, tools, response_format=Answer)
        # an agent that wants a tool's call instead would ask again and again
        state = agent.invoke({"messages": [HumanMessage("Yes?")]}, {"recursion_limit": 5})
        assert state["structured_response"] == Answer(text="yes")
    native, sent = server.sent
    assert native["response_format"]["type"] == "json_schema"
    assert sent == native


class MarksForOneClass(AgentMiddleware[Any, Any, Any]):
    """Marks the requests to models of one class, as middleware for prompt caching does."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        marks = {"marked": True} if isinstance(request.model, RecordingModel) else {}
        return handler(request.override(model_settings=marks))


def test_middleware_sees_the_inner_class_unless_it_has_slots_of_its_own():
    inner = RecordingModel()
    model = in_class(inner)
    agent = create_agent(model, middleware=[ReuseMiddleware(), MarksForOneClass()])
    agent.invoke({"messages": [HumanMessage(question("abc"))]})
    assert inner.calls[0].arguments["marked"]
    assert type(model).__qualname__ == "RecordingModel"

    class Slotted(RecordingModel):
        __slots__ = ("elsewhere",)

    with pytest.raises(TypeError, match="Slotted has slots of its own"):
        in_class(Slotted())


def test_a_model_in_its_own_class_is_called_through_the_wrapper_however_it_is_called():
    handler = CountingHandler()
    inner = StreamingModel(callbacks=[handler])
    model = ReuseChatModel(inner=inner, window_s=0)
    same = model.as_inner()
    assert isinstance(same, StreamingModel)
    same.invoke(question("abc", "1"))
    same.bind(stop=["."]).batch([question(letters, "2") for letters in ("xyz", "cba", "yzx")])
    assert "".join(str(one.content) for one in same.stream(question("cab", "3"))) == "3"

    async def asked() -> None:
        await same.ainvoke(question("bac", "4"))
        await same.abatch([question("bca", "5"), question("acb", "6")])
        assert "7" in [one.content async for one in same.astream(question("cba", "7"))]
        events = [one async for one in same.astream_events(question("cab", "8"), version="v2")]
        assert events[-1]["event"] == "on_chat_model_end"

    asyncio.run(asked())
    same.generate([[HumanMessage(question("bac", "9"))]])
    assert {letters_in(call.text) for call in inner.calls} == {"abc", "xyz"}
    assert model.prompt_statistics.planned == len(inner.calls) == 11
    assert handler.events.count("start") == 11, "each is one call for callbacks, too"


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda model: model.model_copy(),
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
)
def test_copies_of_it_are_the_same(copied):
    model = in_class(FakeListChatModel(responses=["first"]))
    other = copied(model)
    other.responses = ["second"]
    assert isinstance(other, FakeListChatModel)
    assert other.invoke("Which?").content == "second"
    assert model.invoke("Which?").content == "first"


def test_copies_have_settings_of_their_own_which_take_effect_on_the_inner_one():
    server = Server()
    inner = gpt(server)
    model = in_class(inner)
    model.temperature = 0.25
    assert inner.temperature == 0.25
    model.model_copy(update={"temperature": 0.5}).invoke("Warm?")
    model.invoke("Cold?")
    assert [one["temperature"] for one in server.sent] == [0.5, 0.25]

    server = Server()
    model = wrapped(gpt(server))
    model.model_copy(update={"temperature": 0.5}).invoke("Warm?")
    model.invoke("As it was?")
    assert [one.get("temperature") for one in server.sent] == [0.5, None]


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


@pytest.mark.parametrize(("outer", "lines"), [(wrapped, 1), (in_class, 0)])
def test_an_agent_that_may_lose_cache_marks_says_so_once(outer, lines, caplog):
    class OfThisTest(ChatAnthropic):  # a class of its own: each is named once a process
        pass

    agent = create_agent(outer(OfThisTest()))
    for text in ("1", "2"):
        agent.invoke({"messages": [HumanMessage(text)]})
    assert caplog.text.count("as_inner()") == lines


def test_outside_of_agents_nothing_is_said_of_cache_marks(caplog):
    wrapped(ChatAnthropic()).invoke("1")
    assert "as_inner()" not in caplog.text
