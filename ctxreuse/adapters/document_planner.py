"""Plans retrieved items, and fails open: what every adapter for documents shares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from ctxreuse.adapters.clock import planning_time
from ctxreuse.adapters.formatting import unlabelled_ranking
from ctxreuse.adapters.micro_batch import CallsToCome, MicroBatcher, Scheduled
from ctxreuse.adapters.plan_metadata import document_metadata
from ctxreuse.adapters.prompt_planner import planner_or_new, plans_together
from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.checks import checked_choice
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import RequestScope
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.policy.view import depth_first_order

AnnotationMode: TypeAlias = Literal["append", "metadata", "off"]
"""Where annotations go: behind the documents where a chain shows them, the metadata, or nowhere."""

_Item = TypeVar("_Item")
_COMPARED_ITEMS = 16
_PLANNED_ON_THE_LOOP = 200
"""More items than these are planned in a thread, so that the event loop stays responsive."""

RETRIEVALS = CallsToCome()
"""Retrievals that are under way, by tenant: what they return is likely to be planned next."""


@dataclass(frozen=True, slots=True)
class RetrievedItems(Generic[_Item]):
    """What one query retrieved."""

    items: Sequence[_Item]
    query: str
    scope: RequestScope


@dataclass(frozen=True, slots=True)
class PlannedItem(Generic[_Item]):
    """A retrieved item with its rank and label."""

    item: _Item
    rank: int  # its position as retrieved, from 0
    label: str | None  # None where planning failed


@dataclass(frozen=True, slots=True)
class PlannedItems(Generic[_Item]):
    """What one query retrieved, each item once (of equal ones, one), in the order to send."""

    items: tuple[PlannedItem[_Item], ...]
    left_out: tuple[PlannedItem[_Item], ...] = ()
    plan: Plan | None = None  # None where planning failed
    annotation: str | None = None


class DocumentPlanner(Generic[_Item]):
    """Plans what an adapter retrieves."""

    def __init__(
        self,
        planner: ReusePlanner | None,
        block_of: Callable[[_Item], ContextBlock],
        annotation: AnnotationMode,
        component: str,
    ) -> None:
        self._planner = planner_or_new(planner)
        self._annotation = checked_annotation(annotation)
        self._block_of = block_of
        self._fail_open = FailOpen(component, tell=self._planner.note_failure)

    @property
    def faults(self) -> int:
        """How often planning has failed and items went through as retrieved."""
        return self._fail_open.faults

    def plan(self, items: Sequence[_Item], query: str, scope: RequestScope) -> PlannedItems[_Item]:
        """Return what one query retrieved in its planned order."""
        return self.plan_batch([RetrievedItems(items, query, scope)])[0]

    def plan_batch(self, batch: Sequence[RetrievedItems[_Item]]) -> list[PlannedItems[_Item]]:
        """Return what several queries retrieved, each in its planned order."""
        return self._fail_open.attempt(
            lambda: self._planned_batch(batch),
            lambda: [as_retrieved(retrieved.items) for retrieved in batch],
        )

    def forget(self, plan: Plan) -> None:
        """Take back a plan whose items nobody sends."""
        self._fail_open.attempt(lambda: self._planner.forget(plan), lambda: None)

    def _planned_batch(self, batch: Sequence[RetrievedItems[_Item]]) -> list[PlannedItems[_Item]]:
        blocks = [[self._block_of(item) for item in retrieved.items] for retrieved in batch]
        ranks = [
            _ranks_of(retrieved.items, context)
            for retrieved, context in zip(batch, blocks, strict=True)
        ]
        requests = [
            ContextRequest(
                context,
                retrieved.query,
                history=retrieved.scope.history,
                conversation_id=retrieved.scope.conversation_id,
                tenant=retrieved.scope.tenant or "",
                labels=True,  # the documents carry them
            )
            for context, retrieved in zip(blocks, batch, strict=True)
        ]
        deduplicate = False if self._annotation == "off" else None
        plans = plans_together(
            self._planner, requests, deduplicate=deduplicate, **planning_time(self._planner)
        )
        return [
            self._planned(retrieved.items, ranks_of, plan)
            for retrieved, ranks_of, plan in zip(batch, ranks, plans, strict=True)
        ]

    def _planned(
        self, items: Sequence[_Item], ranks_of: Mapping[BlockKey, list[int]], plan: Plan
    ) -> PlannedItems[_Item]:
        label_of = plan.label_of

        def planned(keys: Iterable[BlockKey]) -> tuple[PlannedItem[_Item], ...]:
            return tuple(
                PlannedItem(items[rank], rank, label_of[key])
                for key in keys
                for rank in ranks_of[key]
            )

        keys = dict.fromkeys(block.key for block in plan.blocks)
        sent, left_out = planned(keys), planned(key for key in ranks_of if key not in keys)
        annotation = None
        if self._annotation == "append":
            annotation = appended_annotation(plan, sent)
        return PlannedItems(sent, left_out, plan, annotation)


class _Copies(NamedTuple, Generic[_Item]):
    """What one query retrieved, planned."""

    items: list[_Item]
    plan: Plan | None = None


class MetadataPlanner(Generic[_Item]):
    """Plans an adapter's items, together with a tenant's other queries, as copies with a plan."""

    def __init__(
        self,
        planner: ReusePlanner | None,
        annotation: AnnotationMode,
        component: str,
        *,
        block_of: Callable[[_Item], ContextBlock],
        without_plan: Callable[[Sequence[_Item], RequestScope], list[_Item] | None],
        carrying: Callable[[_Item, dict[str, Any]], _Item],
        annotation_item: Callable[[str, dict[str, Any], Sequence[_Item]], _Item],
        appends: bool,
    ) -> None:
        planner = planner_or_new(planner)
        self._planner = DocumentPlanner(planner, block_of, annotation, component)
        self._annotation = annotation
        self._without_plan = without_plan
        self._carrying = carrying
        self._annotation_item = annotation_item
        self._appends = appends
        self._fail_open = FailOpen(component, tell=planner.note_failure)
        self._batcher = MicroBatcher(
            self._scheduled,
            dropped=self._forget,
            group_of=_tenant,
            others_come=_are_retrieved,
            is_large=_is_large,
        )

    @property
    def faults(self) -> int:
        """How often planning has failed and items went through as they came."""
        return self._planner.faults + self._fail_open.faults

    def plan(self, retrieved: RetrievedItems[_Item]) -> list[_Item]:
        """Wait in this thread for what others retrieve; return the items in their planned order."""
        given = replace(retrieved, items=_read(retrieved.items))
        return self._batcher.submit(given).items

    async def aplan(self, retrieved: RetrievedItems[_Item]) -> list[_Item]:
        """Do what `plan` does in this task; many items do not block the event loop."""
        given = replace(retrieved, items=_read(retrieved.items))
        return (await self._batcher.asubmit(given)).items

    def plan_batch(self, batch: Sequence[RetrievedItems[_Item]]) -> list[list[_Item]]:
        """Return what several queries retrieved, planned together, each in its planned order."""
        given = [replace(one, items=_read(one.items)) for one in batch]
        return [one.items for one in self._planned_or_given(given)]

    def _scheduled(self, batch: list[RetrievedItems[_Item]]) -> list[Scheduled[_Copies[_Item]]]:
        """Return what is planned together, in the order in which to send it."""
        planned = self._planned_or_given(batch)
        plans = [one.plan for one in planned]
        blocks = [() if one is None else tuple(block.key for block in one.blocks) for one in plans]
        return [Scheduled(position, planned[position]) for position in depth_first_order(blocks)]

    def _forget(self, copies: _Copies[_Item]) -> None:
        """Take back the plan of a query that was given up before it was sent."""
        if copies.plan is not None:
            self._planner.forget(copies.plan)

    def _planned_or_given(self, batch: Sequence[RetrievedItems[_Item]]) -> list[_Copies[_Item]]:
        return self._fail_open.attempt(
            lambda: self._planned_batch(batch),
            lambda: [_Copies(_as_they_came(one.items)) for one in batch],
        )

    def _planned_batch(self, batch: Sequence[RetrievedItems[_Item]]) -> list[_Copies[_Item]]:
        results = [_Copies(list(retrieved.items)) for retrieved in batch]
        unplanned: dict[int, RetrievedItems[_Item]] = {}
        for position, retrieved in enumerate(batch):
            items = self._without_plan(retrieved.items, retrieved.scope)
            if items is not None:
                unplanned[position] = replace(retrieved, items=items)
        planned = self._planner.plan_batch(list(unplanned.values()))
        for position, one in zip(unplanned, planned, strict=True):
            if one.plan is not None:
                results[position] = _Copies(self._with_metadata(one, one.plan), one.plan)
        return results

    def _with_metadata(self, planned: PlannedItems[_Item], plan: Plan) -> list[_Item]:
        """Return copies that carry their plan, the annotation behind them."""
        metadata = document_metadata(plan, with_order=self._annotation != "off")
        copies = [
            self._carrying(one.item, metadata.position(one.rank, one.label or ""))
            for one in planned.items
        ]
        annotation = planned.annotation if self._appends else None
        if not copies and self._annotation != "off":
            annotation = appended_annotation(plan, [])  # no copy is left to carry it
        if annotation is not None:
            shown = [one.item for one in planned.items or planned.left_out]
            carried = metadata.annotation(annotation)
            copies.append(self._annotation_item(annotation, carried, shown))
        return copies


def shared_names(metadata: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names that all metadata have, empty: what an annotation among documents has."""
    names = [set(one) for one in metadata]
    return dict.fromkeys(sorted(set.intersection(*names)) if names else [], "")


