"""What an engine's prefix cache holds according to its own events; no hash is recomputed."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, cast

from ctxreuse.cache.kv_events.block_tree import (
    BlockHash,
    BlockTree,
    Name,
    PathEnd,
    PromptBlocks,
    block_link,
)
from ctxreuse.cache.kv_events.event_stream import BlocksRemoved, BlocksStored, CacheEvent
from ctxreuse.cache.simulator import token_array
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap
from ctxreuse.planner import ReusePlanner

_MOST_GROUPS = 64
_MOST_TOKENS = 8_000_000  # tokens of prompts that have not been judged, 8 bytes each


class StateGroup:
    """The latest blocks of layers that keep states: sliding windows, recurrent layers (window 1).

    An engine names a prefix alike in all groups, whatever their block sizes: the blocks of a path
    through the tree of a group with full attention are looked up here by their names.
    """

    def __init__(self, size: int, window: int, most: int) -> None:
        self.size = size
        # how many blocks in a row a prompt needs that goes on behind them
        self.reach = max(1, -(-(window - 1) // size))
        self._most = most
        self._copies: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def stored(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Add copies of blocks; return those that have to go."""
        for key in hashes:
            self._copies[key] = self._copies.get(key, 0) + 1
        gone = list(islice(self._copies, max(0, len(self._copies) - self._most)))
        for key in gone:
            del self._copies[key]
        return gone

    def removed(self, key: BlockHash) -> bool:
        """Take a copy of a block out; return whether that was the last one."""
        copies = self._copies.get(key, 0) - 1
        if copies > 0:
            self._copies[key] = copies
        return copies == 0 and self._copies.pop(key) > 0

    def clear(self) -> None:
        """Drop all blocks."""
        self._copies.clear()

    def readable(self, path: Sequence[PathEnd], ends: Collection[int]) -> set[int]:
        """Return the ends, in tokens, behind which these layers can go on; of those given."""
        found, row = set[int](), 0
        for key, end in path:
            if end % self.size:
                continue
            row = row + 1 if key in self._copies else 0
            if row >= self.reach or (row and row * self.size == end):
                found.add(end)
        return found.intersection(ends)


