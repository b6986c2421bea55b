"""What a chain did: who read what, noted what, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ctxreuse.context.blocks import BlockId

Role: TypeAlias = Literal["worker", "manager"]

Outcome: TypeAlias = Literal["answered", "empty", "garbage", "failed", "timed out"]
"""What became of an agent's call; of those that did not answer, no note goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One agent's call.

    Attributes:
        role: Whether it is a worker or the manager.
        agent: The worker's number, from 0; -1 for the manager.
        position: Its segment's place among the segments, from 0; -1 for the manager.
        documents: Ids of the documents, or parts of them, that were its to read in this call.
        shown_before: Ids of those that it was only pointed to, for it had read them earlier in the
            conversation.
        labels: What each label in its prompt stands for.
        note: What it wrote, as it came.
        outcome: What became of the call.
        error: Why it was not answered, without any text of documents; empty if it was.
        remark: What else there is to say, such as that a history was left out to fit the model.
        replica: The engine that answered; empty where there is only one model.
        prompt_tokens: Tokens of its prompt; None where the model does not tell.
        cached_tokens: Those served from the prefix cache; None is unknown, not 0.
        completion_tokens: Tokens of its answer; None where the model does not tell.
        began_s: When the call began, in seconds from the chain's beginning.
        ended_s: When it ended.
    """

    role: Role
    agent: int
    position: int
    documents: tuple[BlockId, ...] = ()
    shown_before: tuple[BlockId, ...] = ()
    labels: Mapping[str, BlockId] = field(default_factory=dict)
    note: str = ""
    outcome: Outcome = "answered"
    error: str = ""
    remark: str = ""
    replica: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def name(self) -> str:
        """What the step is called: "worker 3" or "manager"."""
        return "manager" if self.role == "manager" else f"worker {self.agent}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a chain did with one question.

    Attributes:
        question: The question.
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
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, as far as the models told."""
        return sum(step.prompt_tokens or 0 for step in self.steps)

    @property
    def cached_tokens(self) -> int:
        """Those served from the prefix cache, as far as the models told."""
        return sum(step.cached_tokens or 0 for step in self.steps)

    @property
    def duration_s(self) -> float:
        """Seconds from the beginning to the end of the last call."""
        return max((step.ended_s for step in self.steps), default=0.0)

    def to_html(self) -> str:
        """Return a page that shows the chain: one file, no network, no script."""
        from chain_of_agents.trace.trace_page import render

        return render(self)

    def _repr_html_(self) -> str:
        return self.to_html()
