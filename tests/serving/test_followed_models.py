"""Beside wrapped models, the index follows what the engine holds of their prompts."""

import gc
import time
from threading import Event

import pytest
from langchain_core.documents import Document
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

import langchain_ctxreuse
import llamaindex_ctxreuse
from ctxreuse import ReusePlanner, cache_profile
from ctxreuse.cache import CapacityTracker, KVEventSync
from ctxreuse.errors import EngineError
from ctxreuse.serving.client.connection import EngineConnection
from ctxreuse.serving.client.own_calls import OwnCalls
from langchain_ctxreuse import ReuseChatModel
from llamaindex_ctxreuse import ReuseLLM
from tests.support.kv_event_helpers import Publisher, TellingCache
from tests.support.served_engines import URL, served  # noqa: F401 - a fixture


class LangChain:
    """A wrapped chat model, and how it is asked."""

    def __init__(self, **fields):
        model = ChatOpenAI(model="emulated", base_url=URL, api_key="k", max_retries=0)
        self.planner = ReusePlanner()
        self._model = ReuseChatModel(inner=model, planner=self.planner, **fields)

    def ask(self, names):
        documents = [Document(f"{name} " * 40) for name in names]
        context = langchain_ctxreuse.format_context(documents)
        return self._model.invoke(f"{context}\n\nWhich?")


class LlamaIndex:
    """The same of LlamaIndex."""

    def __init__(self, **fields):
        model = OpenAILike(
            model="emulated",
            api_base=URL,
            api_key="k",
            is_chat_model=True,
            context_window=100_000,
            max_retries=0,
        )
        self.planner = ReusePlanner()
        self._model = ReuseLLM(inner=model, planner=self.planner, **fields)

    def ask(self, names):
        nodes = [NodeWithScore(node=TextNode(text=f"{name} " * 40)) for name in names]
        context = llamaindex_ctxreuse.format_context(nodes)
        return self._model.chat([ChatMessage(f"{context}\n\nWhich?")])


class CountingSync(KVEventSync):
    """A sync that knows how often it was told of a prompt."""

    told = 0

    def record(self, *args, **fields):
        super().record(*args, **fields)
        self.told += 1


@pytest.mark.parametrize("application", [LangChain, LlamaIndex])
def test_what_the_engine_drops_leaves_the_index(served, application):  # noqa: F811
    engine, cache, app = served(), TellingCache(25, 16), application(window_s=0)
    with (
        Publisher() as publisher,
        CountingSync(app.planner, publisher.endpoint, settle_s=0.05) as sync,
    ):
        publisher.wait_for_subscriber()
        found = 0
        for number, names in enumerate(("abcd", "abce", "fghi", "jklm", "abcd"), start=1):
            app.ask(names)
            found += cache.serve(engine._prompt(engine.requests[-1]))
            publisher.publish(cache.take_events())
            deadline = time.monotonic() + 20
            while sync.told < number or sync.stats.batches < number:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert sync.settle()
        expected = app.planner.savings.reported.expected_cached_tokens
        assert 0 < expected <= found < 5 * 64  # most of the last one had been dropped
        assert app.planner.statistics().tokens <= 25 * 16
        assert sync.stats.requests < 5
    assert app.planner.prompt_follower is None


@pytest.mark.parametrize("application", [LangChain, LlamaIndex])
def test_a_tracker_keeps_the_index_at_what_fits(served, application):  # noqa: F811
    engine, app = served(), application(window_s=0)
    tracker = CapacityTracker(app.planner, capacity_tokens=500)
    for names in ("abcd", "fghi", "jklm"):
        app.ask(names)
    assert engine.usage.prompt_tokens > 500
    assert 0 < app.planner.statistics().tokens <= 500 * tracker.block_share < 500


def test_the_connection_goes_with_the_model(served, monkeypatch):  # noqa: F811
    served()
    closed = Event()

    async def close(_):
        closed.set()

    monkeypatch.setattr(EngineConnection, "aclose", close)
    calls = OwnCalls(URL, "k", cache_profile("vllm"))
    calls._connected()
    assert not closed.is_set()
    del calls
    gc.collect()
    assert closed.wait(20)


@pytest.mark.parametrize("application", [LangChain, LlamaIndex])
def test_without_a_sync_no_tokens_are_asked_for(served, application, monkeypatch):  # noqa: F811
    engine = served()
    monkeypatch.setattr(OwnCalls, "follow", lambda *_: pytest.fail("nobody follows"))
    app = application(window_s=0)
    app.ask("abc")
    assert len(engine.requests) == 1
    assert "return_token_ids" not in engine.requests[0]
    app.planner.prompt_follower = KVEventSync(app.planner, "tcp://127.0.0.1:1")
    app.ask("a")  # one document is no context: nothing of it is in the index


@pytest.mark.parametrize("application", [LangChain, LlamaIndex])
def test_an_engine_that_tells_no_tokens_is_named_once(
    served,  # noqa: F811
    application,
    monkeypatch,
    caplog,
):
    served()

    async def refuse(*_):
        raise EngineError("the engine at engine.invalid has no such route", 404)

    monkeypatch.setattr(EngineConnection, "token_ids", refuse)
    app = application(window_s=0)
    with Publisher() as publisher, KVEventSync(app.planner, publisher.endpoint):
        for names in ("abc", "abd"):
            assert app.ask(names)
        deadline = time.monotonic() + 20
        while not caplog.messages:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    [message] = caplog.messages
    assert message.startswith("KVEventSync follows none of the requests of this model, because")
