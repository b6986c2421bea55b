"""What comes out: plans, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ctxreuse.context.blocks import BlockId, BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.rendering import (
    Reference,
    SentBlock,
    Templates,
    TurnPart,
    render_messages,
    render_turn,
)
from ctxreuse.errors import InvalidRequestError
from ctxreuse.index.explain import Explanation, LoggedPrompt, explain

Strategy: TypeAlias = Literal["reuse", "paper", "none"]
"""This package's order, the papers' order, or the retriever's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send instead of the context as it was retrieved.

    `blocks` and `references` together are exactly the request's blocks, each once.

    Attributes:
        request: The request that was planned.
        request_id: The request's own id, or the planner's count.
        parts: What this turn shows, in order: sent blocks and references.
        labels: Label -> block id, for every label in the prompt, earlier turns included; empty
            where blocks have none.
        order_annotation: The retriever's ranking in words; None where the order did not change.
        expected_cached_tokens: Block tokens of this turn expected to be served from the cache.
        templates: The words around the blocks.
        is_labelled: Whether the message shows the blocks under their labels.
        marks: Where the prompt is to be marked for a cache that keeps marked prefixes only: after
            how many of `blocks`, ascending; 0 is behind the system text. Empty for other caches.
        logged: The planner's record of it, for `explain`.
    """

    request: ContextRequest
    request_id: str | int
    parts: tuple[TurnPart, ...]
    labels: Mapping[str, BlockId]
    order_annotation: str | None
    expected_cached_tokens: int
    templates: Templates
    is_labelled: bool = True
    marks: tuple[int, ...] = ()
    logged: LoggedPrompt | None = field(default=None, repr=False, compare=False)

    @property
    def blocks(self) -> tuple[ContextBlock, ...]:
        """The blocks to send, in order."""
        return tuple(part.block for part in self.parts if isinstance(part, SentBlock))

    @property
    def references(self) -> tuple[BlockId, ...]:
        """The ids of the blocks left out, in the retriever's order."""
        return tuple(part.id for part in self.parts if isinstance(part, Reference))

    @property
    def location_annotations(self) -> tuple[str, ...]:
        """Where left-out blocks stand, in words: a line for all, or words for each."""
        said = (part.annotation for part in self.parts if isinstance(part, Reference))
        return tuple(filter(None, said))

    @property
    def label_of(self) -> dict[BlockKey, str]:
        """The label of each block of the request; of a left-out one the label where it stands."""
        sent = {part.block.key: part.label for part in self.parts if isinstance(part, SentBlock)}
        # references stand in the retriever's order
        left_out = iter([part.label for part in self.parts if isinstance(part, Reference)])
        return {
            key: sent[key] if key in sent else next(left_out) for key in self.request.unique_blocks
        }

    @property
    def content(self) -> str:
        """This turn's user message: blocks, annotations, question."""
        return self.rendered(self.request.query)

    def rendered(self, query: str = "", *, with_order: bool = True) -> str:
        """Return this turn's blocks and annotations, before another question or none.

        Args:
            query: The question.
            with_order: Whether the order annotation is part of it.

        Raises:
            InvalidRequestError: wrong type.
        """
        checked_kind("query", query, str, "a string")
        order = self.order_annotation if with_order else None
        if order is not None and not self.is_labelled:
            shown = [part.label for part in self.parts if isinstance(part, SentBlock)]
            order = self.templates.with_legend(order, shown)
        return render_turn(self.parts, order, query, self.templates, is_labelled=self.is_labelled)

    def messages(self) -> list[dict[str, Any]]:
        """Return the prompt as OpenAI chat messages: system, history, this turn."""
        return render_messages(self.request.system, self.request.history, self.content)

    def explain(self) -> Explanation:
        """Return why this prompt hits or misses the cache, compared with those planned before it.

        The planner remembers the latest 256 prompts of each tenant. Other tenants' prompts are not
        looked at.

        Raises:
            InvalidRequestError: no planner made this plan.
        """
        if self.logged is None:
            raise InvalidRequestError(
                "this plan was made by hand; only a planner knows what was sent before it"
            )
        return explain(self.logged.prompt, self.logged.earlier(), self.expected_cached_tokens)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The plans of a batch, in the order in which they should be sent.

    Attributes:
        plans: One plan a request, in execution order.
        order: `order[i]` is the position of `plans[i]`'s request in the input: a permutation.
    """

    plans: tuple[Plan, ...]
    order: tuple[int, ...]

    def in_input_order(self) -> tuple[Plan, ...]:
        """Return the plans in the order of the input."""
        plans = dict(zip(self.order, self.plans, strict=True))
        return tuple(plans[position] for position in range(len(plans)))
