"""Which blocks came together of late, so are likely to come together again."""

from __future__ import annotations

from collections.abc import Iterable

from ctxreuse.context.blocks import BlockKey


class Cooccurrence:
    """Which blocks came together in the last `window` requests of one tenant."""

    def __init__(self, window: int = 1024, max_entries: int = 500_000) -> None:
        self._window = window
        self._max_entries = max_entries
        self._requests: list[tuple[BlockKey, ...]] = [()] * window
        self._next = 0
        self._oldest = 0
        self.entries = 0  # blocks that are remembered, all requests together
        self._members: dict[BlockKey, int] = {}  # the requests that hold a block, as a bit set

    def add(self, context: Iterable[BlockKey]) -> None:
        """Remember a request, and forget the oldest where the bounds ask for it."""
        slot = self._next % self._window
        if self._requests[slot]:
            self._forget(slot)
        blocks = tuple(context)
        bit = 1 << slot
        members = self._members
        for key in blocks:
            members[key] = members.get(key, 0) | bit
        self._requests[slot] = blocks
        self.entries += len(blocks)
        self._next += 1
        self._oldest = max(self._oldest, self._next - self._window)
        while self.entries > self._max_entries and self._oldest < self._next:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Forget the oldest request, if there is one."""
        if self._oldest < self._next:
            self._forget(self._oldest % self._window)
            self._oldest += 1

    def members(self, blocks: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Return the bit sets of those blocks that are remembered, as they are now."""
        members = self._members
        return {key: members[key] for key in blocks if key in members}

    def _forget(self, slot: int) -> None:
        members = self._members
        keep = ~(1 << slot)
        blocks = self._requests[slot]
        for key in blocks:
            left = members[key] & keep
            if left:
                members[key] = left
            else:
                del members[key]
        self.entries -= len(blocks)
        self._requests[slot] = ()
