"""Who reads what: agents live on engines, and documents stay with their agents."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Protocol

from ctxreuse.context.blocks import BlockKey
from ctxreuse.errors import EngineError
from ctxreuse.serving.pool.placement import Document, rendezvous_order

_MAX_TENANTS = 1_000


class Engines(Protocol):
    """What a desk needs to know of the engines."""

    def all_engines(self) -> tuple[str, ...]:
        """Return the names of all engines."""

    def engines(self) -> tuple[str, ...]:
        """Return the names of those that may be sent something."""

    def generation(self, engine: str) -> int:
        """Return how often an engine has been found with an empty cache."""


class Assigner(Protocol):
    """Assigns documents to agents, as `ctxreuse.serving.pool.placement.DocumentAffinity` does."""

    def assign(
        self, documents: Sequence[Document], agents: Sequence[int], engines: Mapping[int, str]
    ) -> Sequence[int | str]:
        """Return the agent of each document, in the documents' order.

        Args:
            documents: The documents of one question, best first.
            agents: Who may be chosen.
            engines: The engine that each agent lives on.
        """

    def forget_agent(self, agent: int) -> None:
        """Forget what an agent has read."""


class AgentPlacement:
    """Assigns documents to agents, and agents to engines. May be shared by threads.

    Args:
        agents: How many agents there are.
        engines: The engines that they live on.
        assignment: Makes what assigns one tenant's documents.
    """

    def __init__(self, agents: int, engines: Engines, assignment: Callable[[], Assigner]) -> None:
        self._agents = range(agents)
        self._engines = engines
        self._assignment = assignment
        self._lives_on: dict[int, str] = {}
        self._generations: dict[str, int] = {}
        self._homes: OrderedDict[str, Assigner] = OrderedDict()
        self._lock = Lock()

    def engine_of(self, agent: int) -> str:
        """Return the engine that an agent lives on."""
        with self._lock:
            return self._lives_on[agent]

    def assign(
        self, documents: Sequence[Document], tenant: str, shown: Mapping[BlockKey, int]
    ) -> list[int]:
        """Return each document's agent.

        Args:
            documents: The documents of one question, best first.
            tenant: Whose question it is; others' questions have no say.
            shown: Documents that agents have been shown in this conversation: they stay with them,
                for they need only be pointed to.

        Raises:
            EngineError: If the last engine has been taken out of the pool.
        """
        with self._lock:
            self._look_at_engines()
            available = self._engines.engines()
            agents = [agent for agent in self._agents if self._lives_on[agent] in available]
            agents = agents or list(self._agents)
            new = [one for one in documents if shown.get(one.key) not in agents]
            assigned = iter(
                self._homes_of(tenant).assign(new, agents, self._lives_on) if new else ()
            )
            new_keys = {one.key for one in new}
            return [
                int(next(assigned)) if one.key in new_keys else shown[one.key] for one in documents
            ]

    def _homes_of(self, tenant: str) -> Assigner:
        homes = self._homes.get(tenant)
        if homes is None:
            homes = self._homes[tenant] = self._assignment()
            if len(self._homes) > _MAX_TENANTS:
                self._homes.popitem(last=False)
        self._homes.move_to_end(tenant)
        return homes

    def _look_at_engines(self) -> None:
        """Find homes for agents without one; forget what agents had read on emptied engines."""
        engines = self._engines.all_engines()
        if not engines:
            raise EngineError("the pool has no engine any more; add() one", attempts=0)
        self._lives_on = placed(self._agents, engines, self._lives_on)
        for engine in engines:
            generation = self._engines.generation(engine)
            if self._generations.setdefault(engine, generation) != generation:
                self._generations[engine] = generation
                for agent, home in self._lives_on.items():
                    if home == engine:
                        for homes in self._homes.values():
                            homes.forget_agent(agent)


def placed(
    agents: Sequence[int], engines: Sequence[str], before: Mapping[int, str]
) -> dict[int, str]:
    """Return the engine of each agent: evenly many on each, and nobody moves without need.

    Args:
        agents: The agents' numbers.
        engines: The engines' names.
        before: Where agents live now.
    """
    most = math.ceil(len(agents) / len(engines))
    living = Counter[str]()
    homes: dict[int, str] = {}
    for agent in agents:
        home = before.get(agent)
        if home is not None and home in engines and living[home] < most:
            homes[agent] = home
            living[home] += 1
    for agent in agents:
        if agent not in homes:
            order = rendezvous_order(b"agent %d" % agent, engines)
            homes[agent] = str(min(order, key=lambda engine: living[str(engine)]))
            living[homes[agent]] += 1
    return {agent: homes[agent] for agent in agents}
