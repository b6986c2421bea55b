"""Runs a program in this process, which then ends as `python` would have ended."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from ctxreuse.errors import InputFileError, describe


class ProgramEnd(BaseException):
    """The program has ended; for the command's front door alone."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def leave(self) -> NoReturn:
        """End this process as `python` does; errors are shown without the command's frames."""
        show, trace = sys.excepthook, self.error.__traceback__

        def show_without_command(kind: Any, raised: BaseException, _: object) -> None:
            raised.__traceback__ = trace
            show(kind, raised, trace)

        sys.excepthook = show_without_command
        raise self.error


def run_program(program: str, arguments: Sequence[str], *, is_module: bool) -> BaseException:
    """Run a script, or a module as `python -m` does; return what it ended with."""
    # nothing is put back: what its threads, children and exit functions see is the program's
    sys.path.insert(0, str(Path.cwd() if is_module else Path(program).resolve().parent))
    main: Any = ModuleType("__main__")
    main.__file__, main.__builtins__ = str(Path(program).absolute()), builtins
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
        if spec is not None:
            code = main.__loader__.get_code(spec.name)
        else:
            code = compile(Path(main.__file__).read_bytes(), main.__file__, "exec", 0, True)
        exec(code, main.__dict__)
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace and trace.tb_next
        _leave_recorders_out(error)
        return error
    return SystemExit(0)


def _in_archive(path: str) -> ModuleSpec | None:
    """Return the main module of a zip file; None for a script."""
    importer = get_importer(path)
    found = importer.find_spec("__main__") if importer is not None else None
    if found is not None:
        sys.path[0] = path
    return found


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
    if found is None or not hasattr(found.loader, "get_code"):
        raise InputFileError(
            f"{describe(name)}: there is no such module to run; name it as for python -m, or a "
            "script without --module"
        )
    return found


def _leave_recorders_out(error: BaseException) -> None:
    """Leave the frames of our recorders out of an error, and of those that it has come from."""
    waiting: list[BaseException | None] = [error]
    known: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        trace = one.__traceback__
        while trace is not None:
            while trace.tb_next is not None and _is_recorder(trace.tb_next):
                trace.tb_next = trace.tb_next.tb_next
            trace = trace.tb_next
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += one.__cause__, one.__context__


def _is_recorder(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__"))
    return "ctxreuse" in name and name.endswith(".recording")
