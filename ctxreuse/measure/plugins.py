"""The frameworks that `ctxreuse record` listens to: entry points of installed packages.

Each integration registers its own, so that nothing here names one: the framework's name, and a
function from a `TraceRecorder` to a context in which everything that the framework's retrievers
find is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from ctxreuse.errors import MissingExtraError

RECORDERS = "ctxreuse.recorders"


class NotInstalledError(Exception):
    """The framework that an integration is for is not installed."""


def registered() -> dict[str, EntryPoint]:
    """Return the entry points by name, sorted."""
    found = sorted(entry_points(group=RECORDERS), key=lambda one: one.name)
    return {one.name: one for one in found}


@contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Load what an entry point names in this context; raise what is broken, not missing, as it is.

    Raises:
        NotInstalledError: A framework is missing.
    """
    try:
        yield
    except ImportError as error:
        # an integration says itself which extra it needs; the cause names the package
        missing = error.__cause__ if isinstance(error, MissingExtraError) else error
        if not isinstance(missing, ModuleNotFoundError) or not missing.name:
            raise
        if _is_installed(missing.name):
            raise
        raise NotInstalledError(f"{missing.name} is not installed") from error


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False
