"""Ways to plan the requests of a trace, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ctxreuse.blocks import ContextBlock
from ctxreuse.planner import Strategy

Mode: TypeAlias = Literal["online", "offline"]
Arrange: TypeAlias = Callable[[Sequence[ContextBlock]], Sequence[ContextBlock]]
"""From blocks, best first, to the same blocks in another order."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to order the requests' blocks.

    Attributes:
        name: What tables call it.
        strategy: The planner's strategy.
        mode: Whether requests are planned as they arrive, or all of them as one batch.
        arrange: Somebody else's order, which the planner is given as the retriever's.
        is_scheduled: Whether a batch runs in the order that the planner says; else as it arrived.
        is_annotated: Whether prompts say how the retriever ranked blocks that were moved.
    """

    name: str
    strategy: Strategy
    mode: Mode
    arrange: Arrange | None = None
    is_scheduled: bool = True
    is_annotated: bool = True


AS_SENT = Policy("as retrieved", "none", "online")
PAPERS_ONLINE = Policy("papers' order, online", "paper", "online")
PAPERS_BATCH = Policy("papers' order, batch", "paper", "offline")
OURS_ONLINE = Policy("ctxreuse, online", "reuse", "online")
OURS_BATCH = Policy("ctxreuse, batch", "reuse", "offline")
POLICIES = (AS_SENT, PAPERS_ONLINE, PAPERS_BATCH, OURS_ONLINE, OURS_BATCH)
"""As it is, as the papers (RAGBoost, ContextPilot) have it, and as this package has it."""
