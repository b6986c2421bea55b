"""The simulated prefix cache serves what the engine's serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from engine import Answer, Engine

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.cache import CacheUsage, PrefixCacheSimulator
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace

QUESTIONS = 64
TURNS = 12
BLOCKS = 3  # of the five retrieved, so that the run stays short
ANSWER_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """What the engine and the simulator say about one request."""

    reported: CacheUsage
    predicted: CacheUsage


def test_every_requests_cached_tokens_are_predicted(engine: Engine, data_folder: Path) -> None:
    before = engine.metrics()
    compared = list(compare(engine, questions(engine, data_folder)))
    assert len(compared) == QUESTIONS
    assert [c.predicted for c in compared] == [c.reported for c in compared]
    total = sum((c.reported for c in compared), CacheUsage())
    assert 0.1 < total.hit_ratio < 0.9
    after = engine.metrics()
    assert (after.prefix_cache_hits or 0) - (before.prefix_cache_hits or 0) == total.cached_tokens


def test_every_turns_cached_tokens_are_predicted_answers_included(
    engine: Engine, data_folder: Path
) -> None:
    compared = list(compare(engine, turns(engine, data_folder)))
    assert len(compared) == TURNS
    assert [c.predicted for c in compared] == [c.reported for c in compared]
    assert sum((c.reported for c in compared), CacheUsage()).hit_ratio > 0.4


def test_totals_agree_where_the_cache_has_to_evict(small_engine: Engine, data_folder: Path) -> None:
    unlimited = PrefixCacheSimulator(None, small_engine.block_size)
    reported = predicted = without_eviction = 0

    def answers() -> Iterator[Answer]:
        nonlocal without_eviction
        for answer in questions(small_engine, data_folder):
            without_eviction += unlimited.serve(answer.prompt_tokens).cached_tokens
            yield answer

    for compared in compare(small_engine, answers()):
        reported += compared.reported.cached_tokens
        predicted += compared.predicted.cached_tokens
    assert abs(reported - predicted) <= 0.02 * reported
    assert 0 < reported < 0.8 * without_eviction


def compare(engine: Engine, answers: Iterator[Answer]) -> Iterator[Compared]:
    """Replay what the engine has answered through a simulator of its size."""
    simulated = PrefixCacheSimulator(engine.cache_tokens, engine.block_size, null_block=True)
    for answer in answers:
        predicted = simulated.serve(answer.prompt_tokens, generated=answer.answer_tokens)
        yield Compared(answer.usage, predicted)


def questions(engine: Engine, data: Path) -> Iterator[Answer]:
    """Ask independent questions in the order that ctxreuse plans, one token each."""
    corpus = read_corpus(str(data / "xquad" / "corpus.jsonl"))
    trace = read_trace(str(data / "xquad" / "trace_k5.jsonl"), corpus)[:QUESTIONS]
    planner, salt = ReusePlanner(), uuid4().hex
    for traced in trace:
        plan = planner.plan(ContextRequest(traced.blocks[:BLOCKS], traced.query))
        yield engine.chat(plan.messages(), salt=salt)


def turns(engine: Engine, data: Path) -> Iterator[Answer]:
    """Hold conversations in arrival order, with the model's own answers as history."""
    corpus = read_corpus(str(data / "mtrag" / "corpus.jsonl"))
    trace = read_trace(str(data / "mtrag" / "trace_k5.jsonl"), corpus)
    firsts = [traced.conversation_id for traced in trace[:TURNS]]
    planner, salt = ReusePlanner(), uuid4().hex
    chats = {name: planner.conversation(str(name)) for name in firsts[: TURNS // 3]}
    chosen = [traced for traced in trace if traced.conversation_id in chats]
    for traced in chosen[:TURNS]:
        chat = chats[traced.conversation_id]
        chat.plan(traced.blocks[:2], traced.query)
        answer = engine.chat(chat.messages(), salt=salt, max_tokens=ANSWER_TOKENS)
        chat.record(answer.text)
        yield answer
