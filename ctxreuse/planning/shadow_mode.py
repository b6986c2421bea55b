"""Shadow mode: what planning would save, while everything is sent as it was retrieved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.rendering import word_tokens
from ctxreuse.memory.prefix_index import Evicted, IndexStatistics
from ctxreuse.memory.sent_log import SentWords
from ctxreuse.planning.plan import BatchPlan, Plan
from ctxreuse.planning.savings_meter import SavingsMeter
from ctxreuse.planning.tenant_planner import PlannerSettings, TenantPlanner
from ctxreuse.policy.as_retrieved import AS_RETRIEVED
from ctxreuse.policy.view import Policy
from ctxreuse.rules.answers import charged
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import DEFAULT_CACHE


class _Arrived(NamedTuple):
    """A request as it was sent, with the tokens of its blocks, and of each one shown already."""

    sent: Plan
    tokens: int
    shown: Sequence[int]
    cached_tokens: int  # in the retriever's order, with marks; so is the bill
    bill: BilledTokens | None
    words: int  # tokens that planning would have added to a later turn


class ShadowPlanner(TenantPlanner):
    """Sends as retrieved, and has another planner plan the same requests; counts both."""

    def __init__(self, settings: PlannerSettings, meter: SavingsMeter) -> None:
        super().__init__(settings)
        self._planned = TenantPlanner(settings)
        self._meter = meter

    def plan(
        self,
        request: ContextRequest,
        policy: Policy,
        deduplicate: bool | None = None,
        now: float | None = None,
        marks: tuple[int, ...] | None = None,
        *,
        primes: bool = False,
    ) -> Plan:
        """Return a plan that sends the request as retrieved, without primes."""
        arrived = self._send(request, deduplicate, now)
        self._note([arrived], policy, now)
        return arrived.sent

    def preview(
        self,
        request: ContextRequest,
        policy: Policy,
        deduplicate: bool | None = None,
        now: float | None = None,
    ) -> Plan:
        """Return what `plan` would return; only what is sent counts."""
        return _unmarked(super().preview(request, AS_RETRIEVED, deduplicate=False))

    def plan_batch(
        self,
        requests: Sequence[ContextRequest],
        policy: Policy,
        deduplicate: bool | None = None,
        now: float | None = None,
        given_marks: tuple[int, ...] | None = None,
        *,
        primes: bool = False,
    ) -> BatchPlan:
        """Return plans that send the requests as retrieved, in the order given, without primes."""
        for request in requests:  # counts all tokens, before anything is recorded
            self.block_tokens(request.blocks, request.tenant, request.system)
        arrived = [self._send(request, deduplicate, now) for request in requests]
        self._note(arrived, policy, now)
        return BatchPlan(tuple(one.sent for one in arrived), tuple(range(len(arrived))))

    def evict(
        self,
        request_ids: Sequence[str | int],
        tenant: str | None = None,
        blocks: int | None = None,
    ) -> Evicted:
        """Forget requests, or their ends, in both."""
        self._planned.evict(request_ids, tenant, blocks)
        return super().evict(request_ids, tenant, blocks)

    def evict_tokens(self, tokens: int) -> Evicted:
        """Forget tokens in both."""
        self._planned.evict_tokens(tokens)
        return super().evict_tokens(tokens)

    def note_length(self, plan: Plan, prompt_tokens: int) -> None:
        """Learn how long a prompt is in the engine's tokens, in both."""
        self._planned.note_length(plan, prompt_tokens)
        super().note_length(plan, prompt_tokens)

    def cached_tokens(self, request: ContextRequest, *, in_order: bool = False) -> int:
        """Return the block tokens expected in the cache, in the order in which they are sent."""
        return super().cached_tokens(request, in_order=True)

    def shown_blocks(self, request: ContextRequest) -> dict[str, ContextBlock]:
        """Return nothing: no turn says anything of the turns before it."""
        return {}

    def words_of(self, tenant: str) -> SentWords:
        """Return what a tenant's prompts say around contexts."""
        return self._planned.words_of(tenant)

    def edit_of(self, tenant: str, message: bytes) -> bytes | None:
        """Return None: all is sent as given."""

    def note_edit(self, tenant: str, messages: Iterable[bytes], edit: bytes) -> None:
        """Note nothing: all is sent as given."""

    def end_conversation(self, conversation_id: str | int, tenant: str) -> bool:
        """Forget what a conversation was shown; return whether it was known."""
        self._planned.end_conversation(conversation_id, tenant)
        return super().end_conversation(conversation_id, tenant)

    def statistics(self) -> IndexStatistics:
        """Return the size of the index of what was sent, and of all that both remember."""
        sent, planned = super().statistics(), self._planned.statistics()
        parts = {
            name: PartSize(*map(sum, zip(size, planned.parts[name], strict=True)))
            for name, size in sent.parts.items()
        }
        limits = {
            name: number + planned.limits_reached[name]
            for name, number in sent.limits_reached.items()
        }
        return replace(sent, parts=parts, limits_reached=limits)

    def _send(
        self, request: ContextRequest, deduplicate: bool | None, now: float | None
    ) -> _Arrived:
        shown = self.shown_tokens(request, deduplicate) if request.history else ()
        tokens = self.block_tokens(request.blocks, request.tenant, request.system)
        if request.outdated:
            request = replace(request, outdated=())
        plan = super().plan(request, AS_RETRIEVED, deduplicate=False, now=now)
        cached = plan.expected_cached_tokens
        bill = plan.expected_bill or charged(self._settings.cache, tokens - cached, cached)
        words = self._added_words(request, shown, deduplicate) if request.history else 0
        return _Arrived(_unmarked(plan), tokens, shown, cached, bill, words)

    def _added_words(
        self, request: ContextRequest, shown: Sequence[int], deduplicate: bool | None
    ) -> int:
        """Return about how many tokens planning would have added to a later turn."""
        templates = self._settings.templates
        label = templates.label_of(ContextBlock(text=""))
        words = sum(map(word_tokens, templates.location_annotations([label] * len(shown))))
        if not self._planned.shows_labels(request, deduplicate):
            return words
        return words + templates.label_tokens * (len(request.unique_blocks) - len(shown))

    def _note(self, arrived: Sequence[_Arrived], policy: Policy, now: float | None) -> None:
        """Plan what was sent as it would have been planned, and count both."""
        later_turns = [one for one in arrived if one.sent.request.history]
        for one in later_turns:  # nothing changes but that blocks are left out
            cached = min(one.cached_tokens, one.tokens - sum(one.shown))
            self._add(one, cached, one.words, is_changed=sum(one.shown) > 0)
        first_turns = [one for one in arrived if not one.sent.request.history]
        # evictions name the id that a request was sent under
        requests = [
            replace(one.sent.request, request_id=one.sent.request_id) for one in first_turns
        ]
        if len(arrived) == 1:
            plans = [self._planned.plan(request, policy, now=now) for request in requests]
        else:
            batch = self._planned.plan_batch(requests, policy, now=now)
            plans = list(batch.in_input_order())
        for one, plan in zip(first_turns, plans, strict=True):
            is_changed = plan.blocks != one.sent.blocks
            cached = plan.expected_cached_tokens
            assert plan.logged is not None, "it was planned just now"
            words = self._meter.added_words(plan.logged.prompt, cached)
            computed = one.tokens - cached
            bill = plan.expected_bill or charged(self._settings.cache, computed, cached)
            if bill is not None:
                bill += BilledTokens(words)
            self._add(one, cached, words, bill, is_changed=is_changed)

    def _add(
        self,
        one: _Arrived,
        cached: int,
        words: int,
        bill: BilledTokens | None = None,
        *,
        is_changed: bool,
    ) -> None:
        bills = None if bill is None or one.bill is None else (one.bill, bill)
        self._meter.compared(
            one.sent.request.tenant, bills, is_changed, one.tokens, one.cached_tokens, cached,
            sum(one.shown), len(one.shown), words,
        )  # fmt: skip


def _unmarked(plan: Plan) -> Plan:
    """Return a plan that is sent as if nobody had planned it: without marks and keys."""
    expected = 0 if plan.cache.marks else plan.expected_cached_tokens
    return replace(
        plan, marks=(), cache=DEFAULT_CACHE, expected_cached_tokens=expected, read_blocks=None
    )
