"""The `ctxreuse` command; without the extra `cli` it says what to install."""

from __future__ import annotations

import os
import sys
from typing import Any

from ctxreuse.context.files import file_errors
from ctxreuse.errors import CtxreuseError, MissingExtraError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command; errors that the user can mend go to standard error, exit code 2."""
    try:
        _run()
    except CtxreuseError as error:
        print(f"ctxreuse: {error}", file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the command ctxreuse", "cli") from error
    from ctxreuse.cli.command_line import app

    try:
        app()
    except (SystemExit, CtxreuseError):  # a command always ends so
        _write_out()
        raise


def _write_out() -> None:
    """Write what is left of the output; at its own end Python could only print a traceback."""
    try:
        with file_errors("standard output", "written"):
            sys.stdout.flush()
    except CtxreuseError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def __getattr__(name: str) -> Any:
    """Import the Typer application, which needs the extra, when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ctxreuse.cli.command_line import app

    return app
