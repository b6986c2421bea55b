"""Runs a Python program and records what it retrieves or sends."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

from ctxreuse.context.checks import checked_choice
from ctxreuse.errors import InputFileError, MissingExtraError
from ctxreuse.evaluation.plugins import (
    RECORDERS,
    NotInstalledError,
    naming_what_is_missing,
    registered,
)
from ctxreuse.evaluation.traces import openai_recording
from ctxreuse.evaluation.traces.recording import TraceRecorder

_Recording: TypeAlias = Callable[[TraceRecorder], AbstractContextManager[object]]

PROMPTS = "openai"
"""The source that reads blocks from what OpenAI clients send; the others see what is retrieved."""


def run_recorded(
    program: str,
    arguments: Sequence[str],
    recorder: TraceRecorder,
    sources: Sequence[str] = (),
    *,
    is_module: bool = False,
) -> None:
    """Run a program as `python` would, in this process.

    Args:
        program: A script's path, or a module's name.
        arguments: Its arguments: `sys.argv` without the first.
        recorder: Writes it.
        sources: "openai", or names of frameworks whose integrations record; where empty, all
            frameworks that are installed.
        is_module: Whether `program` is a module, as for `python -m`.

    Raises:
        InputFileError: There is no such script.
        InvalidRequestError: There is no such source.
        MissingExtraError: A source is not installed; or none is, where none is named.
    """
    if not is_module and not Path(program).is_file():
        raise InputFileError(f"{program}: there is no such script; for a module give --module")
    recordings = [_recording(name) for name in sources] or list(_installed_frameworks())
    if not recordings:
        raise MissingExtraError("recording a program", "langchain")
    before, path = sys.argv, list(sys.path)
    with ExitStack() as exits:
        for recording in recordings:
            exits.enter_context(recording(recorder))
        try:
            sys.argv = [program, *arguments]
            if is_module:
                sys.path.insert(0, "")
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(program).resolve().parent))
                runpy.run_path(program, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = before, path


def _recording(source: str) -> _Recording:
    frameworks = registered(RECORDERS)
    checked_choice("source", source, [*frameworks, PROMPTS])
    if source == PROMPTS:
        return openai_recording.recording
    try:
        with naming_what_is_missing():
            recording: _Recording = frameworks[source].load()
            return recording
    except NotInstalledError as error:
        raise MissingExtraError(f"recording from {source}", source) from error


def _installed_frameworks() -> Iterator[_Recording]:
    for entry in registered(RECORDERS).values():
        with suppress(NotInstalledError), naming_what_is_missing():
            yield entry.load()
