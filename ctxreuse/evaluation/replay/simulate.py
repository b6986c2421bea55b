"""Simulates what a prefix cache would serve of a planned trace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from ctxreuse.cache.simulator import BlockLevelCache, CacheUsage, PrefixCacheSimulator, block_key
from ctxreuse.context.blocks import BlockKey, ContextBlock
from ctxreuse.context.checks import (
    check_function,
    checked_each,
    checked_kind,
    checked_optional_integer,
)
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Reference, SentBlock, render_turn
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InputFileError, InvalidRequestError, MissingExtraError, describe
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.plan_trace import ANSWER, plan_under
from ctxreuse.evaluation.replay.policies import Policy
from ctxreuse.evaluation.replay.run_result import Run, RunResult
from ctxreuse.evaluation.traces.trace_files import Corpus, TraceRequest, block_tokens

_Prompt = TypeVar("_Prompt")


class Encoding(Protocol):
    """What a tokenizer's `encode` returns."""

    @property
    def ids(self) -> list[int]:
        """The token ids."""


class Tokenizer(Protocol):
    """A `tokenizers.Tokenizer`."""

    def encode(self, sequence: str, *, add_special_tokens: bool = ...) -> Encoding:
        """Return the tokens of a text."""


def checked_trace(trace: object) -> list[TraceRequest]:
    """Return the requests of a trace.

    Raises:
        InvalidRequestError: wrong type.
    """
    return checked_each("trace", trace, TraceRequest, "a TraceRequest; read them with read_trace")


def checked_plans(planned: object, corpus: object) -> list[PlannedRequest]:
    """Return the requests of a plan, whose blocks are those of a corpus.

    Raises:
        InvalidRequestError: wrong type of either.
    """
    checked_kind("corpus", corpus, Mapping, "a dict of blocks by id; read it with read_corpus")
    words = "a PlannedRequest; read them with read_plan"
    return checked_each("planned", planned, PlannedRequest, words)


def _checked_tokenizer(tokenizer: Any) -> Tokenizer:
    is_other = isinstance(tokenizer, (str, type))  # a path has an encode() of its own
    if is_other or not callable(getattr(tokenizer, "encode", None)):
        raise InvalidRequestError(
            f"tokenizer must have encode(), not be {describe(tokenizer)}; use load_tokenizer"
        )
    checked: Tokenizer = tokenizer
    return checked


def simulate_blocks(
    planned: Sequence[PlannedRequest], corpus: Corpus, cache: BlockLevelCache
) -> Iterator[CacheUsage]:
    """Yield each request's usage at block level: a block counts as its `tokens`.

    A later turn's prompt is the prompt of the turn before and its own blocks; questions, answers,
    labels and annotations count as no tokens.

    Args:
        planned: The requests in execution order.
        corpus: The blocks' tokens.
        cache: Serves the prompts.

    Raises:
        InputFileError: A plan names a block that the corpus lacks.
        InvalidRequestError: wrong type.
    """
    planned = checked_plans(planned, corpus)
    checked_kind("cache", cache, BlockLevelCache, "a BlockLevelCache")
    prompts = prompt_blocks(planned, corpus)
    for request, (keys, tokens) in zip(planned, prompts, strict=True):
        yield cache.serve(keys, tokens, (request.tenant, request.system))


def prompt_blocks(
    planned: Sequence[PlannedRequest], corpus: Corpus
) -> Iterator[tuple[list[BlockKey], list[int]]]:
    """Yield each request's whole prompt as context blocks and their tokens.

    Args:
        planned: The requests in execution order.
        corpus: The blocks' tokens.

    Raises:
        InputFileError: A plan names a block that the corpus lacks.
        InvalidRequestError: wrong type.
    """
    planned = checked_plans(planned, corpus)
    prompts: dict[str | int, tuple[list[BlockKey], list[int]]] = {}
    continued = Counter(request.after for request in planned)
    for number, request in enumerate(planned):
        keys: list[BlockKey] = []
        tokens: list[int] = []
        if request.after is not None:
            earlier_keys, earlier_tokens = _continued(prompts, request, continued)
            # the turn before ends in a question and an answer that no other prompt has
            keys = [*earlier_keys, block_key(f"turn {number}")]
            tokens = [*earlier_tokens, 0]
        for block in sent_blocks(request, corpus):
            keys.append(block.key)
            tokens.append(block_tokens(block))
        if continued[request.request_id]:
            prompts[request.request_id] = (keys, tokens)
        yield keys, tokens


