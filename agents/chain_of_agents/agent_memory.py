"""What each agent has been shown and has answered in a conversation, replayed as it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.copies import made_with
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap

MANAGER = -1
"""The manager's number among the agents."""

_ENTRY_CHARACTERS = 100
"""What a message, a document or a conversation takes besides its text."""


class ConversationKey(NamedTuple):
    """A conversation of a tenant."""

    tenant: str
    id: str | int


_Messages: TypeAlias = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One agent's part in a conversation's turn."""

    agent: int  # `MANAGER` for the manager
    before: _Messages  # the history that it was sent behind; not kept
    prompt: str
    answer: str
    shown: tuple[bytes, ...] = ()


_Turns: TypeAlias = tuple[AgentTurn, ...]
"""A conversation's turns, in order, each agent's since it last began anew."""


def _history(turns: _Turns, agent: int) -> _Messages:
    return tuple(
        {"role": role, "content": text}
        for one in turns
        if one.agent == agent
        for role, text in (("user", one.prompt), ("assistant", one.answer))
    )


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
        self._conversations: TenantLRUMap[ConversationKey, tuple[_Turns, int]]
        self._conversations = TenantLRUMap(
            max_conversations, max_weight=max_characters, weight_of=itemgetter(1)
        )

    @property
    def parts(self) -> dict[str, PartSize]:
        """How much is remembered, and how much may be; all tenants together."""
        with self._lock:
            return {
                "conversations": self._conversations.size,
                "conversation_characters": self._conversations.weight_size,
            }

    def history(self, key: ConversationKey | None, agent: int) -> _Messages:
        """Return what an agent has been sent and has answered so far in a conversation."""
        return _history(self._turns(key), agent)

    def shown(self, key: ConversationKey | None) -> dict[bytes, int]:
        """Return which documents of a conversation stand in which agent's history."""
        return {digest: one.agent for one in self._turns(key) for digest in one.shown}

    def record(self, key: ConversationKey | None, turns: Iterable[AgentTurn]) -> None:
        """Append answered turns to the histories of their agents."""
        if key is None:
            return
        with self._lock:
            kept = self._turns(key)
            for turn in turns:
                # of two turns at the same time, the later one cannot be replayed as it was sent
                if turn.before in (_history(kept, turn.agent), ()):
                    others = [one for one in kept if turn.before or one.agent != turn.agent]
                    kept = (*others, replace(turn, before=()))
            entries = 1 + sum(2 + len(one.shown) for one in kept)
            texts = len(str(key.id)) + sum(len(one.prompt) + len(one.answer) for one in kept)
            size = entries * _ENTRY_CHARACTERS + texts
            self._conversations.put(key.tenant, key, (kept, size))
            weight, bound = self._conversations.weight_size
            if weight > bound:  # by this one, which is the last left
                self._conversations.pop(key.tenant, key)

    def forget(self, key: ConversationKey) -> bool:
        """Forget a conversation; return whether it was known."""
        with self._lock:
            return self._conversations.pop(key.tenant, key) is not None

    def _turns(self, key: ConversationKey | None) -> _Turns:
        with self._lock:
            known = None if key is None else self._conversations.of(key.tenant).peek(key)
        return () if known is None else known[0]
