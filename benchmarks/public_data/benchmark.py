"""Policies side by side on a data set, from the benchmark's options to its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.checks import checked_positive
from ctxreuse.errors import BatchTooLargeError, InvalidRequestError, describe
from ctxreuse.measure.bench.live_engine import LiveEngine
from ctxreuse.measure.options import CACHES, PRICES, option
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.policies import (
    AS_SENT,
    OURS_BATCH,
    OURS_ONLINE,
    PAPERS_BATCH,
    POLICIES,
    MeasuredPolicy,
    check_own_engine,
    tried_policies,
)
from ctxreuse.measure.replay.prompts import Tokenizer
from ctxreuse.measure.replay.simulate import (
    Progress,
    Replay,
    Run,
    RunResult,
    TraceSummary,
    deduplications,
    load_tokenizer,
    no_progress,
)
from ctxreuse.measure.results.prices import Prices, prices_given
from ctxreuse.measure.results.results import Level, Results, results_of
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.rules.cache_rules import CacheRules, cache_profile, profile_spec
from ctxreuse.serving.emulation.batching_engine import COMMON_RATES
from ctxreuse.serving.emulation.word_tokenizer import WordTokenizer
from public_data.datasets import load
from public_data.peers.cacheweaver import CACHEWEAVER
from public_data.peers.frameworks import PeerPolicy, ReorderedTrace, framework_policies
from public_data.peers.published_pilot import PublishedContextPilot
from public_data.workload import (
    USUAL_SESSIONS,
    Workload,
    make_workload,
    retrieve,
    sample,
)

ANSWER_TOKENS = 32
"""The longest answer of an engine, where nothing else is said."""

WORDS, BLOCKS = "words", "blocks"
"""Ways to count without a tokenizer's file."""

_Measured: TypeAlias = RunResult | BatchTooLargeError
_Measure: TypeAlias = Callable[[Sequence[Run]], Iterable[_Measured]]


KS = (3, 5, 10, 15)
"""Blocks a request that are usually tried; the papers' evaluation goes from 3 to 15."""


def cut(trace: Sequence[TraceRequest], k: int) -> list[TraceRequest]:
    """Return the trace that a retriever which finds k blocks a request would have given."""
    return [replace(traced, blocks=traced.blocks[:k]) for traced in trace]


