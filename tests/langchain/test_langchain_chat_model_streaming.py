from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    BaseMessage,
)
from langchain_core.runnables import RunnableLambda
from langchain_model_helpers import (
    RecordingModel,
    StreamingModel,
    configured,
    letters_in,
    model,
    question,
)


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
        wrapper.invoke(question("abc", tenant="one"), one)
        stream = wrapper.stream_events(question("cab", tenant="one"), one, version="v3")
        assert str(stream.text) == "Which?"
        other = wrapper.stream_events(question("cab", tenant="two"), two, version="v3")
        assert str(other.text) == "Which?"
        tasks = await wrapper.astream_events(question("bca", tenant="one"), one, version="v3")
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