class EngineBlocks:
    """Mirrors an engine's cache blocks, and says how much of a prompt the engine holds.

    Blocks are found by their tokens and their parent. A prompt is held up to where all groups of
    layers can go on with it. What is not certain, after a late start, counts as not held.
    """

    def __init__(self, max_blocks: int = 500_000) -> None:
        self._max_blocks = max_blocks
        self._trees: dict[int, BlockTree] = {}
        self._states: dict[int, StateGroup] = {}
        self._touched: set[Name] = set()  # followed, and a state before their end is gone
        self._knows_salts = False
        self._looked_up: set[Name] = set()  # followed, and looked up as they would be now

    def __len__(self) -> int:
        return sum(len(group) for group in self._groups())

    @property
    def parts(self) -> dict[str, PartSize]:
        """How many blocks are remembered, and how many may be."""
        return {"cache_blocks": PartSize(len(self), self._max_blocks)}

    @property
    def block_size(self) -> int:
        """Tokens of the smallest block that was stored; 0 before that."""
        return min((tree.size for tree in self._trees.values()), default=0)

    def stored(self, event: BlocksStored) -> bool:
        """Note stored blocks; return whether they could be used."""
        hashes, parent, token_ids, size, extra_keys, group, whole_prompts, window = event
        extras = [None] * len(hashes) if extra_keys is None else extra_keys
        rest = len(token_ids) - len(hashes) * size  # of the prompt's blocks that are not kept
        if size < 1 or len(extras) != len(hashes) or rest < 0 or rest % size:
            return False
        known = self._trees.keys() | self._states.keys()
        if group not in known and len(known) == _MOST_GROUPS:
            return False
        if rest or not whole_prompts or group in self._states:
            self._store_states(group, hashes, size, window)
            return True
        if group not in self._trees:
            self._trees[group] = BlockTree(self._max_blocks)
            for tree in self._trees.values():
                tree.keep(self._max_blocks // len(self._trees))
        tokens = token_array(token_ids)
        links = [
            block_link(tokens[number * size : (number + 1) * size], extra)
            for number, extra in enumerate(extras)
        ]
        if any(extras) and not self._knows_salts:
            self._knows_salts = True
            self._looked_up.clear()
        return self._trees[group].stored(hashes, parent, links, size, bool(self._states))

    def _store_states(
        self, group: int, hashes: Sequence[BlockHash], size: int, window: int
    ) -> None:
        self._trees.pop(group, None)
        states = self._states.get(group)
        if states is None or states.size != size:
            states = self._states[group] = StateGroup(size, window, self._max_blocks)
        for block_hash in states.stored(hashes):
            self._touch(states, block_hash)

    def _touch(self, states: StateGroup, block_hash: BlockHash) -> None:
        for tree in self._trees.values():
            self._touched.update(tree.names_near(block_hash, states.reach * states.size))

    def removed(self, block_hashes: Sequence[BlockHash], group: int = 0) -> None:
        """Note removed blocks; an unknown one drops all that was only implied."""
        tree, states = self._trees.get(group), self._states.get(group)
        for block_hash in block_hashes:
            if tree is not None:
                tree.removed(block_hash)
            if states is not None and states.removed(block_hash):
                self._touch(states, block_hash)

    def cleared(self) -> None:
        """Note that the engine has dropped everything."""
        for group in self._groups():
            group.clear()

    def follow(
        self,
        name: Name,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        lora: str | None = None,
        goes_on: bool = False,
    ) -> int:
        """Let `take_lowered` tell when less of a prompt is held; return how many tokens are now."""
        # an engine that has never named a salt does not tell blocks of different salts apart
        salts = () if cache_salt is None or not self._knows_salts else (cache_salt,)
        adapters = () if lora is None else (lora,)
        prompt = PromptBlocks(token_array(token_ids), adapters + salts, adapters)
        goes_on = goes_on and name in self._looked_up
        self._looked_up.add(name)
        for tree in self._trees.values():
            tree.attach(name, prompt, goes_on=goes_on)
        return self._held_by(name)

    def tell_below(self, name: Name, tokens: int) -> None:
        """Let `take_lowered` tell only when less than this is held of a followed prompt."""
        self._looked_up.discard(name)
        for tree in self._trees.values():
            tree.tell_below(name, tokens)

    def unfollow(self, name: Name) -> None:
        """Stop following a prompt."""
        self._looked_up.discard(name)
        for tree in self._trees.values():
            tree.detach(name)

    def take_lowered(self) -> dict[Name, int]:
        """Return the prompts of which less may be held than at the last call, and how much is."""
        names, self._touched = self._touched, set()
        for tree in self._trees.values():
            names.update(tree.lowered)
            tree.lowered = {}
        return {name: self._held_by(name) for name in names}

    def _groups(self) -> list[BlockTree | StateGroup]:
        return [*self._trees.values(), *self._states.values()]

    def _held_by(self, name: Name) -> int:
        if not self._states:  # then nobody asks for the way
            return min((tree.held_by(name) for tree in self._trees.values()), default=0)
        return self._readable([tree.path_of(name) for tree in self._trees.values()])

    def _readable(self, paths: Sequence[list[PathEnd]]) -> int:
        """Return up to where all groups can go on with a prompt that goes through such blocks."""
        path = min(paths, key=len, default=[])
        ends = {end for _, end in path}
        for states in self._states.values():
            ends = states.readable(path, ends)
        return max(ends, default=0)


_RequestName: TypeAlias = tuple[str, str | int]  # a tenant, and the id of a request of its


@dataclass(slots=True)
class SentRequest:
    """A prompt that was sent, with what is needed to find it in the engine's cache."""

    request_id: str | int
    tenant: str
    token_ids: array[int]
    block_ends: list[int]  # in tokens
    cache_salt: str | None
    lora: str | None
    since: float  # seconds

    @property
    def name(self) -> _RequestName:
        """What tells it from other tenants' requests."""
        return self.tenant, self.request_id


@dataclass(slots=True)
class _Held:
    name: _RequestName
    shared_ends: list[int]  # of each block, where its last whole engine block ends
    blocks: int

    def within(self, tokens: int) -> int:
        """Return how many blocks are held if the engine holds a number of tokens."""
        return bisect_right(self.shared_ends, tokens) if tokens else 0


class RecordedRequests:
    """Requests that wait to be judged; threads may share it. Excess ones are evicted."""

    def __init__(self, planner: ReusePlanner, max_requests: int) -> None:
        self.planner = planner
        self.max_requests = max_requests
        self.are_expected = False  # whether anybody will record any
        self._lock = ForkSafeLock(self.forget)
        self.forget()

    def forget(self) -> None:
        """Let no request wait."""
        self._waiting: TenantLRUMap[str | int, SentRequest] = TenantLRUMap(
            self.max_requests,
            max_weight=_MOST_TOKENS,
            weight_of=lambda prompt: len(prompt.token_ids),
        )

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def parts(self) -> dict[str, PartSize]:
        """How many wait, of how many tokens, and how many may."""
        with self._lock:
            waiting = self._waiting
            return {"unjudged_requests": waiting.size, "unjudged_tokens": waiting.weight_size}

    def add(self, prompt: SentRequest) -> None:
        """Let a request wait; an earlier one of the same tenant and id is replaced."""
        self.are_expected = True
        with self._lock:
            gone = self._waiting.put(prompt.tenant, prompt.request_id, prompt)
        for tenant, request_id, one in gone:
            if one is prompt or one.name != prompt.name:
                self.planner.evict([request_id], tenant)

    def waiting(self) -> dict[_RequestName, SentRequest]:
        """Return those that wait, tenant by tenant."""
        with self._lock:
            return {prompt.name: prompt for prompt in self._waiting.values()}

    def remove(self, prompt: SentRequest) -> None:
        """Let a request wait no more, unless it is recorded again."""
        with self._lock:
            if self._waiting.of(prompt.tenant).peek(prompt.request_id) is prompt:
                self._waiting.pop(*prompt.name)


class HeldRequests:
    """Judges answered requests when the engine holds their prompts, or after `settle_s` seconds."""

    def __init__(self, recorded: RecordedRequests, blocks: EngineBlocks, settle_s: float) -> None:
        self.recorded = recorded
        self._planner = recorded.planner
        self._blocks = blocks
        self._settle_s = settle_s
        self._new: dict[_RequestName, SentRequest] = {}  # that are looked for
        self._held: TenantLRUMap[str | int, _Held] = TenantLRUMap(recorded.max_requests)

    @property
    def followed(self) -> int:
        """How many requests are followed."""
        return len(self._held)

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        return {"followed_requests": self._held.size, **self.recorded.parts, **self._blocks.parts}

    def apply(self, event: CacheEvent) -> bool:
        """Apply an event; return whether it could be used."""
        if isinstance(event, BlocksStored):
            return self._blocks.stored(event)
        if isinstance(event, BlocksRemoved):
            self._blocks.removed(event.block_hashes, event.group)
        else:
            self.clear()
        return True

    def clear(self) -> None:
        """Empty the index: the engine holds nothing any more, or it is unknown what."""
        self.recorded.forget()
        for name in [*self._new, *(one.name for one in self._held.values())]:
            self._forget(name)
        self._blocks.cleared()
        self._planner.evict_tokens(self._planner.statistics().tokens)

    def settle(self, now: float) -> None:
        """Judge new requests, and trim those of which less is held than before."""
        waiting = self.recorded.waiting()
        for name in [name for name, one in self._new.items() if waiting.get(name) is not one]:
            self._forget(name)
        for followed, tokens in self._blocks.take_lowered().items():
            tenant, request_id = cast("_RequestName", followed)
            held = self._held.of(tenant).peek(request_id)
            if held is not None:
                self._trim(held, held.within(tokens))
        for prompt in waiting.values():
            self._look_for(prompt, now)

    def _look_for(self, prompt: SentRequest, now: float) -> None:
        if prompt.name not in self._new:
            self._forget(prompt.name)  # an earlier one of this name
            self._new[prompt.name] = prompt
        salt, lora = prompt.cache_salt, prompt.lora
        tokens = self._blocks.follow(
            prompt.name, prompt.token_ids, cache_salt=salt, lora=lora, goes_on=True
        )
        size = self._blocks.block_size
        is_whole = tokens > 0 and len(prompt.token_ids) - tokens < size
        if is_whole or now - prompt.since >= self._settle_s:
            self.recorded.remove(prompt)
            del self._new[prompt.name]
            ends = [end // size * size if size else end for end in prompt.block_ends]
            held = _Held(prompt.name, ends, len(ends))
            gone = self._held.put(*held.name, held)
            self._trim(held, held.within(tokens))
            for tenant, request_id, _ in gone:
                self._forget((tenant, request_id))
                self._planner.evict([request_id], tenant)

    def _trim(self, held: _Held, blocks: int) -> None:
        """Trim a request to the blocks that are held, and ask for the loss of the last of them."""
        if blocks < held.blocks:
            held.blocks = blocks
            tenant, request_id = held.name
            self._planner.trim(request_id, blocks, tenant)
        if held.blocks:
            self._blocks.tell_below(held.name, max(1, held.shared_ends[held.blocks - 1]))
        else:
            self._forget(held.name)

    def _forget(self, name: _RequestName) -> None:
        self._new.pop(name, None)
        self._held.pop(*name)
        self._blocks.unfollow(name)
