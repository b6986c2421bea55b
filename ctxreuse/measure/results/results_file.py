"""Results of estimates and benchmarks: all that a report shows, in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import ctxreuse
from ctxreuse.context.blocks import BlockId
from ctxreuse.context.cache_profile import VLLM, CacheProfile
from ctxreuse.context.checks import (
    checked_each,
    checked_kind,
)
from ctxreuse.context.files import write_text
from ctxreuse.context.tokens import well_formed
from ctxreuse.index.explain import Explanation
from ctxreuse.measure.replay.estimate import (
    TraceSummary,
)
from ctxreuse.measure.replay.explain_plan import (
    TreeNode,
    block_label,
    explain_plan,
    sent_tree,
    shortened,
)
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.prompts import checked_plans
from ctxreuse.measure.replay.run_result import Part, RunResult
from ctxreuse.measure.results import stored_results as read
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.traces.trace_files import Corpus, Titles

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
class CauseTotal:
    """How many requests had a cause, and the tokens that were computed again for it."""

    cause: str
    requests: int
    lost_tokens: int


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured."""

    title: str
    level: str
    trace: TraceSummary
    runs: tuple[RunResult, ...]
    tree: TreeNode
    misses: tuple[Miss, ...]
    bounds: tuple[tuple[int, float], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    version: str = ctxreuse.__version__
    cache_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    prices: Prices | None = None
    command: str = ""
    date: str = ""
    python: str = ""
    causes: tuple[CauseTotal, ...] = ()
    cache: CacheProfile = VLLM
    output_tokens: int | None = None
    different_fronts: int | None = None
    outside_runs: int = 0
    keep_best: bool = False

    @classmethod
    def of(
        cls,
        title: str,
        level: str,
        trace: TraceSummary,
        runs: Sequence[RunResult],
        shown: Sequence[PlannedRequest],
        corpus: Corpus,
        titles: Titles | None = None,
        *,
        cache: CacheProfile = VLLM,
        **more: Any,
    ) -> Self:
        """Return results, with the tree and the misses of one policy's prompts."""
        checked_kind("trace", trace, TraceSummary, "a TraceSummary")
        measured = checked_each("runs", runs, RunResult, "a RunResult")
        plans = checked_plans(shown, corpus)
        explained = [one.explanation for one in explain_plan(plans, corpus, cache=cache)]
        explained.sort(key=lambda one: -one.lost_tokens)
        named = _Names.of(plans, corpus, titles or {})
        return cls(
            title=title,
            level=level,
            trace=trace,
            runs=tuple(run.without_plans() for run in measured),
            tree=sent_tree(plans, corpus, titles),
            misses=tuple(map(named.miss, (one for one in explained[:_WORST] if one.lost_tokens))),
            causes=_cause_totals(explained),
            cache=cache,
            **more,
        )

    def part(self, name: str = Part.policies) -> list[RunResult]:
        """Return the runs of a part of a benchmark."""
        return [run for run in self.runs if run.part == name]

    def write(self, path: str | Path) -> None:
        """Write them as JSON."""
        values = asdict(replace(self, runs=(), prices=None))
        values["runs"] = [run.as_json() for run in self.runs]
        values["prices"] = None if self.prices is None else self.prices.as_json()
        if not self.cache.is_hosted:
            del values["cache"], values["output_tokens"]
        if not self.keep_best:
            del values["keep_best"]
        write_text(path, json.dumps({"format": read.FORMAT, **values}) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file of `write`."""
        stored = read.read_stored(path)
        cache = stored.get("cache", read.cache) if "cache" in stored.fields else VLLM
        return cls(
            title=stored.get("title", read.text),
            level=stored.get("level", read.one_of("blocks", "tokens", "engine")),
            trace=stored.get("trace", read.summary),
            runs=stored.get("runs", read.each(partial(read.run_result, cache=cache))),
            tree=stored.get("tree", read.tree),
            misses=stored.get("misses", read.each(_miss)),
            bounds=stored.get("bounds", read.each(read.row(read.integer, read.share))),
            settings=stored.get("settings", read.each(read.row(read.text, read.text))),
            notes=stored.get("notes", read.each(read.text)),
            version=stored.get("version", read.text),
            cache_tokens=stored.get("cache_tokens", read.optional(read.integer), None),
            prefill_tokens_per_s=stored.get(
                "prefill_tokens_per_s", read.optional(read.positive), None
            ),
            prices=stored.get(
                "prices", read.optional(lambda place, value: Prices.of(place, value, cache)), None
            ),
            command=stored.get("command", read.text, ""),
            date=stored.get("date", read.text, ""),
            python=stored.get("python", read.text, ""),
            causes=stored.get("causes", read.each(_cause_total), []),
            cache=cache,
            output_tokens=stored.get("output_tokens", read.optional(read.integer), None),
            different_fronts=stored.get("different_fronts", read.optional(read.integer), None),
            outside_runs=stored.get("outside_runs", read.integer, 0),
            keep_best=stored.get("keep_best", read.boolean, False),
        )


def _miss(place: str, value: Any) -> Miss:
    stored = read.stored_object(place, value)
    return Miss(
        request_id=stored.get("request_id", read.text),
        cause=stored.get("cause", read.text),
        lost_tokens=stored.get("lost_tokens", read.integer),
        words=stored.get("words", read.text),
        question=stored.get("question", read.text, ""),
        place=stored.get("place", read.text, ""),
    )


def _cause_total(place: str, value: Any) -> CauseTotal:
    stored = read.stored_object(place, value)
    return CauseTotal(
        cause=stored.get("cause", read.text),
        requests=stored.get("requests", read.integer),
        lost_tokens=stored.get("lost_tokens", read.integer),
    )


def _cause_totals(explained: Sequence[Explanation]) -> tuple[CauseTotal, ...]:
    by_cause: dict[str, list[int]] = {}
    for one in explained:
        by_cause.setdefault(one.cause.value, []).append(one.lost_tokens)
    totals = [CauseTotal(cause, len(lost), sum(lost)) for cause, lost in by_cause.items()]
    return tuple(sorted(totals, key=lambda one: (-one.lost_tokens, one.cause)))


@dataclass(frozen=True, slots=True)
class _Names:
    """What people know requests and blocks by."""

    questions: Mapping[str | int, str]
    corpus: Corpus
    titles: Titles

    @classmethod
    def of(cls, planned: Sequence[PlannedRequest], corpus: Corpus, titles: Titles) -> Self:
        questions = {one.request_id: " ".join((one.query or "").split()) for one in planned}
        return cls(questions, corpus, titles)

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
