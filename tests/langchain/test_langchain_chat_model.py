import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextvars import copy_context
from typing import Any

import httpx
import pytest
from adapter_conformance import FaultyPlanner
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.load import dumps
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableBinding, RunnableLambda, RunnableParallel
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import tool
from langchain_model_helpers import (
    CountingHandler,
    RecordingModel,
    StreamingModel,
    answer,
    block,
    context,
    letters_in,
    question,
    text_of,
)
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ValidationError

from ctxreuse import ReusePlanner, request_context
from ctxreuse.adapters.prompt_planner import PromptPart
from ctxreuse.serving import EmulatedEngine, ToolCall
from langchain_ctxreuse import ReuseChatModel, ReuseRetriever, format_context
from langchain_ctxreuse.messages import prompt_texts

PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def model(inner: BaseChatModel | None = None, **fields: Any) -> ReuseChatModel:
    """Return a wrapper without a window, so that single calls are sent at once."""
    fields.setdefault("window_s", 0)
    return ReuseChatModel(inner=RecordingModel() if inner is None else inner, **fields)


def openai_model(engine: EmulatedEngine, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="emulated",
        base_url="http://engine/v1",
        api_key="none",  # type: ignore[arg-type]
        http_client=httpx.Client(transport=engine.transport(httpx)),
        http_async_client=httpx.AsyncClient(transport=engine.transport(httpx)),
        stream_usage=True,
        max_retries=0,
        **fields,
    )


def configured(**configurable: Any) -> dict[str, Any]:
    return {"configurable": configurable}


@pytest.fixture
def global_cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


