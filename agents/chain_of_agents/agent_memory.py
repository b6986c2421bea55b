"""What each agent has been shown and has answered in a conversation, replayed as it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.copies import made_with
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap

MANAGER = -1
"""The manager's number among the agents."""

_MAX_DOCUMENTS = 200_000
_ENTRY_CHARACTERS = 100
"""What a message, a document or a conversation takes besides its text."""


class ConversationKey(NamedTuple):
    """A conversation of a tenant; the id's type keeps the string "1" and the integer 1 apart."""

    tenant: str
    id_type: type
    id: str | int


_Messages: TypeAlias = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One agent's part in a conversation's turn."""

    agent: int  # `MANAGER` for the manager
    before: _Messages  # the history that it was sent behind
    prompt: str
    answer: str
    shown: tuple[bytes, ...] = ()


class _AgentTurns(NamedTuple):
    """A conversation's turns, in order, each agent's since it last began anew."""

    turns: tuple[AgentTurn, ...] = ()

    @property
    def characters(self) -> int:
        """How many characters it takes, about."""
        entries = 1 + sum(2 + len(one.shown) for one in self.turns)
        texts = sum(len(one.prompt) + len(one.answer) for one in self.turns)
        return entries * _ENTRY_CHARACTERS + texts

    def history(self, agent: int) -> _Messages:
        """Return what an agent has been sent and has answered."""
        own = [one for one in self.turns if one.agent == agent]
        return tuple(
            {"role": role, "content": text}
            for one in own
            for role, text in (("user", one.prompt), ("assistant", one.answer))
        )

    def after(self, turn: AgentTurn) -> _AgentTurns:
        """Return it with one turn more; itself if the agent's history has gone on since."""
        # of two turns at the same time, the later one cannot be replayed as it was sent
        if turn.before not in (self.history(turn.agent), ()):
            return self
        kept = [one for one in self.turns if turn.before or one.agent != turn.agent]
        return _AgentTurns((*kept, replace(turn, before=())))


class AgentMemory:
    """The agents' histories by conversation; a forgotten one costs reuse, never content."""

    def __init__(self, max_conversations: int = 1_000, max_characters: int = 64_000_000) -> None:
        self._bounds = max_conversations, max_characters
        self._lock = ForkSafeLock(self._forget_all)
        self._forget_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return made_with(AgentMemory, *self._bounds)

    def _forget_all(self) -> None:
        max_conversations, max_characters = self._bounds
        # with their sizes, which are asked more often than they change
        self._conversations: TenantLRUMap[ConversationKey, tuple[_AgentTurns, int]]
        self._conversations = TenantLRUMap(
            max_conversations, max_weight=max_characters, weight_of=itemgetter(1)
        )
        self._refused: TenantLRUMap[tuple[bytes, ...], bool] = TenantLRUMap(_MAX_DOCUMENTS)

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        with self._lock:
            return {
                "refused_segments": self._refused.size,
                "conversations": self._conversations.size,
                "conversation_characters": self._conversations.weight_size,
            }

    def note_refused(self, tenant: str, blocks: Iterable[ContextBlock]) -> None:
        """Remember that the model has no room for some blocks together."""
        with self._lock:
            self._refused.put(tenant, tuple([block.digest for block in blocks]), True)

    def is_refused(self, tenant: str, blocks: Iterable[ContextBlock]) -> bool:
        """Return whether the model had no room for some blocks together."""
        with self._lock:
            return self._refused.get(tenant, tuple([block.digest for block in blocks])) is not None

    def history(self, key: ConversationKey | None, agent: int) -> _Messages:
        """Return what an agent has been sent and has answered so far in a conversation."""
        with self._lock:
            return self._conversation(key).history(agent)

    def shown(self, key: ConversationKey | None) -> dict[bytes, int]:
        """Return which documents of a conversation stand in which agent's history."""
        with self._lock:
            turns = self._conversation(key).turns
            return {digest: one.agent for one in turns for digest in one.shown}

    def record(self, key: ConversationKey | None, turns: Iterable[AgentTurn]) -> None:
        """Append answered turns to the histories of their agents."""
        if key is None:
            return
        with self._lock:
            conversation = self._conversation(key)
            for turn in turns:
                conversation = conversation.after(turn)
            size = conversation.characters + len(str(key.id))
            self._conversations.put(key.tenant, key, (conversation, size))
            weight, bound = self._conversations.weight_size
            if weight > bound:  # by this one, which is the last left
                self._conversations.pop(key.tenant, key)

    def forget(self, key: ConversationKey) -> bool:
        """Forget a conversation; return whether it was known."""
        with self._lock:
            return self._conversations.pop(key.tenant, key) is not None

    def _conversation(self, key: ConversationKey | None) -> _AgentTurns:
        """Return what is remembered of a conversation, nothing at first; the lock is held."""
        known = None if key is None else self._conversations.of(key.tenant).peek(key)
        return _AgentTurns() if known is None else known[0]
