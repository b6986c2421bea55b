"""Planning finished prompts: what a wrapper around a language model does before it sends them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from ctxreuse.adapters.clock import planning_time
from ctxreuse.adapters.context_search import FoundContext
from ctxreuse.adapters.environment import default_planner
from ctxreuse.adapters.issued_plans import ISSUED_PLANS
from ctxreuse.adapters.leader_first import CallInFlight, PrefixUse
from ctxreuse.adapters.prompt_draft import PlacedContext, PromptDraft, ScopedPrompt
from ctxreuse.adapters.rendered_contexts import ContextRegistry, context_registry
from ctxreuse.adapters.standing_documents import shows_several
from ctxreuse.context.blocks import ContextRequest
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.content_parts import ContentPart, cut
from ctxreuse.context.fork_safety import ForkSafeLock
from ctxreuse.context.lru_map import PartSize, TenantLRUMap
from ctxreuse.planner import ReusePlanner, Strategy, check_strategy
from ctxreuse.planning.plan import Plan, shard_of
from ctxreuse.policy.batch import prefix_order
from ctxreuse.rules.cache_rules import CacheRules

_REMEMBERED_CHARACTERS = 16_000_000
_ENTRY_CHARACTERS = 100
_SILENT_PROMPTS = 20
_MOST_FRONTS = 10_000
_FOUND = ("planned", "left_alone", "planned_before", "in_history", "too_short", "kept_in_place")
_log = logging.getLogger("ctxreuse")

_Remembered: TypeAlias = tuple[str, tuple[int, ...], int | None, tuple[str, ...]]
"""A context as it was sent: text, lengths of its parts, which of these has the last mark, and its
group."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt with its contexts planned."""

    position: int
    texts: tuple[str, ...]
    plans: tuple[Plan, ...] = ()
    tenant: str = ""
    parts: tuple[tuple[ContentPart, ...], ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    use: PrefixUse | None = None
    in_flight: CallInFlight | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PromptStatistics:
    """What became of the contexts in prompts, and what a `PromptPlanner` remembers."""

    planned: int = 0
    left_alone: int = 0
    planned_before: int = 0
    in_history: int = 0
    too_short: int = 0
    kept_in_place: int = 0
    varying_front: int = 0
    joined_otherwise: int = 0
    in_other_scope: int = 0
    not_recognised: int = 0
    without_context: int = 0
    too_long: int = 0
    sent_texts: int = 0
    sent_characters: int = 0
    parts: Mapping[str, PartSize] = field(default_factory=dict, compare=False)


class PromptPlanner:
    """Plans the contexts inside prompts and schedules the prompts."""

    def __init__(
        self,
        planner: ReusePlanner | None = None,
        strategy: Strategy = "reuse",
        registry: ContextRegistry | None = None,
    ) -> None:
        self._planner = planner_or_new(planner)
        check_strategy(strategy)
        self._strategy: Strategy = strategy
        self._registry = context_registry(registry)
        self._counts: Counter[str] = Counter()
        self._lock = ForkSafeLock(self._forget_all)  # of what is remembered, and of _counts
        self._forget_all()

    def _forget_all(self) -> None:
        self._fronts: TenantLRUMap[bytes, bool] = TenantLRUMap(_MOST_FRONTS)
        self._sent_contexts: TenantLRUMap[bytes, _Remembered] = TenantLRUMap(
            _REMEMBERED_CHARACTERS // _ENTRY_CHARACTERS,
            max_weight=_REMEMBERED_CHARACTERS,
            weight_of=lambda kept: len(kept[0]) + _ENTRY_CHARACTERS,
        )

    def statistics(self) -> PromptStatistics:
        """Return what became of contexts so far, and how much is remembered."""
        with self._lock:
            sent_texts = len(self._sent_contexts)
            return PromptStatistics(
                **self._counts,
                sent_texts=sent_texts,
                sent_characters=self._sent_contexts.weight - sent_texts * _ENTRY_CHARACTERS,
                parts={
                    "sent_characters": self._sent_contexts.weight_size,
                    "fronts": self._fronts.size,
                },
            )

    def plan(self, prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
        """Return the prompts in the order in which to send them, each once."""
        drafts = [PromptDraft(one, self._registry, self._planner.templates) for one in prompts]
        self._claim(drafts)
        waiting, time = [], planning_time(self._planner)
        for draft in drafts:
            request = self._advance(draft)
            while request is not None and draft.pieces[0].stays:
                request = self._advance(draft, self._planner.plan(request, "none", **time))
            if request is not None:
                waiting.append((draft, request))
        plans = plans_together(self._planner, [one for _, one in waiting], self._strategy, **time)
        for (draft, _), plan in zip(waiting, plans, strict=True):
            next_request = self._advance(draft, plan)
            while next_request is not None:
                plan = self._planner.plan(next_request, self._strategy, **time)
                next_request = self._advance(draft, plan)
        profile = self._planner.cache
        planned = [_planned(position, draft, profile) for position, draft in enumerate(drafts)]
        if len(planned) < 2:
            return planned
        return [planned[n] for n in prefix_order(list(map(_shown, drafts, planned)))]

    def may_show_context(self, prompt: ScopedPrompt) -> bool:
        """Return whether a prompt may show a context, planned or not; False only if none does."""
        tenant = prompt.scope.tenant or ""
        return (
            bool(prompt.retrieved or prompt.planned)
            or ISSUED_PLANS.has_any(tenant)
            or self._registry.may_show((part.text for part in prompt.parts), tenant)
        )

    def forget(self, plans: Iterable[Plan]) -> None:
        """Take back plans whose prompts never reached the engine."""
        for plan in plans:
            self._planner.forget(plan)

    def _claim(self, drafts: Sequence[PromptDraft]) -> None:
        """Leave alone what the application did not put there, and what is too much to plan."""
        counts: Counter[str] = Counter()
        by_tenant: dict[str, list[PromptDraft]] = {}
        for draft in drafts:
            by_tenant.setdefault(draft.tenant, []).append(draft)
        for tenant, of_tenant in by_tenant.items():
            sightings = [
                sighting
                for number, draft in enumerate(of_tenant)
                for sighting in draft.sightings(number, self._sent_before)
            ]
            met = [digest for draft in of_tenant for digest in draft.met]
            claimed = iter(self._registry.claim(tenant, sightings, met))
            for draft in of_tenant:
                counts.update(draft.settle(claimed, self._sent_before))
                self._note_planned_before(draft)
                if self._has_new_front(draft):
                    counts["varying_front"] += 1
        label = self._planner.templates.inner_pattern
        for draft in drafts:
            if draft.has_contexts:
                continue
            texts = draft.new_texts()
            if not draft.contexts_found and self._rank_documents(texts, draft.tenant):
                counts["planned_before"] += 1
                continue
            counts["without_context"] += not draft.contexts_found
            if self._registry.is_rendered_elsewhere(texts, draft.tenant):
                counts["in_other_scope"] += 1
                _log_other_scope()
            elif label is not None and any(len(set(label.findall(text))) > 1 for text in texts):
                counts["not_recognised"] += 1
            elif not draft.contexts_found and shows_several(texts, draft.prompt.retrieved):
                counts["joined_otherwise"] += 1
                _log_joined_otherwise()
        if counts["left_alone"]:
            _log_left_alone()
        if counts["kept_in_place"]:
            _log_kept_in_place()
        if not counts:
            return
        if counts["without_context"]:
            self._planner.note_without_context(counts["without_context"])
        with self._lock:
            self._counts += counts
            are_none = not any(self._counts[name] for name in _FOUND)
            silent = are_none and self._counts["without_context"] >= _SILENT_PROMPTS
            varying = self._counts["varying_front"]
            found = self._counts["planned"] + self._counts["planned_before"]
        if varying >= _SILENT_PROMPTS and 2 * varying > found:
            _log_varying_front()
        # a retriever's or postprocessor's contexts may be shown without labels
        if silent and not ISSUED_PLANS.parts["planned_documents"].entries:
            _log_nothing_found()

    def _has_new_front(self, draft: PromptDraft) -> bool:
        """Return whether no earlier prompt of the tenant begins as this one, and there are any."""
        front = draft.front()
        if front is None:
            return False
        with self._lock:
            if self._fronts.get(draft.tenant, front):
                return False
            self._fronts.put(draft.tenant, front, True)
            return len(self._fronts.of(draft.tenant)) > 1

    def _note_planned_before(self, draft: PromptDraft) -> None:
        """Remember how planned texts are cut, and say once if their marks do not fit the cache."""
        with self._lock:
            for key, sent in draft.joined_before:
                self._sent_contexts.put(draft.tenant, key, _remembered(sent))
        if draft.cuts:
            ISSUED_PLANS.note_marks_sent()
        with_marks = sum(one.prefix.most_marks > 0 for one in draft.cuts)
        wanted = draft.planned_before if self._planner.cache.marks else 0
        if with_marks < wanted:
            _log_planned_without_marks()
        elif with_marks > wanted:
            _log_marks_dropped()

    def _rank_documents(self, texts: Iterable[str], tenant: str) -> bool:
        """Return whether texts rank documents, as what plans those of this tenant does."""
        if not ISSUED_PLANS.has_any(tenant):
            return False
        return any(map(self._planner.templates.ranking_pattern.search, texts))

    def _advance(self, draft: PromptDraft, plan: Plan | None = None) -> ContextRequest | None:
        """Go on to the draft's next context that needs a plan; show again what was sent."""
        if plan is not None:
            one = draft.pieces[0]
            assert isinstance(one.piece, FoundContext)
            sent = PlacedContext.of(plan, one.piece)
            if one.stays:
                sent = PlacedContext(one.text)
            remembered = draft.to_remember(sent)
            if remembered is not None:
                with self._lock:
                    kept = _remembered(remembered)
                    self._sent_contexts.put(draft.tenant, draft.sent_key(one.key), kept)
            draft.plans.append(plan)
            draft.groups.append(shard_of(plan))
            draft.uses.append(PrefixUse.of(plan))
            draft.show_context(sent, marks_before=0 in plan.marks)
        while draft.pieces:
            one = draft.pieces[0]
            if isinstance(one.piece, FoundContext):
                return draft.request(one.part, one.piece)
            draft.show_text()
        return None

    def _sent_before(self, tenant: str, key: bytes) -> PlacedContext | None:
        """Return a context as it was sent, if that is known."""
        with self._lock:
            kept = self._sent_contexts.get(tenant, key)
        if kept is None:
            return None
        text, cuts, deepest, group = kept
        return PlacedContext(text, tuple(cut(text, cuts)) if cuts else (), deepest, group)


def _planned(position: int, draft: PromptDraft, profile: CacheRules) -> PlannedPrompt:
    return PlannedPrompt(
        position,
        draft.texts(),
        tuple(draft.plans),
        tenant=draft.tenant,
        parts=draft.parts(profile),
        groups=tuple(draft.groups),
        use=draft.uses[0] if draft.uses else None,
    )


def _shown(draft: PromptDraft, planned: PlannedPrompt) -> str:
    """Return what the engine will see, for comparing prompts; tenants share nothing."""
    texts = zip(draft.prompt.parts, planned.texts, strict=True)
    return "".join([f"{draft.tenant}\n", *(f"{part.role}\n{text}\n" for part, text in texts)])


def _remembered(sent: PlacedContext) -> _Remembered:
    return sent.text, sent.cuts, sent.deepest, sent.group


@cache
def _log_other_scope() -> None:
    """Say once that contexts are rendered for another tenant than that of their prompts."""
    _log.warning(
        "a prompt shows a context that was rendered outside of its tenant's scope; it is sent as "
        "given. Call format_context where the tenant of the model call is known: inside the chain, "
        'or inside "with ctxreuse.request_context(tenant=...)". Further cases are only counted.'
    )


@cache
def _log_planned_without_marks() -> None:
    """Say once that what was planned elsewhere comes without marks."""
    _log.warning(
        "documents in a prompt were planned without marks, and the model's planner is for a cache "
        "that keeps prefixes up to marks; they are sent without. Give the retriever, the "
        "compressor or the memory the planner of the model: planner=model.planner."
    )


@cache
def _log_marks_dropped() -> None:
    """Say once that marks are not sent because the model's planner is for another cache."""
    _log.warning(
        "documents in a prompt were planned for a cache that keeps prefixes up to marks, and the "
        "model's planner is for one without; no marks are sent. Give the model the planner of the "
        "retriever, the compressor or the memory: planner=retriever.planner."
    )


@cache
def _log_nothing_found() -> None:
    """Say once that a wrapper finds nothing to do."""
    _log.warning(
        "none of the first %s prompts shows a context that can be planned, so they are sent as "
        "given. Put the documents into the prompt with format_context, in the same process, and "
        "leave its text as it is; or all that a retriever returned in the same run, in its order, "
        "with line breaks between; or wrap the retriever, or the memory, instead of the model. "
        "prompt_statistics says what becomes of each prompt.",
        _SILENT_PROMPTS,
    )


@cache
def _log_varying_front() -> None:
    """Say once that documents stand behind what no other prompt has."""
    _log.warning(
        "most prompts say something before their documents that no earlier prompt has said there, "
        "so no document behind it can be served from the cache, and planning saves nothing. Put "
        "what differs from prompt to prompt behind the documents: {context} before {question}; no "
        "date, name or id in front. Prompts are counted, as varying_front."
    )


@cache
def _log_joined_otherwise() -> None:
    """Say once that a prompt shows retrieved documents in a way that cannot be planned."""
    _log.warning(
        "a prompt shows documents that a retriever returned in the same run, but not all of them, "
        "once each, whole, in its order and with the same line breaks between each two, or those "
        "of several retrievers; it is sent as given. Join them with format_context. Further cases "
        "are only counted, as joined_otherwise."
    )


@cache
def _log_kept_in_place() -> None:
    """Say once that joined documents stay where they are."""
    _log.warning(
        "documents that the application joined itself are sent as given, because the prompt may "
        "tell them by their places: it speaks of citations, sources or numbers, or shows other "
        "documents beside them. Join them with format_context, which gives them labels. Further "
        "cases are only counted, as kept_in_place."
    )


@cache
def _log_left_alone() -> None:
    """Say once that a rendering is shown at more places than it was rendered for."""
    _log.warning(
        "a prompt shows a rendered context where it is not certain that the application put it "
        "there: one rendering was used in several prompts, or twice in one; it is sent as given. "
        "Call format_context for each prompt anew. Further cases are only counted, as left_alone."
    )


def as_given(prompts: Sequence[ScopedPrompt]) -> list[PlannedPrompt]:
    """Return the prompts as they are, in the order of arrival: what to do where planning failed."""
    return [
        PlannedPrompt(
            position, tuple(part.text for part in prompt.parts), tenant=prompt.scope.tenant or ""
        )
        for position, prompt in enumerate(prompts)
    ]


def planner_or_new(planner: object) -> ReusePlanner:
    """Return the planner that was given, or for None a new one, as the environment says."""
    if planner is None:
        return default_planner()
    wanted = "a ctxreuse.ReusePlanner; pass planner=ReusePlanner(), or leave it out"
    return checked_kind("planner", planner, ReusePlanner, wanted)


def plans_together(
    planner: ReusePlanner,
    requests: Sequence[ContextRequest],
    strategy: Strategy = "reuse",
    **options: Any,
) -> list[Plan]:
    """Return plans in the order given; a tenant's only one as if alone, to show no others."""
    of_tenant = Counter(request.tenant for request in requests)
    in_batch = [n for n, request in enumerate(requests) if of_tenant[request.tenant] > 1]
    plans: dict[int, Plan] = {}
    if in_batch:
        batch = [requests[n] for n in in_batch]
        planned = planner.plan_batch(batch, strategy, **options)
        plans = dict(zip(in_batch, planned.in_input_order(), strict=True))
    return [
        plans[n] if n in plans else planner.plan(request, strategy, **options)
        for n, request in enumerate(requests)
    ]
