"""Shadow mode: what planning would save, while everything is sent as it was retrieved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.context.lru_map import PartSize
from ctxreuse.context.rendering import word_tokens
from ctxreuse.memory.prefix_index import Evicted, IndexStatistics
from ctxreuse.planning.plan import BatchPlan, Plan
from ctxreuse.planning.savings_meter import SavingsMeter
from ctxreuse.planning.tenant_planner import PlannerSettings, PlanOptions, TenantPlanner
from ctxreuse.policy.as_retrieved import AS_RETRIEVED
from ctxreuse.policy.view import Policy
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.rules.cache_rules import DEFAULT_CACHE


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
        options: PlanOptions,
        *,
        is_preview: bool = False,
    ) -> Plan:
        """Return a plan that sends the request as retrieved, without primes."""
        if is_preview:
            as_given = PlanOptions(deduplicate=False)
            return _unmarked(super().plan(request, AS_RETRIEVED, as_given, is_preview=True))
        return self._send_all([request], policy, options)[0]

    def plan_batch(
        self, requests: Sequence[ContextRequest], policy: Policy, options: PlanOptions
    ) -> BatchPlan:
        """Return plans that send the requests as retrieved, in the order given, without primes."""
        for request in requests:  # counts all tokens, before anything is recorded
            self.block_tokens(request.blocks, request.tenant, request.system)
        plans = self._send_all(requests, policy, options)
        return BatchPlan(tuple(plans), tuple(range(len(plans))))

    def evict(
        self, request_ids: Sequence[str | int], tenant: str | None = None, blocks: int | None = None
    ) -> Evicted:
        """Forget requests, or their ends, in both."""
        self._planned.evict(request_ids, tenant, blocks)
        return super().evict(request_ids, tenant, blocks)

    def evict_tokens(self, tokens: int) -> Evicted:
        """Forget tokens; as planned, an engine would hold no more than it does now."""
        evicted = super().evict_tokens(tokens)
        excess = self._planned.statistics().tokens - self.statistics().tokens
        self._planned.evict_tokens(excess)
        return evicted

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

    def _send_all(
        self, requests: Sequence[ContextRequest], policy: Policy, options: PlanOptions
    ) -> list[Plan]:
        """Send requests as retrieved, plan them as they would have been planned; count both."""
        sent = [self._send(one, options) for one in requests]
        as_planned = PlanOptions(now=options.now, marks=options.marks)
        first_turns = [one for one in sent if not one.request.history]
        # evictions name the id that a request was sent under
        same = [replace(one.request, request_id=one.request_id) for one in first_turns]
        if len(requests) == 1:
            planned = [self._planned.plan(one, policy, as_planned) for one in same]
        else:
            planned = [*self._planned.plan_batch(same, policy, as_planned).in_input_order()]
        for one, plan in zip(first_turns, planned, strict=True):
            if options.marks is None:  # provisional plans count nowhere
                self._compare(one, plan)
        return [_unmarked(one) for one in sent]

    def _send(self, request: ContextRequest, options: PlanOptions) -> Plan:
        """Send a request as retrieved; count a later turn, of which blocks may be left out."""
        as_given = replace(request, outdated=()) if request.outdated else request
        deduplicate, whole = options.deduplicate, PlanOptions(deduplicate=False, now=options.now)
        if not request.history:
            return super().plan(as_given, AS_RETRIEVED, whole)
        counted, templates = self._counted(request, deduplicate), self._settings.templates
        # also what stands there without a label: planned, it would have had one
        unlabelled = counted._replace(root=(counted.root[0], False))
        turn = self._open_turn(unlabelled, deduplicate)
        shown = [weight for key, weight in turn.weights.items() if key in turn.shown]
        plan = super().plan(as_given, AS_RETRIEVED, whole)
        tokens, left_out = sum(plan.turn.weights.values()), sum(shown)
        cached = min(plan.expected_cached_tokens, tokens - left_out)
        label = templates.label_of(ContextBlock(text=""))
        words = templates.label_tokens * (len(counted.blocks) - len(shown))
        words += sum(map(word_tokens, templates.location_annotations([label] * len(shown))))
        words *= counted.root[1]  # without labels, blocks are left out without a word
        self._meter.compared(
            request.tenant, None, left_out > 0, tokens, plan.expected_cached_tokens, cached,
            left_out, len(shown), words,
        )  # fmt: skip
        return plan

    def _compare(self, sent: Plan, planned: Plan) -> None:
        assert planned.logged is not None, "it was planned just now"
        tokens, cached = sum(sent.turn.weights.values()), planned.expected_cached_tokens
        words = self._meter.added_words(planned.logged.prompt, cached)
        before, after = [
            one.expected_bill or (BilledTokens(tokens - read, read) if one.cache.lives else None)
            for one in (sent, planned)
            for read in [one.expected_cached_tokens]
        ]
        bills = None if before is None or after is None else (before, after + BilledTokens(words))
        self._meter.compared(
            sent.request.tenant, bills, planned.blocks != sent.blocks, tokens,
            sent.expected_cached_tokens, cached, 0, 0, words,
        )  # fmt: skip


def _unmarked(plan: Plan) -> Plan:
    """Return a plan that is sent as if nobody had planned it: without marks and keys."""
    expected = 0 if plan.cache.marks else plan.expected_cached_tokens
    return replace(
        plan, marks=(), cache=DEFAULT_CACHE, expected_cached_tokens=expected, read_blocks=None
    )
