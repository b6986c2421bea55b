"""A prefix cache that counts whole context blocks: fast, and without a tokenizer.

Prompts are sequences of context blocks with a weight each; a block is served if it and everything
before it is cached. The last blocks of the least recently used prompt go first. There are no engine
blocks, labels or questions here: this is the measure of the papers and of most comparisons.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

from ctxreuse.cache.usage import CacheUsage
from ctxreuse.context.blocks import BlockKey, text_digest
from ctxreuse.index.radix_tree import ContextIndex


class BlockLevelCache:
    """Serves prompts from a prefix tree of context blocks with least-recently-used eviction.

    Args:
        capacity_tokens: What the cache holds; None is unlimited.
    """

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self._index = ContextIndex(capacity_tokens, max_nodes=2**62)
        self._clock = count(1)

    def serve(
        self, blocks: Sequence[BlockKey], tokens: Sequence[int], group: Hashable = None
    ) -> CacheUsage:
        """Run one prompt.

        Args:
            blocks: The prompt's context blocks in order.
            tokens: Each block's tokens.
            group: Prompts of different groups (system text, salt) share nothing.
        """
        now = next(self._clock)
        root = self._index.root(group)
        inserted = self._index.insert(root, blocks, tokens, now, now)
        return CacheUsage(sum(tokens), sum(tokens[: inserted.blocks_before]))


def block_key(name: str) -> BlockKey:
    """Return a key for a block that is known by name only, as in a plan file."""
    return BlockKey(text_digest(name))
