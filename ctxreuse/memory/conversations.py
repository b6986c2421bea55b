"""What each conversation has been shown: de-duplication across turns.

A block is left out only if its text, under its label, stands in the messages that will be sent;
ContextPilot Algorithm 3 trusts its own record instead. The record here only says where to look, and
holds digests but no text. Forgetting a conversation costs reuse, never content.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

from ctxreuse.context.blocks import (
    BlockId,
    BlockKey,
    ContextBlock,
    Message,
    copied_message,
    id_size,
    text_digest,
)
from ctxreuse.context.rendering import Templates, message_texts
from ctxreuse.errors import InvalidRequestError
from ctxreuse.memory.prefix_index import Node

_TRUSTED_ORDINALS = 1_000_000
_LEAST_WORK = 1 << 20
_WORK_A_CHARACTER = 16
_LEAST_UNLABELLED = 20


@dataclass(frozen=True, slots=True)
class ShownBlock:
    """A block as a conversation's record knows it."""

    key: BlockKey
    id: BlockId
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class History:
    """What the messages before this turn show."""

    labels: Mapping[str, BlockId]  # of recorded blocks that stand there
    label_of: Mapping[BlockKey, str]
    used: frozenset[int]  # every ordinal in a label, whatever stands under it
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)
    keys: Mapping[str, BlockKey] = field(default_factory=dict, compare=False)
    unlabelled: frozenset[BlockKey] = frozenset()  # stand there without a label
    is_cut_short: bool = False  # more may be shown

    @property
    def blocks(self) -> dict[str, ContextBlock]:
        """Label -> block, for the blocks that stand there."""
        return {
            label: ContextBlock(id=self.labels[label], text=text)
            for label, text in self.texts.items()
        }

    def next_ordinals(self, number: int) -> list[int]:
        """Return the ordinals of the next blocks, none of which a text of the history holds."""
        start = max((used for used in self.used if used <= _TRUSTED_ORDINALS), default=0) + 1
        return list(islice((n for n in count(start) if n not in self.used), number))


EMPTY_HISTORY = History({}, {}, frozenset())


class _Record(NamedTuple):
    """One conversation: where its last turn ends in the index, and the recorded blocks."""

    end: Node
    system: bytes | None
    last_use: int
    opening_mark: int  # after how many blocks of its first turn a mark stands; -1 is none
    # (ordinal, identity, id, length, digest), the latest last
    shown: tuple[tuple[int, BlockKey, BlockId, int, bytes], ...]
    shown_size: int


