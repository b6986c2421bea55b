"""Trials through a simulated prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ctxreuse.errors import BatchTooLargeError
from ctxreuse.evaluation.bench.trials import Trial, Tried
from ctxreuse.evaluation.replay.outcomes import Replay
from ctxreuse.evaluation.replay.simulate import Tokenizer
from ctxreuse.evaluation.results.runs import Run
from ctxreuse.evaluation.traces.trace_files import Corpus


def simulate(
    trials: Sequence[Trial],
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    advance: Callable[[], object],
) -> Iterator[Tried]:
    """Yield what comes of each trial with a cache that is empty at first.

    Args:
        trials: What is tried.
        corpus: The blocks.
        tokenizer: Counts whole prompts; None counts blocks by their tokens.
        advance: Called twice a request and trial.
    """
    for trial in trials:
        trace, planning_ms, wrong = trial.trace, None, 0
        if trial.contender.arrange is not None:
            arranged = trial.contender.arrange(trace, trial.deduplicate)
            trace, planning_ms, wrong = arranged.trace, arranged.planning_ms, arranged.wrong
        replay = Replay(trace, corpus, tokenizer, advance)
        try:
            outcome = replay.run(
                trial.contender.policy,
                deduplicate=trial.deduplicate,
                capacity_tokens=trial.capacity_tokens,
            )
        except BatchTooLargeError:
            yield Tried(trial, None)
            continue
        if planning_ms is not None:
            outcome = replace(outcome, planning_ms=planning_ms)
        run = Run.of(outcome, part=trial.part.value, k=trial.k, sessions=trial.sessions)
        yield Tried(trial, run, outcome, wrong)
