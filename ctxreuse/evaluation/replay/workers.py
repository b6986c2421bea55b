"""Several worker processes that use one engine: how their planners order a trace together."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable

from ctxreuse.context.blocks import ContextRequest
from ctxreuse.planner import Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.planning.sharing import Entry
from ctxreuse.planning.tenant_planner import PlannerSettings, TenantPlanner


class WorkerPlanners:
    """A planner for each of several workers, to which a load balancer gives the requests in turn.

    The turns of a conversation go to the worker of its first one. Planners that share a log take in
    what the others have sent before a request only once as many others have come as there are
    workers: as if each of these were under way at the same time.

    Args:
        settings: How each of them plans.
        workers: How many there are.
        shares: Whether they share a log.
    """

    def __init__(self, settings: PlannerSettings, workers: int, *, shares: bool) -> None:
        self._log: list[tuple[int, Entry]] = []
        self._planners = [
            TenantPlanner(settings, _Worker(number, self._log) if shares else None)
            for number in range(workers)
        ]
        self._known = [0] * workers  # entries of the log
        self._requests = 0
        self._lengths = deque([0], maxlen=workers)  # of the log, before each of the latest requests
        self._of_conversation: dict[tuple[str, object], int] = {}

    def plan(self, request: ContextRequest, strategy: Strategy) -> Plan:
        """Plan a request as the worker does that it goes to."""
        number = self._requests % len(self._planners)
        self._requests += 1
        if request.conversation_id is not None:
            conversation = request.tenant, request.conversation_id
            number = self._of_conversation.setdefault(conversation, number)
        self._take_in(number)
        plan = self._planners[number].plan(request, strategy)
        self._lengths.append(len(self._log))
        return plan

    def _take_in(self, number: int) -> None:
        planner, known = self._planners[number], self._lengths[0]
        for writer, entry in self._log[self._known[number] : known]:
            if writer != number:
                planner.take_in(entry)
        self._known[number] = known


class _Worker:
    """What a worker tells the others through: a list that all have."""

    def __init__(self, number: int, log: list[tuple[int, Entry]]) -> None:
        self._number = number
        self._log = log

    def keyed(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, digest_size=16).digest()

    def keyed_each(self, names: Iterable[bytes]) -> list[bytes]:
        return list(map(self.keyed, names))

    def own(self, name: bytes) -> bytes:
        return self.keyed(b"%d " % self._number + name)

    def tell(self, entry: Entry) -> None:
        self._log.append((self._number, entry))
