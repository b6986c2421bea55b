"""Entries of a shared log as bytes: version, checksum, keyed digests and numbers, never a text."""

from __future__ import annotations

import math
import struct
import zlib

from ctxreuse.context.blocks import BlockKey
from ctxreuse.errors import CtxreuseError
from ctxreuse.memory.sent_log import EditEntry, LostEntry, SentEntry, ToldEntry

VERSION = 7
_SENT, _LOST, _EDIT = 1, 2, 4
_HEADER = struct.Struct("<BB8sQ16s16s")
_SENT_HEAD = struct.Struct("<????d16sIII")
_BLOCKS = struct.Struct("<q")
_CHECK = struct.Struct("<I")
CHECK_BYTES = _CHECK.size
_DIGEST = 16
_MOST_BLOCKS = 100_000
_LONGEST_EDIT = 1_000_000
_MOST = 2**32 - 1


class UnreadableEntryError(CtxreuseError):
    """An entry of a shared log is damaged, or was written by a newer version."""


def encode(writer: bytes, number: int, entry: ToldEntry) -> bytes:
    """Return an entry as bytes: about 80, and 24 for each block that was sent."""
    if isinstance(entry, SentEntry):
        size, marks = len(entry.keys), entry.marks or ()
        told = entry.is_labelled, entry.system is not None, entry.time_s is not None, entry.is_alone
        front = entry.time_s or 0.0, entry.system or b"", min(entry.front_tokens, _MOST)
        kind = _SENT
        parts = [
            _SENT_HEAD.pack(*told, *front, len(marks), size),
            *entry.keys,
            struct.pack(f"<{size}I", *(min(one or 1, _MOST) for one in entry.tokens)),
            struct.pack(f"<{size}I", *entry.ranks),
            struct.pack(f"<{len(marks)}I", *marks),
        ]
    elif isinstance(entry, LostEntry):
        kind = _LOST
        parts = [_BLOCKS.pack(-1 if entry.blocks is None else entry.blocks)]
    else:
        kind, parts = _EDIT, [entry.edit]
    name = entry.request_id, bytes.fromhex(entry.tenant)
    header = _HEADER.pack(VERSION, kind, writer, number, *name)
    body = b"".join([header, *parts])
    return body + _CHECK.pack(zlib.crc32(body))


def decode(written: bytes) -> tuple[bytes, int, ToldEntry]:
    """Return the planner that wrote an entry, its number there, by which it is known, and it."""
    if not written:
        raise UnreadableEntryError(
            "the log holds an entry that no planner with its key has written"
        )
    try:
        return _decode(written)
    except (struct.error, ValueError, TypeError) as error:
        raise UnreadableEntryError(f"a log entry of {len(written)} bytes is damaged") from error


def _decode(written: bytes) -> tuple[bytes, int, ToldEntry]:
    body, check = written[: -_CHECK.size], written[-_CHECK.size :]
    version, kind, writer, number, uid, digest = _HEADER.unpack_from(body)
    if version != VERSION:
        raise UnreadableEntryError(
            f"a log entry has version {version}, and this process reads {VERSION}: use one version "
            "of ctxreuse in all processes that share a log"
        )
    if _CHECK.unpack(check)[0] != zlib.crc32(body):
        raise ValueError("checksum")
    rest, tenant = body[_HEADER.size :], digest.hex()
    entry: ToldEntry
    if kind == _LOST:
        [blocks] = _BLOCKS.unpack(rest)
        entry = LostEntry(uid, tenant, None if blocks < 0 else blocks)
    elif kind == _SENT:
        entry = _sent(uid, tenant, rest)
    elif kind == _EDIT and len(rest) <= _LONGEST_EDIT:
        entry = EditEntry(uid, tenant, rest)
    else:
        raise ValueError("kind")
    return writer, number, entry


def _sent(uid: bytes, tenant: str, body: bytes) -> SentEntry:
    *told, time_s, system, front_tokens, marked, size = _SENT_HEAD.unpack_from(body)
    is_labelled, has_system, has_time, is_alone = told
    end = _SENT_HEAD.size + size * _DIGEST
    if size > _MOST_BLOCKS or marked > size + 1 or len(body) != end + 8 * size + 4 * marked:
        raise ValueError("length")
    keys = tuple([BlockKey(body[n : n + _DIGEST]) for n in range(_SENT_HEAD.size, end, _DIGEST)])
    numbers = struct.unpack_from(f"<{2 * size + marked}I", body, end)
    tokens, ranks, marks = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
    if len(set(keys)) < size or sorted(ranks) != list(range(size)) or 0 in tokens:
        raise ValueError("no permutation")
    if list(marks) != sorted(set(marks)) or (marks and marks[-1] > size):
        raise ValueError("marks")
    if not math.isfinite(time_s) or time_s < 0 or (time_s and not has_time):
        raise ValueError("time")
    return SentEntry(
        request_id=uid,
        tenant=tenant,
        system=system if has_system else None,
        keys=keys,
        tokens=tokens,
        ranks=ranks,
        is_labelled=is_labelled,
        front_tokens=front_tokens,
        marks=marks,
        time_s=time_s if has_time else None,
        is_alone=is_alone,
    )
