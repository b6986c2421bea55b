"""Servers that answer anything, behind LlamaIndex's own client: the wrapper is as good as that."""

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from itertools import islice
from typing import Any

import pytest
from example_counts import SOME_OR_ALL
from hostile_chat_servers import (
    HOSTILE,
    KINDS,
    REPLIES,
    SAMPLES,
    Outcome,
    breaking_off,
    of_call,
    replying,
)
from hostile_servers import COUNTS, usage_of
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.query_engine import RetrieverQueryEngine
from llamaindex_helpers import LetterRetriever
from llamaindex_hostile_calls import CALLS, OF_TEXTS, SINGLE, TOOL, asked, plain_model, question

from ctxreuse import ReusePlanner
from llamaindex_ctxreuse import ReuseChatEngine, ReuseLLM

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the library's own


@pytest.mark.parametrize("step", SOME_OR_ALL)
@pytest.mark.parametrize(
    ("call", "options"),
    [(call, {}) for call in CALLS] + [(call, {"is_chat_model": False}) for call in OF_TEXTS],
)
def test_a_reply_becomes_what_it_becomes_without_the_wrapper(call, options, step):
    replies = {"chat": REPLIES, "stream_chat": REPLIES, "structured_predict": KINDS}
    wrapper = ReuseLLM(inner=plain_model(replying(REPLIES["honest"]), **options), window_s=0)
    of_call(partial(CALLS[call], wrapper, question("abc")))  # so that "cab" is sent as "abc"
    different = []
    found = replies.get(call, SAMPLES).items()
    for name, reply in islice(found, len(call) % step, None, step):
        plain = plain_model(replying(reply), **options)
        wrapper._model = plain
        before = wrapper.planner.statistics().requests
        one, other = (
            of_call(partial(CALLS[call], model, question("cab", HOSTILE)))
            for model in (plain, wrapper)
        )
        if (one.said, one.value, one.error) != (other.said, other.value, other.error):
            different.append(f"{name}:\n    {one}\n    {other}")
        now = wrapper.planner.statistics().requests
        if call in SINGLE and other.error and not other.said and now > before:
            different.append(f"{name}: not evicted {one.error}")
        if wrapper.faults:
            different.append(f"{name}: {wrapper.faults} faults")
            wrapper._gateway.fail_open._faults = 0
    assert not different, "\n".join(different)


@pytest.mark.parametrize("call", ["chat", "achat", "stream_chat", "astream_complete"])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_body_that_breaks_off_is_what_it_is_without_the_wrapper(call, parts):
    body = KINDS["labels cut anywhere"]["stream" not in call]
    plain = plain_model(
        breaking_off(*(body[at : at + 2000] for at in range(0, 2000 * parts, 2000)))
    )
    wrapper = ReuseLLM(inner=plain, window_s=0)
    wrapper.chat(asked(question("abc")))
    wrapper.complete(question("abc"))
    one, other = (
        of_call(partial(CALLS[call], model, question("cab", HOSTILE))) for model in (plain, wrapper)
    )
    assert other.error == one.error
    assert one.error
    assert other.said == one.said
    has_begun = "stream" in call and parts > 0
    assert bool(one.said) is has_begun
    assert wrapper.planner.statistics().requests == 2 + has_begun
    assert wrapper.faults == 0


def query(model: Any, prompt: str, outcome: Outcome) -> Any:
    engine = RetrieverQueryEngine.from_args(LetterRetriever(), llm=model)
    return str(engine.query(f"cab {prompt}"))


def streamed_query(model: Any, prompt: str, outcome: Outcome) -> Any:
    engine = RetrieverQueryEngine.from_args(LetterRetriever(), llm=model, streaming=True)
    answer: Any = engine.query(f"cab {prompt}")
    for piece in answer.response_gen:
        outcome.said += piece
    return ""


async def agent(model: Any, prompt: str, outcome: Outcome) -> Any:
    ran = await FunctionAgent(tools=[TOOL], llm=model).run(prompt, max_iterations=4)
    called = [(one.tool_name, one.tool_kwargs, str(one.tool_output)) for one in ran.tool_calls]
    return str(ran), called


