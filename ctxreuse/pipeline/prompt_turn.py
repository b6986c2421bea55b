"""A prompt that is about to be sent: its new contexts planned, its history as it was sent."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from ctxreuse.context.blocks import BlockKey, ContextRequest, Message, encoded, text_digest
from ctxreuse.context.content_parts import ContentPart, cut, without_blank_parts
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.rendering import Reference, SentBlock
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.pipeline.context_finder import (
    REMEDIES,
    Context,
    FoundContexts,
    contexts_in,
    reason_in_place,
)
from ctxreuse.pipeline.engine_options import planning_time
from ctxreuse.pipeline.known_texts import KnownTexts, known_texts
from ctxreuse.pipeline.leader_first import CallInFlight, PrefixUse
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan, shard_of
from ctxreuse.planning.prompt_records import (
    Edit,
    Left,
    LeftText,
    Piece,
    PromptRecords,
    ShownTexts,
    Slice,
)
from ctxreuse.policy.batch import prefix_order
from ctxreuse.rules.cache_marks import MarkField, mark_value
from ctxreuse.rules.cache_rules import CacheRules
from ctxreuse.rules.prompt_forms import cut_content, marked_prompt

_MOST_CONTEXTS = 64
_SILENT_PROMPTS = 20
_CLOSING = re.compile(r"(?:\s*</[A-Za-z][\w-]*\s*>)+|\s*[\"'`)\]]+")
_log = logging.getLogger("ctxreuse")


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One part of a prompt: a message's content, or a part of it; of what is no text, a digest."""

    role: str
    text: str
    is_text: bool = True

    @classmethod
    def of_value(cls, role: str, value: object) -> PromptPart:
        """Return a part for what is no text, such as a tool call: equal for equal JSON values."""
        written = json.dumps(value, sort_keys=True, default=repr)
        return cls(role, text_digest(written).hex(), is_text=False)


@dataclass(frozen=True, slots=True)
class ScopedPrompt:
    """A prompt as a framework gave it."""

    parts: tuple[PromptPart, ...]
    scope: RequestScope = NO_SCOPE
    root: Hashable = None  # the outermost run that sends it
    rendered_only: bool = False  # only contexts count that were rendered with us
    beside: str = ""  # tools and schemas, which stand in front and have words of their own


class PromptFork(NamedTuple):
    """Where later prompts part from one: in which of its texts, behind how many characters."""

    part: int
    characters: int


class WirePrompt(NamedTuple):
    """A prompt as it goes over the wire, in OpenAI's form."""

    messages: Sequence[Mapping[str, Any]]
    places: Sequence[int | None]  # in which message each of its texts stands
    fields: Mapping[str, Any]  # what its call has besides messages: model, tools, salt
    headers: Mapping[str, str]


Wire: TypeAlias = Callable[["PlannedPrompt"], WirePrompt]


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt with its contexts planned."""

    position: int
    texts: tuple[str, ...]
    plans: tuple[Plan, ...] = ()
    tenant: str = ""
    parts: tuple[tuple[ContentPart, ...], ...] = ()
    named: tuple[tuple[str, ...], ...] = ()
    forks: tuple[PromptFork, ...] = ()  # where its primes end
    use: PrefixUse | None = None
    in_flight: CallInFlight | None = field(default=None, compare=False, repr=False)
    wire: Wire | None = field(default=None, compare=False, repr=False)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of its prefix groups."""
        return self.named or tuple(map(shard_of, self.plans))


@dataclass(frozen=True, slots=True)
class PromptStatistics:
    """What became of a planner's prompts, each counted once.

    Attributes:
        planned: Those that show a context that was planned.
        in_history: Others whose contexts were planned for earlier messages.
        in_place: Others whose contexts stay where they are, by the reason.
        not_found: Those that show no two known texts, such as one document alone.
        parts: How much is remembered of prompts, and how much may be.
    """

    planned: int = 0
    in_history: int = 0
    in_place: Mapping[str, int] = field(default_factory=dict)
    not_found: int = 0
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class OpenPrompt:
    """A prompt in the making."""

    given: ScopedPrompt
    tenant: str
    sent: list[str] = field(default_factory=list)
    # names of each part: with all before it, and alone
    keys: list[tuple[bytes, bytes]] = field(default_factory=list)
    edits: list[Edit | None] = field(default_factory=list)
    outcome: str = "not_found"
    contexts: list[tuple[int, Context]] = field(default_factory=list)  # that are to be planned
    plans: list[Plan] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)  # the parts whose edits are new

    @classmethod
    def failed(cls, prompt: ScopedPrompt) -> OpenPrompt:
        """Return a prompt that could not be read; it is sent as given."""
        sent = [part.text for part in prompt.parts]
        return cls(prompt, prompt.scope.tenant or "", sent, [], [None] * len(sent))