def simulate_tokens(
    planned: Sequence[PlannedRequest],
    corpus: Corpus,
    cache: PrefixCacheSimulator,
    tokenizer: Tokenizer,
) -> Iterator[CacheUsage]:
    """Yield each request's usage at token level, everything in the prompt counted.

    Tenants do not share.

    Args:
        planned: The requests in execution order.
        corpus: The blocks' texts.
        cache: Serves the prompts.
        tokenizer: Turns text into token ids.

    Raises:
        InputFileError: A plan names a block that the corpus lacks.
        InvalidRequestError: wrong type.
    """
    planned = checked_plans(planned, corpus)
    checked_kind("cache", cache, PrefixCacheSimulator, "a PrefixCacheSimulator")
    prompts = prompt_tokens(planned, corpus, tokenizer)
    for request, prompt in zip(planned, prompts, strict=True):
        yield cache.serve(prompt, salt=request.tenant)


def prompt_tokens(
    planned: Sequence[PlannedRequest], corpus: Corpus, tokenizer: Tokenizer
) -> Iterator[list[int]]:
    """Yield each request's whole prompt as token ids.

    Messages are laid out as ChatML (`<|im_start|>role ... <|im_end|>`); other chat templates differ
    by a few tokens a message. Turns are answered "OK.".

    Args:
        planned: The requests in execution order.
        corpus: The blocks' texts.
        tokenizer: Turns text into token ids.

    Raises:
        InputFileError: A plan names a block that the corpus lacks.
        InvalidRequestError: wrong type.
    """
    planned = checked_plans(planned, corpus)
    _checked_tokenizer(tokenizer)
    prompts: dict[str | int, list[int]] = {}
    continued = Counter(request.after for request in planned)

    def encode(role: str, content: str) -> list[int]:
        text = f"<|im_start|>{role}\n{content}<|im_end|>\n"
        return tokenizer.encode(well_formed(text), add_special_tokens=False).ids

    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    for request in planned:
        if request.after is not None:
            before = _continued(prompts, request, continued)
        else:
            before = [] if request.system is None else encode("system", request.system)
        prompt = before + encode("user", _content(request, corpus))
        if continued[request.request_id]:
            prompts[request.request_id] = prompt + encode("assistant", ANSWER)
        yield prompt + opening