def as_retrieved(items: Sequence[_Item]) -> PlannedItems[_Item]:
    """Return items in the order in which they were retrieved."""
    return PlannedItems(tuple(PlannedItem(item, rank, None) for rank, item in enumerate(items)))


def appended_annotation(plan: Plan, shown: Sequence[PlannedItem[Any]]) -> str | None:
    """Return what a document behind the planned ones says; None if there is nothing to say."""
    said = list(plan.location_annotations)
    if plan.order_annotation is not None:
        said.append(unlabelled_ranking([one.rank for one in shown], plan.templates))
    return " ".join(said) or None


def _tenant(retrieved: RetrievedItems[Any]) -> str:
    return retrieved.scope.tenant or ""


def _are_retrieved(tenant: Hashable) -> bool:
    return RETRIEVALS.any_of(tenant)


def _is_large(batch: Sequence[RetrievedItems[Any]]) -> bool:
    sizes = [len(one.items) for one in batch if isinstance(one.items, Sized)]
    return sum(sizes) > _PLANNED_ON_THE_LOOP


def _read(items: Any) -> Any:
    """Return what a retriever returned; of what can be read only once, a list."""
    return list(items) if isinstance(items, Iterator) else items


def _as_they_came(items: Any) -> Any:
    """Return what a retriever returned: a copy of a list, anything else itself."""
    return list(items) if type(items) in (list, tuple) else items


def _ranks_of(items: Sequence[_Item], blocks: Sequence[ContextBlock]) -> dict[BlockKey, list[int]]:
    """Return the ranks of the items behind each block, each of equal items once."""
    ranks_of: dict[BlockKey, list[int]] = {}
    for rank, block in enumerate(blocks):
        ranks = ranks_of.setdefault(block.key, [])
        if not any(_are_equal(items[rank], items[other]) for other in ranks[-_COMPARED_ITEMS:]):
            ranks.append(rank)
    return ranks_of


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (ValueError, TypeError):  # arrays in their metadata: not one truth value
        return False


def checked_annotation(annotation: object) -> AnnotationMode:
    """Return the annotation mode."""
    modes = get_args(AnnotationMode)
    return cast(AnnotationMode, checked_choice("annotation mode", annotation, modes))
