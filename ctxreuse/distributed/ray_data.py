"""Planning on Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.checks import check_function, checked_integer, checked_kind
from ctxreuse.distributed.partitions import Contexts, joined_contexts, partition
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe
from ctxreuse.planner import ReusePlanner
from ctxreuse.sharing.environment import as_given, settled

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

Row: TypeAlias = Mapping[str, Any]

FIELDS = ("blocks", "query", "system", "history", "conversation_id", "tenant", "request_id")
"""What of a request stands in columns."""

_BLOCK_FIELDS = ("id", "text", "tokens")


@dataclass(frozen=True, slots=True)
class ColumnReader:
    """Reads requests from columns, by field where these have other names."""

    columns: Mapping[str, str]

    def __post_init__(self) -> None:
        checked_kind("columns", self.columns, Mapping, "a dict of field: column, or None")
        for name, column in self.columns.items():
            if name not in FIELDS:
                fields = ", ".join(map(repr, FIELDS))
                raise InvalidRequestError(
                    f"columns names the field {describe(name)}; a request has {fields}"
                )
            checked_kind(f"the column of {name!r}", column, str, "a string")

    def __call__(self, row: Row) -> ContextRequest:
        """Return a row's request."""
        fields = {}
        for name in FIELDS:
            column = self.columns.get(name, name)
            if column in row:
                fields[name] = row[column]
            elif name == "blocks" or name in self.columns:
                raise InvalidRequestError(
                    f"there is no column {column!r} with the {name} of a request; "
                    f"say which it is: columns={{{name!r}: ...}}"
                )
        for name in ("query", "tenant"):
            if name in fields and fields[name] is None:  # Arrow's null
                del fields[name]
        if isinstance(fields.get("history"), list):
            # without the keys that only other messages of the column have
            fields["history"] = [
                {name: part for name, part in one.items() if part is not None or name == "content"}
                if isinstance(one, Mapping)
                else one
                for one in fields["history"]
            ]
        return ContextRequest(_blocks(fields.pop("blocks")), **fields)


def _blocks(values: Any) -> Iterator[ContextBlock | str]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise InvalidRequestError(
            f"the blocks of a row must be a list of texts or of structs with "
            f"{', '.join(_BLOCK_FIELDS)}, not {describe(values)}"
        )
    for value in values:
        if isinstance(value, Mapping):
            if "text" not in value:
                raise InvalidRequestError(
                    f"a block must have a text; the struct has only {', '.join(map(repr, value))}"
                )
            yield ContextBlock(**{name: value[name] for name in _BLOCK_FIELDS if name in value})
        else:
            yield value


RequestReader: TypeAlias = Callable[[Row], ContextRequest]

_ROWS_AT_A_TIME = 1_024


def plan_dataset(
    ds: Dataset,
    *,
    columns: Mapping[str, str] | None = None,
    request: RequestReader | None = None,
    planner: ReusePlanner | None = None,
    partition_size: int = 4_096,
    batch_size: int = 64,
) -> Dataset:
    """Plan the requests of a Ray dataset together, and put its rows into execution order.

    Requests with heavy blocks in common are cut into one partition, and each partition is planned
    as `ReusePlanner.plan_batch` does. The result depends on the requests alone, not on workers or
    blocks of the dataset. `ds` is read twice: here, and when the result is; give `ds.materialize()`
    where that is dear, or would give other rows. A worker holds one partition at a time,
    and this process 16 bytes for each block of each row.

    The rows keep their columns and get `messages` (the prompt as OpenAI chat messages),
    `plan_order` (of each sent block its position in the row), `plan_labels` (of each block in the
    row; empty where the prompt shows none), `plan_expected_cached_tokens` (of blocks),
    `plan_strategy` ("reuse", or "none" where planning failed and the row goes out as retrieved),
    `plan_partition` and `plan_position` (sorted by both, rows stand in execution order), and
    `plan_group` (a name for the rows that share a prefix, at most `batch_size`).

    Args:
        ds: The requests, one a row.
        columns: Field of a request -> column, where they have other names: "blocks" (a list of
            texts, or of structs with `text` and, on wish, `id` and `tokens`), "query", "system",
            "history", "conversation_id", "tenant", "request_id". All but the first may be missing.
        request: How to make a row's request instead. Called in the workers, twice a row.
        planner: Whose settings to plan with; None plans with the defaults. It stays as it is.
        partition_size: How many requests are planned together at most, better many times
            `batch_size`; turns of one conversation stay in one partition.
        batch_size: How many rows are sent together: the batch size of the processor that follows.
            Prefix groups stand within one such batch, as far as they fit.

    Returns:
        A dataset that plans when it is read.

    Raises:
        InvalidRequestError: wrong type or out of range; the planner has a shared log; a column has
            a name of those above. Wrong rows fail in the workers, as a cause of Ray's own error.
        MissingExtraError: Ray is not installed.
    """
    try:
        import ray
        from ray.data import Dataset
    except ImportError as error:
        raise MissingExtraError("plan_dataset", "ray") from error
    from ctxreuse.distributed.planned_table import PARTITION, PlanningJob

    checked_kind("ds", ds, Dataset, "a ray.data.Dataset")
    read = _reader(columns, request)
    checked_integer("partition_size", partition_size, 1)
    checked_integer("batch_size", batch_size, 1)
    job = PlanningJob(read, _checked_planner(planner), batch_size)
    as_tables: dict[str, Any] = {"batch_format": "pyarrow", "zero_copy_batch": True}
    counted = ds.map_batches(job.counted, batch_size=_ROWS_AT_A_TIME, **as_tables)
    tables = counted.iter_batches(batch_size=None, batch_format="pyarrow")
    partitioning = partition(joined_contexts(map(_contexts_in, tables)), partition_size)
    located = ds.map_batches(
        job.located, batch_size=_ROWS_AT_A_TIME, fn_args=[ray.put(partitioning)], **as_tables
    )
    # one block for each partition, in order: batches begin anew with each
    bounds = list(range(1, partitioning.count)) or [0]
    return located.sort(PARTITION, boundaries=bounds).map_batches(
        job.planned, batch_size=None, **as_tables
    )


def _reader(columns: Mapping[str, str] | None, request: RequestReader | None) -> RequestReader:
    check_function("request", request)
    if request is None:
        return ColumnReader({} if columns is None else columns)
    if columns is not None:
        raise InvalidRequestError(
            "give columns or request, not both: the function makes the request of a whole row"
        )
    return request


def _checked_planner(planner: ReusePlanner | None) -> ReusePlanner:
    if planner is None:
        mode, capacity_tokens, *_ = settled(None, None, shared_log=False)  # partitions have none
        return as_given(ReusePlanner, mode=mode, capacity_tokens=capacity_tokens)
    checked_kind("planner", planner, ReusePlanner, "a ReusePlanner or None")
    if planner.shared_log is not None:
        raise InvalidRequestError(
            "a planner with a shared log plans by what other processes send meanwhile, so a "
            "partition planned again would come out otherwise; leave shared_log out"
        )
    return planner


def _contexts_in(table: pa.Table) -> Contexts:
    lists = [table[one.name].combine_chunks().flatten() for one in fields(Contexts)]
    return Contexts(*(one.to_numpy(zero_copy_only=False) for one in lists))
