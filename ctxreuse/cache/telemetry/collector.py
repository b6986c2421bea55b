"""Metrics for Prometheus, labelled with the operator's names, never with a tenant's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.memory.prefix_index import IndexStatistics
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.savings import PLANNING_BOUNDS_S, PlanningTime, Savings
from ctxreuse.sharing.exchange import SharingStatistics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric


class PlannerNumbers(NamedTuple):
    """What a planner says at one moment."""

    savings: Savings
    statistics: IndexStatistics
    sharing: SharingStatistics


class Family(NamedTuple):
    """A metric of planners, engines or, if the first label is that, classes of tenants.

    `value` is an attribute, or reads it. A mapping holds a value for each of the last label.
    """

    name: str
    kind: str  # as `prometheus_client` calls them
    help: str
    value: str | Callable[[Any], Any]
    labels: tuple[str, ...] = ()

    def read(self, numbers: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the values of its labels, with its value."""
        get = self.value if callable(self.value) else attrgetter(self.value)
        of: Any = [((), numbers)]
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


def _parts(index: int, numbers: PlannerNumbers) -> dict[str, int]:
    parts = {**numbers.statistics.parts, **numbers.savings.parts}
    return {name: size[index] for name, size in parts.items()}


def _shared(numbers: PlannerNumbers) -> dict[str, int]:
    told = ("told", "taken_in", "lost", "unreadable")
    return {name: getattr(numbers.sharing, name) for name in told}


def _states(status: Any) -> dict[str, float]:
    states = ("up", "resting", "refuses", "on trial", "draining")
    return {state: float(status.state.partition(":")[0] == state) for state in states}


_CLASS = ("tenant_class",)


def _families(kind: str, labels: tuple[str, ...], *told: Any) -> Iterator[Family]:
    """Yield metrics of one kind: what is told is their names, their values, and their help."""
    for name, value, words in told:
        yield Family(name, kind, words, value, labels)


OF_PLANNERS: Final = (
    *_families(
        "counter", _CLASS,
        ("ctxreuse_expected_prefix_cache_queries_tokens", _sent, "Block tokens that were sent."),
        ("ctxreuse_expected_prefix_cache_hits_tokens", "cached_as_sent",
         "Block tokens expected in the engine's prefix cache, in the order that was sent."),
        ("ctxreuse_reported_prefix_cache_queries_tokens", "reported.prompt_tokens",
         "Prompt tokens of answers that report cached tokens, as the engine counts them."),
        ("ctxreuse_reported_prefix_cache_hits_tokens", "reported.cached_tokens",
         "Prompt tokens that these answers report as cached."),
        ("ctxreuse_reported_prefix_cache_expected_hits_tokens", "reported.expected_cached_tokens",
         "Block tokens that were expected in the cache for the same answers."),
        ("ctxreuse_reported_prefix_cache_confirmed_tokens", "reported.confirmed_cached_tokens",
         "Of these, tokens that answers confirm; if few, another process may use the engine."),
        ("ctxreuse_primes", "reported.primes",
         "Primes: extra calls that make forks readable; no other metric counts them."),
        ("ctxreuse_prime_tokens", "reported.prime_tokens", "Tokens that primes computed."),
        ("ctxreuse_planned_prefix_cache_hits_tokens", "cached_if_planned",
         "Block tokens expected in the cache as planned, also in shadow mode."),
        ("ctxreuse_block_tokens", "block_tokens",
         "Tokens of the blocks of all requests, including those left out."),
        ("ctxreuse_left_out_tokens", "left_out",
         "Tokens of blocks that a reference replaces, or in shadow mode would replace."),
        ("ctxreuse_requests", "requests", "Requests that were planned."),
        ("ctxreuse_changed_requests", "changed",
         "Requests not sent as retrieved, or in shadow mode that would not be."),
    ),
    *_families(
        "counter", (*_CLASS, "time_to_live"),
        ("ctxreuse_reported_prefix_cache_written_tokens", "reported.written",
         "Prompt tokens that hosted caches wrote and charged for, by time to live."),
    ),
    *_families(
        "gauge", _CLASS,
        ("ctxreuse_retrieved_prefix_cache_hits_tokens", "cached_as_retrieved",
         "Block tokens that would be expected in the cache in the retriever's order, each tenant "
         "alone; an estimate."),
        ("ctxreuse_retrieved_prefix_cache_error_tokens", "error_tokens",
         "Two standard errors of that estimate."),
    ),
    *_families(
        "histogram", (),
        ("ctxreuse_planning_seconds", "savings.planning",
         "Planning time; a request of a batch has its share of the batch's time."),
    ),
    *_families(
        "gauge", (),
        ("ctxreuse_shadow_mode", lambda one: float(one.savings.mode == "shadow"),
         "1 if the planner only counts (shadow mode), else 0."),
        ("ctxreuse_index_tokens", "statistics.tokens",
         "Block tokens that the planner believes to be cached."),
        ("ctxreuse_shared_log_waiting_entries", "sharing.untold", "Entries not yet written."),
    ),
    *_families(
        "counter", (),
        ("ctxreuse_planning_failures", "savings.planning_failures",
         "Internal errors of planning; the request was sent as given."),
        ("ctxreuse_prompts_without_context", "savings.prompts_without_context",
         "Prompts in which a model wrapper found no context."),
        ("ctxreuse_shared_log_faults", "sharing.faults",
         "How often the shared log could not be read or written."),
    ),
    *_families(
        "gauge", ("part",),
        ("ctxreuse_remembered_entries", partial(_parts, 0),
         "Entries that a planner remembers, by part of its state."),
        ("ctxreuse_remembered_entries_limit", partial(_parts, 1),
         "The bound on these entries."),
    ),
    *_families(
        "counter", ("search",),
        ("ctxreuse_limits_reached", "statistics.limits_reached",
         "Searches that ended at their bound, by what they looked for."),
    ),
    *_families(
        "counter", ("outcome",),
        ("ctxreuse_shared_log_entries", _shared,
         "Entries of the shared log: told (written), taken in (read), lost, unreadable."),
    ),
)  # fmt: skip
"""What is told of each planner; label `planner`."""

