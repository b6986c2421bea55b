import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import BaseOutputParser, PydanticProgramMode
from llamaindex_helpers import RecordingLLM, labelled, located
from llamaindex_llm_helpers import (
    City,
    FaultyPlanner,
    Served,
    Weather,
    called,
    context,
    planned,
    question,
    sent_words,
)

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseLLM

MODELS: dict[str, dict[str, Any]] = {
    "function calling": {"is_function_calling_model": True},
    "response_format": {"should_use_structured_outputs": True},
    "chat": {},
}

_PROMPT = PromptTemplate("{context}\n\nWhich city?")


STRUCTURED = [f"{way}structured_predict" for way in ("", "a", "stream_", "astream_")]


def city(llm: Any, way: str, text: str) -> Any:
    """Return the city that a model names, asked in a way."""
    if way in STRUCTURED:
        return called(llm, way, City, _PROMPT, context=text)
    message = ChatMessage(role="user", content=f"{text}\n\nWhich city?")
    return llm.as_structured_llm(City).chat([message]).raw


class TestStructuredOutput:
    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("way", [*STRUCTURED, "as_structured_llm"])
    def test_it_is_what_the_model_inside_gives_and_contexts_are_planned(self, kind, way):
        served = Served(**MODELS[kind])
        bare = city(served.bare, way, context("abc"))
        as_bare = served.requests()
        assert city(served.llm, way, context("abc")) == bare
        assert served.requests() == as_bare, "nothing had to be altered"
        assert bare.name == "Rome"
        assert city(served.llm, way, context("cba")) == bare
        [request] = served.requests()
        assert planned("abc", "cba") in served.prompt_of(request)
        assert served.llm.faults == 0

    @pytest.mark.parametrize("kind", MODELS)
    def test_chat_templates_and_output_parsers_survive(self, kind):
        served = Served(**MODELS[kind])
        for template in (
            ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{context}")]),
            RichPromptTemplate("Look: {{ context }} Which city?"),
        ):
            bare = served.bare.structured_predict(City, template, context="no context")
            assert served.llm.structured_predict(City, template, context="no context") == bare
            [one, other] = served.requests()
            assert one == other

    async def test_models_that_complete_texts_give_it_too(self):
        inner = RecordingLLM(is_chat_model=False, answer='{"name": "Rome"}')
        llm = ReuseLLM(inner=inner, window_s=0)
        text_prompt = PromptTemplate("{context}\n\nWhich city?")
        chat_prompt = ChatPromptTemplate.from_messages([("user", "{context}\n\nWhich city?")])
        for prompt in (text_prompt, chat_prompt):
            for word in ("abc", "cba"):
                for model in (inner, llm):
                    found = model.structured_predict(City, prompt, context=context(word))
                    assert found == City(name="Rome")
            assert inner.prompts[0] == inner.prompts[1]
            assert inner.prompts[2] == inner.prompts[3].replace(
                planned("abc", "cba"), labelled("cba")
            )
            assert planned("abc", "cba") in inner.prompts[3]
            inner.prompts.clear()
        found = await llm.astructured_predict(City, text_prompt, context="none")
        assert found == City(name="Rome")

    def test_a_template_with_an_output_parser_of_its_own_is_planned(self):
        class Polite(BaseOutputParser):
            def parse(self, output: str) -> Any:
                return output

            def format(self, query: str) -> str:
                return f"{query}\n\nPlease."

        served = Served()
        served.llm.structured_predict(City, _PROMPT, context=context("abc"))
        template = PromptTemplate("{context}\n\nWhich city?", output_parser=Polite())
        served.llm.structured_predict(City, template, context=context("cba"))
        assert planned("abc", "cba") in served.prompt_of(served.requests()[1])

    @pytest.mark.parametrize("is_chat_model", [True, False])
    def test_a_question_that_is_asked_again_stays_in_the_history_as_it_was(self, is_chat_model):
        inner = RecordingLLM(answer=City(name="Rome").model_dump_json())
        inner.is_chat_model = is_chat_model
        llm = ReuseLLM(inner=inner, window_s=0)
        asked = f"{context('ab')}\n\nWhich city?"
        llm.structured_predict(City, PromptTemplate("{asked}"), asked=asked)
        template = ChatPromptTemplate.from_messages(
            [("user", "{asked}"), ("assistant", "Rome."), ("user", "{again}")]
        )
        again = f"{context('bac')}\n\nWhich city?"
        llm.structured_predict(City, template, asked=asked, again=again)
        before, _, behind = inner.prompts[-1].partition("Rome.")
        assert f"{labelled('ab')}\n\nWhich city?" in before
        assert f"{labelled('c')}\n\n{located('ba')}\n\nWhich city?" in behind

    def test_templates_and_arguments_are_not_changed_and_errors_in_them_the_callers(self):
        served = Served()
        template = PromptTemplate("{context}")
        options = {"temperature": 0.5}
        served.llm.structured_predict(City, template, options, context="x")
        assert template.output_parser is None
        assert options == {"temperature": 0.5}

        def fails(**kwargs: Any) -> str:
            raise KeyError("context")

        template = PromptTemplate("{context}", function_mappings={"context": fails})
        with pytest.raises(KeyError, match="context"):
            Served().llm.structured_predict(City, template)

    def test_a_stream_is_its_callers_wherever_it_is_read(self):
        served = Served()
        llm = ReuseLLM(inner=served.bare, window_s=0, send_cache_salt=True)
        with request_context(tenant="one"):
            llm.structured_predict(City, _PROMPT, context=context("abc"))
            stream = llm.stream_structured_predict(City, _PROMPT, context=context("cba"))
        assert list(stream)[-1] == City(name="Rome")
        first, second = served.requests()
        assert planned("abc", "cba") in served.prompt_of(second)
        assert second["cache_salt"] == first["cache_salt"]

    def test_programs_that_are_given_the_wrapper_work_and_faults_send_prompts_as_given(self):
        inner = Served(is_function_calling_model=True)
        llm = ReuseLLM(inner=inner.bare, window_s=0)
        llm.pydantic_program_mode = PydanticProgramMode.LLM
        assert city(llm, "structured_predict", context("ab")) == City(name="Rome")

        served = Served()
        llm = ReuseLLM(inner=served.bare, planner=FaultyPlanner(), window_s=0)
        assert city(llm, "structured_predict", context("ba")) == City(name="Rome")
        assert labelled("ba") in served.prompt_of(served.requests()[0])
        assert llm.faults == 1


