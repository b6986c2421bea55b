"""The invariants of CONTRIBUTING.md, over generated requests and over generated calls."""

import copy
import textwrap
from itertools import combinations

import pytest
from example_counts import examples
from hypothesis import given
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
    identity,
    location_words,
    odd_contexts,
    plain_blocks,
    plain_contexts,
    plan_everything,
    queries,
    requests_of_any_kind,
    texts_of,
    user,
    without_id,
)
from python_processes import python

from ctxreuse import ContextRequest, ReusePlanner, Templates
from ctxreuse.cache import BlockLevelCache
from ctxreuse.context.rendering import Reference, SentBlock

pytestmark = pytest.mark.usefixtures("paper_words")

strategies = st.sampled_from(STRATEGIES)
capacities = st.sampled_from((None, None, 0, 30, 120))
lively = examples(150)


@lively
@given(requests_of_any_kind, strategies, st.booleans(), capacities)
def test_every_plan_shows_exactly_its_requests_blocks(requests, strategy, batch, capacity):
    planner = ReusePlanner(capacity_tokens=capacity)
    plans = plan_everything(planner, requests, strategy, batch=batch)
    assert [plan.request for plan in plans] == requests
    for plan in plans:
        assert_keeps_the_promises(plan)


@lively
@given(requests_of_any_kind, requests_of_any_kind, strategies)
def test_a_batch_on_top_of_earlier_requests_is_a_permutation(earlier, requests, strategy):
    planner = ReusePlanner()
    plan_everything(planner, earlier, "reuse", batch=False)
    batch = planner.plan_batch(requests, strategy)
    assert sorted(batch.order) == list(range(len(requests)))
    assert [plan.request for plan in batch.plans] == [requests[i] for i in batch.order]
    for plan in batch.plans:
        assert_keeps_the_promises(plan)


@lively
@given(requests_of_any_kind, requests_of_any_kind, strategies, capacities)
def test_two_planners_make_the_same_plans(online, batch, strategy, capacity):
    one, two = (
        (
            [planner.plan(request, strategy) for request in online],
            planner.plan_batch(batch, strategy),
            planner.statistics(),
        )
        for planner in (ReusePlanner(capacity_tokens=capacity) for _ in range(2))
    )
    assert one == two


@lively
@given(requests_of_any_kind, strategies, st.booleans())
def test_inputs_are_never_changed(requests, strategy, batch):
    before = copy.deepcopy(requests)
    for plan in plan_everything(ReusePlanner(), requests, strategy, batch=batch):
        plan.messages()
    assert requests == before


def test_nothing_is_printed_or_warned_about(capfd, caplog):
    for strategy in STRATEGIES:
        planner = ReusePlanner(capacity_tokens=50)
        planner.plan_batch([ContextRequest(["a" * n, "b"]) for n in range(60)], strategy)
        chat = planner.conversation("c")
        chat.plan(["a", "b"], "Why?")
        chat.record("Yes.")
        chat.plan(["a"], "Why?")
        planner.evict(["ghost"])
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


@lively
@given(
    st.lists(st.builds(ContextRequest, odd_contexts | plain_contexts, queries), max_size=8),
    strategies,
    st.booleans(),
)
def test_prompts_have_the_same_bytes_as_far_as_their_blocks_are_the_same(requests, strategy, batch):
    plans = plan_everything(ReusePlanner(), requests, strategy, batch=batch)
    for one, two in combinations(plans, 2):
        shared = ""
        for left, right in zip(one.blocks, two.blocks, strict=False):
            if identity(left) != identity(right):
                break
            shared += ("\n\n" if shared else "") + f"{one.templates.label_of(left)} {left.text}"
        assert one.content.startswith(shared)
        assert two.content.startswith(shared)


turns_of_a_conversation = st.lists(
    st.tuples(
        odd_contexts | plain_contexts,
        st.sampled_from(("keep", "keep", "keep", "drop the first", "edit", "in parts", "forget")),
        st.booleans(),
    ),
    max_size=6,
)


