"""A trace of two conversations and an independent request, planned and served in every way."""

import sys

import pytest
from planning_helpers import block, plan_trace, tokenizer_file

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import BlockLevelCache, CacheUsage, PrefixCacheSimulator
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.errors import InputFileError, MissingExtraError
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.simulate import load_tokenizer, simulate_blocks, simulate_tokens
from ctxreuse.measure.traces.trace_files import TraceRequest

CORPUS = {i: block(i, 100) for i in range(1, 9)}
LABELS = {i: DEFAULT_TEMPLATES.label_of(one) for i, one in CORPUS.items()}


def traced(name, ids, conversation_id=None, turn=0, **fields):
    blocks = tuple(CORPUS[i] for i in ids)
    return TraceRequest(name, f"{name}?", blocks, conversation_id, turn, **fields)


TRACE = [
    traced("a0", (1, 2), "a", 0),
    traced("x", (3, 2, 1)),
    traced("b0", (2, 1, 4), "b", 0),
    traced("a1", (2, 5), "a", 1),
    traced("b1", (5, 4), "b", 1),
    traced("a2", (5, 1, 6), "a", 2),
]


def outline(planned):
    return [(r.request_id, r.blocks, r.references, r.after) for r in planned]


def served(planned, capacity=None):
    usages = simulate_blocks(planned, CORPUS, BlockLevelCache(capacity))
    return [usage.cached_tokens for usage in usages]


def test_without_conversations_each_request_is_planned_on_its_own():
    planned = plan_trace(TRACE, ReusePlanner(), "online")
    assert outline(planned) == [
        ("a0", [1, 2], [], None),
        ("x", [1, 2, 3], [], None),
        ("b0", [1, 2, 4], [], None),
        ("a1", [2, 5], [], None),
        ("b1", [5, 4], [], None),
        ("a2", [5, 1, 6], [], None),
    ]
    assert [request.conversation_id for request in planned] == [None] * 6
    assert [request.turn for request in planned] == [0, 0, 0, 1, 1, 2]
    assert served(planned) == [0, 200, 200, 0, 0, 100]
    assert [request.expected_cached_tokens for request in planned] == served(planned)


def test_with_conversations_later_turns_refer_to_what_was_shown():
    planned = plan_trace(TRACE, ReusePlanner(labels=True), "online", conversations=True)
    assert outline(planned) == [
        ("a0", [1, 2], [], None),
        ("x", [1, 2, 3], [], None),
        ("b0", [1, 2, 4], [], None),
        ("a1", [5], [2], "a0"),
        ("b1", [5], [4], "b0"),
        ("a2", [6], [5, 1], "a1"),
    ]
    assert planned[5].parts == (
        (LABELS[6], 6, None),
        (LABELS[5], 5, f"See also {LABELS[5]}, {LABELS[1]} above."),
        (LABELS[1], 1, ""),
    )
    # a later turn's prompt is that of the turn before and what is new
    usages = list(simulate_blocks(planned, CORPUS, BlockLevelCache()))
    assert [(u.prompt_tokens, u.cached_tokens) for u in usages] == [
        (200, 0),
        (300, 200),
        (300, 200),
        (300, 200),
        (400, 300),
        (400, 300),
    ]


def test_offline_each_conversation_runs_to_its_end_behind_its_first_turn():
    planned = plan_trace(TRACE, ReusePlanner(labels=True), "offline", conversations=True)
    assert outline(planned) == [
        ("a0", [1, 2], [], None),
        ("a1", [5], [2], "a0"),
        ("a2", [6], [5, 1], "a1"),
        ("x", [1, 2, 3], [], None),
        ("b0", [1, 2, 4], [], None),
        ("b1", [5], [4], "b0"),
    ]
    assert served(planned) == [0, 200, 300, 200, 200, 300]


