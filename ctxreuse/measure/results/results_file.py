"""Results of estimates and benchmarks: all that a report shows, in one JSON file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import ctxreuse
from ctxreuse.context.blocks import BlockId
from ctxreuse.context.cache_profile import VLLM, CacheProfile, cache_profile
from ctxreuse.context.checks import (
    check_function,
    checked_each,
    checked_integer,
    checked_kind,
    checked_list,
    checked_positive,
)
from ctxreuse.context.files import write_text
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InvalidRequestError
from ctxreuse.index.explain import Explanation
from ctxreuse.measure.replay.estimate import (
    KS,
    TraceSummary,
    deduplications,
    estimate,
    estimate_over_k,
    reuse_bounds,
    shown,
)
from ctxreuse.measure.replay.explain_plan import (
    TreeNode,
    block_label,
    explain_plan,
    sent_tree,
    shortened,
)
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.policies import POLICIES, hosted_policies, keeping_best
from ctxreuse.measure.replay.prompts import checked_plans
from ctxreuse.measure.replay.run_result import Part, RunResult
from ctxreuse.measure.replay.simulate import (
    Progress,
    Replay,
    load_tokenizer,
    no_progress,
)
from ctxreuse.measure.replay.workers import estimate_workers, worker_policies
from ctxreuse.measure.results import stored_results as read
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.traces.recording_folder import corpus_path, read_recording
from ctxreuse.measure.traces.trace_files import Corpus, Titles, TraceRequest, read_titles
from ctxreuse.measure.traces.varying_fronts import behind_fronts, fronts_that_differ
from ctxreuse.serving.emulation.rates import COMMON_RATES

_WORST = 10
_BEST_FIRST = (
    "ctxreuse keeps the retriever's best block in front here: ReusePlanner(keep_best=True)."
)
_NO_RUN = RunResult("", "", "", False, None, 0.0, (), ())


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

    def write_csv(self, path: str | Path) -> None:
        """Write one line a run."""
        table = io.StringIO()
        writer = csv.DictWriter(table, [name for name, _ in _columns(_NO_RUN)])
        writer.writeheader()
        writer.writerows(dict(_columns(run)) for run in self.runs)
        write_text(path, well_formed(table.getvalue()))

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


def _columns(run: RunResult) -> Iterator[tuple[str, object]]:
    """Yield the columns of a line of CSV, with a run's values."""
    for name in ("part", "policy", "deduplicated", "capacity_tokens", "k", "sessions"):
        yield name, getattr(run, name)
    yield "requests", len(run.prompt_tokens)
    for name in ("prompt_tokens", "cached_tokens", "prefilled_tokens"):
        yield name, getattr(run.total, name)
    yield "hit_ratio", round(run.total.hit_ratio, 6)
    yield "planning_ms", run.planning_ms
    for share in (50, 95):
        seconds = round(run.first_token_percentile_s(share), 6) if run.first_token_s else None
        yield f"first_token_p{share}_s", seconds
    yield "scored", len(run.scores)
    yield "f1", round(run.mean_f1, 6) if run.scores else None
    yield "exact_match", round(run.mean_exact_match, 6) if run.scores else None
    yield "failures", run.failures


