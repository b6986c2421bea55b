"""From a data set to results: what `ctxreuse bench` does between its files."""

from __future__ import annotations

from collections.abc import Iterable

from ctxreuse.evaluation.bench.trials import Matrix, Part, Tried
from ctxreuse.evaluation.replay.estimate import TraceSummary, reuse_bounds
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.policies import OURS_ONLINE
from ctxreuse.evaluation.results.results_file import Results
from ctxreuse.evaluation.results.runs import Run


def results_of(
    matrix: Matrix,
    level: str,
    tried: Iterable[Tried],
    settings: dict[str, str],
    notes: list[str],
) -> Results:
    """Return what a report shows of a benchmark.

    Args:
        matrix: What was tried.
        level: "blocks", "tokens", or "engine" for what a server reported.
        tried: What came of it.
        settings: How it was measured.
        notes: What a reader has to know; what did not go well is added.
    """
    runs: list[Run] = []
    shown: list[PlannedRequest] = []
    for one in tried:
        policy = one.trial.contender.policy
        if one.run is None:
            notes.append(f"{policy.name} left out: too many requests for it as one batch")
            continue
        runs.append(one.run)
        if one.wrong:
            notes.append(
                f"{policy.name} lost, doubled or swapped blocks of {one.wrong:,} of "
                f"{len(one.trial.trace):,} requests; these were sent as retrieved"
            )
        for reason, number in one.failures.items():
            notes.append(f"{policy.name}: {number:,} requests not answered: {reason}")
        is_ours = policy == OURS_ONLINE and one.trial.capacity_tokens is None
        if one.outcome is not None and is_ours and (one.trial.part is Part.policies or not shown):
            shown = one.outcome.planned
    if matrix.workload.has_turns:
        notes.append(
            "Later turns stand behind their conversation's history and keep the retriever's order: "
            "ordering moves first turns only, de-duplication shortens the others."
        )
    ks = matrix.ks if any(run.part == Part.k for run in runs) else ()
    return Results.of(
        matrix.workload.name,
        level,
        TraceSummary.of(matrix.trace()),
        runs,
        shown,
        matrix.workload.corpus,
        bounds=reuse_bounds(matrix.workload.in_order(), ks),
        settings=tuple(settings.items()),
        notes=tuple(dict.fromkeys(notes)),
    )
