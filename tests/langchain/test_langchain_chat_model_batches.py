import asyncio
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_model_helpers import (
    CountingHandler,
    RecordingModel,
    StreamingModel,
    context,
    letters_in,
    openai_model,
    question,
    text_of,
)
from langchain_model_helpers import model as model_without_window

from ctxreuse import ReusePlanner
from ctxreuse.serving import EmulatedEngine
from langchain_ctxreuse import ReuseChatModel

CONTEXTS = ["abc", "xyz", "bca", "zyx", "mno", "cab"]
PLANNED = ["q0", "q2", "q5", "q1", "q3", "q4"]
"""The order in which the prompts of `prompts()` should be sent."""
METHODS = ["batch", "abatch", "batch_as_completed", "abatch_as_completed"]


def prompts() -> list[Any]:
    return [question(letters, f"q{number}") for number, letters in enumerate(CONTEXTS)]


model = partial(model_without_window, window_s=60)
"""Makes a wrapper whose window would be noticed, for batches do not go through it."""


def run(method: str, runnable: Any, inputs: list[Any], config: Any = None, **kwargs: Any) -> Any:
    """Run a batch by one of the four methods; return the answers in the caller's order."""
    if method == "batch":
        return runnable.batch(inputs, config, **kwargs)
    if method == "abatch":
        return asyncio.run(runnable.abatch(inputs, config, **kwargs))
    if method == "batch_as_completed":
        completed = list(runnable.batch_as_completed(inputs, config, **kwargs))
    else:

        async def collect() -> list[tuple[int, Any]]:
            steps = runnable.abatch_as_completed(inputs, config, **kwargs)
            return [completed async for completed in steps]

        completed = asyncio.run(collect())
    assert sorted(position for position, _ in completed) == list(range(len(inputs)))
    return [answer for _, answer in sorted(completed, key=lambda one: one[0])]


def contents(answers: list[AIMessage]) -> list[Any]:
    return [answer.content for answer in answers]


every_method = pytest.mark.parametrize("method", METHODS)


@every_method
@pytest.mark.parametrize("concurrency", [1, 2, None])
def test_sent_in_the_planned_order_and_answered_in_the_callers(method, concurrency, inner):
    answers = run(method, model(inner), prompts(), {"max_concurrency": concurrency})
    assert contents(answers) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    if concurrency == 1 or method.startswith("a"):
        assert inner.sent == PLANNED
    assert sorted(inner.sent) == sorted(PLANNED)
    sent = {call.text.rsplit("\n", 1)[-1]: letters_in(call.text) for call in inner.calls}
    assert sent == {"q0": "abc", "q1": "xyz", "q2": "abc", "q3": "xyz", "q4": "mno", "q5": "abc"}


@every_method
def test_batches_of_streaming_models_start_as_many_at_once_as_the_first_config_says(method):
    inner = StreamingModel()
    answers = run(method, model(inner), prompts(), {"max_concurrency": 1}, stream=True)
    assert contents(answers) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert inner.sent == PLANNED
    inner = RecordingModel()
    configs = [{"max_concurrency": 1}, *[{"max_concurrency": 50}] * 5]
    run(method, model(inner), prompts(), configs)
    assert inner.sent == PLANNED


@every_method
def test_the_batch_starts_no_more_than_it_may(method):
    lock, running, most = threading.Lock(), 0, 0

    def enter(text: str) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1

    class Entered(RecordingModel):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(self._generate, *args, **kwargs)

    run(method, model(Entered(before_answer=enter)), prompts(), {"max_concurrency": 2})
    assert 1 <= most <= 2


@every_method
def test_each_input_keeps_its_config(method):
    handler = CountingHandler()
    configs = [{"metadata": {"number": n}, "callbacks": [handler]} for n in range(6)]
    run(method, model(), prompts(), configs)
    numbers = [start["metadata"]["number"] for start in handler.starts]
    assert [prompt[-1] for prompt in handler.prompts] == [str(number) for number in numbers]
    assert sorted(numbers) == list(range(6))
    assert sorted(handler.prompts) == sorted(prompts()), "callbacks see the prompts as given"
    assert sorted(handler.events) == ["end"] * 6 + ["start"] * 6


