from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Barrier, Thread, current_thread
from typing import Any

import pytest
from llamaindex_helpers import RecordingLLM
from llamaindex_llm_helpers import (
    FaultyPlanner,
    context,
    question,
    sent_words,
)

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseLLM


class TestConcurrentCalls:
    async def test_tasks_that_come_together_are_sent_in_the_planned_order(self):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0.02)
        words = ["abc", "xyz", "cab", "zyx", "bca"]
        answers = await asyncio.gather(*(llm.achat(question(word, word)) for word in words))
        assert sent_words(inner) == ["abc", "abc", "abc", "xyz", "xyz"]
        for word, answer in zip(words, answers, strict=True):
            number = int((answer.message.content or "").removeprefix("answer "))
            assert inner.prompts[number - 1].endswith(f"{word}</>"), "each got its own answer"

    def test_threads_and_tasks_share_a_window(self):
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

    async def test_a_synchronous_call_on_the_event_loop_never_waits_for_the_loop(self):
        llm = ReuseLLM(inner=RecordingLLM(), window_s=0.01)
        task = asyncio.create_task(llm.achat(question("abc")))
        await asyncio.sleep(0)  # the task has opened a window that only the loop can close
        assert llm.chat(question("xyz")).message.content == "answer 1"
        assert (await task).message.content == "answer 2"

    async def test_a_cancelled_call_is_taken_back_and_holds_up_nobody(self):
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

    async def test_each_task_keeps_its_own_tenant_in_a_shared_window(self):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0.02, send_cache_salt=True)

        async def ask(tenant: str, word: str) -> None:
            with request_context(tenant=tenant):
                await llm.achat(question(word))

        await asyncio.gather(ask("one", "abc"), ask("two", "cba"), ask("one", "cab"))
        salts = [options["extra_body"]["cache_salt"] for options in inner.options]
        assert sent_words(inner) == ["abc", "abc", "cba"]
        assert salts[0] == salts[1] != salts[2]

    def test_threads_that_copy_the_context_keep_the_tenant(self):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True)
        with request_context(tenant="one"), ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, llm.chat, question("abc")).result()
        assert "cache_salt" in inner.options[0]["extra_body"]


class TestBatches:
    async def test_a_batch_is_sent_in_the_planned_order_and_answered_in_the_callers(self):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner)
        words = ["abc", "xyz", "cab", "zyx", "bca"]
        answers = await llm.achat_batch([question(word, word) for word in words], workers=1)
        assert sent_words(inner) == ["abc", "abc", "abc", "xyz", "xyz"]
        for word, answer in zip(words, answers, strict=True):
            number = int((answer.message.content or "").removeprefix("answer "))
            assert inner.prompts[number - 1].endswith(f"{word}</>")

    @pytest.mark.parametrize("workers", [1, 3, 100])
    def test_without_an_event_loop_batches_work_too(self, workers):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner)
        prompts = [f"{context(word)}\n\n{word}?" for word in ("abc", "xyz", "cab")]
        texts = [one.text for one in llm.complete_batch(prompts, workers=workers, stop="x")]
        assert sent_words(inner) == ["abc", "abc", "xyz"]
        assert texts == ["answer 1", "answer 3", "answer 2"]
        assert [options["stop"] for options in inner.options] == ["x"] * 3
        chats = llm.chat_batch([question("abc"), question("cba")], workers=workers)
        assert [one.message.content for one in chats] == ["answer 4", "answer 5"]

    async def test_with_a_progress_bar_it_starts_in_the_planned_order_too(self, capsys):
        inner = RecordingLLM()
        words = ["".join(random.Random(n).sample("abcdef", 4)) for n in range(20)]
        llm, reference = ReuseLLM(inner=inner), ReuseLLM(inner=RecordingLLM())
        await llm.achat_batch([question(word) for word in words], show_progress=True, workers=2)
        await reference.achat_batch([question(word) for word in words], workers=2)
        assert sent_words(inner) == sent_words(reference.inner)
        assert "Chatting: 100%" in capsys.readouterr().err

    async def test_an_error_is_raised_and_what_was_not_sent_is_taken_back(self):
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

    async def test_an_error_stops_the_jobs_that_are_under_way(self):
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

    @pytest.mark.parametrize("chat", [5, None, object()])
    async def test_what_is_no_chat_fails_alone(self, chat):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0)
        batch = [question("abc"), chat, question("cba")]
        first, error, last = await llm.achat_batch(batch, return_exceptions=True)
        assert isinstance(error, TypeError)
        assert {one.message.content for one in (first, last)} == {"answer 1", "answer 2"}
        with pytest.raises(TypeError, match="not iterable"):
            await llm.achat(chat)

    async def test_errors_can_take_their_answers_place(self):
        inner = RecordingLLM(fails=lambda prompt: OSError("gone") if "xyz" in prompt else None)
        answers = await ReuseLLM(inner=inner).achat_batch(
            [question(word, word) for word in ("abc", "xyz", "cba")], return_exceptions=True
        )
        assert isinstance(answers[1], OSError)
        assert [answers[n].message.content for n in (0, 2)] == ["answer 1", "answer 2"]

    async def test_a_large_batch_is_planned_off_the_event_loop_in_its_tenants_name(self):
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

    async def test_a_planning_fault_sends_the_batch_as_given(self):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, planner=FaultyPlanner())
        await llm.achat_batch([question(word) for word in ("abc", "xyz", "cab")], workers=1)
        assert sent_words(inner) == ["abc", "xyz", "cab"]
        assert llm.faults == 1

    async def test_an_empty_batch_has_no_answers(self):
        assert await ReuseLLM(inner=RecordingLLM()).achat_batch([]) == []

    @pytest.mark.parametrize("workers", [0, -1, True, "two"])
    async def test_a_number_of_workers_that_is_none_is_refused(self, workers):
        with pytest.raises(ValueError, match="workers must be an integer from 1"):
            await ReuseLLM(inner=RecordingLLM()).achat_batch([question("a")], workers=workers)
