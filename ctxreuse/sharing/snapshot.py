"""A file of what a planner has sent of late, keyed and versioned; the key stands beside it."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from ctxreuse.context.files import behind_links, read_whole, written_file
from ctxreuse.errors import InputFileError
from ctxreuse.memory.sent_log import ToldEntry
from ctxreuse.sharing.entries import UnreadableEntryError, decode, encode
from ctxreuse.sharing.secret_file import check_own, key_path

VERSION = 5
_MARK = b"ctxreuse sent\n"
_VERSION = struct.Struct("<H")
_LENGTH = struct.Struct("<I")
_CHECK = 32
_WRITER = bytes(8)


def write_snapshot(path: Path, secret: bytes, entries: Sequence[ToldEntry]) -> None:
    """Write entries into a file that is there as a whole or not at all, with mode 0600."""
    pieces = [_MARK + _VERSION.pack(VERSION)]
    for number, entry in enumerate(entries, 1):
        written = encode(_WRITER, number, entry)
        pieces += [_LENGTH.pack(len(written)), written]
    data = b"".join(pieces)
    with written_file(path) as file:
        file.write(data)
        file.write(_checksum(data, secret))


def read_snapshot(path: Path) -> tuple[bytes, Sequence[ToldEntry]]:
    """Return the key of a file that was written by `write_snapshot`, and its entries."""
    try:
        check_own(path, behind_links(path).stat())
    except FileNotFoundError:
        raise
    except OSError:
        pass  # `read_whole` names the file and the reason
    data = read_whole(path)
    remedy = f"delete it, or put back {path} and {key_path(path)} as they were written together"
    if not data.startswith(_MARK) or len(data) < len(_MARK) + _VERSION.size + _CHECK:
        raise InputFileError(f"{path}: is no file that ReusePlanner.save has written; {remedy}")
    [version] = _VERSION.unpack_from(data, len(_MARK))
    if version != VERSION:
        raise InputFileError(
            f"{path}: has version {version}, and this ctxreuse reads {VERSION}; use the version "
            "that has written it, or delete it"
        )
    key = key_path(path)
    if not os.path.lexists(key):
        raise InputFileError(f"{path}: its key {key} is missing; {remedy}")
    check_own(key, key.lstat())
    secret = read_whole(key)[: hashlib.blake2b.MAX_KEY_SIZE]
    end = len(data) - _CHECK
    if not hmac.compare_digest(_checksum(memoryview(data)[:end], secret), data[end:]):
        raise InputFileError(f"{path}: is damaged, or was written with another key; {remedy}")
    try:
        return secret, [entry for _, _, entry in map(decode, _entries(data, end))]
    except (UnreadableEntryError, struct.error) as error:
        raise InputFileError(f"{path}: is damaged; {remedy}") from error


def _entries(data: bytes, end: int) -> Iterator[bytes]:
    at = len(_MARK) + _VERSION.size
    while at < end:
        [length] = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield data[at : min(at + length, end)]
        at += length


def _checksum(data: bytes | memoryview, secret: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECK, key=secret, person=b"ctxreuse sent").digest()