@examples(300)
@given(turns_of_a_conversation, strategies)
def test_references_stand_in_the_messages_whatever_happens_to_the_history(turns, strategy):
    planner = ReusePlanner()
    history = []
    for blocks, fate, replace in turns:
        if replace:  # a turn that is planned, never answered, and planned anew
            planner.plan(
                ContextRequest(blocks[::-1], history=history, conversation_id="c"), strategy
            )
        plan = planner.plan(
            ContextRequest(blocks, "Why?", history=history, conversation_id="c"), strategy
        )
        assert_keeps_the_promises(plan)
        history = [*plan.messages(), assistant("[Doc_1] says so.")]
        if fate == "drop the first":
            history = history[1:]
        elif fate == "edit":
            history[0] = user(texts_of(history)[0][1:])
        elif fate == "in parts":
            history = [user([{"type": "text", "text": text}]) for text in texts_of(history)]
        elif fate == "forget":
            planner.end_conversation("c")


@examples(200)
@given(
    st.sampled_from(
        [
            Templates(separator=" | "),
            Templates(label="{letters}", block="{label}{text}", separator=""),
            Templates(label="({letters})", block="Source {label}\n{text}\n---", separator="\n"),
            Templates(label="[{id}]"),
            Templates(label="#{id}", block="{label}: {text}", separator="\n"),
            Templates(label="<{letters}>", block="<{label}>{text}</>", location="See {label}."),
            Templates(order="{order}", order_separator="\n", order_position="after_question"),
        ]
    ),
    st.lists(odd_contexts, max_size=5),
)
def test_references_stand_in_the_messages_under_any_templates(templates, contexts):
    chat, known = ReusePlanner(templates=templates).conversation("c"), set()
    for blocks in contexts:
        before = texts_of(one for one in chat.messages() if one["role"] == "user")
        plan = chat.plan(blocks, "1")
        known |= {(templates.label_of(one), one.id) for one in plan.request.blocks}
        assert set(plan.labels.items()) <= known
        sent = [part for part in plan.parts if isinstance(part, SentBlock)]
        assert all(part.label == templates.label_of(part.block) for part in sent)
        references = [part for part in plan.parts if isinstance(part, Reference)]
        unique = {identity(one): one for one in reversed(plan.request.blocks)}
        left_out = [unique[one] for one in unique.keys() - {identity(part.block) for part in sent}]
        assert len(left_out) == len(references)
        for part in references:
            [text] = {one.text for one in left_out if templates.label_of(one) == part.label}
            rendered = templates.before_text(part.label) + text + templates.after_text
            begun = [
                one[found.start() :].startswith(rendered)
                for one in before
                for found in templates.label_pattern.finditer(one)
                if found[1] == part.label
            ]
            assert begun
            assert all(begun)
            named = [one for one in sent if part.label in one.block.text or part.label == one.label]
            assert all(one.block.text == text for one in named)
        chat.record("2")


@lively
@given(st.lists(plain_contexts, max_size=8), plain_contexts, plain_contexts)
def test_a_retried_turn_has_the_same_bytes(earlier, first_blocks, second_blocks):
    planner = ReusePlanner()
    for blocks in earlier:
        planner.plan(ContextRequest(blocks))
    chat = planner.conversation("c")
    first = chat.plan(first_blocks, "First?").messages()
    assert chat.plan(first_blocks, "First?").messages() == first
    chat.record("Yes.")
    second = chat.plan(second_blocks, "Second?").messages()
    assert chat.plan(second_blocks, "Second?").messages() == second
    assert second[: len(first)] == first


@lively
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.builds(
                    ContextRequest,
                    odd_contexts | plain_contexts,
                    system=st.sampled_from((None, "", "S")),
                    history=st.sampled_from((None, ())),
                    tenant=st.sampled_from(("", "t")),
                ),
                max_size=5,
            ),
            st.booleans(),
        ),
        max_size=4,
    ),
    strategies,
)
def test_expected_cached_tokens_are_what_an_unlimited_cache_serves(waves, strategy):
    planner, cache = ReusePlanner(token_counter=len), BlockLevelCache()
    for requests, as_batch in waves:
        if as_batch:
            plans = planner.plan_batch(requests, strategy).plans
        else:
            plans = [planner.plan(request, strategy) for request in requests]
        for plan in plans:
            served = cache.serve(
                [one.key for one in plan.blocks],
                [len(one.text) if one.tokens is None else one.tokens for one in plan.blocks],
                (plan.request.tenant, plan.request.system),
            )
            assert plan.expected_cached_tokens == served.cached_tokens