@every_method
def test_a_batch_may_serve_several_tenants(method, inner):
    wrapper = model(inner)
    for tenant, letters in (("one", "abc"), ("two", "bca")):
        wrapper.batch([question(letters, tenant=tenant)], {"configurable": {"tenant": tenant}})
    tenants = ("one", "two", "one")
    configs = [{"configurable": {"tenant": tenant}} for tenant in tenants]
    asked = [question("cab", f"q{n}", tenant) for n, tenant in enumerate(tenants)]
    run(method, wrapper, asked, configs)
    sent = {call.text.rsplit("\n", 1)[-1]: letters_in(call.text) for call in inner.calls[2:]}
    assert sent == {"q0": "abc", "q1": "bca", "q2": "abc"}
    alone = RecordingModel()
    run(method, model(alone), [question("cab", tenant="new")], {"configurable": {"tenant": "new"}})
    assert letters_in(alone.calls[0].text) == "cab"


@every_method
def test_equal_prompts_are_all_answered(method, inner):
    same = HumanMessage(question("abc", "same"))
    inputs = [[same], question("xyz", "q1"), [same], [same], question("abc", "same")]
    assert contents(run(method, model(inner), inputs, {"max_concurrency": 1})) == [
        "same",
        "q1",
        "same",
        "same",
        "same",
    ]
    assert inner.sent == ["same"] * 4 + ["q1"]


@every_method
def test_exceptions_come_back_in_their_place(method):
    def failing(text: str) -> Exception | None:
        return ValueError("no") if text.endswith(("q2", "q4")) else None

    wrapper = model(RecordingModel(failing=failing))
    answers = run(method, wrapper, prompts(), return_exceptions=True)
    assert [type(answer).__name__ for answer in answers] == [
        "AIMessage",
        "AIMessage",
        "ValueError",
        "AIMessage",
        "ValueError",
        "AIMessage",
    ]
    assert wrapper.planner.statistics().requests == 4, "those that failed are taken back"


@every_method
def test_an_exception_ends_the_batch_unless_it_is_to_be_returned(method):
    inner = RecordingModel(failing=lambda text: ValueError("no") if "q2" in text else None)
    wrapper = model(inner)
    with pytest.raises(ValueError, match="no"):
        run(method, wrapper, prompts(), {"max_concurrency": 1})
    sent = [name for name in inner.sent if name != "q2"]
    assert wrapper.planner.statistics().requests == len(sent), "only what was sent is remembered"


@every_method
def test_inputs_that_are_no_prompts_fail_in_their_place_and_no_or_one_input_is_legal(method):
    inner = RecordingModel()
    inputs: list[Any] = [question("abc", "q0"), 7, question("cab", "q2"), [], {"x": 1}]
    answers = run(method, model(inner), inputs, return_exceptions=True)
    assert [getattr(one, "content", type(one)) for one in answers[:4]][0::2] == ["q0", "q2"]
    assert isinstance(answers[1], ValueError)
    assert isinstance(answers[4], Exception)
    assert list(filter(None, (letters_in(call.text) for call in inner.calls))) == ["abc", "abc"]

    inner = RecordingModel()
    wrapper = model(inner)
    assert run(method, wrapper, []) == []
    assert contents(run(method, wrapper, ["Hi"])) == ["Hi"]
    with pytest.raises(ValueError, match="no"):
        run(method, model(RecordingModel(failing=lambda text: ValueError("no"))), ["Hi"])


@every_method
@pytest.mark.usefixtures("global_cache")
def test_answers_in_langchains_cache_are_not_asked_for_again(method, inner):
    wrapper = model(inner)
    first = run(method, wrapper, prompts())
    assert wrapper.planner.statistics().requests == 6
    again = run(method, wrapper, prompts())
    assert contents(first) == contents(again)
    assert len(inner.calls) == 6
    assert wrapper.planner.statistics().requests == 6, "what was not sent is not remembered"


@every_method
def test_chains_reach_the_wrapper_with_all_prompts(method, inner):
    chain = ChatPromptTemplate.from_template("{context}\n\n{q}") | model(inner, window_s=0.005)
    inputs = [{"context": context(letters), "q": f"q{n}"} for n, letters in enumerate(CONTEXTS)]
    answers = run(method, chain, inputs, {"max_concurrency": 1} if "as" not in method else None)
    assert contents(answers) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    if method in ("batch", "abatch"):
        assert inner.sent == PLANNED
    assert sorted(inner.sent) == sorted(PLANNED)


