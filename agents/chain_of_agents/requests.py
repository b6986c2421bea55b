"""What a chain is asked, and then each agent, within what the model's context window holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from langchain_core.runnables import RunnableConfig

from chain_of_agents.agent_memory import MANAGER, AgentMemory, ConversationKey
from chain_of_agents.chain_prompts import ChainPrompts, note_after
from chain_of_agents.models import AgentRequest
from chain_of_agents.segments import Packing, Segment, as_blocks, as_sent
from chain_of_agents.trace.steps import Step, remarked
from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.checks import (
    checked_choice,
    checked_integer,
    checked_kind,
    checked_optional_integer,
    checked_positive,
    checked_share,
)
from ctxreuse.context.rendering import render_block
from ctxreuse.context.scope import current_scope
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.engine_options import conversation_session
from ctxreuse.planner import ReusePlanner

Mode: TypeAlias = Literal["sequential", "parallel"]
"""Whether each worker reads the note of the one before, or all work independently."""

Note: TypeAlias = tuple[int, str]
"""A worker's number, counted from 1, and its note."""

_NOTE_SEPARATOR = "\n\n"
_DEFAULT_WINDOW_TOKENS = 8_192
"""The context window where the model does not say; as in the Chain-of-Agents paper."""

_LEAST_SEGMENT_TOKENS = 32
_MARKUP_TOKENS = 64
"""What chat templates and annotations may add."""
_RANKING_TOKENS = 32
"""Of these, what the names in a ranking may add."""
_MESSAGE_TOKENS = 8
"""What a chat template may add to each message of a history."""
_HIGH_NUMBER = 9_999
_QUESTION_TOKENS = 256
_ESTIMATE_MARGIN = 0.75
"""Share of a window that is used where tokens are only estimated."""
_CUT = " ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a chain; see `ChainOfAgents`."""

    workers: int
    mode: Mode
    packing: Packing
    prompts: ChainPrompts
    note_tokens: int
    answer_tokens: int
    segment_tokens: int | None
    context_window: int | None
    timeout_s: float | None
    min_read: float

    def __post_init__(self) -> None:
        checked_kind("prompts", self.prompts, ChainPrompts, "ChainPrompts")
        checked_choice("mode", self.mode, get_args(Mode))
        checked_choice("packing", self.packing, get_args(Packing))
        for name in ("workers", "note_tokens", "answer_tokens"):
            checked_integer(name, getattr(self, name), 1)
        for name in ("segment_tokens", "context_window"):
            checked_optional_integer(name, getattr(self, name), 1)
        if self.timeout_s is not None:
            checked_positive("timeout_s", self.timeout_s)
        checked_share("min_read", self.min_read)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainQuestion:
    """What a chain is asked."""

    text: str
    documents: Sequence[ContextBlock]
    tenant: str = ""
    conversation: ConversationKey | None = None


def conversation_name(given: object) -> str | int:
    """Return a conversation's id as it is kept: UUIDs and the like become strings."""
    return given if isinstance(given, int) else str(given)


