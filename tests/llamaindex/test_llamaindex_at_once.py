"""Queries that are asked at once are planned together, whatever part of ours is in the engine."""

import asyncio
import re
from itertools import groupby, product
from typing import Any

import pytest
from llama_index.core import get_response_synthesizer
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine, SubQuestionQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llamaindex_helpers import LetterRetriever, RecordingLLM, SubQuestions

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor, ReuseRetriever

WORDS = ["abc", "xyz", "cab", "zyx", "bca"]
TOGETHER = ["abc", "abc", "abc", "xyz", "xyz"]
LONG_S = 60.0
WINDOW_S = 1.0


class LateRetriever(LetterRetriever):
    """Takes longer for later letters."""

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        await asyncio.sleep((ord(query_bundle.query_str[0]) - ord("a")) / 500)
        return self._retrieve(query_bundle)


def set_up(
    ours: str, planner: ReusePlanner | None = None, retriever: Any = None
) -> tuple[RecordingLLM, RetrieverQueryEngine]:
    """Return a model that records, and an engine with parts of ours around it."""
    planner, inner = planner or ReusePlanner(), RecordingLLM()
    llm: Any = inner
    if "LLM" in ours:
        llm = ReuseLLM(inner=inner, planner=planner, window_s=WINDOW_S)
    retriever = retriever or LetterRetriever()
    if "Retriever" in ours:
        retriever = ReuseRetriever(retriever=retriever, planner=planner)
        retriever._documents._batcher._window_s = LONG_S
    behind = []
    if "Postprocessor" in ours:
        behind = [ReusePostprocessor(planner=planner)]
        behind[0]._documents._batcher._window_s = LONG_S
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, node_postprocessors=behind)
    return inner, engine


def sent(inner: RecordingLLM) -> list[str]:
    return ["".join(re.findall(r"(\w) says: ", prompt)) for prompt in inner.prompts]


@pytest.mark.parametrize(
    ("ours", "retriever"),
    [
        *product(["LLM", "LLM Postprocessor", "LLM Retriever"], [LetterRetriever]),
        *product(["Postprocessor", "Retriever"], [LetterRetriever, LateRetriever]),
    ],
)
async def test_queries_at_once_wait_for_each_other_and_are_sent_in_planned_order(ours, retriever):
    inner, engine = set_up(ours, retriever=retriever())
    async with asyncio.timeout(30):
        await asyncio.gather(*(engine.aquery(f"{word} which?") for word in WORDS))
    assert sent(inner) == TOGETHER


@pytest.mark.parametrize("ours", ["Postprocessor", "Retriever"])
async def test_who_comes_alone_does_not_wait(ours):
    inner, engine = set_up(ours)
    async with asyncio.timeout(30):
        await engine.aquery("abc which?")
        await asyncio.to_thread(engine.query, "cba which?")
    assert sent(inner) == ["abc", "abc"]


@pytest.mark.parametrize("ours", ["Postprocessor", "Retriever"])
async def test_tenants_do_not_wait_for_each_other_and_are_planned_apart(ours):
    async def ask(tenant: str, word: str) -> None:
        with request_context(tenant=tenant):
            await engine.aquery(f"{word} which?")

    inner, engine = set_up(ours)
    async with asyncio.timeout(30):
        await asyncio.gather(ask("one", "abc"), ask("two", "cab"), ask("one", "bca"))
    assert sorted(sent(inner)) == ["abc", "abc", "cab"]


@pytest.mark.parametrize("ours", ["Postprocessor", "Retriever"])
async def test_a_query_that_is_given_up_is_taken_back_and_holds_up_nobody(ours, planner):
    inner, engine = set_up(ours, planner)
    first, second = (asyncio.create_task(engine.aquery(f"{w} which?")) for w in ("abc", "cab"))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(30):
        await second
    assert sent(inner) == ["cab"]
    assert planner.statistics().requests == 1


@pytest.mark.parametrize("ours", ["Postprocessor", "Retriever"])
async def test_a_retrieval_that_fails_is_no_longer_waited_for(ours):
    class Failing(LateRetriever):
        async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            if query_bundle.query_str.startswith("x"):
                raise OSError("gone")
            return await super()._aretrieve(query_bundle)

    inner, engine = set_up(ours, retriever=Failing())
    asking = (engine.aquery(f"{word} which?") for word in ("xyz", "bca", "cab"))
    async with asyncio.timeout(30):
        failed, *_ = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(failed, OSError)
    assert sent(inner) == ["bca", "bca"]


@pytest.mark.parametrize("ours", ["LLM", "LLM Postprocessor", "Retriever"])
def test_sub_questions_are_planned_together(ours):
    inner, engine = set_up(ours)
    sub_questions = SubQuestionQueryEngine.from_defaults(
        [QueryEngineTool(engine, ToolMetadata(name="docs", description="All."))],
        llm=MockLLM(),
        question_gen=SubQuestions("docs", *(f"{one} which?" for one in WORDS)),
        response_synthesizer=get_response_synthesizer(llm=MockLLM()),
        use_async=True,
        verbose=False,
    )
    sub_questions.query("all?")
    assert [len(list(alike)) for _, alike in groupby(sent(inner))] == [3, 2]
