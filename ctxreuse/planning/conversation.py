"""A conversation that keeps its own messages: append-only, replayed byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ctxreuse.context.blocks import (
    BlockId,
    ContextBlock,
    ContextRequest,
    OpenAIMessage,
    OwnMessages,
)
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.rendering import render_messages
from ctxreuse.context.thoughts import without_thoughts
from ctxreuse.errors import ConversationError, describe
from ctxreuse.planning.plan import Plan


class Conversation:
    """One conversation. Made by `ReusePlanner.conversation`.

    Every turn's prompt begins with the bytes of the turn before, and blocks that stand there are
    left out. Threads may share it. Its methods raise InvalidRequestError for a wrong type.

    Example:
        >>> from ctxreuse import ReusePlanner
        >>> chat = ReusePlanner(labels=True).conversation("c1")
        >>> _ = chat.plan(["Paris is in France."], query="Where is Paris?")
        >>> chat.record("In France.")
        >>> chat.plan(["Paris is in France."], query="Sure?").location_annotations
        ('See also [GNEW] above.',)
    """

    def __init__(
        self,
        plan: Callable[..., Plan],
        without_blocks: Callable[..., list[dict[str, Any]]],
        conversation_id: str | int,
        tenant: str,
        system: str | None,
    ) -> None:
        self._plan = plan
        self._without_blocks = without_blocks
        self.conversation_id = conversation_id
        self.tenant = tenant
        self.system = system
        self._history = OwnMessages()
        self._unanswered: Plan | None = None
        self._lock = ForkSafeLock()  # between any two steps the messages are whole

    def plan(
        self,
        blocks: Iterable[ContextBlock | str],
        query: str = "",
        *,
        request_id: str | int | None = None,
        outdated: Iterable[ContextBlock] = (),
        now: float | None = None,
    ) -> Plan:
        """Plan the next turn; a turn that was planned but not answered is replaced.

        Args:
            blocks: The turn's retrieved blocks, best first.
            query: The user's question.
            request_id: The engine's id of the request, for eviction.
            outdated: Blocks of earlier turns that no longer hold; this turn says so.
            now: As in `ReusePlanner.plan`.

        Raises:
            InvalidBlockError: a block of the wrong type.
        """
        with self._lock:
            request = ContextRequest(
                blocks=blocks,
                query=query,
                system=self.system,
                history=self._history,
                conversation_id=self.conversation_id,
                tenant=self.tenant,
                request_id=request_id,
                outdated=outdated,
            )
            self._unanswered = self._plan(request, now=now)
            return self._unanswered

    def messages(self) -> list[OpenAIMessage]:
        """Return the messages so far: system, all turns, the unanswered one included."""
        with self._lock:
            if self._unanswered is not None:
                return self._unanswered.messages()
            return render_messages(self.system, self._history)

    def record(self, answer: str) -> None:
        """Append the model's answer to the turn that was planned last.

        Raises:
            ConversationError: no turn waits for an answer.
        """
        checked_kind("answer", answer, str, "a string")
        with self._lock:
            if self._unanswered is None:
                raise ConversationError(
                    f"conversation {describe(self.conversation_id)} has no turn that waits for an "
                    "answer; call plan() first"
                )
            turn, self._unanswered = self._unanswered, None
            # as it was sent: cut into parts where the cache keeps prefixes up to marks
            parts = turn.content_parts() if turn.cache.marks else ()
            content = [{"type": "text", "text": part.text} for part in parts] or turn.content
            self._history = OwnMessages(
                (
                    *self._history,
                    {"role": "user", "content": content},
                    {"role": "assistant", "content": without_thoughts(answer)},
                )
            )

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Take the texts of blocks with these ids out of the history.

        What the model said of them stays. A turn that waits for its answer is forgotten.
        """
        with self._lock:
            name = self.conversation_id, self.tenant
            self._history = OwnMessages(self._without_blocks(self._history, block_ids, *name))
            self._unanswered = None

    def compact(self, summary: str) -> None:
        """Replace the history by a summary, which becomes its first message.

        Blocks that the summary does not show are sent again when they come up. A turn that waits
        for its answer is forgotten.
        """
        checked_kind("summary", summary, str, "a string")
        with self._lock:
            self._unanswered = None
            self._history = OwnMessages(({"role": "user", "content": without_thoughts(summary)},))