def question_of(given: object, config: RunnableConfig | None = None) -> ChainQuestion:
    """Return a chain's input as a question."""
    words = "a dict with 'question' and 'documents'"
    given = checked_kind("the chain's input", given, Mapping, words)
    for name in ("question", "documents"):
        if name not in given:
            raise InvalidRequestError(
                f"the chain's input has no {name!r}; it has {', '.join(map(repr, given)) or 'none'}"
            )
    text = as_sent(checked_kind("the question", given["question"], str, "a string"))
    configurable: Mapping[str, Any] = (config or {}).get("configurable") or {}
    tenant = given.get("tenant", configurable.get("tenant"))
    conversation = given.get("conversation_id", configurable.get("thread_id"))
    scope = current_scope().inside(
        None if tenant is None else str(tenant),
        None if conversation is None else conversation_name(conversation),
    )
    owner, key = scope.tenant or "", scope.conversation_id
    return ChainQuestion(
        text=text,
        documents=as_blocks(given["documents"]),
        tenant=owner,
        conversation=None if key is None else ConversationKey(owner, key),
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """The bounds of one question's prompts, in tokens."""

    cut: int  # what the pieces of long documents have at most
    segment: int  # what a worker reads in one call
    notes: int  # what the manager reads
    label: int  # what each document but the first adds besides its text
    location: int  # what pointing to a document adds, in a conversation
    location_line: int  # what pointing to any number of documents adds besides
    note: int  # what each note adds besides its text


def budget_of(
    question: str, window: int | None, settings: Settings, planner: ReusePlanner
) -> Budget:
    """Return the bounds of a question's prompts."""
    window = window or _DEFAULT_WINDOW_TOKENS
    prompts, templates, count_tokens = settings.prompts, planner.templates, planner.count_tokens
    note_tokens, answer_tokens = settings.note_tokens, settings.answer_tokens
    usable = window if planner.counts_tokens else int(window * _ESTIMATE_MARGIN)
    longer = max(0, count_tokens(question) - _QUESTION_TOKENS)  # than what is kept for it
    label = templates.label_of(ContextBlock(text=""))
    beside_a_text = render_block(label, "", templates) + templates.separator
    # a ranking of few documents has room anyway
    named, most = templates.order_separator + label, templates.most_ranked
    if most is None or most * count_tokens(named) > _RANKING_TOKENS:
        beside_a_text += named
    label_tokens = count_tokens(beside_a_text)
    location, location_line = templates.location_annotations([label])[0] + templates.separator, ""
    if templates.has_location_line:
        location, location_line = f", {label}", location
    query = max(count_tokens(prompts.first), count_tokens(prompts.next))
    worker = count_tokens(prompts.worker) + query + 2 * note_tokens
    manager = count_tokens(prompts.manager + prompts.final + prompts.no_notes) + answer_tokens
    # whatever the question is, each chain and process cuts a document alike
    cut = usable - worker - _QUESTION_TOKENS - _MARKUP_TOKENS - label_tokens
    segment = cut - max(0, longer - (window - usable) // 2)
    notes = usable - manager - _QUESTION_TOKENS - longer - _MARKUP_TOKENS
    if segment < _LEAST_SEGMENT_TOKENS or notes < _LEAST_SEGMENT_TOKENS:
        raise InvalidRequestError(
            f"a model with room for {window} tokens has none for a segment, beside instructions, "
            f"a question of {count_tokens(question)} tokens, notes of {note_tokens} and an answer "
            f"of {answer_tokens}; ask a shorter question, or lower note_tokens or answer_tokens"
        )
    note = count_tokens(prompts.note.format(worker=_HIGH_NUMBER, note="") + _NOTE_SEPARATOR)
    return Budget(
        cut=min(cut, settings.segment_tokens or cut),
        segment=min(segment, settings.segment_tokens or segment),
        notes=notes,
        label=label_tokens,
        location=count_tokens(location),
        location_line=count_tokens(location_line),
        note=note,
    )


def history_tokens(history: Iterable[Mapping[str, Any]], count_tokens: Callable[[str], int]) -> int:
    """Return the length of a history's messages."""
    return sum(count_tokens(message["content"]) + _MESSAGE_TOKENS for message in history)


def clipped(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return a text, cut at its end if it has more than `tokens` tokens."""
    if count_tokens(text) <= tokens:
        return text
    ends = range(1, len(text) + 1)
    end = bisect_right(ends, tokens, key=lambda end: count_tokens(text[:end] + _CUT))
    return text[:end].rstrip() + _CUT


def clipped_together(
    texts: Sequence[str], tokens: int, count_tokens: Callable[[str], int]
) -> list[str]:
    """Return texts that have at most `tokens` tokens together; the longest are cut."""
    lengths = [count_tokens(text) for text in texts]
    most = bisect_right(
        range(1, tokens + 1), tokens, key=lambda most: sum(min(length, most) for length in lengths)
    )
    return [clipped(text, most, count_tokens) for text in texts]


@dataclass(frozen=True, slots=True)
class AgentRequests:
    """Makes the requests of one question, within the budget of its prompts."""

    question: ChainQuestion
    settings: Settings
    planner: ReusePlanner
    memory: AgentMemory
    budget: Budget

    def worker(self, segment: Segment, note: str, replica: str) -> tuple[AgentRequest, str]:
        """Return a worker's request, and a remark on it."""
        settings, prompts = self.settings, self.settings.prompts
        template = prompts.next if note else prompts.first
        history: Sequence[Mapping[str, Any]] = ()
        if segment.is_first_of_agent:
            history = self.memory.history(self.question.conversation, segment.agent)
        remark, budget = "", self.budget
        if history:  # which may show some of the segment
            size = segment.tokens + len(segment.blocks) * max(budget.label, budget.location)
            size += history_tokens(history, self.planner.count_tokens) + budget.location_line
            if size > budget.segment:
                history, remark = (), "its history was left out to fit the model's context"
        request = self._request(
            f"agent {segment.agent}",
            segment.blocks,
            template.format(question=self.question.text, note=note),
            prompts.worker,
            history,
            replica=replica,
            session_id=f"chain-of-agents-{segment.agent}",
            max_tokens=settings.note_tokens,
        )
        return request, remark

    def manager(self, notes: Sequence[Note], most: int) -> tuple[AgentRequest, str]:
        """Return the manager's request, with so many tokens of notes at most, and a remark."""
        question, prompts, budget = self.question, self.settings.prompts, self.budget
        count_tokens = self.planner.count_tokens
        # with the words around them, notes are half of what the manager reads at least
        kept = notes[: max(1, most // (2 * max(1, budget.note)))]
        room = max(0, most - budget.note * len(kept))
        cut = clipped_together([note for _, note in kept], room, count_tokens)
        shown = [(number, note) for (number, _), note in zip(kept, cut, strict=True)]
        remark = "" if shown == notes else "notes were cut to fit the model's context"
        told = [prompts.note.format(worker=number, note=note) for number, note in shown]
        query = prompts.final.format(
            notes=_NOTE_SEPARATOR.join(told) or prompts.no_notes, question=question.text
        )
        history = self.memory.history(question.conversation, MANAGER)
        if history and history_tokens(history, count_tokens) + count_tokens(query) > most:
            history, remark = (), "the conversation was left out to fit the model's context"
        session_id = None  # outside a conversation any engine may answer
        if question.conversation is not None:
            session_id = conversation_session(question.tenant, question.conversation.id)
        options = {"session_id": session_id, "max_tokens": self.settings.answer_tokens}
        return self._request("manager", (), query, prompts.manager, history, **options), remark

    def note_of(self, step: Step, before: str) -> tuple[Step, str]:
        """Return a worker's step, with remarks, and its note as the next agent reads it."""
        if step.outcome != "answered":
            return step, ""
        settings, count_tokens = self.settings, self.planner.count_tokens
        note = note_after(settings.prompts, before, step.note.strip(), self.question.text)
        if note is None:
            stands = "; the note before it stands" if before else ""
            return remarked(step, f"it found nothing{stands}"), ""
        longest = settings.note_tokens
        if (step.completion_tokens or longest + 1) <= longest:
            # it is within max_tokens, whatever is estimated of other scripts than Latin ones
            said = count_tokens(step.note)
            most = 2 * longest * max(said, step.completion_tokens or 1)
            together = said + count_tokens(before)  # no note grows on and on
            longest = max(longest, said, min(together, most // (step.completion_tokens or 1)))
        cut = clipped(note, longest, count_tokens)
        return step if cut == note else remarked(step, "its note was cut to note_tokens"), cut

    def _request(
        self,
        agent: str,
        blocks: Sequence[ContextBlock],
        query: str,
        system: str,
        history: Sequence[Mapping[str, Any]],
        **options: Any,
    ) -> AgentRequest:
        conversation, planned = self.question.conversation, self.planner.labels
        is_shadow = self.planner.mode == "shadow"  # nothing is referred to
        context = ContextRequest(
            blocks,
            query,
            system=system,
            history=history,
            # later turns of a conversation refer to them
            labels=planned if conversation is None or is_shadow else planned is not False,
            conversation_id=None if conversation is None else f"{conversation.id!r}, {agent}",
            tenant=self.question.tenant,
        )
        return AgentRequest(context=context, limit_s=self.settings.timeout_s, **options)
