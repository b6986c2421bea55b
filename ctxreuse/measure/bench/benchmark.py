"""A benchmark, from its options to its runs and their results."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import ctxreuse
from ctxreuse.context.cache_profile import VLLM, CacheProfile, profile_spec
from ctxreuse.context.checks import checked_positive
from ctxreuse.errors import BatchTooLargeError, InvalidRequestError, describe
from ctxreuse.measure.bench.baselines import (
    PublishedContextPilot,
    framework_policies,
)
from ctxreuse.measure.bench.kept_runs import KeptRuns
from ctxreuse.measure.bench.live_engine import LiveEngine
from ctxreuse.measure.bench.workload import (
    USUAL_SESSIONS,
    Workload,
    make_workload,
    retrieve,
    sample,
)
from ctxreuse.measure.datasets import load
from ctxreuse.measure.replay.estimate import KS, TraceSummary, cut, deduplications, reuse_bounds
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.plan_trace import plan_under
from ctxreuse.measure.replay.policies import (
    AS_SENT,
    OURS_BATCH,
    OURS_ONLINE,
    PAPERS_BATCH,
    POLICIES,
    TODAY,
    Policy,
)
from ctxreuse.measure.replay.run_result import Part, Run, RunResult
from ctxreuse.measure.replay.simulate import (
    Progress,
    Replay,
    Tokenizer,
    load_tokenizer,
    no_progress,
)
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results_file import Results
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.serving.emulation.rates import COMMON_RATES
from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer

WORDS, BLOCKS = "words", "blocks"
"""Ways to count without a tokenizer's file."""

