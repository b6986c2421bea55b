"""Prefix caches to compare plans with: vLLM v1's, token by token, and one of context blocks.

`PrefixCacheSimulator` follows `vllm/v1/core`: full blocks are known by the hash of their tokens,
chained over the parent; the longest known chain is served, but never the prompt's last token. Ended
requests put their full blocks at the end of a free queue, last block first, and blocks are taken
from its front. Two blocks may hold the same content. Other than there, a running request gets all
blocks of its answer at the start.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NewType, get_args

from ctxreuse.context.blocks import BlockKey, text_digest
from ctxreuse.context.checks import (
    checked_choice,
    checked_each,
    checked_integer,
    checked_kind,
    checked_list,
    checked_optional_integer,
)
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.memory.prefix_index import Point, PrefixIndex
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules, States

ContentHash = NewType("ContentHash", bytes)
"""A full block's tokens, chained over everything before them."""

BlockNumber = NewType("BlockNumber", int)
"""A block's content at one place in the cache; a block that is taken again has a new number."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Prompt tokens, and how many of them came from the cache: vLLM's `prefix_cache_hits`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that the engine had to compute."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that came from the cache; 0 for no tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: CacheUsage) -> CacheUsage:
        return CacheUsage(
            self.prompt_tokens + other.prompt_tokens, self.cached_tokens + other.cached_tokens
        )

    def __sub__(self, earlier: CacheUsage) -> CacheUsage:
        """Return what came after an earlier reading of the same counters."""
        return CacheUsage(
            self.prompt_tokens - earlier.prompt_tokens, self.cached_tokens - earlier.cached_tokens
        )


@dataclass(frozen=True, slots=True, eq=False)
class RunningPrompt:
    """A running prompt, which holds its blocks."""

    usage: CacheUsage
    _tokens: array[int]
    _hashes: list[ContentHash]
    _held: list[BlockNumber]
    _root: bytes


class PrefixCacheSimulator:
    """What an engine with this cache would serve from it.

    Args:
        capacity_tokens: Size of the cache; whole blocks of it are used. None is unlimited.
        block_size: Tokens of a block.
        null_block: Whether the engine keeps one block back as padding, as vLLM does.
        states: Where prompts can be read: at each full block, or only at the end of an earlier
            prompt and where one parted from another ("junctions"); a window's states take no room.

    Example:
        >>> cache = PrefixCacheSimulator(block_size=4)
        >>> cache.serve(range(10)).cached_tokens
        0
        >>> cache.serve(range(8)).cached_tokens  # fully cached, yet its last block is computed
        4
    """

    def __init__(
        self,
        capacity_tokens: int | None = None,
        block_size: int = 16,
        *,
        null_block: bool = False,
        states: States = "everywhere",
    ) -> None:
        self.block_size = checked_integer("block_size", block_size, 1)
        checked_optional_integer("capacity_tokens", capacity_tokens)
        checked_kind("null_block", null_block, bool, "True or False")
        checked_choice("states", states, get_args(States))
        # the last blocks of prefixes that can be read; None is all
        self._states: set[ContentHash] | None = set() if states == "junctions" else None
        self._block_limit: int | None = None
        if capacity_tokens is not None:
            self._block_limit = max(0, capacity_tokens // block_size - null_block)
        # blocks without content are all alike, so they are only counted
        self._empty: float = math.inf if self._block_limit is None else self._block_limit
        self._last_number = 0
        # blocks with content that no running request holds, the next to be taken first
        self._free: OrderedDict[BlockNumber, None] = OrderedDict()
        self._users: dict[BlockNumber, int] = {}  # how many running requests hold a block
        self._hash_of: dict[BlockNumber, ContentHash] = {}
        self._blocks_with: dict[ContentHash, OrderedDict[BlockNumber, None]] = {}

    def serve(
        self, tokens: Sequence[int], salt: str = "", *, generated: Sequence[int] = ()
    ) -> CacheUsage:
        """Run one prompt to its end.

        A prompt that does not fit the whole cache counts as computed, and leaves the cache as it
        is.

        Args:
            tokens: The prompt's token ids.
            salt: vLLM's `cache_salt`: prompts with different salts share nothing.
            generated: The answer's token ids; all but the last are cached behind the prompt.
        """
        known, answer = token_array(tokens), token_array(generated)
        running = self.start(known, salt, room_for=len(answer))
        if running is None:
            return CacheUsage(len(known), 0)
        self.finish(running, answer)
        return running.usage

    def fits(self, prompt_tokens: int, answer_tokens: int = 0) -> bool:
        """Return whether the whole cache has room for a prompt with its answer, in tokens."""
        checked_integer("prompt_tokens", prompt_tokens)
        checked_integer("answer_tokens", answer_tokens)
        return self._block_limit is None or self._needed(prompt_tokens, answer_tokens) <= (
            self._block_limit
        )

    def start(
        self, tokens: Sequence[int], salt: str = "", *, room_for: int = 0
    ) -> RunningPrompt | None:
        """Let a prompt begin to run beside others, which find its full blocks from now on.

        Args:
            tokens: The prompt's token ids.
            salt: As in `serve`.
            room_for: Tokens of the longest answer, for which blocks are held, too.

        Returns:
            The running prompt, for `finish`; None if the running ones leave it no room.
        """
        tokens = token_array(tokens)
        checked_kind("salt", salt, str, "a string")
        checked_integer("room_for", room_for)
        root = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        hashes = self._content_hashes(tokens, root)
        taken = self._take(hashes, len(tokens), room_for)
        if taken is None:
            return None
        held, cached = taken
        return RunningPrompt(CacheUsage(len(tokens), cached), tokens, hashes, held, root)

    def serve_hashed(self, hashes: Sequence[ContentHash], prompt_tokens: int) -> CacheUsage:
        """Run one prompt to its end that is known by hashes; the answer's blocks are not cached.

        Args:
            hashes: One for each full block, chained over everything before it.
            prompt_tokens: The prompt's length in tokens.
        """
        checked_integer("prompt_tokens", prompt_tokens)
        chain = checked_each("hashes", hashes, bytes, "bytes")
        full_blocks = prompt_tokens // self.block_size
        if len(chain) != full_blocks:
            raise InvalidRequestError(
                f"hashes must be one for each of the {full_blocks:,} full blocks of the prompt, "
                f"not {len(chain):,}"
            )
        known = [ContentHash(one) for one in chain]
        held, cached = self._take(known, prompt_tokens, 0) or ([], 0)
        self._give_back(held)
        return CacheUsage(prompt_tokens, cached)

    def _take(
        self, hashes: list[ContentHash], prompt_tokens: int, room_for: int
    ) -> tuple[list[BlockNumber], int] | None:
        """Take a prompt's blocks; return them and its cached tokens, or None without room."""
        held: list[BlockNumber] = []
        most = max(0, prompt_tokens - 1) // self.block_size
        for content in hashes[:most]:
            copies = self._blocks_with.get(content)
            if copies is None:
                break
            held.append(next(iter(copies)))
        hits = met = len(held)
        if self._states is not None:
            hits = max((n for n in range(1, met + 1) if hashes[n - 1] in self._states), default=0)
            del held[hits:]
        needed = self._needed(prompt_tokens, room_for) - hits
        free = len(self._free) + self._empty - sum(block in self._free for block in held)
        if needed > free:
            return None
        taken = self._hold(held, needed)
        for block, content in zip(taken, hashes[hits:], strict=False):
            self._hash_of[block] = content
            self._blocks_with.setdefault(content, OrderedDict())[block] = None
        if self._states is not None:
            self._states.update(hashes[end - 1] for end in (met, most) if end)
        return held + taken, hits * self.block_size

    def finish(
        self, running: RunningPrompt, generated: Sequence[int] = (), *, uncomputed: int = 0
    ) -> None:
        """End a prompt that `start` returned; call it once.

        Args:
            running: The prompt.
            generated: Its answer's token ids, no more than there is room for.
            uncomputed: Tokens at the prompt's end that were not computed, because it was aborted;
                no other prompt may have begun since `start`.
        """
        checked_kind("running", running, RunningPrompt, "a prompt that start() returned")
        checked_integer("uncomputed", uncomputed)
        generated = token_array(generated)
        held, hashes = running._held, running._hashes
        if uncomputed:
            for block in held[(len(running._tokens) - uncomputed) // self.block_size : len(hashes)]:
                assert self._users[block] == 1, "a prompt has begun on blocks without content"
                self._forget(block)
        if len(generated) > 1:
            computed = running._tokens + generated[:-1]
            root = hashes[-1] if hashes else running._root
            behind = self._content_hashes(computed[len(hashes) * self.block_size :], root)
            assert len(hashes) + len(behind) <= len(held), "the answer has more tokens than room"
            for block, content in zip(held[len(hashes) :], behind, strict=False):
                self._hash_of[block] = content
                self._blocks_with.setdefault(content, OrderedDict())[block] = None
        self._give_back(held)

    def _give_back(self, held: list[BlockNumber]) -> None:
        """Free the blocks that an ended prompt alone held, its last block first."""
        for block in reversed(held):
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._hash_of:
                self._free[block] = None
            else:
                self._empty += 1

    def _needed(self, prompt_tokens: int, answer_tokens: int) -> int:
        return -(-(prompt_tokens + max(0, answer_tokens - 1)) // self.block_size)

    def _content_hashes(self, tokens: array[int], parent: bytes) -> list[ContentHash]:
        chain: list[ContentHash] = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = tokens[end - self.block_size : end].tobytes()
            parent = hashlib.blake2b(block, digest_size=16, key=parent).digest()
            chain.append(ContentHash(parent))
        return chain

    def _hold(self, cached: list[BlockNumber], needed: int) -> list[BlockNumber]:
        """Let a prompt hold cached blocks, and as many new ones as it needs; return these."""
        for block in cached:
            self._free.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        empty = int(min(needed, self._empty))
        self._empty -= empty
        for _ in range(needed - empty):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
        first = self._last_number + 1
        self._last_number += needed
        taken = [BlockNumber(number) for number in range(first, first + needed)]
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def _forget(self, block: BlockNumber) -> None:
        content = self._hash_of.pop(block)
        copies = self._blocks_with[content]
        del copies[block]
        if not copies:
            del self._blocks_with[content]
            if self._states is not None:
                self._states.discard(content)


def token_array(token_ids: Sequence[int]) -> array[int]:
    """Return token ids in a compact form."""
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return token_ids
    try:
        return array("q", list(token_ids))  # a list: bytes would be taken as memory
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"token ids must be integers of at most 64 bits, not {describe(token_ids)}"
        ) from error


class BlockLevelCache:
    """A prefix cache that counts whole context blocks, without engine blocks, labels and questions.

    A block is served if it and all before it is cached; the last blocks of the least recently used
    prompt go first. This is the measure of the papers. Where the rules keep states at junctions
    only, a block is served if a prompt ended or parted from another one behind it.

    Args:
        capacity_tokens: What the cache holds; None is unlimited.
        rules: Those of the cache.
    """

    def __init__(
        self, capacity_tokens: int | None = None, rules: CacheRules = DEFAULT_CACHE
    ) -> None:
        checked_optional_integer("capacity_tokens", capacity_tokens)
        self._rules = checked_kind("rules", rules, CacheRules, "CacheRules")
        self._index = PrefixIndex(capacity_tokens, max_nodes=2**62)
        self._requests = 0

    def serve(
        self, blocks: Sequence[BlockKey], tokens: Sequence[int], group: Hashable = None
    ) -> CacheUsage:
        """Run one prompt.

        Args:
            blocks: The prompt's context blocks in order.
            tokens: Each block's tokens, as many as blocks.
            group: Prompts of different groups (system text, salt) share nothing.
        """
        keys = [BlockKey(one) for one in checked_each("blocks", blocks, bytes, "bytes")]
        lengths = [
            checked_integer("each of tokens", one)
            for one in checked_list("tokens", tokens, "a list of integers")
        ]
        if len(keys) != len(lengths):
            raise InvalidRequestError(
                f"tokens must be one for each of the {len(keys):,} blocks, not {len(lengths):,}"
            )
        checked_kind("group", group, Hashable, "hashable, such as a string or a tuple of strings")
        self._requests += 1
        index, rules = self._index, self._rules
        passed = [] if rules.serves_all else [*index.passed(group, keys)]
        inserted = index.insert(group, keys, lengths, None, self._requests)
        read = inserted.blocks_before
        if not rules.serves_all:
            ends = rules.points((), read, len(keys))
            whole = [(node.point, end) for node, end, is_whole in passed if is_whole]
            read = max((end for point, end in whole if point and point.until > 0), default=0)
            for end, node in index.nodes_to(inserted.end, ends):
                if end in ends:
                    node.point = node.point or Point(end)
                    node.point.keep(0, math.inf)
        return CacheUsage(sum(lengths), sum(lengths[:read]))


def block_key(name: str) -> BlockKey:
    """Return a key for a block that is known by name only, as in a plan file."""
    return BlockKey(text_digest(name))
