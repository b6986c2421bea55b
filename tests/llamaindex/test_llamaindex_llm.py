from typing import Any

import pytest
from block_labels import label
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock, ThinkingBlock
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llamaindex_helpers import RecordingLLM, labelled, located
from llamaindex_llm_helpers import (
    CHATS,
    COMPLETIONS,
    City,
    FaultyPlanner,
    Served,
    answer_to,
    called,
    context,
    planned,
    question,
    sent_words,
)

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseLLM

WAYS = [*CHATS, *COMPLETIONS]


def asked(llm: ReuseLLM, way: str, word: str) -> str:
    return answer_to(llm, way, f"{context(word)}\n\nWhich?")


class TestEachWayToCallAModel:
    @pytest.mark.parametrize("way", CHATS)
    def test_contexts_in_chats_are_planned(self, way, inner, llm):
        answers = [called(llm, way, question(word)) for word in ("abc", "cba")]
        assert [one.message.content for one in answers] == ["answer 1", "answer 2"]
        assert inner.prompts == [
            f"<system>Be brief.</><user>{labelled('abc')}\n\nWhich?</>",
            f"<system>Be brief.</><user>{planned('abc', 'cba')}\n\nWhich?</>",
        ]

    @pytest.mark.parametrize("way", COMPLETIONS)
    def test_contexts_in_completion_prompts_are_planned(self, way, inner, llm):
        assert [asked(llm, way, word) for word in ("abc", "cba")] == ["answer 1", "answer 2"]
        assert inner.prompts == [
            f"{labelled('abc')}\n\nWhich?",
            f"{planned('abc', 'cba')}\n\nWhich?",
        ]
        assert inner.options == [{"formatted": False}] * 2

    @pytest.mark.parametrize("way", WAYS)
    def test_each_call_has_exactly_the_events_of_the_inner_model(self, way):
        debug, seen = LlamaDebugHandler(print_trace_on_end=False), Seen()
        llm = ReuseLLM(inner=RecordingLLM(callback_manager=CallbackManager([debug])), window_s=0)
        root = get_dispatcher()
        root.add_event_handler(seen)
        try:
            asked(llm, way, "ab")
        finally:
            root.event_handlers.remove(seen)
        assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
        assert len([name for name in seen.names if name.endswith("StartEvent")]) == 1
        assert len([name for name in seen.names if name.endswith("EndEvent")]) == 1

    @pytest.mark.parametrize("way", WAYS)
    def test_a_planning_fault_sends_the_prompt_as_given(self, way, inner):
        llm = ReuseLLM(inner=inner, planner=FaultyPlanner(), window_s=0)
        assert [asked(llm, way, word) for word in ("abc", "cba")] == ["answer 1", "answer 2"]
        assert sent_words(inner) == ["abc", "cba"]
        assert llm.faults == 2

    @pytest.mark.parametrize("way", WAYS)
    def test_a_call_that_fails_is_taken_back_and_raises_what_the_model_raises(self, way):
        inner, planner = RecordingLLM(fails=lambda prompt: TimeoutError("busy")), ReusePlanner()
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0)
        with pytest.raises(TimeoutError, match="busy"):
            asked(llm, way, "abc")
        assert planner.statistics().requests == 0

    @pytest.mark.parametrize("way", ["stream_chat", "astream_chat", "astream_complete"])
    @pytest.mark.parametrize(("breaks_after", "kept"), [(0, 0), (1, 1)])
    def test_a_stream_that_breaks_is_taken_back_if_nothing_came(
        self, way, breaks_after, kept, planner
    ):
        inner = RecordingLLM(breaks_after=breaks_after)
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0)
        with pytest.raises(ConnectionError):
            asked(llm, way, "abc")
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
    pieces: Any = None

    def stream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.pieces

    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        return self.pieces


class TestStreamsThatNobodyReads:
    async def test_one_that_nobody_begins_to_read_is_not_even_planned(self):
        inner, planner = RecordingLLM(), ReusePlanner()
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0)
        stream: Any = llm.stream_chat(question("abc"))
        async_stream: Any = await llm.astream_chat(question("abc"))
        stream.close()
        await async_stream.aclose()
        del stream, async_stream
        assert planner.statistics().requests == 0
        assert inner.prompts == []

    def test_one_is_of_the_tenant_for_whom_it_was_asked(self, inner, llm):
        with request_context(tenant="acme"):
            stream = llm.stream_complete(context("abc"))
        list(stream)
        llm.complete(context("cba"))
        assert inner.prompts[-1] == context("cba"), "nobody else's order"
        with request_context(tenant="acme"):
            llm.complete(context("cba"))
        assert inner.prompts[-1] == planned("abc", "cba")

    @pytest.mark.parametrize("is_async", [False, True])
    async def test_one_that_ends_after_its_first_piece_stays(self, is_async):
        pieces, planner = Closing(), ReusePlanner()
        llm = ReuseLLM(inner=Streaming(pieces=pieces), planner=planner, window_s=0)
        if is_async:
            async_stream = await llm.astream_chat(question("abc"))
            assert await anext(async_stream) == "a piece"
            await async_stream.aclose()
        else:
            stream = llm.stream_chat(question("abc"))
            assert next(stream) == "a piece"
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
    def test_what_is_no_context_is_not_changed(self, inner, llm):
        llm.chat(question("ab"))
        for text in (
            "no context at all  \n\n ",
            f"{labelled('b')}\n\n{label('another text')} another text",
            "",
        ):
            llm.chat([ChatMessage(role="user", content=text)])
            assert inner.chats[-1] == [ChatMessage(role="user", content=text)]

    def test_other_parts_than_text_are_untouched(self, inner, llm):
        image = ImageBlock(url="http://x/a.png")
        thinking = ThinkingBlock(content="hm")
        first = ChatMessage(role="user", blocks=[thinking, TextBlock(text=context("abc"))])
        llm.chat([question("abc")[0], first])
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
            TextBlock(text=planned("abc", "cba")),
            image,
            TextBlock(text="Which?"),
        ]

    def test_the_roles_of_other_models_are_understood(self):
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
            again = ChatMessage(role="user", content=f"{context('bc')}\n\nSure?")
            llm.chat([*opening("cba"), ChatMessage(role="model", content="a."), again])
        assert inner.prompts[2].startswith(inner.prompts[1])
        assert inner.prompts[2].endswith(f"<model>a.</><user>{located('bc')}\n\nSure?</>")
        assert planner.statistics().requests == 3, "what a model has answered is not planned again"


