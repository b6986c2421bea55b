"""Files that are written whole or not at all, for their owner only; and files that are read."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeAlias

from ctxreuse.context.checks import checked_kind
from ctxreuse.errors import InputFileError, describe

FilePath: TypeAlias = str | os.PathLike[str]

_REMEDIES = {
    errno.ENOSPC: "make room, or name a file elsewhere",
    errno.EDQUOT: "make room, or name a file elsewhere",
    errno.EFBIG: "allow larger files (ulimit -f), or name a file elsewhere",
    errno.EACCES: "name a file in a folder that you may write to",
    errno.EPERM: "name a file in a folder that you may write to",
    errno.EROFS: "name a file in a folder that you may write to",
    errno.EISDIR: "name a file in it",
    errno.ENOENT: "make its folder first",
    errno.ELOOP: "name the file itself",
    errno.EBADF: "it is closed; lead it to a file or a pipe",
}
_MOST_LINKS = 40
_LARGEST = 2**30
_LONGEST_LINE = 2**28
"""In bytes. A device such as /dev/zero has no end, and a packed line can be much larger."""
_PRIVATE_FOLDER = 0o700


def read_whole(path: FilePath) -> bytes:
    """Return a file's bytes."""
    with file_errors(path, "read"), open(path, "rb") as stream:
        data = stream.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise InputFileError(f"{path}: has more than {_LARGEST:,} bytes; name a smaller file")
    return data


def bounded_lines(stream: IO[bytes], name: object) -> Iterator[bytes]:
    """Yield the lines of an open file; a JSON array that begins it is one line."""
    number, text = 0, b""
    while line := stream.readline(_LONGEST_LINE + 1):
        number += 1
        if not text and (text := line.lstrip()[:1]) == b"[":
            line += stream.read(_LONGEST_LINE + 1 - len(line))
        if len(line) > _LONGEST_LINE:
            raise InputFileError(
                f"{name}:{number}: has more than {_LONGEST_LINE:,} bytes; write a line for each "
                "JSON object"
            )
        yield line


@contextmanager
def file_errors(path: object, done: str) -> Iterator[None]:
    """Name the file in errors of the operating system."""
    try:
        if b"\0" in os.fsencode(str(path)):
            raise OSError(errno.EINVAL, "its name holds a null character")
        yield
    except UnicodeEncodeError as error:
        if error.object != str(path):
            raise
        raise InputFileError(
            f"{describe(path)}: cannot be {done}: no file has such a name"
        ) from None
    except OSError as error:
        reason = error.strerror or describe(str(error))
        remedy = _REMEDIES.get(error.errno or 0) if done == "written" else None
        advice = f"; {remedy}" if remedy else ""
        raise InputFileError(f"{path}: cannot be {done}: {reason}{advice}") from error


@contextmanager
def written_file(path: FilePath) -> Iterator[IO[bytes]]:
    """Open a file that takes its name, and a replaced one's mode, once all of it is written."""
    checked_kind("path", path, (str, os.PathLike), "a path")
    with file_errors(path, "written"):
        if Path(path).exists() and not Path(path).is_file():
            with open(path, "wb") as file:  # it cannot be replaced; a folder is an error
                yield file
            return
        target = behind_links(Path(path))
        # another name, as short as they come: the file's own may be as long as a name can be
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".ctxreuse-")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(handle)  # some file systems tell only now that they are full
            _keep_mode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def check_writable(path: FilePath | None) -> None:
    """Check that `written_file` could write a file, if any, without touching what is there."""
    if path is None:
        return
    checked_kind("path", path, (str, os.PathLike), "a path")
    with file_errors(path, "written"):
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if Path(path).exists() and not Path(path).is_file():
            return  # a device or a pipe
        with tempfile.TemporaryFile(dir=behind_links(Path(path)).parent, prefix=".ctxreuse-"):
            pass


def write_text(path: FilePath, text: str) -> None:
    """Write a text as UTF-8; see `written_file`."""
    encoded = text.encode("utf-8")
    with written_file(path) as file:
        file.write(encoded)


def make_folder(path: FilePath) -> None:
    """Make a folder and those that are missing above it, for their owner only."""
    checked_kind("path", path, (str, os.PathLike), "a path")
    with file_errors(path, "written"):
        folder = Path(path)
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(_PRIVATE_FOLDER, exist_ok=True)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def behind_links(path: Path) -> Path:
    """Return the file that a path leads to, which need not exist."""
    user = os.geteuid() if hasattr(os, "geteuid") else 0  # Windows has no such numbers
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return path
        # the kernel's fs.protected_symlinks does not protect who writes where a link leads
        if path.lstat().st_uid not in (user, 0):
            raise InputFileError(
                f"{path}: is a link of another user, and could lead to any file of yours; "
                "name the file itself, or delete the link"
            )
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _keep_mode(earlier: Path, new: str) -> None:
    """Give a new file the mode of the one that it replaces, if that is of the same user."""
    if not earlier.exists():
        return
    was, now = earlier.stat(), os.stat(new)
    if was.st_uid != now.st_uid:
        return  # its owner may have made it for others to read
    mode = stat.S_IMODE(was.st_mode) & 0o777
    if was.st_gid != now.st_gid:
        try:
            os.chown(new, -1, was.st_gid)
        except PermissionError:
            mode &= ~stat.S_IRWXG  # they are another group's
    os.chmod(new, mode)