class TestContexts:
    def test_a_rendered_context_is_planned(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        wrapper.invoke(question("abc"))
        wrapper.invoke(question("cab"))
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]
        assert inner.calls[1].text == (
            f"{context('abc')}\n\nPlease read the context in the following priority order: "
            "[Doc_3] > [Doc_1] > [Doc_2] and answer the question.\n\nWhich?"
        )

    async def test_async_calls_send_what_sync_ones_send(self) -> None:
        sync, asynchronous = RecordingModel(), RecordingModel()
        one, other = model(sync), model(asynchronous)
        for letters in ("abc", "cab", "bde", "eb"):
            one.invoke(question(letters))
            await other.ainvoke(question(letters))
        assert [call.text for call in sync.calls] == [call.text for call in asynchronous.calls]

    def test_all_other_text_stays_as_it_is(self) -> None:
        inner = RecordingModel()
        messages = [SystemMessage("[Doc_1] x\n\n[Doc_2] y"), HumanMessage(f"- {context('ab')} -")]
        model(inner).invoke(messages)
        assert inner.calls[0].messages == messages

    def test_the_callers_messages_are_not_changed(self) -> None:
        wrapper = model()
        wrapper.invoke(question("abc"))
        message = HumanMessage([{"type": "text", "text": question("cab")}, PIXEL])
        before = message.model_copy(deep=True)
        wrapper.invoke([message])
        assert message == before

    def test_only_the_text_of_a_message_changes(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        wrapper.invoke(question("abc"))
        message = HumanMessage(
            question("cab"), id="m1", name="Ann", additional_kwargs={"x": 1}, response_metadata={}
        )
        wrapper.invoke([message])
        [sent] = inner.calls[1].messages
        assert letters_in(str(sent.content)) == "abc"
        assert sent == message.model_copy(update={"content": sent.content})

    def test_messages_that_do_not_change_are_passed_on_themselves(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        wrapper.invoke(question("abc"))
        kept = SystemMessage("Be brief.")
        wrapper.invoke([kept, HumanMessage(question("cab"))])
        assert inner.calls[1].messages[0] is kept

    def test_text_parts_are_planned_and_other_parts_are_not_touched(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        parts: list[Any] = ["Look:", PIXEL, {"type": "text", "text": context("abc"), "extra": 1}]
        wrapper.invoke([HumanMessage([*parts[:2], {"type": "text", "text": f" {context('abc')}"}])])
        text = f" {context('cab')}\n "
        moved = [*parts[:2], {"type": "text", "text": text, "extra": 1}, "Which?"]
        wrapper.invoke([HumanMessage(moved)])
        [sent] = inner.calls[1].messages
        planned = sent.content[2]["text"]  # type: ignore[index, call-overload]
        assert letters_in(planned) == "abc"
        assert (planned[0], planned[-2:]) == (" ", "\n ")
        assert sent.content[2]["extra"] == 1  # type: ignore[index, call-overload]
        assert [*sent.content[:2], sent.content[3]] == [*moved[:2], "Which?"]

    def test_an_answered_turn_is_replayed_as_it_was_sent(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        wrapper.invoke(question("abc"))
        first = HumanMessage(question("cab"))
        call = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}])
        result = ToolMessage(context("fed"), tool_call_id="1")
        wrapper.invoke([first])
        wrapper.invoke([first, call, result])
        wrapper.invoke([first, call, result, AIMessage("So."), HumanMessage("Why?")])
        sent = [[message.content for message in one.messages] for one in inner.calls[1:]]
        assert letters_in(str(sent[0][0])) == "abc"
        assert sent[1][:1] == sent[0]
        assert sent[2][:3] == sent[1]
        assert inner.calls[3].messages[1] is call

    def test_a_conversation_is_not_shown_a_block_twice(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        first = HumanMessage(question("abc"))
        wrapper.invoke([first], configured(thread_id="t1"))
        messages = [first, AIMessage("So."), HumanMessage(question("bd"))]
        wrapper.invoke(messages, configured(thread_id="t1"))
        assert inner.calls[1].messages[2].content == (
            "Please refer to [Doc_2] in the previous conversation.\n\n"
            f"[Doc_4] {block('d').text}\n\nWhich?"
        )

    def test_documents_that_the_retriever_has_planned_are_left_alone(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        planner = ReusePlanner()
        for letters in ("uvw", "wuv"):
            context("uvw")  # somebody else renders the same documents without a plan
            found = [Document(block(letter).text, id=letter) for letter in letters]
            retriever = ReuseRetriever(
                retriever=RunnableLambda(lambda query, found=found: found),
                planner=planner,
                annotation="metadata",
            )
            shown = format_context(retriever.invoke("q"))
            wrapper.invoke(f"{shown}\n\nWhich?")
            assert inner.calls[-1].text == f"{shown}\n\nWhich?"
        assert letters_in(inner.calls[-1].text) == "uvw"
        assert wrapper.planner.statistics().requests == 0

    def test_documents_without_a_plan_are_planned_in_the_prompt(self) -> None:
        inner = RecordingModel()
        prompt = ChatPromptTemplate.from_messages(
            [("system", "Be brief."), ("human", "{context}\n\n{question}")]
        )
        chain = prompt | model(inner)
        for letters in ("abc", "cab"):
            found = [Document(block(letter).text, id=letter) for letter in letters]
            chain.invoke({"context": format_context(found), "question": "Which?"})
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]

    def test_strategy_none_only_schedules(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner, strategy="none")
        wrapper.invoke(question("abc"))
        wrapper.invoke(question("cab"))
        assert letters_in(inner.calls[1].text) == "cab"

    def test_other_tools_are_another_prefix(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        wrapper.invoke(question("abc"), tools=[{"name": "one"}])
        wrapper.invoke(question("cab"), tools=[{"name": "other"}])
        wrapper.invoke(question("bca"), tools=[{"name": "one"}])
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab", "abc"]


class TestMessageTexts:
    def test_roles_have_openais_names(self) -> None:
        messages = [
            SystemMessage("s"),
            HumanMessage("u"),
            AIMessage("a"),
            AIMessageChunk("c"),
            ToolMessage("t", tool_call_id="1"),
            FunctionMessage("f", name="f"),
            ChatMessage("o", role="critic"),
        ]
        assert list(prompt_texts(messages, {}).parts) == [
            PromptPart("system", "s"),
            PromptPart("user", "u"),
            PromptPart("assistant", "a"),
            PromptPart("assistant", "c"),
            PromptPart("tool", "t"),
            PromptPart("function", "f"),
            PromptPart("critic", "o"),
        ]

    def test_what_is_no_text_stands_for_itself(self) -> None:
        def segments(*parts: Any) -> list[PromptPart]:
            return list(prompt_texts([HumanMessage(list(parts))], {}).parts)

        [first, image, last] = segments("a", PIXEL, {"type": "text", "text": "b"})
        assert (first, last) == (PromptPart("user", "a"), PromptPart("user", "b"))
        assert image.role == "user"
        assert "AAAA" not in image.text
        other = {"type": "image_url", "image_url": {"url": "other"}}
        assert segments(PIXEL) == [image]
        assert segments(other) != [image]

    def test_tool_calls_count(self) -> None:
        one = AIMessage("", tool_calls=[{"name": "look", "args": {"at": 1}, "id": "1"}])
        other = AIMessage("", tool_calls=[{"name": "look", "args": {"at": 2}, "id": "1"}])
        assert prompt_texts([one], {}).parts != prompt_texts([other], {}).parts
        assert prompt_texts([one], {}).parts[0] == PromptPart("assistant", "")

    def test_an_empty_message_is_a_segment(self) -> None:
        assert prompt_texts([AIMessage([])], {}).parts == (PromptPart("assistant", ""),)

    def test_texts_are_put_back_where_they_were(self) -> None:
        messages = [SystemMessage("a"), HumanMessage(["b", PIXEL, {"type": "text", "text": "c"}])]
        texts = prompt_texts(messages, {"tools": [1]})
        upper = texts.with_texts([segment.text.upper() for segment in texts.parts])
        assert upper == [
            SystemMessage("A"),
            HumanMessage(["B", PIXEL, {"type": "text", "text": "C"}]),
        ]
        assert texts.with_texts([segment.text for segment in texts.parts]) == messages


class TestArguments:
    def test_the_model_is_called_with_exactly_the_users_arguments(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        with request_context(tenant="acme", conversation_id="c1"):
            wrapper.invoke("Hi", stop=["."], temperature=0.5)
        arguments = inner.calls[0].arguments
        assert arguments.pop("run_manager") is not None
        assert arguments == {"stop": ["."], "temperature": 0.5}

    def test_bound_arguments_reach_the_model(self) -> None:
        inner = RecordingModel()
        model(inner).bind(stop=["!"]).invoke("Hi")
        assert inner.calls[0].arguments["stop"] == ["!"]

    def test_a_model_without_a_run_manager_gets_none(self) -> None:
        class Plain(RecordingModel):
            def _generate(  # type: ignore[override]
                self, messages: list[BaseMessage], stop: Any = None
            ) -> ChatResult:
                return answer(self._record(messages, {"stop": stop}))

        inner = Plain()
        assert model(inner).invoke("Hi").content == "Hi"
        assert inner.calls[0].arguments == {"stop": None}

    @pytest.mark.parametrize("tenant", ["acme", None])
    async def test_a_tenants_salt_is_sent_on_request(self, tenant: str | None) -> None:
        inner = RecordingModel()
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

    def test_salts_of_tenants_differ_and_are_stable(self) -> None:
        inner = RecordingModel()
        for tenant, key in (("a", ""), ("b", ""), ("a", ""), ("a", "secret")):
            wrapper = model(inner, send_cache_salt=True, salt_key=key)
            wrapper.invoke("Hi", configured(tenant=tenant))
            assert "secret" not in repr(wrapper)
        salts = [call.arguments["extra_body"]["cache_salt"] for call in inner.calls]
        assert salts[0] == salts[2]
        assert len(set(salts)) == 3

    def test_a_session_is_named_on_request(self) -> None:
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

    def test_salt_and_session_reach_the_engine_beside_the_models_own_body(self) -> None:
        engine = EmulatedEngine()
        seen: list[httpx.Headers] = []
        client = httpx.Client(
            transport=engine.transport(httpx),
            event_hooks={"request": [lambda request: seen.append(request.headers)]},
        )
        inner = ChatOpenAI(
            model="emulated",
            base_url="http://engine/v1",
            api_key="none",  # type: ignore[arg-type]
            http_client=client,
            extra_body={"top_k": 7},
        )
        wrapper = model(inner, send_cache_salt=True, send_session_id=True)
        wrapper.invoke("Hi", configured(tenant="acme", thread_id="t1"))
        [body] = engine.requests
        assert body["top_k"] == 7
        assert len(body["cache_salt"]) == 32
        assert len(seen[0]["x-session-id"]) == 32


class TestScope:
    def test_tenants_in_the_config_are_kept_apart(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            wrapper.invoke(question(letters), configured(tenant=tenant))
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab", "abc"]

    async def test_the_tenant_reaches_async_calls_and_streams(self) -> None:
        inner = StreamingModel()
        wrapper = model(inner)
        one, two = configured(tenant="one"), configured(tenant="two")
        await wrapper.ainvoke(question("abc"), one)
        for _ in wrapper.stream(question("cab"), two):
            pass
        async for _ in wrapper.astream(question("bca"), one):
            pass
        for _ in wrapper.stream(question("acb"), one):
            pass
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab", "abc", "abc"]

    def test_the_request_context_counts(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            with request_context(tenant=tenant):
                wrapper.invoke(question(letters))
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab", "abc"]

    def test_the_config_around_a_step_counts(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        step = RunnableLambda(lambda text: wrapper.invoke(text))
        old_style = RunnableLambda(lambda text: wrapper.generate([[HumanMessage(text)]]))
        step.invoke(question("abc"), configured(tenant="one"))
        step.invoke(question("cab"), configured(tenant="two"))
        old_style.invoke(question("bca"), configured(tenant="one"))
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab", "abc"]

    def test_a_bound_config_counts(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        wrapper.with_config(configurable={"tenant": "one"}).invoke(question("abc"))
        wrapper.invoke(question("cab"))
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "cab"]

    async def test_the_listeners_context_shows_nothing_of_a_stream(self) -> None:
        wrapper = model(StreamingModel())
        steps = wrapper.stream("Hello", configured(tenant="one"))
        next(steps)
        asteps = wrapper.astream("Hello", configured(tenant="one"))
        await anext(asteps)  # type: ignore[arg-type]
        assert "tenant='one'" not in repr(list(copy_context().items()))
        steps.close()  # type: ignore[attr-defined]
        await asteps.aclose()  # type: ignore[attr-defined]

    async def test_a_stream_may_be_ended_from_another_context(self) -> None:
        wrapper = model(StreamingModel())
        steps = wrapper.stream(question("abc"), configured(tenant="one"))
        copy_context().run(next, steps)
        steps.close()  # type: ignore[attr-defined]
        asteps = wrapper.astream(question("abc"), configured(tenant="one"))
        await asyncio.create_task(anext(asteps))  # type: ignore[arg-type]
        await asteps.aclose()  # type: ignore[attr-defined]
        assert letters_in(str(wrapper.invoke(question("cab")).content)) == ""
        assert wrapper.planner.statistics().requests == 3

    def test_a_wrapper_in_a_wrapper_serves_the_same_tenant(self) -> None:
        inner = RecordingModel()
        outer = model(model(inner), strategy="none")
        for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
            outer.invoke(question(letters), configured(tenant=tenant))
        outer.batch([question("bac")], configured(tenant="one"))
        list(outer.stream(question("bac"), configured(tenant="two")))
        sent = [letters_in(call.text) for call in inner.calls]
        assert sent == ["abc", "cab", "abc", "abc", "cab"]


class TestCallbacks:
    @pytest.mark.parametrize("place", ["inner", "wrapper", "config", "all"])
    async def test_each_event_comes_once(self, place: str) -> None:
        handler = CountingHandler()
        at = {
            one: [handler] if place in (one, "all") else None
            for one in ("inner", "wrapper", "config")
        }
        wrapper = model(StreamingModel(callbacks=at["inner"]), callbacks=at["wrapper"])
        config: Any = {"callbacks": at["config"]}
        wrapper.invoke("Hi", config)
        await wrapper.ainvoke("Hi", config)
        assert handler.events == ["start", "end"] * 2
        handler.events.clear()
        list(wrapper.stream("Hi", config))
        assert handler.events == ["start", *["token"] * 4, "end"]
        handler.events.clear()
        _ = [step async for step in wrapper.astream("Hi", config)]
        assert handler.events == ["start", *["token"] * 4, "end"]

    def test_errors_come_once(self) -> None:
        handler = CountingHandler()
        wrapper = model(RecordingModel(failing=lambda text: ValueError("no")), callbacks=[handler])
        with pytest.raises(ValueError, match="no"):
            wrapper.invoke("Hi")
        assert handler.events == ["start", "error"]

    def test_callbacks_see_the_prompt_as_given(self) -> None:
        handler = CountingHandler()
        wrapper = model(callbacks=[handler])
        wrapper.invoke(question("abc"))
        wrapper.invoke(question("cab"))
        assert handler.prompts == [question("abc"), question("cab")]

    def test_handlers_of_both_models_are_called(self) -> None:
        inside, outside = CountingHandler(), CountingHandler()
        model(RecordingModel(callbacks=[inside]), callbacks=[outside]).invoke("Hi")
        assert inside.events == outside.events == ["start", "end"]

    def test_tags_and_metadata_of_both_models_are_kept(self) -> None:
        handler = CountingHandler()
        inner = RecordingModel(tags=["a", "b"], metadata={"x": 1, "y": 1})
        wrapper = model(inner, tags=["b", "c"], metadata={"y": 2}, callbacks=[handler])
        wrapper.invoke("Hi")
        [start] = handler.starts
        assert start["tags"] == ["a", "b", "c"]
        assert {name: start["metadata"][name] for name in "xy"} == {"x": 1, "y": 2}
        assert "langchain-core" in start["metadata"]["lc_versions"]

    def test_traces_name_the_model_inside(self) -> None:
        handler = CountingHandler()
        wrapper = model(openai_model(EmulatedEngine(), temperature=0.3), callbacks=[handler])
        wrapper.invoke("Hi")
        [start] = handler.starts
        assert start["invocation_params"]["model"] == "emulated"
        assert start["metadata"]["ls_provider"] == "openai"
        assert start["metadata"]["ls_model_name"] == "emulated"
        assert start["metadata"]["ls_temperature"] == 0.3

    def test_a_missing_model_name_is_the_class(self) -> None:
        assert model(FakeListChatModel(responses=["x"]))._get_ls_params()["ls_model_name"] == (
            "FakeListChatModel"
        )


class TestCaching:
    @pytest.mark.usefixtures("global_cache")
    async def test_a_cached_answer_does_not_reach_the_model(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner)
        for letters in ("abc", "cab", "abc", "cab"):
            assert wrapper.invoke(question(letters)).content == "Which?"
            assert (await wrapper.ainvoke(question(letters))).content == "Which?"
        assert len(inner.calls) == 2

    def test_the_inner_models_cache_is_used(self) -> None:
        inner = RecordingModel(cache=InMemoryCache())
        wrapper = model(inner)
        wrapper.invoke("Hi")
        wrapper.invoke("Hi")
        assert len(inner.calls) == 1

    @pytest.mark.usefixtures("global_cache")
    def test_a_cache_that_is_switched_off_stays_off(self) -> None:
        inner = RecordingModel(cache=False)
        wrapper = model(inner)
        wrapper.invoke("Hi")
        wrapper.invoke("Hi")
        assert len(inner.calls) == 2

    @pytest.mark.usefixtures("global_cache")
    def test_other_inner_models_have_other_keys(self) -> None:
        class Other(RecordingModel):
            pass

        inners = [RecordingModel(), RecordingModel(model_name="large"), Other(), StreamingModel()]
        for inner in inners:
            model(inner).invoke("Hi")
        assert [len(inner.calls) for inner in inners] == [1, 1, 1, 1]

    @pytest.mark.usefixtures("global_cache")
    def test_a_wrapper_made_anew_finds_the_answers(self) -> None:
        engine = EmulatedEngine()
        for _ in range(2):
            model(openai_model(engine)).invoke("Hi")
        assert len(engine.requests) == 1
        model(openai_model(engine, temperature=0.5)).invoke("Hi")
        openai_model(engine).invoke("Hi")
        assert len(engine.requests) == 3

    @pytest.mark.usefixtures("global_cache")
    def test_a_cached_answer_costs_no_plan(self) -> None:
        wrapper = model()
        wrapper.invoke(question("abc"))
        wrapper.invoke(question("abc"))
        assert wrapper.planner.statistics().requests == 1


class CountingLimiter(BaseRateLimiter):
    def __init__(self) -> None:
        self.acquired = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.acquired += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        self.acquired += 1
        return True


async def test_the_inner_models_rate_limiter_is_asked_once_a_call() -> None:
    limiter = CountingLimiter()
    wrapper = model(StreamingModel(rate_limiter=limiter))
    wrapper.invoke("Hi")
    await wrapper.ainvoke("Hi")
    list(wrapper.stream("Hi"))
    assert limiter.acquired == 3


class TestStreaming:
    async def test_pieces_and_usage_come_through(self) -> None:
        inner = StreamingModel()
        wrapper = model(inner)
        pieces = list(wrapper.stream(question("abc")))
        apieces = [piece async for piece in wrapper.astream(question("cab"))]
        for some in (pieces, apieces):
            assert [piece.content for piece in some] == [*"Which?", "", ""]
            assert [piece.usage_metadata for piece in some if piece.usage_metadata] == [
                {"input_tokens": 7, "output_tokens": 6, "total_tokens": 13}
            ]
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]

    async def test_a_model_that_does_not_stream_answers_whole(self) -> None:
        wrapper = model(RecordingModel())
        assert [piece.content for piece in wrapper.stream("Hi")] == ["Hi"]
        assert [piece.content async for piece in wrapper.astream("Hi")] == ["Hi"]

    async def test_a_model_with_only_a_sync_stream_streams_in_tasks_too(self) -> None:
        class SyncOnly(StreamingModel):
            _astream = BaseChatModel._astream

        wrapper = model(SyncOnly())
        assert [piece.content async for piece in wrapper.astream("Hi")] == ["H", "i", "", ""]

    @pytest.mark.parametrize("place", ["inner", "wrapper"])
    def test_streaming_can_be_disabled(self, place: str) -> None:
        inner = StreamingModel(disable_streaming=place == "inner")
        fields = {"disable_streaming": True} if place == "wrapper" else {}
        assert [piece.content for piece in model(inner, **fields).stream("Hi")] == ["Hi"]

    def test_streaming_with_tools_can_be_disabled(self) -> None:
        wrapper = model(StreamingModel(disable_streaming="tool_calling"))
        assert len(list(wrapper.stream("Hi"))) == 4
        assert len(list(wrapper.stream("Hi", tools=[{"name": "x"}]))) == 1

    async def test_events_show_the_pieces(self) -> None:
        inner = StreamingModel()
        chain = RunnableLambda(lambda text: text) | model(inner)
        events = [event async for event in chain.astream_events(question("ab"), version="v2")]
        names = [event["event"] for event in events if "chat_model" in event["event"]]
        assert names == ["on_chat_model_start", *["on_chat_model_stream"] * 8, "on_chat_model_end"]

    async def test_invoke_streams_for_those_who_listen_to_events(self) -> None:
        wrapper = model(StreamingModel())
        step = RunnableLambda(lambda text: wrapper.invoke(text).content)
        events = [event async for event in step.astream_events("Hi", version="v2")]
        pieces = [event for event in events if event["event"] == "on_chat_model_stream"]
        assert "".join(event["data"]["chunk"].content for event in pieces) == "Hi"

    @pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")  # it is beta
    async def test_content_events_are_planned_for_the_right_tenant(self) -> None:
        inner = StreamingModel()
        wrapper = model(inner)
        one, two = configured(tenant="one"), configured(tenant="two")
        wrapper.invoke(question("abc"), one)
        stream = wrapper.stream_events(question("cab"), one, version="v3")
        assert str(stream.text) == "Which?"
        other = wrapper.stream_events(question("cab"), two, version="v3")
        assert str(other.text) == "Which?"
        tasks = await wrapper.astream_events(question("bca"), one, version="v3")
        assert await tasks.text == "Which?"
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc", "cab", "abc"]

    @pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")  # it is beta
    async def test_a_models_own_content_events_are_passed_on(self) -> None:
        class Native(StreamingModel):
            def _stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
                raise AssertionError("it has events of its own")

            async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                raise AssertionError("it has events of its own")
                yield

            def _events(self, messages: list[BaseMessage]) -> Iterator[Any]:
                text = self._record(messages, {})
                yield {"event": "message-start", "role": "ai", "id": "m"}
                start = {"type": "text", "text": ""}
                yield {"event": "content-block-start", "index": 0, "content": start}
                delta = {"type": "text-delta", "text": text}
                yield {"event": "content-block-delta", "index": 0, "delta": delta}
                done = {"type": "text", "text": text}
                yield {"event": "content-block-finish", "index": 0, "content": done}
                yield {"event": "message-finish"}

            def _stream_chat_model_events(
                self, messages: list[BaseMessage], **kwargs: Any
            ) -> Iterator[Any]:
                yield from self._events(messages)

            async def _astream_chat_model_events(
                self, messages: list[BaseMessage], **kwargs: Any
            ) -> AsyncIterator[Any]:
                for event in self._events(messages):
                    yield event

        inner = Native()
        wrapper = model(inner)
        assert str(wrapper.stream_events(question("abc"), version="v3").text) == "Which?"
        tasks = await wrapper.astream_events(question("cab"), version="v3")
        assert await tasks.text == "Which?"
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]
        assert model(StreamingModel())._stream_chat_model_events is None
        assert model(StreamingModel())._astream_chat_model_events is None


class Answer(BaseModel):
    """An answer."""

    letter: str


class TestToolsAndStructuredOutput:
    def test_bound_tools_are_called_through_the_wrapper(self) -> None:
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
    async def test_structured_output_goes_through_the_wrapper(
        self, method: str, include_raw: bool
    ) -> None:
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
                parsed = one["parsed"] if include_raw else one  # type: ignore[index]
                assert parsed == Answer(letter="a")
            if include_raw:
                assert isinstance(out["raw"], AIMessage)  # type: ignore[index]
        sent = [letters_in(body["messages"][0]["content"]) for body in engine.requests]
        assert sent == ["abc"] * 4

    def test_a_model_that_binds_by_copying_itself_is_wrapped_anew(self) -> None:
        class Copying(RecordingModel):
            bound_tools: int = 0

            def bind_tools(self, tools: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                return self.model_copy(update={"bound_tools": len(tools)})

        inner = Copying()
        wrapper = model(inner)
        bound = wrapper.bind_tools([{"name": "x"}])
        assert isinstance(bound, ReuseChatModel)
        assert bound.inner.bound_tools == 1  # type: ignore[attr-defined]
        assert bound.planner is wrapper.planner
        bound.invoke(question("abc"))
        wrapper.invoke(question("cab"))
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]

    def test_a_model_that_returns_itself_is_the_wrapper(self) -> None:
        class Same(RecordingModel):
            def bind_tools(self, tools: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                return self

        wrapper = model(Same())
        assert wrapper.bind_tools([]) is wrapper

    def test_models_in_all_kinds_of_runnables_are_found(self) -> None:
        class Elaborate(RecordingModel):
            def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:  # type: ignore[override]
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

    def test_a_model_that_hides_itself_is_said_so(self, caplog: pytest.LogCaptureFixture) -> None:
        class Hiding(RecordingModel):
            def bind_tools(self, tools: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                return RunnableLambda(lambda text: self.invoke(text))

        wrapper = model(Hiding())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            assert wrapper.bind_tools([]).invoke("Hi").content == "Hi"
        assert "Hiding.bind_tools returned a RunnableLambda" in caplog.text
        assert "unplanned" in caplog.text

    def test_a_model_without_tools_says_so_itself(self) -> None:
        with pytest.raises(NotImplementedError):
            model().bind_tools([])
        with pytest.raises(NotImplementedError):
            model().with_structured_output(Answer)

    def test_an_agent_calls_the_model_through_the_wrapper(self) -> None:
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


class TestComposition:
    def test_retries_and_fallbacks(self) -> None:
        tries: list[str] = []

        def failing(text: str) -> Exception | None:
            tries.append(text)
            return ValueError("busy") if len(tries) < 3 else None

        wrapper = model(RecordingModel(failing=failing))
        retrying = wrapper.with_retry(stop_after_attempt=3, wait_exponential_jitter=False)
        assert retrying.invoke(question("ab")).content == "Which?"
        assert len(tries) == 3
        assert wrapper.planner.statistics().requests == 1
        broken = model(RecordingModel(failing=lambda text: ValueError("down")))
        assert broken.with_fallbacks([wrapper]).invoke("Hi").content == "Hi"

    def test_a_wrapped_wrapper_still_answers(self) -> None:
        inner = RecordingModel()
        twice = model(model(inner))
        for letters in ("abc", "cab"):
            assert twice.invoke(question(letters), configured(tenant="t")).content == "Which?"
        assert letters_in(inner.calls[-1].text) == "abc"

    def test_token_counts_are_the_inner_models(self) -> None:
        inner = RecordingModel(custom_get_token_ids=lambda text: [1] * len(text))
        wrapper = model(inner)
        assert wrapper.get_token_ids("abc") == [1, 1, 1]
        assert wrapper.get_num_tokens("abc") == 3
        messages = [HumanMessage("abc")]
        counted = inner.get_num_tokens_from_messages(messages)
        assert wrapper.get_num_tokens_from_messages(messages) == counted > 3
        own = model(inner, custom_get_token_ids=lambda text: [2])
        assert own.get_token_ids("abc") == [2]
        assert own.get_num_tokens("abc") == 1
        assert own.get_num_tokens_from_messages(messages) == 1

    def test_settings_are_the_inner_models_unless_given(self) -> None:
        inner = RecordingModel(output_version="v1", profile={"max_input_tokens": 9}, verbose=True)
        wrapper = model(inner)
        assert (wrapper.output_version, wrapper.verbose) == ("v1", True)
        assert wrapper.profile == {"max_input_tokens": 9}
        assert wrapper.invoke("Hi").content == [{"type": "text", "text": "Hi"}]
        assert model(inner, output_version="v0").invoke("Hi").content == "Hi"

    def test_outputs_of_several_prompts_are_combined_by_the_inner_model(self) -> None:
        class Combining(RecordingModel):
            def _combine_llm_outputs(self, outputs: Any, /) -> dict[str, Any]:
                return {"asked": [output["asked"] for output in outputs]}

        out = model(Combining()).generate([[HumanMessage("a")], [HumanMessage("b")]])
        assert out.llm_output == {"asked": ["a", "b"]}

    async def test_prompts_generated_together_are_planned_together(self) -> None:
        inner = RecordingModel()
        wrapper = model(inner, window_s=0.005)
        prompts = [[HumanMessage(question(letters))] for letters in ("abc", "xyz", "cab")]
        await wrapper.agenerate(prompts)
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc", "xyz"]

    def test_it_can_be_dumped(self) -> None:
        wrapper = model(openai_model(EmulatedEngine()))
        assert "not_implemented" in dumps(wrapper)
        assert "ReuseChatModel" in dumps(ChatPromptTemplate.from_template("{x}") | wrapper)
        assert wrapper.asdict()["_type"] == "ctxreuse-openai-chat"
        assert wrapper.asdict()["model_name"] == "emulated"

    def test_usage_shows_the_cached_tokens(self) -> None:
        wrapper = model(openai_model(EmulatedEngine(block_size=16)))
        wrapper.invoke(question("abc"))
        usage = wrapper.invoke(question("cab")).usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] > 100


class TestFaults:
    async def test_a_planning_fault_sends_the_prompt_as_given(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        inner = StreamingModel()
        wrapper = model(inner, planner=FaultyPlanner())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            wrapper.invoke(question("cab"))
            await wrapper.ainvoke(question("cab"))
            list(wrapper.stream(question("cab")))
            wrapper.batch([question("cab"), question("abc")])
        assert [call.text for call in inner.calls[:3]] == [question("cab")] * 3
        assert sorted(call.text for call in inner.calls[3:]) == [question("abc"), question("cab")]
        assert wrapper.faults == 4
        assert len(caplog.records) == 1
        assert "ReuseChatModel: planning failed with RuntimeError" in caplog.text
        assert "Which" not in caplog.text

    def test_a_message_that_cannot_be_read_is_sent_as_it_is(self) -> None:
        class Odd(HumanMessage):
            @property
            def type_is_odd(self) -> bool:
                return True

        inner = RecordingModel()
        wrapper = model(inner)
        odd = Odd("x").model_copy(update={"content": [3]})
        with pytest.raises(AttributeError):
            prompt_texts([odd], {})
        inner._record = lambda messages, arguments: "fine"  # type: ignore[method-assign]
        assert wrapper._generate([odd]).generations[0].text == "fine"
        assert wrapper.faults == 1

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
    async def test_a_call_that_fails_is_taken_back(self, kind: type[BaseException]) -> None:
        wrapper = model(StreamingModel(failing=lambda text: kind("no")))
        with pytest.raises(kind):
            wrapper.invoke(question("abc"))
        with pytest.raises(kind):
            list(wrapper.stream(question("abc")))
        assert wrapper.planner.statistics().requests == 0
        if kind is ValueError:
            with pytest.raises(kind):
                await wrapper.ainvoke(question("abc"))
            with pytest.raises(kind):
                _ = [piece async for piece in wrapper.astream(question("abc"))]
            assert wrapper.planner.statistics().requests == 0

    async def test_a_cancelled_call_is_taken_back(self) -> None:
        class Slow(RecordingModel):
            async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
                await asyncio.sleep(30)
                raise AssertionError

            async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                await asyncio.sleep(30)
                yield

        wrapper = model(Slow())
        for start in (wrapper.ainvoke, lambda text: anext(wrapper.astream(text))):
            task = asyncio.ensure_future(start(question("abc")))  # type: ignore[operator]
            while not wrapper.planner.statistics().requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert wrapper.planner.statistics().requests == 0

    async def test_a_stream_that_breaks_later_has_been_read_by_the_engine(self) -> None:
        wrapper = model(StreamingModel(pieces_before_failing=2))
        with pytest.raises(RuntimeError):
            list(wrapper.stream(question("abc")))
        with pytest.raises(RuntimeError):
            _ = [piece async for piece in wrapper.astream(question("abc"))]
        assert wrapper.planner.statistics().requests == 2

    async def test_who_stops_listening_closes_the_models_stream(self) -> None:
        closed: list[str] = []

        class Closing(StreamingModel):
            def _stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
                try:
                    yield from super()._stream(*args, **kwargs)
                finally:
                    closed.append("sync")

            async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                try:
                    async for piece in super()._astream(*args, **kwargs):
                        yield piece
                finally:
                    closed.append("async")

        wrapper = model(Closing())
        steps = wrapper.stream(question("abc"))
        next(steps)
        steps.close()  # type: ignore[attr-defined]
        assert closed == ["sync"]
        asteps = wrapper.astream(question("abc"))
        await anext(asteps)  # type: ignore[arg-type]
        await asteps.aclose()  # type: ignore[attr-defined]
        assert closed == ["sync", "async"]
        assert wrapper.planner.statistics().requests == 2


class TestWrongArguments:
    @pytest.mark.parametrize(
        "inner", [None, "gpt", 3, RunnableLambda(lambda text: text), ChatOpenAI, model().bind()]
    )
    def test_an_inner_model_that_is_none_is_refused(self, inner: object) -> None:
        with pytest.raises(ValidationError, match=r"inner must be a LangChain chat model, not .*;"):
            ReuseChatModel(inner=inner)  # type: ignore[arg-type]

    @pytest.mark.parametrize("planner", ["planner", 3, ReusePlanner])
    def test_a_planner_of_another_type_is_refused(self, planner: object) -> None:
        with pytest.raises(ValueError, match=r"planner must be a ctxreuse\.ReusePlanner"):
            model(planner=planner)

    @pytest.mark.parametrize("window_s", [-1, float("nan"), "5 ms", None, True, 61])
    def test_a_window_that_is_none_is_refused(self, window_s: object) -> None:
        with pytest.raises(ValueError, match="micro-batch window"):
            model(window_s=window_s)

    @pytest.mark.parametrize("strategy", ["fast", None, ["reuse"]])
    def test_an_unknown_strategy_is_refused(self, strategy: object) -> None:
        with pytest.raises(ValueError, match=r"no strategy .*'reuse', 'paper', 'none'"):
            model(strategy=strategy)

    @pytest.mark.parametrize("field", ["send_cache_salt", "send_session_id"])
    def test_a_switch_is_true_or_false(self, field: str) -> None:
        with pytest.raises(ValueError, match=field):
            model(**{field: "yes"})

    def test_an_inner_model_is_needed(self) -> None:
        with pytest.raises(ValueError, match="inner"):
            ReuseChatModel()  # type: ignore[call-arg]

    def test_each_wrapper_has_a_planner_of_its_own_unless_given(self) -> None:
        shared = ReusePlanner()
        assert model().planner is not model().planner
        assert model(planner=shared).planner is shared

    def test_arguments_for_the_inner_model_are_said_to_be_unused(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            model(temperature=0, api_key="secret")
        assert "does not use api_key, temperature" in caplog.text
        assert "secret" not in caplog.text


def test_text_of_helper_reads_all_parts() -> None:
    assert text_of([HumanMessage(["a", {"type": "text", "text": "b"}])]) == "ab"
