"""What a question results in: an answer with its trace, or an error with it."""

from __future__ import annotations

from dataclasses import dataclass

from chain_of_agents.trace.steps import Step
from ctxreuse.context.blocks import BlockId
from ctxreuse.errors import CtxreuseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a chain did with one question.

    Attributes:
        mode: "sequential" or "parallel".
        steps: The workers' calls in the order of their segments, then the manager's.
    """

    question: str
    mode: str
    steps: tuple[Step, ...] = ()

    @property
    def answer(self) -> str:
        """The manager's answer; empty if there is none."""
        return "".join(step.note for step in self.steps if step.role == "manager")

    @property
    def workers(self) -> tuple[Step, ...]:
        """The workers' calls."""
        return tuple(step for step in self.steps if step.role == "worker")

    @property
    def failures(self) -> tuple[Step, ...]:
        """The calls that were not answered as they should be."""
        return tuple(step for step in self.steps if step.outcome != "answered")

    @property
    def unread(self) -> tuple[BlockId, ...]:
        """Ids of the documents, or parts of them, that no worker has answered about."""
        unread = [step.documents for step in self.failures if step.role == "worker"]
        return tuple([name for documents in unread for name in documents])

    @property
    def read_share(self) -> float:
        """Which share of the documents' tokens workers have answered about, from 0 to 1."""
        total = sum(step.document_tokens for step in self.workers)
        unread = sum(step.document_tokens for step in self.workers if step.outcome != "answered")
        return 1 - unread / total if total else 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts whose models report them."""
        return sum(step.prompt_tokens or 0 for step in self.steps)

    @property
    def cached_tokens(self) -> int:
        """Those served from the prefix cache, where the models report them."""
        return sum(step.cached_tokens or 0 for step in self.steps)

    @property
    def duration_s(self) -> float:
        """Seconds from the beginning to the end of the last call."""
        return max((step.ended_s for step in self.steps), default=0.0)

    def to_html(self) -> str:
        """Return a page that shows the chain: one file, no network, no script, long texts cut.

        Raises:
            MissingExtraError: jinja2 is not installed.
        """
        from chain_of_agents.trace.trace_page import render

        return render(self.question, self.mode, self.steps, self.duration_s)


class Answer(str):
    """The manager's answer: a string, so that it goes wherever strings go, with its `trace`."""

    __slots__ = ("trace",)
    trace: Trace

    def __new__(cls, text: str, trace: Trace) -> Answer:
        """Return a text as an answer."""
        answer = super().__new__(cls, text)
        answer.trace = trace
        return answer

    def __reduce__(self) -> tuple[type[Answer], tuple[str, Trace]]:
        return Answer, (str(self), self.trace)


class ChainError(CtxreuseError, RuntimeError):
    """There is no answer; the model's own error is the cause, and `trace` tells what was noted."""

    def __init__(self, message: str, trace: Trace) -> None:
        super().__init__(message)
        self.trace = trace

    def __reduce__(self) -> tuple[type[ChainError], tuple[str, Trace]]:
        return type(self), (str(self), self.trace)


class ManagerError(ChainError):
    """The manager did not answer."""


class UnreadError(ChainError):
    """Too little of the documents was read for an answer; the manager was not asked."""
