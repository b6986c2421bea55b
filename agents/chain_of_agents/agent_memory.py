"""What each agent has been shown and has answered in a conversation, replayed as it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.blocks import BlockKey
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import LRUMap

MANAGER = -1
"""The manager's number among the agents."""


class ConversationKey(NamedTuple):
    """A conversation of a tenant; the id's type keeps the string "1" and the integer 1 apart."""

    tenant: str
    id_type: type
    id: str | int


_Messages: TypeAlias = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One agent's part in a conversation's turn.

    Attributes:
        agent: Its number; `MANAGER` for the manager.
        before: The history that the turn was sent behind.
        prompt: The turn's user message, as it was sent.
        answer: What the agent wrote, unchanged.
        shown: The documents that the message shows.
    """

    agent: int
    before: _Messages
    prompt: str
    answer: str
    shown: tuple[BlockKey, ...] = ()


@dataclass(slots=True)
class _AgentHistories:
    histories: dict[int, _Messages] = field(default_factory=dict)
    shown_to: dict[BlockKey, int] = field(default_factory=dict)


class AgentMemory:
    """The agents' histories in each conversation; the least recently used are forgotten.

    Forgetting one costs reuse, never content: documents are then sent again.

    Args:
        max_conversations: How many are remembered.
    """

    def __init__(self, max_conversations: int = 1_000) -> None:
        self._max_conversations = max_conversations
        self._lock = ForkSafeLock(self._forget_all)
        self._forget_all()

    def _forget_all(self) -> None:
        self._conversations = LRUMap[ConversationKey, _AgentHistories](self._max_conversations)

    def history(self, key: ConversationKey | None, agent: int) -> _Messages:
        """Return what an agent has been sent and has answered so far in a conversation."""
        with self._lock:
            conversation = None if key is None else self._conversations.peek(key)
            return () if conversation is None else conversation.histories.get(agent, ())

    def shown(self, key: ConversationKey | None) -> dict[BlockKey, int]:
        """Return which documents of a conversation stand in which agent's history."""
        with self._lock:
            conversation = None if key is None else self._conversations.peek(key)
            return {} if conversation is None else dict(conversation.shown_to)

    def record(self, key: ConversationKey | None, turns: Iterable[AgentTurn]) -> None:
        """Append answered turns to the histories of their agents.

        Where two turns of a conversation ran at the same time, the later one of an agent starts
        from a history that has gone on since; it is left out, because it cannot be replayed as it
        was sent.
        """
        if key is None:
            return
        with self._lock:
            conversation = self._conversations.get_or_make(key, _AgentHistories)
            for turn in turns:
                now = conversation.histories.get(turn.agent, ())
                if turn.before not in (now, ()):
                    continue
                if now and not turn.before:  # the agent began anew
                    for shown in [k for k, a in conversation.shown_to.items() if a == turn.agent]:
                        del conversation.shown_to[shown]
                conversation.histories[turn.agent] = (
                    *turn.before,
                    {"role": "user", "content": turn.prompt},
                    {"role": "assistant", "content": turn.answer},
                )
                conversation.shown_to.update(dict.fromkeys(turn.shown, turn.agent))

    def forget(self, key: ConversationKey) -> bool:
        """Forget a conversation; return whether it was known."""
        with self._lock:
            return self._conversations.pop(key) is not None
