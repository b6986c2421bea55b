"""Retrieved items into their planned order: what every adapter for documents shares.

An adapter says how a thing of its framework becomes a context block; here it is planned, and comes
back with its rank and label. Failing open happens here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

from ctxreuse.adapters.prompt_planner import planner_or_new
from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import RequestScope
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan

AnnotationMode: TypeAlias = Literal["append", "metadata", "off"]
"""Where annotations go: an own document at the end, the metadata only, or nowhere."""

_Thing = TypeVar("_Thing")


@dataclass(frozen=True, slots=True)
class RetrievedItems(Generic[_Thing]):
    """What one query retrieved.

    Attributes:
        things: The things, best first.
        query: The query.
        scope: Whose request it is.
    """

    things: Sequence[_Thing]
    query: str
    scope: RequestScope


@dataclass(frozen=True, slots=True)
class PlannedItem(Generic[_Thing]):
    """A retrieved thing in its place.

    Attributes:
        thing: What was retrieved, untouched.
        rank: Its position as retrieved, from 0.
        label: The label of its block, such as "[Doc_1]"; None where planning failed.
    """

    thing: _Thing
    rank: int
    label: str | None


@dataclass(frozen=True, slots=True)
class PlannedItems(Generic[_Thing]):
    """Retrieved items in the order in which to send them.

    `placed` and `left_out` together hold every thing once; only one that is equal to another in
    every respect is not repeated.

    Attributes:
        placed: What to send, in order.
        left_out: What the conversation shows already; its label says where.
        plan: The plan; None where planning failed and `placed` is as retrieved.
        annotation: What an own document at the end says about order and places; None if nothing
            needs saying or the annotation mode is another.
    """

    placed: tuple[PlannedItem[_Thing], ...]
    left_out: tuple[PlannedItem[_Thing], ...] = ()
    plan: Plan | None = None
    annotation: str | None = None


class DocumentPlanner(Generic[_Thing]):
    """Plans what an adapter retrieves.

    Args:
        planner: Plans the contexts.
        block_of: How a thing becomes a block.
        annotation: Where annotations go. With "off" nothing is left out either, for nothing would
            point to it.
        component: The adapter's name, for the log.

    Raises:
        InvalidRequestError: If the planner or the annotation mode is none.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        block_of: Callable[[_Thing], ContextBlock],
        annotation: AnnotationMode,
        component: str,
    ) -> None:
        self._planner = planner_or_new(planner)
        self._annotation = checked_annotation(annotation)
        self._block_of = block_of
        self._fail_open = FailOpen(component)

    @property
    def faults(self) -> int:
        """How often planning has failed and things went through as retrieved."""
        return self._fail_open.faults

    def arrange(
        self, things: Sequence[_Thing], query: str, scope: RequestScope
    ) -> PlannedItems[_Thing]:
        """Return what was retrieved for one query in its planned order."""
        return self.arrange_batch([RetrievedItems(things, query, scope)])[0]

    def arrange_batch(self, batch: Sequence[RetrievedItems[_Thing]]) -> list[PlannedItems[_Thing]]:
        """Return what was retrieved for some queries, each in its planned order.

        Args:
            batch: What the queries retrieved; planned together, tenants apart.

        Returns:
            One arrangement a query, in the order given.
        """
        return self._fail_open.attempt(
            lambda: self._arrange_batch(batch),
            lambda: [as_retrieved(retrieved.things) for retrieved in batch],
        )

    def _arrange_batch(self, batch: Sequence[RetrievedItems[_Thing]]) -> list[PlannedItems[_Thing]]:
        blocks = [[self._block_of(thing) for thing in retrieved.things] for retrieved in batch]
        ranks = [
            _ranks_of(retrieved.things, context)
            for retrieved, context in zip(batch, blocks, strict=True)
        ]
        requests = [
            ContextRequest(
                context,
                retrieved.query,
                history=retrieved.scope.history,
                conversation_id=retrieved.scope.conversation_id,
                tenant=retrieved.scope.tenant or "",
            )
            for context, retrieved in zip(blocks, batch, strict=True)
        ]
        deduplicate = False if self._annotation == "off" else None
        if len(requests) == 1:
            plans = [self._planner.plan(requests[0], deduplicate=deduplicate)]
        else:
            planned = self._planner.plan_batch(requests, deduplicate=deduplicate)
            plans = list(planned.in_input_order())
        return [
            self._placed(retrieved.things, ranks_of, plan)
            for retrieved, ranks_of, plan in zip(batch, ranks, plans, strict=True)
        ]

    def _placed(
        self, things: Sequence[_Thing], ranks_of: Mapping[BlockKey, list[int]], plan: Plan
    ) -> PlannedItems[_Thing]:
        label_of = plan.label_of

        def in_place(keys: Iterable[BlockKey]) -> list[PlannedItem[_Thing]]:
            return [
                PlannedItem(things[rank], rank, label_of[key])
                for key in keys
                for rank in ranks_of[key]
            ]

        sent = dict.fromkeys(block.key for block in plan.blocks)
        placed = in_place(sent)
        left_out = in_place(key for key in ranks_of if key not in sent)
        annotation = None
        if self._annotation == "append":
            annotation = appended_annotation(plan, [one.label or "" for one in placed])
        return PlannedItems(tuple(placed), tuple(left_out), plan, annotation)


def as_retrieved(things: Sequence[_Thing]) -> PlannedItems[_Thing]:
    """Return things in the order in which they were retrieved."""
    return PlannedItems(tuple(PlannedItem(thing, rank, None) for rank, thing in enumerate(things)))


def appended_annotation(plan: Plan, labels: Sequence[str]) -> str | None:
    """Return what a document behind the planned ones says, or None if there is nothing to say.

    Args:
        plan: Their plan.
        labels: The label of each document, in order; they may be shown without, so it says them.
    """
    said = list(plan.location_annotations)
    if plan.order_annotation is not None:
        said += [plan.templates.legend_annotation(labels), plan.order_annotation]
    return " ".join(said) or None


def _ranks_of(
    things: Sequence[_Thing], blocks: Sequence[ContextBlock]
) -> dict[BlockKey, list[int]]:
    """Return the ranks of the things behind each block, each of equal things once."""
    ranks_of: dict[BlockKey, list[int]] = {}
    for rank, block in enumerate(blocks):
        ranks = ranks_of.setdefault(block.key, [])
        if not any(_are_equal(things[rank], things[other]) for other in ranks):
            ranks.append(rank)
    return ranks_of


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (ValueError, TypeError):  # arrays in their metadata: not one truth value
        return False


def checked_annotation(annotation: object) -> AnnotationMode:
    """Return the annotation mode if it is one.

    Raises:
        InvalidRequestError: If there is no such mode.
    """
    for mode in get_args(AnnotationMode):
        if annotation == mode:
            return mode  # type: ignore[no-any-return]
    raise InvalidRequestError(
        f"there is no annotation mode {describe(annotation)}; "
        f"choose one of {', '.join(map(repr, get_args(AnnotationMode)))}"
    )
