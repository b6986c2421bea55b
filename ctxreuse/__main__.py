"""The `ctxreuse` command; `python -m ctxreuse` is the same."""

from __future__ import annotations

import sys

from ctxreuse.errors import CtxreuseError, MissingExtraError


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
        print(f"ctxreuse: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


if __name__ == "__main__":
    main()
