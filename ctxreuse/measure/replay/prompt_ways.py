"""What whole prompts of a recording cost an engine: as they are, and changed in some way."""

from __future__ import annotations

from array import array
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from itertools import pairwise
from statistics import median

from ctxreuse.cache.simulator import CacheUsage, PrefixCacheSimulator
from ctxreuse.context.blocks import ContextBlock, ContextRequest, Message, text_digest
from ctxreuse.context.scope import RequestScope
from ctxreuse.context.tokens import well_formed
from ctxreuse.measure.replay.prompts import Tokenizer
from ctxreuse.measure.replay.simulate import Progress
from ctxreuse.measure.traces.changing_documents import ChangingDocuments
from ctxreuse.measure.traces.recorded_prompts import (
    MEMORIES,
    DocumentPiece,
    RecordedPrompt,
    SeenPrompt,
    document_text,
    forms_of,
    seen_prompts,
    shown_forms,
    with_place,
)
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.pipeline.formatting import labelled_form
from ctxreuse.pipeline.known_texts import ANY_KIND, Form, KnownTexts, words_at
from ctxreuse.pipeline.prompt_turn import (
    PromptPart,
    PromptPlanner,
    ScopedPrompt,
    message_key,
    result_edit,
)
from ctxreuse.planner import ReusePlanner
from ctxreuse.planning.prompt_records import Edit, ShownTexts, Slice, made_of

LEAST_SAVED = 0.02  # of the tokens that are computed; a smaller share is nothing to gain

_LESS = 0.05  # that a lesser change may save less
_TOKEN = 4  # characters; from a first difference on nothing is shared, so cuts need not be words
_TEXTS = 20_000
_OFTEN = 0.5
_UNSEEN = (MEMORIES, "LangChain vector stores")  # by a wrapped model


class Way(StrEnum):
    """What is changed of an application, the least change first."""

    SETTLED = "documents without what changes"
    WRAPPED = "the model wrapped"
    SHOWN_ONCE = "an agent's documents shown once"
    RENDERED = "documents rendered by format_context"
    ORDERED = "documents in planned order"
    LABELLED = "documents under labels, each shown once"
    BEHIND = "what differs behind the documents"
    BOTH = f"{RENDERED}, and {BEHIND}"


@dataclass(frozen=True, slots=True)
class MeasuredWay:
    """What prompts cost in one way."""

    name: Way
    usage: CacheUsage

    def saved(self, before: CacheUsage) -> float:
        """Return which share of the tokens is not computed that were before."""
        return 1 - self.usage.prefilled_tokens / max(1, before.prefilled_tokens)


@dataclass(frozen=True, slots=True)
class PromptWays:
    """What a recording's prompts cost as they are, and in the ways that apply to them."""

    plain: CacheUsage
    as_it_is: MeasuredWay  # the model wrapped, and nothing else changed
    ways: tuple[MeasuredWay, ...]
    prompts: int
    framework: str
    are_memories: bool  # Mem0's, most of the documents
    in_place: str = ""  # why most prompts keep their documents in place, where words say so

    @property
    def best(self) -> MeasuredWay | None:
        """The least change that saves most, nearly; None where none saves anything."""
        most = max(one.saved(self.plain) for one in self.ways)
        least = max(LEAST_SAVED, most - _LESS)
        good = [one for one in self.ways if one.saved(self.plain) >= least]
        return min(good, key=lambda one: [*Way].index(one.name), default=None)


