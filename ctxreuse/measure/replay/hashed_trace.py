"""Traces in Mooncake's format: each request as the hashes of its prompt's blocks of tokens.

A line is a request, in the order in which they run: `timestamp` (of its arrival, in milliseconds),
`input_length` and `output_length` (tokens), `hash_ids` (an integer for each block of 512 tokens of
the prompt, the last and shorter one included). An id stands for a block and everything before it;
ids count prefixes by their first appearance. Qin et al., "Mooncake" (FAST 2025).

The format tells all that a prefix cache depends on, and nothing of what was asked, so production
traces are published in it, and other tools replay plans that are written in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from ctxreuse.cache.simulator import ContentHash, PrefixCacheSimulator, token_array
from ctxreuse.context.blocks import BlockKey
from ctxreuse.errors import InputFileError, describe
from ctxreuse.measure.replay.plan_file import PlannedRequest
from ctxreuse.measure.replay.prompts import Tokenizer, prompt_blocks, prompt_tokens
from ctxreuse.measure.replay.simulate import SizeResult, counted
from ctxreuse.measure.traces.json_lines import LARGEST, JsonLine
from ctxreuse.measure.traces.trace_files import Corpus

BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""

USUAL_SIZES = (16_000, 64_000, 256_000, 1_000_000, 4_000_000, 16_000_000, None)
"""Tokens that caches hold, from a GPU's memory to a pool of many machines; None is unlimited."""

MOST_BLOCKS = 2**20
"""Blocks of a prompt that is written; no engine takes a longer one."""


SLOWEST = 0.001
"""The fewest requests a second that a trace is written with."""


@dataclass(frozen=True, slots=True)
class HashedRequest:
    """A request of a trace in Mooncake's format."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the line as a JSON object."""
        return {
            "timestamp": self.timestamp_ms,
            "input_length": self.input_tokens,
            "output_length": self.output_tokens,
            "hash_ids": list(self.hash_ids),
        }


def is_hashed(line: JsonLine) -> bool:
    """Return whether a line is one of a trace in Mooncake's format, not one of a plan."""
    return "hash_ids" in line.fields and "blocks" not in line.fields


def hashed_requests(
    lines: Iterable[JsonLine], block_tokens: int = BLOCK_TOKENS
) -> list[HashedRequest]:
    """Return the requests of the lines of a trace."""
    return [_hashed_request(line, block_tokens) for line in lines]


def _hashed_request(line: JsonLine, block_tokens: int) -> HashedRequest:
    timestamp_ms = line.time_ms("timestamp")
    input_tokens, output_tokens = (line.natural(name) for name in ("input_length", "output_length"))
    hash_ids: list[int] = line.get("hash_ids", (list,))
    for hash_id in hash_ids:
        if type(hash_id) is not int or not 0 <= hash_id <= LARGEST:
            line.fail(
                f"field 'hash_ids' holds {describe(hash_id)}; ids are integers from 0, of at most "
                "100 digits"
            )
    full, rest = divmod(input_tokens, block_tokens)
    blocks = full + bool(rest)
    if len(hash_ids) not in (full, blocks):  # some tools give the last, shorter block no id
        line.fail(
            f"field 'hash_ids' is of length {len(hash_ids):,}, but {input_tokens:,} tokens in "
            f"blocks of {block_tokens:,} make {blocks:,}; if the trace has blocks of "
            "another size, say which (--block-size)"
        )
    return HashedRequest(timestamp_ms, input_tokens, output_tokens, tuple(hash_ids))