class TestTheInnerModel:
    def test_what_is_set_on_the_wrapper_is_set_on_the_model_inside(self):
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

    @pytest.mark.parametrize("is_chat_model", [True, False])
    async def test_predictions_use_the_system_prompt_of_the_model_inside(self, is_chat_model):
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

    def test_it_has_a_stable_name_and_takes_no_tools_or_structured_model(self):
        assert ReuseLLM.class_name() == "ReuseLLM"
        assert ReuseLLM(inner=MockLLM()).to_dict()["inner"]["class_name"] == "MockLLM"
        llm = ReuseLLM(inner=MockLLM())
        assert llm.get_tool_calls_from_response(llm.chat([])) == [], "a CodeActAgent asks for them"
        with pytest.raises(NotImplementedError, match="MockLLM takes no tools"):
            llm.chat_with_tools([], "q")
        with pytest.raises(ValueError, match=r"ReuseLLM\(inner=llm\)\.as_structured_llm"):
            ReuseLLM(inner=MockLLM().as_structured_llm(City))

    @pytest.mark.parametrize("inner", [None, "gpt", object()])
    def test_a_model_that_is_none_is_refused(self, inner):
        with pytest.raises(ValueError, match="inner must be a LlamaIndex LLM"):
            ReuseLLM(inner=inner)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"planner": 3}, r"planner must be a ctxreuse\.ReusePlanner"),
            ({"window_s": -1}, "micro-batch window"),
            ({"strategy": "best"}, "no strategy 'best'"),
            ({"send_cache_salt": "maybe"}, "send_cache_salt"),
            ({"system_prompt": "Be brief."}, "system_prompt is the inner model's"),
            ({"windows": 1}, "windows"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            ReuseLLM(inner=MockLLM(), **arguments)


class TestWhatTheEngineIsTold:
    def test_nothing_by_default_and_without_tenant_and_conversation(self):
        inner = RecordingLLM()
        with request_context(tenant="one", conversation_id="c"):
            ReuseLLM(inner=inner, window_s=0).chat(question("a"))
        assert inner.options == [{}]
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True, send_session_id=True)
        llm.chat(question("a"))
        assert inner.options == [{}]

    async def test_salt_and_session_go_with_every_kind_of_call(self, inner):
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

    def test_what_the_user_sets_stays_however_a_header_is_written(self):
        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True)
        mine = {"cache_salt": "mine", "top_k": 5}
        with request_context(tenant="one"):
            llm.chat(question("a"), extra_body=mine)
        assert inner.options == [{"extra_body": {"cache_salt": "mine", "top_k": 5}}]
        assert mine == {"cache_salt": "mine", "top_k": 5}

        inner = RecordingLLM()
        llm = ReuseLLM(inner=inner, window_s=0, send_session_id=True)
        with request_context(conversation_id="c"):
            llm.chat(question("a"), extra_headers={"x-session-id": "mine"})
        assert inner.options == [{"extra_headers": {"x-session-id": "mine"}}]

    async def test_what_cannot_be_added_to_is_sent_as_given(self):
        inner, planner = RecordingLLM(), ReusePlanner()
        inner.additional_kwargs = {"extra_headers": {"X-Always": "1"}}
        llm = ReuseLLM(inner=inner, planner=planner, window_s=0, send_cache_salt=True)
        odd: Any = [("top_k", 5)]
        with request_context(tenant="one"):
            llm.chat(question("abc"), extra_body=odd)
            await llm.achat_batch([question("cba")], extra_body=odd)
        assert llm._model.options == [{"extra_body": odd, "extra_headers": {"X-Always": "1"}}] * 2
        assert llm._model.prompts[1].count(planned("abc", "cba")) == 1
        assert llm.faults == 2

    def test_the_key_changes_the_salt_and_is_not_shown(self, inner):
        for key in ("", "secret"):
            llm = ReuseLLM(inner=inner, window_s=0, send_cache_salt=True, salt_key=key)
            with request_context(tenant="one"):
                llm.chat(question("a"))
        first, second = (options["extra_body"]["cache_salt"] for options in inner.options)
        assert first != second
        assert "secret" not in repr(llm) + str(llm.to_dict())

    def test_it_reaches_a_server_beside_what_the_model_always_sends(self):
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

    def test_events_of_a_model_that_always_sends_something_go_where_the_user_says(self):
        served = Served(additional_kwargs={"extra_body": {"top_k": 5}})
        llm = ReuseLLM(inner=served.bare, window_s=0, send_cache_salt=True)
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm.callback_manager = CallbackManager([debug])
        llm.chat(question("a"))
        assert len(debug.get_event_pairs(CBEventType.LLM)) == 1
        assert served.bare.callback_manager is llm.callback_manager
