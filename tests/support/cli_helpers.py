"""Running the `ctxreuse` command inside a test."""

import io
import re
import sys

import pytest

from ctxreuse.cli import main


@pytest.fixture
def run(monkeypatch, capsys):
    return runner(main, "ctxreuse", monkeypatch, capsys)


def runner(command, name, monkeypatch, capsys):
    """Return a function that runs a command and returns exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as exit_:
            command()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run_command


def words(text):
    """Return the text without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[^\x00-\x7f]", " ", text).split())
