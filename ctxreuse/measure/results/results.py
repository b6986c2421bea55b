"""Results of estimates and benchmarks: all that a report shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import ctxreuse
from ctxreuse.context.blocks import BlockId
from ctxreuse.context.tokens import well_formed
from ctxreuse.measure.replay.estimate import TraceSummary
from ctxreuse.measure.replay.explain_plan import (
    TreeNode,
    block_label,
    explain_plan,
    sent_tree,
)
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.prompt_ways import PromptWays
from ctxreuse.measure.replay.run_result import POLICIES_PART, RunResult
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.table import shortened
from ctxreuse.measure.traces.trace_files import Corpus, Titles
from ctxreuse.memory.explanations import Explanation
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

Level: TypeAlias = Literal["blocks", "tokens", "engine"]
"""What is counted, or by whom."""

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
    named = _Names(questions, corpus, titles)
    return Results(
        title=title,
        level=level,
        trace=trace,
        runs=tuple(run.without_plans() for run in runs),
        tree=sent_tree(shown, corpus, titles),
        misses=tuple(map(named.miss, (one for one in explained[:_WORST] if one.lost_tokens))),
        version=ctxreuse.__version__,
        causes=tuple(
            CauseTotal(cause, len(lost), sum(lost)) for (cause, _), lost in by_cause(explained)
        ),
        cache=cache,
        **more,
    )


def by_cause(
    explained: Iterable[Explanation], *, with_reason: bool = False
) -> list[tuple[tuple[str, str], list[int]]]:
    """Return causes, maybe with reasons, the dearest first, with what each request lost."""
    lost: dict[tuple[str, str], list[int]] = {}
    for one in explained:
        key = one.cause.value, one.reason or "-" if with_reason else ""
        lost.setdefault(key, []).append(one.lost_tokens)
    return sorted(lost.items(), key=lambda row: (-sum(row[1]), row[0]))


class _Names(NamedTuple):
    """What people know requests and blocks by."""

    questions: Mapping[str | int, str]
    corpus: Corpus
    titles: Titles

    def miss(self, explanation: Explanation) -> Miss:
        """Return a request that lost something, named as people know it."""
        return Miss(
            str(explanation.request_id),
            explanation.cause.value,
            explanation.lost_tokens,
            explanation.words,
            well_formed(shortened(self.questions.get(explanation.request_id, ""))),
            self._place(explanation),
        )

    def _place(self, explanation: Explanation) -> str:
        if explanation.closest is None:
            return ""
        question = self.questions.get(explanation.closest, "") or str(explanation.closest)
        closest = f"“{well_formed(shortened(question))}”"
        begins = f"Begins unlike {closest}, which has most in common with it"
        if explanation.shared_blocks:
            number = explanation.shared_blocks
            begins = (
                f"Begins like {closest}, for {number} block{'s' if number > 1 else ''} "
                f"({explanation.shared_tokens:,} tokens)"
            )
        own, other = map(self._label, (explanation.block, explanation.other_block))
        if not own or not other:
            return f"{begins}; {'it' if not own else 'that one'} ends there."
        return f"{begins}; then has “{own}” where that one has “{other}”."

    def _label(self, block_id: BlockId | None) -> str:
        block = None if block_id is None else self.corpus.get(block_id)
        return "" if block is None else block_label(block, self.titles)
