"""The errors of workflows; each is a `CtxreuseError`.

    WorkflowError
    ├── GraphError          a graph, or a part of one, cannot be run; found before it runs
    ├── StateKeyError       the state lacks a key
    ├── VisitLimitError     a run reached a node more often than the graph allows
    ├── RouterError         a router failed, or returned a target that it may not
    ├── StageError          a node failed; its own error is the cause
    ├── DeadlineError       a run did not end in time
    └── EngineClosedError   the workflow engine was closed

Every message names the node or key that is wrong, and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable

from ctxreuse.errors import CtxreuseError

_LONGEST_NAME = 60


class WorkflowError(CtxreuseError):
    """Base class of the errors of workflows."""


class GraphError(WorkflowError, ValueError):
    """A graph, or a part of one, cannot be run as it is."""


class StateKeyError(WorkflowError, KeyError):
    """A `key` was read that no node has written, or an input is missing or unknown."""

    __str__ = Exception.__str__  # KeyError shows its message quoted, as if it were a key

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class _NodeError(WorkflowError, RuntimeError):
    """A run failed at a `node`; at which of its visits, counted from 1, if that is known."""

    def __init__(self, message: str, node: str = "", visit: int = 0) -> None:
        super().__init__(message)
        self.node = node
        self.visit = visit


class VisitLimitError(_NodeError):
    """An edge led to `node` once more than its `max_visits`, and it has no `otherwise`."""


class RouterError(_NodeError):
    """A router behind `node` raised (its error is the cause), or returned a target that it may not.

    `node` is empty if several led to nodes that cannot run side by side.
    """


class StageError(_NodeError):
    """A visit of a node failed; its own error is the cause."""


class DeadlineError(WorkflowError, TimeoutError):
    """A run did not end before its deadline."""


class EngineClosedError(WorkflowError, RuntimeError):
    """The workflow engine was closed before the run, or while it was under way."""


def quoted(names: Iterable[object]) -> str:
    """Return names for an error message: quoted, shortened, with commas between them."""
    texts = map(repr, names)
    most = _LONGEST_NAME
    return ", ".join(one if len(one) <= most else one[: most - 1] + "…" for one in texts) or "none"
