"""Simulates what a prefix cache would serve of a planned trace, and of one under every policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from ctxreuse.cache.provider_cache import PromptPiece, ProviderCache
from ctxreuse.cache.simulator import BlockLevelCache, CacheUsage, PrefixCacheSimulator
from ctxreuse.errors import BatchTooLargeError, InputFileError, MissingExtraError, describe
from ctxreuse.measure.replay.plan_file import PlannedRequest, plan_under
from ctxreuse.measure.replay.policies import POLICIES, MeasuredPolicy, TraceMode
from ctxreuse.measure.replay.prompts import (
    Tokenizer,
    prime_ends,
    prompt_blocks,
    prompt_pieces,
    prompt_tokens,
    said_tokens,
)
from ctxreuse.measure.traces.sent_calls import SentCall
from ctxreuse.measure.traces.trace_files import Corpus, TraceRequest, block_tokens
from ctxreuse.planner import ReusePlanner
from ctxreuse.rules.answers import read_of_blocks
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules

_BY_REQUEST = ("prompt_tokens", "cached_tokens", "request_ids", "first_token_s", "answers")

POLICIES_PART = "policies"  # of what is measured; benchmarks have others


@dataclass(frozen=True, slots=True)
class Run:
    """A policy that is to be measured on a trace; `RunResult` is what comes out."""

    policy: MeasuredPolicy
    trace: Sequence[TraceRequest]
    deduplicate: bool = True
    capacity_tokens: int | None = None
    part: str = POLICIES_PART
    k: int | None = None
    sessions: int | None = None
    at_once: int = 1  # conversations that a live engine is asked at a time

    def planner(self, cache: CacheRules = DEFAULT_CACHE) -> ReusePlanner:
        """Return a planner for an engine or a provider whose cache, of these rules, is empty."""
        return self.policy.planner(
            deduplicate=self.deduplicate, capacity_tokens=self.capacity_tokens, cache=cache
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a policy reached, once through the requests."""

    policy: str
    strategy: str
    mode: TraceMode
    deduplicated: bool
    capacity_tokens: int | None
    planning_ms: float
    prompt_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    part: str = POLICIES_PART
    k: int | None = None
    sessions: int | None = None
    request_ids: tuple[str, ...] = ()
    first_token_s: tuple[float, ...] = ()
    answers: tuple[str, ...] = ()
    failures: int = 0
    word_tokens: int = 0
    written: Mapping[str, int] | None = None  # into a hosted cache; None of an engine's
    never_read: int = 0
    planned: Sequence[PlannedRequest] = field(default=(), compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of_run(
        cls,
        run: Run,
        planned: Sequence[PlannedRequest],
        usages: Sequence[CacheUsage],
        planning_s: float,
        **more: Any,
    ) -> Self:
        """Return the result of a run."""
        return cls(
            policy=run.policy.name,
            strategy=run.policy.order_name,
            mode=run.policy.mode,
            deduplicated=run.deduplicate,
            capacity_tokens=run.capacity_tokens,
            planning_ms=round(1e3 * planning_s / max(1, len(planned)), 4),
            prompt_tokens=tuple(usage.prompt_tokens for usage in usages),
            cached_tokens=tuple(usage.cached_tokens for usage in usages),
            part=run.part,
            k=run.k,
            sessions=run.sessions,
            word_tokens=sum(map(said_tokens, planned)),
            planned=planned,
            **more,
        )

    @property
    def usages(self) -> list[CacheUsage]:
        """What each request found in the cache."""
        return list(map(CacheUsage, self.prompt_tokens, self.cached_tokens))

    @property
    def total(self) -> CacheUsage:
        """The usage of all requests together."""
        return CacheUsage(sum(self.prompt_tokens), sum(self.cached_tokens))

    @property
    def billed(self) -> BilledTokens:
        """The tokens of all requests together by what is paid for them."""
        total, written = self.total, self.written or {}
        uncached = total.prefilled_tokens - sum(written.values())
        return BilledTokens(uncached, total.cached_tokens, written)

    def first_token_percentile_s(self, share: float) -> float:
        """Return a percentile of an engine's times to the first token, in seconds."""
        return float(np.percentile(self.first_token_s, share))

    def only(self, request_ids: Set[str]) -> Self:
        """Return the part of an engine's result that is about some requests."""
        places = [at for at, one in enumerate(self.request_ids) if one in request_ids]
        columns = {name: getattr(self, name) for name in _BY_REQUEST}
        kept: dict[str, Any] = {
            name: tuple(values[at] for at in places) for name, values in columns.items() if values
        }
        return replace(self, **kept)


_Item = TypeVar("_Item")


def simulate_blocks(
    planned: Sequence[PlannedRequest],
    corpus: Corpus,
    cache: BlockLevelCache,
    *,
    counts_words: bool = False,
) -> Iterator[CacheUsage]:
    """Yield each request's usage at block level; what its primes compute counts as not cached."""
    prompts = prompt_blocks(planned, corpus, counts_words=counts_words)
    for request, (keys, tokens) in zip(planned, prompts, strict=True):
        root = request.tenant, request.system
        primes = [cache.serve(keys[:end], tokens[:end], root) for end in request.primes]
        yield net_of_primes(cache.serve(keys, tokens, root), primes)


def simulate_tokens(
    planned: Sequence[PlannedRequest],
    corpus: Corpus,
    cache: PrefixCacheSimulator,
    tokenizer: Tokenizer,
) -> Iterator[CacheUsage]:
    """Yield each request's usage at token level, all of the prompt and its primes counted."""
    prompts = prompt_tokens(planned, corpus, tokenizer)
    for request, prompt in zip(planned, prompts, strict=True):
        salt = request.tenant
        ends = prime_ends(request, corpus, tokenizer, prompt, cache.block_size)
        primes = [cache.serve(prompt[:end], salt=salt) for end in ends]
        yield net_of_primes(cache.serve(prompt, salt=salt), primes)


def net_of_primes(usage: CacheUsage, primes: Sequence[CacheUsage]) -> CacheUsage:
    """Return a request's usage with the computation of its primes."""
    computed = sum(one.prefilled_tokens for one in primes)
    return CacheUsage(usage.prompt_tokens, max(0, usage.cached_tokens - computed))


class SizeResult(NamedTuple):
    """What a cache of one size served."""

    capacity_tokens: int | None
    usages: Sequence[CacheUsage]

    @property
    def total(self) -> CacheUsage:
        """The usage of all requests together."""
        return sum(self.usages, CacheUsage())

    @property
    def second_half(self) -> CacheUsage:
        """The usage of the later half of the requests, which meet a cache that is in use."""
        return sum(self.usages[len(self.usages) // 2 :], CacheUsage())


def counted(items: Iterable[_Item], advance: Callable[[], object]) -> Iterator[_Item]:
    """Yield things as they come, calling `advance` once each."""
    for one in items:
        yield one
        advance()


def load_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json` file."""
    try:
        from tokenizers import Tokenizer as FileTokenizer
    except ImportError as error:
        raise MissingExtraError("--tokenizer", "tokenizers") from error
    try:
        tokenizer: Tokenizer = FileTokenizer.from_file(path)
        return tokenizer
    except Exception as error:  # the library raises bare Exception
        raise InputFileError(
            f"{path}: not a tokenizer.json ({describe(str(error))}); "
            "pass the file of a Hugging Face fast tokenizer"
        ) from error


class Replay(NamedTuple):
    """A trace that is replayed under one policy after the other."""

    trace: Sequence[TraceRequest]
    corpus: Corpus
    tokenizer: Tokenizer | None = None
    advance: Callable[[], object] = lambda: None
    cache: CacheRules = DEFAULT_CACHE

    def measure(self, run: Run) -> RunResult:
        """Plan a run's own trace, which is of the same corpus, and serve it from a cache."""
        planner = run.planner(self.cache)
        import scipy.cluster.hierarchy  # noqa: F401 - else the first batch waits for it below

        started = time.perf_counter()
        planned = plan_under(
            run.policy, run.trace, planner, conversations=True, advance=self.advance
        )
        planning_s = time.perf_counter() - started
        if not self.cache.lives:
            usages = self.served(planned, run.capacity_tokens)
            return RunResult.of_run(run, planned, usages, planning_s)
        billed, never_read = self.billed(planned, run)
        usages = [CacheUsage(one.prompt_tokens, one.read) for one in billed]
        written = sum(billed, BilledTokens()).written
        return RunResult.of_run(
            run, planned, usages, planning_s, written=written, never_read=never_read
        )

    def served(
        self,
        planned: Sequence[PlannedRequest],
        capacity_tokens: int | None,
        block_size: int | None = None,
        *,
        counts_words: bool = True,
    ) -> list[CacheUsage]:
        """Return what each request finds in a cache that is empty at first."""
        if self.tokenizer is None:
            blocks = BlockLevelCache(capacity_tokens, self.cache)
            served: Iterator[CacheUsage] = (
                CacheUsage(one.prompt_tokens, read_of_blocks(self.cache, one.cached_tokens))
                for one in simulate_blocks(planned, self.corpus, blocks, counts_words=counts_words)
            )
        else:
            size, states = block_size or self.cache.step_tokens, self.cache.states
            cache = PrefixCacheSimulator(capacity_tokens, size, states=states)
            served = simulate_tokens(planned, self.corpus, cache, self.tokenizer)
        return list(counted(served, self.advance))

    def billed(self, planned: Sequence[PlannedRequest], run: Run) -> tuple[list[BilledTokens], int]:
        """Return what is charged for requests sent one by one, and what of it is never read."""
        policy, traced = run.policy, {one.request_id: one for one in run.trace}
        cache, billed, now = ProviderCache(self.cache), [], 0.0
        prompts = prompt_pieces(planned, self.corpus, self.tokenizer)
        for request, prompt in zip(planned, prompts, strict=True):
            if policy.mode == "online" and request.timestamp_ms is not None:
                now = max(now, request.timestamp_ms / 1_000)  # a batch is sent all at once
            asked, turns = traced[request.request_id], prompt.turn_ends
            sent = asked.sent or SentCall()
            own = (request if policy.is_marked else asked).marks or ()  # of a plan, or recorded
            marks = {prompt.block_ends[: mark + 1][-1] for mark in own}  # behind which pieces
            if not policy.is_marked:
                ends = self.cache.marks_end  # the provider marks each turn's
                has_more = sent.marks.get("turn", 0) > sum(map(bool, own))
                marks.update(
                    [0] * ("tools" in sent.marks),
                    turns[:-1] * (ends or "history" in sent.marks),
                    turns[-1:] * (ends or has_more),
                )
            elif request.conversation_id is not None:
                # what the turn before has written, and for the next
                marks.update(turns[-2:])
            tools = PromptPiece("\n".join(sent.tools), sent.tool_tokens)
            pieces = [
                one._replace(is_marked=number in marks)
                for number, one in enumerate([tools, *prompt.pieces])
            ]
            billed.append(cache.serve(pieces, now=now, key=request.tenant))
            self.advance()
        return billed, cache.never_read


Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
"""From a task's name and its number of steps to a context whose value is called once a step."""


def no_progress(task: str, steps: int) -> AbstractContextManager[Callable[[], object]]:
    """Show nothing."""
    return nullcontext(lambda: None)


_SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
"""Tokens that the caches of usual engines hold, from a small GPU with a large model upwards."""

_MOST_SIZES = 4


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace holds."""

    requests: int
    conversations: int
    turns: int
    blocks: int
    distinct_tokens: int
    block_tokens: int
    repeated_tokens: int

    @classmethod
    def of(cls, trace: Sequence[TraceRequest]) -> TraceSummary:
        """Return the summary of a trace."""
        seen: set[tuple[str, bytes]] = set()
        distinct: dict[bytes, int] = {}
        conversations = set()
        turns = sent = repeated = 0
        for request in trace:
            if request.conversation_id is not None:
                turns += 1
                conversations.add((request.tenant, request.conversation_id))
            for key, block in {block.key: block for block in request.blocks}.items():
                tokens = block_tokens(block)
                distinct[key] = tokens
                sent += tokens
                repeated += tokens * ((request.tenant, key) in seen)
                seen.add((request.tenant, key))
        talks, blocks, distinct_tokens = len(conversations), len(distinct), sum(distinct.values())
        return cls(len(trace), talks, turns, blocks, distinct_tokens, sent, repeated)

    @property
    def reuse_bound(self) -> float:
        """Share of the block tokens that had been sent before."""
        return self.repeated_tokens / self.block_tokens if self.block_tokens else 0.0

    def is_short(self, cache: CacheRules) -> bool:
        """Return whether blocks have, on average, fewer tokens than a block of a cache."""
        return self.distinct_tokens < cache.step_tokens * self.blocks

    def cache_sizes(self) -> list[int | None]:
        """Return cache sizes to try, in tokens: unlimited, and usual ones below `block_tokens`."""
        less = [size for size in _SIZES if size < self.block_tokens]
        return [None, *less[-_MOST_SIZES:]]


def estimate(
    replay: Replay, capacities: Sequence[int | None], policies: Sequence[MeasuredPolicy] = POLICIES
) -> Iterator[RunResult]:
    """Yield what each policy reaches, with and without de-duplication, with each cache."""
    for policy in policies:
        for deduplicate in deduplications(replay.trace) if policy.is_marked else (False,):
            for capacity in capacities:
                try:
                    yield replay.measure(Run(policy, replay.trace, deduplicate, capacity))
                except BatchTooLargeError:
                    break


def deduplications(trace: Sequence[TraceRequest]) -> tuple[bool, ...]:
    """Return whether to de-duplicate: both where there are conversations, else not."""
    has_turns = any(request.conversation_id is not None for request in trace)
    return (False, True) if has_turns else (False,)
