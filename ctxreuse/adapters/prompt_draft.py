"""A prompt in the making: its pieces, what is sent for each, and what the planner is asked."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ctxreuse.adapters.context_cuts import ContextCut, PlannedTexts
from ctxreuse.adapters.context_search import FoundContext, Piece
from ctxreuse.adapters.leader_first import PrefixUse
from ctxreuse.adapters.rendered_contexts import (
    Claimed,
    ContextRegistry,
    Sighting,
    Standing,
    Unplanned,
)
from ctxreuse.adapters.standing_documents import (
    asks_for_places,
    is_worth_ranking,
    joined_context,
    joined_separator,
    may_be_moved,
    render_joined,
)
from ctxreuse.context.blocks import ContextBlock, ContextRequest, Message, encoded, text_digest
from ctxreuse.context.content_parts import ContentPart, cut, joined, without_blank_parts
from ctxreuse.context.rendering import Templates
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.planning.plan import Plan, shard_of
from ctxreuse.rules.cache_rules import CacheRules

_MOST_CONTEXTS = 64


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One part of a prompt: a message's content, or a part of it."""

    role: str
    text: str
    names_places: bool = False

    @classmethod
    def of_value(cls, role: str, value: object) -> PromptPart:
        """Return a part for what is no text, such as a tool call: equal for equal JSON values."""
        written = json.dumps(value, sort_keys=True, default=repr)
        names_places = role == "system" and asks_for_places(written)
        return cls(role, text_digest(written).hex(), names_places)


@dataclass(frozen=True, slots=True)
class ScopedPrompt:
    """A prompt that is about to be sent."""

    parts: tuple[PromptPart, ...]
    scope: RequestScope = NO_SCOPE
    retrieved: tuple[tuple[ContextBlock, ...], ...] = ()
    planned: tuple[PlannedTexts, ...] = ()


