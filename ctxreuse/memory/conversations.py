"""What each conversation has been shown: de-duplication across turns.

A block is left out only if its text, under its label, stands in the messages that will be sent;
ContextPilot Algorithm 3 trusts its own record instead. The record here only says where to look, and
holds digests but no text. Forgetting a conversation costs reuse, never content.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.blocks import (
    BlockId,
    BlockKey,
    ContextBlock,
    Message,
    copied_message,
    id_size,
    text_digest,
)
from ctxreuse.context.rendering import Templates, block_end, message_texts, rewrite_texts
from ctxreuse.errors import InvalidRequestError
from ctxreuse.memory.prefix_index import Root

_LEAST_WORK = 1 << 20
_WORK_A_CHARACTER = 16
_WORK_A_GUESS = 1 << 16  # that a label's text was not to be found
_LEAST_UNLABELLED = 20
_READ_A_BLOCK = 4
"""So many numbers that a reading keeps take as much memory as a shown block."""


_Row: TypeAlias = tuple[BlockKey, BlockId, int, bytes]
"""A shown block: its key, id, length and digest. Garbage collections pass over plain tuples."""

_Place: TypeAlias = tuple[_Row, int, int]
"""Where a block stands in a history: the number of the text, and its first character there."""


@dataclass(frozen=True, slots=True)
class History:
    """What the messages before this turn show."""

    labels: Mapping[str, BlockId]  # of recorded blocks that stand there
    label_of: Mapping[BlockKey, str]
    places: Mapping[str, _Place] = field(default_factory=dict, compare=False)
    shown: Sequence[str] = field(default=(), compare=False, repr=False)
    unlabelled: frozenset[BlockKey] = frozenset()  # stand there without a label
    said_outdated: frozenset[str] = frozenset()  # labels of what messages say no longer holds
    is_cut_short: bool = False  # more may be shown

    @property
    def blocks(self) -> dict[str, ContextBlock]:
        """Label -> block, for the blocks that stand there."""
        return {
            label: ContextBlock(id=place[0][1], text=_text_at(place, self.shown))
            for label, place in self.places.items()
        }


def _text_at(place: _Place, texts: Sequence[str]) -> str:
    (_, _, length, _), number, first = place
    return texts[number][first : first + length]


EMPTY_HISTORY = History({}, {})


Shown: TypeAlias = Mapping[str, tuple[_Row, ...]]
"""The blocks that a conversation was sent, by label, the latest last."""


class _Record(NamedTuple):
    """One conversation: where its last turn ends in the index, and how much it was shown."""

    end: int  # its place in the index
    root: Root
    opening_mark: int = -1  # after how many blocks of its first turn a mark stands; -1 is none
    number: int = 0  # of recorded blocks
    size: int = 0  # of their ids


class Conversations:
    """The records of one tenant's conversations, bounded by count; evictions keep them."""

    def __init__(self, max_conversations: int = 10_000, max_blocks: int = 2_000) -> None:
        self._max_conversations = max_conversations
        self._max_blocks = max_blocks
        # values of `_Record`: garbage collections pass over plain tuples
        self._records: OrderedDict[str | int, tuple[Any, ...]] = OrderedDict()
        self._shown: dict[str | int | None, dict[str, tuple[_Row, ...]]] = {}
        self._readings: dict[str | int | None, Reading] = {}  # not while somebody reads on
        self.size = 0  # of the conversations' ids
        self.shown_size = 0  # of the blocks' ids, and of what was read

    def recorded(self, conversation_id: str | int | None) -> Shown:
        """Return the blocks that a conversation was sent."""
        return dict(self._shown.get(conversation_id, {}))

    def take_reading(self, conversation_id: str | int | None) -> Reading:
        """Return what was read of a conversation's messages, for who reads on and puts it back."""
        reading = self._readings.pop(conversation_id, None) or Reading()
        self.shown_size -= reading.size
        return reading

    def put_reading(self, conversation_id: str | int | None, reading: Reading) -> None:
        """Keep what was read of a conversation that is known, for its next turn."""
        if conversation_id in self._records:
            self.take_reading(conversation_id)  # another thread's
            self._readings[conversation_id] = reading
            self.shown_size += reading.size

    def remember(
        self,
        conversation_id: str | int,
        sent: Iterable[tuple[str, ContextBlock]],
        end: int,
        root: Root,
        opening_mark: int | None = None,
    ) -> None:
        """Record the blocks of a turn under their labels, and where the turn ends."""
        record = self._record(conversation_id)
        if record is None:
            record = _Record(end, root)
            self.size += id_size(conversation_id)
        number, size = record.number, record.size
        shown = self._shown.setdefault(conversation_id, {})
        of_label: dict[str, dict[BlockKey, _Row]] = {}
        for label, block in sent:  # the latest stands last
            rows = of_label[label] = of_label.pop(label, {}) or {
                row[0]: row for row in shown.pop(label, ())
            }
            if rows.pop(block.key, None) is None:
                number += 1
                size += id_size(block.id)
            rows[block.key] = block.key, block.id, len(block.text), block.digest
        shown |= {label: tuple(rows.values()) for label, rows in of_label.items()}
        while (excess := number - self._max_blocks) > 0:
            label, under = next(iter(shown.items()))
            gone, shown[label] = under[:excess], under[excess:]
            if not shown[label]:
                del shown[label]
            number -= len(gone)
            size -= sum(id_size(row[1]) for row in gone)
        self.shown_size += size - record.size
        mark = record.opening_mark if opening_mark is None else opening_mark
        self._records[conversation_id] = tuple(_Record(end, root, mark, number, size))
        self._records.move_to_end(conversation_id)
        while len(self._records) > self._max_conversations:
            self.forget_oldest()

    def end_of(self, conversation_id: str | int | None, root: Root) -> int:
        """Return the place in the index where the last turn ends; 0 if it is not known."""
        record = self._record(conversation_id)
        return record.end if record is not None and record.root == root else 0

    def opening_mark_of(self, conversation_id: str | int | None, root: Root) -> int | None:
        """Return after how many blocks of the first turn a mark stands; None for none."""
        record = self._record(conversation_id)
        if record is None or record.root != root or record.opening_mark < 0:
            return None
        return record.opening_mark

    def forget(self, conversation_id: str | int) -> bool:
        """Drop a conversation's record; return whether there was one."""
        record = self._record(conversation_id)
        if record is None:
            return False
        self.take_reading(conversation_id)
        del self._records[conversation_id], self._shown[conversation_id]
        self.size -= id_size(conversation_id)
        self.shown_size -= record.size
        return True

    def forget_oldest(self) -> None:
        """Drop the record of the least recently used conversation; there must be one."""
        self.forget(next(iter(self._records)))

    def _record(self, conversation_id: str | int | None) -> _Record | None:
        kept = None if conversation_id is None else self._records.get(conversation_id)
        return None if kept is None else _Record(*kept)