def measured_ways(
    seen: Sequence[SeenPrompt],
    requests: Sequence[TraceRequest],
    new_planner: Callable[[], ReusePlanner],
    capacity_tokens: int | None,
    changing: ChangingDocuments | None,
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> PromptWays | None:
    """Measure whole prompts in all ways that apply; None where no prompt shows a document.

    What changes in documents is first taken out, where that is given. Without a tokenizer each
    four characters are a token.
    """
    if not any(one.pieces for one in seen):
        return None
    tokens_of = _tokens
    if tokenizer is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        tokens_of = lru_cache(_TEXTS)(lambda text: array("i", encode(well_formed(text)).ids))
    named = {one.request_id: one for one in requests}
    replay = _ReplayedPrompts(seen, named, capacity_tokens, new_planner, tokens_of)
    with progress("replaying prompts as they are", 2 * len(seen)) as advance:
        plain = replay.cost((one.prompt.parts for one in seen), advance)
        as_it_is = MeasuredWay(Way.WRAPPED, replay.cost(replay.planned(seen), advance))
    if changing is not None:
        requests = changing.settled(requests)
        seen = list(seen_prompts(_settled(seen, changing), requests))
        named = {one.request_id: one for one in requests}
        replay = replace(replay, seen=seen, named=named)
    framework = seen[0].prompt.framework
    are_memories = median(one.source == MEMORIES for one in requests) > 0
    roles = {one.prompt.parts[n].role for one in seen for n in one.pieces}
    behind = list(_behind(seen))
    planner, sent = replay.new_planner(), {Way.ORDERED: replay.ordered()}
    if not are_memories:
        sent[Way.RENDERED] = replay.planned(seen, Way.RENDERED, planner)
        if "tool" not in roles:
            sent[Way.LABELLED] = replay.planned(seen, Way.LABELLED)
    if changing is not None:
        sent[Way.SETTLED] = (list(one.prompt.parts) for one in seen)
        sent[Way.WRAPPED] = replay.planned(seen)
    if behind != [one.prompt for one in seen]:
        moved = list(seen_prompts(behind, requests))
        sent[Way.BEHIND] = replay.planned(moved)
        if not are_memories:
            sent[Way.BOTH] = replay.planned(moved, Way.RENDERED)
    if "tool" in roles and framework == "langchain":
        sent[Way.SHOWN_ONCE] = replay.shown_once()
    with progress("replaying changed prompts", len(sent) * len(seen)) as advance:
        ways = [MeasuredWay(name, replay.cost(one, advance)) for name, one in sent.items()]
    counts = planner.prompt_records.counts()
    often = (one for one in ("order", "numbers") if counts[one] > _OFTEN * len(seen))
    in_place, found = next(often, ""), {number: len(one.blocks) for number, one in named.items()}
    cut = [
        sum(map(len, one.pieces.values())) < sum(found.get(n, 0) for n in one.retrieved)
        for one in seen
    ]
    # a part that does not see these words, or what is cut off behind it, must not move them
    if in_place or sum(cut) > _OFTEN * len(seen):
        ways = [one for one in ways if one.name != Way.ORDERED]
    ways.append(as_it_is)
    return PromptWays(plain, as_it_is, tuple(ways), len(seen), framework, are_memories, in_place)


@dataclass(frozen=True, slots=True)
class _ReplayedPrompts:
    seen: Sequence[SeenPrompt]
    named: Mapping[str | int, TraceRequest]
    capacity_tokens: int | None
    new_planner: Callable[[], ReusePlanner]
    tokens_of: Callable[[str], array[int]]

    def cost(
        self, prompts: Iterable[Sequence[PromptPart]], advance: Callable[[], object]
    ) -> CacheUsage:
        rules, usage = self.new_planner().cache, CacheUsage()
        cache = PrefixCacheSimulator(self.capacity_tokens, rules.step_tokens, states=rules.states)
        for one, parts in zip(self.seen, prompts, strict=True):
            tokens = array("i", self.tokens_of(one.prompt.beside))
            for part in parts:
                tokens += self.tokens_of(f"<|{part.role}|>\n{part.text}\n")
            usage += cache.serve(tokens, one.prompt.tenant)
            advance()
        return usage

    def planned(
        self, seen: Sequence[SeenPrompt], way: Way = Way.WRAPPED, own: ReusePlanner | None = None
    ) -> Iterator[list[PromptPart]]:
        known, given = KnownTexts(), set[str | int]()
        of_runs = {n for one in self.seen for n in one.prompt.retrieved}
        planner = own or self.new_planner()
        planning = PromptPlanner(planner, kind="", known=known)  # nobody is told
        for prompt, shown, outside in seen:
            seen_too = [one for one in outside if way != Way.WRAPPED or one.source not in _UNSEEN]
            lists = [one for one in seen_too if one.request_id not in of_runs]
            lists += [self.named[n] for n in prompt.retrieved if n in self.named.keys() - given]
            given.update(prompt.retrieved)
            for found in lists:
                kind = ANY_KIND if prompt.framework == "llamaindex" else ""
                forms = [Form(document_text(block), kind=kind) for block in found.blocks]
                known.add_seen(prompt.tenant, [forms], prompt.run)
            texts = [one.text for one in prompt.parts]
            for number in shown if way != Way.WRAPPED else shown.keys() & prompt.rendered:
                text = texts[number]
                forms = [Form(text[one.start : one.end]) for one in shown[number]]
                if way == Way.LABELLED:
                    forms = [labelled_form(one, None, planner.templates) for one in forms]
                    texts[number] = _with_pieces(text, shown[number], [one.text for one in forms])
                known.add(prompt.tenant, forms)
            parts = _with_texts(prompt.parts, texts)
            scope = RequestScope(prompt.tenant or None, prompt.conversation_id)
            given_prompt = ScopedPrompt(tuple(parts), scope, prompt.run, beside=prompt.beside)
            [planned] = planning.plan([given_prompt])
            yield _with_texts(parts, planned.texts)

    def ordered(self) -> Iterator[list[PromptPart]]:
        """Yield prompts with their documents in planned order, whatever puts them there."""
        planner, order = self.new_planner(), dict[str | int, list[dict[str, str]]]()
        sent = dict[tuple[str, str], str]()
        forms: dict[str, dict[str, str]] = defaultdict(dict)  # of each document, by run
        for prompt, shown, _ in self.seen:
            for number, at in shown.items():
                text = prompt.parts[number].text
                movable = _movable(text, at, is_bare=False)
                of_run = shown_forms(text, movable, is_bare=False)
                for one, form in zip(movable, of_run, strict=True):
                    forms[one.document.strip()].setdefault(prompt.run, form)
        again = [set(one.values()) for one in forms.values() if len(one) > 1]
        # what stands on a document is of its place
        is_numbered = sum(len(one) > 1 for one in again) > _OFTEN * len(again)
        for seen in self.seen:
            prompt = seen.prompt
            for request_id in seen.retrieved:
                if request_id in self.named and request_id not in order:
                    order[request_id] = _in_planned_order(planner, self.named[request_id])
            of_forms = [one for n in seen.retrieved for one in order.get(n, ())]
            texts = [one.text for one in prompt.parts]
            for number, at in seen.pieces.items():
                key = prompt.tenant, texts[number]  # a history shows it as it was sent
                if key not in sent and not at[0].lasting:
                    # repeats stand behind all others
                    documents = [one.document.strip() for one in at]
                    moved = ChainMap(
                        *sorted(of_forms, key=lambda form: -sum(map(form.__contains__, documents)))
                    )
                    new = [moved.get(one, one) for one in dict.fromkeys(documents)]
                    new += (one for n, one in enumerate(documents) if one in documents[:n])
                    if not is_numbered:
                        new = [forms[one].get(prompt.run, one) for one in new]
                    movable = _movable(texts[number], at, is_bare=is_numbered)
                    sent[key] = _with_pieces(texts[number], movable, new)
                texts[number] = sent.get(key, texts[number])
            yield _with_texts(prompt.parts, texts)

    def shown_once(self) -> Iterator[list[PromptPart]]:
        """Yield prompts whose tools' results leave out what their conversation shows."""
        planner, edits = self.new_planner(), dict[bytes, Edit]()
        for prompt, shown, _ in self.seen:
            history, before, texts = list[Message](), ShownTexts(), list[str]()
            conversation = prompt.conversation_id or prompt.run
            key = text_digest(f"{prompt.tenant} {conversation}")
            for number, part in enumerate(prompt.parts):
                text = part.text
                key = text_digest((key + message_key(part.role, text)).hex())
                if part.role == "tool" and number in shown:
                    if key not in edits:
                        at = shown[number]
                        cut = [one.lasting or (Slice(one.start, one.end),) for one in at]
                        blocks = [ContextBlock(text=made_of(text, one)) for one in cut]
                        request = ContextRequest(
                            blocks,
                            history=history,
                            conversation_id=conversation,
                            tenant=prompt.tenant,
                            labels=True,
                        )
                        plan = planner.plan(request, "none")  # it stands behind its question
                        own = dict(zip([one.key for one in blocks], cut, strict=True))
                        whole, places = Slice(0, len(text)), Slice(at[0].start, at[-1].end)
                        region = whole if at[0].lasting else places
                        edits[key] = result_edit(text, own, plan, region)
                    text = edits[key].applied(text, planner.templates, before)
                if part.role != "system":
                    history.append({"role": part.role, "content": text})
                before.add(text)
                texts.append(text)
            yield _with_texts(prompt.parts, texts)


def _movable(text: str, at: Sequence[DocumentPiece], *, is_bare: bool) -> Sequence[DocumentPiece]:
    """Return documents, with what is written on them if that differs."""
    bare = [words_at(one.at, one.document) for one in at]
    if not is_bare and len({text[a[1] : b[0]] for a, b in pairwise(bare)}) > 1:
        return at
    return [one._replace(start=a, end=b) for one, (a, b) in zip(at, bare, strict=True)]


def _settled(seen: Sequence[SeenPrompt], changing: ChangingDocuments) -> Iterator[RecordedPrompt]:
    for prompt, shown, _ in seen:
        texts = [one.text for one in prompt.parts]
        for number, at in shown.items():
            text = texts[number]
            forms = shown_forms(text, at)
            without = (changing.without.get((prompt.tenant, form)) for form in forms)
            new = [one[1] if one else form for one, form in zip(without, forms, strict=True)]
            texts[number] = _with_pieces(text, at, new)
        yield prompt._replace(parts=tuple(_with_texts(prompt.parts, texts)))


def _with_pieces(text: str, at: Sequence[DocumentPiece], new: Sequence[str]) -> str:
    out, end = list[str](), 0
    for place, (one, form) in enumerate(zip(at, new, strict=True)):
        out += [text[end : one.start], with_place(form, place)]
        end = one.end
    return "".join([*out, text[end:]])


def _in_planned_order(planner: ReusePlanner, request: TraceRequest) -> list[dict[str, str]]:
    """Return which text a part that orders documents puts in the place of each, in each form."""
    texts = list(dict.fromkeys(map(document_text, request.blocks)))
    blocks = [ContextBlock(text=text) for text in texts]
    plan = planner.plan(ContextRequest(blocks, request.query, tenant=request.tenant))
    ordered = (block.text for block in plan.blocks)
    pairs = [zip(*map(forms_of, pair), strict=True) for pair in zip(texts, ordered, strict=False)]
    return [
        {one.strip(): other.strip() for one, other in form} for form in zip(*pairs, strict=True)
    ]


def _behind(seen: Sequence[SeenPrompt]) -> Iterator[RecordedPrompt]:
    """Yield prompts with the lines behind their documents that differ in front of them."""
    fronts: list[dict[int, list[str]]] = []
    for prompt, shown, _ in seen:
        first = min(shown, default=-1)
        ends = {n: len(prompt.parts[n].text) for n in range(first)}
        ends |= {first: shown[first][0].start} if shown else {}
        roles = [one.role for one in prompt.parts]
        # what stands before an answer stays: a tool's was asked for
        answered = max((n for n in ends if roles[n] == "assistant"), default=-1)
        said = [n for n in ends if roles[n] == "system" or (roles[n] == "user" and n > answered)]
        cut = {n: prompt.parts[n].text[: ends[n]].splitlines(keepends=True) for n in said}
        fronts.append(cut)
    often = Counter(line for some in fronts for line in {x for one in some.values() for x in one})
    least = _OFTEN * sum(map(bool, fronts))
    for one, front in zip(seen, fronts, strict=True):
        parts, moved = one.prompt.parts, list[str]()
        texts = [part.text for part in parts]
        for number, lines in front.items():
            stays = [line for line in lines if often[line] > least or not line.strip()]
            moved += [line.strip() for line in lines if line not in stays]
            texts[number] = "".join(stays) + texts[number][sum(map(len, lines)) :]
        if moved:
            texts[max(front)] += "\n".join(["", "", *moved])
        yield one.prompt._replace(parts=tuple(_with_texts(parts, texts)))


def _with_texts(parts: Sequence[PromptPart], texts: Sequence[str]) -> list[PromptPart]:
    pairs = zip(parts, texts, strict=True)
    return [one if one.text == text else replace(one, text=text) for one, text in pairs]


@lru_cache(_TEXTS)
def _tokens(text: str) -> array[int]:
    pieces = (text[at : at + _TOKEN] for at in range(0, len(text), _TOKEN))
    return array("i", [hash(one) & 0x7FFFFFFF for one in pieces])
