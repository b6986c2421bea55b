"""What ordering would save of a recorded trace: from its files to results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctxreuse.evaluation.progress import Progress, no_progress
from ctxreuse.evaluation.replay.estimate import (
    TraceSummary,
    deduplications,
    estimate,
    estimate_over_k,
    files_of,
    reuse_bounds,
    shown,
    usual_ks,
)
from ctxreuse.evaluation.replay.policies import POLICIES
from ctxreuse.evaluation.replay.simulate import load_tokenizer
from ctxreuse.evaluation.replay.simulated_run import Replay
from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.traces.trace_files import read_corpus, read_trace


def measure_savings(
    trace: str,
    corpus: str | None = None,
    *,
    capacities: Sequence[int] = (),
    tokenizer: str | Path | None = None,
    for_report: bool = False,
    progress: Progress = no_progress,
) -> Results:
    """Replay a trace under every policy, with an unlimited cache and smaller ones.

    Args:
        trace: A trace, or a folder that holds a recording.
        corpus: Its blocks; None is `corpus.jsonl` beside the trace.
        capacities: Tokens that the smaller caches hold; where empty, sizes that suit the trace.
        tokenizer: A `tokenizer.json`, to count whole prompts; None counts blocks by their tokens.
        for_report: Whether to measure what only a report shows, too: several numbers of blocks a
            request, and which requests lost most.
        progress: Is told how far it is.

    Raises:
        InputFileError: A file is missing or broken.
        MissingExtraError: `tokenizer` is given, and `tokenizers` is not installed.
    """
    trace_path, corpus_path = files_of(trace, corpus)
    blocks = read_corpus(corpus_path)
    requests = read_trace(trace_path, blocks)
    summary = TraceSummary.of(requests)
    encoder = None if tokenizer is None else load_tokenizer(str(tokenizer))
    sizes = [None, *capacities] if capacities else summary.cache_sizes()
    ks = usual_ks(requests) if for_report else []
    rounds = len(POLICIES) * (len(deduplications(requests)) * len(sizes) + len(ks))
    with progress("replaying", 2 * rounds * len(requests)) as advance:
        replay = Replay(requests, blocks, encoder, advance)
        runs = list(estimate(replay, sizes))
        over_k = [run for _, run in estimate_over_k(replay, ks)]
    return Results.of(
        Path(trace).name,
        "blocks" if tokenizer is None else "tokens",
        summary,
        [*runs, *over_k],
        shown(runs).planned if for_report else (),
        blocks,
        bounds=reuse_bounds(requests, ks),
    )
