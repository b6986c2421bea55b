"""The key of the digests that stand in a file: in another file beside it, for its owner only."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from ctxreuse.errors import CtxreuseError, InvalidRequestError

_log = logging.getLogger("ctxreuse")
_SECRET_BYTES = 32
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def key_path(path: Path) -> Path:
    """Return where the key of a file stands."""
    return path.parent / f"{path.name}.key"


def kept_secret(
    path: Path, secret: bytes | None = None, full: type[CtxreuseError] = InvalidRequestError
) -> bytes:
    """Return the key of a file; a new one, or `secret`, where there is none or a damaged one."""
    key = key_path(path)
    secret = secret or secrets.token_bytes(_SECRET_BYTES)
    try:
        if not os.path.lexists(key):
            _keep(key, secret)
        check_own(key, key.lstat())
        kept = key.read_bytes()
        return kept if len(kept) == _SECRET_BYTES else _replaced(path, secret)
    except OSError as raised:
        has_room = raised.errno not in _NO_ROOM
        remedy = "give a path in a folder that exists and may be written"
        raise (InvalidRequestError if has_room else full)(
            f"the key {key} cannot be read or written: {raised.strerror}; "
            f"{remedy if has_room else 'make room on its disk, or in the quota'}"
        ) from raised


def check_own(path: Path, status: os.stat_result) -> None:
    """Refuse a file that others may have written, or may read."""
    if not stat.S_ISREG(status.st_mode):
        fault = "is no file, or a link; name the file itself"
    elif os.name != "posix":  # there, modes say nothing
        return
    elif status.st_uid != os.geteuid():
        fault = "belongs to another user; name a file in a folder of your own"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        fault = "may be read by others, who may know or have written it; delete it, or chmod 600"
    else:
        return
    raise InvalidRequestError(f"{path} {fault}")


def _keep(path: Path, secret: bytes) -> None:
    written = path.parent / f".ctxreuse-{secrets.token_hex(8)}"
    handle = os.open(written, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "wb") as one:
            _write(one, secret)
        with contextlib.suppress(FileExistsError):
            os.link(written, path)  # whole, or not at all
    finally:
        written.unlink()


def _replaced(path: Path, secret: bytes) -> bytes:
    """Write a key in place of a damaged one, unless another process was first; return it."""
    with key_path(path).open("r+b") as file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        kept = file.read()
        if len(kept) == _SECRET_BYTES:
            return kept
        for ending in ("", "-wal", "-shm"):  # SQLite's files are moved together
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{ending}", f"{path}.damaged{ending}")
        file.seek(0)
        file.truncate()
        _write(file, secret)
    _log.warning(
        "the key of %s was damaged, so nobody can read what it held: that is set aside, as "
        ".damaged, and there is a new key. Start all processes that use it again.",
        path,
    )
    return secret


def _write(file: BinaryIO, secret: bytes) -> None:
    file.write(secret)
    file.flush()
    os.fsync(file.fileno())
