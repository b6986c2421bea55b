from array import array

from steps import steps

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache.kv_events import engine_blocks
from ctxreuse.cache.kv_events.engine_blocks import (
    EngineBlocks,
    HeldRequests,
    RecordedRequests,
    SentRequest,
)
from ctxreuse.cache.kv_events.event_stream import BlocksRemoved, BlocksStored
from ctxreuse.memory.prefix_index import IndexStatistics

NOTHING = IndexStatistics()


class Followed:
    """A planner whose prompts are blocks of four tokens, the engine's blocks of two."""

    def __init__(self, max_requests=10):
        self.planner = ReusePlanner()
        self.blocks = EngineBlocks()
        self.recorded = RecordedRequests(self.planner, max_requests)
        self.requests = HeldRequests(self.recorded, self.blocks, settle_s=1.0)

    def plan(self, *ids, **fields):
        blocks = [ContextBlock(id=number, text=f"{number}", tokens=4) for number in ids]
        return self.planner.plan(ContextRequest(blocks, "?", **fields), "none")

    def answer(self, plan, *, told=True, ends=None):
        tokens = [10 * block.id + offset for block in plan.blocks for offset in range(4)]
        if told:
            self.store(tokens)
        ends = ends or [4 * (number + 1) for number in range(len(plan.blocks))]
        self.recorded.add(
            SentRequest(
                plan.request_id, plan.request.tenant, array("q", tokens), ends, None, None, 0.0
            )
        )

    def store(self, tokens):
        hashes = [str(tokens[:end]).encode() for end in range(2, len(tokens) + 1, 2)]
        self.requests.apply(BlocksStored(tuple(hashes), None, tuple(tokens), 2))

    def remove(self, *tokens):
        self.requests.apply(BlocksRemoved((str(list(tokens)).encode(),)))

    def lose(self, *tokens):
        self.remove(*tokens)
        self.requests.settle(0.0)


def test_what_was_sent_again_since_then_is_not_trimmed_for_an_old_loss():
    followed = Followed()
    followed.answer(followed.plan(1, 2, 3))
    followed.requests.settle(0.0)
    followed.lose(10, 11, 12, 13, 20, 21, 22, 23)
    assert followed.planner.statistics().tokens == 4
    followed.plan(1, 2, 4)  # is being computed: its events have not come
    followed.lose(10, 11, 12, 13, 20, 21)
    assert followed.planner.statistics().tokens == 12


def test_a_block_within_one_of_the_engines_is_not_held_while_that_is_not():
    followed = Followed()
    followed.answer(followed.plan(1), told=False, ends=[1])
    followed.store([70, 71])  # the size of the engine's blocks is known
    followed.requests.settle(1.0)
    assert followed.planner.statistics() == NOTHING


def test_the_engines_last_block_in_a_block_holds_what_follows_and_is_not_asked_for():
    followed = Followed()
    followed.answer(followed.plan(1, 2), ends=[3, 7])
    followed.requests.settle(0.0)
    followed.lose(10, 11, 12, 13, 20, 21, 22, 23)  # tokens 6 and 7: one is not of the block
    assert followed.planner.statistics().tokens == 8
    followed.lose(10, 11, 12, 13, 20, 21)
    assert followed.planner.statistics().tokens == 4


def test_a_turn_takes_the_same_work_however_long_the_prompts_are_that_wait_to_be_judged():
    def turn(blocks):
        followed = Followed(max_requests=100)
        for _ in range(50):
            followed.answer(followed.plan(*range(blocks)), told=False)
        followed.store([number // 4 * 10 + number % 4 for number in range(4 * blocks - 2)])
        followed.requests.settle(0.0)
        followed.store([1_000, 1_001])
        return lambda: followed.requests.settle(0.0)

    assert steps(turn(100)) == steps(turn(2))


def test_what_is_lost_within_a_block_takes_the_same_work_however_many_follow_the_prompt():
    def loss(requests):
        followed = Followed(max_requests=1_000)
        for _ in range(requests):
            followed.answer(followed.plan(1, 2), ends=[2, 4])
        followed.requests.settle(0.0)
        assert followed.requests.followed == requests

        def lose():
            followed.remove(10, 11, 12, 13, 20, 21, 22, 23)
            followed.lose(10, 11, 12, 13, 20, 21)

        return lose

    assert steps(loss(500)) == steps(loss(5))


def test_a_tenants_many_or_long_requests_take_no_other_tenants_out_of_the_index(monkeypatch):
    monkeypatch.setattr(engine_blocks, "_MOST_TOKENS", 100)
    followed = Followed(max_requests=6)
    followed.answer(followed.plan(1, 2, tenant="quiet"), told=False)
    quiet = ContextRequest(
        [ContextBlock(id=number, text=f"{number}", tokens=4) for number in (1, 2)], tenant="quiet"
    )
    for number in range(40):
        ids = range(10 * number, 10 * number + number % 9)
        followed.answer(followed.plan(*ids, tenant="loud"), told=False)
        assert len(followed.recorded) <= 6
        waiting = followed.recorded.waiting().values()
        tokens = sum(len(one.token_ids) for one in waiting)
        assert followed.recorded.parts["unjudged_tokens"].entries == tokens <= 100
    assert followed.planner.cached_tokens(quiet) == 8
    followed.store([10, 11, 12, 13, 20, 21, 22, 23])
    followed.requests.settle(0.0)
    for number in range(100, 140):
        followed.answer(followed.plan(number, tenant="loud"))
        followed.requests.settle(0.0)
        assert followed.requests.followed <= 6
    assert followed.planner.cached_tokens(quiet) == 8
    assert followed.planner.statistics().requests <= 6 + len(followed.recorded)


def test_the_oldest_of_too_many_requests_leave_the_index_judged_or_not():
    followed = Followed(max_requests=2)
    plans = [followed.plan(number) for number in range(1, 6)]
    for plan in plans[:3]:
        followed.answer(plan)
        followed.requests.settle(0.0)
    for plan in plans[3:]:
        followed.answer(plan, told=False)
    followed.answer(followed.plan(6), told=False)
    known = followed.planner.evict([plan.request_id for plan in plans])
    assert known.unknown == (plans[0].request_id, plans[3].request_id)
    followed.remove(10, 11)  # nobody follows it any more
    assert followed.blocks.take_lowered() == {}


def test_a_request_that_is_recorded_again_is_judged_again():
    followed = Followed()
    plan = followed.plan(1, 2)
    followed.answer(plan)
    followed.requests.settle(0.0)
    followed.answer(plan)
    assert len(followed.recorded) == 1
    followed.requests.settle(0.0)
    assert (len(followed.recorded), followed.requests.followed) == (0, 1)
    assert followed.planner.statistics().tokens == 8


def test_tenants_requests_of_one_id_are_followed_apart():
    followed = Followed()
    followed.answer(followed.plan(1, 2, tenant="a", request_id="same"))
    followed.answer(followed.plan(3, 4, tenant="b", request_id="same"))
    followed.requests.settle(0.0)
    assert followed.requests.followed == 2
    followed.lose(30, 31, 32, 33)
    assert followed.planner.evict(["same"], "a").tokens == 8
    assert followed.planner.evict(["same"], "b").tokens == 0


def test_groups_share_the_bound_on_the_blocks():
    blocks = EngineBlocks(max_blocks=12)
    for group in range(4):
        blocks.stored(BlocksStored(range(12), None, range(12), 1, group=group))
    assert blocks.parts == {"cache_blocks": (12, 12)}
