"""Running a Python program while what it retrieves or sends is written down."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ctxreuse.errors import InputFileError, MissingExtraError
from ctxreuse.evaluation.traces.recording import TraceRecorder

_SOURCES = {
    "langchain": ("langchain_core", "langchain_ctxreuse.recording"),
    "llamaindex": ("llama_index.core", "llamaindex_ctxreuse.recording"),
    "openai": ("openai", "ctxreuse.evaluation.traces.openai_recording"),
}
"""What has to be installed, and the module whose `recording` writes down what goes by."""

RETRIEVAL = ("langchain", "llamaindex")
"""Sources that see blocks as such; from what an OpenAI client sends they have to be read."""


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
        arguments: What it finds in `sys.argv` behind its name.
        recorder: Where to write.
        sources: "langchain", "llamaindex", "openai"; none are the retrievers of those frameworks
            that are installed.
        is_module: Whether `program` is a module, as for `python -m`.

    Raises:
        InputFileError: If there is no such script.
        MissingExtraError: If a source, or each of them, is not installed.
    """
    if not is_module and not Path(program).is_file():
        raise InputFileError(f"{program}: there is no such script; for a module give --module")
    installed = [name for name, (package, _) in _SOURCES.items() if _is_installed(package)]
    for name in sources:
        if name not in installed:
            raise MissingExtraError(f"recording from {name}", name)
    chosen = sources or [name for name in RETRIEVAL if name in installed]
    if not chosen:
        raise MissingExtraError("recording a program", "langchain")
    before, path = sys.argv, list(sys.path)
    with ExitStack() as exits:
        for name in chosen:
            exits.enter_context(import_module(_SOURCES[name][1]).recording(recorder))
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


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False