class PlacedPiece(NamedTuple):
    """A piece of a prompt."""

    part: int
    piece: Piece
    key: bytes = b""
    is_context: bool = False
    stays: bool = False
    cuts: tuple[int, ...] = ()
    deepest: int | None = None
    cut: ContextCut | None = None
    group: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text as it stands."""
        return self.piece if isinstance(self.piece, str) else self.piece.text


class PlacedContext(NamedTuple):
    """A context as it was sent."""

    text: str
    parts: tuple[ContentPart, ...] = ()
    deepest: int | None = None
    group: tuple[str, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """The lengths of its parts."""
        return tuple(len(part.text) for part in self.parts)

    @classmethod
    def of(cls, plan: Plan, given: FoundContext) -> PlacedContext:
        """Return what is sent for a context now that it is planned."""
        text = render_joined(plan, given) if given.is_joined else plan.rendered()
        parts = _parts_of(plan, given, text) if plan.cache.marks else ()
        marked = [number for number, part in enumerate(parts) if part.is_marked]
        deepest = marked[-1] if marked else -1 if 0 in plan.marks else None
        group = shard_of(plan) if plan.cache.is_routed else ()
        return cls(text, parts, deepest, group)


class PromptDraft:
    """A prompt in the making, from the first piece to the last."""

    def __init__(
        self, prompt: ScopedPrompt, registry: ContextRegistry, templates: Templates
    ) -> None:
        self.prompt = prompt
        self.tenant = prompt.scope.tenant or ""
        self.pieces: deque[PlacedPiece] = deque()
        self.met: list[bytes] = []
        self.plans: list[Plan] = []
        self.has_contexts = False
        self.contexts_found = 0
        self.groups: list[tuple[str, ...]] = []
        self.uses: list[PrefixUse | None] = []
        self.cuts: list[ContextCut] = []
        self.planned_before = 0
        self.joined_before: list[tuple[bytes, PlacedContext]] = []
        self._templates = templates
        self._answers = [n for n, part in enumerate(prompt.parts) if part.role == "assistant"]
        self._standings = _standings(prompt.parts)
        self._part_keys: list[bytes] = []  # each names a part as given, with everything before
        self._unsearched = 0
        self._shown: set[int] = set()  # the parts that show a context
        self._parts: list[list[ContentPart]] = [[] for _ in prompt.parts]  # sent, up to here
        before = _hash([self.tenant])  # tenant and everything before, as given
        for number, part in enumerate(prompt.parts):
            parsed = registry.parse(part.text, self.tenant)
            self._unsearched += not parsed.is_searched
            self.met += parsed.met
            here = _hash([part.role], before)
            for piece in parsed.pieces:
                if isinstance(piece, str):
                    self.pieces.append(PlacedPiece(number, piece))
                    here.update(encoded(piece))
                else:
                    key = _hash(["context", piece.digest.hex()], here).digest()
                    self.pieces.append(PlacedPiece(number, piece, key, is_context=True))
                    here.update(encoded(piece.text))
            self._part_keys.append(here.digest())
            before = _hash([here.hexdigest()])

    def sightings(
        self, number: int, sent_before: Callable[[str, bytes], PlacedContext | None]
    ) -> Iterator[Sighting]:
        """Yield the contexts that were found."""
        last = max((n for n, one in enumerate(self.pieces) if one.is_context), default=-1)
        for position, (part, piece, key, *_) in enumerate(self.pieces):
            if not isinstance(piece, str):
                standing = self._standings[part]
                whole = self.prompt.parts[part]
                is_tool_result = whole.role == "tool" and whole.text == piece.text
                if standing == "history" and position == last and whole.role != "assistant":
                    standing = "latest"
                is_remembered = (
                    standing in ("renewed", "latest")  # for others it makes no difference
                    and sent_before(self.tenant, self.sent_key(key)) is not None
                )
                yield Sighting(piece, key, number, standing, is_tool_result, is_remembered)

    def sent_key(self, key: bytes) -> bytes:
        """Return under which key a context as it is sent is remembered."""
        conversation_id = self.prompt.scope.conversation_id
        if conversation_id is None:
            return key
        return _hash([key.hex(), repr(conversation_id)]).digest()

    def texts(self) -> tuple[str, ...]:
        """Return what is sent for each part, up to the next piece."""
        return tuple(map(joined, self._parts))

    def parts(self, profile: CacheRules) -> tuple[tuple[ContentPart, ...], ...]:
        """Return what is sent for each part cut into content parts, with marks."""
        if not profile.marks or not self._shown:
            return ()
        whole = [without_blank_parts(parts) for parts in self._parts]
        given, texts = self.prompt.parts, self.texts()
        answers = [n for n, part in enumerate(given) if part.role == "assistant"]
        if self.prompt.scope.conversation_id is not None or answers:
            ends = [len(given), *answers[-1:]]
            for end in ends:
                _mark_end(whole, [part.role for part in given], end)
        return tuple(
            tuple(parts) if parts else (ContentPart(text),)
            for parts, text in zip(whole, texts, strict=True)
        )

    def new_texts(self) -> list[str]:
        """Return the texts, as given, in which a new context may stand."""
        parts = zip(self.prompt.parts, self._standings, strict=True)
        return [part.text for part, standing in parts if standing != "history"]

    def front(self) -> bytes | None:
        """Return what names the words before the first context, once it is settled."""
        texts: list[str] = []
        for one in self.pieces:
            if self._answers and one.part > self._answers[0]:
                return None
            texts.append(self.prompt.parts[one.part].role)
            if one.is_context:
                return _hash(texts).digest()
            texts.append(one.text)
        return None

    def settle(
        self, claimed: Iterator[Claimed], sent_before: Callable[[str, bytes], PlacedContext | None]
    ) -> Counter[str]:
        """Turn all but the contexts to plan into text, and count them."""
        pieces: list[PlacedPiece] = []
        counts: Counter[str] = Counter()
        if self._unsearched:
            counts["too_long"] = self._unsearched
        behind = [*self.pieces, None][1:]
        for one, following in zip(self.pieces, behind, strict=True):
            if one.is_context:
                outcome = next(claimed)
                self.contexts_found += 1
                counts[_fate(outcome)] += 1
                self.has_contexts |= outcome is not Unplanned.IN_HISTORY
                if outcome is Unplanned.LEFT_ALONE:
                    one = one._replace(piece=one.text, is_context=False)
                elif outcome is Unplanned.IN_HISTORY:
                    sent = sent_before(self.tenant, self.sent_key(one.key))
                    one = _as_sent_before(one, sent, following)
                elif outcome.spans:
                    one = one._replace(piece=outcome)
                else:
                    one = self._planned_before(one._replace(piece=one.text), outcome.cut)
            else:
                one = self._joined_before(one, counts, sent_before)
            pieces.append(one)
        if not self.has_contexts and self.prompt.planned:
            pieces = self._with_planned(pieces, counts)
        if not self.contexts_found and self.prompt.retrieved:
            pieces = self._with_joined(pieces, counts)
        if counts["planned"] > _MOST_CONTEXTS:
            counts["planned"] = 0
            counts["too_long"] += 1
            pieces = [one._replace(piece=one.text) for one in pieces]
        self.pieces = deque(pieces)
        return counts

    def _joined_before(
        self,
        one: PlacedPiece,
        counts: Counter[str],
        sent_before: Callable[[str, bytes], PlacedContext | None],
    ) -> PlacedPiece:
        """Return a history's text as it was sent then, if a joined context was moved in it."""
        part = self.prompt.parts[one.part]
        if self._standings[one.part] != "history" or part.text != one.text:
            return one
        key = self._part_keys[one.part]
        sent = sent_before(self.tenant, self.sent_key(key))
        if sent is None:
            return one
        self.contexts_found += 1
        counts["in_history"] += 1
        return one._replace(
            piece=sent.text,
            key=key,
            is_context=True,
            cuts=sent.cuts,
            deepest=sent.deepest,
            group=sent.group,
        )

    def _planned_before(self, one: PlacedPiece, cut_here: ContextCut | None) -> PlacedPiece:
        """Return a new text that shows a plan as it is to be sent."""
        self.planned_before += 1
        if cut_here is None:
            return one
        self.cuts.append(cut_here)
        return one._replace(cut=cut_here, group=cut_here.prefix.group)

    def _with_planned(self, pieces: list[PlacedPiece], counts: Counter[str]) -> list[PlacedPiece]:
        """Return pieces with the text cut in which the application joined planned documents."""
        best: tuple[int, ContextCut] | None = None
        for number, one in enumerate(pieces):
            is_new = self._standings[one.part] != "history" and not one.is_context
            if not is_new or self.prompt.parts[one.part].text != one.text:
                continue
            for texts in reversed(self.prompt.planned):
                found = texts.cut_in(one.text)
                if found is None:
                    continue
                if best is None or len(found.lengths) > len(best[1].lengths):
                    best = number, found
        if best is None:
            return pieces
        number, cut_here = best
        self.has_contexts, self.contexts_found = True, self.contexts_found + 1
        counts["planned_before"] += 1
        shown = self._planned_before(pieces[number]._replace(is_context=True), cut_here)
        parts = tuple(cut_here.parts(shown.text)) if cut_here.lengths else ()
        sent = PlacedContext(shown.text, parts, cut_here.deepest, shown.group)
        self.joined_before.append((self.sent_key(self._part_keys[shown.part]), sent))
        return [*pieces[:number], shown, *pieces[number + 1 :]]

    def _with_joined(self, pieces: list[PlacedPiece], counts: Counter[str]) -> list[PlacedPiece]:
        """Return pieces with the documents as a context that the application joined itself."""
        texts = [part.text for part in self.prompt.parts]
        joined = joined_context(texts, self.prompt.retrieved)
        if joined is None or self.prompt.parts[joined.text].role == "assistant":
            return pieces
        number, start, found = joined
        names_places = any(part.names_places for part in self.prompt.parts)
        names_places |= any(map(self._templates.shows_block, texts))
        if names_places or not may_be_moved(joined, texts, self.prompt.retrieved):
            counts["kept_in_place"] += 1
        elif not is_worth_ranking(found, self._templates):
            counts["too_short"] += 1
        else:
            self.has_contexts = True
            counts["planned"] += 1
        self.contexts_found, is_planned = 1, self.has_contexts
        context = PlacedPiece(
            number,
            found,
            self._part_keys[number],
            is_context=is_planned,
            stays=not is_planned,
        )
        before, behind = texts[number][:start], texts[number][start + len(found.text) :]
        around = (PlacedPiece(number, before), context, PlacedPiece(number, behind))
        return [
            new for one in pieces for new in (around if one.part == number else (one,)) if new.text
        ]

    def to_remember(self, sent: PlacedContext) -> PlacedContext | None:
        """Return what later prompts show of the next piece, a context, as it was sent."""
        one, *behind = self.pieces
        if not (isinstance(one.piece, FoundContext) and one.piece.is_joined):
            return sent
        if sent.text == one.text:
            return None
        following = [ContentPart(other.text) for other in behind if other.part == one.part]
        own = sent.parts or (ContentPart(sent.text),)
        before = self._parts[one.part]
        deepest = sent.deepest
        if deepest is not None:
            deepest += len(before)
        parts = (*before, *own, *following)
        return sent._replace(text=joined(parts), parts=parts if sent.parts else (), deepest=deepest)

    def show_text(self) -> None:
        """Send the next piece, which is a text, or a context that is not planned now."""
        one = self.pieces[0]
        text = one.text
        if one.group:
            self.groups.append(one.group)
        if one.is_context:
            self.uses.append(None if one.cut is None else one.cut.prefix.use)
        if one.cut is not None and one.cut.lengths:
            if 0 in one.cut.prefix.marks:
                self._mark_before(one.part)
            self._show(one.cut.parts(text))
            return
        parts = cut(text, one.cuts)
        if one.deepest is not None and not self._shown:  # others may have kept it alive
            if one.deepest < 0:
                self._mark_before(one.part, is_spare=True)
            elif one.deepest < len(parts):
                parts[one.deepest] = parts[one.deepest].as_spare()
        self._show(parts)

    def show_context(self, sent: PlacedContext, *, marks_before: bool = False) -> None:
        """Send the next piece, a context, as it was planned."""
        if marks_before:
            self._mark_before(self.pieces[0].part)
        self._show(sent.parts or [ContentPart(sent.text)])

    def _mark_before(self, number: int, *, is_spare: bool = False) -> None:
        """Mark what stands before the next piece, in its part or the nearest one with a text."""
        for parts in reversed(self._parts[: number + 1]):
            for position in range(len(parts) - 1, -1, -1):
                if parts[position].text.strip():
                    one = parts[position]
                    parts[position] = one.as_spare() if is_spare else one.as_end()
                    return

    def _show(self, parts: Iterable[ContentPart]) -> None:
        one = self.pieces.popleft()
        self._parts[one.part] += parts
        if one.is_context:
            self._shown.add(one.part)

    def request(self, number: int, found: FoundContext) -> ContextRequest:
        """Return what to plan: the context's blocks behind everything that is sent before it."""
        parts, scope, texts = self.prompt.parts, self.prompt.scope, self.texts()
        role = parts[number].role
        first = number  # of the texts that open this turn: the parts of one message
        while first and parts[first - 1].role == role and first - 1 not in self._shown:
            first -= 1
        system: list[Message] = []
        turns: list[Message] = []
        for position in range(first):
            message = {"role": parts[position].role, "content": texts[position]}
            # a system message that shows a context uses labels, as a turn does
            is_turn = message["role"] != "system" or position in self._shown
            (turns if is_turn else system).append(message)
        openings = [{"role": role, "content": text} for text in texts[first : number + 1]]
        if number in self._shown:  # another context stands before this one in the same text
            turns.append(openings[-1])
            openings[-1] = {"role": role, "content": ""}
        history: list[Message] | None = None
        in_conversation = scope.conversation_id is not None or (turns and self._shown)
        if in_conversation and not found.is_joined:  # without labels nothing can refer to it
            history = turns
        else:
            system += turns  # the same for many, such as examples
        preamble = [text for message in [*system, *openings] for text in message.values()]
        return ContextRequest(
            found.blocks,
            system=_hash(preamble).hexdigest(),
            history=history,
            conversation_id=scope.conversation_id,
            tenant=self.tenant,
            labels=not found.is_joined,
        )


