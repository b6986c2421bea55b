from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier, Thread, current_thread
from typing import Any

import httpx
import pytest
import pytest_socket
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock, ThinkingBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.schema import MetadataMode
from llama_index.core.tools import FunctionTool
from llama_index.core.types import BaseOutputParser, PydanticProgramMode
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-untyped]
from llamaindex_helpers import RecordingLLM, letter_nodes, letter_text

from ctxreuse import ReusePlanner, request_context
from ctxreuse.serving.emulation.emulated_engine import EmulatedEngine
from ctxreuse.serving.emulation.openai_replies import ToolCall
from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor, format_context


@pytest.fixture(autouse=True)
def _without_network() -> Iterator[None]:
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


def context(word: str) -> str:
    return format_context(letter_nodes(word), MetadataMode.NONE)


def planned(word: str, order: str = "") -> str:
    """Return a context as it is sent; `order` is the ranking by labels, as in "312"."""
    text = "\n\n".join(f"[Doc_{n}] {letter_text(one)}" for n, one in enumerate(word, start=1))
    if not order:
        return text
    labels = " > ".join(f"[Doc_{n}]" for n in order)
    return (
        f"{text}\n\nPlease read the context in the following priority order: {labels} "
        "and answer the question."
    )


def question(word: str, words: str = "Which?") -> list[ChatMessage]:
    return [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content=f"{context(word)}\n\n{words}"),
    ]


def sent_words(inner: RecordingLLM) -> list[str]:
    """Return the letters of each prompt that was sent, in order."""
    return ["".join(re.findall(r"\] (\w) says", prompt)) for prompt in inner.prompts]


class FaultyPlanner(ReusePlanner):
    def plan(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a fault of ours")

    plan_batch = evict = plan


Way = Callable[[ReuseLLM, str], Any]


async def _stream_chat(llm: ReuseLLM, word: str) -> str:
    return [piece async for piece in await llm.astream_chat(question(word))][-1].message.content  # type: ignore[return-value]


async def _stream_complete(llm: ReuseLLM, word: str) -> str:
    pieces = [p async for p in await llm.astream_complete(f"{context(word)}\n\nWhich?")]
    return pieces[-1].text


CHATS: dict[str, Way] = {
    "chat": lambda llm, word: llm.chat(question(word)).message.content,
    "stream_chat": lambda llm, word: list(llm.stream_chat(question(word)))[-1].message.content,
    "achat": lambda llm, word: asyncio.run(llm.achat(question(word))).message.content,
    "astream_chat": lambda llm, word: asyncio.run(_stream_chat(llm, word)),
}
COMPLETIONS: dict[str, Way] = {
    "complete": lambda llm, word: llm.complete(f"{context(word)}\n\nWhich?").text,
    "stream_complete": lambda llm, word: (
        list(llm.stream_complete(f"{context(word)}\n\nWhich?"))[-1].text
    ),
    "acomplete": lambda llm, word: asyncio.run(llm.acomplete(f"{context(word)}\n\nWhich?")).text,
    "astream_complete": lambda llm, word: asyncio.run(_stream_complete(llm, word)),
}


WAYS: dict[str, Way] = {**CHATS, **COMPLETIONS}


class TestEachWayToCallAModel:
    @pytest.mark.parametrize("way", CHATS)
    def test_contexts_in_chats_are_planned(self, way: str) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        assert [CHATS[way](llm, word) for word in ("abc", "cba")] == ["answer 1", "answer 2"]
        assert inner.prompts == [
            f"<system>Be brief.</><user>{planned('abc')}\n\nWhich?</>",
            f"<system>Be brief.</><user>{planned('abc', '321')}\n\nWhich?</>",
        ]

    @pytest.mark.parametrize("way", COMPLETIONS)
    def test_contexts_in_completion_prompts_are_planned(self, way: str) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        assert [COMPLETIONS[way](llm, word) for word in ("abc", "cba")] == ["answer 1", "answer 2"]
        assert inner.prompts == [
            f"{planned('abc')}\n\nWhich?",
            f"{planned('abc', '321')}\n\nWhich?",
        ]
        assert inner.options == [{"formatted": False}] * 2

    @pytest.mark.parametrize("way", WAYS)
    def test_each_call_has_exactly_the_events_of_the_inner_model(self, way: str) -> None:
        debug, seen = LlamaDebugHandler(print_trace_on_end=False), Seen()
        llm = ReuseLLM(inner=RecordingLLM(callback_manager=CallbackManager([debug])), window_s=0)
        root = get_dispatcher()
        root.add_event_handler(seen)
        try:
            WAYS[way](llm, "ab")
        finally:
            root.event_handlers.remove(seen)
        assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
        assert len([name for name in seen.names if name.endswith("StartEvent")]) == 1
        assert len([name for name in seen.names if name.endswith("EndEvent")]) == 1

    @pytest.mark.parametrize("way", WAYS)
    def test_a_planning_fault_sends_the_prompt_as_given(self, way: str) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, planner=FaultyPlanner(), window_s=0)
        assert [WAYS[way](llm, word) for word in ("abc", "cba")] == ["answer 1", "answer 2"]
        assert sent_words(inner) == ["abc", "cba"]
        assert llm.faults == 2

    @pytest.mark.parametrize("way", WAYS)
    def test_a_call_that_fails_is_taken_back_and_raises_what_the_model_raises(
        self, way: str
    ) -> None:
        inner, planner = RecordingLLM(fails=lambda prompt: TimeoutError("busy")), ReusePlanner()
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0)
        with pytest.raises(TimeoutError, match="busy"):
            WAYS[way](llm, "abc")
        assert planner.statistics().requests == 0

    @pytest.mark.parametrize("way", ["stream_chat", "astream_chat", "astream_complete"])
    @pytest.mark.parametrize(("breaks_after", "kept"), [(0, 0), (1, 1)])
    def test_a_stream_that_breaks_is_taken_back_only_if_nothing_has_come(
        self, way: str, breaks_after: int, kept: int
    ) -> None:
        planner = ReusePlanner()
        inner = RecordingLLM(breaks_after=breaks_after)
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0)
        with pytest.raises(ConnectionError):
            WAYS[way](llm, "abc")
        assert planner.statistics().requests == kept


