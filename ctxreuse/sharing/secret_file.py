"""The key of the digests that stand in a file: in another file beside it, for its owner only."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from ctxreuse.errors import CtxreuseError, InvalidRequestError, describe

_SECRET_BYTES = 32
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def key_path(path: Path) -> Path:
    """Return where the key of a file stands."""
    return path.parent / f"{path.name}.key"


def kept_secret(
    path: Path, secret: bytes | None = None, full: type[CtxreuseError] = InvalidRequestError
) -> bytes:
    """Return the key of a file; a new one, `secret` if given, is kept if there is none."""
    path = key_path(path)
    try:
        if not path.exists():
            _keep(path, secrets.token_bytes(_SECRET_BYTES) if secret is None else secret)
        kept = path.read_bytes()
    except OSError as raised:
        has_room = raised.errno not in _NO_ROOM
        remedy = "give a path in a folder that exists and may be written"
        raise (InvalidRequestError if has_room else full)(
            f"the key {describe(str(path))} cannot be read or written: {raised.strerror}; "
            f"{remedy if has_room else 'make room on its disk, or in the quota'}"
        ) from raised
    if len(kept) != _SECRET_BYTES:
        raise InvalidRequestError(
            f"{describe(str(path))} holds {len(kept)} bytes and no key; delete it and the file "
            "beside it, and start all processes that use them again"
        )
    return kept


def _keep(path: Path, secret: bytes) -> None:
    written = path.parent / f".ctxreuse-{secrets.token_hex(8)}"
    handle = os.open(written, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "wb") as one:
            one.write(secret)
        with contextlib.suppress(FileExistsError):
            os.link(written, path)  # whole, or not at all
    finally:
        written.unlink()
