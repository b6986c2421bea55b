import asyncio
import logging
from contextvars import copy_context
from typing import Any

import httpx
import pytest
from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.runnables.base import RunnableBindingBase
from langchain_model_helpers import (
    PIXEL,
    RecordingModel,
    StreamingModel,
    answer,
    configured,
    context,
    letters_in,
    model,
    openai_model,
    question,
)
from langchain_openai import ChatOpenAI
from openai_models import chat_openai
from pydantic import BaseModel, ValidationError

from ctxreuse import request_context
from ctxreuse.serving import EmulatedEngine, ToolCall
from langchain_ctxreuse import ReuseChatModel

pytestmark = pytest.mark.usefixtures("paper_words")


class TestContexts:
    def test_only_the_text_of_a_message_changes_and_not_in_the_callers(self, inner):
        wrapper = model(inner)
        wrapper.invoke(question("abc"))
        text = {"type": "text", "text": question("cab")}
        message = HumanMessage([text, PIXEL], id="m1", name="Ann", additional_kwargs={"x": 1})
        before = message.model_copy(deep=True)
        wrapper.invoke([message])
        [sent] = inner.calls[1].messages
        assert letters_in(str(sent.content)) == "abc"
        assert sent == message.model_copy(update={"content": sent.content})
        assert message == before

    def test_text_parts_are_planned_and_other_parts_are_not_touched(self, inner):
        wrapper = model(inner)
        parts: list[Any] = ["Look:", PIXEL, {"type": "text", "text": context("abc"), "extra": 1}]
        wrapper.invoke(
            [HumanMessage([*parts[:2], {"type": "text", "text": f"\n{context('abc')}"}])]
        )
        text = f"\n{context('cab')}\n "
        moved = [*parts[:2], {"type": "text", "text": text, "extra": 1}, "Which?"]
        wrapper.invoke([HumanMessage(moved)])
        [sent] = inner.calls[1].messages
        planned = sent.content[2]["text"]
        assert letters_in(planned) == "abc"
        assert (planned[0], planned[-2:]) == ("\n", "\n ")
        assert sent.content[2]["extra"] == 1
        assert [*sent.content[:2], sent.content[3]] == [*moved[:2], "Which?"]

    def test_other_tools_are_another_prefix(self, inner):
        wrapper = model(inner)
        wrapper.invoke(question("abc"), tools=[{"name": "one"}])
        wrapper.invoke(question("cab"), tools=[{"name": "other"}])
        wrapper.invoke(question("bca"), tools=[{"name": "one"}])
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab", "abc"]


class TestArguments:
    def test_the_model_is_called_with_exactly_the_users_and_bound_arguments(self):
        inner = RecordingModel()
        wrapper = model(inner)
        with request_context(tenant="acme", conversation_id="c1"):
            wrapper.invoke("Hi", stop=["."], temperature=0.5)
        arguments = inner.calls[0].arguments
        assert arguments.pop("run_manager") is not None
        assert arguments == {"stop": ["."], "temperature": 0.5}
        inner = RecordingModel()
        model(inner).bind(stop=["!"]).invoke("Hi")
        assert inner.calls[0].arguments["stop"] == ["!"]

    def test_a_model_without_a_run_manager_gets_none(self):
        class Plain(RecordingModel):
            def _generate(self, messages: list[BaseMessage], stop: Any = None) -> ChatResult:
                return answer(self._record(messages, {"stop": stop}))

        inner = Plain()
        assert model(inner).invoke("Hi").content == "Hi"
        assert inner.calls[0].arguments == {"stop": None}

    @pytest.mark.parametrize("tenant", ["acme", None])
    async def test_a_tenants_salt_is_sent_on_request(self, tenant, inner):
        wrapper = model(inner, send_cache_salt=True)
        config = configured(tenant=tenant)
        wrapper.invoke("Hi", config)
        await wrapper.ainvoke("Hi", config, extra_body={"top_k": 3})
        wrapper.invoke("Hi", config, extra_body={"cache_salt": "mine"})
        bodies = [call.arguments.get("extra_body") for call in inner.calls]
        if tenant is None:
            assert bodies == [None, {"top_k": 3}, {"cache_salt": "mine"}]
        else:
            salt = bodies[0]["cache_salt"]
            assert tenant not in salt
            assert bodies == [
                {"cache_salt": salt},
                {"top_k": 3, "cache_salt": salt},
                {"cache_salt": "mine"},
            ]

    def test_salts_of_tenants_differ_and_sessions_are_named_on_request(self):
        inner = RecordingModel()
        for tenant, key in (("a", ""), ("b", ""), ("a", ""), ("a", "secret")):
            wrapper = model(inner, send_cache_salt=True, salt_key=key)
            wrapper.invoke("Hi", configured(tenant=tenant))
            assert "secret" not in repr(wrapper)
        salts = [call.arguments["extra_body"]["cache_salt"] for call in inner.calls]
        assert salts[0] == salts[2]
        assert len(set(salts)) == 3

        inner = RecordingModel()
        wrapper = model(inner, send_session_id=True)
        wrapper.invoke("Hi", configured(thread_id="Größe\n1"), extra_headers={"X-Mine": "1"})
        wrapper.invoke("Hi", configured(thread_id="t1"), extra_headers={"x-session-id": "mine"})
        wrapper.invoke("Hi")
        headers = [call.arguments.get("extra_headers") for call in inner.calls]
        assert headers[0]["X-Mine"] == "1"
        assert headers[0]["X-Session-ID"].isalnum()
        assert headers[0]["X-Session-ID"].isascii()
        assert headers[1:] == [{"x-session-id": "mine"}, None]

    def test_salt_and_session_reach_the_engine_beside_the_models_own_body(self):
        engine = EmulatedEngine()
        seen: list[httpx.Headers] = []
        client = httpx.Client(
            transport=engine.transport(httpx),
            event_hooks={"request": [lambda request: seen.append(request.headers)]},
        )
        inner = chat_openai(client, None, extra_body={"top_k": 7})
        wrapper = model(inner, send_cache_salt=True, send_session_id=True)
        wrapper.invoke("Hi", configured(tenant="acme", thread_id="t1"))
        [body] = engine.requests
        assert body["top_k"] == 7
        assert len(body["cache_salt"]) == 32
        assert len(seen[0]["x-session-id"]) == 32


