"""Servers that answer anything, behind LangChain's own client: the wrapper is as good as that."""

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from itertools import islice
from typing import Any

import pytest
from example_counts import SOME_OR_ALL, slow_unless
from hostile_chat_servers import (
    HOSTILE,
    KINDS,
    REPLIES,
    REST,
    SAMPLES,
    WORDS,
    Outcome,
    answered_as_it_should_be_unless,
    breaking_off,
    of_call,
    replying,
)
from hostile_servers import COUNTS, DRIPPING, usage_of
from http_servers import listening
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_hostile_calls import CALLS, look, plain_model, shown
from langchain_model_helpers import question
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from ctxreuse import ReusePlanner
from langchain_ctxreuse import ReuseChatModel, ReuseMiddleware

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the library's own

SINGLE = ("invoke", "ainvoke", "stream", "astream")


@pytest.mark.parametrize("step", SOME_OR_ALL)
@pytest.mark.parametrize("call", CALLS)
def test_a_reply_becomes_what_it_becomes_without_the_wrapper(call, step):
    replies = {"invoke": REPLIES, "stream": REPLIES}.get(call, KINDS if "json" in call else SAMPLES)
    wrapper = ReuseChatModel(inner=plain_model(replying(REPLIES["honest"])), window_s=0)
    first = "invoke" if "batch" in call else call
    of_call(partial(CALLS[first], wrapper, question("abc")))  # so that "cab" is sent as "abc"
    different = []
    for name, reply in islice(replies.items(), len(call) % step, None, step):
        plain = plain_model(replying(reply))
        wrapped = wrapper.model_copy(update={"inner": plain})
        asked = question("cab", HOSTILE)
        before = wrapper.planner.statistics().requests
        one, other = (of_call(partial(CALLS[call], model, asked)) for model in (plain, wrapped))
        if vars(one) != vars(other):
            different.append(f"{name}:\n    {one}\n    {other}")
        now = wrapper.planner.statistics().requests
        has_answered = name == "usage = ''"  # LangChain fails behind the answer
        if call in SINGLE and other.error and not other.said and now > before and not has_answered:
            different.append(f"{name}: not evicted {one.error}")
        if wrapper.faults:
            different.append(f"{name}: {wrapper.faults} faults")
            wrapper._gateway.fail_open._faults = 0
    assert not different, "\n".join(different)


def agent_answers(model: Any, middleware: list[Any], prompts: list[str], outcome: Outcome) -> Any:
    """Return what an agent has said and done in a conversation of these user messages."""
    agent = create_agent(model, [look], middleware=middleware, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}, "recursion_limit": 12}
    answered: dict[str, Any] = {"messages": []}
    for prompt in prompts:
        answered = agent.invoke({"messages": [("user", prompt)]}, config)
        outcome.said += f"{answered['messages'][-1].text}\n"
    said = [one for one in answered["messages"] if one.type != "human"]
    return [{**shown(one), "tool_call_id": None} for one in said]


@pytest.mark.parametrize("step", SOME_OR_ALL)
def test_an_agent_does_with_a_reply_what_it_does_without_us(step):
    wrapper = ReuseChatModel(inner=plain_model(replying(REPLIES["honest"])), window_s=0)
    tools = [convert_to_openai_tool(look)]
    wrapper.bind(tools=tools).invoke(question("abc"))
    different = []
    for name, reply in islice(KINDS.items(), None, None, step):
        plain = plain_model(replying(reply, once=True, honest=REPLIES["labels cut anywhere"]))
        wrapped = wrapper.model_copy(update={"inner": plain})
        middleware = ReuseMiddleware(planner=wrapper.planner)
        prompts = [question("cab", HOSTILE), "And then?"]
        one = of_call(partial(agent_answers, plain, [], prompts))
        other = of_call(partial(agent_answers, wrapped, [middleware], prompts))
        if vars(one) != vars(other):
            different.append(f"{name}:\n    {one}\n    {other}")
        if wrapper.faults or middleware.faults:
            different.append(f"{name}: {wrapper.faults} and {middleware.faults} faults")
            wrapper._gateway.fail_open._faults = 0
    assert not different, "\n".join(different)


@pytest.mark.parametrize("call", SINGLE)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_a_body_that_breaks_off_is_what_it_is_without_the_wrapper(call, parts):
    body = KINDS["labels cut anywhere"]["stream" not in call]
    sent = [body[at : at + 2000] for at in range(0, 2000 * parts, 2000)]
    plain = plain_model(breaking_off(*sent))
    wrapper = ReuseChatModel(inner=plain, window_s=0)
    wrapper.invoke(question("abc"))
    one, other = (
        of_call(partial(CALLS[call], model, question("cab", HOSTILE))) for model in (plain, wrapper)
    )
    assert vars(one) == vars(other)
    assert "the connection is gone" in one.error or "Connection error" in one.error
    has_begun = "stream" in call and parts > 0
    assert bool(one.said) is has_begun
    assert wrapper.planner.statistics().requests == 1 + has_begun
    assert wrapper.faults == 0


