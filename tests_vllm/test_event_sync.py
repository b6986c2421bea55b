"""The index follows the engine's own cache events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from uuid import uuid4

import pytest
from engine import Engine
from vllm_process import Server, kill, start

from ctxreuse import ContextRequest, Plan, ReusePlanner
from ctxreuse.cache import KVEventSync, block_ends
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace

REQUESTS = 30
PROBES = 16
BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was answered.

    Attributes:
        plan: What was sent.
        prompt_tokens: The prompt's token ids.
        cached_tokens: How many of these came from the engine's cache.
        ends: At which of them each block ends.
        engine_block: Tokens of one of the engine's blocks.
    """

    plan: Plan
    prompt_tokens: tuple[int, ...]
    cached_tokens: int
    ends: list[int]
    engine_block: int

    @property
    def expected(self) -> int:
        """How many blocks the index expected to be cached."""
        tokens = accumulate((block.tokens or 0 for block in self.plan.blocks), initial=0)
        return list(tokens).index(self.plan.expected_cached_tokens)

    @property
    def is_as_expected(self) -> bool:
        """Whether the engine had these blocks, and not the next one.

        Of a block that ends within an engine block the last few tokens cannot be served, whether it
        is held or not; it may count as either.
        """
        whole = bisect_right(self.ends, self.cached_tokens)
        begun = bisect_right(self.ends, self.cached_tokens + self.engine_block - 1)
        return whole <= self.expected <= begun


@pytest.fixture
def requests(data_folder: Path) -> list[ContextRequest]:
    corpus = read_corpus(str(data_folder / "xquad" / "corpus.jsonl"))
    trace = read_trace(str(data_folder / "xquad" / "trace_k5.jsonl"), corpus)[:REQUESTS]
    return [ContextRequest(traced.blocks[:BLOCKS], traced.query) for traced in trace]


@pytest.fixture
def planner() -> ReusePlanner:
    return ReusePlanner()


@pytest.fixture
def sync(planner: ReusePlanner, small_server: Server) -> Iterator[KVEventSync]:
    with following(planner, small_server) as running:
        yield running


def following(planner: ReusePlanner, server: Server) -> KVEventSync:
    endpoint, replay = server.options.events_endpoint, server.options.replay_endpoint
    assert endpoint is not None
    return KVEventSync(planner, endpoint, replay)


def send(
    engine: Engine, planner: ReusePlanner, sync: KVEventSync, request: ContextRequest, salt: str
) -> Sent:
    plan = planner.plan(request)
    answer = engine.chat(plan.messages(), salt=salt)
    ends = block_ends(plan, engine.count_tokens, engine.render)
    sync.record(plan, answer.prompt_tokens, ends, cache_salt=salt)
    assert sync.settle(30)
    return Sent(plan, answer.prompt_tokens, answer.usage.cached_tokens, ends, engine.block_size)


def test_the_index_expects_what_the_engine_serves_after_evictions_and_a_restart(
    small_server: Server,
    small_engine: Engine,
    planner: ReusePlanner,
    sync: KVEventSync,
    requests: list[ContextRequest],
) -> None:
    salt = uuid4().hex
    sent = [send(small_engine, planner, sync, request, salt) for request in requests]
    assert sum(len(one.prompt_tokens) for one in sent) > 2 * small_engine.cache_tokens

    # newest first: these are held, so that asking again evicts little of the others; and what
    # each one evicts is known before the next is planned
    again = [send(small_engine, planner, sync, one, salt) for one in requests[: -PROBES - 1 : -1]]
    assert all(one.is_as_expected for one in again)
    assert again[0].expected == BLOCKS
    assert {one.expected for one in again} >= {0, BLOCKS}

    late_planner = ReusePlanner()
    with following(late_planner, small_server) as late:
        for one in [*sent, *again]:
            same = ContextRequest(one.plan.blocks, one.plan.request.query)
            late.record(
                late_planner.plan(same, "none"), one.prompt_tokens, one.ends, cache_salt=salt
            )
        assert late.settle(30)
        assert late_planner.statistics().tokens == planner.statistics().tokens > 0

    kill(small_server)
    start(small_server.options)
    assert sync.settle(30)
    assert planner.statistics().tokens == 0
    fresh = [send(small_engine, planner, sync, one, salt) for one in [*requests[:3], *requests[:3]]]
    assert all(one.is_as_expected for one in fresh)
    assert [one.expected for one in fresh] == [0, 0, 0, BLOCKS, BLOCKS, BLOCKS]
