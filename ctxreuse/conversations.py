"""What each conversation has been shown: de-duplication across turns.

A block is left out only if its text, under its label, really stands in the messages that will be
sent (ContextPilot Algorithm 3 trusts its own record instead, and so refers to turns that were
edited, branched or cut away). The record here only says where to look: for each block that was
sent its label and the digest of its text, never the text itself. Forgetting a conversation costs
reuse, never content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from ctxreuse.annotations import Templates
from ctxreuse.blocks import BlockId, BlockKey, ContextBlock, Message, text_digest
from ctxreuse.index import Node
from ctxreuse.prompts import message_texts

_TRUSTED_ORDINALS = 1_000_000


@dataclass(frozen=True, slots=True)
class ShownBlock:
    """A block as a conversation's record knows it."""

    key: BlockKey
    id: BlockId
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class History:
    """What the messages before this turn show.

    Attributes:
        labels: Label -> block id, for the recorded blocks that really stand there.
        label_of: Block -> its label, for the same blocks.
        used: Every ordinal that stands in a label anywhere in the messages.
    """

    labels: Mapping[str, BlockId]
    label_of: Mapping[BlockKey, str]
    used: frozenset[int]

    def next_ordinals(self, number: int) -> list[int]:
        """Return the ordinals of the next blocks: those that follow the ones in use.

        A label that some document's text happens to hold is never given out again, and an absurdly
        high one does not set the count.
        """
        start = max((used for used in self.used if used <= _TRUSTED_ORDINALS), default=0) + 1
        return list(islice((n for n in count(start) if n not in self.used), number))


EMPTY_HISTORY = History({}, {}, frozenset())


@dataclass(slots=True)
class _Record:
    """One conversation: recorded blocks by ordinal, and where its last turn ends in the index."""

    shown: OrderedDict[tuple[int, BlockKey], ShownBlock] = field(default_factory=OrderedDict)
    end: Node | None = None
    system: str | None = None
    last_use: int = 0


class Conversations:
    """The records of one tenant's conversations, bounded by count and age.

    Args:
        max_conversations: How many are remembered; the least recently used goes first.
        max_idle: A conversation unused for this many of the tenant's requests is forgotten.
        max_blocks: How many blocks of one conversation are remembered, the oldest going first.
    """

    def __init__(
        self, max_conversations: int = 10_000, max_idle: int = 1_000_000, max_blocks: int = 2_000
    ) -> None:
        self._max_conversations = max_conversations
        self._max_idle = max_idle
        self._max_blocks = max_blocks
        self._records: OrderedDict[str | int, _Record] = OrderedDict()
        self._requests = 0

    def __len__(self) -> int:
        return len(self._records)

    def read(
        self,
        conversation_id: str | int | None,
        messages: Sequence[Message],
        templates: Templates,
    ) -> History:
        """Return what the messages show of the blocks that this conversation was sent.

        Args:
            conversation_id: Whose record says where to look; None has no record.
            messages: The history that will be sent before this turn.
            templates: The words that the blocks were rendered with.
        """
        record = None if conversation_id is None else self._records.get(conversation_id)
        recorded: dict[int, list[ShownBlock]] = {}
        if record is not None:
            for (ordinal, _), shown in reversed(record.shown.items()):  # the latest is right
                recorded.setdefault(ordinal, []).append(shown)
        labels: dict[str, BlockId] = {}
        label_of: dict[BlockKey, str] = {}
        used: set[int] = set()
        for message in messages:
            for text in message_texts(message):
                for found in templates.label_pattern.finditer(text):
                    ordinal = int(found[1])
                    used.add(ordinal)
                    for shown in recorded.get(ordinal, ()):
                        if _stands_at(shown, text, found.start(), found[0], templates):
                            labels.setdefault(found[0], shown.id)
                            label_of.setdefault(shown.key, found[0])
        return History(labels, label_of, frozenset(used))

    def remember(
        self,
        conversation_id: str | int,
        sent: Iterable[tuple[int, ContextBlock]],
        end: Node,
        system: str | None,
    ) -> None:
        """Record the blocks of a turn under their ordinals, and where the turn ends."""
        self._requests += 1
        record = self._records.setdefault(conversation_id, _Record())
        self._records.move_to_end(conversation_id)
        record.end, record.system, record.last_use = end, system, self._requests
        for ordinal, block in sent:
            record.shown[ordinal, block.key] = ShownBlock(
                block.key, block.id, len(block.text), block.digest
            )
            record.shown.move_to_end((ordinal, block.key))
        while len(record.shown) > self._max_blocks:
            record.shown.popitem(last=False)
        while self._records and (
            len(self._records) > self._max_conversations
            or next(iter(self._records.values())).last_use < self._requests - self._max_idle
        ):
            self._records.popitem(last=False)

    def end_of(self, conversation_id: str | int | None, system: str | None) -> Node | None:
        """Return the index node where the conversation's last turn ends, if it is known."""
        record = None if conversation_id is None else self._records.get(conversation_id)
        if record is None or record.system != system:
            return None
        return record.end

    def forget(self, conversation_id: str | int) -> bool:
        """Drop a conversation's record; return whether there was one."""
        return self._records.pop(conversation_id, None) is not None


def _stands_at(
    shown: ShownBlock, text: str, label_start: int, label: str, templates: Templates
) -> bool:
    """Return whether the block, rendered under the label found at `label_start`, stands there."""
    before = templates.before_text(label)
    start = label_start - before.index(label)
    first = start + len(before)
    end = first + shown.length
    after = templates.after_text
    return (
        (start == 0 or text.endswith(("\n", templates.separator), 0, start))
        and text.startswith(before, start)
        and len(text) >= end + len(after)
        and text.startswith(after, end)
        and (
            len(text) == end + len(after)
            or text.startswith(("\n", templates.separator), end + len(after))
        )
        and text_digest(text[first:end]) == shown.digest
    )