def measure_savings(
    trace: str,
    corpus: str | None = None,
    *,
    capacities: Sequence[int] = (),
    tokenizer: str | Path | None = None,
    workers: int | None = None,
    prefill_rate: float | None = None,
    prices: Prices | None = None,
    cache: str | CacheProfile = VLLM,
    independent: bool = False,
    keep_best: bool = False,
    for_report: bool = False,
    progress: Progress = no_progress,
) -> Results:
    """Replay a trace under every policy, with an unlimited cache and smaller ones."""
    check_function("progress", progress, "a function")
    profile = cache_profile(cache)
    smaller = checked_list("capacities", capacities, "a list of tokens")
    number = None if workers is None else checked_integer("workers", workers, 2)
    rate = COMMON_RATES.prefill_tokens_per_s
    if prefill_rate is not None:
        rate = checked_positive("prefill_rate", prefill_rate)
    if profile.is_hosted and (smaller or number or prefill_rate is not None):
        raise InvalidRequestError(
            f"capacities, workers and prefill_rate are an engine's, and {profile.name!r} is a "
            "provider's cache; leave them out"
        )
    blocks, requests = read_recording(trace, corpus)
    if independent:
        requests = [replace(one, conversation_id=None, turn=0) for one in requests]
    different = fronts_that_differ(requests)
    if different is None:  # else it is said what comes of it once they are mended
        requests = behind_fronts(requests)
    summary = TraceSummary.of(requests)
    encoder = None if tokenizer is None else load_tokenizer(str(tokenizer))
    sizes = [None, *smaller] if smaller or profile.is_hosted else summary.cache_sizes()
    tried = hosted_policies(profile) if profile.is_hosted else POLICIES
    if keep_best:
        tried = keeping_best(tried)
    most = max((len(one.blocks) for one in requests), default=0)
    ks = [*(k for k in KS if k < most), *([most] if most else [])] if for_report else []
    policies = len(tried) if number is None else len(tried) + len(worker_policies(number))
    rounds = policies * len(deduplications(requests)) * len(sizes) + len(tried) * len(ks)
    with progress("replaying", 2 * rounds * len(requests)) as advance:
        replay = Replay(requests, blocks, encoder, advance, profile)
        runs = list(estimate(replay, sizes, tried))
        of_workers = (
            []
            if number is None
            else list(estimate_workers(replay, sizes, number, keep_best=keep_best))
        )
        over_k = [run for _, run in estimate_over_k(replay, ks, tried)]
    return Results.of(
        Path(trace).name,
        "blocks" if tokenizer is None else "tokens",
        summary,
        [*runs, *of_workers, *over_k],
        shown(runs).planned if for_report else (),
        blocks,
        read_titles(corpus or corpus_path(trace)) if for_report else None,
        bounds=reuse_bounds(requests, ks),
        notes=(
            *((_BEST_FIRST,) if keep_best else ()),
            *_front_notes(requests),
            *(_bill_notes(requests) if profile.is_hosted else ()),
        ),
        cache_tokens=next(iter(smaller), None),
        prefill_tokens_per_s=None if profile.is_hosted else rate,
        prices=prices,
        cache=profile,
        output_tokens=_output_tokens(requests),
        different_fronts=different,
        outside_runs=sum(one.in_run is False for one in requests),
        keep_best=keep_best,
    )


def _front_notes(trace: Sequence[TraceRequest]) -> Iterator[str]:
    """Yield what to do where prompts begin in several ways before their documents."""
    fronts = len({one.front for one in trace if one.front is not None})
    if fronts > 1:
        yield (
            f"The prompts begin in {fronts:,} ways before their documents and share nothing across "
            "these: put what differs behind the documents, {context} before {question}."
        )


def _output_tokens(trace: Sequence[TraceRequest]) -> int | None:
    """Return the tokens of all answers; None if the trace does not say all."""
    told = [one.output_tokens for one in trace if one.output_tokens is not None]
    return sum(told) if told and len(told) == len(trace) else None


def _bill_notes(trace: Sequence[TraceRequest]) -> Iterator[str]:
    """Yield what a reader of a bill has to know of a trace."""
    timed = sum(one.timestamp_ms is not None for one in trace)
    if not timed:
        yield "No request has a timestamp, so nothing expires."
    elif timed < len(trace):
        yield (
            f"{len(trace) - timed:,} of {len(trace):,} requests have no timestamp: they count as "
            "sent with the one before."
        )
    told = sum(one.output_tokens is not None for one in trace)
    if told < len(trace):
        which = f"only {told:,} of {len(trace):,} requests say" if told else "no request says"
        yield f"Answers are left out: {which} how long its answer is (output_tokens)."
