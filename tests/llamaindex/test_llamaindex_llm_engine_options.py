from __future__ import annotations

from typing import Any

from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llamaindex_helpers import RecordingLLM
from llamaindex_llm_helpers import (
    Served,
    planned,
    question,
)

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseLLM


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
