"""Which agent reads which document, and which engine each agent lives on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from chain_of_agents.models import SingleEngineModel
from ctxreuse.context.blocks import text_digest
from ctxreuse.context.copies import made_with
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap, PartSize, TenantShares
from ctxreuse.errors import EngineError
from ctxreuse.serving.pool.engine_pool import EnginePool
from ctxreuse.serving.pool.placement import Document, DocumentAffinity, rendezvous_order

_MAX_TENANTS = 1_000
_MAX_DOCUMENTS = 200_000
_AT_ONCE = 64
"""Documents whose assigner is held for them."""


class Assigner(Protocol):
    """Assigns documents to agents, as `ctxreuse.serving.pool.placement.DocumentAffinity` does."""

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> Sequence[int | str]:
        """Return the agent of each document, in the documents' order."""

    def forget_agent(self, agent: int) -> None:
        """Forget what an agent has read."""


class InOrder:
    """Has agents read documents in the order given, as many each."""

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> Sequence[int | str]:
        """Assign the first ones to the first agent, and so on."""
        return [agents[n * len(agents) // len(documents)] for n in range(len(documents))]

    def forget_agent(self, agent: int) -> None:
        """Know nothing of what was read."""


class AgentPlacement:
    """Assigns documents to agents, these to engines, for the latest 1,000 tenants; thread-safe."""

    def __init__(
        self,
        agents: int,
        engines: EnginePool | SingleEngineModel,
        assignment: Callable[[], Assigner],
    ) -> None:
        self._agents = range(agents)
        self._engines = engines
        self._assignment = assignment
        self._lock = ForkSafeLock(self._start_anew)
        self._start_anew()

    def __reduce__(self) -> tuple[Any, ...]:
        return made_with(AgentPlacement, len(self._agents), self._engines, self._assignment)

    def _start_anew(self) -> None:
        self.lives_on: dict[int, str] = {}  # agents' engines
        self._cache_epochs: dict[str, int] = {}
        self._assigners = LRUMap[str, Assigner](_MAX_TENANTS)
        self._documents = TenantShares(_MAX_DOCUMENTS)

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        with self._lock:
            return {"tenants": self._assigners.size, "documents": self._documents.size}

    def assign(
        self, documents: Sequence[Document], tenant: str, shown: Mapping[bytes, int]
    ) -> list[int]:
        """Return each document's agent; one that an agent has been shown stays with it."""
        with self._lock:
            engines = self._engines.names
            if not engines:
                raise EngineError("the pool has no engine any more; add() one", attempts=0)
            lives_on = self.lives_on = placed(self._agents, engines, self.lives_on)
            for engine in engines:
                epoch = self._engines.cache_epoch(engine)
                if self._cache_epochs.setdefault(engine, epoch) != epoch:  # what was read is gone
                    self._cache_epochs[engine] = epoch
                    readers = [agent for agent, home in lives_on.items() if home == engine]
                    for name, assigner in self._assigners.items():
                        for agent in readers:
                            assigner.forget_agent(agent)
                        self._note_documents(name)
        available = self._engines.available()
        agents = [one for one in self._agents if lives_on[one] in available] or list(self._agents)
        stay = {key: agent for key, agent in shown.items() if agent in agents}
        new = [one for one in documents if one.key not in stay]
        assigned = iter(self._assigned(new, agents, lives_on, tenant) if new else ())
        return [stay[one.key] if one.key in stay else int(next(assigned)) for one in documents]

    def _assigned(
        self,
        documents: Sequence[Document],
        agents: Sequence[int],
        lives_on: Mapping[int, str],
        tenant: str,
    ) -> Sequence[int | str]:
        """Assign documents; nobody waits while the agents of many are worked out."""
        name = text_digest(tenant).hex()  # a tenant's may be long
        with self._lock:
            assigner = self._assigner(name)
            if not isinstance(assigner, DocumentAffinity):
                return assigner.assign(documents, agents, lives_on)
            propose = assigner.proposal(documents, agents, lives_on)
        proposed = propose()
        for start in range(0, len(documents), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            with self._lock:
                assigner = self._assigner(name)
                if isinstance(assigner, DocumentAffinity):  # a new one if it was forgotten
                    assigner.note(documents[part], proposed[part])
                    self._keep_bound(name)
        return proposed

    def _assigner(self, tenant: str) -> Assigner:
        """Return the assigner of a tenant, a new one if there is none; the lock is held."""
        assigner = self._assigners.get(tenant)
        if assigner is None:
            assigner = self._assignment()
            for gone, _ in self._assigners.put(tenant, assigner):
                self._documents.note(gone, 0)
        return assigner

    def _keep_bound(self, tenant: str) -> None:
        """Forget documents until there is room for those that a tenant's assigner has noted."""
        self._note_documents(tenant)
        while self._documents.total > self._documents.bound:
            largest = self._documents.largest()
            assigner = self._assigners.peek(largest)
            assert isinstance(assigner, DocumentAffinity), "no other one has documents"
            assigner.forget_oldest()
            self._note_documents(largest)

    def _note_documents(self, tenant: str) -> None:
        assigner = self._assigners.peek(tenant)
        if isinstance(assigner, DocumentAffinity):
            self._documents.note(tenant, len(assigner))


def placed(
    agents: Sequence[int], engines: Sequence[str], before: Mapping[int, str]
) -> dict[int, str]:
    """Return the engine of each agent: evenly many on each, and no agent moves without need."""
    most = math.ceil(len(agents) / len(engines))
    living = Counter[str]()
    lives_on: dict[int, str] = {}
    for agent in agents:
        engine = before.get(agent)
        if engine is not None and engine in engines and living[engine] < most:
            lives_on[agent] = engine
            living[engine] += 1
    for agent in agents:
        if agent not in lives_on:
            order = rendezvous_order(b"agent %d" % agent, engines)
            lives_on[agent] = str(min(order, key=lambda engine: living[str(engine)]))
            living[lives_on[agent]] += 1
    return {agent: lives_on[agent] for agent in agents}