class Conversations:
    """The records of one tenant's conversations, bounded by count and age; evictions keep them."""

    def __init__(
        self, max_conversations: int = 10_000, max_idle: int = 1_000_000, max_blocks: int = 2_000
    ) -> None:
        self._max_conversations = max_conversations
        self._max_idle = max_idle
        self._max_blocks = max_blocks
        self._records: OrderedDict[str | int, _Record] = OrderedDict()
        self._requests = 0
        self.size = 0  # of the conversations' ids
        self.shown_size = 0  # of the blocks' ids

    def __len__(self) -> int:
        return len(self._records)

    def read(
        self,
        conversation_id: str | int | None,
        messages: Sequence[Message],
        templates: Templates,
    ) -> History:
        """Return what the messages show of the blocks that this conversation was sent."""
        return shown_in(messages, self.recorded(conversation_id), templates)

    def recorded(self, conversation_id: str | int | None) -> dict[int, list[ShownBlock]]:
        """Return the blocks that a conversation was sent by ordinal, the latest first."""
        record = self._record(conversation_id)
        recorded: dict[int, list[ShownBlock]] = {}
        shown = () if record is None else record.shown
        for ordinal, key, block_id, length, digest in reversed(shown):  # the latest is right
            recorded.setdefault(ordinal, []).append(ShownBlock(key, block_id, length, digest))
        return recorded

    def remember(
        self,
        conversation_id: str | int,
        sent: Iterable[tuple[int, ContextBlock]],
        end: Node,
        system: bytes | None,
        opening_mark: int | None = None,
    ) -> None:
        """Record the blocks of a turn under their ordinals, and where the turn ends."""
        self._requests += 1
        record = self._record(conversation_id)
        shown = {} if record is None else {one[:2]: one for one in record.shown}
        size = 0 if record is None else record.shown_size
        self.forget(conversation_id)
        for ordinal, block in sent:
            place = ordinal, block.key
            if shown.pop(place, None) is None:  # the latest stands last
                size += id_size(block.id)
            shown[place] = *place, block.id, len(block.text), block.digest
        blocks = tuple(shown.values())
        too_many = max(0, len(blocks) - self._max_blocks)
        size -= sum([id_size(block_id) for _, _, block_id, _, _ in blocks[:too_many]])
        if opening_mark is None:
            opening_mark = -1 if record is None else record.opening_mark
        self._records[conversation_id] = _Record(
            end, system, self._requests, opening_mark, blocks[too_many:], size
        )
        self.size += id_size(conversation_id)
        self.shown_size += size
        while len(self._records) > self._max_conversations or self._is_oldest_idle():
            self.forget_oldest()

    def end_of(self, conversation_id: str | int | None, system: bytes | None) -> Node | None:
        """Return the index node where the last turn ends; None if it is not known."""
        record = self._record(conversation_id)
        if record is None or record.system != system:
            return None
        return record.end

    def opening_mark_of(
        self, conversation_id: str | int | None, system: bytes | None
    ) -> int | None:
        """Return after how many blocks of the first turn a mark stands; None for none."""
        record = self._record(conversation_id)
        if record is None or record.system != system or record.opening_mark < 0:
            return None
        return record.opening_mark

    def forget(self, conversation_id: str | int) -> bool:
        """Drop a conversation's record; return whether there was one."""
        record = self._record(conversation_id)
        if record is None:
            return False
        self._records.pop(conversation_id)
        self.size -= id_size(conversation_id)
        self.shown_size -= record.shown_size
        return True

    def forget_oldest(self) -> None:
        """Drop the record of the least recently used conversation, if there is one."""
        if self._records:
            self.forget(next(iter(self._records)))

    def _record(self, conversation_id: str | int | None) -> _Record | None:
        return None if conversation_id is None else self._records.get(conversation_id)

    def _is_oldest_idle(self) -> bool:
        oldest = next(iter(self._records.values()), None)
        return oldest is not None and oldest.last_use < self._requests - self._max_idle


def shown_in(
    messages: Sequence[Message],
    recorded: Mapping[int, Sequence[ShownBlock]],
    templates: Templates,
    blocks: Iterable[ContextBlock] = (),
    outdated: Iterable[ContextBlock] = (),
) -> History:
    """Return what messages show of recorded blocks and, without a label, of other ones."""
    standing: dict[str, ShownBlock] = {}
    texts: dict[str, str] = {}
    used: set[int] = set()
    shown_texts = [text for message in messages for text in message_texts(message)]
    places = _Places(recorded, templates, sum(map(len, shown_texts)))
    for text in shown_texts:
        for found in templates.label_pattern.finditer(text):
            used.add(int(found[1]))
            block = None if found[0] in standing else places.block_at(text, found)
            if block is not None:
                standing[found[0]] = block
                first = _text_start(found, templates)
                texts[found[0]] = text[first : first + block.length]
    label_of = {shown.key: label for label, shown in reversed(standing.items())}
    paragraphs = _Paragraphs(messages, templates)
    # shorter ones may stand there by chance
    wanted = [one for one in blocks if len(one.text) >= _LEAST_UNLABELLED]
    unlabelled = [
        one.key
        for one in (*wanted, *outdated)
        if one.key not in label_of and paragraphs.show(one.text)
    ]
    return History(
        labels={label: shown.id for label, shown in standing.items()},
        label_of=label_of,
        used=frozenset(used),
        texts=texts,
        keys={label: shown.key for label, shown in standing.items()},
        unlabelled=frozenset(unlabelled),
        is_cut_short=places.is_cut_short or paragraphs.is_cut_short,
    )


