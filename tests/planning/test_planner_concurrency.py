"""One planner, many threads and tasks: every plan is valid, nothing is lost or counted twice."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from planning_helpers import STRATEGIES, assert_keeps_the_promises, big_request, sent_ids, texts_of

from ctxreuse import ReusePlanner
from ctxreuse.errors import ConversationError

pytestmark = pytest.mark.usefixtures("paper_words")

THREADS = 8
ROUNDS = 60


@pytest.fixture(autouse=True)
def threads_change_all_the_time():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def context(thread, number):
    return [(thread + number) % 7, number % 5, 20 + thread, (number * number) % 11]


def in_threads(work):
    start = Barrier(THREADS)

    def begin(thread):
        start.wait()
        return work(thread)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def evict_everything(planner, plans):
    planner.evict(plan.request_id for plan in plans)
    statistics = planner.statistics()
    assert (statistics.nodes, statistics.tokens, statistics.requests) == (0, 0, 0)


def test_eight_threads_plan_batches_conversations_and_evictions_together():
    planner = ReusePlanner(capacity_tokens=3_000)

    def batches(thread):
        plans = []
        for number in range(ROUNDS // 4):
            contexts = [context(thread, number + i) for i in range(8)]
            batch = planner.plan_batch(
                [big_request(ids, "Why?") for ids in contexts], STRATEGIES[number % len(STRATEGIES)]
            )
            assert sorted(batch.order) == list(range(8))
            assert [sorted(sent_ids(plan)) for plan in batch.in_input_order()] == [
                sorted(set(ids)) for ids in contexts
            ]
            plans += batch.plans
        return plans

    def conversation(thread):
        chat = planner.conversation(thread, system="Be brief.")
        plans = []
        for number in range(ROUNDS):
            plans.append(chat.plan(big_request(context(thread, number)).blocks, "Why?"))
            chat.record("Yes.")
        # seven blocks turn up in the end; each was sent once
        sent = [block_id for plan in plans for block_id in sent_ids(plan)]
        assert len(sent) == len(set(sent))
        return plans

    def evictions(thread):
        plans = []
        for number in range(ROUNDS):
            asked = big_request(context(thread, number))
            plans.append(planner.plan(asked, STRATEGIES[number % len(STRATEGIES)]))
            assert planner.evict([plan.request_id for plan in plans[-3:-2]]).requests in (0, 1)
            assert planner.evict_tokens(100).tokens in (0, 100)
            assert planner.statistics().tokens <= 3_000
        return plans

    kinds = [batches, conversation, evictions]
    plans = [
        plan for plans in in_threads(lambda thread: kinds[thread % 3](thread)) for plan in plans
    ]
    for plan in plans:
        assert_keeps_the_promises(plan)
    assert len({plan.request_id for plan in plans}) == len(plans)
    planner.evict_tokens(10**9)  # what is left are turns that consist of references
    evict_everything(planner, plans)


def test_threads_of_other_tenants_do_not_change_a_tenants_plans():
    def plans_of(planner, tenant):
        return [
            planner.plan(big_request(context(0, number), tenant=tenant, request_id=number))
            for number in range(ROUNDS)
        ]

    alone = plans_of(ReusePlanner(capacity_tokens=100_000), "me")
    shared = ReusePlanner(capacity_tokens=100_000)
    results = in_threads(lambda thread: plans_of(shared, "me" if thread == 0 else f"{thread}"))
    assert results[0] == alone


def test_threads_that_plan_and_record_in_one_conversation_keep_it_whole():
    chat = ReusePlanner().conversation("c")

    def work(thread):
        recorded = 0
        for number in range(40):
            chat.plan(big_request((thread, number % 9)).blocks, "Why?")
            try:
                chat.record("Yes.")
            except ConversationError:
                continue  # another thread has recorded this turn
            recorded += 1
        return recorded

    turns = sum(in_threads(work))
    messages = chat.messages()
    assert [message["role"] for message in messages] == ["user", "assistant"] * turns
    shown = re.findall(
        r"^\[Doc_(\d+)\] text of (\d+)$", "\n".join(texts_of(messages)), re.MULTILINE
    )
    assert all(label == block_id for label, block_id in shown)
    assert len(set(shown)) == len(shown) == 9
