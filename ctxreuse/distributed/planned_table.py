"""What Ray's workers do: they plan the requests of tables, with the plans as columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.distributed.partitions import (
    Contexts,
    contexts_of,
    conversation_digest,
    reproducible_order,
)
from ctxreuse.errors import CtxreuseError, InvalidRequestError
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.plan import BatchPlan, Plan, Strategy
from ctxreuse.policy.batch import in_turn

PLANNED = {
    "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    "plan_order": pa.list_(pa.int64()),
    "plan_labels": pa.list_(pa.string()),
    "plan_expected_cached_tokens": pa.int64(),
    "plan_strategy": pa.string(),
    "plan_group": pa.string(),
    "plan_position": pa.int64(),
}
"""The columns that planning adds, with their types."""

PARTITION = "plan_partition"
"""The column that says where a row goes; planning does not add it."""

_CHUNK_BYTES = 32 << 20
"""A quarter of the size at which Ray Data begins a new block, so that it cuts no chunk in two."""

_fail_open = FailOpen("plan_dataset", "the requests of a partition go out as retrieved")


class _Planned(NamedTuple):
    row: int
    plan: Plan
    group: int


def planned_table(
    table: pa.Table,
    requests: Sequence[ContextRequest],
    planner: ReusePlanner,
    partition: int,
    batch_size: int,
) -> pa.Table:
    """Return the rows of one partition in execution order, with the columns `PLANNED`."""
    batch, strategy = _plans(requests, planner)
    rows = _grouped(batch, batch_size)
    columns: dict[str, list[Any]] = {
        "messages": [one.plan.messages() for one in rows],
        "plan_order": [_sent_positions(one.plan) for one in rows],
        "plan_labels": [_labels(one.plan) for one in rows],
        "plan_expected_cached_tokens": [one.plan.expected_cached_tokens for one in rows],
        "plan_strategy": [strategy] * len(rows),
        "plan_group": [f"{partition}-{one.group}" for one in rows],
        "plan_position": list(range(len(rows))),
    }
    ordered = table.take(pa.array([one.row for one in rows], pa.int64()))
    for name, values in columns.items():
        ordered = ordered.append_column(name, _column(name, values))
    return ordered


def _plans(requests: Sequence[ContextRequest], planner: ReusePlanner) -> tuple[BatchPlan, Strategy]:
    """Return the plans with positions in the table, and how they were made."""
    order = reproducible_order(requests)
    ordered = [requests[position] for position in order]

    def planned(strategy: Strategy) -> tuple[BatchPlan, Strategy]:
        batch = planner.sibling().plan_batch(ordered, strategy)
        return BatchPlan(batch.plans, tuple(order[one] for one in batch.order)), strategy

    try:
        return planned("reuse")
    except CtxreuseError:  # of the user's, such as a token counter that counts wrong
        raise
    except Exception as error:
        _fail_open.note(error)
        return planned("none")


def _grouped(batch: BatchPlan, batch_size: int) -> list[_Planned]:
    """Return the rows in an order in which few prefix groups stand in two batches."""
    sizes = prefix_groups(_beginnings(batch.plans), batch_size)
    starts = list(accumulate(sizes, initial=0))
    groups = [group for group in batch_order(sizes, batch_size) for _ in range(sizes[group])]
    places = [
        place
        for group in dict.fromkeys(groups)
        for place in range(starts[group], starts[group + 1])
    ]
    conversations = [conversation_digest(plan.request) or None for plan in batch.plans]
    return [
        _Planned(batch.order[place], batch.plans[place], group)
        for place, group in zip(in_turn(places, conversations), groups, strict=True)
    ]


def _beginnings(plans: Sequence[Plan]) -> list[tuple[Hashable, ...]]:
    """Return what the prompts begin with; later turns begin as their conversation does."""
    known: dict[Hashable, tuple[Hashable, ...]] = {}
    found = []
    for number, plan in enumerate(plans):
        request = plan.request
        conversation = conversation_digest(request)
        keys: list[Hashable] = [block.key for block in plan.blocks]
        if request.history:
            keys = ["turn", conversation or number]
        scoped = [(request.tenant, request.system, key) for key in keys[:1]]
        beginning = (*scoped, *keys[1:])
        if conversation:
            beginning = known.setdefault(conversation, beginning)
        found.append(beginning)
    return found


def _sent_positions(plan: Plan) -> list[int]:
    reverse = reversed(list(enumerate(plan.request.blocks)))
    positions = {block.key: position for position, block in reverse}
    return [positions[block.key] for block in plan.blocks]


def _labels(plan: Plan) -> list[str]:
    """Return for each of the request's blocks the label that the prompt shows it under, if any."""
    if not plan.is_labelled:
        return []
    label_of = plan.label_of
    return [label_of[block.key] for block in plan.request.blocks]