events = st.lists(
    st.tuples(
        st.sampled_from(("a", "b", "b", "c")),
        st.sampled_from(("plan", "plan", "batch", "turn", "evict", "end")),
        st.lists(plain_blocks, max_size=5),
    ),
    max_size=14,
)


@examples(200)
@given(events, strategies, st.sampled_from((None, None, 90, 300)))
def test_a_tenants_plans_are_the_same_with_and_without_the_others(events, strategy, capacity):
    def plans_of(tenant, events):
        planner = ReusePlanner(capacity_tokens=capacity)
        chats = {}
        mine, most_tokens = [], 0
        for number, (who, what, blocks) in events:
            plans = []
            chat = chats.setdefault(who, planner.conversation("c", tenant=who))
            request = ContextRequest(
                blocks, "Why?", conversation_id="c", tenant=who, request_id=number
            )
            if what == "plan":
                plans = [planner.plan(request, strategy)]
            elif what == "batch":
                plans = planner.plan_batch([request, ContextRequest(blocks[1:], tenant=who)]).plans
            elif what == "turn":
                plans = [chat.plan(blocks, "Why?")]
                chat.record("Yes.")
            elif what == "evict":
                planner.evict([number - 2])
            else:
                planner.end_conversation("c", tenant=who)
            if who == tenant:
                mine += [(without_id(plan), plan.messages()) for plan in plans]
                most_tokens = max(most_tokens, planner.statistics().tokens)
        return mine, most_tokens

    numbered = list(enumerate(events))
    for tenant in "ab":
        alone = [entry for entry in numbered if entry[1][0] == tenant or entry[1][1] == "evict"]
        plans, most_tokens = plans_of(tenant, alone)
        if capacity is None or most_tokens <= capacity // 3:  # an equal share
            assert plans_of(tenant, numbered)[0] == plans


DETERMINISM = """
    import hashlib, random
    from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
    random.seed(7)
    texts = [f"text of {i} " * random.randint(1, 30) for i in range(40)]
    blocks = [ContextBlock(id=i if i % 3 else f"id {i}", text=t) for i, t in enumerate(texts)]
    def block():
        return blocks[min(int(random.expovariate(0.1)), 39)]
    def some(n):
        return [
            ContextRequest(
                [block() for _ in range(random.randint(0, 8))],
                "Why?",
                system=random.choice((None, "S")),
                tenant=random.choice(("", "a", "b")),
                history=random.choice((None, (), ({"role": "user", "content": "Hello."},))),
                conversation_id=random.choice((None, 1, "1", "c")),
            )
            for _ in range(n)
        ]
    seen = hashlib.sha256()
    for strategy in ("reuse", "paper", "none"):
        planner = ReusePlanner(capacity_tokens=2000)
        for round in range(4):
            batch = planner.plan_batch(some(40), strategy)
            plans = [planner.plan(request, strategy) for request in some(40)]
            evicted = [planner.evict(["request-3", "request-7"]), planner.evict_tokens(100)]
            seen.update(repr((batch, plans, evicted, planner.statistics())).encode())
            seen.update(repr([plan.messages() for plan in (*batch.plans, *plans)]).encode())
    print(seen.hexdigest())
"""


@pytest.mark.slow
def test_plans_do_not_depend_on_the_process_or_its_hash_seed():
    digests = {
        python(textwrap.dedent(DETERMINISM), PYTHONHASHSEED=seed, PYTHONWARNINGS="error").stdout
        for seed in ("0", "1", "4242", "random")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


TENANTS = ("", "a", "b")
blocks = st.lists(st.integers(0, 9).map(lambda number: block(number, number)), max_size=5)
tenants = st.sampled_from(TENANTS)
systems = st.sampled_from((None, "Be brief."))


class ModelledConversation:
    """What its messages show: block -> label, since the last compaction, forgotten or not."""

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
