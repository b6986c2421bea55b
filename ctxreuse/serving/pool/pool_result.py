"""Answers of a pool, and which replica gave them."""

from __future__ import annotations

from dataclasses import dataclass

from ctxreuse.planning.plan import Plan
from ctxreuse.serving.client.completion import Completion
from ctxreuse.serving.client.request import AnswerStream


@dataclass(frozen=True, slots=True)
class PoolResult:
    """An answer of a pool.

    Attributes:
        completion: The answer and what it cost.
        plan: What was sent.
        replica: The name of the replica that answered.
        tried: The names of the replicas that failed before, in order.
    """

    completion: Completion
    plan: Plan
    replica: str
    tried: tuple[str, ...] = ()


class PoolStream(AnswerStream[PoolResult]):
    """An answer of a pool in progress: an async iterator of its pieces."""

    @property
    def served(self) -> PoolResult:
        """The whole answer; EngineError before it has ended."""
        return self._whole()
