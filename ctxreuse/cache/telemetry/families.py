"""The metrics of planners and pools, labelled with the operator's names, never with a tenant's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from ctxreuse.memory.prefix_index import IndexStatistics
from ctxreuse.planning.savings import Savings
from ctxreuse.sharing.exchange import SharingStatistics

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class PlannerNumbers:
    """What a planner says at one moment."""

    savings: Savings
    statistics: IndexStatistics
    sharing: SharingStatistics


@dataclass(frozen=True, slots=True)
class Family:
    """A metric.

    `value` is an attribute, or reads it: of a planner or an engine, or of the savings of each class
    of tenants if that is its first label. A mapping holds a value for each of the last label.
    """

    name: str
    kind: Kind
    help: str
    value: str | Callable[[Any], Any]
    labels: tuple[str, ...] = ()

    def read(self, numbers: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the values of its labels, with its value."""
        get = self.value if callable(self.value) else attrgetter(self.value)
        of: list[tuple[tuple[str, ...], Any]] = [((), numbers)]
        if self.labels[:1] == _CLASS:  # without classes, those of all
            classes = numbers.savings.by_class or {"": numbers.savings}
            of = [((name,), savings) for name, savings in classes.items()]
        for first, one in of:
            value = get(one)
            if isinstance(value, Mapping):
                yield from (((*first, label), each) for label, each in value.items())
            else:
                yield first, value


def _sent(savings: Savings) -> int:
    return savings.block_tokens - (savings.left_out if savings.mode == "active" else 0)


def _answers(savings: Savings) -> dict[str, int]:
    return {"reported": savings.reported.answers, "unreported": savings.reported.unreported}


def _parts(index: int) -> Callable[[PlannerNumbers], dict[str, int]]:
    def read(numbers: PlannerNumbers) -> dict[str, int]:
        parts = {**numbers.statistics.parts, **numbers.savings.parts}
        return {name: size[index] for name, size in parts.items()}

    return read


def _shared(numbers: PlannerNumbers) -> dict[str, int]:
    told = ("told", "taken_in", "lost", "unreadable")
    return {name: getattr(numbers.sharing, name) for name in told}


def _states(status: Any) -> dict[str, float]:
    states = ("up", "resting", "refuses", "on trial", "draining")
    return {state: float(status.state.partition(":")[0] == state) for state in states}


_CLASS = ("tenant_class",)

