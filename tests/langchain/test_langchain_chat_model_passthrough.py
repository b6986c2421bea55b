import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from adapter_conformance import FaultyPlanner
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel
from langchain_core.load import dumps
from langchain_core.messages import HumanMessage
from langchain_core.outputs import ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableLambda
from langchain_model_helpers import (
    CountingHandler,
    RecordingModel,
    StreamingModel,
    configured,
    letters_in,
    model,
    openai_model,
    question,
)

from ctxreuse.serving import EmulatedEngine
from langchain_ctxreuse.messages import prompt_texts


class TestCallbacks:
    @pytest.mark.parametrize("place", ["inner", "wrapper", "config", "all"])
    async def test_each_event_comes_once(self, place):
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

    def test_callbacks_see_the_prompt_as_given_and_errors_once(self):
        handler = CountingHandler()
        wrapper = model(callbacks=[handler])
        wrapper.invoke(question("abc"))
        wrapper.invoke(question("cab"))
        assert handler.prompts == [question("abc"), question("cab")]

        handler = CountingHandler()
        wrapper = model(RecordingModel(failing=lambda text: ValueError("no")), callbacks=[handler])
        with pytest.raises(ValueError, match="no"):
            wrapper.invoke("Hi")
        assert handler.events == ["start", "error"]

    def test_tags_and_metadata_of_both_models_are_kept(self):
        handler = CountingHandler()
        inner = RecordingModel(tags=["a", "b"], metadata={"x": 1, "y": 1})
        wrapper = model(inner, tags=["b", "c"], metadata={"y": 2}, callbacks=[handler])
        wrapper.invoke("Hi")
        [start] = handler.starts
        assert start["tags"] == ["a", "b", "c"]
        assert {name: start["metadata"][name] for name in "xy"} == {"x": 1, "y": 2}
        assert "langchain-core" in start["metadata"]["lc_versions"]

    def test_traces_name_the_model_inside(self):
        handler = CountingHandler()
        wrapper = model(openai_model(EmulatedEngine(), temperature=0.3), callbacks=[handler])
        wrapper.invoke("Hi")
        [start] = handler.starts
        assert start["invocation_params"]["model"] == "emulated"
        assert start["metadata"]["ls_provider"] == "openai"
        assert start["metadata"]["ls_model_name"] == "emulated"
        assert start["metadata"]["ls_temperature"] == 0.3


class TestCaching:
    @pytest.mark.usefixtures("global_cache")
    async def test_cached_answers_do_not_reach_the_model_and_cost_no_plan(self, inner):
        wrapper = model(inner)
        for letters in ("abc", "cab", "abc", "cab"):
            assert wrapper.invoke(question(letters)).content == "Which?"
            assert (await wrapper.ainvoke(question(letters))).content == "Which?"
        assert len(inner.calls) == 2
        wrapper = model()
        wrapper.invoke(question("bca"))
        wrapper.invoke(question("bca"))
        assert wrapper.planner.statistics().requests == 1

    @pytest.mark.usefixtures("global_cache")
    def test_the_inner_models_cache_is_used_and_stays_off_where_it_is_switched_off(self):
        own = InMemoryCache()
        for cache, calls in ((own, 1), (False, 2)):
            inner = RecordingModel(cache=cache)
            wrapper = model(inner)
            wrapper.invoke("Hi")
            wrapper.invoke("Hi")
            assert len(inner.calls) == calls
        assert own._cache

    @pytest.mark.usefixtures("global_cache")
    def test_other_inner_models_have_other_keys_which_wrappers_made_anew_find(self):
        class Other(RecordingModel):
            pass

        inners = [RecordingModel(), RecordingModel(model_name="large"), Other(), StreamingModel()]
        for inner in inners:
            model(inner).invoke("Hi")
        assert [len(inner.calls) for inner in inners] == [1, 1, 1, 1]

        engine = EmulatedEngine()
        for _ in range(2):
            model(openai_model(engine)).invoke("Hi")
        assert len(engine.requests) == 1
        model(openai_model(engine, temperature=0.5)).invoke("Hi")
        openai_model(engine).invoke("Hi")
        assert len(engine.requests) == 3


