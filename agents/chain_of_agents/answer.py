"""A chain's answer: a string that knows how it came about."""

from __future__ import annotations

from chain_of_agents.trace.steps import Trace


class Answer(str):
    """The manager's answer. It is the string itself, so that it goes wherever strings go.

    Attributes:
        trace: What workers and manager did.
    """

    __slots__ = ("trace",)
    trace: Trace

    def __new__(cls, text: str, trace: Trace) -> Answer:
        """Return a text as an answer."""
        answer = super().__new__(cls, text)
        answer.trace = trace
        return answer

    def __reduce__(self) -> tuple[type[Answer], tuple[str, Trace]]:
        return Answer, (str(self), self.trace)
