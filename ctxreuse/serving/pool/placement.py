"""Which agent reads which document: one that read it before, unless its load is too high.

A document should go to the agent, and so to the engine, that has processed it before (ContextPilot
section 7.2). Three rules, in this order:

- *Affinity*: an agent that has read the document.
- *Rendezvous hashing* (Thaler and Ravishankar, 1998) for a new one: the agent that scores highest
  for it, the same in every process. An agent that comes or goes moves only its own documents.
- *Bounded load* (Mirrokni, Thorup and Zadimoghaddam, 2018): no agent takes a document that would
  bring its load above c times the mean; the next one in the document's order does.

Agents on one engine share its cache. So engines are ranked before agents are: what one agent has no
room for goes to its neighbours first.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

Agent: TypeAlias = str | int
"""An agent's name."""

DEFAULT_BOUND = 1.15
"""How far above the mean an agent's load may be: much lower moves many documents, much higher
leaves agents idle; both cost more than they save on the public traces."""

_SLACK_OF_READERS = 4
"""Documents that a reader of the next one may be above the mean, whatever the bound."""

_SLACK_OF_NEW = 0.75
"""How far above the mean, in means, an agent that takes a new document may be while there is little
load: less than 1, so that of two documents for two agents each gets one."""

_SLACK_TOKENS = 4_096
_WINDOW_TOKENS = 1_000_000
"""Of so many tokens, the latest, each agent's part is its load."""

_MAX_READERS = 4
"""Agents remembered for a document that is too much in demand for one."""


class Document(NamedTuple):
    """A document to assign."""

    key: bytes
    tokens: int  # what reading it costs


def rendezvous_order(key: bytes, agents: Iterable[Agent]) -> list[Agent]:
    """Return agents from the one that scores highest for a key to the lowest."""
    return sorted(agents, key=lambda agent: _score(key, agent))


def assign(
    documents: Sequence[Document],
    agents: Sequence[Agent],
    loads: Mapping[Agent, float],
    affinity: Mapping[bytes, Collection[Agent]],  # who has read what
    engines: Mapping[Any, str] | None = None,  # keys of Mapping are invariant
    bound: float = DEFAULT_BOUND,  # the c above, from 1
    slack_tokens: float = 0,
) -> list[Agent]:
    """Return the one agent for each document; none goes over the bound while another has room."""
    loaded = _Loads(agents, loads, engines or {}, bound)
    assigned = []
    for document in documents:
        tokens = document.tokens
        loaded.total += tokens
        read_by = [agent for agent in affinity.get(document.key, ()) if agent in loaded.of]
        # with little to do, keeping a document where it was read is worth more than evenness
        slack = max(slack_tokens, _SLACK_OF_READERS * tokens)
        chosen = min(
            (agent for agent in read_by if loaded.has_room(agent, tokens, slack)),
            key=lambda agent: (loaded.of[agent], _score(document.key, agent)),
            default=None,
        )
        if chosen is None:
            slack_of_new = min(slack_tokens, _SLACK_OF_NEW * loaded.total / len(agents))
            order = _order(document.key, loaded.engine_of, read_by)
            free = (agent for agent in order if loaded.has_room(agent, tokens, slack_of_new))
            chosen = next(free, None)
            if chosen is None:
                chosen = min(order, key=loaded.of.__getitem__)
        loaded.add(chosen, tokens)
        assigned.append(chosen)
    return assigned


