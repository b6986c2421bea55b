"""Memories of real conversations: how often planned searches hit the engine's prefix cache."""

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mem0_stores import memory

from ctxreuse.cache import BlockLevelCache, CacheUsage
from ctxreuse.cache.simulator import block_key
from ctxreuse.context.blocks import ContextBlock
from ctxreuse.measure.traces.trace_files import TraceRequest, read_corpus, read_trace
from mem0_ctxreuse import ReuseMemory

DATA = os.environ.get("CTXREUSE_DATA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not DATA or not (Path(DATA) / "locomo" / "trace_k20.jsonl").is_file(),
        reason="needs the public data: set CTXREUSE_DATA to its folder",
    ),
]


@functools.cache
def trace() -> list[TraceRequest]:
    folder = Path(DATA or "") / "locomo"
    corpus = read_corpus(str(folder / "corpus.jsonl"))
    return read_trace(str(folder / "trace_k20.jsonl"), corpus)


class LocomoStore:
    """Finds for a user's question what the trace found."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self.found = {(one.conversation_id, one.query): one.blocks for one in requests}

    def search(self, query: str, *, filters: dict[str, Any]) -> dict[str, Any]:
        blocks = self.found[filters["user_id"], query]
        return {"results": [memory(block.id, block.text) for block in blocks]}


def hit_ratio(contexts: Iterable[Sequence[ContextBlock]]) -> float:
    cache = BlockLevelCache()
    usages = [
        cache.serve(
            [block_key(str(block.id)) for block in blocks], [block.tokens or 0 for block in blocks]
        )
        for blocks in contexts
    ]
    return sum(usages, CacheUsage()).hit_ratio


def planned(requests: Sequence[TraceRequest]) -> list[list[ContextBlock]]:
    """Return each request's blocks in the order of a search for its question."""
    wrapped = ReuseMemory(LocomoStore(requests))
    orders = []
    for one in requests:
        result = wrapped.search(one.query, filters={"user_id": one.conversation_id})
        blocks = {block.id: block for block in one.blocks}
        orders.append([blocks.pop(found["id"]) for found in result["results"]])
        assert not blocks, "every memory comes back"
    assert wrapped.faults == 0
    return orders


def test_users_searches_hit_the_cache_far_more_often_than_as_retrieved():
    user = trace()[0].conversation_id
    requests = [one for one in trace() if one.conversation_id == user]
    assert len(requests) > 100
    as_retrieved = hit_ratio(one.blocks for one in requests)
    assert hit_ratio(planned(requests)) > 3 * as_retrieved > 0
    as_retrieved = hit_ratio(one.blocks for one in trace())
    assert hit_ratio(planned(trace())) > 3 * as_retrieved > 0
