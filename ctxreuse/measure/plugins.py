"""What integrations offer to measurements: entry points of installed packages.

Each integration registers its own, so that nothing here names one. The groups are:

`ctxreuse.recorders`: the framework's name, and a function from a `TraceRecorder` to a context in
which everything that the framework's retrievers find is recorded.

`ctxreuse.retrievers`: the method by which the framework's retrievers are called with a query, and a
function from one thing of the list that it returns to a `ContextBlock`.

`ctxreuse.baselines`: a policy's name, with dots for blanks, and a function without arguments. It
returns a function from a request's blocks, best first, to the same blocks in the framework's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from ctxreuse.errors import MissingExtraError

RECORDERS = "ctxreuse.recorders"
RETRIEVERS = "ctxreuse.retrievers"
BASELINES = "ctxreuse.baselines"


class NotInstalledError(Exception):
    """What an integration is for is not installed; the cause says what that is."""

    def __init__(self, module: str) -> None:
        self.package = module.replace("_", "-").replace(".", "-")
        super().__init__(f"{module} is not installed")


def registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted."""
    return {one.name: one for one in sorted(entry_points(group=group), key=lambda one: one.name)}


@contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Load what an entry point names in this context."""
    try:
        yield
    except ImportError as error:
        # an integration says itself which extra it needs; the cause names the package
        missing = error.__cause__ if isinstance(error, MissingExtraError) else error
        if not isinstance(missing, ModuleNotFoundError) or not missing.name:
            raise
        if _is_installed(missing.name):
            raise
        raise NotInstalledError(missing.name) from error


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False
