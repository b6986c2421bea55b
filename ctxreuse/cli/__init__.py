"""The `ctxreuse` command; without the extra `cli` it says what to install."""

from __future__ import annotations

import sys
from typing import Any

from ctxreuse.errors import CtxreuseError, MissingExtraError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command; errors that the user can mend go to standard error, exit code 2."""
    try:
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("the command ctxreuse", "cli") from error
        from ctxreuse.cli.command_line import app

        app()
    except CtxreuseError as error:
        print(f"ctxreuse: {error}", file=sys.stderr)
        sys.exit(2)


def __getattr__(name: str) -> Any:
    """Import the Typer application, which needs the extra, when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ctxreuse.cli.command_line import app

    return app
