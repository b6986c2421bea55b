"""What requests sent, oldest first; what tenants, system texts and blocks are called there."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from ctxreuse.context.blocks import BlockId, BlockKey, encoded, ids_size, text_digest
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap
from ctxreuse.memory.prefix_index import RequestId

Ranks: TypeAlias = tuple[int, ...]
"""An order: the place of each of its blocks as they were retrieved, from 0."""

COMPARED: Final = 256
"""So many prompts before one are compared with it."""
MOST_BLOCK_TOKENS: Final = 2**40
"""Tokens of a block count up to this, so that numbers stay printable."""
_MOST_LINES = 256
_LINES_COMPARED = 128
_MOST_FRONTS = 64
_FEW_PROMPTS = 2
"""So many prompts have to be seen before words in front, and the application's, are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentEntry:
    """All that a request sent, as digests and numbers: no text."""

    request_id: RequestId  # bytes name a request of another planner
    tenant: str  # as the index names it
    system: str | bytes | None = None  # equal for equal texts; so are `tools` and `conversation`
    keys: tuple[BlockKey, ...] = ()  # its blocks in order, as the index names them
    tokens: tuple[int, ...] = ()
    ranks: Ranks = ()
    ids: tuple[BlockId, ...] = ()  # of this planner's own requests
    is_labelled: bool = False
    is_later_turn: bool = False  # a history stands before it: it is nobody else's then
    front_tokens: int = 0  # of tools and system text
    marks: tuple[int, ...] | None = None  # after so many blocks, ascending; None is not known
    time_s: float | None = None  # of any clock
    is_alone: bool = True  # planned by itself: it counts for how likely prefixes come again
    conversation: bytes | None = None
    history: int = 0  # messages in front of it
    after: str | int | None = None  # the request that its history ends with
    model: str = ""
    key: str = ""  # what routes it to a cache
    tools: str | bytes = ""

    @property
    def own_id(self) -> str | int:
        """The id of a request of this planner."""
        assert not isinstance(self.request_id, bytes), "it is another planner's"
        return self.request_id

    @property
    def is_reordered(self) -> bool:
        """Whether its blocks stand in another order than as retrieved."""
        return self.ranks != tuple(range(len(self.ranks)))

    def as_retrieved(self) -> dict[BlockKey, int]:
        """Return the blocks with their tokens in the retriever's order."""
        order = sorted(range(len(self.keys)), key=self.ranks.__getitem__)
        return {self.keys[n]: self.tokens[n] for n in order}


class LostEntry(NamedTuple):
    """A request that the engine dropped from its cache, in whole or from a block on."""

    request_id: RequestId
    tenant: str
    blocks: int | None  # still held, from the first on; None is an eviction of the request


class EditEntry(NamedTuple):
    """How a message was sent, as JSON of digests and numbers; `request_id` names the message."""

    request_id: bytes
    tenant: str
    edit: bytes


Entry: TypeAlias = SentEntry | LostEntry
"""What a log of what was sent holds."""

ToldEntry: TypeAlias = Entry | EditEntry
"""What planners tell each other, and the process that starts next."""


class KeyedDigests:
    """Makes digests that say nothing to who does not have the key."""

    def __init__(self, secret: bytes) -> None:
        # with a key of half a block in front, a block's digest takes one compression
        self._hash = hashlib.blake2s(hashlib.blake2s(secret[:64]).digest(), digest_size=16)

    def keyed(self, name: bytes) -> bytes:
        """Return 16 bytes that stand for a name in all planners that share, and nowhere else."""
        return self.keyed_each((name,))[0]

    def keyed_each(self, names: Iterable[bytes]) -> list[BlockKey]:
        """Return what `keyed` returns for each name; every plan asks for all its blocks."""
        copy, digests = self._hash.copy, list[Any]()
        for name in names:
            digest = copy()
            digest.update(name)
            digests.append(digest.digest())
        return digests


class Sharing(KeyedDigests, ABC):
    """What a planner tells others through, and names things by."""

    @abstractmethod
    def tell(self, entry: ToldEntry) -> None:
        """Tell the others; takes no time, and waits for nobody."""

    @abstractmethod
    def tell_own(self, entry: Entry) -> None:
        """Tell the others of a request, under the name that it has in all planners that share."""