def _as_sent_before(
    context: PlacedPiece, sent: PlacedContext | None, following: PlacedPiece | None
) -> PlacedPiece:
    """Return a history's context as it was sent then, or as given where that is not known."""
    assert isinstance(context.piece, FoundContext)
    if sent is None:
        planned = context.piece.cut  # what was planned before is sent as it was sent then
        context = context._replace(piece=context.text)
        if planned is None:
            return context
        group = planned.prefix.group
        return context._replace(cuts=planned.lengths, deepest=planned.deepest, group=group)
    behind = following.text if following is not None and following.part == context.part else ""
    annotations = sent.text[len(context.text) :] if sent.text.startswith(context.text) else None
    is_as_sent = annotations is not None and behind.startswith(annotations)
    text = context.text if is_as_sent else sent.text
    return context._replace(piece=text, cuts=sent.cuts, deepest=sent.deepest, group=sent.group)


def _parts_of(plan: Plan, given: FoundContext, text: str) -> tuple[ContentPart, ...]:
    """Return what is sent for a context cut at its blocks, with marks behind those of its plan."""
    if not given.is_joined:
        parts = plan.content_parts("")
    else:  # as the application joined them
        separator = joined_separator(given)
        ends, position = [], 0
        for block in plan.blocks:
            position += len(block.text)
            ends.append(position)
            position += len(separator)
        lengths = [end - before for end, before in zip(ends, [0, *ends], strict=False)]
        parts = tuple(
            part._replace(is_marked=number in plan.marks, is_spare=bool(plan.request.history))
            for number, part in enumerate(cut(text, lengths), start=1)
        )
    return parts if joined(parts) == text else (ContentPart(text),)