def _column(name: str, values: list[Any]) -> pa.Array:
    plain = PLANNED[name]
    if name == "messages" and any(
        one.keys() != {"role", "content"} or not isinstance(one["content"], str)
        for messages in values
        for one in messages
    ):
        plain = None  # such as calls of tools, in a history
    try:
        return pa.array(values, plain)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequestError(
            "Arrow cannot hold the messages of these requests in one column; let the messages of "
            "all histories have contents of one kind, and texts that are valid Unicode"
        ) from error


def prefix_groups(sequences: Sequence[Sequence[Hashable]], most: int) -> list[int]:
    """Return the sizes of groups, subtrees that fit, of sequences in depth-first order."""
    sizes: list[int] = []
    stack = [(0, len(sequences), 0)]
    while stack:
        start, end, depth = stack.pop()
        if depth and end - start <= most:
            sizes.append(end - start)
            continue
        parts = []
        for key, run in groupby(one[depth : depth + 1] for one in sequences[start:end]):
            after = start + len(list(run))
            step = after - start
            if not key:  # they end here
                step = most if depth else 1
            parts += [(at, min(at + step, after), depth + 1) for at in range(start, after, step)]
            start = after
        stack += reversed(parts)
    return sizes


def batch_order(sizes: Sequence[int], most: int) -> list[int]:
    """Return an order of groups in which few of them stand across the end of a batch."""
    waiting: dict[int, deque[int]] = {}
    for group, size in enumerate(sizes):
        waiting.setdefault(size, deque()).append(group)

    def take(size: int) -> int:
        group = waiting[size].popleft()
        if not waiting[size]:
            del waiting[size]
        return group

    order: list[int] = []
    room = most
    while waiting:
        # it begins a batch, or fills the one before and goes on in the next
        first = min(groups[0] for groups in waiting.values())
        order.append(take(sizes[first]))
        room = (room - sizes[first] - 1) % most + 1
        if room < most:
            counts = {size: len(groups) for size, groups in waiting.items()}
            chosen = sorted(take(size) for size in _filling(counts, room))
            order += chosen
            room = room - sum(sizes[group] for group in chosen) or most
    return order


def _filling(counts: Mapping[int, int], room: int) -> list[int]:
    """Return sizes that fill a room best, few of them small, of the groups that there are."""
    sizes = sorted((size for size in counts if size <= room), reverse=True)
    sums = [1]  # for each number of sizes the sums that the largest make, as bits
    for size in sizes:
        reached = sums[-1]
        for _ in range(min(counts[size], room // size)):
            reached |= reached << size
        sums.append(reached & ((2 << room) - 1))
    left = sums[-1].bit_length() - 1
    chosen = []
    for number in range(len(sizes) - 1, -1, -1):
        while not sums[number] >> left & 1:
            chosen.append(sizes[number])
            left -= sizes[number]
    return chosen


@dataclass(frozen=True, slots=True)
class PlanningJob:
    """What Ray's workers do with tables of requests."""

    read: Callable[[Mapping[str, Any]], ContextRequest]
    planner: ReusePlanner
    batch_size: int

    def counted(self, table: pa.Table) -> pa.Table:
        """Return what decides where rows go, in one row."""
        contexts, names = self._contexts(table), [one.name for one in fields(Contexts)]
        return pa.table({name: pa.array([getattr(contexts, name)]) for name in names})

    def located(self, table: pa.Table, partitioning: Any) -> pa.Table:
        """Return rows with their partition; a `Partitioning` is in Ray's object store."""
        import ray

        taken = [name for name in (PARTITION, *PLANNED) if name in table.column_names]
        if taken:
            raise InvalidRequestError(
                f"the dataset has a column {taken[0]!r} already, where plans are put; rename it "
                "with ds.rename_columns, or drop it with ds.drop_columns"
            )
        partitions = ray.get(partitioning).of(self._contexts(table)) if table.num_rows else ()
        return table.append_column(PARTITION, pa.array(partitions, pa.int64()))

    def planned(self, table: pa.Table) -> Iterator[pa.Table]:
        """Plan the partition of a table; yield the rows in execution order, in small tables."""
        partitions = table[PARTITION].to_numpy() if table.num_rows else np.empty(0, np.int64)
        for number in np.unique(partitions).tolist() or [0]:
            rows = table.filter(pc.equal(table[PARTITION], number))
            requests = self._requests(rows)
            planned = planned_table(rows, requests, self.planner, number, self.batch_size)
            # cut into small tables, each of whole batches
            batches = _CHUNK_BYTES * planned.num_rows // max(planned.nbytes, 1) // self.batch_size
            step = max(1, batches) * self.batch_size
            for start in range(0, max(planned.num_rows, 1), step):
                yield planned.slice(start, step)

    def _requests(self, table: pa.Table) -> list[ContextRequest]:
        requests = [self.read(row) for row in table.to_pylist()]
        for one in requests:
            checked_kind("what request returns for a row", one, ContextRequest, "a ContextRequest")
        return requests

    def _contexts(self, table: pa.Table) -> Contexts:
        return contexts_of(self._requests(table), self.planner.count_tokens)
