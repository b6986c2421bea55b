"""Retrieved items in planned order: what retrievers, compressors and postprocessors share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

from ctxreuse.context.blocks import BlockKey, ContextBlock, ContextRequest
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.context.scope import RequestScope
from ctxreuse.pipeline.context_finder import is_sequence
from ctxreuse.pipeline.engine_options import planning_time
from ctxreuse.pipeline.known_texts import Form, TextList, known_texts
from ctxreuse.pipeline.ordered_release import CallsToCome, MicroBatcher
from ctxreuse.pipeline.prompt_turn import plans_together
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import Plan
from ctxreuse.policy.view import depth_first_order

_Item = TypeVar("_Item")
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
    root: Hashable = None  # the outermost run that it is for
    shown_to: str | None = None  # the tenant whose prompts may show it; None: that of the scope


@dataclass(frozen=True, slots=True)
class ItemKind(Generic[_Item]):
    """What is to be known of a framework's items."""

    block_of: Callable[[_Item], ContextBlock]  # what an item is to the index
    # texts that prompts may show of items, one list for each kind of form
    forms_of: Callable[[Sequence[_Item]], Sequence[Sequence[str | Form]]]
    # words on items as one more item
    annotation_of: Callable[[str, Sequence[_Item]], _Item] | None = None
    ranked: Callable[[Sequence[_Item]], list[_Item]] = list  # best first
    # which items follow each other in a document
    followed: Callable[[Sequence[_Item]], Sequence[Form]] | None = None


class _Ordered(NamedTuple, Generic[_Item]):
    position: int
    items: list[_Item]
    plan: Plan | None = None


