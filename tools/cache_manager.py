"""Runs prompts through vLLM's own KVCacheManager, with groups of layers of several kinds.

Reads a JSON array of cases from standard input. A case has `groups` (kinds of `_SPECS`), `block`
(tokens), `blocks` (of the cache), `prompts` (token ids) and `asked` (for each prompt, the earlier
ones to look up before it). Writes an array for each case: of every prompt the tokens it hits, those
that the earlier ones would hit, and the cache events of its run as base64 of a published message.
For the Python that has vLLM.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

_CHUNK = 2_048
_LONGEST = 32_768
_HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
_SPECS: dict[str, Callable[[int], KVCacheSpec]] = {
    "full": lambda block: FullAttentionSpec(block_size=block, **_HEADS),
    "window": lambda block: SlidingWindowSpec(block_size=block, sliding_window=512, **_HEADS),
    "short window": lambda block: SlidingWindowSpec(block_size=block, sliding_window=99, **_HEADS),
    "recurrent": lambda block: MambaSpec(
        block_size=block,
        shapes=((1, 16 * block),),  # as large as a block of the others
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    ),
}


class Cache:
    """A cache that nobody else uses."""

    def __init__(self, kinds: Sequence[str], block: int, blocks: int) -> None:
        self._block = block
        self._is_recurrent = "recurrent" in kinds
        self._manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[
                    KVCacheGroupSpec([f"layer {number}"], _SPECS[kind](block))
                    for number, kind in enumerate(kinds)
                ],
                prefix_cache_retention_interval=0 if len(kinds) > 1 else None,
            ),
            max_model_len=_LONGEST,
            scheduler_block_size=block,
            hash_block_size=block,
            max_in_flight_tokens=_LONGEST,
            enable_kv_cache_events=True,
        )
        self._requests = 0

    def _request(self, tokens: list[int]) -> Request:
        self._requests += 1
        hasher = get_request_block_hasher(self._block, sha256)
        one_token = SamplingParams(max_tokens=1)
        return Request(f"{self._requests}", tokens, one_token, None, block_hasher=hasher)

    def found(self, tokens: list[int]) -> int:
        """Return how many tokens a prompt would hit."""
        return int(self._manager.get_computed_blocks(self._request(tokens))[1])

    def run(self, tokens: list[int]) -> int:
        """Run a prompt to its end, chunk by chunk; return how many tokens it hit."""
        request = self._request(tokens)
        blocks, hit, request.shared_prefix_boundary = self._manager.get_computed_blocks(request)
        start = int(hit)
        while start < len(tokens):
            end = self._chunk_end(len(tokens), start, request.shared_prefix_boundary)
            self._manager.new_step_starts()
            found = (hit, blocks) if start == hit else ()
            assert self._manager.allocate_slots(request, end - start, *found), "no room"
            request.num_computed_tokens = start = end
        self._manager.free(request)
        return int(hit)

    def _chunk_end(self, tokens: int, start: int, junction: int) -> int:
        end = min(tokens, start + _CHUNK)
        if not self._is_recurrent:
            return end
        # as the scheduler cuts them: states are kept where a chunk ends
        end = end if end == tokens else end // self._block * self._block
        stops = ((tokens - 1) // self._block * self._block, junction)
        return min((stop for stop in stops if start < stop < end), default=end)

    def events(self) -> str:
        """Return what happened in the cache since the last call."""
        message = msgspec.msgpack.encode([0.0, self._manager.take_events()])
        return base64.b64encode(message).decode()


def results(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what happens in a case, prompt by prompt."""
    cache = Cache(case["groups"], case["block"], case["blocks"])
    told = []
    for prompt, earlier in zip(case["prompts"], case["asked"], strict=True):
        found = [cache.found(case["prompts"][number]) for number in earlier]
        told.append({"hit": cache.run(prompt), "found": found, "events": cache.events()})
    return told


def main() -> None:
    """Run the cases that standard input names."""
    init_none_hash(sha256)
    json.dump([results(case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
