import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from adapter_conformance import FaultyPlanner
from langchain_core.messages import (
    HumanMessage,
)
from langchain_core.outputs import ChatResult
from langchain_model_helpers import (
    RecordingModel,
    StreamingModel,
    model,
    question,
)

from langchain_ctxreuse.messages import prompt_texts


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
        assert wrapper.faults == 4
        assert len(caplog.records) == 1
        assert "ReuseChatModel: planning failed with RuntimeError" in caplog.text
        assert "Which" not in caplog.text

    def test_a_message_that_cannot_be_read_is_sent_as_it_is(self):
        class Unreadable(dict[str, Any]):
            def get(self, *_: Any) -> Any:
                raise AttributeError

        inner = RecordingModel()
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

    async def test_a_stream_that_breaks_later_has_been_read_by_the_engine(self):
        wrapper = model(StreamingModel(pieces_before_failing=2))
        with pytest.raises(RuntimeError):
            list(wrapper.stream(question("abc")))
        with pytest.raises(RuntimeError):
            _ = [piece async for piece in wrapper.astream(question("abc"))]
        assert wrapper.planner.statistics().requests == 2

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