async def test_the_inner_models_rate_limiter_is_asked_once_a_call():
    limiter = MagicMock(BaseRateLimiter)
    wrapper = model(StreamingModel(rate_limiter=limiter))
    wrapper.invoke("Hi")
    await wrapper.ainvoke("Hi")
    list(wrapper.stream("Hi"))
    assert limiter.acquire.call_count + limiter.aacquire.call_count == 3


class TestComposition:
    def test_token_counts_are_the_inner_models(self):
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

    async def test_several_prompts_are_planned_together_and_combined_by_the_inner_model(self):
        inner = RecordingModel()
        wrapper = model(inner, window_s=0.005)
        prompts = [[HumanMessage(question(letters))] for letters in ("abc", "xyz", "cab")]
        await wrapper.agenerate(prompts)
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc", "xyz"]

        class Combining(RecordingModel):
            def _combine_llm_outputs(self, outputs: Any, /) -> dict[str, Any]:
                return {"asked": [output["asked"] for output in outputs]}

        out = model(Combining()).generate([[HumanMessage("a")], [HumanMessage("b")]])
        assert out.llm_output == {"asked": ["a", "b"]}

    def test_it_can_be_dumped_and_settings_are_the_inner_models_unless_given(self):
        wrapper = model(openai_model(EmulatedEngine()))
        assert "not_implemented" in dumps(wrapper)
        assert "ReuseChatModel" in dumps(ChatPromptTemplate.from_template("{x}") | wrapper)
        assert wrapper.asdict()["_type"] == "openai-chat"
        assert wrapper.asdict()["model_name"] == "emulated"

        inner = RecordingModel(output_version="v1", profile={"max_input_tokens": 9}, verbose=True)
        wrapper = model(inner)
        assert (wrapper.output_version, wrapper.verbose) == ("v1", True)
        assert wrapper.profile == {"max_input_tokens": 9}
        assert wrapper.invoke("Hi").content == [{"type": "text", "text": "Hi"}]
        assert model(inner, output_version="v0").invoke("Hi").content == "Hi"


class TestStreaming:
    async def test_pieces_and_usage_come_through_also_to_those_who_listen_to_events(self):
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

        wrapper = model(StreamingModel())
        step = RunnableLambda(lambda text: wrapper.invoke(text).content)
        events = [event async for event in step.astream_events("Hi", version="v2")]
        pieces = [event for event in events if event["event"] == "on_chat_model_stream"]
        assert "".join(event["data"]["chunk"].content for event in pieces) == "Hi"

    async def test_models_that_do_not_stream_or_only_synchronously_stream_in_tasks_too(self):
        wrapper = model(RecordingModel())
        assert [piece.content for piece in wrapper.stream("Hi")] == ["Hi"]
        assert [piece.content async for piece in wrapper.astream("Hi")] == ["Hi"]

        class SyncOnly(StreamingModel):
            _astream = BaseChatModel._astream

        wrapper = model(SyncOnly())
        assert [piece.content async for piece in wrapper.astream("Hi")] == ["H", "i", "", ""]

    @pytest.mark.parametrize("place", ["inner", "wrapper"])
    def test_streaming_can_be_disabled(self, place):
        inner = StreamingModel(disable_streaming=place == "inner")
        fields = {"disable_streaming": True} if place == "wrapper" else {}
        assert [piece.content for piece in model(inner, **fields).stream("Hi")] == ["Hi"]

    def test_streaming_with_tools_can_be_disabled(self):
        wrapper = model(StreamingModel(disable_streaming="tool_calling"))
        assert len(list(wrapper.stream("Hi"))) == 4
        assert len(list(wrapper.stream("Hi", tools=[{"name": "x"}]))) == 1

    @pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")  # it is beta
    async def test_content_events_are_planned_for_the_right_tenant(self):
        inner = StreamingModel()
        wrapper = model(inner)
        one, two = configured(tenant="one"), configured(tenant="two")
        wrapper.invoke(question("abc", tenant="one"), one)
        stream = wrapper.stream_events(question("cab", tenant="one"), one, version="v3")
        assert str(stream.text) == "Which?"
        other = wrapper.stream_events(question("cab", tenant="two"), two, version="v3")
        assert str(other.text) == "Which?"
        tasks = await wrapper.astream_events(question("bca", tenant="one"), one, version="v3")
        assert await tasks.text == "Which?"
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc", "cab", "abc"]

    @pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")  # it is beta
    async def test_a_models_own_content_events_are_passed_on(self):
        class Native(RecordingModel):
            def _stream_chat_model_events(self, messages: Any, **kwargs: Any) -> Iterator[Any]:
                text = {"type": "text", "text": self._record(messages, {})}
                usage: Any = {"input_tokens": 7, "output_tokens": 1, "total_tokens": 8}
                usage["input_token_details"] = {"cache_read": 5}
                yield {"event": "message-start", "role": "ai", "id": "m"}
                yield {"event": "content-block-start", "index": 0, "content": {**text, "text": ""}}
                yield {"event": "content-block-finish", "index": 0, "content": text}
                yield {"event": "message-finish", "usage": usage}

            async def _astream_chat_model_events(self, *args: Any, **kwargs: Any) -> Any:
                for event in self._stream_chat_model_events(*args, **kwargs):
                    yield event

        inner = Native()
        wrapper = model(inner)
        assert str(wrapper.stream_events(question("abc"), version="v3").text) == "Which?"
        tasks = await wrapper.astream_events(question("cab"), version="v3")
        assert await tasks.text == "Which?"
        assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]
        assert wrapper.planner.savings.reported.cached_tokens == 5, "one was read to its end"
        assert model(StreamingModel())._stream_chat_model_events is None