class Closing:
    """A model's stream, sync and async, that says whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def __iter__(self) -> Any:
        return iter(["a piece"])

    async def __aiter__(self) -> Any:
        yield "a piece"

    def close(self) -> None:
        self.is_closed = True

    async def aclose(self) -> None:
        self.is_closed = True


class Streaming(RecordingLLM):
    """Streams what the test gives it."""

    pieces: Any = None

    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.pieces

    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.pieces


class TestStreamsThatNobodyReads:
    async def test_one_that_nobody_begins_to_read_is_not_even_planned(self) -> None:
        inner, planner = RecordingLLM(), ReusePlanner()
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0)
        stream: Any = llm.stream_chat(question("abc"))
        async_stream: Any = await llm.astream_chat(question("abc"))
        stream.close()
        await async_stream.aclose()
        del stream, async_stream
        assert planner.statistics().requests == 0
        assert inner.prompts == []

    def test_one_is_of_the_tenant_for_whom_it_was_asked(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        with request_context(tenant="acme"):
            stream = llm.stream_complete(context("abc"))
        list(stream)
        llm.complete(context("cba"))
        assert inner.prompts[-1] == context("cba"), "nobody else's order"
        with request_context(tenant="acme"):
            llm.complete(context("cba"))
        assert inner.prompts[-1] == planned("abc", "321")

    @pytest.mark.parametrize("is_async", [False, True])
    async def test_one_that_ends_after_its_first_piece_stays(self, is_async: bool) -> None:
        pieces, planner = Closing(), ReusePlanner()
        llm = ReuseLLM(inner=Streaming(pieces=pieces), planner=planner, window_s=0)
        if is_async:
            async_stream = await llm.astream_chat(question("abc"))
            assert await anext(async_stream) == "a piece"  # type: ignore[comparison-overlap]
            await async_stream.aclose()  # type: ignore[attr-defined]
        else:
            stream = llm.stream_chat(question("abc"))
            assert next(stream) == "a piece"  # type: ignore[comparison-overlap]
            stream.close()
        assert pieces.is_closed
        assert planner.statistics().requests == 1


class Seen(BaseEventHandler):
    names: list[str] = []  # noqa: RUF012  # pydantic copies it

    @classmethod
    def class_name(cls) -> str:
        return "Seen"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(event.class_name())


class TestMessages:
    def test_only_recognised_contexts_are_altered(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        llm.chat(question("ab"))
        for text in (
            "no context at all  \n\n ",
            f"[Doc_1] {letter_text('b')}\n\n[Doc_2] somebody else's text",
            "",
        ):
            llm.chat([ChatMessage(role="user", content=text)])
            assert inner.chats[-1] == [ChatMessage(role="user", content=text)]

    def test_the_callers_messages_are_not_changed(self) -> None:
        llm = ReuseLLM(inner=RecordingLLM(), window_s=0)
        llm.chat(question("abc"))
        messages = question("cba")
        copies = [message.model_copy(deep=True) for message in messages]
        llm.chat(messages)
        assert messages == copies

    def test_other_parts_than_text_are_untouched(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        llm.chat(question("abc"))
        image = ImageBlock(url="http://x/a.png")
        thinking = ThinkingBlock(content="hm")
        message = ChatMessage(
            role="user",
            blocks=[thinking, TextBlock(text=context("cba")), image, TextBlock(text="Which?")],
            additional_kwargs={"name": "Ann"},
        )
        llm.chat([question("abc")[0], message])
        [_, sent] = inner.chats[-1]
        assert sent.additional_kwargs == {"name": "Ann"}
        assert sent.blocks == [
            thinking,
            TextBlock(text=planned("abc", "321")),
            image,
            TextBlock(text="Which?"),
        ]

    def test_a_context_that_was_sent_in_an_earlier_turn_is_replayed_as_it_was_sent(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        llm.chat(question("abc"))
        with request_context(conversation_id="c"):
            first = question("cba")
            answer = llm.chat(first).message
            turn = ChatMessage(role="user", content=f"{context('bd')}\n\nAnd?")
            llm.chat([*first, answer, turn])
        assert inner.prompts[2].startswith(inner.prompts[1])
        assert inner.prompts[2].endswith(
            "<user>Please refer to [Doc_2] in the previous conversation.\n\n"
            f"[Doc_4] {letter_text('d')}\n\nAnd?</>"
        )

    def test_the_roles_of_other_models_are_understood(self) -> None:
        inner, planner = RecordingLLM(), ReusePlanner()
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0)

        def opening(word: str) -> list[ChatMessage]:
            return [
                ChatMessage(role="developer", content="Be brief."),
                ChatMessage(role="user", content=f"{context(word)}\n\nWhich?"),
            ]

        for conversation, word in (("c", "abc"), ("d", "cba")):
            with request_context(conversation_id=conversation):
                llm.chat(opening(word))
        assert sent_words(inner) == ["abc", "abc"], "a developer's message is no turn"
        with request_context(conversation_id="d"):
            again = ChatMessage(role="user", content=f"{context('b')}\n\nSure?")
            llm.chat([*opening("cba"), ChatMessage(role="model", content="a."), again])
        assert inner.prompts[2].startswith(inner.prompts[1])
        assert inner.prompts[2].endswith(
            "<model>a.</><user>Please refer to [Doc_2] in the previous conversation.\n\nSure?</>"
        )
        assert planner.statistics().requests == 3, "what a model has answered is not planned again"

    def test_a_context_that_was_planned_before_is_only_scheduled(self) -> None:
        inner, postprocessor = RecordingLLM(), ReusePostprocessor(metadata_mode=MetadataMode.NONE)
        llm = ReuseLLM(inner=inner, window_s=0)
        llm.complete(context("nlk"))
        postprocessor.postprocess_nodes(letter_nodes("klm"))
        text = format_context(
            postprocessor.postprocess_nodes(letter_nodes("nlk")), MetadataMode.NONE
        )
        llm.complete(text)
        assert inner.prompts[-1] == text == planned("kln", "321")

    def test_tenants_do_not_see_each_others_order(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        with request_context(tenant="one"):
            llm.chat(question("abc"))
        with request_context(tenant="two"):
            llm.chat(question("cba"))
        with request_context(tenant="one"):
            llm.chat(question("cba"))
        assert sent_words(inner) == ["abc", "cba", "abc"]


class TestConcurrentCalls:
    async def test_tasks_that_come_together_are_sent_in_the_planned_order(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0.02)
        words = ["abc", "xyz", "cab", "zyx", "bca"]
        answers = await asyncio.gather(*(llm.achat(question(word, word)) for word in words))
        assert sent_words(inner) == ["abc", "abc", "abc", "xyz", "xyz"]
        for word, answer in zip(words, answers, strict=True):
            number = int((answer.message.content or "").removeprefix("answer "))
            assert inner.prompts[number - 1].endswith(f"{word}</>"), "each got its own answer"

    def test_threads_and_tasks_share_a_window(self) -> None:
        class Counting(ReusePlanner):
            def plan_batch(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
                sizes.append(len(list(requests)))
                return super().plan_batch(requests, *args, **kwargs)

        async def tasks() -> None:
            together.wait()
            await asyncio.gather(*(llm.achat(question(word)) for word in ("abc", "xyz")))

        def thread(word: str) -> None:
            together.wait()
            llm.chat(question(word))

        sizes: list[int] = []
        together = Barrier(3)
        llm = ReuseLLM(inner=RecordingLLM(), planner=Counting(), window_s=0.25)
        with ThreadPoolExecutor(3) as pool:
            running = [
                pool.submit(lambda: asyncio.run(tasks())),
                pool.submit(thread, "cba"),
                pool.submit(thread, "zxy"),
            ]
            for one in running:
                one.result()
        assert sizes == [4]

    async def test_a_synchronous_call_on_the_event_loop_never_waits_for_the_loop(self) -> None:
        llm = ReuseLLM(inner=RecordingLLM(), window_s=0.01)
        task = asyncio.create_task(llm.achat(question("abc")))
        await asyncio.sleep(0)  # the task has opened a window that only the loop can close
        assert llm.chat(question("xyz")).message.content == "answer 1"
        assert (await task).message.content == "answer 2"

    async def test_a_cancelled_call_is_taken_back_and_holds_up_nobody(self) -> None:
        planner = ReusePlanner()
        llm = ReuseLLM(inner=RecordingLLM(), planner=planner, window_s=0.01)
        first = asyncio.create_task(llm.achat(question("abc")))
        second = asyncio.create_task(llm.achat(question("xyz")))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).message.content == "answer 1"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert planner.statistics().requests == 1

    async def test_each_task_keeps_its_own_tenant_in_a_shared_window(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0.02, send_cache_salt=True)

        async def ask(tenant: str, word: str) -> None:
            with request_context(tenant=tenant):
                await llm.achat(question(word))

        await asyncio.gather(ask("one", "abc"), ask("two", "cba"), ask("one", "cab"))
        salts = [options["extra_body"]["cache_salt"] for options in inner.options]
        assert sent_words(inner) == ["abc", "abc", "cba"]
        assert salts[0] == salts[1] != salts[2]

    def test_threads_that_copy_the_context_keep_the_tenant(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True)
        with request_context(tenant="one"), ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, llm.chat, question("abc")).result()
        assert "cache_salt" in inner.options[0]["extra_body"]


class TestBatches:
    async def test_a_batch_is_sent_in_the_planned_order_and_answered_in_the_callers(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner)
        words = ["abc", "xyz", "cab", "zyx", "bca"]
        answers = await llm.achat_batch([question(word, word) for word in words], workers=1)
        assert sent_words(inner) == ["abc", "abc", "abc", "xyz", "xyz"]
        for word, answer in zip(words, answers, strict=True):
            number = int((answer.message.content or "").removeprefix("answer "))
            assert inner.prompts[number - 1].endswith(f"{word}</>")

    @pytest.mark.parametrize("workers", [1, 3, 100])
    def test_without_an_event_loop_batches_work_too(self, workers: int) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner)
        prompts = [f"{context(word)}\n\n{word}?" for word in ("abc", "xyz", "cab")]
        texts = [one.text for one in llm.complete_batch(prompts, workers=workers, stop="x")]
        assert sent_words(inner) == ["abc", "abc", "xyz"]
        assert texts == ["answer 1", "answer 3", "answer 2"]
        assert [options["stop"] for options in inner.options] == ["x"] * 3
        chats = llm.chat_batch([question("abc"), question("cba")], workers=workers)
        assert [one.message.content for one in chats] == ["answer 4", "answer 5"]

    async def test_with_a_progress_bar_it_starts_in_the_planned_order_too(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        inner = RecordingLLM()
        words = ["".join(random.Random(n).sample("abcdef", 4)) for n in range(20)]
        llm, reference = ReuseLLM(inner=inner), ReuseLLM(inner=RecordingLLM())
        await llm.achat_batch([question(word) for word in words], show_progress=True, workers=2)
        await reference.achat_batch([question(word) for word in words], workers=2)
        assert sent_words(inner) == sent_words(reference.inner)  # type: ignore[arg-type]
        assert "Chatting: 100%" in capsys.readouterr().err

    async def test_an_error_is_raised_and_what_was_not_sent_is_taken_back(self) -> None:
        inner, planner = (
            RecordingLLM(fails=lambda prompt: OSError("gone") if "xyz" in prompt else None),
            ReusePlanner(),
        )
        llm = ReuseLLM(inner=inner, planner=planner)
        words = ["abc", "cba", "xyz", "fgh"]
        with pytest.raises(OSError, match="gone"):
            await llm.achat_batch([question(word, word) for word in words], workers=1)
        assert sent_words(inner) == ["abc", "abc"]
        assert planner.statistics().requests == 2

    async def test_an_error_stops_the_jobs_that_are_under_way(self) -> None:
        class Slow(RecordingLLM):
            async def achat(self, messages: Any, **kwargs: Any) -> Any:
                if "now" not in (messages[-1].content or ""):
                    begun.append(messages)
                    await asyncio.sleep(3_600)
                raise OSError("gone")

        begun: list[Any] = []
        planner = ReusePlanner()
        llm = ReuseLLM(inner=Slow(), planner=planner)
        batch = [question("abc"), question("cba"), question("abcx", "now"), question("xyz")]
        async with asyncio.timeout(30):
            with pytest.raises(OSError, match="gone"):
                await llm.achat_batch(batch, workers=3)
        assert planner.statistics().requests == 0

    async def test_errors_can_take_their_answers_place(self) -> None:
        inner = RecordingLLM(fails=lambda prompt: OSError("gone") if "xyz" in prompt else None)
        answers = await ReuseLLM(inner=inner).achat_batch(
            [question(word, word) for word in ("abc", "xyz", "cba")], return_exceptions=True
        )
        assert isinstance(answers[1], OSError)
        assert [answers[n].message.content for n in (0, 2)] == ["answer 1", "answer 2"]

    async def test_a_large_batch_is_planned_off_the_event_loop_in_its_tenants_name(self) -> None:
        threads: list[Thread] = []

        class Noting(ReusePlanner):
            def plan_batch(self, *args: Any, **kwargs: Any) -> Any:
                threads.append(current_thread())
                return super().plan_batch(*args, **kwargs)

        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, planner=Noting())
        rng = random.Random(1)
        words = ["".join(rng.sample("abcdef", 4)) for _ in range(100)]
        with request_context(tenant="one"):
            answers = await llm.acomplete_batch([context(word) for word in words], workers=7)
        assert len({one.text for one in answers}) == 100
        assert current_thread() not in threads
        assert sorted(map(sorted, sent_words(inner))) == sorted(map(sorted, words))

    async def test_a_planning_fault_sends_the_batch_as_given(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, planner=FaultyPlanner())
        await llm.achat_batch([question(word) for word in ("abc", "xyz", "cab")], workers=1)
        assert sent_words(inner) == ["abc", "xyz", "cab"]
        assert llm.faults == 1

    async def test_an_empty_batch_has_no_answers(self) -> None:
        assert await ReuseLLM(inner=RecordingLLM()).achat_batch([]) == []

    @pytest.mark.parametrize("workers", [0, -1, True, "two"])
    async def test_a_number_of_workers_that_is_none_is_refused(self, workers: Any) -> None:
        with pytest.raises(ValueError, match="workers must be an integer from 1"):
            await ReuseLLM(inner=RecordingLLM()).achat_batch([question("a")], workers=workers)


class TestTheInnerModel:
    def test_what_is_set_on_the_wrapper_is_set_on_the_model_inside(self) -> None:
        inner = RecordingLLM(system_prompt="Be brief.")
        llm = ReuseLLM(inner=inner)
        assert llm.system_prompt == "Be brief."
        assert llm.callback_manager is inner.callback_manager
        assert llm.metadata == inner.metadata
        manager = CallbackManager([])
        llm.callback_manager = manager
        llm.system_prompt = "Be long."
        assert inner.callback_manager is manager
        assert inner.system_prompt == "Be long."

    def test_the_settings_of_llamaindex_take_it(self) -> None:
        inner = RecordingLLM()
        before = Settings._llm, Settings._callback_manager
        try:
            Settings.llm = ReuseLLM(inner=inner)
            manager = CallbackManager([])
            Settings.callback_manager = manager
            assert Settings.llm.metadata.is_chat_model
            assert inner.callback_manager is manager
        finally:
            Settings._llm, Settings._callback_manager = before

    @pytest.mark.parametrize("is_chat_model", [True, False])
    async def test_predictions_use_the_system_prompt_of_the_model_inside(
        self, is_chat_model: bool
    ) -> None:
        inner = RecordingLLM(is_chat_model=is_chat_model, system_prompt="Be brief.")
        llm = ReuseLLM(inner=inner, window_s=0)
        prompt = PromptTemplate("{context}\n\n{question}")
        for word in ("abc", "cba"):
            llm.predict(prompt, context=context(word), question="Which?")
        await llm.apredict(prompt, context=context("bca"), question="Which?")
        "".join(llm.stream(prompt, context=context("acb"), question="Which?"))
        assert sent_words(inner) == ["abc"] * 4
        opening = "<system>Be brief.</>" if is_chat_model else "Be brief.\n\n"
        assert all(one.startswith(opening) for one in inner.prompts)

    def test_without_a_planner_each_model_makes_its_own(self) -> None:
        inner = RecordingLLM()
        for word in ("abc", "cba"):
            ReuseLLM(inner=inner, planner=None, window_s=0).chat(question(word))
        assert sent_words(inner) == ["abc", "cba"]

    def test_it_has_a_stable_name(self) -> None:
        assert ReuseLLM.class_name() == "ReuseLLM"
        assert ReuseLLM(inner=MockLLM()).to_dict()["inner"]["class_name"] == "MockLLM"

    def test_a_model_without_tools_says_so(self) -> None:
        with pytest.raises(NotImplementedError, match="MockLLM takes no tools"):
            ReuseLLM(inner=MockLLM()).chat_with_tools([], "q")

    @pytest.mark.parametrize("inner", [None, "gpt", object()])
    def test_a_model_that_is_none_is_refused(self, inner: Any) -> None:
        with pytest.raises(ValueError, match="inner must be a LlamaIndex LLM"):
            ReuseLLM(inner=inner)

    def test_a_structured_model_is_refused_with_the_way_to_have_one(self) -> None:
        with pytest.raises(ValueError, match=r"ReuseLLM\(inner=llm\)\.as_structured_llm"):
            ReuseLLM(inner=MockLLM().as_structured_llm(City))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"planner": "mine"}, r"planner must be a ctxreuse\.ReusePlanner"),
            ({"window_s": -1}, "micro-batch window"),
            ({"window_s": "soon"}, "micro-batch window"),
            ({"strategy": "best"}, "no strategy 'best'"),
            ({"send_cache_salt": "maybe"}, "send_cache_salt"),
            ({"system_prompt": "Be brief."}, "system_prompt is the inner model's"),
            ({"windows": 1}, "windows"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ReuseLLM(inner=MockLLM(), **arguments)


class City(BaseModel):
    """A city."""

    name: str = ""


class Weather:
    """A tool for tests."""

    tool = FunctionTool.from_defaults(lambda city: f"sunny in {city}", name="weather")


def engine_answer(body: dict[str, Any]) -> Any:
    """Call the tool that is offered, else say a City as JSON."""
    if body.get("tools"):
        name = body["tools"][0]["function"]["name"]
        return ToolCall(name, json.dumps({"name": "Rome", "city": "Rome"}))
    return '{"name": "Rome"}'


class Served:
    """An OpenAILike model on an engine without a socket, bare and wrapped."""

    def __init__(self, **options: Any) -> None:
        self.engine = EmulatedEngine(answer=engine_answer)
        self.bare = OpenAILike(
            model="emulated",
            api_base="http://engine/v1",
            api_key="none",
            context_window=100_000,
            max_retries=0,
            http_client=httpx.Client(transport=self.engine.transport()),
            async_http_client=httpx.AsyncClient(transport=self.engine.transport()),
            **{"is_chat_model": True, **options},
        )
        self.llm = ReuseLLM(inner=self.bare, window_s=0)

    def requests(self) -> list[dict[str, Any]]:
        taken = list(self.engine.requests)
        self.engine.requests.clear()
        return taken

    def prompt_of(self, request: dict[str, Any]) -> str:
        if "prompt" in request:
            return str(request["prompt"])
        contents = [message["content"] for message in request["messages"]]
        return "\n".join(
            part if isinstance(part, str) else "".join(one["text"] for one in part)
            for part in contents
        )


MODELS: dict[str, dict[str, Any]] = {
    "function calling": {"is_function_calling_model": True},
    "response_format": {"should_use_structured_outputs": True},
    "chat": {},
}
_PROMPT = PromptTemplate("{context}\n\nWhich city?")


async def _astream_structured(llm: Any, text: str) -> Any:
    return [c async for c in await llm.astream_structured_predict(City, _PROMPT, context=text)][-1]


STRUCTURED: dict[str, Callable[[Any, str], Any]] = {
    "structured_predict": lambda llm, text: llm.structured_predict(City, _PROMPT, context=text),
    "astructured_predict": lambda llm, text: asyncio.run(
        llm.astructured_predict(City, _PROMPT, context=text)
    ),
    "stream_structured_predict": lambda llm, text: list(
        llm.stream_structured_predict(City, _PROMPT, context=text)
    )[-1],
    "astream_structured_predict": lambda llm, text: asyncio.run(_astream_structured(llm, text)),
    "as_structured_llm": lambda llm, text: (
        llm.as_structured_llm(City)
        .chat([ChatMessage(role="user", content=f"{text}\n\nWhich city?")])
        .raw
    ),
}


class TestStructuredOutput:
    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("way", STRUCTURED)
    def test_it_is_what_the_model_inside_gives_and_contexts_are_planned(
        self, kind: str, way: str
    ) -> None:
        served = Served(**MODELS[kind])
        ask = STRUCTURED[way]
        bare = ask(served.bare, context("abc"))
        as_bare = served.requests()
        assert ask(served.llm, context("abc")) == bare
        assert served.requests() == as_bare, "nothing had to be altered"
        assert bare.name == "Rome"
        assert ask(served.llm, context("cba")) == bare
        [request] = served.requests()
        assert planned("abc", "321") in served.prompt_of(request)
        assert served.llm.faults == 0

    @pytest.mark.parametrize("kind", MODELS)
    def test_chat_templates_and_output_parsers_survive(self, kind: str) -> None:
        served = Served(**MODELS[kind])
        for template in (
            ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{context}")]),
            RichPromptTemplate("Look: {{ context }} Which city?"),
        ):
            bare = served.bare.structured_predict(City, template, context="no context")
            assert served.llm.structured_predict(City, template, context="no context") == bare
            [one, other] = served.requests()
            assert one == other

    async def test_models_that_complete_texts_give_it_too(self) -> None:
        inner = RecordingLLM(is_chat_model=False, answer='{"name": "Rome"}')
        llm = ReuseLLM(inner=inner, window_s=0)
        text_prompt = PromptTemplate("{context}\n\nWhich city?")
        chat_prompt = ChatPromptTemplate.from_messages([("user", "{context}\n\nWhich city?")])
        for prompt in (text_prompt, chat_prompt):
            for word in ("abc", "cba"):
                for model in (inner, llm):
                    city = model.structured_predict(City, prompt, context=context(word))
                    assert city == City(name="Rome")
            assert inner.prompts[0] == inner.prompts[1]
            assert inner.prompts[2] == inner.prompts[3].replace(
                planned("abc", "321"), planned("cba")
            )
            assert planned("abc", "321") in inner.prompts[3]
            inner.prompts.clear()
        city = await llm.astructured_predict(City, text_prompt, context="none")
        assert city == City(name="Rome")

    def test_a_template_with_an_output_parser_of_its_own_is_planned(self) -> None:
        class Polite(BaseOutputParser):
            def parse(self, output: str) -> Any:
                return output

            def format(self, query: str) -> str:
                return f"{query}\n\nPlease."

        served = Served()
        served.llm.structured_predict(City, _PROMPT, context=context("abc"))
        template = PromptTemplate("{context}\n\nWhich city?", output_parser=Polite())
        served.llm.structured_predict(City, template, context=context("cba"))
        assert planned("abc", "321") in served.prompt_of(served.requests()[1])

    def test_all_contexts_of_a_template_are_planned(self) -> None:
        served = Served()
        template = ChatPromptTemplate.from_messages([("system", "{one}"), ("user", "{two}")])
        for one, two in (("abc", "xyz"), ("cba", "zyx")):
            served.llm.structured_predict(City, template, one=context(one), two=context(two))
        [first, second] = map(served.prompt_of, served.requests())
        assert second.count("priority order: [Doc_3] > [Doc_2] > [Doc_1]") >= 1
        order = re.compile(r"(\w) says")
        assert order.findall(first) == list("abcxyz")
        assert order.findall(second)[:3] == list("abc")
        assert sorted(order.findall(second)[3:]) == list("xyz")
        assert re.findall(r"\[Doc_(\d)\] \w says", second) == list("123456")

    def test_the_callers_template_and_arguments_are_not_changed(self) -> None:
        served = Served()
        template = PromptTemplate("{context}")
        options = {"temperature": 0.5}
        served.llm.structured_predict(City, template, options, context="x")
        assert template.output_parser is None
        assert options == {"temperature": 0.5}

    def test_a_variable_that_is_missing_is_the_callers_error(self) -> None:
        def fails(**kwargs: Any) -> str:
            raise KeyError("context")

        template = PromptTemplate("{context}", function_mappings={"context": fails})
        with pytest.raises(KeyError, match="context"):
            Served().llm.structured_predict(City, template)

    def test_a_stream_is_its_callers_wherever_it_is_read(self) -> None:
        served = Served()
        llm = ReuseLLM(inner=served.bare, window_s=0, send_cache_salt=True)
        with request_context(tenant="one"):
            llm.structured_predict(City, _PROMPT, context=context("abc"))
            stream = llm.stream_structured_predict(City, _PROMPT, context=context("cba"))
        assert list(stream)[-1] == City(name="Rome")
        first, second = served.requests()
        assert planned("abc", "321") in served.prompt_of(second)
        assert second["cache_salt"] == first["cache_salt"]

    def test_a_fault_sends_the_prompt_as_given(self) -> None:
        served = Served()
        llm = ReuseLLM(inner=served.bare, planner=FaultyPlanner(), window_s=0)
        assert STRUCTURED["structured_predict"](llm, context("ba")) == City(name="Rome")
        assert planned("ba") in served.prompt_of(served.requests()[0])
        assert llm.faults == 1

    def test_programs_that_are_given_the_wrapper_work(self) -> None:
        inner = Served(is_function_calling_model=True)
        llm = ReuseLLM(inner=inner.bare, window_s=0)
        llm.pydantic_program_mode = PydanticProgramMode.LLM
        assert STRUCTURED["structured_predict"](llm, context("ab")) == City(name="Rome")


class TestTools:
    def test_tools_are_called_as_by_the_model_inside_and_contexts_planned(self) -> None:
        served = Served(is_function_calling_model=True)
        for llm in (served.bare, served.llm):
            response = llm.chat_with_tools(
                [Weather.tool], f"{context('abc')}\n\nWeather?", tool_required=True
            )
            [call] = llm.get_tool_calls_from_response(response)
            assert (call.tool_name, call.tool_kwargs["city"]) == ("weather", "Rome")
        assert served.engine.requests[0] == served.engine.requests[1]
        served.llm.chat_with_tools([Weather.tool], f"{context('cba')}\n\nWeather?")
        assert planned("abc", "321") in served.prompt_of(served.engine.requests[2])

    async def test_tools_are_called_asynchronously_and_in_streams(self) -> None:
        served = Served(is_function_calling_model=True)
        llm = served.llm
        asked = f"{context('ab')}\n\nWeather?"
        responses = [
            await llm.achat_with_tools([Weather.tool], asked),
            list(llm.stream_chat_with_tools([Weather.tool], asked))[-1],
            [r async for r in await llm.astream_chat_with_tools([Weather.tool], asked)][-1],
        ]
        for response in responses:
            [call] = llm.get_tool_calls_from_response(response)
            assert call.tool_kwargs["city"] == "Rome"

    def test_predict_and_call_runs_the_tool(self) -> None:
        tool = FunctionTool.from_defaults(lambda name, city: f"sunny in {city}", name="weather")
        answer = Served(is_function_calling_model=True).llm.predict_and_call([tool], "Weather?")
        assert str(answer) == "sunny in Rome"

    def test_a_mock_model_with_tools_can_be_wrapped(self) -> None:
        llm = ReuseLLM(inner=MockFunctionCallingLLM(is_chat_model=True), window_s=0)
        response = llm.chat_with_tools([Weather.tool], "Weather?")
        assert [call.tool_name for call in llm.get_tool_calls_from_response(response)] == [
            "weather"
        ]
        assert llm.metadata.is_function_calling_model


class TestWhatTheEngineIsTold:
    def test_nothing_by_default(self) -> None:
        inner = RecordingLLM()
        with request_context(tenant="one", conversation_id="c"):
            ReuseLLM(inner=inner, window_s=0).chat(question("a"))
        assert inner.options == [{}]

    async def test_salt_and_session_go_with_every_kind_of_call(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True, send_session_id=True)
        with request_context(tenant="one", conversation_id="c"):
            llm.chat(question("a"), extra_headers={"X-Mine": "1"})
            llm.complete("a", temperature=0)
            list(llm.stream_chat(question("a")))
            await llm.acomplete("a")
            await llm.achat_batch([question("a")])
        assert len(inner.options) == 5
        salts = {options["extra_body"]["cache_salt"] for options in inner.options}
        sessions = {options["extra_headers"]["X-Session-ID"] for options in inner.options}
        assert len(salts) == len(sessions) == 1
        assert "one" not in salts.pop()
        assert inner.options[0]["extra_headers"]["X-Mine"] == "1"
        assert inner.options[1]["temperature"] == 0

    def test_without_tenant_and_conversation_there_is_nothing_to_tell(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True, send_session_id=True)
        llm.chat(question("a"))
        assert inner.options == [{}]

    def test_what_the_user_sets_stays(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True)
        mine = {"cache_salt": "mine", "top_k": 5}
        with request_context(tenant="one"):
            llm.chat(question("a"), extra_body=mine)
        assert inner.options == [{"extra_body": {"cache_salt": "mine", "top_k": 5}}]
        assert mine == {"cache_salt": "mine", "top_k": 5}

    def test_a_session_that_the_user_names_stays_however_the_header_is_written(self) -> None:
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_session_id=True)
        with request_context(conversation_id="c"):
            llm.chat(question("a"), extra_headers={"x-session-id": "mine"})
        assert inner.options == [{"extra_headers": {"x-session-id": "mine"}}]

    async def test_what_cannot_be_added_to_is_sent_as_given(self) -> None:
        inner, planner = RecordingLLM(), ReusePlanner()
        inner.additional_kwargs = {"extra_headers": {"X-Always": "1"}}
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0, send_cache_salt=True)
        odd: Any = [("top_k", 5)]
        with request_context(tenant="one"):
            llm.chat(question("abc"), extra_body=odd)
            await llm.achat_batch([question("cba")], extra_body=odd)
        assert (
            llm._model.options
            == [  # type: ignore[attr-defined]
                {"extra_body": odd, "extra_headers": {"X-Always": "1"}}
            ]
            * 2
        )
        assert llm._model.prompts[1].count(planned("abc", "321")) == 1  # type: ignore[attr-defined]
        assert llm.faults == 2

    def test_the_key_changes_the_salt_and_is_not_shown(self) -> None:
        inner = RecordingLLM()
        for key in ("", "secret"):
            llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True, salt_key=key)
            with request_context(tenant="one"):
                llm.chat(question("a"))
        first, second = (options["extra_body"]["cache_salt"] for options in inner.options)
        assert first != second
        assert "secret" not in repr(llm) + str(llm.to_dict())

    def test_it_reaches_a_server_beside_what_the_model_always_sends(self) -> None:
        served = Served(additional_kwargs={"extra_body": {"top_k": 5}, "seed": 7})
        llm = ReuseLLM(inner=served.bare, window_s=0, send_cache_salt=True)
        with request_context(tenant="one"):
            llm.chat(question("a"))
        llm.chat(question("a"))
        told, plain = served.requests()
        assert told["top_k"] == plain["top_k"] == 5
        assert told["seed"] == plain["seed"] == 7
        assert "cache_salt" in told
        assert "cache_salt" not in plain
        assert served.bare.additional_kwargs == {"extra_body": {"top_k": 5}, "seed": 7}

    def test_events_of_a_model_that_always_sends_something_go_where_the_user_says(self) -> None:
        served = Served(additional_kwargs={"extra_body": {"top_k": 5}})
        llm = ReuseLLM(inner=served.bare, window_s=0, send_cache_salt=True)
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm.callback_manager = CallbackManager([debug])
        llm.chat(question("a"))
        assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
        assert served.bare.callback_manager is llm.callback_manager

    def test_the_engine_reports_its_cached_tokens_through_the_wrapper(self) -> None:
        llm = Served().llm
        llm.chat(question("abc"))
        response = llm.chat(question("cba"))
        assert response.raw is not None
        assert response.raw.usage.prompt_tokens_details.cached_tokens > 100


def test_a_model_in_another_process_has_a_planner_of_its_own() -> None:
    llm = ReuseLLM(inner=MockLLM(), window_s=0.25)
    again = ReuseLLM.__new__(ReuseLLM)
    again.__setstate__(llm.__getstate__())
    assert again.window_s == 0.25
    assert isinstance(llm.planner, ReusePlanner), "the original keeps its own"
    assert again.planner is not llm.planner
    assert again.complete("Where is Paris?").text == "Where is Paris?"