def simulate_hashed(
    requests: Sequence[HashedRequest],
    capacities: Sequence[int | None] = USUAL_SIZES,
    block_tokens: int = BLOCK_TOKENS,
    advance: Callable[[], object] = lambda: None,
) -> list[SizeResult]:
    """Return what caches of several sizes serve of a trace, each empty at first."""
    prefixes = _Prefixes()
    # an id means a prefix, but not every tool that writes traces keeps to it, so they are chained
    chains = [
        [
            ContentHash(number.to_bytes(8))
            for number in prefixes.numbered(one.hash_ids[: one.input_tokens // block_tokens])
        ]
        for one in requests
    ]
    results = []
    for capacity in capacities:
        cache = PrefixCacheSimulator(capacity, block_tokens)
        usages = (
            cache.serve_hashed(hashes, one.input_tokens)
            for one, hashes in zip(requests, chains, strict=True)
        )
        results.append(SizeResult(capacity, list(counted(usages, advance))))
    return results


def hashed_plan(
    planned: Sequence[PlannedRequest],
    corpus: Corpus,
    tokenizer: Tokenizer | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    answer_tokens: int = 1,
    requests_per_second: float | None = None,
) -> Iterator[HashedRequest]:
    """Yield the requests of a plan as a trace in Mooncake's format."""
    times_ms = _arrival_times_ms(planned, requests_per_second)
    prefixes = _Prefixes()
    prompts = (
        _cut_blocks(planned, corpus, block_tokens)
        if tokenizer is None
        else _cut_tokens(planned, corpus, tokenizer, block_tokens)
    )
    for request, time_ms, (length, contents) in zip(planned, times_ms, prompts, strict=True):
        # where whole prompts are counted, the system text is a part of them
        root = (request.tenant, request.system if tokenizer is None else None)
        ids = tuple(prefixes.numbered(contents, root))
        yield HashedRequest(round(time_ms), length, answer_tokens, ids)


class _Prefixes:
    """Numbers prefixes by their first appearance: equal numbers, equal prefixes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, Hashable], int] = {}

    def numbered(self, contents: Iterable[Hashable], root: Hashable = None) -> Iterator[int]:
        """Yield the number of each prefix of a prompt."""
        prefix = root
        for content in contents:
            number = self._numbers.setdefault((prefix, content), len(self._numbers))
            prefix = number
            yield number


def _arrival_times_ms(
    planned: Sequence[PlannedRequest], requests_per_second: float | None
) -> Sequence[float]:
    known = sorted(one.timestamp_ms for one in planned if one.timestamp_ms is not None)
    if requests_per_second is None and known:
        for one in planned:
            if one.timestamp_ms is None:
                raise InputFileError(
                    f"{one.place}: field 'timestamp' is missing, which other requests have; give "
                    "it to all of them, or say how many arrive in a second"
                )
        return known
    a_second = 1 if requests_per_second is None else requests_per_second
    return [1_000 * number / a_second for number in range(len(planned))]


_Cut: TypeAlias = tuple[int, Iterator[Hashable]]
"""A prompt's tokens, and what its blocks hold."""


def _cut_blocks(
    planned: Sequence[PlannedRequest], corpus: Corpus, block_tokens: int
) -> Iterator[_Cut]:
    prompts = prompt_blocks(planned, corpus)
    for request, (keys, tokens) in zip(planned, prompts, strict=True):
        length = sum(tokens)
        if length > MOST_BLOCKS * block_tokens:
            raise InputFileError(
                f"{request.place}: the prompt has {describe(length)} tokens, more than "
                f"{MOST_BLOCKS:,} blocks of {block_tokens:,}; correct the field 'tokens' in the "
                "corpus, or write longer blocks"
            )
        yield length, _pieces(keys, tokens, block_tokens)


def _pieces(
    keys: Sequence[BlockKey], tokens: Sequence[int], block_tokens: int
) -> Iterator[tuple[tuple[BlockKey, int, int], ...]]:
    """Yield what stands in each engine block: the context blocks' keys, and the tokens of each."""
    pieces: list[tuple[BlockKey, int, int]] = []
    room = block_tokens
    for key, length in zip(keys, tokens, strict=True):
        start = 0
        while True:
            end = min(length, start + room)
            pieces.append((key, start, end))  # without tokens, too: it parts two prompts
            room -= end - start
            start = end
            if not room:
                yield tuple(pieces)
                pieces, room = [], block_tokens
            if start == length:
                break
    if room < block_tokens:
        yield tuple(pieces)


def _cut_tokens(
    planned: Sequence[PlannedRequest], corpus: Corpus, tokenizer: Tokenizer, block_tokens: int
) -> Iterator[_Cut]:
    for prompt in prompt_tokens(planned, corpus, tokenizer):
        tokens, starts = token_array(prompt), range(0, len(prompt), block_tokens)
        yield (
            len(tokens),
            (blake2b(tokens[at : at + block_tokens], digest_size=16).digest() for at in starts),
        )
