"""Traces in Mooncake's format: each request as the hashes of its prompt's blocks of tokens.

A line is a request, in the order in which they run: `timestamp` (of its arrival, in milliseconds),
`input_length` and `output_length` (tokens), `hash_ids` (an integer for each block of 512 tokens of
the prompt, the last and shorter one included). An id stands for a block and everything before it;
ids count prefixes by their first appearance. Qin et al., "Mooncake" (FAST 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ctxreuse.cache.simulator import ContentHash, PrefixCacheSimulator
from ctxreuse.errors import describe
from ctxreuse.measure.replay.simulate import SizeResult, counted
from ctxreuse.measure.traces.json_lines import LARGEST, JsonLine

BLOCK_TOKENS = 512  # tokens of a block in Mooncake's traces

USUAL_SIZES = (16_000, 64_000, 256_000, 1_000_000, 4_000_000, 16_000_000, None)
"""Tokens that caches hold, from a GPU's memory to a pool of many machines; None is unlimited."""


class HashedRequest(NamedTuple):
    """A request of a trace in Mooncake's format."""

    input_tokens: int
    hash_ids: tuple[int, ...]


def hashed_requests(
    lines: Iterable[JsonLine], block_tokens: int = BLOCK_TOKENS
) -> list[HashedRequest]:
    """Return the requests of the lines of a trace, each a whole prompt."""
    requests: list[HashedRequest] = []
    begins: dict[str | int, Sequence[int]] = {}  # by session
    for line in lines:
        requests.append(_hashed_request(line, block_tokens))
        first, session = requests[-1].hash_ids[:1], line.get("session_id", (str, int), None)
        if session is not None and first != begins.setdefault(session, first):
            line.fail(
                "it does not begin with the hash that its session's line before begins with, so it "
                "may hold only what is new; make each line a whole prompt, or leave 'session_id' "
                "out of whole prompts"
            )
    return requests


def _hashed_request(line: JsonLine, block_tokens: int) -> HashedRequest:
    input_tokens = line.natural("input_length")
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
    return HashedRequest(input_tokens, tuple(hash_ids))


def simulate_hashed(
    requests: Sequence[HashedRequest],
    capacities: Sequence[int | None] = USUAL_SIZES,
    block_tokens: int = BLOCK_TOKENS,
    advance: Callable[[], object] = lambda: None,
) -> list[SizeResult]:
    """Return what caches of several sizes serve of a trace, each empty at first."""
    known: dict[tuple[bytes, int], ContentHash] = {}
    chains: list[list[ContentHash]] = []
    for one in requests:
        chain, prefix = list[ContentHash](), b""
        for hash_id in one.hash_ids[: one.input_tokens // block_tokens]:
            # an id means a prefix, but not every tool that writes traces keeps to it
            prefix = known.setdefault((prefix, hash_id), ContentHash(len(known).to_bytes(8)))
            chain.append(prefix)
        chains.append(chain)
    results = []
    for capacity in capacities:
        cache = PrefixCacheSimulator(capacity, block_tokens)
        pairs = zip(requests, chains, strict=True)
        usages = (cache.serve_hashed(hashes, one.input_tokens) for one, hashes in pairs)
        results.append(SizeResult(capacity, list(counted(usages, advance))))
    return results
