"""The prefix cache of vLLM v1, token by token.

Follows `vllm/v1/core`: a prompt is cut into blocks of `block_size` tokens; a full block is known by
the hash of its tokens chained over its parent; the longest known chain of blocks is served, but
never the last token of the prompt, which must be computed to get logits, so a fully cached prompt
still computes its last block. Finished requests put their full blocks at the end of a free queue,
last block first, and blocks are taken from its front: least recently used first, and of one request
the last blocks first. A full block keeps its content in the free queue until it is taken. The block
that a request leaves part-filled can serve nobody, so it is taken before any block with content.

One request runs at a time. Two physical blocks may hold the same content, as in vLLM, which does
not merge them.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import NewType

from ctxreuse.cache.usage import CacheUsage
from ctxreuse.errors import InvalidRequestError, describe

ContentHash = NewType("ContentHash", bytes)
"""A full block's tokens, chained over everything before them."""

BlockNumber = NewType("BlockNumber", int)
"""A block's content at one place in the cache; a block that is taken again has a new number."""


class PrefixCacheSimulator:
    """What an engine with this cache would serve from it.

    Args:
        capacity_tokens: Size of the cache; whole blocks of it are used. None is unlimited.
        block_size: Tokens of a block.
        null_block: Whether the engine keeps one block back as padding, as vLLM does.

    Raises:
        InvalidRequestError: If a number is out of range.

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
    ) -> None:
        if not isinstance(block_size, int) or block_size < 1:
            raise InvalidRequestError(
                f"block_size must be an integer from 1, not {describe(block_size)}"
            )
        if capacity_tokens is not None and (
            not isinstance(capacity_tokens, int) or capacity_tokens < 0
        ):
            raise InvalidRequestError(
                f"capacity_tokens must be an integer from 0 or None, not "
                f"{describe(capacity_tokens)}"
            )
        self.block_size = block_size
        self._block_limit: int | None = None
        if capacity_tokens is not None:
            self._block_limit = max(0, capacity_tokens // block_size - null_block)
        # blocks without content are all alike, so they are only counted
        self._empty: float = math.inf if self._block_limit is None else self._block_limit
        self._numbers = count()
        # blocks with content that no running request holds, the next to be taken first
        self._free: OrderedDict[BlockNumber, None] = OrderedDict()
        self._hash_of: dict[BlockNumber, ContentHash] = {}
        self._blocks_with: dict[ContentHash, OrderedDict[BlockNumber, None]] = {}

    def serve(
        self, tokens: Sequence[int], salt: str = "", *, generated: Sequence[int] = ()
    ) -> CacheUsage:
        """Run one prompt to its end.

        A prompt that does not fit the whole cache is refused by the engine; it counts as computed
        and leaves the cache as it is.

        Args:
            tokens: The prompt's token ids.
            salt: vLLM's `cache_salt`: prompts with different salts share nothing.
            generated: The answer's token ids. They are cached behind the prompt, except for the
                last, which the engine never computes.

        Returns:
            The prompt's tokens, and how many came from the cache.
        """
        size = self.block_size
        computed = [*tokens, *generated[:-1]]
        needed = -(-len(computed) // size)
        if self._block_limit is not None and needed > self._block_limit:
            return CacheUsage(len(tokens), 0)
        hashes = self._content_hashes(computed, salt)
        held: list[BlockNumber] = []
        for content in hashes[: max(0, len(tokens) - 1) // size]:
            copies = self._blocks_with.get(content)
            if copies is None:
                break
            block = next(iter(copies))
            self._free.pop(block, None)
            held.append(block)
        hits = len(held)
        held += [self._take_block() for _ in range(needed - hits)]
        for block, content in zip(held[hits:], hashes[hits:], strict=False):
            self._hash_of[block] = content
            self._blocks_with.setdefault(content, OrderedDict())[block] = None
        for block in reversed(held[: len(hashes)]):
            self._free[block] = None
        self._empty += len(held) - len(hashes)
        return CacheUsage(len(tokens), hits * size)

    def _content_hashes(self, tokens: Sequence[int], salt: str) -> list[ContentHash]:
        """Return the chained hashes of the prompt's full blocks."""
        chain: list[ContentHash] = []
        parent = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            block = array("q", list(tokens[end - self.block_size : end])).tobytes()
            parent = hashlib.blake2b(block, digest_size=16, key=parent).digest()
            chain.append(ContentHash(parent))
        return chain

    def _take_block(self) -> BlockNumber:
        if self._empty:
            self._empty -= 1
        else:
            block, _ = self._free.popitem(last=False)
            self._forget(block)
        return BlockNumber(next(self._numbers))

    def _forget(self, block: BlockNumber) -> None:
        content = self._hash_of.pop(block)
        copies = self._blocks_with[content]
        del copies[block]
        if not copies:
            del self._blocks_with[content]