@every_method
def test_bound_configured_and_fallen_back_models_schedule_too(method):
    for around in (
        lambda wrapper: wrapper.bind(stop=["."]),
        lambda wrapper: wrapper.with_config(tags=["x"]),
        lambda wrapper: wrapper.with_fallbacks([model()]),
    ):
        inner = RecordingModel()
        answers = run(method, around(model(inner, window_s=0)), prompts(), {"max_concurrency": 1})
        assert contents(answers) == ["q0", "q1", "q2", "q3", "q4", "q5"]
        if method in ("batch", "abatch"):
            assert inner.sent == PLANNED


@pytest.mark.parametrize("method", ["batch", "abatch"])
def test_only_what_failed_is_tried_again(method):
    failed: list[str] = []

    def busy(text: str) -> Exception | None:
        if failed or not text.endswith("q2"):
            return None
        failed.append(text)
        return ValueError("busy")

    inner = RecordingModel(failing=busy)
    wrapper = model(inner)
    retrying = wrapper.with_retry(wait_exponential_jitter=False)
    answers = run(method, retrying, prompts(), {"max_concurrency": 1})
    assert contents(answers) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert inner.sent == [*PLANNED, "q2"]
    assert wrapper.planner.statistics().requests == 6


@pytest.mark.parametrize("method", ["batch", "abatch"])
def test_a_batch_inside_a_step_knows_the_config_around_it(method, inner):
    wrapper = model(inner)
    step = RunnableLambda(lambda texts: wrapper.batch(texts), lambda texts: wrapper.abatch(texts))
    for tenant, letters in (("one", "abc"), ("two", "cab"), ("one", "bca")):
        config: Any = {"configurable": {"tenant": tenant}}
        texts = [question(letters, tenant=tenant), "Hi"]
        if method == "batch":
            step.invoke(texts, config)
        else:
            asyncio.run(step.ainvoke(texts, config))
    sent = [letters_in(call.text) for call in inner.calls if call.text != "Hi"]
    assert sent == ["abc", "cab", "abc"]


def test_as_completed_answers_come_when_they_are_there():
    release = threading.Event()

    def wait(text: str) -> None:
        if text.endswith("q0"):
            assert release.wait(10)

    wrapper = model(RecordingModel(before_answer=wait))
    steps = wrapper.batch_as_completed(prompts()[:2], {"max_concurrency": 2})
    position, answer = next(steps)
    assert (position, answer.content) == (1, "q1")
    release.set()
    assert [position for position, _ in steps] == [0]


def test_who_stops_listening_to_threads_starts_no_more():
    release = threading.Event()

    def wait(text: str) -> None:
        if text.endswith("q2"):
            assert release.wait(10)

    inner = RecordingModel(before_answer=wait)
    wrapper = model(inner)
    steps = wrapper.batch_as_completed(prompts(), {"max_concurrency": 1})
    next(steps)
    while len(inner.calls) < 2:
        time.sleep(0.001)
    threading.Timer(0.02, release.set).start()  # while the batch is being closed
    steps.close()
    assert inner.sent == ["q0", "q2"]
    assert wrapper.planner.statistics().requests == 2


class SlowModel(RecordingModel):
    """Answers when it is allowed to."""

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        result = self._generate(messages, stop, run_manager, **kwargs)
        if not text_of(messages).endswith("q0"):
            await asyncio.sleep(30)
        return result


async def test_who_stops_listening_to_tasks_ends_them():
    wrapper = model(SlowModel())
    steps = wrapper.abatch_as_completed(prompts())
    assert (await anext(steps))[0] == 0
    await steps.aclose()
    assert wrapper.planner.statistics().requests == 1
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("concurrency", [1, 3, None])
async def test_a_cancelled_batch_is_taken_back(concurrency):
    inner = SlowModel()
    wrapper = model(inner)
    config: Any = {"max_concurrency": concurrency}
    task = asyncio.create_task(wrapper.abatch(prompts(), config))
    while len(inner.calls) < (concurrency or 6):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0.001)
    assert wrapper.planner.statistics().requests == 1, "the first one was answered"