@pytest.mark.parametrize("call", SINGLE)
def test_callbacks_know_what_was_said_before_a_stream_broke_off(call):
    class Told(BaseCallbackHandler):
        def __init__(self) -> None:
            self.text = ""

        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.text += token

    unended = REPLIES["labels cut anywhere"][0].replace(b"data: [DONE]\n\n", b"")
    plain = plain_model(breaking_off(unended)).model_copy(update={"streaming": True})
    wrapper = ReuseChatModel(inner=plain, window_s=0)
    wrapper.invoke(question("abc"))
    told = []
    for model in (plain, wrapper):
        told.append(handler := Told())
        followed = model.with_config(callbacks=[handler])
        outcome = of_call(partial(CALLS[call], followed, question("cab", HOSTILE)))
        assert "the connection is gone" in outcome.error
    assert [one.text for one in told] == [WORDS + REST] * 2


@pytest.mark.parametrize("kind", slow_unless(DRIPPING, "events", "nothing"))
async def test_a_slow_server_holds_nothing_but_the_call_that_waits_for_it(kind):
    script = answered_as_it_should_be_unless(HOSTILE, DRIPPING[kind])
    async with listening(script) as [server]:
        plain = ChatOpenAI(
            model="emulated",
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
            stream_chunk_timeout=None,  # with one, Python 3.11 may miss a cancellation
        )
        model = ReuseChatModel(inner=plain, window_s=0.02)
        begun = set()
        for wait in (model.ainvoke, partial(read, model, begun), partial(asked_together, model)):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await wait(question("cab", HOSTILE))
            answers = await asyncio.gather(*(model.ainvoke(question(one)) for one in ("ab", "bc")))
            assert [one.text for one in answers] == ["Here."] * 2
            assert time.monotonic() - began < 15
        running = {one.get_coro().__qualname__ for one in asyncio.all_tasks()}
        assert running <= {"HttpServer._serve", asyncio.current_task().get_coro().__qualname__}
        assert kind == "events" or not begun
        # a stream that has begun was read by the engine
        assert model.planner.statistics().requests == 7 + bool(begun)
        assert model.faults == 0


async def read(model: Any, begun: set[Any], prompt: str) -> None:
    async for piece in model.astream(prompt):
        begun.add(piece.id)


async def asked_together(model: Any, prompt: str) -> None:
    await model.abatch([prompt, question("abc")])


def test_an_honest_call_is_not_held_by_hostile_ones_of_the_same_window():
    """From threads that come together; each reply fails the call that it answers."""
    for name in ("nothing", "choices = 5", "broken b'data: {\\n\\n'", "message.content = nan"):
        plain = plain_model(replying(REPLIES[name]))
        model = ReuseChatModel(inner=plain, planner=ReusePlanner(), window_s=0.05)
        prompts = [question("cab", HOSTILE), question("abc"), question("bca", HOSTILE)]
        with ThreadPoolExecutor(3) as pool:
            hostile, honest, other = [
                pool.submit(of_call, partial(CALLS["stream"], model, one)) for one in prompts
            ]
            assert honest.result(20).said
            assert hostile.result(20).error == other.result(20).error != ""
        assert model.planner.statistics().requests == 1 + 2 * bool(hostile.result().said)


@pytest.mark.parametrize("mode", ["active", "shadow"])
def test_no_usage_gets_into_what_the_planner_counts(mode):
    planner = ReusePlanner(mode=mode, capacity_tokens=10_000)
    honest = ReusePlanner(mode=mode, capacity_tokens=10_000)
    for count in (*COUNTS, "1e308", "[" * 500 + "]" * 500):
        stream = usage_of(count)
        told = stream.split(b'"usage": ')[1].split(b"\n")[0][:-1]
        whole_reply = (
            b'{"choices": [{"message": {"role": "assistant", "content": "Hi"}}], "usage": '
        )
        plain = plain_model(replying((stream, whole_reply + told + b"}")))
        model = ReuseChatModel(inner=plain, planner=planner, window_s=0)
        of_call(partial(CALLS["stream"], model, question("cab", HOSTILE)))
        answer = of_call(partial(CALLS["invoke"], model, question("abc", HOSTILE)))
        assert "Hi" in answer.value or answer.error
    client = ReuseChatModel(inner=plain_model(replying(REPLIES["honest"])), planner=honest)
    for _ in range(2):
        client.batch([question("cab"), question("abc")])
    assert planner.statistics().tokens == honest.statistics().tokens
    savings = planner.savings
    *counts, written = astuple(savings.reported)
    told = [one for one in [*counts, *written.values()] if one is not None]
    assert all(type(one) is int and 0 <= one < 1000 for one in told), told
    assert savings.planning_failures == 0
    assert math.isfinite(savings.saved_share)
