"""Results of estimates and benchmarks: all that a report shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import ctxreuse
from ctxreuse.context.tokens import well_formed
from ctxreuse.measure.replay.explain_plan import TreeNode, block_label, explain_plan, sent_tree
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.prompt_ways import PromptWays
from ctxreuse.measure.replay.simulate import POLICIES_PART, RunResult, TraceSummary
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.table import shortened
from ctxreuse.measure.traces.trace_files import Corpus, Titles
from ctxreuse.memory.explanations import Explanation
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

Level: TypeAlias = Literal["blocks", "tokens", "engine"]  # what is counted, or by whom

_WORST = 10


@dataclass(frozen=True, slots=True)
class Miss:
    """A request of which tokens were computed again, and why; see `ctxreuse explain`."""

    request_id: str
    cause: str
    lost_tokens: int
    words: str
    question: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class FirstCause:
    """What keeps all prompts apart, in words, and what to do about it before all else."""

    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class CauseTotal:
    """How many requests had a cause, and the tokens that were computed again for it."""

    cause: str
    requests: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured."""

    title: str
    level: Level
    trace: TraceSummary
    runs: tuple[RunResult, ...]
    tree: TreeNode
    misses: tuple[Miss, ...]
    version: str
    bounds: tuple[tuple[int, float], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    cache_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    prices: Prices | None = None
    command: str = ""
    date: str = ""
    python: str = ""
    causes: tuple[CauseTotal, ...] = ()
    cache: CacheRules = DEFAULT_CACHE
    output_tokens: int | None = None
    causes_first: tuple[FirstCause, ...] = ()
    prompts: PromptWays | None = None
    keep_best: bool = False
    hides_texts: bool = False  # so that documents may change from request to request

    def part(self, name: str = POLICIES_PART) -> list[RunResult]:
        """Return the runs of a part of a benchmark."""
        return [run for run in self.runs if run.part == name]


def results_of(
    title: str,
    level: Level,
    trace: TraceSummary,
    runs: Sequence[RunResult],
    shown: Sequence[PlannedRequest] = (),
    corpus: Corpus | None = None,
    titles: Titles | None = None,
    *,
    cache: CacheRules = DEFAULT_CACHE,
    **more: Any,
) -> Results:
    """Return results, with the tree and the misses of one policy's prompts."""
    corpus, titles = corpus or {}, titles or {}
    told = explain_plan(shown, corpus, cache=cache)
    explained = sorted(told, key=lambda one: -one.lost_tokens)
    questions = {one.request_id: " ".join((one.query or "").split()) for one in shown}
    worst = [one for one in explained[:_WORST] if one.lost_tokens]
    return Results(
        title=title,
        level=level,
        trace=trace,
        runs=tuple(replace(run, planned=(), notes=()) for run in runs),  # which would be large
        tree=sent_tree(shown, corpus, titles),
        misses=tuple(_miss(one, questions, corpus, titles) for one in worst),
        version=ctxreuse.__version__,
        causes=tuple(by_cause(explained)),
        cache=cache,
        **more,
    )


def by_cause(explained: Iterable[Explanation]) -> list[CauseTotal]:
    """Return causes, the dearest first."""
    lost: dict[str, list[int]] = {}
    for one in explained:
        lost.setdefault(one.cause.value, []).append(one.lost_tokens)
    found = [CauseTotal(cause, len(tokens), sum(tokens)) for cause, tokens in lost.items()]
    return sorted(found, key=lambda one: (-one.lost_tokens, one.cause))


def _miss(
    lost: Explanation, questions: Mapping[str | int, str], corpus: Corpus, titles: Titles
) -> Miss:
    ids = (lost.block, lost.other_block)
    blocks = (None if one is None else corpus.get(one) for one in ids)
    own, other = ("" if block is None else block_label(block, titles) for block in blocks)
    place = ""
    if lost.closest is not None:
        question = questions.get(lost.closest, "") or str(lost.closest)
        closest = f"“{well_formed(shortened(question))}”"
        place = f"Begins unlike {closest}, which has most in common with it"
        if number := lost.shared_blocks:
            place = (
                f"Begins like {closest}, for {number} block{'s' if number > 1 else ''} "
                f"({lost.shared_tokens:,} tokens)"
            )
        if own and other:
            place += f"; then has “{own}” where that one has “{other}”."
        else:
            place += f"; {'that one' if own else 'it'} ends there."
    asked = well_formed(shortened(questions.get(lost.request_id, "")))
    request_id, cause = str(lost.request_id), lost.cause.value
    return Miss(request_id, cause, lost.lost_tokens, lost.words, asked, place)