def test_offline_without_conversations_is_one_batch():
    planned = plan_trace(TRACE, ReusePlanner(), "offline")
    batch = ReusePlanner().plan_batch([*map(alone, TRACE)])
    assert [(r.request_id, r.blocks) for r in planned] == [
        (plan.request_id, [one.id for one in plan.blocks]) for plan in batch.plans
    ]
    assert sum(served(planned)) == 600


def alone(traced):
    return ContextRequest(traced.blocks, traced.query, request_id=traced.request_id)


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("conversations", [False, True])
def test_strategy_none_sends_everything_as_retrieved_in_arrival_order(mode, conversations):
    planned = plan_trace(TRACE, ReusePlanner(), mode, "none", conversations=conversations)
    assert [request.request_id for request in planned] == [one.request_id for one in TRACE]
    assert [request.order_annotation for request in planned] == [None] * 6
    shown = [[block_id for _, block_id, _ in request.parts] for request in planned]
    retrieved = [[one.id for one in traced.blocks] for traced in TRACE]
    if conversations:  # words on what is left out stand behind the blocks
        retrieved[3:] = [5, 2], [5, 4], [6, 5, 1]
    assert shown == retrieved
    assert served(planned) == (
        [0, 0, 0, 200, 300, 300] if conversations else [0, 0, 0, 100, 0, 100]
    )


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("strategy", ["reuse", "paper", "none"])
@pytest.mark.parametrize("conversations", [False, True])
def test_every_request_is_planned_once_and_every_block_shown_once(mode, strategy, conversations):
    steps = []
    planned = plan_trace(
        TRACE,
        ReusePlanner(),
        mode,
        strategy,
        conversations=conversations,
        advance=lambda: steps.append(1),
    )
    by_id = {request.request_id: request for request in planned}
    assert len(by_id) == len(planned) == len(steps) == len(TRACE)
    for one in TRACE:
        request = by_id[one.request_id]
        assert sorted(request.blocks + request.references) == sorted(b.id for b in one.blocks)
        assert request.query == one.query


def test_conversations_of_tenants_are_replayed_apart():
    trace = [
        traced("r0", (1,), 1, tenant="t"),
        traced("r1", (1,), 1, tenant="u"),
        traced("r2", (1,), "1", tenant="t"),
        traced("r3", (1,), 1, tenant="t", system="S"),
    ]
    planned = plan_trace(trace, ReusePlanner(), "online", conversations=True)
    assert outline(planned) == [
        ("r0", [1], [], None),
        ("r1", [1], [], None),
        ("r2", [1], [], None),
        ("r3", [], [1], "r0"),
    ]
    assert served(planned[:3]) == [0, 0, 100]


def test_blocks_without_a_token_count_weigh_the_estimate_and_small_caches_serve_what_fits():
    corpus = {1: ContextBlock(id=1, text="x" * 41), 2: ContextBlock(id=2, text="y", tokens=0)}
    planned = [planned_from(1, [1, 2]), planned_from(2, [1, 2])]
    assert list(simulate_blocks(planned, corpus, BlockLevelCache())) == [
        CacheUsage(11, 0),
        CacheUsage(11, 11),
    ]
    planned = [planned_from(n, ids) for n, ids in enumerate([(1, 2), (3,), (1, 2), (4, 5), (1, 2)])]
    assert served(planned) == [0, 0, 200, 0, 200]
    assert served(planned, capacity=300) == [0, 0, 200, 0, 100]
    assert served(planned, capacity=0) == [0, 0, 0, 0, 0]


def planned_from(name, ids, **fields):
    parts = tuple((f"[Doc_{block_id}]", block_id, None) for block_id in ids)
    return PlannedRequest(name, parts, place=f"plan.jsonl:{name}", **fields)


def test_a_plan_that_names_a_block_the_corpus_lacks_is_named_by_its_line():
    problem = "plan.jsonl:7: block '1' (str) is not in the corpus; "
    problem += "pass the corpus that the plan was made with"
    planned = [planned_from(7, ["1"])]
    for usages in (
        simulate_blocks(planned, CORPUS, BlockLevelCache()),
        simulate_tokens(planned, CORPUS, PrefixCacheSimulator(), Words()),
    ):
        with pytest.raises(InputFileError) as caught:
            list(usages)
        assert str(caught.value) == problem


