"""What can go wrong with a whole chain. What goes wrong with one worker stands in the trace."""

from __future__ import annotations

from chain_of_agents.trace.steps import Trace
from ctxreuse.errors import CtxreuseError


class ManagerError(CtxreuseError, RuntimeError):
    """The manager did not answer; the model's own error is the cause.

    Attributes:
        trace: What the workers read and noted.
    """

    def __init__(self, message: str, trace: Trace) -> None:
        super().__init__(message)
        self.trace = trace

    def __reduce__(self) -> tuple[type[ManagerError], tuple[str, Trace]]:
        return ManagerError, (str(self), self.trace)
