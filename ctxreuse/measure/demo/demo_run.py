"""`ctxreuse demo`: the same questions in every order, through the prefix-cache simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from shlex import quote

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.files import make_folder
from ctxreuse.measure.demo.corpus import QUESTIONS, python_reference_blocks, retrieve
from ctxreuse.measure.replay.estimate import TraceSummary, estimate
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.policies import AS_SENT, OURS_ONLINE, tried_policies
from ctxreuse.measure.replay.run_result import RunResult
from ctxreuse.measure.replay.simulate import Progress, Replay, no_progress
from ctxreuse.measure.report.charts import charts
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results import results_of
from ctxreuse.measure.results.tables import estimate_output
from ctxreuse.measure.table import Good, Shown, Table
from ctxreuse.measure.traces.trace_files import Corpus, TraceRequest
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules, profile_spec
from ctxreuse.serving.emulation.batching_engine import COMMON_RATES
from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer

BLOCKS_PER_QUESTION = 10
SMALL_CACHE_TOKENS = 20_000
SYSTEM = "You answer questions about the Python language from the documents given."

_NEXT_STEP = (
    "see what your own program would save: `ctxreuse record -o recording app.py`, then "
    "`ctxreuse estimate recording{}`."
)


def run_demo(
    output: Path,
    progress: Progress = no_progress,
    prices: Prices | None = None,
    cache: CacheRules = DEFAULT_CACHE,
) -> Iterator[Shown]:
    """Run the demo, and write `computed_tokens.png`; of a bill there is none."""
    make_folder(output)
    with progress("retrieving", 1):
        corpus, trace = _retrieve_all()
    tried = tried_policies(cache)
    sizes = [None] if cache.lives else [None, SMALL_CACHE_TOKENS]
    steps = 4 * len(tried) * len(sizes) * len(trace)
    with progress("planning and replaying", steps) as advance:
        replay = Replay(trace, corpus, WordTokenizer(), advance, cache)
        runs = list(estimate(replay, sizes, tried))
    results = results_of(
        "demo",
        "tokens",
        TraceSummary.of(trace),
        runs,
        prefill_tokens_per_s=None if cache.lives else COMMON_RATES.prefill_tokens_per_s,
        prices=prices,
        cache=cache,
    )
    asked = f" --cache {quote(profile_spec(cache))}" if cache.lives else ""
    yield from estimate_output(results, _NEXT_STEP.format(asked))
    if not cache.lives:
        yield (
            "tokens to compute: of whole prompts (system text, documents, questions, history)\n"
            "hit ratio: prompt tokens served from the cache / prompt tokens"
        )
    yield from _example(corpus, runs)
    if cache.lives:
        return
    plot = output / "computed_tokens.png"
    charts(results)[0].write(plot)
    yield f"\nplot: {plot}"


def _retrieve_all() -> tuple[Corpus, list[TraceRequest]]:
    tokenizer = WordTokenizer()
    blocks = [
        ContextBlock(id=block.id, text=block.text, tokens=len(tokenizer.encode(block.text).ids))
        for block in python_reference_blocks()
    ]
    texts, queries = ([one.text for one in some] for some in (blocks, QUESTIONS))
    found = retrieve(texts, queries, BLOCKS_PER_QUESTION)
    trace = [
        TraceRequest(
            request_id=f"question-{number}",
            query=question.text,
            blocks=tuple(blocks[position] for position in positions),
            conversation_id=question.conversation,
            turn=question.turn,
            system=SYSTEM,
        )
        for number, (question, positions) in enumerate(zip(QUESTIONS, found, strict=True), start=1)
    ]
    return {block.id: block for block in blocks}, trace


def _example(corpus: Corpus, runs: Sequence[RunResult]) -> Iterator[Shown]:
    """Yield one request as retrieved and as planned online: the one that gains most."""
    retrieved, planned = (
        next(run for run in runs if run.policy == policy.name) for policy in (AS_SENT, OURS_ONLINE)
    )
    gains = [
        ours - theirs if plan.order_annotation else -1
        for theirs, ours, plan in zip(
            retrieved.cached_tokens, planned.cached_tokens, planned.planned, strict=True
        )
    ]
    position = gains.index(max(gains))
    before, after = retrieved.planned[position], planned.planned[position]
    yield f"\nOne request before and after: “{after.query}”\n"
    cached_before, cached_after = (_cached_blocks(plan, corpus) for plan in (before, after))
    yield Table(
        "",
        tuple(
            f"{run.policy}\n{run.cached_tokens[position]:,} of "
            f"{run.prompt_tokens[position]:,} tokens cached"
            for run in (retrieved, planned)
        ),
        tuple(
            (
                _marked(f"{old}", rank < cached_before),
                _marked(f"{new}  (was {before.blocks.index(new) + 1})", rank < cached_after),
            )
            for rank, (old, new) in enumerate(zip(before.blocks, after.blocks, strict=True))
        ),
        is_text=True,
    )
    yield f"● served from the prefix cache\nannotation: {after.order_annotation}"


def _cached_blocks(plan: PlannedRequest, corpus: Corpus) -> int:
    """Return how many of the first blocks an earlier prompt had in front in the same order."""
    tokens = accumulate(corpus[block_id].tokens or 0 for block_id in plan.blocks)
    return sum(total <= (plan.expected_cached_tokens or 0) for total in tokens)


def _marked(text: str, cached: bool) -> str:
    return Good(f"● {text}") if cached else f"○ {text}"
