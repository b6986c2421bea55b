"""What each agent has been shown and has answered in a conversation, replayed as it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
    before: _Messages  # the history that it was sent behind
    prompt: str
    answer: str
    shown: tuple[bytes, ...] = ()


class _Replayed(NamedTuple):
    """What an agent was sent and has answered since it last began anew, and was shown in it."""

    messages: _Messages = ()
    shown: tuple[bytes, ...] = ()


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
        self._conversations: TenantLRUMap[ConversationKey, tuple[dict[int, _Replayed], int]]
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
        return self._of(key).get(agent, _Replayed()).messages

    def shown(self, key: ConversationKey | None) -> dict[bytes, int]:
        """Return which documents of a conversation stand in which agent's history."""
        return {digest: agent for agent, one in self._of(key).items() for digest in one.shown}

    def record(self, key: ConversationKey | None, turns: Iterable[AgentTurn]) -> None:
        """Append answered turns to the histories of their agents."""
        if key is None:
            return
        with self._lock:
            kept = dict(self._of(key))
            for turn in turns:
                known = kept.get(turn.agent, _Replayed())
                # of two turns at the same time, the later one cannot be replayed as it was sent
                if turn.before in (known.messages, ()):
                    asked = {"role": "user", "content": turn.prompt}
                    messages = *turn.before, asked, {"role": "assistant", "content": turn.answer}
                    shown = known.shown if turn.before else ()
                    kept[turn.agent] = _Replayed(messages, shown + turn.shown)
            size = len(str(key.id)) + _ENTRY_CHARACTERS
            for messages, shown in kept.values():
                size += _ENTRY_CHARACTERS * (len(messages) + len(shown))
                size += sum(len(one["content"]) for one in messages)
            self._conversations.put(key.tenant, key, (kept, size))
            if size > self._bounds[1]:
                self._conversations.pop(key.tenant, key)

    def forget(self, key: ConversationKey) -> bool:
        """Forget a conversation; return whether it was known."""
        with self._lock:
            return self._conversations.pop(key.tenant, key) is not None

    def _of(self, key: ConversationKey | None) -> dict[int, _Replayed]:
        with self._lock:
            known = None if key is None else self._conversations.of(key.tenant).peek(key)
        return {} if known is None else known[0]
