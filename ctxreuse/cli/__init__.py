"""The `ctxreuse` command; without the extra `cli` it says what to install."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from ctxreuse.cli.recorded_program import ProgramEnd
from ctxreuse.context.files import file_errors
from ctxreuse.context.fork_safety import on_demand
from ctxreuse.errors import CtxreuseError, MissingExtraError

__all__ = ["app", "main"]

_BROKEN_PIPE = 128 + 13  # the number of SIGPIPE, which Windows has no name for


def main() -> None:
    """Run the command; errors that the user can mend go to standard error, exit code 2."""
    _replace_closed_streams()
    try:
        _command()
    except ProgramEnd as end:
        program = end
    except BaseException:
        try:
            sys.stderr.flush()
        except OSError:  # what is not taken is lost, else Python would exit with 120 for it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        raise
    program.leave()  # outside, else its error would be shown as one of this one's handling


def _command() -> None:
    try:
        _run()
    except CtxreuseError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            sys.exit(_BROKEN_PIPE)
        with suppress(OSError, ValueError):  # nobody takes it; the exit code says it
            print(f"ctxreuse: {error}", file=sys.stderr)
        sys.exit(2)


def _replace_closed_streams() -> None:
    """Replace closed standard streams: files opened later could get their number."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process runs
    if getattr(sys.stdout, "closed", sys.stdout is None):
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
    if getattr(sys.stderr, "closed", sys.stderr is None):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _run() -> None:
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        raise MissingExtraError("the command ctxreuse", "cli") from error
    from ctxreuse.cli.command_line import app

    try:
        app()
    except (SystemExit, CtxreuseError):  # a command always ends so
        _replace_closed_streams()  # a program that was recorded had none
        try:
            with file_errors("standard output", "written"):
                sys.stdout.flush()
        except CtxreuseError:  # at its own end Python could only print a traceback
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
        raise
    except OSError as error:
        usage_error = typer.BadParameter.__mro__[1]  # Typer has no name for it that it exports
        if isinstance(error.__context__, usage_error):
            sys.exit(2)  # standard error does not take its words
        raise


__getattr__, __dir__ = on_demand(__name__, {"app": "command_line"})