def _reuse_bounds(
    trace: Sequence[TraceRequest], ks: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """Return for each k the share of the block tokens that had been sent before."""
    return tuple((k, TraceSummary.of(cut(trace, k)).reuse_bound) for k in ks)


class Part(StrEnum):
    """A part of a benchmark."""

    policies = "policies"
    k = "k"
    sessions = "sessions"
    ablations = "ablations"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which questions are asked, what is retrieved for them, and who answers."""

    dataset: str | None = option(
        "The files' format: multihop-rag, mtrag, locomo, as their authors "
        "publish them; jsonl for a folder with corpus.jsonl (id, text) and queries.jsonl (id, "
        "question; optionally answers, gold, conversation_id, turn).",
        None,
        argument=True,
    )
    data: Path | None = option("Where the files are.", None)
    retriever: str = option("bm25, or faiss (TF-IDF with SVD).", "bm25")
    k: int = option("Blocks a request.", 15, min=1)
    requests: int = option("The most questions, in whole conversations.", 1_000, min=1)
    independent: bool = option("Take turns of conversations as independent questions.", False)
    in_order: bool = option(
        "Take the first questions, and have them arrive as the files have them; else both are "
        "random (--seed).",
        False,
    )
    chunk_tokens: int = option(
        "Length of the pieces that long documents are cut into; of jsonl, those of more than twice "
        "as many tokens.",
        512,
        min=16,
    )
    base_url: str | None = option(
        "Ask this vLLM server, started with --enable-prompt-tokens-details. Its key is taken from "
        "OPENAI_API_KEY.",
        None,
        secret=True,
    )
    model: str | None = option("The model that it answers with.", None)
    answer_tokens: int | None = option(
        "The longest answer of an engine, 32 tokens if not given; one of 1 token is not scored.",
        None,
        min=1,
    )
    seed: int = option("Same seed, same questions, same order.", 0)
    api_key: str = field(default="EMPTY", repr=False)

    @property
    def random_seed(self) -> int | None:
        """The seed; None where nothing is random."""
        return None if self.in_order else self.seed

    @property
    def most_k(self) -> int:
        """The most blocks that any request has."""
        return self.k


@dataclass(frozen=True, kw_only=True)
class BenchConfig(DataConfig):
    """What a benchmark measures, and how."""

    part: Sequence[Part] = option(
        "What to measure; several may be given. Without it, everything.", ()
    )
    policy: Sequence[str] = option(
        "A policy that parts policies and k compare with the retriever's order; several may be "
        "given. Without it, all.",
        (),
    )
    at_k: Sequence[int] = option("Blocks a request that part k tries.", (), min=1)
    at_sessions: Sequence[int] = option(
        "Conversations at a time that part sessions tries.", (), min=1
    )
    capacity_tokens: Sequence[int] = option(
        "Tokens that the cache holds; several may be given. Without it, some sizes that suit the "
        "data. An engine has its own.",
        (),
        min=0,
    )
    tokenizer: str = option(
        "A tokenizer.json, or words: count whole prompts, token by token; blocks: count each block "
        "as its tokens, the words around them as about as many as they have, and questions as "
        "none.",
        WORDS,
    )
    contextpilot_python: str | None = option(
        "A Python that has the published contextpilot package, which then takes part.", None
    )
    prefill_rate: float | None = option(
        "Prompt tokens that your engine computes in a second, for the time saved; without it, "
        "10,000.",
        None,
        min=1,
    )
    cache: str | CacheRules = option(
        f"{CACHES} Of a provider's cache, what is shown is the bill.", "vllm", type=str
    )
    prices: str | Prices | None = option(PRICES, None, metavar="FILE|MODEL", type=str | None)

    @property
    def profile(self) -> CacheRules:
        """The rules of the cache."""
        return cache_profile(self.cache)

    @property
    def level(self) -> Level:
        """What is counted: "engine", "blocks" or "tokens"."""
        if self.base_url is not None:
            return "engine"
        return "blocks" if self.tokenizer == BLOCKS else "tokens"

    @property
    def ks_to_try(self) -> list[int]:
        """Blocks a request that part k tries, in order."""
        return sorted(set(self.at_k or [*(k for k in KS if k < self.k), self.k]))

    @property
    def most_k(self) -> int:
        """The most blocks that any request has."""
        return max(self.k, *self.ks_to_try)


class Measured(NamedTuple):
    """What a benchmark found, and the right answers of its questions."""

    results: Results
    references: Mapping[str, Sequence[str]]


def run(
    config: BenchConfig,
    progress: Progress = no_progress,
    announce: Callable[[str], object] = lambda words: None,
) -> Measured:
    """Measure policies side by side."""
    cache = config.profile
    engines = "capacity_tokens, base_url and prefill_rate"
    check_own_engine(cache, engines, config.capacity_tokens, config.base_url, config.prefill_rate)
    tokenizer = _tokenizer(config.tokenizer)
    notes: list[str] = []
    policies = _policies(config, notes)
    workload = read_workload(config, progress)
    notes += workload.notes
    summary = TraceSummary.of(cut(workload.in_order(), config.k))
    sizes = config.capacity_tokens or summary.cache_sizes()[1:]
    is_simulated = config.base_url is None and not cache.lives  # others tell no sizes
    matrix = RunMatrix(
        workload,
        policies,
        [None, *dict.fromkeys(sizes)] if is_simulated else [None],
        config.k,
        config.ks_to_try,
        sorted(set(config.at_sessions or SESSIONS)),
        config.random_seed,
    )
    runs = matrix.runs(list(dict.fromkeys(config.part or Part)))
    if Part.sessions in config.part and not workload.has_turns:
        notes.append("sessions: left out, for no question is a turn of a conversation")
    requests = sum(len(one.trace) for one in runs)
    announce(f"{len(runs):,} runs, {requests:,} requests in all")
    with (
        progress("measuring", 2 * requests) as advance,
        _measuring(config, workload, tokenizer, advance) as measure,
    ):
        results, planned = _measured(runs, measure, notes)
    if workload.has_turns:
        notes.append(
            "Later turns stand behind their conversation's history and keep the retriever's order: "
            "ordering moves first turns only, de-duplication shortens the others."
        )
    ks = matrix.ks if any(result.part == Part.k for result in results) else ()
    found = results_of(
        workload.name,
        config.level,
        TraceSummary.of(matrix.trace()),
        results,
        planned,
        workload.corpus,
        bounds=_reuse_bounds(workload.in_order(), ks),
        settings=tuple(_settings(config, workload, summary)),
        notes=tuple(dict.fromkeys(notes)),
        cache_tokens=next(iter(config.capacity_tokens), None),
        prefill_tokens_per_s=_prefill_rate(config),
        prices=prices_given(config.prices, cache),
        cache=cache,
    )
    return Measured(found, workload.references)


def _prefill_rate(config: BenchConfig) -> float | None:
    if config.prefill_rate is not None:
        return checked_positive("prefill_rate", config.prefill_rate)
    is_simulated = config.base_url is None and not config.profile.lives
    return COMMON_RATES.prefill_tokens_per_s if is_simulated else None


def read_workload(config: DataConfig, progress: Progress = no_progress) -> Workload:
    """Return the questions of a data set, with the blocks found for each."""
    if config.dataset is None or config.data is None:
        raise InvalidRequestError(
            "name the files' format and where they are, such as: jsonl --data FOLDER"
        )
    with progress("reading", 1):
        dataset = load(config.dataset, config.data, chunk_tokens=config.chunk_tokens)
        if config.independent:
            alone = (replace(one, conversation_id=None, turn=0) for one in dataset.questions)
            dataset = replace(dataset, questions=tuple(alone))
        dataset = sample(dataset, config.requests, config.random_seed)
    with progress("retrieving", len(dataset.questions)) as advance:
        found = retrieve(dataset, config.retriever, config.most_k, advance)
    name = config.data.resolve().name if config.dataset == "jsonl" else config.dataset
    title = f"{name}, {config.retriever}, k={config.k}"
    return replace(make_workload(title, dataset.questions, found), notes=dataset.notes)


def _policies(config: BenchConfig, notes: list[str]) -> Sequence[MeasuredPolicy]:
    policies = [*POLICIES[:1], *framework_policies(notes), *POLICIES[1:3], CACHEWEAVER]
    policies += POLICIES[3:]
    if config.contextpilot_python is not None:
        policies += PublishedContextPilot(config.contextpilot_python).policies()
    known = [policy.name for policy in policies]
    for name in config.policy:
        if name not in known:
            raise InvalidRequestError(
                f"there is no policy {describe(name)}; there are: {'; '.join(known)}"
            )
    compared = [one for one in policies if one.name in (known[0], *(config.policy or known))]
    return [
        *(one for one in tried_policies(config.profile) if not one.is_marked),
        *compared,
    ]


def _tokenizer(name: str) -> Tokenizer | None:
    """Return what counts whole prompts; None counts blocks."""
    if name == BLOCKS:
        return None
    return WordTokenizer() if name == WORDS else load_tokenizer(name)


@contextmanager
def _measuring(
    config: BenchConfig,
    workload: Workload,
    tokenizer: Tokenizer | None,
    advance: Callable[[], object],
) -> Iterator[_Measure]:
    """Yield what measures runs that are compared, calling `advance` twice a request."""
    if config.base_url is None:
        replay = Replay((), workload.corpus, tokenizer, advance, config.profile)
        yield lambda runs: (_simulated(replay, one) for one in runs)
        return
    most = config.answer_tokens or ANSWER_TOKENS
    with LiveEngine(config.base_url, config.model, config.api_key, most, advance) as engine:

        def measure(runs: Sequence[Run]) -> Iterator[_Measured]:
            peers = [_in_peers_order(one) for one in runs]
            measured = engine.measure([one for one, _ in peers])
            return (_as_told(one, told) for one, (_, told) in zip(measured, peers, strict=True))

        yield measure


def _simulated(replay: Replay, run: Run) -> _Measured:
    try:
        run, told = _in_peers_order(run)
        return _as_told(replay.measure(run), told)
    except BatchTooLargeError as error:
        return error


def _in_peers_order(run: Run) -> tuple[Run, ReorderedTrace | None]:
    """Return a run as it is sent, and what a peer that orders by itself says of that."""
    if not isinstance(run.policy, PeerPolicy):
        return run, None
    told = run.policy.reordered(run)
    return replace(run, trace=told.requests), told


def _as_told(result: _Measured, told: ReorderedTrace | None) -> _Measured:
    if told is None or isinstance(result, BatchTooLargeError):
        return result
    wrong = (
        f"{result.policy} lost, doubled or swapped blocks of {told.wrong:,} of "
        f"{len(told.requests):,} requests; these were sent as retrieved"
    )
    notes = (*([wrong] if told.wrong else []), *result.notes)
    return replace(result, planning_ms=round(told.planning_ms, 4), notes=notes)


def _measured(
    runs: Sequence[Run], measure: _Measure, notes: list[str]
) -> tuple[list[RunResult], Sequence[PlannedRequest]]:
    """Return the runs' results, and what this package's online order sent; add to `notes`."""
    results: list[RunResult] = []
    planned: Sequence[PlannedRequest] = ()
    for _, compared in groupby(runs, attrgetter("part", "k", "sessions")):
        together = list(compared)
        for one, result in zip(together, measure(together), strict=True):
            if isinstance(result, BatchTooLargeError):
                notes.append(f"{one.policy.name} left out: too many requests for it as one batch")
                continue
            notes += result.notes
            is_ours = one.policy == OURS_ONLINE and one.capacity_tokens is None
            if is_ours and (one.part == Part.policies or not planned):
                planned = result.planned
            results.append(replace(result, planned=(), notes=()))
    return results, planned


def _settings(
    config: BenchConfig, workload: Workload, summary: TraceSummary
) -> Iterator[tuple[str, str]]:
    yield "retriever", config.retriever
    yield "seed", str(config.seed)
    yield "arrival", "as in the files" if config.in_order else "by chance"
    yield "requests", str(summary.requests)
    yield "cache", profile_spec(config.profile)
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
    policies: Sequence[MeasuredPolicy]
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

    def _run(self, policy: MeasuredPolicy, trace: Sequence[TraceRequest], **fields: Any) -> Run:
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
                    at_once=sessions,
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