_Measure: TypeAlias = Callable[[Sequence[Run]], Iterable[RunResult | BatchTooLargeError]]


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What a benchmark measures, and how."""

    dataset: str
    data: Path
    retriever: str = "bm25"
    k: int = 15
    requests: int = 1_000
    independent: bool = False
    in_order: bool = False
    parts: Sequence[Part] = ()
    policies: Sequence[str] = ()
    ks: Sequence[int] = ()
    sessions: Sequence[int] = ()
    capacities: Sequence[int] = ()
    tokenizer: str = WORDS
    chunk_tokens: int = 512
    contextpilot_python: str | None = None
    base_url: str | None = field(default=None, repr=False)
    model: str | None = None
    api_key: str = field(default="EMPTY", repr=False)
    answer_tokens: int = 32
    seed: int = 0
    prefill_rate: float | None = None
    prices: Prices | None = None
    cache: CacheProfile = VLLM

    @property
    def level(self) -> str:
        """What is counted: "engine", "blocks" or "tokens"."""
        if self.base_url is not None:
            return "engine"
        return "blocks" if self.tokenizer == BLOCKS else "tokens"

    @property
    def random_seed(self) -> int | None:
        """The seed; None where nothing is random."""
        return None if self.in_order else self.seed

    @property
    def ks_to_try(self) -> list[int]:
        """Blocks a request that part k tries, in order."""
        return sorted(set(self.ks or [*(k for k in KS if k < self.k), self.k]))


def run(
    config: BenchConfig,
    progress: Progress = no_progress,
    kept: Path | None = None,
    announce: Callable[[str], object] = lambda words: None,
    clock: Callable[[], float] = time.monotonic,
) -> Results:
    """Measure policies side by side on a data set."""
    if config.cache.is_hosted and (
        config.capacities or config.base_url is not None or config.prefill_rate is not None
    ):
        raise InvalidRequestError(
            "capacities, base_url and prefill_rate are an engine's, and "
            f"{config.cache.name!r} is a provider's cache; leave them out"
        )
    tokenizer = _tokenizer(config.tokenizer)
    notes: list[str] = []
    policies = _policies(config, notes)
    workload = read_workload(config, progress)
    notes += workload.notes
    summary = TraceSummary.of(cut(workload.in_order(), config.k))
    sizes = config.capacities or summary.cache_sizes()[1:]
    matrix = RunMatrix(
        workload,
        policies,
        [None]
        if config.cache.is_hosted or config.base_url is not None
        else [None, *dict.fromkeys(sizes)],
        config.k,
        config.ks_to_try,
        sorted(set(config.sessions or SESSIONS)),
        config.random_seed,
    )
    runs = matrix.runs(list(dict.fromkeys(config.parts or Part)))
    if Part.sessions in config.parts and not workload.has_turns:
        notes.append("sessions: left out, for no question is a turn of a conversation")
    store = None if kept is None else KeptRuns(kept, _identity(config, workload))
    requests = sum(len(one.trace) for one in runs)
    announce(f"{len(runs):,} runs, {requests:,} requests in all")
    if store:
        announce(f"{len(store):,} of them are kept in {kept}")
    with (
        progress("measuring", 2 * requests) as advance,
        _measuring(config, workload, tokenizer, advance) as measure,
    ):
        forecast = _Forecast(requests, announce, clock)
        results, planned = _measured(runs, measure, notes, store, advance, forecast, config)
    if workload.has_turns:
        notes.append(
            "Later turns stand behind their conversation's history and keep the retriever's order: "
            "ordering moves first turns only, de-duplication shortens the others."
        )
    ks = matrix.ks if any(result.part == Part.k for result in results) else ()
    return Results.of(
        workload.name,
        config.level,
        TraceSummary.of(matrix.trace()),
        results,
        planned,
        workload.corpus,
        bounds=reuse_bounds(workload.in_order(), ks),
        settings=tuple(_settings(config, workload, summary)),
        notes=tuple(dict.fromkeys(notes)),
        cache_tokens=next(iter(config.capacities), None),
        prefill_tokens_per_s=_prefill_rate(config),
        prices=config.prices,
        cache=config.cache,
    )


def _prefill_rate(config: BenchConfig) -> float | None:
    if config.cache.is_hosted:
        return None
    if config.prefill_rate is not None:
        return checked_positive("prefill_rate", config.prefill_rate)
    return COMMON_RATES.prefill_tokens_per_s if config.base_url is None else None


def read_workload(config: BenchConfig, progress: Progress = no_progress) -> Workload:
    """Return the questions of a benchmark, with the blocks found for each."""
    with progress("reading", 1):
        dataset = load(config.dataset, config.data, chunk_tokens=config.chunk_tokens)
        if config.independent:
            alone = (replace(one, conversation_id=None, turn=0) for one in dataset.questions)
            dataset = replace(dataset, questions=tuple(alone))
        dataset = sample(dataset, config.requests, config.random_seed)
    with progress("retrieving", len(dataset.questions)) as advance:
        found = retrieve(dataset, config.retriever, max(config.k, *config.ks_to_try), advance)
    name = config.data.resolve().name if config.dataset == "jsonl" else config.dataset
    title = f"{name}, {config.retriever}, k={config.k}"
    return replace(make_workload(title, dataset.questions, found), notes=dataset.notes)


def _policies(config: BenchConfig, notes: list[str]) -> Sequence[Policy]:
    policies = [*POLICIES[:1], *framework_policies(notes), *POLICIES[1:]]
    if config.contextpilot_python is not None:
        policies += PublishedContextPilot(config.contextpilot_python).policies()
    known = [policy.name for policy in policies]
    for name in config.policies:
        if name not in known:
            raise InvalidRequestError(
                f"there is no policy {describe(name)}; there are: {'; '.join(known)}"
            )
    compared = [one for one in policies if one.name in (known[0], *(config.policies or known))]
    return [TODAY, *compared] if config.cache.has_marks else compared


def _tokenizer(name: str) -> Tokenizer | None:
    """Return what counts whole prompts; None counts blocks."""
    if name == BLOCKS:
        return None
    if name == WORDS:
        return WordTokenizer()
    tokenizer: Tokenizer = load_tokenizer(name)
    return tokenizer


@contextmanager
def _measuring(
    config: BenchConfig,
    workload: Workload,
    tokenizer: Tokenizer | None,
    advance: Callable[[], object],
) -> Iterator[_Measure]:
    """Yield what measures runs that are compared, calling `advance` twice a request."""
    if config.base_url is None:
        replay = Replay((), workload.corpus, tokenizer, advance, config.cache)
        yield lambda runs: map(partial(_simulated, replay), runs)
        return
    references = workload.references if config.answer_tokens > 1 else {}
    with LiveEngine(
        config.base_url, config.model, config.api_key, config.answer_tokens, references, advance
    ) as engine:
        yield engine.measure


def _simulated(replay: Replay, run: Run) -> RunResult | BatchTooLargeError:
    try:
        return replay.measure(run)
    except BatchTooLargeError as error:
        return error


def _identity(config: BenchConfig, workload: Workload) -> dict[str, object]:
    """Return what must be the same for a run to come to the same."""
    names = (
        *("dataset", "data", "retriever", "k", "requests", "independent", "in_order", "tokenizer"),
        *("chunk_tokens", "contextpilot_python", "base_url", "model", "answer_tokens", "seed"),
    )
    digest = hashlib.blake2b(digest_size=16)
    for request in workload.in_order():
        digest.update(repr((request.request_id, request.query)).encode())
        digest.update(b"".join(block.key for block in request.blocks))
    fields = {name: str(getattr(config, name)) for name in names}
    fields |= {"cache": repr(config.cache), "version": ctxreuse.__version__}
    return {**fields, "requests_sent": digest.hexdigest()}


_WORTH_SAYING_S = 10.0


class _Forecast:
    """Says once how long a benchmark will take, after some of it."""

    def __init__(
        self, requests: int, announce: Callable[[str], object], clock: Callable[[], float]
    ) -> None:
        self._left = requests
        self._announce = announce
        self._clock = clock
        self._begun = clock()
        self._measured = 0
        self._is_said = False

    def count(self, requests: int, *, is_measured: bool = True) -> None:
        """Count requests that are done."""
        self._left -= requests
        self._measured += requests * is_measured
        if self._is_said or not self._measured or not is_measured:
            return
        self._is_said = True
        seconds = (self._clock() - self._begun) / self._measured * self._left
        if seconds >= _WORTH_SAYING_S:
            minutes = f", {seconds / 60:,.0f} minutes" if seconds >= 90 else ""
            self._announce(f"this will take about {seconds:,.0f} s{minutes}; Ctrl-C stops it")


def _measured(
    runs: Sequence[Run],
    measure: _Measure,
    notes: list[str],
    kept: KeptRuns | None,
    advance: Callable[[], object],
    forecast: _Forecast,
    config: BenchConfig,
) -> tuple[list[RunResult], Sequence[PlannedRequest]]:
    """Return the runs' results, and what this package's online order sent; add to `notes`."""
    results: list[RunResult] = []
    planned: Sequence[PlannedRequest] = ()
    for _, compared in groupby(runs, attrgetter("part", "k", "sessions")):
        together = list(compared)
        for one, result in _known_or_measured(
            together, measure, kept, advance, forecast, config.base_url is not None
        ):
            if isinstance(result, BatchTooLargeError):
                notes.append(f"{one.policy.name} left out: too many requests for it as one batch")
                continue
            notes += result.notes
            is_ours = one.policy == OURS_ONLINE and one.capacity_tokens is None
            if is_ours and (one.part is Part.policies or not planned):
                planned = result.planned or _planned_again(one, config.cache)
            results.append(result.without_plans())
    return results, planned


def _known_or_measured(
    together: Sequence[Run],
    measure: _Measure,
    kept: KeptRuns | None,
    advance: Callable[[], object],
    forecast: _Forecast,
    is_engine: bool,
) -> Iterator[tuple[Run, RunResult | BatchTooLargeError]]:
    """Yield runs that are compared with what they have come to, and keep that."""
    known = [None if kept is None else kept.get(one) for one in together]
    if is_engine and None in known:  # it is asked all of them in turn
        known = [None] * len(together)
    missing = [one for one, result in zip(together, known, strict=True) if result is None]
    measured = iter(measure(missing) if missing else ())
    for one, result in zip(together, known, strict=True):
        if result is not None:
            for _ in range(2 * len(one.trace)):
                advance()
            forecast.count(len(one.trace), is_measured=False)
            yield one, result
            continue
        new = next(measured)
        if kept is not None:
            kept.put(one, new)
        forecast.count(len(one.trace))
        yield one, new


def _planned_again(run: Run, cache: CacheProfile) -> Sequence[PlannedRequest]:
    """Return the plans of a run whose result was kept, which no file holds."""
    planner = run.planner(cache)
    return plan_under(run.policy, run.reordered().requests, planner, conversations=True)


def _settings(
    config: BenchConfig, workload: Workload, summary: TraceSummary
) -> Iterator[tuple[str, str]]:
    yield "retriever", config.retriever
    yield "seed", str(config.seed)
    yield "arrival", "as in the files" if config.in_order else "by chance"
    yield "requests", str(summary.requests)
    if config.cache != VLLM:
        yield "cache", profile_spec(config.cache)
    if config.base_url is None:
        yield "tokenizer", Path(config.tokenizer).name
    if workload.recall is not None:
        yield "recall", f"{workload.recall:.3f} of the blocks known to hold an answer"


SESSIONS = (2, 4, 8, 16, 32)
"""Conversations at a time, as in RAGBoost's Table 2 (b)."""


