"""Runs a program as `python` would, in this process: its errors are shown, and SIGTERM ends it."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

from ctxreuse.errors import InputFileError, describe


class ProgramCrashError(Exception):
    """The program ended with an error of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the program ended with {type(error).__name__}")
        self.error = error

    def show(self) -> None:
        """Show the error as `python` would, or as the program has asked for in `sys.excepthook`."""
        sys.excepthook(type(self.error), self.error, self.error.__traceback__)


class Terminated(SystemExit):
    """SIGTERM has come."""


def run_program(program: str, arguments: Sequence[str], *, is_module: bool) -> None:
    """Run a script, or a module as `python -m` does."""
    before, path = sys.argv, list(sys.path)
    try:
        sys.argv = [program, *arguments]
        if is_module:
            sys.path.insert(0, "")
            _check_module(program)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
        try:
            _run(program, is_module)
        except Exception as error:
            error.__traceback__ = _in_program(error.__traceback__)
            raise ProgramCrashError(error) from None
    finally:
        sys.argv, sys.path[:] = before, path


def _run(program: str, is_module: bool) -> None:
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    except IndexError as error:
        # runpy puts the first argument back, and the program may have taken all away
        if sys.argv or _last_module(error) != runpy.__name__:
            raise
        if error.__context__ is not None:
            raise error.__context__ from None


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Have SIGTERM unwind what runs inside, then end the process; a forked one ends at once."""
    process = os.getpid()

    def unwind(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next one does not wait for anything
        if os.getpid() != process:
            os.kill(os.getpid(), signal.SIGTERM)
        raise Terminated(128 + number)

    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with suppress(ValueError):  # in a thread, which gets no signals
        if is_free:
            signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except Terminated:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed by the program
                stream.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        if signal.getsignal(signal.SIGTERM) is unwind:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _check_module(name: str) -> None:
    """Check that there is a module to run; `runpy` raises what a program might raise, too."""
    try:
        found = find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = describe(str(error))
        raise InputFileError(f"{describe(name)}: cannot be found as a module: {reason}") from error
    if found is None:
        raise InputFileError(
            f"{describe(name)}: there is no such module to run; name it as for python -m, or a "
            "script without --module"
        )


def _last_module(error: BaseException) -> str | None:
    """Return the name of the module in which an error was raised."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__")


def _in_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first frame on; None where it has none."""
    hidden = (__name__, runpy.__name__)
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in hidden:
        trace = trace.tb_next
    return trace