class TestTools:
    def test_tools_are_called_as_by_the_model_inside_and_contexts_planned(self):
        served = Served(is_function_calling_model=True)
        for llm in (served.bare, served.llm):
            response = llm.chat_with_tools(
                [Weather.tool], f"{context('abc')}\n\nWeather?", tool_required=True
            )
            [call] = llm.get_tool_calls_from_response(response)
            assert (call.tool_name, call.tool_kwargs["city"]) == ("weather", "Rome")
        assert served.engine.requests[0] == served.engine.requests[1]
        served.llm.chat_with_tools([Weather.tool], f"{context('cba')}\n\nWeather?")
        assert planned("abc", "cba") in served.prompt_of(served.engine.requests[2])

    async def test_tools_are_called_asynchronously_and_in_streams(self):
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

    @pytest.mark.parametrize("form", ["blocks", "additional_kwargs"])
    def test_what_an_answer_of_tool_calls_alone_followed_is_sent_again_as_it_was(self, form, inner):
        def search(number: int, word: str) -> list[ChatMessage]:
            call = ToolCallBlock(tool_call_id=str(number), tool_name="search", tool_kwargs={})
            asked = ChatMessage(role="assistant", blocks=[call])
            if form == "additional_kwargs":
                asked = ChatMessage(
                    role="assistant", blocks=[], additional_kwargs={"tool_calls": [{"id": number}]}
                )
            return [asked, ChatMessage(role="tool", content=context(word))]

        llm = ReuseLLM(inner=inner, window_s=0)
        messages = [ChatMessage(role="user", content="Which?")]
        with request_context(conversation_id="c"):
            for number, word in enumerate(["ab", "cba", "cba"]):
                messages += search(number, word)
                llm.chat(messages)
        sent = [[message.content for message in chat] for chat in inner.chats]
        assert sent[1][:3] == sent[0]
        assert sent[2][:5] == sent[1]
        assert str(sent[1][4]).startswith(labelled("c"))

    def test_tools_run_and_mock_models_with_tools_can_be_wrapped(self):
        tool = FunctionTool.from_defaults(lambda name, city: f"sunny in {city}", name="weather")
        answer = Served(is_function_calling_model=True).llm.predict_and_call([tool], "Weather?")
        assert str(answer) == "sunny in Rome"

        llm = ReuseLLM(inner=MockFunctionCallingLLM(is_chat_model=True), window_s=0)
        [call] = llm.get_tool_calls_from_response(llm.chat_with_tools([Weather.tool], "Weather?"))
        assert call.tool_name == "weather"
        assert llm.metadata.is_function_calling_model