class IndexNames:
    """What stands for tenants, system texts and blocks in the index and in shared logs."""

    def __init__(self, keyed: KeyedDigests | None) -> None:
        self._keyed = keyed

    def tenant(self, tenant: str) -> str:
        """Return under which name a tenant's state is kept."""
        if self._keyed is None:
            return tenant
        return self._keyed.keyed(b"tenant" + encoded(tenant)).hex()

    def message(self, digest: bytes) -> bytes:
        """Return what stands for the digest of a message."""
        return digest if self._keyed is None else self._keyed.keyed(b"message" + digest)

    def sealed(self, message: bytes, text: bytes) -> bytes:
        """Return a text as only those with the key can read it, and from that the text again."""
        if self._keyed is None:
            return text
        blocks = range(-(-len(text) // 16))
        pad = self._keyed.keyed_each([b"seal%d " % n + message + b"%d" % len(text) for n in blocks])
        whole = int.from_bytes(text) ^ int.from_bytes(b"".join(pad)[: len(text)])
        return whole.to_bytes(len(text))

    def system(self, system: str | None) -> bytes | None:
        """Return what stands for a system text: the index keeps its roots for long."""
        if system is None:
            return None
        digest = text_digest(system)
        return digest if self._keyed is None else self._keyed.keyed(b"system" + digest)

    def weights(self, weights: Mapping[BlockKey, int]) -> dict[BlockKey, int]:
        """Return the weights of blocks by their names."""
        assert self._keyed is not None, "without a key they have their own"
        return dict(zip(self._keyed.keyed_each(weights), weights.values(), strict=True))

    def uid(self, tenant: str, request_id: RequestId, begun_behind: bytes) -> bytes:
        """Return 16 bytes that name a request in a file; ids are counted anew in each process."""
        if isinstance(request_id, bytes):
            return request_id
        named = request_name(tenant, request_id)
        return hashlib.blake2b(named, digest_size=16, key=begun_behind).digest()

    def renamed(self, entry: ToldEntry) -> ToldEntry:
        """Return an entry of a planner that takes no digests, by these names."""
        keyed = self._keyed
        assert keyed is not None
        tenant = self.tenant(entry.tenant)
        if isinstance(entry, LostEntry):
            return entry._replace(tenant=tenant)
        if isinstance(entry, EditEntry):
            message = self.message(entry.request_id)
            return EditEntry(message, tenant, self.sealed(message, entry.edit))
        assert not isinstance(entry.system, str)
        system = None if entry.system is None else keyed.keyed(b"system" + entry.system)
        keys = tuple(keyed.keyed_each(entry.keys))
        return replace(entry, tenant=tenant, system=system, keys=keys)


def named_by(entry: Entry, uid: bytes) -> Entry:
    """Return an entry with a name of its request that is the same in any process."""
    if isinstance(entry, LostEntry):
        return entry._replace(request_id=uid)
    return replace(entry, request_id=uid, ids=())


def request_name(tenant: str, request_id: str | int) -> bytes:
    """Return a name of a request that no other one of this planner has."""
    # an integer may have more digits than Python writes in decimal
    shown = f"{request_id:x}" if isinstance(request_id, int) else request_id
    return encoded(f"{tenant} {type(request_id).__name__} {shown}")


_Kept: TypeAlias = tuple[int, int, tuple[Any, ...]]
"""A time, a size, and the entry's values.

Collections of garbage pass over plain tuples of bytes and numbers: a planner holds 100,000.
"""
_FIELDS = tuple(one.name for one in fields(SentEntry))
_values = attrgetter(*_FIELDS)


def _logged(kept: _Kept) -> tuple[int, Entry]:
    time, _, values = kept
    if len(values) == len(_FIELDS):
        return time, SentEntry(**dict(zip(_FIELDS, values, strict=True)))
    return time, LostEntry(*values)


class SentWords:
    """What prompts say around their contexts, and in front of them, as hashes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock(self._forget)
        self._forget()

    def _forget(self) -> None:
        self._prompts: set[int] = set()
        # lines, and the one prompt that had each; 0 for several
        self._lines: LRUMap[int, int] = LRUMap(_MOST_LINES)
        self._fronts: LRUMap[bytes, bool] = LRUMap(_MOST_FRONTS)

    def note(self, prompt: bytes, words: Iterable[str]) -> tuple[list[str], bool]:
        """Note what a named prompt says outside of known texts; return the application's lines.

        They are those of several prompts, or all until two were seen; and whether that is so.
        """
        lines = [line for text in words for line in text.splitlines() if line.strip()]
        name, own = hash(prompt) or 1, list[str]()
        with self._lock:
            if len(self._prompts) <= _FEW_PROMPTS:
                self._prompts.add(name)
            for line in lines[:_LINES_COMPARED]:
                earlier = self._lines.get(hash(line))
                here = name if earlier in (None, name) else 0
                self._lines.put(hash(line), here)
                if not here:
                    own.append(line)
            seen = len(self._prompts)
        return own if seen >= _FEW_PROMPTS else lines, seen <= _FEW_PROMPTS

    def has_new_front(self, front: bytes) -> bool:
        """Note what stands in front of a context; return whether it has not been there before."""
        with self._lock:
            is_new = self._fronts.get(front) is None
            self._fronts.put(front, True)
            return is_new


class SentLog:
    """The latest entries of one tenant; a copy shares the original's, an unpickled one is empty."""

    def __init__(self) -> None:
        self._logged: deque[_Kept] = deque()
        self.edits: LRUMap[bytes, bytes] = LRUMap()  # by message
        self.words: SentWords | None = None  # made where somebody sees the prompts
        self.size = 0

    def add(self, time: int, entry: Entry) -> None:
        """Remember an entry."""
        if isinstance(entry, SentEntry):
            size = max(len(entry.keys), ids_size((*entry.ids, entry.request_id)))
            values = _values(entry)
        else:
            size, values = 1, tuple(entry)
        self._logged.append((time, size, values))
        self.size += size

    def forget_oldest(self) -> None:
        """Forget the oldest entry; there must be one."""
        self.size -= self._logged.popleft()[1]

    def replay(self) -> list[tuple[int, Entry]]:
        """Return what is remembered, with its time, without conversations' later turns."""
        logged = map(_logged, list(self._logged))  # one step: other threads append meanwhile
        return [
            (time, entry)
            for time, entry in logged
            if isinstance(entry, LostEntry) or not entry.is_later_turn
        ]

    def before(self, time: int) -> list[SentEntry]:
        """Return the latest prompts before a time, the latest last."""
        prompts = (
            entry
            for time_then, entry in map(_logged, reversed(list(self._logged)))
            if time_then < time and isinstance(entry, SentEntry)
            if not isinstance(entry.request_id, bytes)  # of those the blocks' ids are not known
        )
        return list(islice(prompts, COMPARED))[::-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> SentLog:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (SentLog, ())


class LoggedPrompt(NamedTuple):
    """A prompt, where it is remembered, and its time there."""

    prompt: SentEntry
    log: SentLog
    time: int
    counted: list[Any]  # where the savings meter counted it, and what

    def earlier(self) -> list[SentEntry]:
        """Return the prompts before it that the log still holds, at most 256."""
        return self.log.before(self.time)


class Cooccurrence:
    """Which blocks came together in the last `window` requests of one tenant."""

    def __init__(self, window: int = 1024, max_entries: int = 500_000) -> None:
        self._window = window
        self._max_entries = max_entries
        self._requests: deque[tuple[BlockKey, ...]] = deque()
        self._next = 0
        self.entries = 0  # blocks that are remembered, all requests together
        self._members: dict[BlockKey, int] = {}  # the requests that hold a block, as a bit set

    def add(self, context: Iterable[BlockKey]) -> None:
        """Remember a request, and forget the oldest where the bounds ask for it."""
        if len(self._requests) == self._window:
            self.forget_oldest()
        blocks = tuple(context)
        bit = 1 << self._next % self._window
        members = self._members
        for key in blocks:
            members[key] = members.get(key, 0) | bit
        self._requests.append(blocks)
        self.entries += len(blocks)
        self._next += 1
        while self.entries > self._max_entries:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Forget the oldest request; there must be one."""
        keep = ~(1 << (self._next - len(self._requests)) % self._window)
        blocks, members = self._requests.popleft(), self._members
        for key in blocks:
            left = members[key] & keep
            if left:
                members[key] = left
            else:
                del members[key]
        self.entries -= len(blocks)

    def members(self, blocks: Iterable[BlockKey]) -> dict[BlockKey, int]:
        """Return the bit sets of those blocks that are remembered, as they are now."""
        members = self._members
        return {key: members[key] for key in blocks if key in members}
