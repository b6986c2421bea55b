"""What happened when: the stages of an engine over time, and a picture of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["generation", "retrieval", "function"]
Outcome: TypeAlias = Literal["done", "committed", "wasted", "failed", "cancelled"]
"""How a stage ended; "committed" and "wasted" are what became of a speculation."""

_MOST_SPANS = 20_000


@dataclass(frozen=True, slots=True)
class Span:
    """A stage, from its beginning to its end.

    Attributes:
        run: The run's number, from 1.
        workflow: The workflow's name.
        node: The node's name.
        visit: Which visit of it in the run.
        kind: What it did.
        began_s: When it began, in seconds of the engine's clock.
        ended_s: When it ended.
        outcome: How it ended.
    """

    run: int
    workflow: str
    node: str
    visit: int
    kind: Kind
    began_s: float
    ended_s: float
    outcome: Outcome


class Timeline:
    """The latest stages of an engine.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int = _MOST_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def add(self, span: Span) -> None:
        """Note a stage that has ended."""
        self._spans.append(span)
