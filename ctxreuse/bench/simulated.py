"""Trials through a simulated prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ctxreuse.bench.trials import Trial
from ctxreuse.errors import BatchTooLargeError
from ctxreuse.evaluation.outcomes import Outcome, Replay
from ctxreuse.evaluation.runs import Run
from ctxreuse.evaluation.simulate import Tokenizer
from ctxreuse.evaluation.traces import Corpus


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial and what came of it.

    Attributes:
        trial: What was tried.
        run: What came of it; None if the policy cannot hold the trace as one batch.
        outcome: What was sent and found; None if nothing was simulated.
        wrong: Requests for which a contender returned other blocks than it was given.
        failures: Why an engine did not answer requests, and how many each time.
    """

    trial: Trial
    run: Run | None
    outcome: Outcome | None = None
    wrong: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)


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
