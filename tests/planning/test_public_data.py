"""Real traces, compared with the published peer; the folder comes from CTXREUSE_DATA."""

import functools
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from planning_helpers import plan_trace

from ctxreuse import ReusePlanner
from ctxreuse.cache import BlockLevelCache, CacheUsage
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.measure.replay.simulate import simulate_blocks
from ctxreuse.measure.traces.trace_files import read_corpus, read_trace

DATA = os.environ.get("CTXREUSE_DATA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not DATA or not (Path(DATA) / "peer.json").is_file(),
        reason="needs the public data: set CTXREUSE_DATA to its folder",
    ),
]
every_trace = pytest.mark.parametrize("name", ["xquad_k5", "mtrag_k5", "locomo_k20"])
SMALL_CACHE = 20_000


@functools.cache
def load(name):
    folder, _, k = name.partition("_")
    corpus = read_corpus(str(Path(DATA) / folder / "corpus.jsonl"))
    return corpus, read_trace(str(Path(DATA) / folder / f"trace_{k}.jsonl"), corpus)


@functools.cache
def planned(name, mode, strategy, capacity=None):
    _, trace = load(name)
    return plan_trace(trace, ReusePlanner(capacity_tokens=capacity), mode, strategy)


@functools.cache
def hit_ratio(name, mode, strategy, capacity=None):
    corpus, _ = load(name)
    plans = planned(name, mode, strategy, capacity)
    return sum(simulate_blocks(plans, corpus, BlockLevelCache(capacity)), CacheUsage()).hit_ratio


@functools.cache
def peer(name):
    return json.loads((Path(DATA) / "peer.json").read_text())[name]


@every_trace
@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("strategy", ["reuse", "paper", "none"])
def test_every_plan_is_a_permutation_of_what_was_retrieved(name, mode, strategy):
    retrieved = {one.request_id: [block.id for block in one.blocks] for one in load(name)[1]}
    sent = {one.request_id: one for one in planned(name, mode, strategy)}
    assert sent.keys() == retrieved.keys()
    for request_id, ids in retrieved.items():
        plan = sent[request_id]
        assert sorted(plan.blocks) == sorted(set(ids))
        assert plan.references == []
        ranked = list(dict.fromkeys(ids))
        best = DEFAULT_TEMPLATES.most_ranked
        assert (plan.order_annotation is None) == (ranked[:best] == plan.blocks[:best])
    expected = sum(one.expected_cached_tokens for one in sent.values())
    usage = sum(
        simulate_blocks(list(sent.values()), load(name)[0], BlockLevelCache()), CacheUsage()
    )
    assert expected == usage.cached_tokens


@every_trace
def test_arriving_requests_are_served_more_than_the_peers(name):
    ratio = hit_ratio(name, "online", "reuse")
    assert ratio > peer(name)["contextpilot_online"]
    assert ratio > hit_ratio(name, "online", "none")
    assert hit_ratio(name, "online", "none") == pytest.approx(peer(name)["vanilla"], abs=5e-4)


@every_trace
def test_a_batch_is_served_more_than_the_peers(name):
    ratio = hit_ratio(name, "offline", "reuse")
    assert ratio > peer(name)["contextpilot_offline"]
    assert ratio > hit_ratio(name, "offline", "paper") >= hit_ratio(name, "offline", "none")
    paper = hit_ratio(name, "offline", "paper")
    assert paper == pytest.approx(peer(name)["contextpilot_offline"], abs=0.01)


@every_trace
def test_a_small_cache_loses_almost_nothing_of_a_scheduled_batch(name):
    unlimited = hit_ratio(name, "offline", "reuse")
    assert hit_ratio(name, "offline", "reuse", SMALL_CACHE) >= unlimited - 0.005


@every_trace
def test_conversations_that_are_replayed_send_no_text_twice_but_those_of_one_label(name):
    corpus, trace = load(name)
    shown, sent, again = {}, 0, 0
    for one in plan_trace(trace, ReusePlanner(labels=True), "online", conversations=True):
        if one.conversation_id is None:
            assert one.references == []
            continue
        texts_of = shown.setdefault(one.conversation_id, defaultdict(set))
        line = next((words for *_, words in one.parts if words), "")
        repeated = []
        for label, block_id, words in one.parts:
            text = corpus[block_id].text
            if words is None and text in texts_of[label]:
                repeated.append(label)
            elif words is not None:
                assert label in line
                assert texts_of[label] == {text}
        for label, block_id, _ in one.parts:
            texts_of[label].add(corpus[block_id].text)
        assert all(len(texts_of[label]) > 1 for label in repeated)
        sent, again = sent + len(one.parts), again + len(repeated)
    assert again <= 0.002 * sent