def with_blocks_anywhere(
    recorded: Mapping[int, Sequence[ShownBlock]],
    blocks: Iterable[ContextBlock],
    messages: Iterable[Message],
    templates: Templates,
) -> dict[int, list[ShownBlock]]:
    """Return a record by which blocks are looked for under every label in messages, too."""
    anywhere = [ShownBlock(one.key, one.id, len(one.text), one.digest) for one in blocks]
    texts = (text for message in messages for text in message_texts(message))
    labels = (found for text in texts for found in templates.label_pattern.finditer(text))
    ordinals = dict.fromkeys([*recorded, *(int(found[1]) for found in labels)])
    return {ordinal: [*recorded.get(ordinal, ()), *anywhere] for ordinal in ordinals}


def said_outdated(messages: Iterable[Message], templates: Templates) -> set[str]:
    """Return the labels of blocks that messages say no longer hold."""
    words = templates.outdated_words  # nearly all histories have none, which is seen fast
    texts = (text for message in messages for text in message_texts(message))
    saying = (text for text in texts if any(one in text for one in words))
    found = (one for text in saying for one in templates.outdated_pattern.finditer(text))
    return {one[1] or one[2] for one in found}


def without_blocks(
    messages: Iterable[Message],
    recorded: Mapping[int, Sequence[ShownBlock]],
    ids: Collection[BlockId],
    templates: Templates,
) -> list[dict[str, Any]]:
    """Return copies of messages without the texts of blocks that stand in them."""
    wanted = {(type(one), one) for one in ids}
    copied = [copied_message(message) for message in messages]
    characters = sum(len(text) for message in copied for text in message_texts(message))
    places = _Places(recorded, templates, characters)

    def cleaned(text: str) -> str:
        pieces, end = [], 0
        for found in templates.label_pattern.finditer(text):
            block = places.block_at(text, found) if found.start() >= end else None
            if block is not None and (type(block.id), block.id) in wanted:
                first = _text_start(found, templates)
                pieces += [text[end:first], templates.removed]
                end = first + block.length
        return "".join([*pieces, text[end:]])

    for message in copied:
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = cleaned(content)
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] = cleaned(part["text"])
    if places.is_cut_short:
        raise InvalidRequestError(
            "the messages hold too many labels for their blocks to be looked for; take the texts "
            "out by hand, or begin a new conversation"
        )
    return copied


