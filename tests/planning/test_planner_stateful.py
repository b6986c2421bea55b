"""Plans, evictions, conversations and tenants in random order, against a simple model.

The model of a conversation is what its messages show: block -> label, since the last compaction,
whether or not the planner has been told to forget it.
"""

import pytest
from example_counts import examples
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from planning_helpers import (
    STRATEGIES,
    assert_keeps_the_promises,
    assistant,
    block,
    location_words,
    user,
)

from ctxreuse import ContextRequest, ReusePlanner

pytestmark = pytest.mark.usefixtures("paper_words")

TENANTS = ("", "a", "b")
blocks = st.lists(st.integers(0, 9).map(lambda number: block(number, number)), max_size=5)
strategies = st.sampled_from(STRATEGIES)
tenants = st.sampled_from(TENANTS)
systems = st.sampled_from((None, "Be brief."))


class ModelledConversation:
    def __init__(self, planner, name, tenant, system):
        self.chat = planner.conversation(name, tenant=tenant, system=system)
        self.name, self.tenant, self.system = name, tenant, system
        self.history = []
        self.shown = set()
        self.pending = None

    def messages(self):
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        turn = [] if self.pending is None else [user(self.pending.content)]
        return system + self.history + turn


class PlannerMachine(RuleBasedStateMachine):
    conversations = Bundle("conversations")

    @initialize(capacity=st.sampled_from((None, None, 0, 12, 40)))
    def start(self, capacity):
        self.capacity = capacity
        self.planner = ReusePlanner(capacity_tokens=capacity)
        self.ids = []  # of tenants with ids
        self.evicted = set()
        self.counted = dict.fromkeys(TENANTS, 0)
        self.names = 0

    def take(self, plan):
        assert_keeps_the_promises(plan)
        tenant = plan.request.tenant
        assert plan.request_id == f"request-{self.counted[tenant]}"
        assert 0 <= plan.expected_cached_tokens <= sum(one.tokens for one in plan.blocks)
        self.counted[tenant] += 1
        self.ids.append((tenant, plan.request_id))

    @rule(blocks=blocks, strategy=strategies, tenant=tenants, system=systems)
    def plan(self, blocks, strategy, tenant, system):
        request = ContextRequest(blocks, "Why?", tenant=tenant, system=system)
        self.take(self.planner.plan(request, strategy))

    @rule(contexts=st.lists(st.tuples(blocks, tenants, systems), max_size=6), strategy=strategies)
    def plan_batch(self, contexts, strategy):
        requests = [
            ContextRequest(blocks, "Why?", tenant=tenant, system=system)
            for blocks, tenant, system in contexts
        ]
        batch = self.planner.plan_batch(requests, strategy)
        assert sorted(batch.order) == list(range(len(requests)))
        assert [plan.request for plan in batch.plans] == [requests[i] for i in batch.order]
        for plan in batch.plans:
            self.take(plan)

    @rule(target=conversations, tenant=tenants, system=systems)
    def open_conversation(self, tenant, system):
        self.names += 1
        return ModelledConversation(self.planner, self.names, tenant, system)

    @rule(one=conversations, blocks=blocks)
    def plan_turn(self, one, blocks):
        plan = one.chat.plan(blocks, "And?")
        self.take(plan)
        unique = list(dict.fromkeys(asked.id for asked in blocks))
        if one.history:
            assert list(plan.references) == [i for i in unique if i in one.shown]
            assert [sent.id for sent in plan.blocks] == [i for i in unique if i not in one.shown]
            assert plan.location_annotations == tuple(location_words(i) for i in plan.references)
        one.pending = plan

    @rule(one=conversations)
    def record_answer(self, one):
        if one.pending is None:
            return
        one.shown |= {sent.id for sent in one.pending.blocks}
        one.history += [user(one.pending.content), assistant("Yes.")]
        one.pending = None
        one.chat.record("Yes.")

    @rule(one=conversations)
    def compact(self, one):
        one.chat.compact("We spoke.")
        one.history, one.shown, one.pending = [user("We spoke.")], set(), None

    @rule(one=conversations)
    def end_conversation(self, one):
        self.planner.end_conversation(one.name, one.tenant)
        assert self.planner.end_conversation(one.name, one.tenant) is False
        if one.pending is not None:  # what it would show is forgotten too, so replace it
            one.pending = one.chat.plan([], "And?")
            self.take(one.pending)

    @rule(choices=st.lists(st.integers(0, 60), max_size=4), tenant=tenants)
    def evict(self, choices, tenant):
        chosen = {self.ids[i][1] if i < len(self.ids) else f"ghost {i}" for i in choices}
        before = self.planner.statistics()
        result = self.planner.evict(chosen, tenant)
        after = self.planner.statistics()
        assert result.requests + len(result.unknown) == len(chosen)
        assert result.requests == before.requests - after.requests
        assert result.tokens == before.tokens - after.tokens
        assert {
            name
            for name in chosen
            if (tenant, name) in self.evicted or (tenant, name) not in self.ids
        } <= {*result.unknown}
        assert {*result.unknown} <= chosen
        # an id that is not known yet may be made later
        self.evicted |= {(tenant, name) for name in chosen} & {*self.ids}

    @rule(tokens=st.integers(0, 60))
    def evict_tokens(self, tokens):
        before = self.planner.statistics()
        gone = self.planner.evict_tokens(tokens).tokens
        assert gone == before.tokens - self.planner.statistics().tokens
        assert gone >= min(tokens, before.tokens)
        assert gone < tokens + 10  # at most one whole block more

    @precondition(lambda self: self.capacity is None and len(self.evicted) == 0)
    @rule()
    def evict_all_requests(self):
        for tenant, name in self.ids:
            assert self.planner.evict([name], tenant).unknown in ((), (name,))
        self.evicted |= {*self.ids}

    @rule(one=conversations)
    def read_messages(self, one):
        assert one.chat.messages() == one.messages()

    @invariant()
    def the_index_stays_within_its_bounds(self):
        size = self.planner.statistics()
        assert 0 <= size.requests <= len(self.ids) - len(self.evicted)
        if self.capacity is not None:
            assert size.tokens <= self.capacity * len(TENANTS)
        assert size.nodes <= size.tokens  # every node holds a block, which weighs 1 or more

    def teardown(self):
        before = self.planner.statistics().tokens
        assert self.planner.evict_tokens(10**9).tokens == before
        size = self.planner.statistics()
        assert (size.nodes, size.tokens) == (0, 0)
        # what is left are requests without blocks
        for tenant, name in self.ids:
            self.planner.evict([name], tenant)
        assert self.planner.statistics().requests == 0


TestPlannerAgainstTheModel = PlannerMachine.TestCase
TestPlannerAgainstTheModel.settings = examples(200, stateful_step_count=40)
