"""Beside wrapped models, the index follows what the engine holds of their prompts."""

import gc
import time
from threading import Event

import pytest
from langchain_core.documents import Document
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from openai_models import chat_openai, openai_like

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


def langchain():
    inner = chat_openai(None, None, base_url=URL)
    model = ReuseChatModel(inner=inner, planner=ReusePlanner(), window_s=0)

    def ask(names):
        documents = [Document(f"{name} " * 40) for name in names]
        context = langchain_ctxreuse.format_context(documents)
        return model.invoke(f"{context}\n\nWhich?")

    return model.planner, ask


def llamaindex():
    inner = openai_like(None, None, api_base=URL)
    model = ReuseLLM(inner=inner, planner=ReusePlanner(), window_s=0)

    def ask(names):
        nodes = [NodeWithScore(node=TextNode(text=f"{name} " * 40)) for name in names]
        context = llamaindex_ctxreuse.format_context(nodes)
        return model.chat([ChatMessage(f"{context}\n\nWhich?")])

    return model.planner, ask


class CountingSync(KVEventSync):
    told = 0

    def record(self, *args, **fields):
        super().record(*args, **fields)
        self.told += 1


@pytest.mark.parametrize("application", [langchain, llamaindex])
def test_what_the_engine_drops_leaves_the_index(served, application):  # noqa: F811
    engine, cache = served(), TellingCache(25, 16)
    planner, ask = application()
    with Publisher() as publisher, CountingSync(planner, publisher.endpoint, settle_s=0.05) as sync:
        publisher.wait_for_subscriber()
        found = 0
        for number, names in enumerate(("abcd", "abce", "fghi", "jklm", "abcd"), start=1):
            ask(names)
            found += cache.serve(engine._prompt(engine.requests[-1]))
            publisher.publish(cache.take_events())
            deadline = time.monotonic() + 20
            while sync.told < number or sync.stats.batches < number:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert sync.settle()
        expected = planner.savings.reported.expected_cached_tokens
        assert 0 < expected <= found < 5 * 64  # most of the last one had been dropped
        assert planner.statistics().tokens <= 25 * 16
        assert sync.stats.requests < 5
    assert planner.prompt_follower is None


@pytest.mark.parametrize("application", [langchain, llamaindex])
def test_a_tracker_keeps_the_index_at_what_fits(served, application):  # noqa: F811
    engine, (planner, ask) = served(), application()
    tracker = CapacityTracker(planner, capacity_tokens=500)
    for names in ("abcd", "fghi", "jklm"):
        ask(names)
    assert engine.usage.prompt_tokens > 500
    assert 0 < planner.statistics().tokens <= 500 * tracker.block_share < 500


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


@pytest.mark.parametrize("application", [langchain, llamaindex])
def test_without_a_sync_no_tokens_are_asked_for(served, application, monkeypatch):  # noqa: F811
    engine = served()
    monkeypatch.setattr(OwnCalls, "follow", lambda *_: pytest.fail("nobody follows"))
    planner, ask = application()
    ask("abc")
    assert len(engine.requests) == 1
    assert "return_token_ids" not in engine.requests[0]
    planner.prompt_follower = KVEventSync(planner, "tcp://127.0.0.1:1")
    ask("a")  # one document is no context: nothing of it is in the index


@pytest.mark.parametrize("application", [langchain, llamaindex])
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
    planner, ask = application()
    with Publisher() as publisher, KVEventSync(planner, publisher.endpoint):
        for names in ("abc", "abd"):
            assert ask(names)
        deadline = time.monotonic() + 20
        while not caplog.messages:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    [message] = caplog.messages
    assert message.startswith("KVEventSync follows none of the requests of this model, because")
