"""What `planner.savings` says of a wrapped LLM: the usage of its answers, and its failures."""

import asyncio

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llamaindex_helpers import RecordingLLM
from llamaindex_llm_helpers import (
    CHATS,
    FaultyPlanner,
    Served,
    called,
    context,
    question,
    sent_words,
)

from ctxreuse import ReusePlanner
from llamaindex_ctxreuse import ReuseLLM

WORDS = ("abc", "cab", "bca", "acb")
STREAMED = {"stream_options": {"include_usage": True}}


def calls(llm, way):
    if way == "achat_batch":
        asyncio.run(llm.achat_batch([question(word) for word in WORDS]))
        return
    for word in WORDS:
        called(llm, way, question(word), **(STREAMED if "stream" in way else {}))


@examples(40)
@given(
    st.lists(st.permutations("abcd"), min_size=1, max_size=6),
    st.sampled_from(("reuse", "none")),
    st.sampled_from(("active", "shadow")),
)
def test_nothing_is_saved_where_every_prompt_is_sent_as_given(orders, strategy, mode):
    inner, planner = RecordingLLM(), ReusePlanner(mode=mode)
    llm = ReuseLLM(inner=inner, planner=planner, strategy=strategy, window_s=0)
    words = ["".join(letters) for letters in orders]
    for one in words:
        llm.chat(question(one))
    savings, is_changed = planner.savings, sent_words(inner) != words
    assert not (is_changed and (strategy == "none" or mode == "shadow"))
    if mode == "shadow" and strategy == "reuse":
        return  # it counts what would be saved
    assert (savings.changed > 0) == is_changed
    if not is_changed:
        assert savings.saved_tokens == savings.error_tokens == 0


@pytest.mark.parametrize("way", [*CHATS, "achat_batch"])
def test_each_answer_without_usage_counts_as_unreported_once(way):
    llm = ReuseLLM(inner=RecordingLLM(), window_s=0)
    calls(llm, way)
    assert llm.planner.savings.reported.unreported == len(WORDS)


@pytest.mark.parametrize("way", [*CHATS, "achat_batch"])
def test_the_usage_of_each_answer_is_counted_once(way):
    served = Served()
    llm = ReuseLLM(inner=served.bare, window_s=0)
    calls(llm, way)
    savings = llm.planner.savings
    assert savings.requests == savings.reported.answers == len(WORDS)
    assert savings.reported.prompt_tokens == served.engine.usage.prompt_tokens
    assert savings.reported.cached_tokens == served.engine.usage.cached_tokens > 0
    assert savings.reported.expected_cached_tokens == savings.cached_as_sent > 0


def test_completions_are_counted_and_failures_of_planning():
    served = Served(is_chat_model=False)
    llm = ReuseLLM(inner=served.bare, window_s=0)
    llm.complete(f"{context('abc')}\n\nWhich?")
    assert llm.planner.savings.reported.prompt_tokens == served.engine.usage.prompt_tokens

    planner = FaultyPlanner()
    llm = ReuseLLM(inner=Served().bare, planner=planner, window_s=0)
    llm.chat(question("abc"))
    assert planner.savings.planning_failures == llm.faults > 0
    assert planner.savings.reported.answers == 1


class Odd:
    def __getattr__(self, name):
        raise RuntimeError("a foreign object")


def test_usage_that_cannot_be_read_loses_no_answer(planner):
    class Model(type(Served().bare)):
        def chat(self, messages, **kwargs):
            return ChatResponse(message=ChatMessage("So."), raw=Odd())

    llm = ReuseLLM(inner=Model(**Served().bare.model_dump()), planner=planner, window_s=0)
    assert llm.chat(question("abc")).message.content == "So."
    assert planner.savings.planning_failures == 1