class Reading:
    """What the messages of a conversation show, each read once; it keeps hashes and no text."""

    def __init__(self) -> None:
        self._read = array("q")  # a hash of each text, by Python's keyed function
        self._label_of: dict[BlockKey, str] = {}
        self._places: dict[str, _Place] = {}  # the last one of each label
        self._unknown: dict[str, list[tuple[int, int]]] = {}  # where no block of the label stands
        self._foreign: dict[str, None] = {}  # labels that stand in another block, or for two
        self._outdated: dict[str, int] = {}  # labels, and the last text that says so of them
        self._paragraphs = _Paragraphs()

    @property
    def size(self) -> int:
        """How much is kept."""
        kept = len(self._read) + len(self._places) + len(self._paragraphs.places) // 3
        return kept // _READ_A_BLOCK

    def read(
        self,
        messages: Sequence[Message],
        recorded: Shown,
        templates: Templates,
        blocks: Sequence[ContextBlock] = (),
        outdated: Sequence[ContextBlock] = (),
    ) -> History:
        """Return what messages show: recorded blocks, this turn's own, some without labels."""
        texts: list[str] = []
        answers: list[bool] = []  # whether each is an assistant's
        for message in messages:
            content = message.get("content")
            of_message = (content,) if type(content) is str else message_texts(message)
            texts += of_message
            answers += (message.get("role") == "assistant",) * len(of_message)
        hashes = array("q", map(hash, zip(texts, answers, strict=True)))
        if hashes[: len(self._read)] != self._read:
            Reading.__init__(self)  # other messages than before
        places = _Places(recorded, templates, texts, (*blocks, *outdated))
        paragraphs = self._paragraphs
        paragraphs.begin(texts, templates)
        self._look_again(places)
        for number in range(len(self._read), len(texts)):
            if not answers[number]:  # it may repeat a document, or make one up
                self._read_on(texts[number], number, places)
                paragraphs.add(number)
        self._read = hashes
        # shorter ones may stand there by chance
        wanted = [one for one in blocks if len(one.text) >= _LEAST_UNLABELLED]
        unlabelled = [
            one.key
            for one in (*wanted, *outdated)
            if one.key not in self._label_of and paragraphs.show(one.text)
        ]
        standing = self._places
        # what a label names must be certain
        doubtful = self._foreign.keys() | self._unknown.keys()
        if templates.inner_pattern is None:  # labels that any word may be
            shown = [_text_at(one, texts) for one in standing.values()]
            doubtful |= {one for one in places.own if any(one in text for text in shown)}
        label_of = {key: one for key, one in self._label_of.items() if one not in doubtful}
        for label in standing.keys() & places.own.keys() - doubtful:
            digest = standing[label][0][3]
            same = [row[0] for row in places.own[label] if row[3] == digest]
            label_of |= dict.fromkeys(same, label)  # whichever of them was sent
        if places.is_cut_short:  # any label may stand again in what was not reached
            label_of = {}
        history = History(
            labels={label: row[1] for label, (row, _, _) in standing.items()},
            label_of=label_of,
            places=dict(standing),
            shown=texts,
            unlabelled=frozenset(unlabelled),
            said_outdated=frozenset(
                label
                for label, number in self._outdated.items()
                if label in standing and number > standing[label][1]
            ),
            is_cut_short=places.is_cut_short or paragraphs.is_cut_short,
        )
        paragraphs.begin((), templates)  # no text is kept
        if places.is_cut_short:
            Reading.__init__(self)  # what was not reached is looked for anew
        return history

    def _read_on(self, text: str, number: int, places: _Places) -> None:
        for found in places.templates.label_pattern.finditer(text):
            block = places.block_at(text, found)
            if block is not None:
                self._stand(found, block, number, places)
            elif not (
                text.startswith(places.templates.removed, found.end())
                or places.templates.notice_pattern.match(text, found.start(1))
            ):
                self._unknown.setdefault(found[1], []).append((number, found.start()))
                end = None if places.is_cut_short else block_end(found, places.templates)
                places.work -= _WORK_A_GUESS if end is None else end - found.end()
                self._look_inside(found, end or found.end(), places.templates)
        # nearly all histories have none, which is seen fast
        if any(one in text for one in places.templates.outdated_words):
            said = places.templates.outdated_pattern.finditer(text)
            self._outdated.update({one[1] or one[2]: number for one in said})

    def _look_again(self, places: _Places) -> None:
        """Look for blocks of this turn under labels of which none was known."""
        for label in self._unknown.keys() & places.own.keys():
            left: list[tuple[int, int]] = []
            for number, start in self._unknown.pop(label):
                found = places.templates.label_pattern.match(places.texts[number], start)
                block = None if found is None else places.block_at(places.texts[number], found)
                if found is None or block is None:
                    left.append((number, start))
                else:
                    self._stand(found, block, number, places)
            if left:
                self._unknown[label] = left

    def _stand(self, found: re.Match[str], block: _Row, number: int, places: _Places) -> None:
        label, first = found[1], found.end()
        key, _, length, digest = block
        place = block, number, first
        if self._places.get(label, place)[0][3] != digest:
            self._foreign[label] = None
        self._places[label] = place
        self._label_of.setdefault(key, label)
        self._look_inside(found, first + length, places.templates)

    def _look_inside(self, label: re.Match[str], end: int, templates: Templates) -> None:
        if (pattern := templates.inner_pattern) is not None:
            named = pattern.findall(label.string, label.end(), end)
            self._foreign |= dict.fromkeys(one for one in named if one != label[1])