def _continued(
    prompts: dict[str | int, _Prompt],
    request: PlannedRequest,
    continued: Counter[str | int | None],
) -> _Prompt:
    """Return the prompt that a turn continues; forget it if no other turn does, too.

    So a conversation of n turns takes the memory of its longest prompt, not of all.
    """
    after = request.after
    if after is None or after not in prompts:
        raise InputFileError(
            f"{request.place}: request {describe(request.request_id)} comes after "
            f"{describe(after)}, which is no request before it; give the turns in order"
        )
    continued[after] -= 1
    return prompts[after] if continued[after] else prompts.pop(after)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """What a cache of one size served.

    Attributes:
        capacity_tokens: What it held; None is unlimited.
        usages: What each request found in it.
    """

    capacity_tokens: int | None
    usages: Sequence[CacheUsage]

    @classmethod
    def of(
        cls,
        capacity_tokens: int | None,
        usages: Iterator[CacheUsage],
        advance: Callable[[], object] = lambda: None,
    ) -> SizeResult:
        """Return the result of a run, calling `advance` once a request.

        Raises:
            InvalidRequestError: wrong type or out of range.
        """
        checked_optional_integer("capacity_tokens", capacity_tokens)
        return cls(capacity_tokens, list(_counted(usages, advance)))

    @property
    def total(self) -> CacheUsage:
        """The usage of all requests together."""
        return sum(self.usages, CacheUsage())

    @property
    def second_half(self) -> CacheUsage:
        """The usage of the later half of the requests, which meet a cache that is in use."""
        return sum(self.usages[len(self.usages) // 2 :], CacheUsage())


def total_usage(
    usages: Iterator[CacheUsage], advance: Callable[[], object] = lambda: None
) -> CacheUsage:
    """Return the sum of all usages, calling `advance` once a request.

    Raises:
        InvalidRequestError: wrong type.
    """
    return sum(_counted(usages, advance), CacheUsage())


def _counted(usages: Iterable[CacheUsage], advance: Callable[[], object]) -> Iterator[CacheUsage]:
    """Yield usages as they come, calling `advance` once each."""
    check_function("advance", advance, "a function")
    for usage in checked_kind("usages", usages, Iterable, "an iterator of CacheUsage"):
        yield checked_kind("each of usages", usage, CacheUsage, "a CacheUsage")
        advance()


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a `tokenizer.json` file.

    Raises:
        MissingExtraError: If `tokenizers` is not installed.
        InputFileError: It is no such file.
    """
    try:
        from tokenizers import Tokenizer as FileTokenizer
    except ImportError as error:
        raise MissingExtraError("--tokenizer", "tokenizers") from error
    try:
        return FileTokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise InputFileError(
            f"{path}: not a tokenizer.json ({describe(str(error))}); "
            "pass the file of a Hugging Face fast tokenizer"
        ) from error


def _content(request: PlannedRequest, corpus: Corpus) -> str:
    parts = [
        SentBlock(label, _readable(_corpus_block(corpus, block_id, request), request))
        if annotation is None
        else Reference(label, block_id, annotation)
        for label, block_id, annotation in request.parts
    ]
    return render_turn(
        parts,
        request.order_annotation,
        request.query,
        DEFAULT_TEMPLATES,
        is_labelled=request.is_labelled,
    )


def _readable(block: ContextBlock, request: PlannedRequest) -> ContextBlock:
    if block.tokens and not block.text:
        raise InputFileError(
            f"{request.place}: block {describe(block.id)}: the corpus has no text of it, only its "
            "length; leave out --tokenizer"
        )
    return block


def sent_blocks(request: PlannedRequest, corpus: Corpus) -> list[ContextBlock]:
    """Return the blocks that a plan sends, in order.

    Raises:
        InputFileError: The corpus lacks one.
        InvalidRequestError: wrong type.
    """
    checked_plans([request], corpus)
    return [_corpus_block(corpus, block_id, request) for block_id in request.blocks]


def _corpus_block(corpus: Corpus, block_id: str | int, request: PlannedRequest) -> ContextBlock:
    block = corpus.get(block_id)
    if block is None:
        raise InputFileError(
            f"{request.place}: block {describe(block_id)} is not in the corpus; "
            "pass the corpus that the plan was made with"
        )
    return checked_kind("each block of the corpus", block, ContextBlock, "a ContextBlock")


Outcome = RunResult
"""The former name of `RunResult`."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace that is replayed under one policy after the other.

    Conversations are replayed, each turn answered "OK.".

    Attributes:
        trace: The requests in arrival order.
        corpus: Their blocks.
        tokenizer: Simulates whole prompts, token by token; None counts blocks by their tokens.
        advance: Called twice a request and run, for progress bars.

    Raises:
        InvalidRequestError: wrong type, as from all methods here.
    """

    trace: Sequence[TraceRequest]
    corpus: Corpus
    tokenizer: Tokenizer | None = None
    advance: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        checked_trace(self.trace)
        checked_plans((), self.corpus)
        if self.tokenizer is not None:
            _checked_tokenizer(self.tokenizer)
        check_function("advance", self.advance, "a function")

    def of(self, trace: Sequence[TraceRequest]) -> Replay:
        """Return a replay of another trace of the same corpus."""
        return replace(self, trace=trace)

    def run(
        self, policy: Policy, *, deduplicate: bool = True, capacity_tokens: int | None = None
    ) -> RunResult:
        """Plan the trace, and serve it from a cache.

        Args:
            policy: How the blocks are ordered.
            deduplicate: Whether blocks that a conversation shows already are left out.
            capacity_tokens: What the cache holds; None is unlimited.

        Raises:
            BatchTooLargeError: The papers' algorithm cannot hold the batch.
        """
        checked_kind("policy", policy, Policy, "a Policy")
        return self.measure(Run(policy, self.trace, deduplicate, capacity_tokens))

    def measure(self, run: Run) -> RunResult:
        """Plan a run's own trace, which is of the same corpus, and serve it from a cache.

        Raises:
            BatchTooLargeError: The papers' algorithm cannot hold the batch.
        """
        reordered = checked_kind("run", run, Run, "a Run").reordered()
        planner = run.planner()
        import scipy.cluster.hierarchy  # noqa: F401 - else the first batch waits for it below

        started = time.perf_counter()
        planned = plan_under(
            run.policy, reordered.requests, planner, conversations=True, advance=self.advance
        )
        planning_s = time.perf_counter() - started
        usages = self.served(planned, run.capacity_tokens)
        return RunResult.of_run(run, reordered, planned, usages, planning_s)

    def served(
        self, planned: Sequence[PlannedRequest], capacity_tokens: int | None
    ) -> list[CacheUsage]:
        """Return what each request finds in a cache that is empty at first.

        Args:
            planned: The requests in execution order.
            capacity_tokens: What the cache holds; None is unlimited.
        """
        if self.tokenizer is None:
            served = simulate_blocks(planned, self.corpus, BlockLevelCache(capacity_tokens))
        else:
            cache = PrefixCacheSimulator(capacity_tokens)
            served = simulate_tokens(planned, self.corpus, cache, self.tokenizer)
        usages = []
        for usage in served:
            usages.append(usage)
            self.advance()
        return usages


Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
"""From a task's name and its number of steps to a context whose value is called once a step."""


def no_progress(task: str, steps: int) -> AbstractContextManager[Callable[[], object]]:
    """Show nothing."""
    return nullcontext(lambda: None)