class TestScope:
    async def test_a_stream_may_be_ended_from_another_context(self):
        wrapper = model(StreamingModel())
        steps = wrapper.stream(question("abc", tenant="one"), configured(tenant="one"))
        copy_context().run(next, steps)
        steps.close()
        asteps = wrapper.astream(question("abc", tenant="one"), configured(tenant="one"))
        await asyncio.create_task(anext(asteps))
        await asteps.aclose()
        assert letters_in(str(wrapper.invoke(question("cab")).content)) == ""
        assert wrapper.planner.statistics().requests == 3


class TestWrongArguments:
    @pytest.mark.parametrize(
        "inner",
        [None, "gpt", 3, RunnableLambda(lambda text: text), ChatOpenAI, RecordingModel().bind()],
    )
    def test_an_inner_model_of_another_type_is_refused(self, inner):
        with pytest.raises(ValidationError, match=r"inner must be a LangChain chat model, not .*;"):
            ReuseChatModel(inner=inner)

    @pytest.mark.parametrize(
        "made",
        [
            lambda model: model.with_retry(),
            lambda model: model.with_fallbacks([model]),
            lambda model: model.bind(stop=["."]),
            lambda model: model | RunnableLambda(str),
            lambda _: init_chat_model(configurable_fields=("model", "model_provider")),
        ],
    )
    def test_what_is_made_of_a_model_is_refused_with_the_line_that_wraps_first(self, made):
        with pytest.raises(ValidationError, match="wrap the model first") as refused:
            ReuseChatModel(inner=made(RecordingModel()))
        assert "ReuseChatModel(inner=model).bind(...)" in str(refused.value)

    @pytest.mark.parametrize("field", ["send_cache_salt", "send_session_id"])
    def test_a_switch_is_true_or_false(self, field):
        with pytest.raises(ValueError, match=field):
            model(**{field: "yes"})

    def test_arguments_for_the_inner_model_are_said_to_be_unused(self, caplog):
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            model(temperature=0, api_key="secret")
        assert "does not use api_key, temperature" in caplog.text
        assert "secret" not in caplog.text


class Answer(BaseModel):
    """An answer."""

    letter: str


class TestToolsAndStructuredOutput:
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

    def test_a_model_that_returns_itself_is_the_wrapper_and_one_without_tools_says_so(self):
        class Same(RecordingModel):
            def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
                return self

        wrapper = model(Same())
        assert wrapper.bind_tools([]) is wrapper
        with pytest.raises(NotImplementedError):
            model().bind_tools([])
        with pytest.raises(NotImplementedError):
            model().with_structured_output(Answer)

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
