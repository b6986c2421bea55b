import logging
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
)
from langchain_core.runnables import RunnableBinding, RunnableLambda, RunnableParallel
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import tool
from langchain_model_helpers import (
    RecordingModel,
    configured,
    context,
    letters_in,
    model,
    openai_model,
    question,
)
from pydantic import BaseModel

from ctxreuse import ReusePlanner
from ctxreuse.serving import EmulatedEngine, ToolCall
from langchain_ctxreuse import ReuseChatModel

pytestmark = pytest.mark.usefixtures("paper_words")


class Answer(BaseModel):
    """An answer."""

    letter: str


class TestToolsAndStructuredOutput:
    def test_bound_tools_are_called_through_the_wrapper(self):
        engine = EmulatedEngine(answer=lambda body: ToolCall("look", '{"at": "a"}'))
        wrapper = model(openai_model(engine))

        @tool
        def look(at: str) -> str:
            """Look at something."""
            return at

        bound = wrapper.bind_tools([look], tool_choice="look")
        assert isinstance(bound, RunnableBinding)
        assert bound.bound is wrapper
        wrapper.bind_tools([look]).invoke(question("abc"))
        message = bound.invoke(question("abc"))
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [
            ("look", {"at": "a"})
        ]
        bound.invoke(question("cab"))
        assert letters_in(engine.requests[2]["messages"][0]["content"]) == "abc"
        assert engine.requests[1]["tool_choice"]["function"] == {"name": "look"}

    @pytest.mark.parametrize("include_raw", [False, True])
    @pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
    async def test_structured_output_goes_through_the_wrapper(self, method, include_raw):
        reply: Any = '{"letter": "a"}'
        if method == "function_calling":
            reply = ToolCall("Answer", reply)
        engine = EmulatedEngine(answer=lambda body: reply)
        wrapper = model(openai_model(engine))
        structured = wrapper.with_structured_output(Answer, method=method, include_raw=include_raw)
        for letters in ("abc", "cab"):
            out = structured.invoke(f"{question(letters)} In JSON.")
            aout = await structured.ainvoke(f"{question(letters)} In JSON.")
            for one in (out, aout):
                parsed = one["parsed"] if include_raw else one
                assert parsed == Answer(letter="a")
            if include_raw:
                assert isinstance(out["raw"], AIMessage)
        sent = [letters_in(body["messages"][0]["content"]) for body in engine.requests]
        assert sent == ["abc"] * 4

    def test_a_model_that_binds_by_copying_itself_is_wrapped_anew(self):
        class Copying(RecordingModel):
            bound_tools: int = 0

            def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
                return self.model_copy(update={"bound_tools": len(tools)})

        inner = Copying()
        wrapper = model(inner)
        bound = wrapper.bind_tools([{"name": "x"}])
        assert isinstance(bound, ReuseChatModel)
        assert bound.inner.bound_tools == 1
        assert bound.planner is wrapper.planner
        bound.invoke(question("abc"))
        wrapper.invoke(question("cab"))
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]

    def test_a_model_that_returns_itself_is_the_wrapper(self):
        class Same(RecordingModel):
            def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
                return self

        wrapper = model(Same())
        assert wrapper.bind_tools([]) is wrapper

    def test_models_in_all_kinds_of_runnables_are_found(self):
        class Elaborate(RecordingModel):
            def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:
                retried = self.bind(stop=["."]).with_retry().with_config(tags=["x"])
                both = RunnableParallel(raw=retried.with_fallbacks([self]), text=lambda text: text)
                made = RunnableLambda(lambda text: text) | both | (lambda out: out["raw"])
                all_made.append(made)
                return made

        def models_in(made: Any) -> list[Any]:
            fallen_back = made.steps[1].steps__["raw"]
            innermost = fallen_back.runnable
            while isinstance(innermost, RunnableBindingBase):
                innermost = innermost.bound
            return [innermost, *fallen_back.fallbacks]

        all_made: list[Any] = []
        inner = Elaborate()
        wrapper = model(inner)
        structured = wrapper.with_structured_output({"title": "x"})
        assert [one is wrapper for one in models_in(structured)] == [True, True]
        assert [one is inner for one in models_in(all_made[0])] == [True, True], "unchanged"
        wrapper.invoke(question("abc"))
        structured.invoke(question("cab"))
        assert letters_in(inner.calls[-1].text) == "abc"

    def test_a_model_that_hides_itself_is_said_so(self, caplog):
        class Hiding(RecordingModel):
            def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
                return RunnableLambda(lambda text: self.invoke(text))

        wrapper = model(Hiding())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            assert wrapper.bind_tools([]).invoke("Hi").content == "Hi"
        assert "Hiding.bind_tools returned a RunnableLambda" in caplog.text
        assert "unplanned" in caplog.text

    def test_a_model_without_tools_says_so_itself(self):
        with pytest.raises(NotImplementedError):
            model().bind_tools([])
        with pytest.raises(NotImplementedError):
            model().with_structured_output(Answer)

    def test_an_agent_calls_the_model_through_the_wrapper(self):
        def answer_to(body: Any) -> Any:
            if body["messages"][-1]["role"] == "tool":
                return "Seen."
            return ToolCall("look", '{"at": "x"}')

        engine = EmulatedEngine(answer=answer_to)
        planner = ReusePlanner()

        @tool
        def look(at: str) -> str:
            """Look at something."""
            return context("cab")

        wrapper = model(openai_model(engine), planner=planner)
        agent = create_agent(wrapper, tools=[look])
        out = agent.invoke(
            {"messages": [HumanMessage(question("abc"))]}, configured(thread_id="t1")
        )
        assert out["messages"][-1].content == "Seen."
        assert out["messages"][2].content == context("cab"), "the agent's state is not changed"
        assert len(engine.requests) == 2
        first, second = engine.requests
        assert second["messages"][: len(first["messages"])] == first["messages"]
        assert second["messages"][-1]["content"] == "\n\n".join(
            f"Please refer to [Doc_{number}] in the previous conversation." for number in (3, 1, 2)
        )