def _mark_end(parts: list[list[ContentPart]], roles: Sequence[str], end: int) -> None:
    """Mark the last text before a position, unless the model has said it."""
    for number in range(end - 1, -1, -1):
        if roles[number] == "assistant":
            return
        if parts[number]:
            parts[number][-1] = parts[number][-1].as_end()
            return


def _standings(parts: Sequence[PromptPart]) -> list[Standing]:
    """Return for each part how a context in it stands to the answers."""
    end = len(parts)  # of what stands before the beginning of an answer
    while end and parts[end - 1].role == "assistant":
        end -= 1
    answered = max((n for n in range(end) if parts[n].role == "assistant"), default=-1)
    standings: list[Standing] = []
    for number, part in enumerate(parts):
        if part.role == "assistant":
            standings.append("history")
        elif number > answered:
            standings.append("new" if end == len(parts) else "renewed")
        else:
            standings.append("renewed" if part.role == "system" else "history")
    return standings


def _fate(outcome: Claimed) -> str:
    """Return the name under which statistics count what became of a context."""
    if isinstance(outcome, Unplanned):
        return outcome.name.lower()
    return "planned" if outcome.spans else "planned_before"


def _hash(texts: Iterable[str], before: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Return a hash of 16 bytes that identifies a list of texts, behind those hashed before."""
    whole = hashlib.blake2b(digest_size=16) if before is None else before.copy()
    for text in texts:
        content = encoded(text)
        whole.update(len(content).to_bytes(8, "big"))
        whole.update(content)
    return whole
