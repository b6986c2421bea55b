"""Entries of a shared log as bytes: keyed digests and numbers, never a text.

An entry is a header (version, kind, writer, number, uid, tenant), what its kind holds, and a
checksum, so that a damaged or a newer one is told from one of ours. Numbers are little-endian.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from ctxreuse.context.blocks import BlockKey
from ctxreuse.errors import CtxreuseError
from ctxreuse.planning.sharing import Entry, LostEntry, SentEntry

VERSION = 2
_SENT, _LOST = 1, 2
_HEADER = struct.Struct("<BB8sQ16s16s")
_SENT_HEAD = struct.Struct("<???16sI")
_BLOCKS = struct.Struct("<q")
_CHECK = struct.Struct("<I")
_DIGEST = 16
_MOST_BLOCKS = 100_000


class UnreadableEntryError(CtxreuseError):
    """An entry of a shared log is damaged, or was written by a newer version."""


class Written(NamedTuple):
    """An entry as it was read.

    Attributes:
        writer: 8 bytes that name the planner that wrote it.
        number: Its place among those of its writer: one that comes again is known by it.
        entry: The entry.
    """

    writer: bytes
    number: int
    entry: Entry


def encode(writer: bytes, number: int, entry: Entry) -> bytes:
    """Return an entry as bytes: about 80, and 24 for each block that was sent.

    Args:
        writer: 8 bytes that name this planner.
        number: Its place among those of the writer; higher than any before, below 2**64.
        entry: The entry.
    """
    is_sent = isinstance(entry, SentEntry)
    kind = _SENT if is_sent else _LOST
    parts = [_HEADER.pack(VERSION, kind, writer, number, entry.uid, entry.tenant)]
    if isinstance(entry, SentEntry):
        size = len(entry.keys)
        told = entry.is_learnt, entry.is_labelled, entry.system is not None
        parts.append(_SENT_HEAD.pack(*told, entry.system or b"", size))
        parts += entry.keys
        parts.append(struct.pack(f"<{size}I", *(min(one, 2**32 - 1) for one in entry.weights)))
        parts.append(struct.pack(f"<{size}I", *entry.ranks))
    else:
        parts.append(_BLOCKS.pack(-1 if entry.blocks is None else entry.blocks))
    body = b"".join(parts)
    return body + _CHECK.pack(zlib.crc32(body))


def decode(written: bytes) -> Written:
    """Return an entry that was written by `encode`.

    Raises:
        UnreadableEntryError: it is damaged, or of another version.
    """
    if not written:
        raise UnreadableEntryError(
            "the log holds an entry that no planner with its key has written"
        )
    try:
        return _decode(written)
    except (struct.error, ValueError, TypeError) as error:
        raise UnreadableEntryError(f"a log entry of {len(written)} bytes is damaged") from error


def _decode(written: bytes) -> Written:
    body, check = written[: -_CHECK.size], written[-_CHECK.size :]
    version, kind, writer, number, uid, tenant = _HEADER.unpack_from(body)
    if version != VERSION:
        raise UnreadableEntryError(
            f"a log entry has version {version}; this process reads {VERSION}: use one version "
            "of ctxreuse in all processes that share a log"
        )
    if _CHECK.unpack(check)[0] != zlib.crc32(body):
        raise ValueError("checksum")
    at = _HEADER.size
    if kind == _LOST:
        [blocks] = _BLOCKS.unpack(body[at:])
        return Written(writer, number, LostEntry(uid, tenant, None if blocks < 0 else blocks))
    if kind != _SENT:
        raise ValueError("kind")
    is_learnt, is_labelled, has_system, system, size = _SENT_HEAD.unpack_from(body, at)
    at += _SENT_HEAD.size
    end = at + size * _DIGEST
    if size > _MOST_BLOCKS or len(body) != end + 8 * size:
        raise ValueError("length")
    keys = tuple([BlockKey(body[n : n + _DIGEST]) for n in range(at, end, _DIGEST)])
    numbers = struct.unpack_from(f"<{2 * size}I", body, end)
    weights, ranks = numbers[:size], numbers[size:]
    if len(set(keys)) < size or sorted(ranks) != list(range(size)) or 0 in weights:
        raise ValueError("no permutation")
    told = system if has_system else None, keys, weights, ranks, is_learnt, is_labelled
    return Written(writer, number, SentEntry(uid, tenant, *told))
