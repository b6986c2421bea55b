"""Runs a program in this process, which then ends as `python` would have ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn
from zipfile import is_zipfile
from zipimport import zipimporter

from ctxreuse.errors import InputFileError, describe


class ProgramEnd(BaseException):
    """The program has ended, with an error or None; for the command's front door alone."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def leave(self) -> NoReturn:
        """End this process as `python` does; errors are shown without the command's frames."""
        error = SystemExit(0) if self.error is None else self.error
        show, trace = sys.excepthook, error.__traceback__

        def show_without_command(kind: Any, raised: BaseException, _: object) -> None:
            raised.__traceback__ = trace
            show(kind, raised, trace)

        sys.excepthook = show_without_command
        raise error


def run_program(program: str, arguments: Sequence[str], *, is_module: bool) -> BaseException | None:
    """Run a script, or a module as `python -m` does; return what it ended with.

    Nothing is put back: what its threads, children and exit functions see is the program's.
    """
    sys.path.insert(0, str(Path.cwd() if is_module else Path(program).resolve().parent))
    main = ModuleType("__main__")
    main.__file__ = str(Path(program).absolute())
    spec = _found_module(program) if is_module else _in_archive(main.__file__)
    if spec is not None:
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__file__ = str(spec.origin)
    sys.argv = [main.__file__ if is_module else program, *arguments]
    sys.modules["__main__"], sys.excepthook = main, sys.__excepthook__
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, f"__{name}__") is None:  # it was closed before `main` put one in its place
            setattr(sys, name, None)
    try:
        if spec is not None and isinstance(spec.loader, InspectLoader):
            code: Any = spec.loader.get_code(spec.name)
        else:
            code = compile(Path(main.__file__).read_bytes(), main.__file__, "exec", 0, True)
        exec(code, main.__dict__)
    except BaseException as error:
        error.__traceback__ = _in_program(error.__traceback__, main)
        return error
    return None


def _in_archive(path: str) -> ModuleSpec | None:
    """Return the main module of a zip file; None for a script."""
    if not is_zipfile(path):
        return None
    sys.path[0] = path
    return zipimporter(path).find_spec("__main__")


def _found_module(name: str) -> ModuleSpec:
    """Return where the module to run is; `find_spec` raises what a package might raise, too."""
    try:
        # the parent that a name has before its first dot would be run, if it is a module
        parent = find_spec(name.partition(".")[0])
        is_there = parent and (parent.submodule_search_locations is not None or "." not in name)
        found = find_spec(name) if is_there else None
        if found is not None and found.submodule_search_locations is not None:
            found = find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = describe(str(error))
        raise InputFileError(f"{describe(name)}: cannot be found as a module: {reason}") from error
    if found is None or not isinstance(found.loader, InspectLoader):
        raise InputFileError(
            f"{describe(name)}: there is no such module to run; name it as for python -m, or a "
            "script without --module"
        )
    return found


def _in_program(trace: TracebackType | None, main: ModuleType) -> TracebackType | None:
    """Return a traceback from the program's first frame on, without those of our recorders."""
    while trace is not None and trace.tb_frame.f_globals is not main.__dict__:
        trace = trace.tb_next
    one = trace
    while one is not None:
        while one.tb_next is not None and _is_recorder(one.tb_next):
            one.tb_next = one.tb_next.tb_next
        one = one.tb_next
    return trace


def _is_recorder(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__"))
    return "ctxreuse" in name and name.endswith(".recording")