class TestFaults:
    async def test_a_planning_fault_sends_the_prompt_as_given(self, caplog):
        inner = StreamingModel()
        wrapper = model(inner, planner=FaultyPlanner())
        with caplog.at_level(logging.WARNING, "ctxreuse"):
            wrapper.invoke(question("cab"))
            await wrapper.ainvoke(question("cab"))
            list(wrapper.stream(question("cab")))
            wrapper.batch([question("cab"), question("abc")])
        assert [call.text for call in inner.calls[:3]] == [question("cab")] * 3
        assert sorted(call.text for call in inner.calls[3:]) == [question("abc"), question("cab")]
        assert wrapper.faults == wrapper.planner.savings.planning_failures == 4
        assert len(caplog.records) == 1
        assert "ReuseChatModel: planning failed with RuntimeError" in caplog.text
        assert "Which" not in caplog.text

    def test_a_message_that_cannot_be_read_is_sent_as_it_is(self, inner):
        class Unreadable(dict[str, Any]):
            def get(self, *_: Any) -> Any:
                raise AttributeError

        wrapper = model(inner)
        odd = HumanMessage("x").model_copy(update={"content": [Unreadable()]})
        with pytest.raises(AttributeError):
            prompt_texts([odd], {})
        inner._record = lambda messages, arguments: "fine"
        assert wrapper._generate([odd]).generations[0].text == "fine"
        assert wrapper.faults == 1

    @pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
    async def test_a_call_that_fails_is_taken_back(self, kind):
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

    async def test_a_cancelled_call_is_taken_back(self):
        class Slow(RecordingModel):
            async def _agenerate(self, *args: Any, **kwargs: Any) -> ChatResult:
                await asyncio.sleep(30)
                raise AssertionError

            async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
                await asyncio.sleep(30)
                yield

        wrapper = model(Slow())
        for start in (wrapper.ainvoke, lambda text: anext(wrapper.astream(text))):
            task = asyncio.ensure_future(start(question("abc")))
            while not wrapper.planner.statistics().requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert wrapper.planner.statistics().requests == 0

    async def test_who_stops_listening_closes_the_models_stream(self):
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
        steps.close()
        assert closed == ["sync"]
        asteps = wrapper.astream(question("abc"))
        await anext(asteps)
        await asteps.aclose()
        assert closed == ["sync", "async"]
        assert wrapper.planner.statistics().requests == 2