RUNS: dict[str, Callable[[Any, str, Outcome], Any]] = {
    "query engine": query,
    "streaming query engine": streamed_query,
    "agent": agent,
}


@pytest.mark.parametrize("step", SOME_OR_ALL)
@pytest.mark.parametrize("run", RUNS)
def test_a_whole_run_does_with_a_reply_what_it_does_without_the_wrapper(run, step):
    wrapper = ReuseLLM(inner=plain_model(replying(REPLIES["honest"])), window_s=0)
    different = []
    replies = {name: reply for name, reply in KINDS.items() if not name.startswith("broken behind")}
    for name, reply in islice(replies.items(), None, None, step):
        plain = plain_model(replying(reply, KINDS["labels cut anywhere"], once=run == "agent"))
        wrapper._model = plain
        one, other = (of_call(partial(RUNS[run], model, HOSTILE)) for model in (plain, wrapper))
        if (one.said, one.value, one.error) != (other.said, other.value, other.error):
            different.append(f"{name}:\n    {one}\n    {other}")
        if wrapper.faults:
            different.append(f"{name}: {wrapper.faults} faults")
            wrapper._gateway.fail_open._faults = 0
    assert not different, "\n".join(different)


def chatted(engine: ReuseChatEngine, message: str, outcome: Outcome) -> Any:
    return engine.chat(message).response


def chatted_in_stream(engine: ReuseChatEngine, message: str, outcome: Outcome) -> Any:
    for piece in engine.stream_chat(message).response_gen:
        outcome.said += piece
    return outcome.said


async def achatted_in_stream(engine: ReuseChatEngine, message: str, outcome: Outcome) -> Any:
    answer = await engine.astream_chat(message)
    async for piece in answer.async_response_gen():
        outcome.said += piece
    return outcome.said


@pytest.mark.parametrize("step", SOME_OR_ALL)
# LlamaIndex's thread that reads a stream raises its error, and hands it to who listens
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("say", [chatted, chatted_in_stream, achatted_in_stream])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_chat_engine_forgets_a_turn_that_was_not_answered(say, is_wrapped, step):
    for name, reply in islice(KINDS.items(), None, None, step):
        if name.startswith("broken behind"):
            continue
        plain = plain_model(replying(reply, KINDS["labels cut anywhere"]))
        planner = ReusePlanner()
        llm = ReuseLLM(inner=plain, planner=planner, window_s=0) if is_wrapped else plain
        engine = ReuseChatEngine(LetterRetriever(), llm, planner=planner)
        assert of_call(partial(say, engine, "abc")).error == ""
        before = engine.chat_history
        hostile = of_call(partial(say, engine, f"cab {HOSTILE}"))
        grown = engine.chat_history[len(before) :]
        assert engine.chat_history[: len(before)] == before
        if not hostile.error:  # what was said is part of the next prompt, whatever it is
            assert len(grown) == 2, name
            assert repr(grown[1].content) == hostile.value
            continue
        assert grown == [], name
        assert planner.statistics().requests == 1, name
        assert of_call(partial(say, engine, "bca")).error == ""
        assert engine.faults == 0


@pytest.mark.parametrize("count", [*COUNTS, "1e308", "[" * 500 + "]" * 500])
def test_no_usage_gets_into_what_the_planner_counts(count, planner):
    stream = usage_of(count)
    told = stream.split(b'"usage": ')[1].split(b"\n")[0][:-1]
    said = b'{"choices": [{"message": {"role": "assistant", "content": "Hi"}}], "usage": '
    plain = plain_model(replying((stream, said + told + b"}")))
    llm = ReuseLLM(inner=plain, planner=planner, window_s=0)
    for call in ("chat", "stream_chat", "complete", "astream_chat"):
        answer = of_call(partial(CALLS[call], llm, question("cab", HOSTILE)))
        assert "Hi" in answer.value or answer.error
    *counts, written = astuple(planner.savings.reported)
    told_of = [one for one in [*counts, *written.values()] if one is not None]
    assert all(type(one) is int and 0 <= one < 1000 for one in told_of), told_of
    assert planner.savings.planning_failures == 0
    assert llm.faults == 0