OF_REPLICAS: Final = (
    *_families(
        "gauge", ("state",),
        ("ctxreuse_replica_state", _states, "1 for the state of an engine of a pool, else 0."),
    ),
    *_families(
        "gauge", (),
        ("ctxreuse_replica_running_requests", "running",
         "Requests that an engine has not answered yet."),
        ("ctxreuse_replica_waiting_requests", "waiting", "Requests that are held back for it."),
        ("ctxreuse_replica_queued_tokens", "queued_tokens",
         "Prompt tokens that these are expected to compute."),
    ),
    *_families(
        "counter", (),
        ("ctxreuse_replica_answered_requests", "answered", "Requests that it has answered."),
        ("ctxreuse_replica_failed_requests", "failed", "Requests that it has not answered."),
    ),
)  # fmt: skip
"""What is told of each engine of a pool; labels `pool` and `replica`."""

_LONGEST_NAME = 64
_Samples: TypeAlias = Mapping[str, Sequence[tuple[tuple[str, ...], Any]]]
"""By metric: the values of its own labels, and its value."""
_Read: TypeAlias = dict[tuple[str, ...], _Samples]  # by whose they are


@runtime_checkable
class WatchedPool(Protocol):
    """What is read of a pool of engines; `EnginePool` has it all."""

    @property
    def planners(self) -> Mapping[str, ReusePlanner]:
        """The planner of each engine, by the engine's name."""

    def statistics(self) -> Sequence[Any]:
        """Return the status of each engine."""


