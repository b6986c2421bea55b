"""The `ctxreuse` command, run in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from unittest import mock

from ctxreuse.cli import main


def command(*arguments: str) -> str:
    """Run `ctxreuse` with these arguments; return what it prints."""
    printed = io.StringIO()
    given = mock.patch.object(sys, "argv", ["ctxreuse", *arguments])
    with given, contextlib.redirect_stdout(printed):
        try:
            main()
        except SystemExit as done:
            if done.code:
                raise RuntimeError(f"ctxreuse {arguments} ended with {done.code}") from done
    return printed.getvalue()
