"""Metrics for Prometheus, read from planners when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from ctxreuse.cache.telemetry.families import OF_PLANNERS, OF_REPLICAS, Family, PlannerNumbers
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fail_open import FailOpen
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.savings import PLANNING_BOUNDS_S, PlanningTime

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

_LONGEST_NAME = 64
_Samples: TypeAlias = Mapping[str, Sequence[tuple[tuple[str, ...], Any]]]
"""By metric: the values of its own labels, and its value."""


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
        InvalidRequestError: wrong type, or a name that is no printable text of up to 64 characters.
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
        """Show the metrics in a registry.

        Args:
            registry: A registry of `prometheus_client`; None is its default one.

        Raises:
            InvalidRequestError: wrong type, or the registry has metrics of these names already.
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
        of_planners = [self._family(one, ("planner",)) for one in OF_PLANNERS]
        return of_planners + [self._family(one, ("pool", "replica")) for one in OF_REPLICAS]

    def collect(self) -> Iterator[Metric]:
        """Return the metrics, as `prometheus_client` asks for them."""
        read: dict[tuple[str, ...], _Samples] = {}
        status: dict[tuple[str, ...], _Samples] = {}
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
        self,
        families: Iterable[Family],
        whose: tuple[str, ...],
        read: Mapping[tuple[str, ...], _Samples],
    ) -> Iterator[Metric]:
        for one in families:
            family = self._family(one, whose)
            for names, samples in read.items():
                for labels, value in samples[one.name]:
                    shown: tuple[Any, ...] = (value,)
                    if isinstance(value, PlanningTime):
                        bounds = [*map(str, PLANNING_BOUNDS_S), "+Inf"]
                        buckets = zip(bounds, accumulate(value.buckets), strict=True)
                        shown = list(buckets), value.total_s
                    family.add_metric([*names, *labels], *shown)
            yield family

    def _family(self, one: Family, whose: tuple[str, ...]) -> Any:
        kind = getattr(self._core, f"{one.kind.title()}MetricFamily")
        return kind(one.name, one.help, labels=[*whose, *one.labels])


def _read_planner(name: str, planner: ReusePlanner) -> dict[tuple[str, ...], _Samples]:
    numbers = PlannerNumbers(planner.savings, planner.statistics(), planner.sharing)
    return {(name,): _samples(OF_PLANNERS, numbers)}


def _read_pool(name: str, pool: WatchedPool) -> dict[tuple[str, ...], _Samples]:
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
