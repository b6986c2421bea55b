"""Entries of a shared log as bytes: keyed digests and numbers, never a text.

Each has the lowest version that can hold it, so that processes of an older version read what they
understand, and a checksum, so that a damaged one is known.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.errors import CtxreuseError
from ctxreuse.planning.sharing import LostEntry, Marking, RatioEntry, SavedEntry, SentEntry
from ctxreuse.planning.token_ratio import TokenRatio

VERSION = 3
_WITHOUT_MARKS = 2
_SENT, _LOST, _RATIO = 1, 2, 3
_HEADER = struct.Struct("<BB8sQ16s16s")
_SENT_HEAD = struct.Struct("<???16sI")
_BLOCKS = struct.Struct("<q")
_MARKING_HEAD = struct.Struct("<??dII")
_RATIO_BODY = struct.Struct("<?16s6d")
_CHECK = struct.Struct("<I")
_DIGEST = 16
_MOST_BLOCKS = 100_000
_MOST = 2**32 - 1
_NO_UID = bytes(16)


class UnreadableEntryError(CtxreuseError):
    """An entry of a shared log is damaged, or was written by a newer version."""


class ReadEntry(NamedTuple):
    """An entry as it was read."""

    writer: bytes  # names the planner
    number: int  # its place among those of its writer, by which a repeat is known
    entry: SavedEntry


def needed_version(entry: SavedEntry) -> int:
    """Return the lowest version of a reader that understands an entry."""
    is_new = isinstance(entry, RatioEntry) or (
        isinstance(entry, SentEntry) and entry.marking is not None
    )
    return VERSION if is_new else _WITHOUT_MARKS


def encode(writer: bytes, number: int, entry: SavedEntry) -> bytes:
    """Return an entry as bytes: about 80, and 24 for each block that was sent."""
    version = needed_version(entry)
    if isinstance(entry, SentEntry):
        kind, uid, parts = _SENT, entry.uid, _sent_parts(entry)
    elif isinstance(entry, LostEntry):
        kind, uid = _LOST, entry.uid
        parts = [_BLOCKS.pack(-1 if entry.blocks is None else entry.blocks)]
    else:
        kind, uid = _RATIO, _NO_UID
        parts = [_RATIO_BODY.pack(entry.system is not None, entry.system or b"", *entry.learnt)]
    header = _HEADER.pack(version, kind, writer, number, uid, entry.tenant)
    body = b"".join([header, *parts])
    return body + _CHECK.pack(zlib.crc32(body))


def _sent_parts(entry: SentEntry) -> list[bytes]:
    size, marking = len(entry.keys), entry.marking
    told = entry.is_learnt, entry.is_labelled, entry.system is not None
    parts = [_SENT_HEAD.pack(*told, entry.system or b"", size), *entry.keys]
    parts.append(struct.pack(f"<{size}I", *(min(one, _MOST) for one in entry.weights)))
    parts.append(struct.pack(f"<{size}I", *entry.ranks))
    if marking is not None:
        marks, now, tokens = marking.marks, marking.now, min(marking.system_tokens, _MOST)
        told_marks = now is not None, marking.is_alone, now or 0.0, tokens, len(marks)
        parts.append(_MARKING_HEAD.pack(*told_marks))
        parts.append(struct.pack(f"<{len(marks)}I", *marks))
    return parts


def decode(written: bytes) -> ReadEntry:
    """Return an entry that was written by `encode`."""
    if not written:
        raise UnreadableEntryError(
            "the log holds an entry that no planner with its key has written"
        )
    try:
        return _decode(written)
    except (struct.error, ValueError, TypeError) as error:
        raise UnreadableEntryError(f"a log entry of {len(written)} bytes is damaged") from error


def _decode(written: bytes) -> ReadEntry:
    body, check = written[: -_CHECK.size], written[-_CHECK.size :]
    version, kind, writer, number, uid, tenant = _HEADER.unpack_from(body)
    if version not in (_WITHOUT_MARKS, VERSION):
        raise UnreadableEntryError(
            f"a log entry has version {version}; this process reads {_WITHOUT_MARKS} and "
            f"{VERSION}: use one version of ctxreuse in all processes that share a log"
        )
    if _CHECK.unpack(check)[0] != zlib.crc32(body):
        raise ValueError("checksum")
    rest = body[_HEADER.size :]
    entry: SavedEntry
    if kind == _LOST:
        [blocks] = _BLOCKS.unpack(rest)
        entry = LostEntry(uid, tenant, None if blocks < 0 else blocks)
    elif kind == _RATIO:
        has_system, system, *learnt = _RATIO_BODY.unpack(rest)
        entry = RatioEntry(tenant, system if has_system else None, tuple(learnt))
        TokenRatio.restored(learnt)
    elif kind == _SENT:
        entry = _sent(uid, tenant, rest)
    else:
        raise ValueError("kind")
    if needed_version(entry) != version:
        raise ValueError("version")
    return ReadEntry(writer, number, entry)


def _sent(uid: bytes, tenant: bytes, body: bytes) -> SentEntry:
    is_learnt, is_labelled, has_system, system, size = _SENT_HEAD.unpack_from(body)
    at = _SENT_HEAD.size
    end = at + size * _DIGEST
    if size > _MOST_BLOCKS or len(body) < end + 8 * size:
        raise ValueError("length")
    keys = tuple([BlockKey(body[n : n + _DIGEST]) for n in range(at, end, _DIGEST)])
    numbers = struct.unpack_from(f"<{2 * size}I", body, end)
    weights, ranks = numbers[:size], numbers[size:]
    if len(set(keys)) < size or sorted(ranks) != list(range(size)) or 0 in weights:
        raise ValueError("no permutation")
    marking = _marking(body[end + 8 * size :], size)
    told = system if has_system else None, keys, weights, ranks, is_learnt, is_labelled
    return SentEntry(uid, tenant, *told, marking)


def _marking(body: bytes, size: int) -> Marking | None:
    """Return how a prompt of so many blocks was marked, if the rest of its entry says it."""
    if not body:
        return None
    has_now, is_alone, now, system_tokens, number = _MARKING_HEAD.unpack_from(body)
    if number > size + 1 or len(body) != _MARKING_HEAD.size + 4 * number:
        raise ValueError("length")
    marks = struct.unpack_from(f"<{number}I", body, _MARKING_HEAD.size)
    if list(marks) != sorted(set(marks)) or (marks and marks[-1] > size):
        raise ValueError("marks")
    if not math.isfinite(now) or now < 0 or (now and not has_now):
        raise ValueError("now")
    return Marking(marks, system_tokens, now if has_now else None, is_alone)
