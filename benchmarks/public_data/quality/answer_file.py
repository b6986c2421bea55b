"""Answers kept by prompt, so that a benchmark that was stopped goes on where it was."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ctxreuse.context.files import file_errors, make_folder
from ctxreuse.context.thoughts import without_thoughts
from ctxreuse.errors import InputFileError
from ctxreuse.measure.traces.json_lines import JsonLine, read_lines

if sys.platform != "win32":
    import fcntl

_PRIVATE_FILE = 0o600
_WITHOUT_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
"""What file systems say that have no locks."""
_BEGINNING = b'{"key": "'


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A model's answer to one prompt."""

    text: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    seconds: float = 0.0
    is_cut_off: bool | None = None

    @property
    def said(self) -> str:
        """The answer, without what the model thought before it."""
        return without_thoughts(self.text)


class AnswerFile:
    """A file of answers, a JSON object a line; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.earlier = 0
        """Answers that were there when it was opened."""
        self._answers: dict[str, KeptAnswer] = {}
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Read what is there."""
        make_folder(self.path.parent)
        with file_errors(self.path, "written"):
            number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _PRIVATE_FILE)
            self._stream = open(number, "r+b", buffering=0)  # closed in __exit__
        try:
            self._keep_others_out()
            self._drop_what_was_cut_off()
            for line in read_lines(str(self.path)):
                self._answers[line.get("key", (str,))] = _read(line)
        except BaseException:
            self._stream.close()
            raise
        self.earlier = len(self._answers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        assert self._stream is not None
        self._stream.close()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> KeptAnswer | None:
        """Return the answer that is kept under a key, if there is one."""
        return self._answers.get(key)

    def keep(self, key: str, answer: KeptAnswer) -> None:
        """Write an answer down."""
        assert self._stream is not None
        line = (json.dumps({"key": key, **asdict(answer)}, ensure_ascii=True) + "\n").encode(
            "ascii"
        )
        with file_errors(self.path, "written"):
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._answers[key] = answer

    def _keep_others_out(self) -> None:
        """Lock the file until it is closed, or this process ends."""
        assert self._stream is not None
        if sys.platform == "win32":
            return
        with file_errors(self.path, "written"):
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputFileError(
                    f"{self.path}: another run is writing it; wait for its end, or name another "
                    "file with --answers"
                ) from None
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise

    def _drop_what_was_cut_off(self) -> None:
        """Cut off a last line without an end, which a process was killed in the middle of."""
        assert self._stream is not None
        with file_errors(self.path, "read"):
            data = self._stream.read()
        end = data.rfind(b"\n") + 1
        cut_off = data[end : end + len(_BEGINNING)]
        if not cut_off:
            return
        if not _BEGINNING.startswith(cut_off):
            raise InputFileError(
                f"{self.path}: is no file of answers; name another one, which may be missing"
            )
        with file_errors(self.path, "written"):
            self._stream.truncate(end)


def _read(line: JsonLine) -> KeptAnswer:
    return KeptAnswer(
        text=line.get("text", (str,)),
        prompt_tokens=line.natural("prompt_tokens", None),
        cached_tokens=line.natural("cached_tokens", None),
        seconds=_seconds(line),
        is_cut_off=line.get("is_cut_off", (bool,), None),
    )


def _seconds(line: JsonLine) -> float:
    seconds: Any = line.get("seconds", (int, float), 0.0)
    return float(seconds)
