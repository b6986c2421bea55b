"""The errors of workflows.

    WorkflowError
    ├── GraphError          a graph that cannot be run, or a part of one; found before it runs
    ├── StateKeyError       a key that the state lacks
    ├── VisitLimitError     a run that went to a node more often than the graph allows
    ├── RouterError         a router that failed, or named what it may not lead to
    ├── StageError          a node that failed; its own error is the cause
    ├── DeadlineError       a run that did not end in time
    └── EngineClosedError   an engine that was asked to run something after it was closed

Each is a `CtxreuseError`. Every message names the node or key at fault and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable

from ctxreuse.errors import CtxreuseError

_LONGEST_NAME = 60


class WorkflowError(CtxreuseError):
    """Base class of what can go wrong with a workflow."""


class GraphError(WorkflowError, ValueError):
    """A graph, or a part of one, cannot be run as it is."""


class StateKeyError(WorkflowError, KeyError):
    """A key was read that nothing has written, or an input is missing or unknown.

    Attributes:
        key: The key.
    """

    __str__ = Exception.__str__  # KeyError shows its message quoted, as if it were a key

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class VisitLimitError(WorkflowError, RuntimeError):
    """An edge led to a node once more than its `max_visits`, and it has no `otherwise`.

    Attributes:
        node: The node's name.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class RouterError(WorkflowError, RuntimeError):
    """A router raised (its error is the cause), or returned what it may not.

    Attributes:
        node: The name of the node that the router stands behind; empty where several led to what
            cannot run side by side.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node


class StageError(WorkflowError, RuntimeError):
    """A node failed; its own error is the cause.

    Attributes:
        node: The node's name.
        visit: Which visit of it, from 1.
    """

    def __init__(self, message: str, node: str = "", visit: int = 0) -> None:
        super().__init__(message)
        self.node = node
        self.visit = visit


class DeadlineError(WorkflowError, TimeoutError):
    """A run did not end before its deadline."""


class EngineClosedError(WorkflowError, RuntimeError):
    """The engine was closed before the run, or while it was under way."""


def quoted(names: Iterable[object]) -> str:
    """Return names for an error message: quoted, short each, with commas between them."""
    return ", ".join(map(_quoted, names)) or "none"


def _quoted(name: object) -> str:
    text = repr(name)
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
