"""Trimming the planner's index to what the engine holds of each request's prompt."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

from ctxreuse.cache.kv_events.engine_blocks import EngineBlocks
from ctxreuse.cache.kv_events.wire_format import BlocksRemoved, BlocksStored, CacheEvent
from ctxreuse.planner import ReusePlanner


@dataclass(slots=True)
class SentRequest:
    """A prompt that was sent, with what is needed to find it in the engine's cache.

    Attributes:
        request_id: The plan's request id.
        token_ids: The prompt's tokens.
        block_ends: At which token each context block ends.
        cache_salt: The salt it was sent with.
        lora: The adapter it was for.
        since: When it was recorded, in seconds.
    """

    request_id: str | int
    token_ids: array[int]
    block_ends: list[int]
    cache_salt: str | None
    lora: str | None
    since: float


@dataclass(slots=True)
class _Held:
    """A request whose prompt is followed.

    `shared_ends` says for each block where the last of the engine's blocks ends that lies within
    it: the next one holds the beginning of what follows, so no other prompt can use it.
    """

    shared_ends: list[int]
    blocks: int

    def within(self, tokens: int) -> int:
        """Return how many blocks are held if the engine holds a number of tokens."""
        return bisect_right(self.shared_ends, tokens) if tokens else 0


class HeldRequests:
    """Follows the prompts of answered requests through the engine's cache events.

    A request is judged first when the engine holds all of its prompt, or when its events must have
    come; until then it counts as held. From then on it is trimmed whenever less is held. A prompt
    that is stored again after that is another request's, whose plan has put it into the index.

    Args:
        planner: Whose index is trimmed.
        blocks: The engine's blocks.
        max_requests: How many requests are followed; the oldest are then taken out of the index,
            because their eviction would go unnoticed.
        settle_s: Seconds after which a request's events must have come.
    """

    def __init__(
        self, planner: ReusePlanner, blocks: EngineBlocks, max_requests: int, settle_s: float
    ) -> None:
        self._planner = planner
        self._blocks = blocks
        self._max_requests = max_requests
        self._settle_s = settle_s
        self._new: OrderedDict[str | int, SentRequest] = OrderedDict()
        self._held: OrderedDict[str | int, _Held] = OrderedDict()

    @property
    def unsettled(self) -> int:
        """How many requests have not been judged."""
        return len(self._new)

    @property
    def followed(self) -> int:
        """How many requests are followed."""
        return len(self._held)

    def add(self, prompt: SentRequest) -> None:
        """Follow a request; an earlier one of the same id is replaced."""
        self._forget(prompt.request_id)
        self._new[prompt.request_id] = prompt
        if len(self._new) > self._max_requests:
            request_id, _ = self._new.popitem(last=False)
            self._planner.evict([request_id])

    def apply(self, event: CacheEvent) -> bool:
        """Apply an event; return whether it could be used."""
        if isinstance(event, BlocksStored):
            return self._blocks.stored(
                event.block_hashes,
                event.parent_hash,
                event.token_ids,
                event.block_size,
                event.extra_keys,
                event.group,
                whole_prompts=event.whole_prompts,
            )
        if isinstance(event, BlocksRemoved):
            self._blocks.removed(event.block_hashes, event.group)
        else:
            self.clear()
        return True

    def clear(self) -> None:
        """Empty the index: the engine holds nothing any more, or it is unknown what."""
        for request_id in [*self._new, *self._held]:
            self._forget(request_id)
        self._blocks.cleared()
        self._planner.evict_tokens(self._planner.statistics().tokens)

    def settle(self, now: float) -> None:
        """Judge new requests, and trim those of which less is held than before.

        Args:
            now: Seconds, on the clock of `SentRequest.since`.
        """
        for request_id, tokens in self._blocks.take_lowered().items():
            held = self._held.get(request_id)
            if held is not None:
                self._trim(request_id, held, held.within(tokens))
        for prompt in list(self._new.values()):
            tokens = self._blocks.follow(
                prompt.request_id, prompt.token_ids, cache_salt=prompt.cache_salt, lora=prompt.lora
            )
            size = self._blocks.block_size
            is_whole = tokens > 0 and len(prompt.token_ids) - tokens < size
            if is_whole or now - prompt.since >= self._settle_s:
                del self._new[prompt.request_id]
                ends = [end // size * size if size else end for end in prompt.block_ends]
                held = self._held[prompt.request_id] = _Held(ends, len(ends))
                self._trim(prompt.request_id, held, held.within(tokens))
        while len(self._held) > self._max_requests:
            request_id = next(iter(self._held))
            self._forget(request_id)
            self._planner.evict([request_id])

    def _trim(self, request_id: str | int, held: _Held, blocks: int) -> None:
        if blocks >= held.blocks:
            return
        held.blocks = blocks
        self._planner.trim(request_id, blocks)
        if not blocks:
            self._forget(request_id)

    def _forget(self, request_id: str | int) -> None:
        self._new.pop(request_id, None)
        self._held.pop(request_id, None)
        self._blocks.unfollow(request_id)