class _Paragraphs:
    """Looks for blocks that messages show without labels: whole paragraphs, one or more."""

    def __init__(self, messages: Iterable[Message], templates: Templates) -> None:
        self._templates = templates
        self._separator = templates.separator
        self._texts = [
            text
            for message in messages
            if message.get("role") != "assistant"  # it may repeat a document, or make one up
            for text in message_texts(message)
        ]
        self._work = _LEAST_WORK + _WORK_A_CHARACTER * sum(map(len, self._texts))

    @property
    def is_cut_short(self) -> bool:
        return self._work < 0

    @cached_property
    def _starts(self) -> dict[str, list[tuple[int, int]]]:
        """The places where paragraphs begin, the latest first, by their first characters."""
        starts: dict[str, list[tuple[int, int]]] = {}
        for number, start in reversed(list(self._places())):
            beginning = self._texts[number][start : start + _LEAST_UNLABELLED]
            starts.setdefault(beginning, []).append((number, start))
        return starts

    @cached_property
    def _short(self) -> dict[str, int]:
        """The short texts that paragraphs are, one or more together, and where they stand last."""
        short, longest = {}, _LEAST_UNLABELLED - 1
        for number, start in self._places():
            text, end = self._texts[number], start
            while 0 <= end <= start + longest:
                end = text.find(self._separator, end, start + longest + len(self._separator))
                whole = text[start:] if end < 0 else text[start:end]
                if len(whole) <= longest:
                    short[whole] = number
                end = end if end < 0 else end + len(self._separator)
        return short

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield each place where a paragraph begins: the text's number and the offset."""
        for number, text in enumerate(self._texts if self._separator else ()):
            yield number, 0
            at = text.find(self._separator)
            while at >= 0:
                yield number, at + len(self._separator)
                at = text.find(self._separator, at + 1)  # blocks may end with line breaks

    def show(self, block: str) -> bool:
        """Return whether a text stands in the messages, as whole paragraphs, and still holds."""
        last = self._last(block)
        return last >= 0 and last >= self._last(self._templates.quoted_outdated(block))

    def _last(self, block: str) -> int:
        """Return the number of the last text that shows a block; -1 for none."""
        if len(block) < _LEAST_UNLABELLED:
            return self._short.get(block, -1) if block else -1
        for number, start in self._starts.get(block[:_LEAST_UNLABELLED], ()):
            self._work -= len(block)
            if self.is_cut_short:
                return -1
            text, end = self._texts[number], start + len(block)
            if text.startswith(block, start) and (
                end == len(text) or text.startswith(self._separator, end)
            ):
                return number
        return -1


def _text_start(label: re.Match[str], templates: Templates) -> int:
    """Return where the text of the block begins whose label was found."""
    before = templates.before_text(label[0])
    return label.start() - before.index(label[0]) + len(before)


class _Places:
    """Looks for recorded blocks under the labels of a history.

    The work is bounded, since a hostile text may hold thousands of labels. What is not found by
    then counts as not shown, so it is sent again.
    """

    def __init__(
        self,
        recorded: Mapping[int, Iterable[ShownBlock]],
        templates: Templates,
        characters: int,
    ) -> None:
        self._recorded = recorded
        self._templates = templates
        self._label_at = len(templates.block.partition("{label}")[0])
        self._work = _LEAST_WORK + _WORK_A_CHARACTER * characters
        self._by_length: dict[int, dict[int, dict[bytes, ShownBlock]]] = {}

    @property
    def is_cut_short(self) -> bool:
        return self._work < 0

    def block_at(self, text: str, label: re.Match[str]) -> ShownBlock | None:
        """Return the longest of the blocks that stands in a text under a label, if one does."""
        templates = self._templates
        ordinal = int(label[1])
        if ordinal not in self._recorded or self.is_cut_short:
            return None
        start = label.start() - self._label_at
        if start > 0 and not text.endswith(("\n", templates.separator), 0, start):
            return None
        before = templates.before_text(label[0])
        if start < 0 or not text.startswith(before, start):
            return None
        first = start + len(before)
        digests: dict[int, bytes] = {}
        for ending in (templates.separator, "\n"):  # users join blocks in their own way
            for length, blocks in self._blocks_by_length(ordinal).items():
                self._work -= _WORK_A_CHARACTER
                last = first + length
                end = last + len(templates.after_text)
                if not text.startswith(templates.after_text, last) or not (
                    end == len(text) or text.startswith(ending, end)
                ):
                    continue
                if length not in digests:
                    self._work -= length
                    if self.is_cut_short:
                        return None
                    digests[length] = text_digest(text[first:last])
                if digests[length] in blocks:
                    return blocks[digests[length]]
        return None

    def _blocks_by_length(self, ordinal: int) -> dict[int, dict[bytes, ShownBlock]]:
        """Return the blocks of an ordinal by length and digest, the longest first."""
        known = self._by_length.get(ordinal)
        if known is None:
            known = self._by_length[ordinal] = {}
            for shown in sorted(self._recorded[ordinal], key=lambda shown: -shown.length):
                known.setdefault(shown.length, {}).setdefault(shown.digest, shown)
        return known