OF_PLANNERS: Final = (
    Family(
        "ctxreuse_expected_prefix_cache_queries_tokens", "counter",
        "Block tokens that were sent.",
        _sent, _CLASS,
    ),
    Family(
        "ctxreuse_expected_prefix_cache_hits_tokens", "counter",
        "Block tokens that were expected in the engine's prefix cache as they were sent.",
        "cached_as_sent", _CLASS,
    ),
    Family(
        "ctxreuse_reported_prefix_cache_queries_tokens", "counter",
        "Prompt tokens of answers whose usage tells the cached ones, as the engine counts them.",
        "reported.prompt_tokens", _CLASS,
    ),
    Family(
        "ctxreuse_reported_prefix_cache_hits_tokens", "counter",
        "Of these, served from the engine's prefix cache.",
        "reported.cached_tokens", _CLASS,
    ),
    Family(
        "ctxreuse_reported_prefix_cache_written_tokens", "counter",
        "Prompt tokens that hosted caches have written and charged for, by time to live.",
        "reported.written", (*_CLASS, "time_to_live"),
    ),
    Family(
        "ctxreuse_reported_prefix_cache_expected_hits_tokens", "counter",
        "Block tokens that were expected in the cache for the same answers.",
        "reported.expected_cached_tokens", _CLASS,
    ),
    Family(
        "ctxreuse_reported_prefix_cache_confirmed_tokens", "counter",
        "Of these, cached as far as the answers say; where it stays far below, another process may "
        "share the engine.",
        "reported.confirmed_cached_tokens", _CLASS,
    ),
    Family(
        "ctxreuse_primes", "counter",
        "Calls that were sent besides, to make forks readable; they count nowhere else.",
        "reported.primes", _CLASS,
    ),
    Family(
        "ctxreuse_prime_tokens", "counter",
        "Tokens that these calls computed.",
        "reported.prime_tokens", _CLASS,
    ),
    Family(
        "ctxreuse_retrieved_prefix_cache_hits_tokens", "gauge",
        "Block tokens that would be expected in the cache in the retriever's order; an estimate.",
        "cached_as_retrieved", _CLASS,
    ),
    Family(
        "ctxreuse_retrieved_prefix_cache_error_tokens", "gauge",
        "Two standard errors of that estimate.",
        "error_tokens", _CLASS,
    ),
    Family(
        "ctxreuse_planned_prefix_cache_hits_tokens", "counter",
        "Block tokens that are expected in the cache as planned; in shadow mode, would be.",
        "cached_if_planned", _CLASS,
    ),
    Family(
        "ctxreuse_block_tokens", "counter",
        "Tokens of the blocks of all requests, those that are left out included.",
        "block_tokens", _CLASS,
    ),
    Family(
        "ctxreuse_left_out_tokens", "counter",
        "Tokens of blocks that a reference stands for; in shadow mode, would.",
        "left_out", _CLASS,
    ),
    Family(
        "ctxreuse_references", "counter",
        "Blocks that a reference stands for; in shadow mode, would.",
        "references", _CLASS,
    ),
    Family(
        "ctxreuse_requests", "counter", "Requests that were planned.",
        "requests", _CLASS,
    ),
    Family(
        "ctxreuse_changed_requests", "counter",
        "Of these, sent otherwise than retrieved; in shadow mode, would be.",
        "changed", _CLASS,
    ),
    Family(
        "ctxreuse_answers", "counter",
        "Answers whose usage told the cached tokens (reported), or did not (unreported).",
        _answers, (*_CLASS, "usage"),
    ),
    Family(
        "ctxreuse_planning_seconds", "histogram",
        "How long planning took; a request of a batch has its share of the batch's time.",
        "savings.planning",
    ),
    Family(
        "ctxreuse_planning_max_seconds", "gauge", "The longest time that planning took.",
        "savings.planning.max_s",
    ),
    Family(
        "ctxreuse_planning_failures", "counter",
        "Internal errors of planning; something was sent as it came.",
        "savings.planning_failures",
    ),
    Family(
        "ctxreuse_prompts_without_context", "counter",
        "Prompts in which a wrapper around a model found no context.",
        "savings.prompts_without_context",
    ),
    Family(
        "ctxreuse_unseen_contexts", "gauge",
        "Contexts that were ordered where nobody sees the prompt; they count nowhere else.",
        "savings.unseen",
    ),
    Family(
        "ctxreuse_shadow_mode", "gauge", "1 if the planner only counts (shadow mode), else 0.",
        lambda numbers: float(numbers.savings.mode == "shadow"),
    ),
    Family(
        "ctxreuse_index_nodes", "gauge", "Nodes of the context index.",
        "statistics.nodes",
    ),
    Family(
        "ctxreuse_index_tokens", "gauge", "Block tokens that the planner believes to be cached.",
        "statistics.tokens",
    ),
    Family(
        "ctxreuse_remembered_entries", "gauge",
        "How much of each part of its state a planner remembers.", _parts(0), ("part",),
    ),
    Family(
        "ctxreuse_remembered_entries_limit", "gauge", "How much of it may be remembered.",
        _parts(1), ("part",),
    ),
    Family(
        "ctxreuse_changed_texts", "counter",
        "Texts of one id that differed from others of late: no prompt is served from there on.",
        "savings.changed_texts",
    ),
    Family(
        "ctxreuse_limits_reached", "counter",
        "Searches that ended at the bound on their work, by what was looked for.",
        "statistics.limits_reached", ("search",),
    ),
    Family(
        "ctxreuse_shared_log_entries", "counter",
        "Entries of the shared log that were told, taken in, lost, or unreadable.",
        _shared, ("outcome",),
    ),
    Family(
        "ctxreuse_shared_log_waiting_entries", "gauge", "Entries that wait to be told.",
        "sharing.untold",
    ),
    Family(
        "ctxreuse_shared_log_faults", "counter",
        "How often the shared log could not be read or written.",
        "sharing.faults",
    ),
)  # fmt: skip
"""What is told of each planner; label `planner`."""

OF_REPLICAS: Final = (
    Family(
        "ctxreuse_replica_state", "gauge", "1 for the state of an engine of a pool, else 0.",
        _states, ("state",),
    ),
    Family(
        "ctxreuse_replica_running_requests", "gauge", "Requests that an engine has, unanswered.",
        "running",
    ),
    Family(
        "ctxreuse_replica_waiting_requests", "gauge", "Requests that are held back for it.",
        "waiting",
    ),
    Family(
        "ctxreuse_replica_queued_tokens", "gauge",
        "Prompt tokens that these have still to compute, as expected.",
        "queued_tokens",
    ),
    Family(
        "ctxreuse_replica_answered_requests", "counter", "Requests that it has answered.",
        "answered",
    ),
    Family(
        "ctxreuse_replica_failed_requests", "counter", "Requests that it has not answered.",
        "failed",
    ),
    Family(
        "ctxreuse_replica_busy_answers", "counter", "How often it had too much to do.",
        "busy",
    ),
    Family(
        "ctxreuse_replica_lost_caches", "counter", "How often it was found with an empty cache.",
        "cache_epoch",
    ),
)  # fmt: skip
"""What is told of each engine of a pool; labels `pool` and `replica`."""