async def test_subclasses_that_ask_something_else_first_or_block_are_still_planned(inner):
    class Careful(ReuseChatModel):
        def invoke(self, prompt: Any, *args: Any, **kwargs: Any) -> AIMessage:
            super().invoke("May I?", *args, **kwargs)
            return super().invoke(prompt, *args, **kwargs)

    wrapper = Careful(inner=inner, window_s=0)
    answers = wrapper.batch(prompts(), {"max_concurrency": 1})
    assert contents(answers) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert [name for name in inner.sent if name != "May I?"] == PLANNED
    assert wrapper.planner.statistics().requests == 6

    class Blocking(ReuseChatModel):
        async def ainvoke(self, *args: Any, **kwargs: Any) -> AIMessage:
            await asyncio.sleep(0.01 if "q0" in args[0] else 0)
            return self.invoke(*args, **kwargs)

    wrapper = Blocking(inner=RecordingModel())
    assert contents(await wrapper.abatch(prompts())) == ["q0", "q1", "q2", "q3", "q4", "q5"]


class TestWindow:
    @pytest.mark.parametrize("is_streamed", [False, True])
    async def test_calls_of_many_tasks_are_planned_together(self, is_streamed):
        inner = StreamingModel()
        wrapper = model(inner, window_s=0.005)

        async def ask(prompt: Any) -> str:
            if not is_streamed:
                return str((await wrapper.ainvoke(prompt)).content)
            return "".join([str(piece.content) async for piece in wrapper.astream(prompt)])

        answers = await asyncio.gather(*map(ask, prompts()))
        assert answers == ["q0", "q1", "q2", "q3", "q4", "q5"]
        assert inner.sent == PLANNED

    async def test_who_is_cancelled_behind_others_is_taken_back(self, inner):
        wrapper = model(inner)
        window = wrapper._gateway._batcher
        tasks = [asyncio.create_task(wrapper.ainvoke(prompt)) for prompt in prompts()]
        while not (waiting := list(window._open.values())) or len(waiting[0].arrived) < 6:
            await asyncio.sleep(0.001)
        window._close(waiting[0])  # as if its time was over: planned, nobody has gone on
        assert wrapper.planner.statistics().requests == 6
        tasks[4].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[4], asyncio.CancelledError)
        assert inner.sent == [name for name in PLANNED if name != "q4"]
        assert wrapper.planner.statistics().requests == 5


@pytest.mark.parametrize("way", ["burst", *METHODS])
def test_an_engine_with_a_small_cache_serves_more_from_it(way):
    letters = ["abcd", "efgh", "dcba", "hgfe", "badc", "mnop", "feghi"[:4], "cdab"]
    inputs: list[Any] = [question(each, f"q{number}") for number, each in enumerate(letters)]

    async def burst(chat_model: BaseChatModel) -> list[AIMessage]:
        return list(await asyncio.gather(*map(chat_model.ainvoke, inputs)))

    cached = []
    for wrap in (lambda inner: inner, lambda inner: ReuseChatModel(inner=inner)):
        engine = EmulatedEngine(block_size=16, capacity_tokens=800)
        chat_model = wrap(openai_model(engine))
        if way == "burst":
            answers = asyncio.run(burst(chat_model))
        else:
            answers = run(way, chat_model, inputs, {"max_concurrency": 1})
        details = [answer.usage_metadata["input_token_details"] for answer in answers]
        cached.append(sum(one["cache_read"] for one in details))
        assert len(engine.requests) == len(inputs)
    arrival, planned = cached
    assert arrival == 0
    assert planned > 900


def in_time(work: Callable[[], Any]) -> Any:
    """Return what work returns, or fail if it has not after a minute: it would never."""
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert returned, "it hangs, or has failed"
    return returned[0]


@every_method
@pytest.mark.parametrize("bound", [1, 2, 3, None])
@pytest.mark.parametrize("cache", ["openai", "anthropic"])
def test_a_batch_whose_calls_wait_for_each_others_answers_ends(method, bound, cache, inner):
    chooses = random.Random(0)
    inputs = [
        question("".join(chooses.sample("abcdefghijkl", chooses.choice([1, 3, 5]))), f"q{number}")
        for number in range(30)
    ]
    planner = ReusePlanner(cache=cache, token_counter=lambda text: 700)
    wrapper = model(inner, planner=planner)
    config = None if bound is None else {"max_concurrency": bound}
    told = in_time(lambda: run(method, wrapper, inputs, config))
    assert len(told) == len(inner.calls) == 30