class PromptPlanner:
    """Plans the contexts inside prompts, and sends again what was sent as it was sent."""

    def __init__(
        self,
        planner: ReusePlanner,
        strategy: Strategy = "reuse",
        kind: str = "PromptPlanner",
        known: KnownTexts | None = None,
        *,
        primes: bool = False,
    ) -> None:
        self._planner, self._templates = planner, planner.templates
        self._strategy: Strategy = strategy
        self._kind = kind
        self._primes = primes
        self._known = known_texts() if known is None else known
        self._records: PromptRecords = planner.prompt_records

    def statistics(self) -> PromptStatistics:
        """Return what became of the planner's prompts so far, and how much is remembered."""
        counts = self._records.counts()
        named = {name: counts.pop(name, 0) for name in ("planned", "in_history", "not_found")}
        return PromptStatistics(**named, in_place=dict(counts), parts=dict(self._known.parts))

    def plan(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return the prompts in the order in which to send them, each once."""
        return self.plan_open([self.open(one) for one in prompts])

    def open(self, prompt: ScopedPrompt) -> OpenPrompt:
        """Return a prompt with its history as it was sent, and the contexts that are to be planned.

        Call `plan_open` with it, once.
        """
        one = OpenPrompt(prompt, prompt.scope.tenant or "")
        new = first_new([part.role for part in prompt.parts])
        key = _digest(prompt.beside, repr(prompt.scope.conversation_id))
        outcomes: list[str] = []
        found: dict[int, FoundContexts | None] = {}
        shown = ShownTexts()
        for number, part in enumerate(prompt.parts):
            alone = message_key(part.role, part.text)
            key = _digest(key.hex(), alone.hex())
            one.keys.append((key, alone))
            edit, text, before = None, part.text, None
            if part.is_text and part.role != "assistant":
                is_history = number < new
                if is_history:
                    edit = Edit.decoded(self._planner.edit_of(one.tenant, key))
                elif edit := self._known.planned(one.tenant, alone):  # by a part of ours
                    one.changed.add(number)
                if edit is None and is_history:  # what stands before it was sent otherwise
                    edit = Edit.decoded(self._planner.edit_of(one.tenant, alone))
                    before = shown
                if edit:
                    outcomes.append("in_history" if is_history else "planned")
                    text = edit.applied(text, self._templates, before)
                elif not is_history or part.role == "system":
                    only = prompt.rendered_only
                    found[number] = contexts_in(
                        self._known, one.tenant, text, prompt.root, rendered_only=only
                    )
            one.edits.append(edit)
            one.sent.append(text)
            shown.add(text)
        outcomes = [*self._judged(one, found), *outcomes, "not_found"]
        one.outcome = "planned" if "planned" in outcomes else outcomes[0]
        return one

    def plan_open(self, prompts: Sequence[OpenPrompt]) -> list[PlannedPrompt]:
        """Return prompts planned together, in the order in which to send them."""
        options = {"primes": self._primes, **planning_time(self._planner)}
        in_order: list[OpenPrompt] = []  # as they were first planned
        try:
            # the first context of each together; further ones stand behind what is sent before them
            while waiting := [one for one in prompts if one.contexts]:
                requests = [self._request(one) for one in waiting]
                plans, order = plans_together(self._planner, requests, self._strategy, **options)
                in_order = in_order or [waiting[position] for position in order]
                for one, plan in zip(waiting, plans, strict=True):
                    self._write(one, plan)
        except Exception:  # all of them are sent as given
            for plan in [plan for one in prompts for plan in one.plans]:
                self._planner.forget(plan)
            raise
        silent = self._records.count(self._kind, [one.outcome for one in prompts])
        if self._kind and silent.total() >= _SILENT_PROMPTS:
            _log_nothing_planned(self._kind, silent.most_common(1)[0][0])
        if without := sum(one.outcome == "not_found" for one in prompts):
            self._planner.note_without_context(without)
        for one in prompts:
            for number in one.changed:  # a system message also where nothing moves in it
                if edit := one.edits[number]:
                    self._planner.note_edit(one.tenant, one.keys[number], edit.encoded())
        planned = [self.closed(position, one) for position, one in enumerate(prompts)]
        if len(planned) < 2:
            return planned
        if self._primes:  # each one ends in the first of its group
            at = {id(one): place for place, one in enumerate(in_order)}
            return sorted(planned, key=lambda one: at.get(id(prompts[one.position]), len(at)))
        return [planned[n] for n in prefix_order(list(map(_as_shown, prompts, planned)))]

    def _judged(self, one: OpenPrompt, found: Mapping[int, FoundContexts | None]) -> list[str]:
        """Keep the contexts that are to be planned; return what becomes of all."""
        shows = [number for number, here in found.items() if here is None or here.contexts]
        outcomes = ["words_between" for here in found.values() if here and here.has_others]
        if not shows:
            return outcomes[:1]
        parts = one.given.parts
        words = [
            text
            for number, here in found.items()
            for text in ((parts[number].text,) if here is None else here.words)
        ]
        said = self._planner.words_of(one.tenant)
        own, is_early = said.note(one.keys[-1][0], words)
        answer = next((n for n, part in enumerate(parts) if part.role == "assistant"), len(parts))
        judged: list[str] = []
        for number in shows:
            here, reasons = found[number], list[str | None]()
            if here is None or len(one.contexts) + len(here.contexts) > _MOST_CONTEXTS:
                judged.append("too_long")
                continue
            for context in here.contexts:
                before = context.message[: context.start]
                front = _digest(one.given.beside, *one.sent[:number], before)
                is_new = said.has_new_front(front) and not is_early and number < answer
                reason = reason_in_place(
                    context,
                    own,
                    role=parts[number].role,
                    schema=one.given.beside,
                    ranking=self._templates.ranking_pattern,
                    has_new_front=is_new,
                )
                reasons.append(reason)
                if reason is None:
                    one.contexts.append((number, context))
            judged += [one or "planned" for one in reasons]
            if parts[number].role == "system" and None not in reasons:
                one.edits[number] = Edit((Slice(0, len(parts[number].text)),))
                one.changed.add(number)
        return [*judged, *outcomes]

    def _request(self, one: OpenPrompt) -> ContextRequest:
        """Return what to plan: a context's texts behind everything that is sent before them."""
        number, context = one.contexts[0]
        lists = [span.known.list_of(one.given.root) for span in context.spans]
        for take_back in filter(None, dict.fromkeys(held.take_back for held in lists)):
            take_back(self._planner)  # this plan stands in place of theirs
        scope, parts = one.given.scope, one.given.parts
        labels = context.is_labelled
        first = number  # of the parts of this turn's message
        while first and parts[first - 1].role == parts[number].role:
            first -= 1
        # without labels nothing refers to a turn; a system message with a context uses labels, too
        turns = {n for n in range(first) if labels and (parts[n].role != "system" or one.edits[n])}
        history: list[Message] | None = None
        if labels and (scope.conversation_id is not None or turns):
            history = [{"role": parts[n].role, "content": one.sent[n]} for n in sorted(turns)]
        front = [parts[n].role + one.sent[n] for n in range(number) if n not in turns]
        tools = _digest(one.given.beside, parts[number].role).hex()  # no breakpoint can stand there
        edit = one.edits[number]
        before = context.message[: context.start]
        if edit:  # another context stands before this one in the same text
            before = edit.applied(context.message, self._templates)
        ranked = range(len(context.spans)) if self._strategy == "none" else context.ranked
        blocks = context.blocks
        has_labels = context.texts != [block.text for block in blocks]  # else it would have them
        return ContextRequest(
            [blocks[place] for place in ranked],
            system="\n\n".join([tools, *front, before]),  # the text itself: its length counts
            history=history,
            conversation_id=scope.conversation_id if labels else None,
            tenant=one.tenant,
            labels=(has_labels or None) if labels else False,
        )

    def _write(self, one: OpenPrompt, plan: Plan) -> None:
        number, context = one.contexts.pop(0)
        part, earlier = one.given.parts[number], one.edits[number]
        behind = [other for n, other in one.contexts if n == number]
        end = behind[0].start if behind else len(context.message)
        start = 0 if earlier is None else context.start
        groups = _context_groups(context, plan, start, end)
        edit = _edit_of(part.text, groups, plan, earlier)
        one.sent[number] = edit.applied(part.text, self._templates)
        one.edits[number] = edit
        one.plans.append(plan)
        one.changed.add(number)

    def closed(self, position: int, one: OpenPrompt) -> PlannedPrompt:
        """Return a prompt as it is to be sent."""
        named = tuple(edit.group for edit in one.edits if edit and edit.group)
        parts: tuple[tuple[ContentPart, ...], ...] = ()
        if self._planner.wire_cache.marks and any(one.edits):
            roles = [part.role for part in one.given.parts]
            parts = with_breakpoints(roles, one.sent, one.edits, _may_go_on(one, roles))
        forks = tuple(
            PromptFork(number, sum(edit.cuts[: mark + 1]))
            for number in sorted(one.changed if self._primes else ())  # where its primes end
            for edit in [one.edits[number] or Edit()]
            for mark in edit.marks
        )
        use = PrefixUse.of(one.plans[0], primed=self._primes) if one.plans else None
        return PlannedPrompt(
            position, tuple(one.sent), tuple(one.plans), one.tenant, parts, named, forks, use
        )


class TextPosition(NamedTuple):
    """Where a text stands: in which message, and in which part of its content."""

    message: int
    part: int | None


def marked_contents(
    contents: Sequence[Any],
    parts: Sequence[Sequence[ContentPart]],
    positions: Sequence[TextPosition | None],
    profile: CacheRules,
    field: MarkField,
    tools: Sequence[Any] = (),
    *,
    marks_end: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Return contents in parts, with marks, and tools; `parts` as of `with_breakpoints`."""
    cuts: dict[int, dict[int | None, Sequence[ContentPart]]] = {}
    for position, own in zip(positions, parts, strict=True):
        if position is not None:
            cuts.setdefault(position.message, {})[position.part] = own
    if marks_end:
        for of_message in list(cuts.values())[-1:]:
            at, last = list(of_message.items())[-1]
            of_message[at] = (*last[:-1], last[-1]._replace(is_marked=False))
    messages: list[Mapping[str, Any]] = [
        {"content": cut_content(content, cuts.get(number, {}))}
        for number, content in enumerate(contents)
    ]
    if marks_end:
        messages.append({"content": (), "cache_control": mark_value("cache_control")})
    marked, own_tools = marked_prompt(messages, profile, field, tools)
    return [one["content"] for one in marked[: len(contents)]], own_tools


def with_breakpoints(
    roles: Sequence[str], sent: Sequence[str], edits: Sequence[Edit | None], may_go_on: bool
) -> tuple[tuple[ContentPart, ...], ...]:
    """Return what is sent for each part of a prompt in content parts, with breakpoints.

    Where it `may_go_on`, a later turn is likely to begin with all of it.
    """
    whole: list[list[ContentPart]] = []
    shows = False  # whether a context stands before
    new = first_new(roles)  # from here on, all is sent for the first time
    for number, (text, edit) in enumerate(zip(sent, edits, strict=True)):
        _, cuts, marks, _ = edit or Edit()
        parts = cut(text, cuts)
        if number < new:
            marks = () if shows else marks[-1:]  # others may have kept it alive
        is_spare = shows or number < new
        for mark in marks:
            if mark < 0:
                _mark_end(whole, roles, number, is_spare=is_spare)
            elif mark < len(parts):
                parts[mark] = parts[mark].as_spare() if is_spare else parts[mark].as_end()
        whole.append(without_blank_parts(parts))
        shows = shows or edit is not None
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    if may_go_on:
        for end in (len(roles), *answers[-1:]):
            _mark_end(whole, roles, end, is_turn=True)
    return tuple(
        tuple(parts) if parts else (ContentPart(text),)
        for parts, text in zip(whole, sent, strict=True)
    )


def _may_go_on(one: OpenPrompt, roles: Sequence[str]) -> bool:
    """Return whether a later turn may begin with a prompt: not where histories drop documents."""
    new = first_new(roles)
    if "user" not in roles[:new]:
        return one.given.scope.conversation_id is not None
    shown = (n for n, edit in enumerate(one.edits) if edit and roles[n] == "user")
    return min(one.changed, default=new) >= new > next(shown, 0)


def first_new(roles: Sequence[str]) -> int:
    """Return where the messages behind the last answer begin; a prefill is no answer."""
    end = len(roles)
    while end and roles[end - 1] == "assistant":
        end -= 1
    return max((n + 1 for n in range(end) if roles[n] == "assistant"), default=0)


def _mark_end(
    parts: list[list[ContentPart]],
    roles: Sequence[str],
    end: int,
    *,
    is_turn: bool = False,
    is_spare: bool = False,
) -> None:
    """Mark the last text before a position; of a turn, unless the model has said it."""
    for number in range(end - 1, -1, -1):
        if is_turn and roles[number] == "assistant":
            return
        if parts[number]:
            last = parts[number][-1]
            parts[number][-1] = last.as_spare() if is_spare else last.as_end()
            return


def note_planned(tenant: str, role: str, text: str, plan: Plan | None = None) -> None:
    """Have a message that a part of ours planned sent as it is, by whatever wraps the model."""
    edit = Edit()
    if plan and (plan.cache.marks or plan.cache.is_routed):
        parts = list(plan.content_parts())
        start = text.find(parts[0].text) if parts else 0
        if start:
            parts = [ContentPart(text[:start]), *parts] if start > 0 else []
        cuts = tuple(len(part.text) for part in parts)
        marks = tuple(n for n, part in enumerate(parts) if part.is_marked)
        edit = Edit(cuts=cuts, marks=marks, group=shard_of(plan))
    known_texts().add_planned(tenant, message_key(role, text), edit)


def result_edit(
    text: str, shown: Mapping[BlockKey, Sequence[Slice | str]], plan: Plan, region: Slice
) -> Edit:
    """Return how a text is sent that shows blocks under labels in a region, as their plan says."""
    templates, separator = plan.templates, plan.templates.separator
    own: dict[BlockKey, tuple[Slice | str, ...]] = {}
    for key, block in plan.request.unique_blocks.items():
        before = templates.before_text(templates.label_of(block))
        own[key] = (before, *shown[key], templates.after_text)
    groups = [_Group((Slice(0, region.start),)), *_turn_groups(plan, own, separator, separator)]
    if said := plan.order_annotation:
        groups.append(_Group((separator, said)))
    groups.append(_Group((Slice(region.end, len(text)),)))
    return _edit_of(text, groups, plan)


def plans_together(
    planner: ReusePlanner,
    requests: Sequence[ContextRequest],
    strategy: Strategy = "reuse",
    **options: Any,
) -> tuple[list[Plan], list[int]]:
    """Return plans in the order given, and the positions of a batch's in that of sending them.

    A tenant's only one is planned as if alone, to show no others.
    """
    of_tenant = Counter(request.tenant for request in requests)
    in_batch = [n for n, request in enumerate(requests) if of_tenant[request.tenant] > 1]
    plans: dict[int, Plan] = {}
    order: list[int] = []
    if in_batch:
        batch = [requests[n] for n in in_batch]
        planned = planner.plan_batch(batch, strategy, **options)
        plans = dict(zip(in_batch, planned.in_input_order(), strict=True))
        order = [in_batch[position] for position in planned.order]
    return [
        plans[n] if n in plans else planner.plan(request, strategy, **options)
        for n, request in enumerate(requests)
    ], order


class _Group(NamedTuple):
    """Pieces that are sent one after the other; whether they end with a planned block."""

    pieces: tuple[Piece, ...]
    is_block: bool = False


def _turn_groups(
    plan: Plan, own: Mapping[BlockKey, tuple[Slice | str, ...]], joint: Slice | str, between: str
) -> Iterator[_Group]:
    """Yield what a plan shows: its own pieces for blocks, and words on those that it leaves out."""
    if not plan.is_labelled:  # nothing is left out
        for number, key in enumerate(plan.sent):
            yield _Group((joint if number else "", *own[key]), is_block=True)
        return
    left_out = [part for part in plan.parts if isinstance(part, Reference)]
    given, shown = list(plan.turn.weights), plan.turn.shown
    keys = [given[rank] for rank in plan.ranks if given[rank] in shown]  # ids may stand twice
    left = [LeftText(own[key], one.label) for key, one in zip(keys, left_out, strict=True)]
    before: Slice | str = ""
    for part in plan.parts:
        if isinstance(part, SentBlock):
            pieces = own[part.block.key]
            yield _Group((joint if before == joint else before, *pieces), is_block=True)
            before = joint
        elif isinstance(part, Reference) and part.annotation:
            told = left if plan.templates.has_location_line else [left[left_out.index(part)]]
            yield _Group((between if before else "", Left(tuple(told), between)))
            before = between


def _context_groups(context: Context, plan: Plan, start: int, end: int) -> list[_Group]:
    """Return a message between two places, with its texts as planned, and words on them behind."""
    spans, separator = context.spans, context.separator
    joint = Slice(spans[0].end, spans[1].start)
    own: dict[BlockKey, tuple[Slice | str, ...]] = {}
    repeats: list[Slice] = []
    stays = list(dict.fromkeys(span.known.block.key for span in spans)) == plan.sent
    newest = spans[0]
    for span in spans:
        whole, key = Slice(span.start, span.end), span.known.block.key
        if key not in own:
            newest, own[key] = span, (whole,)
        elif stays:  # a repeat does, too, behind what it stands behind
            own[newest.known.block.key] = (Slice(newest.start, span.end),)
        elif key in plan.sent:  # one of what stands above shows nothing
            repeats.append(whole)
    between = "\n\n" if separator.strip() else separator
    groups = [_Group((Slice(start, context.start),)), *_turn_groups(plan, own, joint, between)]
    groups += [_Group((joint, one)) for one in repeats]
    closing = match[0] if (match := _CLOSING.match(separator)) else ""  # behind each other text
    behind = context.end + len(closing) * context.message.startswith(closing, context.end)
    groups.append(_Group((Slice(context.end, behind),)))
    said = plan.order_annotation
    if said and (context.is_labelled or not context.is_numbered):
        groups.append(_Group((between, said)))
    return [*groups, _Group((Slice(behind, end),))]


def _edit_of(text: str, groups: Iterable[_Group], plan: Plan, earlier: Edit | None = None) -> Edit:
    """Return how a text is sent, cut behind each planned block where that can be read."""
    before = earlier or Edit(())
    pieces, cuts, marks = list(before.pieces or ()), list(before.cuts), list(before.marks)
    ends = plan.marks or plan.primes
    number = length = 0
    for group in groups:
        own = [one for one in group.pieces if one and one != Slice(0, 0)]
        pieces += own
        if plan.cache.marks or ends:
            size = len(Edit(tuple(own)).applied(text, plan.templates))
            length += size
            if group.is_block:
                if not number:  # what stands before the documents ends here, or with another part
                    cuts += [length - size] * (length > size)
                    length = size
                    marks += [len(cuts) - 1] * (0 in ends)
                number += 1
                if number in ends:
                    marks.append(len(cuts))
                cuts.append(length)
                length = 0
    group_names = shard_of(plan) if plan.cache.is_routed else ()
    return Edit(tuple(pieces), tuple(cuts), tuple(marks), group_names)


def _as_shown(one: OpenPrompt, planned: PlannedPrompt) -> str:
    """Return what the engine will see, for comparing prompts; tenants share nothing."""
    texts = zip(one.given.parts, planned.texts, strict=True)
    return "".join([f"{one.tenant}\n", *(f"{part.role}\n{text}\n" for part, text in texts)])


def message_key(role: str, text: str) -> bytes:
    """Return the name of a message whatever stands before it."""
    return _digest("alone", role, text)


def _digest(*texts: str) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for text in texts:
        content = encoded(text)
        whole.update(len(content).to_bytes(8, "big"))
        whole.update(content)
    return whole.digest()


@cache
def _log_nothing_planned(kind: str, outcome: str) -> None:
    """Say once of a kind of wrapper that it finds nothing to do, and what to change."""
    _log.warning(
        "%s: none of %d prompts in a row shows a context that can be planned, so they are sent as "
        "given: %s. prompt_statistics (/v1/savings) says what becomes of each prompt.",
        kind,
        _SILENT_PROMPTS,
        REMEDIES[outcome],
    )