def without_blocks(
    messages: Iterable[Message], recorded: Shown, ids: Collection[BlockId], templates: Templates
) -> list[dict[str, Any]]:
    """Return copies of messages without the texts of blocks that stand in them."""
    named = {(type(one), one) for one in ids}
    wanted = {  # whichever of its blocks a text is taken for
        (label, digest)
        for label, under in recorded.items()
        for _, block_id, _, digest in under
        if (type(block_id), block_id) in named
    }
    copied = [copied_message(message) for message in messages]
    places = _Places(recorded, templates, [t for one in copied for t in message_texts(one)])

    def cleaned(text: str) -> str:
        pieces, end = [], 0
        for found in templates.label_pattern.finditer(text):
            block = places.block_at(text, found) if found.start() >= end else None
            if block is not None and (found[1], block[3]) in wanted:
                first = found.end()
                pieces += [text[end:first], templates.removed]
                end = first + block[2]
        return "".join([*pieces, text[end:]])

    for message in copied:
        rewrite_texts(message, cleaned)
    if places.is_cut_short:
        raise InvalidRequestError(
            "the messages hold too many labels for their blocks to be looked for; take the texts "
            "out by hand, or begin a new conversation"
        )
    return copied


def paragraph_starts(text: str, separator: str) -> Iterator[int]:
    """Yield each place where a paragraph may begin."""
    yield 0
    at = text.find(separator)
    while at >= 0:
        yield at + len(separator)
        at = text.find(separator, at + 1)  # blocks may end with line breaks