# token by token


class Words:
    """A tokenizer that numbers the words it meets and keeps the texts it was given."""

    def __init__(self):
        self.numbers = {}
        self.texts = []

    def encode(self, sequence, *, add_special_tokens=True):
        assert add_special_tokens is False
        self.texts.append(sequence)
        self.ids = [self.numbers.setdefault(w, len(self.numbers)) for w in sequence.split()]
        return self


def test_whole_prompts_are_served_token_by_token():
    planned = [
        planned_from(1, [1, 2], query="Why?", system="Be brief."),
        planned_from(2, [1, 3], query="How?", system="Be brief."),
        planned_from(3, [1, 2], query="Why?", system="Be brief.", tenant="t"),
    ]
    tokenizer = Words()
    usages = list(simulate_tokens(planned, CORPUS, PrefixCacheSimulator(block_size=2), tokenizer))
    # system 3, user 1, two blocks of 4, question 1, assistant 1
    assert usages == [CacheUsage(14, 0), CacheUsage(14, 8), CacheUsage(14, 0)]
    assert tokenizer.texts[:3] == [
        "<|im_start|>assistant\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\n[Doc_1] text of 1\n\n[Doc_2] text of 2\n\nWhy?<|im_end|>\n",
    ]


def test_later_turns_are_served_behind_their_whole_history():
    planned = plan_trace(
        [traced("a0", (1, 2), "a"), traced("a1", (2, 3), "a", 1)],
        ReusePlanner(),
        "online",
        conversations=True,
    )
    tokenizer = Words()
    usages = list(simulate_tokens(planned, CORPUS, PrefixCacheSimulator(block_size=1), tokenizer))
    # behind 11 tokens: "OK." 1, user 1, block 3: 4, the reference 4, question 1, assistant 1
    assert usages == [CacheUsage(11, 0), CacheUsage(23, 11)]
    assert tokenizer.texts[-2:] == [
        "<|im_start|>assistant\nOK.<|im_end|>\n",
        f"<|im_start|>user\n{LABELS[3]} text of 3\n\n"
        f"See also {LABELS[2]} above.\n\na1?<|im_end|>\n",
    ]


def test_texts_of_any_characters_are_tokenized_with_a_file(tmp_path):
    words = ("<|im_start|>user", "[Doc_1]", "[Doc_2]", "text", "of", "1", "2")
    tokenizer = load_tokenizer(tokenizer_file(tmp_path, *words))
    planned = [planned_from(1, [1, 2], query="Why?"), planned_from(2, [1, 2], query="How?")]
    usages = simulate_tokens(planned, CORPUS, PrefixCacheSimulator(block_size=4), tokenizer)
    assert list(usages) == [CacheUsage(11, 0), CacheUsage(11, 8)]

    corpus = {1: ContextBlock(id=1, text="lone \ud800 surrogate \x00")}
    planned = [planned_from(1, [1], query="\udfff", tenant="\ud800")]
    (usage,) = simulate_tokens(planned, corpus, PrefixCacheSimulator(), tokenizer)
    assert usage.cached_tokens == 0
    assert usage.prompt_tokens >= 7


@pytest.mark.parametrize("content", [None, "", "{}", "no json", '{"model": 1}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputFileError) as caught:
        load_tokenizer(str(path))
    assert str(caught.value).startswith(f"{path}: not a tokenizer.json (")
    assert str(caught.value).endswith("; pass the file of a Hugging Face fast tokenizer")


def test_without_the_tokenizers_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError) as caught:
        load_tokenizer("tokenizer.json")
    assert str(caught.value) == str(MissingExtraError("--tokenizer", "tokenizers"))