class DocumentPlanner(Generic[_Item]):
    """Puts what was retrieved into planned order, together with a tenant's other queries.

    What is known of the prompt is not much, so that each plan is provisional: a model's wrapper
    that finds the texts plans them again.
    """

    def __init__(
        self,
        planner: ReusePlanner,
        kind: ItemKind[_Item],
        component: str,
        *,
        annotation: bool = False,
        drop_repeats: bool = False,
        fail_open: FailOpen | None = None,
    ) -> None:
        self._planner = planner
        self._kind = kind
        self._annotation, self._drop_repeats = annotation, drop_repeats
        self.fail_open = fail_open or FailOpen(component, tell=planner.note_failure)
        self._batcher = MicroBatcher(
            self._scheduled,
            dropped=self._forget,
            group_of=_tenant,
            others_come=RETRIEVALS.any_of,
            is_large=_is_large,
        )

    def plan(self, retrieved: RetrievedItems[_Item]) -> list[_Item]:
        """Wait in this thread for what others retrieve; return the items in their planned order."""
        return self._batcher.submit(_read(retrieved)).items

    async def aplan(self, retrieved: RetrievedItems[_Item]) -> list[_Item]:
        """Do what `plan` does in this task; many items do not block the event loop."""
        return (await self._batcher.asubmit(_read(retrieved))).items

    def plan_batch(self, batch: Sequence[RetrievedItems[_Item]]) -> list[list[_Item]]:
        """Return what several queries retrieved, planned together, each in its planned order."""
        planned = self._scheduled(list(map(_read, batch)))
        return [one.items for one in sorted(planned, key=attrgetter("position"))]

    def _scheduled(self, batch: list[RetrievedItems[_Item]]) -> list[_Ordered[_Item]]:
        """Return what is planned together, in the order in which to send it."""
        came: list[Any] = [one.items for one in batch]
        given = [
            _Ordered(n, list(items) if type(items) in (list, tuple) else items)
            for n, items in enumerate(came)
        ]
        planned = self.fail_open.attempt(lambda: self._planned(batch, given), lambda: given)
        if self._planner.mode == "shadow":  # also in the order in which they came
            return planned
        plans = [one.plan for one in planned]
        blocks = [() if one is None else tuple(block.key for block in one.blocks) for one in plans]
        return [planned[position] for position in depth_first_order(blocks)]

    def _forget(self, ordered: _Ordered[_Item]) -> None:
        """Take back the plan of a query that was given up before it was sent."""
        if ordered.plan:
            self.fail_open.attempt(partial(self._planner.provisional.forget, ordered.plan))

    def _planned(
        self, batch: Sequence[RetrievedItems[_Item]], given: Sequence[_Ordered[_Item]]
    ) -> list[_Ordered[_Item]]:
        followed = self._kind.followed
        moving = [
            place
            for place, one in enumerate(batch)
            if followed is None or not is_sequence(followed(one.items))
        ]
        is_shadow = self._planner.mode == "shadow"
        best_first = list if is_shadow else self._kind.ranked
        ranked = [best_first(batch[place].items) for place in moving]
        requests = [
            ContextRequest(
                list(map(self._kind.block_of, items)),
                batch[place].query,
                tenant=batch[place].scope.tenant or "",
                labels=False,
            )
            for items, place in zip(ranked, moving, strict=True)
        ]
        options = planning_time(self._planner)
        planner = self._planner.provisional
        plans, _ = plans_together(planner, requests, deduplicate=False, **options)
        ordered = list(given)
        for place, items, plan in zip(moving, ranked, plans, strict=True):
            sent = self._ordered(batch[place], items, plan)
            ordered[place] = _Ordered(place, given[place].items if is_shadow else sent, plan)
        return ordered

    def _ordered(
        self, retrieved: RetrievedItems[_Item], items: Sequence[_Item], plan: Plan
    ) -> list[_Item]:
        """Return items in the order of their plan, a repeat behind all others."""
        places: dict[BlockKey, list[int]] = {}
        for place, block in enumerate(plan.request.blocks):
            places.setdefault(block.key, []).append(place)
        order = [places[block.key].pop(0) for block in plan.blocks]
        if not self._drop_repeats:
            order += sorted(place for repeats in places.values() for place in repeats)
        held = TextList(
            retrieved.root,
            is_ours=True,
            take_back=partial(_take_back, ref(self._planner), plan.request_id, plan.request.tenant),
            order=order,
        )
        tenant = plan.request.tenant if retrieved.shown_to is None else retrieved.shown_to
        for forms in self._kind.forms_of(items):
            known_texts().add(tenant, forms, held)
        ordered = [items[place] for place in order]
        words, annotation_of = plan.order_annotation, self._kind.annotation_of
        if self._annotation and annotation_of and words:
            ordered.append(annotation_of(words, ordered))
        return ordered


def best_first(
    items: Sequence[_Item],
    texts: Sequence[str],
    tenant: str,
    planner: ReusePlanner | None = None,
    root: Hashable = None,
) -> list[_Item]:
    """Return items as they were before a plan of ours; one of this planner is taken back."""
    planned = known_texts().planned_list(tenant, texts, root)
    if not planned:
        return list(items)
    held, ranks = planned
    if held.take_back:
        held.take_back(planner)
    return [items[place] for place in sorted(range(len(items)), key=ranks.__getitem__)]


def shared_names(metadata: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names that all metadata have, empty: what an annotation among items has."""
    names = [set(one) for one in metadata]
    return dict.fromkeys(sorted(set.intersection(*names)) if names else [], "")


def _take_back(
    made_by: ref[ReusePlanner], request_id: str | int, tenant: str, planner: object
) -> None:
    """Take a provisional plan back if the same planner plans the same texts again."""
    own = made_by()
    if own is not None and own is planner:
        own.provisional.forget(request_id, tenant)


def _tenant(retrieved: RetrievedItems[Any]) -> str:
    return retrieved.scope.tenant or ""


def _is_large(batch: Sequence[RetrievedItems[Any]]) -> bool:
    sizes = [len(one.items) for one in batch if isinstance(one.items, Sized)]
    return sum(sizes) > _PLANNED_ON_THE_LOOP


def _read(retrieved: RetrievedItems[_Item]) -> RetrievedItems[_Item]:
    if not isinstance(retrieved.items, Iterator):
        return retrieved
    return replace(retrieved, items=list(retrieved.items))