class PlannerCollector:
    """Shows what planners and pools have done as metrics of `prometheus_client`.

    They are read when Prometheus asks. Each process shows what its own planners have done.

    Args:
        planners: A planner, which is called "default", or several by the label `planner`.
        pools: A pool of engines, or several by name. Each engine's planner is shown as
            "POOL/ENGINE".

    Raises:
        InvalidRequestError: a name that is no printable text of up to 64 characters.
        MissingExtraError: `prometheus_client` is not installed.

    Example:
        >>> from prometheus_client import CollectorRegistry
        >>> from ctxreuse import ContextRequest, ReusePlanner
        >>> planner, registry = ReusePlanner(), CollectorRegistry()
        >>> PlannerCollector(planner).register(registry)
        >>> plan = planner.plan(ContextRequest(["a text"], "Which?"))
        >>> whose = {"planner": "default", "tenant_class": ""}
        >>> registry.get_sample_value("ctxreuse_requests_total", whose)
        1
    """

    def __init__(
        self,
        planners: ReusePlanner | Mapping[str, ReusePlanner] | None = None,
        pools: WatchedPool | Mapping[str, WatchedPool] | None = None,
    ) -> None:
        words = "a ReusePlanner"
        self._planners: dict[str, ReusePlanner] = _named("planners", planners, ReusePlanner, words)
        self._pools: dict[str, WatchedPool] = _named("pools", pools, WatchedPool, "an EnginePool")
        try:
            from prometheus_client import core
        except ImportError as error:
            raise MissingExtraError("metrics for Prometheus", "metrics") from error
        self._core: Any = core
        self._failing = FailOpen("PlannerCollector", "its metrics are left out", "reading metrics")

    @property
    def faults(self) -> int:
        """How often a planner or a pool could not be read."""
        return self._failing.faults

    def register(self, registry: CollectorRegistry | None = None) -> None:
        """Show the metrics in a registry of `prometheus_client`; None is its default one.

        Raises:
            InvalidRequestError: the registry has metrics of these names already.
        """
        kind = self._core.CollectorRegistry
        checked_kind("registry", registry, (kind, NoneType), "a CollectorRegistry or None")
        try:
            (self._core.REGISTRY if registry is None else registry).register(self)
        except ValueError as error:
            raise InvalidRequestError(
                "the registry shows the metrics of a PlannerCollector already; make one for all "
                'planners, PlannerCollector({"chat": chat, "search": search}), or give another '
                "registry"
            ) from error

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, as `prometheus_client` asks for them."""
        return PlannerCollector().collect()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, as `prometheus_client` asks for them."""
        read, status = _Read(), _Read()
        planners = dict(self._planners)
        for name, pool in self._pools.items():
            of_pool = self._failing.attempt(lambda pool=pool: dict(pool.planners), dict)  # type: ignore[misc]
            planners |= {f"{name}/{replica}": one for replica, one in of_pool.items()}
            status |= self._failing.attempt(partial(_read_pool, name, pool), dict)
        for name, planner in planners.items():
            read |= self._failing.attempt(partial(_read_planner, name, planner), dict)
        yield from self._shown(OF_PLANNERS, ("planner",), read)
        yield from self._shown(OF_REPLICAS, ("pool", "replica"), status)

    def _shown(
        self, families: Iterable[Family], whose: tuple[str, ...], read: _Read
    ) -> Iterator[Metric]:
        for one in families:
            family = self._family(one, whose)
            for names, samples in read.items():
                for labels, value in samples[one.name]:
                    shown: Any = (value,)
                    if isinstance(value, PlanningTime):
                        bounds = [*map(str, PLANNING_BOUNDS_S), "+Inf"]
                        buckets = zip(bounds, accumulate(value.buckets), strict=True)
                        shown = list(buckets), value.total_s
                    family.add_metric([*names, *labels], *shown)
            yield family

    def _family(self, one: Family, whose: tuple[str, ...]) -> Any:
        kind = getattr(self._core, f"{one.kind.title()}MetricFamily")
        return kind(one.name, one.help, labels=[*whose, *one.labels])


def _read_planner(name: str, planner: ReusePlanner) -> _Read:
    told = planner.savings, planner.statistics(), planner.sharing
    return {(name,): _samples(OF_PLANNERS, PlannerNumbers(*told))}


def _read_pool(name: str, pool: WatchedPool) -> _Read:
    return {(name, one.name): _samples(OF_REPLICAS, one) for one in pool.statistics()}


def _samples(families: Iterable[Family], numbers: Any) -> _Samples:
    """Return all that is shown of one planner or engine; whatever fails does so before any is."""
    return {one.name: list(one.read(numbers)) for one in families}


def _named(name: str, given: Any, kind: Any, words: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        given = {"default": given}
    for one, watched in given.items():
        if not (isinstance(one, str) and 0 < len(one) <= _LONGEST_NAME and one.isprintable()):
            raise InvalidRequestError(
                f"a name in {name} must be printable text of 1 to {_LONGEST_NAME} characters, "
                "which metrics show as a label"
            )
        checked_kind(f"each of {name}", watched, kind, words)
    return dict(given)
