"""Several worker processes that use one engine: what their planners reach together on a trace."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.context.tokens import estimate_tokens
from ctxreuse.measure.replay.estimate import deduplications
from ctxreuse.measure.replay.plan_trace import plan_under
from ctxreuse.measure.replay.policies import MeasuredPolicy, keeping_best
from ctxreuse.measure.replay.run_result import Run, RunResult
from ctxreuse.measure.replay.simulate import Replay
from ctxreuse.memory.sent_log import EditEntry, ToldEntry
from ctxreuse.planner import Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.planning.tenant_planner import PlannerSettings, TenantPlanner
from ctxreuse.policy.ready import ready_policies
from ctxreuse.policy.view import Policy


def worker_policies(workers: int) -> tuple[MeasuredPolicy, ...]:
    """Return how a number of workers order: each on its own, and with a shared log."""
    return (
        MeasuredPolicy(f"{workers} workers, no log", "reuse", "online"),
        MeasuredPolicy(f"{workers} workers, shared log", "reuse", "online"),
    )


def estimate_workers(
    replay: Replay,
    capacities: Sequence[int | None],
    workers: int,
    *,
    keep_best: bool = False,
) -> Iterator[RunResult]:
    """Yield what several workers reach, each on its own and then with a shared log."""
    policies = worker_policies(workers)
    if keep_best:
        policies = keeping_best(policies)
    for shares, policy in enumerate(policies):
        for deduplicate in deduplications(replay.trace):
            for capacity in capacities:
                run = Run(policy, replay.trace, deduplicate, capacity, workers=workers)
                yield _measured(replay, run, workers, shares=bool(shares))


def _measured(replay: Replay, run: Run, workers: int, *, shares: bool) -> RunResult:
    settings = PlannerSettings(
        alpha=0.0,
        count_tokens=estimate_tokens,
        capacity_tokens=run.capacity_tokens,
        templates=DEFAULT_TEMPLATES,
        deduplicate=run.deduplicate,
        annotate=not run.policy.keep_best,
        labels=run.policy.labels(deduplicate=run.deduplicate),
        trim_overlaps=False,
        cache=replay.cache,
        keep_best=run.policy.keep_best,
    )
    planners = WorkerPlanners(settings, workers, shares=shares)
    planned = plan_under(
        run.policy, run.trace, planners, conversations=True, advance=replay.advance
    )
    usages = replay.served(planned, run.capacity_tokens)
    return RunResult.of_run(run, planned, usages, planners.planning_s)


class WorkerPlanners:
    """A planner for each worker; a load balancer gives them the requests in turn."""

    def __init__(self, settings: PlannerSettings, workers: int, *, shares: bool) -> None:
        self.planning_s = 0.0
        self._policies = ready_policies(settings.alpha)
        self._log: list[tuple[int, ToldEntry]] = []
        self._planners = [
            TenantPlanner(settings, _Worker(number, self._log) if shares else None)
            for number in range(workers)
        ]
        self._known = [0] * workers  # entries of the log
        self._requests = 0
        self._lengths = deque([0], maxlen=workers)  # of the log, before each of the latest requests
        self._of_conversation: dict[tuple[str, object], int] = {}

    def plan(
        self,
        request: ContextRequest,
        strategy: Strategy | Policy,
        *,
        now: float | None = None,
        primes: bool = False,
    ) -> Plan:
        """Plan a request as the worker does that it goes to."""
        number = self._requests % len(self._planners)
        self._requests += 1
        if request.conversation_id is not None:
            conversation = request.tenant, request.conversation_id
            number = self._of_conversation.setdefault(conversation, number)
        self._take_in(number)
        policy = self._policies[strategy] if isinstance(strategy, str) else strategy
        started = time.perf_counter()
        plan = self._planners[number].plan(request, policy, primes=primes)
        self.planning_s += time.perf_counter() - started
        self._lengths.append(len(self._log))
        return plan

    def _take_in(self, number: int) -> None:
        planner, known = self._planners[number], self._lengths[0]
        for writer, entry in self._log[self._known[number] : known]:
            if writer != number and not isinstance(entry, EditEntry):
                planner.take_in(entry)
        self._known[number] = known


class _Worker:
    """What a worker tells the others through: a list that all have."""

    def __init__(self, number: int, log: list[tuple[int, ToldEntry]]) -> None:
        self._number = number
        self._log = log

    def keyed(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=16).digest()

    def keyed_each(self, names: Iterable[bytes]) -> list[bytes]:
        return list(map(self.keyed, names))

    def own(self, name: bytes) -> bytes:
        return self.keyed(b"%d " % self._number + name)

    def tell(self, entry: ToldEntry) -> None:
        self._log.append((self._number, entry))