class TestConcurrentCalls:
    async def test_a_cancelled_call_is_taken_back_and_holds_up_nobody(self, planner):
        llm = ReuseLLM(inner=RecordingLLM(), planner=planner, window_s=0.01)
        first = asyncio.create_task(llm.achat(question("abc")))
        second = asyncio.create_task(llm.achat(question("xyz")))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).message.content == "answer 1"
        with pytest.raises(asyncio.CancelledError):
            await first
        assert planner.statistics().requests == 1

    async def test_each_task_keeps_its_own_tenant_in_a_shared_window(self, inner):
        llm = ReuseLLM(inner=inner, window_s=0.02, send_cache_salt=True)

        async def ask(tenant: str, word: str) -> None:
            with request_context(tenant=tenant):
                await llm.achat(question(word))

        await asyncio.gather(ask("one", "abc"), ask("two", "cba"), ask("one", "cab"))
        salts = [options["extra_body"]["cache_salt"] for options in inner.options]
        assert sent_words(inner) == ["abc", "abc", "cba"]
        assert salts[0] == salts[1] != salts[2]

    async def test_threads_that_copy_the_context_keep_the_tenant_and_sync_calls_wait_for_no_loop(
        self, inner
    ):
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True)
        with request_context(tenant="one"), ThreadPoolExecutor(1) as pool:
            pool.submit(copy_context().run, llm.chat, question("abc")).result()
        assert "cache_salt" in inner.options[0]["extra_body"]

        llm = ReuseLLM(inner=RecordingLLM(), window_s=0.01)
        task = asyncio.create_task(llm.achat(question("abc")))
        await asyncio.sleep(0)  # the task has opened a window that only the loop can close
        assert llm.chat(question("xyz")).message.content == "answer 1"
        assert (await task).message.content == "answer 2"


class TestBatches:
    async def test_a_batch_is_sent_in_the_planned_order_and_answered_in_the_callers(self, inner):
        llm = ReuseLLM(inner=inner)
        words = ["abc", "xyz", "cab", "zyx", "bca"]
        answers = await llm.achat_batch([question(word, word) for word in words], workers=1)
        assert sent_words(inner) == ["abc", "abc", "abc", "xyz", "xyz"]
        for word, answer in zip(words, answers, strict=True):
            number = int((answer.message.content or "").removeprefix("answer "))
            assert inner.prompts[number - 1].endswith(f"{word}</>")

    @pytest.mark.parametrize("workers", [1, 3, 100])
    def test_without_an_event_loop_batches_work_too(self, workers, inner):
        llm = ReuseLLM(inner=inner)
        prompts = [f"{context(word)}\n\n{word}?" for word in ("abc", "xyz", "cab")]
        texts = [one.text for one in llm.complete_batch(prompts, workers=workers, stop="x")]
        assert sent_words(inner) == ["abc", "abc", "xyz"]
        assert texts == ["answer 1", "answer 3", "answer 2"]
        assert [options["stop"] for options in inner.options] == ["x"] * 3
        chats = llm.chat_batch([question("abc"), question("cba")], workers=workers)
        assert [one.message.content for one in chats] == ["answer 4", "answer 5"]

    async def test_a_progress_bar_shows_how_many_have_ended(self, capsys, inner):
        chats = [question(word) for word in ("abc", "cba")]
        await ReuseLLM(inner=inner).achat_batch(chats, show_progress=True)
        assert "2/2" in capsys.readouterr().err

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
    async def test_what_is_no_chat_fails_alone(self, chat, inner, llm):
        batch = [question("abc"), chat, question("cba")]
        first, error, last = await llm.achat_batch(batch, return_exceptions=True)
        assert isinstance(error, TypeError)
        assert {one.message.content for one in (first, last)} == {"answer 1", "answer 2"}
        with pytest.raises(TypeError, match="not iterable"):
            await llm.achat(chat)

    async def test_errors_take_their_answers_place_and_an_empty_batch_has_none(self):
        inner = RecordingLLM(fails=lambda prompt: OSError("gone") if "xyz" in prompt else None)
        answers = await ReuseLLM(inner=inner).achat_batch(
            [question(word, word) for word in ("abc", "xyz", "cba")], return_exceptions=True
        )
        assert isinstance(answers[1], OSError)
        assert [answers[n].message.content for n in (0, 2)] == ["answer 1", "answer 2"]
        assert await ReuseLLM(inner=RecordingLLM()).achat_batch([]) == []

    async def test_a_planning_fault_sends_the_batch_as_given(self, inner):
        llm = ReuseLLM(inner=inner, planner=FaultyPlanner())
        await llm.achat_batch([question(word) for word in ("abc", "xyz", "cab")], workers=1)
        assert sent_words(inner) == ["abc", "xyz", "cab"]
        assert llm.faults == 1

    @pytest.mark.parametrize("workers", [0, -1, True, "two"])
    async def test_a_number_of_workers_that_is_none_is_refused(self, workers):
        with pytest.raises(ValueError, match="workers must be an integer from 1"):
            await ReuseLLM(inner=RecordingLLM()).achat_batch([question("a")], workers=workers)