@dataclass(frozen=True, slots=True)
class RunMatrix:
    """The runs of a benchmark."""

    workload: Workload
    policies: Sequence[Policy]
    capacities: Sequence[int | None]
    k: int
    ks: Sequence[int]
    sessions: Sequence[int]
    seed: int | None

    def trace(self, k: int | None = None) -> list[TraceRequest]:
        """Return the requests in the usual order of arrival."""
        if self.seed is None:
            trace = self.workload.in_order()
        else:
            trace = self.workload.trace(USUAL_SESSIONS, self.seed)
        return cut(trace, self.k if k is None else k)

    def runs(self, parts: Sequence[Part]) -> list[Run]:
        """Return the runs of some parts."""
        makers: dict[Part, Callable[[], Iterator[Run]]] = {
            Part.policies: self._policies,
            Part.k: self._ks,
            Part.sessions: self._sessions,
            Part.ablations: self._ablations,
        }
        return [run for part in parts for run in makers[part]()]

    def _run(self, policy: Policy, trace: Sequence[TraceRequest], **fields: Any) -> Run:
        has_turns = self.workload.has_turns
        usual = USUAL_SESSIONS if has_turns and self.seed is not None else None
        run = Run(policy, trace, deduplicate=has_turns, k=self.k, sessions=usual)
        return replace(run, **fields)

    def _policies(self) -> Iterator[Run]:
        trace = self.trace()
        for policy in self.policies:
            for deduplicate in deduplications(trace) if policy.is_marked else (False,):
                for capacity in self.capacities:
                    yield self._run(
                        policy, trace, deduplicate=deduplicate, capacity_tokens=capacity
                    )

    def _ks(self) -> Iterator[Run]:
        for k in self.ks:
            trace = self.trace(k)
            for policy in self.policies:
                shortens = self.workload.has_turns and policy.is_marked
                yield self._run(policy, trace, part=Part.k, k=k, deduplicate=shortens)

    def _sessions(self) -> Iterator[Run]:
        """Yield runs of conversations that take turns, with the smallest cache."""
        if not self.workload.has_turns:
            return
        for sessions in self.sessions:
            trace = cut(self.workload.trace(sessions, self.seed or 0), self.k)
            for name, policy, deduplicate in (
                (AS_SENT.name, AS_SENT, False),
                (f"{OURS_ONLINE.name}, not de-duplicated", OURS_ONLINE, False),
                (OURS_ONLINE.name, OURS_ONLINE, True),
            ):
                yield self._run(
                    replace(policy, name=name),
                    trace,
                    part=Part.sessions,
                    deduplicate=deduplicate,
                    capacity_tokens=self._smallest_cache,
                    sessions=sessions,
                )

    def _ablations(self) -> Iterator[Run]:
        """Yield the batch and the online order with one idea less each; section 7.3, Table 5."""
        trace = self.trace()
        has_turns = self.workload.has_turns
        for policy in (PAPERS_BATCH, OURS_BATCH, OURS_ONLINE):
            ways = [(policy, has_turns)]
            if policy.mode == "offline":
                name = f"{policy.name}, ordered but not scheduled"
                ways.append((replace(policy, name=name, is_scheduled=False), has_turns))
            name = f"{policy.name}, not annotated"
            ways.append((replace(policy, name=name, is_annotated=False), has_turns))
            if has_turns:
                ways.append((replace(policy, name=f"{policy.name}, not de-duplicated"), False))
            for way, deduplicate in ways:
                run = self._run(way, trace, part=Part.ablations, deduplicate=deduplicate)
                for capacity in dict.fromkeys((None, self._smallest_cache)):
                    yield replace(run, capacity_tokens=capacity)

    @property
    def _smallest_cache(self) -> int | None:
        """Tokens of the smallest cache; None where all are unlimited."""
        return min((size for size in self.capacities if size is not None), default=None)
