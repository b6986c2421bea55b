"""The `ctxreuse` command and others, run in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from unittest import mock

import ctxreuse.cli


def command(*arguments: str, main: Callable[[], None] = ctxreuse.cli.main) -> str:
    """Run `ctxreuse`, or another command, with these arguments; return what it prints."""
    printed = io.StringIO()
    given = mock.patch.object(sys, "argv", ["ctxreuse", *arguments])
    with given, contextlib.redirect_stdout(printed):
        try:
            main()
        except SystemExit as done:
            if done.code:
                raise RuntimeError(f"ctxreuse {arguments} ended with {done.code}") from done
    return printed.getvalue()