class _Loads:
    """The loads of agents and their engines, and their bounds."""

    def __init__(
        self,
        agents: Sequence[Agent],
        loads: Mapping[Agent, float],
        engines: Mapping[Any, str],
        bound: float,
    ) -> None:
        self.of = {agent: loads.get(agent, 0.0) for agent in agents}
        self.total = sum(self.of.values())
        self.engine_of: dict[Agent, Agent] = {agent: engines.get(agent, agent) for agent in agents}
        self._bound = bound
        self._agents_on = Counter(self.engine_of.values())
        self._on: dict[Agent, float] = dict.fromkeys(self._agents_on, 0.0)
        for agent, load in self.of.items():
            self._on[self.engine_of[agent]] += load

    def has_room(self, agent: Agent, tokens: int, slack: float) -> bool:
        engine = self.engine_of[agent]
        sharing = self._agents_on[engine]
        mean = self.total / len(self.of)
        shared = sharing * mean
        # as tightly as chance evens out among the engine's agents
        shared_bound = 1 + (self._bound - 1) / math.sqrt(sharing)
        return self.of[agent] + tokens <= max(self._bound * mean, mean + slack) and self._on[
            engine
        ] + tokens <= max(shared_bound * shared, shared + slack)

    def add(self, agent: Agent, tokens: int) -> None:
        self.of[agent] += tokens
        self._on[self.engine_of[agent]] += tokens


class DocumentAffinity:
    """Remembers who read which document, and each one's part of the latest tokens."""

    def __init__(self, bound: float = DEFAULT_BOUND) -> None:
        self._bound = bound
        self._readers: OrderedDict[bytes, dict[Agent, None]] = OrderedDict()
        self._loads: dict[Agent, float] = {}

    def assign(
        self,
        documents: Sequence[Document],
        agents: Sequence[Agent],
        engines: Mapping[Any, str] | None = None,  # keys of Mapping are invariant
    ) -> list[Agent]:
        """Assign each document to one agent, and remember it."""
        assigned = self.proposal(documents, agents, engines)()
        self.note(documents, assigned)
        return assigned

    def proposal(
        self,
        documents: Sequence[Document],
        agents: Sequence[Agent],
        engines: Mapping[Any, str] | None = None,
    ) -> Callable[[], list[Agent]]:
        """Return what assigns documents by what is known now, and remembers nothing."""
        readers = {one.key: tuple(self._readers.get(one.key, ())) for one in documents}
        known = dict(self._loads), readers, engines, self._bound, _SLACK_TOKENS
        return partial(assign, documents, agents, *known)

    def note(self, documents: Sequence[Document], assigned: Sequence[Agent]) -> None:
        """Remember the agent of each document."""
        for document, agent in zip(documents, assigned, strict=True):
            readers = self._readers.setdefault(document.key, {})
            readers.pop(agent, None)
            readers[agent] = None
            if len(readers) > _MAX_READERS:
                del readers[next(iter(readers))]
            self._readers.move_to_end(document.key)
            fading = math.exp(-document.tokens / _WINDOW_TOKENS)
            for one in self._loads:
                self._loads[one] *= fading
            self._loads[agent] = self._loads.get(agent, 0.0) + document.tokens

    def __len__(self) -> int:
        """Return how many documents are remembered; who keeps it bounds them."""
        return len(self._readers)

    def forget_oldest(self) -> None:
        """Forget the least recently assigned document, if there is one."""
        if self._readers:
            self._readers.popitem(last=False)

    def forget_agent(self, agent: Agent) -> None:
        """Forget what an agent has read, because its engine has lost its cache."""
        self._loads.pop(agent, None)
        for key in [key for key, readers in self._readers.items() if agent in readers]:
            del self._readers[key][agent]
            if not self._readers[key]:
                del self._readers[key]


def _order(key: bytes, engine_of: Mapping[Agent, Agent], read_by: Iterable[Agent]) -> list[Agent]:
    """Return agents in the order in which a document prefers them: cached, then by hash."""
    cached_on = {engine_of[agent] for agent in read_by}
    rank = {
        agent: (engine not in cached_on, _score(key, engine), _score(key, agent))
        for agent, engine in engine_of.items()
    }
    return sorted(rank, key=rank.__getitem__)


def _score(key: bytes, agent: Agent) -> bytes:
    name = f"{type(agent).__name__}:{agent}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name + b"\0" + key, digest_size=8).digest()
