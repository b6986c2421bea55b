"""What planners of one engine tell each other: what each has sent, and in which order.

What a planner knows follows from the sequence of what was sent. Planners that share that sequence
choose orders that do not contradict each other, whichever process serves a request.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from ctxreuse.context.blocks import BlockKey


class SentEntry(NamedTuple):
    """A context that was sent; conversations' later turns are nobody else's.

    Attributes:
        uid: 16 bytes that name the request among those of all planners.
        tenant: The digest of its tenant.
        system: The digest of its system text; None without one.
        keys: Its blocks' digests, as sent.
        weights: The tokens of each block, at least 1.
        ranks: Each block's place as it was retrieved, from 0.
        is_learnt: Whether continuations were tried on it, as on each request that arrives alone.
    """

    uid: bytes
    tenant: bytes
    system: bytes | None
    keys: tuple[BlockKey, ...]
    weights: tuple[int, ...]
    ranks: tuple[int, ...]
    is_learnt: bool

    def as_retrieved(self) -> dict[BlockKey, int]:
        """Return the blocks with their weights in the retriever's order."""
        order = sorted(range(len(self.keys)), key=self.ranks.__getitem__)
        return {self.keys[n]: self.weights[n] for n in order}


class LostEntry(NamedTuple):
    """A request that the engine dropped from its cache, in whole or from a block on.

    Attributes:
        uid: As in `SentEntry`.
        tenant: As in `SentEntry`.
        blocks: How many of its first blocks are still held; None is an eviction of the request.
    """

    uid: bytes
    tenant: bytes
    blocks: int | None


Entry: TypeAlias = SentEntry | LostEntry


class Sharing(Protocol):
    """What a planner tells others through, and names things by."""

    def keyed(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name in all planners that share, and nowhere else."""

    def own(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name of this planner in all that share."""

    def tell(self, entry: Entry) -> None:
        """Tell the others; takes no time, and waits for nobody."""