class _Paragraphs:
    """Looks for blocks that messages show without labels: whole paragraphs, one or more."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}  # the last, by a hash of the first characters
        self.places = array("q")  # of each start: text, character, and the one that began alike
        self._short: dict[int, int] = {}  # by a hash of what stands there, where it stands last

    def begin(self, texts: Sequence[str], templates: Templates) -> None:
        self._texts, self._templates = texts, templates
        self._separator = templates.separator
        self._work = _LEAST_WORK + _WORK_A_CHARACTER * sum(map(len, texts))

    @property
    def is_cut_short(self) -> bool:
        return self._work < 0

    def add(self, number: int) -> None:
        """Note where paragraphs of a text begin, and which short ones it has."""
        text, longest = self._texts[number], _LEAST_UNLABELLED - 1
        for start in paragraph_starts(text, self._separator) if self._separator else ():
            beginning = hash(text[start : start + _LEAST_UNLABELLED])
            self.places.extend((number, start, self._starts.get(beginning, -1)))
            self._starts[beginning] = len(self.places) - 3
            end = start
            while 0 <= end <= start + longest:
                end = text.find(self._separator, end, start + longest + len(self._separator))
                whole = text[start:] if end < 0 else text[start:end]
                if len(whole) <= longest:
                    self._short[hash(whole)] = number
                end = end if end < 0 else end + len(self._separator)

    def show(self, block: str) -> bool:
        """Return whether a text stands in the messages, as whole paragraphs, and still holds."""
        last = self._last(block)
        return last >= 0 and last >= self._last(self._templates.quoted_outdated(block))

    def _last(self, block: str) -> int:
        """Return the number of the last text that shows a block; -1 for none."""
        if len(block) < _LEAST_UNLABELLED:
            return self._short.get(hash(block), -1) if block else -1
        at = self._starts.get(hash(block[:_LEAST_UNLABELLED]), -1)
        while at >= 0:
            number, start, at = self.places[at : at + 3]
            self._work -= len(block)
            if self.is_cut_short:
                return -1
            text, end = self._texts[number], start + len(block)
            if text.startswith(block, start) and (
                end == len(text) or text.startswith(self._separator, end)
            ):
                return number
        return -1


_ByLength: TypeAlias = dict[int, dict[bytes, _Row]]
"""Blocks by length and digest, the longest first."""


class _Places:
    """Looks for recorded blocks under the labels of a history, of which there may be thousands.

    What is not found within its work counts as not shown, so it is sent again.
    """

    def __init__(
        self,
        recorded: Shown,
        templates: Templates,
        texts: Sequence[str],
        own: Iterable[ContextBlock] = (),
    ) -> None:
        self._recorded = recorded
        self.templates = templates
        self.texts = texts
        self.work = _LEAST_WORK + _WORK_A_CHARACTER * sum(map(len, texts))
        self._by_length: dict[str, _ByLength] = {}
        self.own: dict[str, list[_Row]] = {}
        for one in own:
            row = one.key, one.id, len(one.text), one.digest
            self.own.setdefault(templates.label_of(one), []).append(row)

    @property
    def is_cut_short(self) -> bool:
        return self.work < 0

    def block_at(self, text: str, label: re.Match[str]) -> _Row | None:
        """Return the longest of its blocks that stands in a text under a label, if one does."""
        name, first = label[1], label.end()
        recorded = self._recorded.get(name, ())
        if self.is_cut_short or not (recorded or name in self.own):
            return None
        if name not in self._by_length:
            known = [*recorded[::-1], *self.own.get(name, ())]
            by_length = self._by_length[name] = {}
            for row in sorted(known, key=lambda row: -row[2]):
                by_length.setdefault(row[2], {}).setdefault(row[3], row)
        digests: dict[int, bytes] = {}
        for ending in (self.templates.separator, "\n"):  # users join blocks in their own way
            found = self._longest(text, first, ending, self._by_length[name], digests)
            if found is not None or self.is_cut_short:
                return found
        return None

    def _longest(
        self, text: str, first: int, ending: str, blocks: _ByLength, digests: dict[int, bytes]
    ) -> _Row | None:
        after = self.templates.after_text
        for length, by_digest in blocks.items():
            self.work -= _WORK_A_CHARACTER
            last = first + length
            end = last + len(after)
            if not text.startswith(after, last) or not (
                end == len(text) or text.startswith(ending, end)
            ):
                continue
            if length not in digests:
                self.work -= length
                if self.is_cut_short:
                    return None
                digests[length] = text_digest(text[first:last])
            if digests[length] in by_digest:
                return by_digest[digests[length]]
        return None
