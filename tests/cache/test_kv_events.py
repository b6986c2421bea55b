"""A planner's index that follows the engine's KV cache events."""

import sys
import time
from contextlib import contextmanager
from threading import Event, Thread

import msgspec
import pytest
from example_counts import examples
from forked import in_children
from helpers import nodes_of
from hypothesis import given
from hypothesis import strategies as st
from kv_event_helpers import Publisher, TellingCache, encoded
from pool_helpers import Clock

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.cache import KVEventSync, block_ends
from ctxreuse.cache.kv_events.event_stream import decode_batch
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.memory.prefix_index import IndexStatistics
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER, chat_markup

pytestmark = pytest.mark.usefixtures("paper_words")

NOTHING = IndexStatistics()
CLEARED = {"type": "AllBlocksCleared"}


class Application:
    def __init__(self, publisher, blocks=1000, block_size=4, planner=None):
        self.planner = planner or ReusePlanner()
        self.publisher = publisher
        self.engine = TellingCache(blocks, block_size)
        self.sent = []

    def send(self, letters, sync=None, *, lost=False, **fields):
        blocks = [ContextBlock(id=name, text=f"{name} " * 20, tokens=40) for name in letters]
        plan = self.planner.plan(ContextRequest(blocks, f"{len(self.sent)} is which?", **fields))
        tokens = ENGINE_TOKENIZER.ids(chat_markup(plan.messages()))
        salt = plan.request.tenant or None
        self.engine.serve(tokens, salt)
        events = self.engine.take_events()
        if events and self.publisher is not None:
            self.publisher.publish(events, lost=lost)
        ends = block_ends(plan, lambda text: len(ENGINE_TOKENIZER.ids(text)), chat_markup)
        self.sent.append((plan, tokens, ends, salt))
        if sync is not None:
            sync.record(plan, tokens, ends, cache_salt=salt)
        return plan

    def held_paths(self):
        """What the engine holds, as the index would: every sequence of blocks from a root on."""
        paths = set()
        for plan, tokens, ends, salt in self.sent:
            held = self.engine.holds(tokens, salt)
            keys = tuple(block.key for block in plan.blocks)
            for number, end in enumerate(ends, 1):
                # the engine's last block in it holds the beginning of what follows, too
                if held and end // self.engine.block_size * self.engine.block_size <= held:
                    paths.add((plan.request.tenant, keys[:number]))
        return paths

    def index_paths(self):
        """What the index holds: every sequence of blocks from a root on."""
        paths = set()
        for tenant, state in self.planner._planning._tenants._states.items():
            above = {}
            for node in nodes_of(state.index):  # parents first
                before = above.get(node.parent, ())
                above[node] = before + node.run
                for end in range(1, len(node.run) + 1):
                    paths.add((tenant, before + node.run[:end]))
        return paths


@contextmanager
def following(planner, publisher, *, replays=True, settles=True, **options):
    """A sync that has subscribed and, unless no replay ends, knows what can be replayed."""
    replay_endpoint = publisher.replay_endpoint if replays else None
    options = {"clock": Clock(), **options}
    with KVEventSync(planner, publisher.endpoint, replay_endpoint, **options) as sync:
        publisher.wait_for_subscriber()
        assert not settles or sync.settle()
        yield sync


def caught_up(sync, publisher):
    return until(sync, lambda stats: stats.last_seq == publisher.last)


def until(sync, is_reached):
    deadline = time.monotonic() + 20
    while not is_reached(sync.stats):
        assert time.monotonic() < deadline, sync.stats
        time.sleep(0.002)
    assert judged(sync)
    return sync.stats


def judged(sync):
    """Let the time pass in which the events of recorded requests must come."""
    sync._clock.now += 10
    return sync.settle()


@pytest.fixture
def publisher():
    with Publisher() as one:
        yield one


@pytest.fixture
def app(publisher):
    return Application(publisher)


def test_the_index_holds_what_the_engine_holds_after_evictions(publisher):
    app = Application(publisher, blocks=60)
    with following(app.planner, publisher) as sync:
        for context in ("abc", "abd", "ef", "abc", "gh", "ij", "abd", "kl", "m", "ef"):
            app.send(context, sync)
            caught_up(sync, publisher)
            assert app.index_paths() == app.held_paths()
    assert len(app.held_paths()) < 13
    assert sync.stats.gaps == sync.stats.losses == sync.stats.restarts == sync.stats.skipped == 0


@examples(10)
@given(
    st.lists(st.text("abcde", min_size=1, max_size=3), min_size=3, max_size=12),
    st.integers(30, 80),
    st.lists(st.integers(0, 5), max_size=4),
)
def test_whatever_is_sent_and_lost_the_index_holds_what_the_engine_holds(contexts, blocks, losses):
    with Publisher() as publisher:
        app = Application(publisher, blocks)
        with following(app.planner, publisher) as sync:
            for number, context in enumerate(contexts):
                tenant = "t" if number % 3 == 0 else ""
                app.send(dict.fromkeys(context), sync, lost=number in losses, tenant=tenant)
            publisher.publish([])
            caught_up(sync, publisher)
            held = app.held_paths()
            assert app.index_paths() <= held
            for number, context in enumerate("fgf"):
                app.send(context, sync, lost=number == 1)
            publisher.publish([])
            caught_up(sync, publisher)
            assert app.index_paths() <= app.held_paths()


def test_later_turns_are_trimmed_to_what_is_held_of_their_own_blocks(publisher):
    app = Application(publisher, blocks=200)
    with following(app.planner, publisher) as sync:
        first = app.send("ab", sync, conversation_id=1, history=[])
        answered = [*first.messages(), {"role": "assistant", "content": "Yes."}]
        app.send("acd", sync, conversation_id=1, history=answered)
        caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 160
        while app.engine.holds(app.sent[1][1]) >= app.sent[1][2][1]:
            app.send("x", sync, system=f"{len(app.sent)}")
        caught_up(sync, publisher)
        own = 160 + 40 * (len(app.sent) - 2) - app.planner.statistics().tokens
        assert own == 40  # "d" is gone, "a", "b" and "c" are not


def test_missing_messages_are_asked_for_again(publisher):
    app = Application(publisher, blocks=40)
    with following(app.planner, publisher) as sync:
        app.send("ab", sync)
        app.send("cd", sync, lost=True)
        app.send("ef", sync, lost=True)
        app.send("gh", sync)
        stats = caught_up(sync, publisher)
        assert app.index_paths() == app.held_paths()
    assert (stats.gaps, stats.replays, stats.losses, stats.batches) == (1, 2, 0, 4)


def test_messages_missing_for_good_empty_the_index(publisher, app):
    with following(app.planner, publisher, replays=False) as sync:
        app.send("ab", sync)
        caught_up(sync, publisher)
        app.send("cd", sync, lost=True)
        app.send("abe", None)
        stats = caught_up(sync, publisher)
        assert app.planner.statistics() == NOTHING
    assert (stats.gaps, stats.replays, stats.losses) == (1, 0, 1)


def test_a_new_engine_at_the_same_address_begins_with_an_empty_index():
    with Publisher() as publisher:
        app = Application(publisher)
        with following(app.planner, publisher) as sync:
            app.send("ab", sync)
            caught_up(sync, publisher)
            publisher.close()
            until(sync, lambda stats: stats.restarts == 1)
            assert app.planner.statistics() == NOTHING
            with Publisher(ports=publisher.ports) as successor:
                successor.wait_for_subscriber()
                app.publisher, app.engine = successor, TellingCache(1000, 4)
                app.send("cd", sync)
                stats = caught_up(sync, successor)
                assert app.index_paths() == app.held_paths()
    assert (stats.restarts, stats.last_seq, stats.losses) == (1, 0, 0)


@pytest.mark.parametrize("missed", [0, 2])
def test_numbers_that_go_back_are_a_new_engine(publisher, missed, app):
    with following(app.planner, publisher) as sync:
        for context in ("ab", "cd", "ef"):
            app.send(context, sync)
        caught_up(sync, publisher)
        publisher.begin_anew()
        app.engine = TellingCache(1000, 4)
        for number in range(missed):
            publisher.publish([CLEARED] * number, lost=True)
        app.send("gh")
        stats = caught_up(sync, publisher)
        assert stats.batches == 3 + missed + 1
        assert app.planner.statistics() == NOTHING  # what was planned before counts no more
        app.send("ij", sync)
        caught_up(sync, publisher)
        assert app.index_paths() == {path for path in app.held_paths() if path in app.index_paths()}
        assert app.planner.statistics().tokens == 80
    assert (stats.restarts, stats.losses) == (1, 0)


def test_a_cleared_cache_empties_the_index(publisher, app):
    with following(app.planner, publisher) as sync:
        app.send("ab", sync)
        caught_up(sync, publisher)
        app.engine.reset()
        publisher.publish(app.engine.take_events())
        caught_up(sync, publisher)
        assert app.planner.statistics() == NOTHING
        app.send("ab", sync)
        caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 80


def test_a_late_listener_replays_what_has_been(publisher):
    app = Application(publisher, blocks=60)
    for context in ("abc", "de", "abf"):
        app.send(context, lost=True)
    with following(app.planner, publisher) as sync:
        assert sync.stats.last_seq == 2
        for plan, tokens, ends, _ in app.sent:
            sync.record(plan, tokens, ends)
        stats = caught_up(sync, publisher)
        assert app.index_paths() == app.held_paths()
    assert (stats.batches, stats.replays, stats.gaps) == (3, 1, 0)


class DelayedPublisher(Publisher):
    def __init__(self):
        self.may_answer = Event()
        super().__init__()

    def _answer(self):
        self.may_answer.wait(20)
        super()._answer()


def test_where_nothing_is_followed_nothing_is_waited_for():
    sync = KVEventSync(ReusePlanner(), "tcp://127.0.0.1:1")
    assert not sync.settle(timeout_s=3600.0)


def test_a_request_is_not_judged_while_its_events_may_come_in_a_replay():
    with DelayedPublisher() as publisher:
        app, clock = Application(publisher, blocks=60), Clock()
        for context in ("abc", "de", "abf"):
            app.send(context, lost=True)
        options = {"settles": False, "clock": clock, "replay_timeout_s": 1000.0}
        with following(app.planner, publisher, **options) as sync:
            for plan, tokens, ends, _ in app.sent:
                sync.record(plan, tokens, ends)
            clock.now = 10.0
            assert not sync.settle(timeout_s=0.2)
            publisher.may_answer.set()
            caught_up(sync, publisher)
            assert app.index_paths() == app.held_paths() != set()


def test_a_late_listener_without_replays_learns_from_what_is_built_upon(publisher, app):
    app.send("ab", lost=True)
    with following(app.planner, publisher, replays=False) as sync:
        app.send("abc", sync)
        caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 120
        app.send("d", sync)
        stats = caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 160
    assert (stats.gaps, stats.losses, stats.replays) == (0, 0, 0)


def test_broken_and_unknown_messages_are_passed_over(publisher, app):
    with following(app.planner, publisher) as sync:
        app.send("ab", sync)
        for payload in (
            b"",
            b"\xc1",
            b"\x93\x01\x02",
            b"\x91" * 50_000,
            msgspec.msgpack.encode([1.0, [{"type": "BlockFrozen"}, {}, 3, ["BlockStored"]]]),
            msgspec.msgpack.encode({"no": "batch"}),
        ):
            publisher.publish(payload)
        number = (publisher.last + 1).to_bytes(8, "big")
        for frames in (
            (b"kv",),
            (b"kv", b"12345678"),
            (b"kv", b"1", b""),
            (b"kv", b"", number, encoded([CLEARED])),
        ):
            publisher.send(*frames)
        publisher.send(b"kv", (-3).to_bytes(8, "big", signed=True), b"")
        publisher.send(b"kv2", number, encoded([CLEARED]))
        app.send("cd", sync)
        stats = caught_up(sync, publisher)
        assert app.index_paths() == app.held_paths()
        assert len(app.held_paths()) == 4
    assert (stats.skipped, stats.batches, stats.gaps, stats.losses) == (5 + 4 + 6, 3, 0, 0)


def test_a_fault_of_ours_empties_the_index_and_the_thread_goes_on(publisher, monkeypatch, caplog):
    app = Application(publisher)
    with following(app.planner, publisher) as sync:
        app.send("ab", sync)
        caught_up(sync, publisher)
        with monkeypatch.context() as patched:
            patched.setattr(sync._listener.requests, "apply", None)
            app.send("cd", sync)
            stats = caught_up(sync, publisher)
        assert app.planner.statistics() == NOTHING
        assert (stats.losses, stats.faults) == (1, 1)
        app.engine = TellingCache(1000, 4)
        app.send("ef", sync)
        caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 80
    assert "KVEventSync: event handling failed with TypeError at " in caplog.text


def test_engines_that_connect_are_waited_for():
    with Publisher() as unused:
        endpoint = unused.endpoint
    app = Application(None)
    with (
        KVEventSync(app.planner, endpoint, bind=True, clock=Clock()) as sync,
        Publisher(connect=endpoint) as publisher,
    ):
        publisher.wait_for_subscriber()
        app.publisher = publisher
        app.send("ab", sync)
        caught_up(sync, publisher)
        assert app.index_paths() == app.held_paths()


def test_older_engines_replay_without_the_topic():
    with Publisher(with_topic=False) as publisher:
        app = Application(publisher)
        app.send("ab", lost=True)
        with following(app.planner, publisher) as sync:
            stats = caught_up(sync, publisher)
    assert (stats.batches, stats.skipped) == (1, 0)


def test_without_ends_too_few_blocks_count_as_held_rather_than_too_many(publisher):
    app = Application(publisher, blocks=60)
    with following(app.planner, publisher) as sync:
        for context in ("abc", "def", "gh"):
            plan = app.send(context)
            sync.record(plan, app.sent[-1][1])
            caught_up(sync, publisher)
            assert app.index_paths() <= app.held_paths()
        assert app.index_paths() >= {("", tuple(block.key for block in plan.blocks))}


@pytest.mark.parametrize("is_known", [False, True])
def test_a_sync_that_follows_nothing_says_so_once(publisher, caplog, is_known):
    app = Application(publisher, blocks=60)
    with following(app.planner, publisher) as sync:
        app.engine.serve(range(40))
        publisher.publish([*app.engine.take_events(), CLEARED])
        caught_up(sync, publisher)
        assert not caplog.messages  # what others sent is no request of the planner's
        if is_known:
            sync.expect()
        app.send("abc", sync if is_known else None)
        for number in range(2):
            app.engine.serve(range(1_000 * number, 1_000 * number + 200))
            publisher.publish(app.engine.take_events())
            caught_up(sync, publisher)
    told = [one for one in caplog.messages if "follows none of the planner's requests" in one]
    assert len(told) == (not is_known)


def test_a_request_without_blocks_of_its_own_is_not_followed(publisher, app):
    with following(app.planner, publisher) as sync:
        app.send("", sync)
        caught_up(sync, publisher)
        assert sync.stats.requests == 0


def test_a_request_is_judged_once_its_events_must_have_come(publisher):
    app, clock = Application(None), Clock()
    with following(app.planner, publisher, settle_s=1.0, clock=clock) as sync:
        app.send("ab", sync)
        assert not sync.settle(timeout_s=0.2)  # its events have not come: it counts as held
        assert app.planner.statistics().tokens == 80
        clock.now = 1.0
        assert sync.settle()
        assert app.planner.statistics() == NOTHING


def test_it_can_be_started_and_stopped_again(publisher, app):
    sync = KVEventSync(app.planner, publisher.endpoint, publisher.replay_endpoint, clock=Clock())
    sync.stop()
    for _ in range(2):
        sync.start()
        sync.start()
        publisher.wait_for_subscriber()
        app.send("ab", sync)
        caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 80
        sync.stop()
        assert publisher._live.poll(10_000)  # unsubscribed
        publisher._live.recv()
    assert sync.stats.losses == 1  # what came between the two is not known


def flooded(publisher, is_over):
    payload = encoded([CLEARED] * 50)
    while not is_over.is_set():
        publisher.publish(payload)


def test_gaps_do_not_wait_for_a_replay_endpoint_that_is_dead(publisher):
    dead = "tcp://127.0.0.1:1"
    options = {"clock": Clock(), "replay_timeout_s": 0.05}
    with KVEventSync(ReusePlanner(), publisher.endpoint, dead, **options) as sync:
        publisher.wait_for_subscriber()
        for number in range(600):
            publisher.publish([CLEARED], lost=number % 3 == 1)
        stats = caught_up(sync, publisher)
    assert stats.batches == 400
    assert stats.gaps + stats.losses >= 200
    assert 1 <= stats.abandoned <= stats.replays <= 20


class DribblingPublisher(Publisher):
    """Answers a request for a replay with old messages, one after the other, for ever."""

    def _answer(self):
        while self._is_open:
            if self._replays.poll(5):
                client, *_ = self._replays.recv_multipart()
                while self._is_open:
                    self._reply(client, self._topic, (0).to_bytes(8, "big"), encoded([CLEARED]))
                    time.sleep(0.01)


def test_a_replay_that_dribbles_holds_live_messages_up_for_a_bounded_time_only():
    with DribblingPublisher() as publisher:
        options = {"settles": False, "replay_timeout_s": 0.1}
        with following(ReusePlanner(), publisher, **options) as sync:
            for number in range(10):
                publisher.publish([CLEARED], lost=number == 5)
            stats = caught_up(sync, publisher)
    assert stats.last_seq == 9
    assert stats.abandoned >= 1
    assert stats.replayed >= 1
    assert stats.queued == 0


class SilentPublisher(Publisher):
    def _answer(self):
        while self._is_open:
            time.sleep(0.005)


def test_live_messages_wait_for_a_replay_in_a_bounded_queue_and_others_are_lost(monkeypatch):
    monkeypatch.setattr("ctxreuse.cache.kv_events.event_sync._MOST_WAITING", 5)
    with SilentPublisher() as publisher:
        app = Application(publisher)
        options = {"settles": False, "replay_timeout_s": 1000.0}
        with following(app.planner, publisher, **options) as sync:
            for number in range(3):
                publisher.publish([CLEARED], lost=number == 1)
            while sync.stats.queued < 2:
                time.sleep(0.002)
            assert sync.stats.last_seq is None
            for _ in range(4):
                publisher.publish([CLEARED])
            stats = caught_up(sync, publisher)
    # the one that is missing between them is not waited for again, so soon
    assert (stats.abandoned, stats.replays, stats.queued, stats.batches) == (1, 1, 0, 6)
    assert stats.losses == 1


@pytest.mark.parametrize("kind", [Publisher, SilentPublisher, DribblingPublisher])
def test_it_stops_in_the_middle_of_a_flood_and_of_a_replay(kind):
    with kind() as publisher:
        is_over = Event()
        flood = Thread(target=flooded, args=(publisher, is_over))
        sync = KVEventSync(ReusePlanner(), publisher.endpoint, publisher.replay_endpoint)
        sync.start()
        publisher.wait_for_subscriber()
        flood.start()
        while not sync.stats.batches + sync.stats.queued:
            time.sleep(0.002)
        sync.stop()
        assert not sync._listener._thread.is_alive()
        is_over.set()
        flood.join()


def test_it_stops_in_the_middle_of_a_message_and_uses_no_more_of_it(publisher, monkeypatch):
    is_decoding, may_go_on = Event(), Event()

    def decode(payload):
        is_decoding.set()
        may_go_on.wait()
        return decode_batch(payload)

    monkeypatch.setattr("ctxreuse.cache.kv_events.event_sync.decode_batch", decode)
    app = Application(publisher)
    sync = KVEventSync(app.planner, publisher.endpoint)
    sync.start()
    publisher.wait_for_subscriber()
    app.send("ab")
    publisher.publish([CLEARED])
    is_decoding.wait()
    listener = sync._listener
    sync.stop()
    sync.start()  # even again
    may_go_on.set()
    listener._thread.join()
    sync.stop()
    assert listener.counts["batches"] <= 1


def test_messages_that_no_engine_would_send_are_refused_and_the_next_ones_are_used(publisher):
    with following(ReusePlanner(), publisher, replays=False) as sync:
        publisher.publish(b"\x00" * (2**22 + 1))
        until(sync, lambda stats: stats.restarts == 1)
        while not sync.stats.batches:  # the connection is made anew
            publisher.publish([CLEARED])
            time.sleep(0.002)
        before = caught_up(sync, publisher)
        publisher.publish(b"\x91" * 2**21)  # nested two million deep
        publisher.publish([CLEARED])
        stats = caught_up(sync, publisher)
    assert (stats.batches, stats.skipped) == (before.batches + 1, before.skipped + 1)


def test_a_sender_of_too_large_messages_is_connected_to_once_a_second(publisher, monkeypatch):
    monkeypatch.setattr("ctxreuse.cache.kv_events.event_stream._LARGEST_MESSAGE", 1_000)
    with following(ReusePlanner(), publisher, replays=False) as sync:
        for _ in range(300):  # 0.6 s or more; without a pause it is a hundred connections
            publisher.publish(b"\x00" * 1_001)
            time.sleep(0.002)
        assert 1 <= until(sync, lambda stats: stats.restarts >= 1).restarts <= 10
        while not sync.stats.batches:  # it sends what can be used
            publisher.publish([CLEARED])
            time.sleep(0.01)


def test_senders_whose_messages_come_mixed_bring_no_flood_of_replays(publisher):
    """Each message seems to be one of an engine that has started anew, and misses those before."""
    with following(ReusePlanner(), publisher) as sync:
        for number in range(1_000, 500, -1):
            publisher.send(b"kv", number.to_bytes(8, "big"), encoded([]))
        stats = until(sync, lambda stats: stats.restarts == 499)
    assert 1 <= stats.replays <= 250


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_follows_by_itself_from_its_first_recorded_request_on(publisher, app):
    def child(number):
        app.publisher = None
        assert sync.stats.last_seq is None
        app.send("ab", sync)
        deadline = time.monotonic() + 20
        while sync.stats.last_seq is None and time.monotonic() < deadline:
            time.sleep(0.002)
        last = sync.stats.last_seq
        sync.stop()
        return last

    with following(app.planner, publisher) as sync:
        app.send("ab", sync)
        caught_up(sync, publisher)
        assert in_children(3, child) == [0, 0, 0]
        app.send("cd", sync)
        assert caught_up(sync, publisher).faults == 0
        assert app.index_paths() == app.held_paths()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p", "tcp://127.0.0.1:1"), "planner must be a ReusePlanner, not 'p'"),
        ((None, "127.0.0.1:1"), "endpoint must be an address such as"),
        (
            (None, "tcp://*:5557"),
            r"endpoint 'tcp://\*:5557' \(str\) is what the engine binds; give",
        ),
        (
            (None, "tcp://127.0.0.1:1", "tcp://*:5558"),
            "replay_endpoint .* is what the engine binds",
        ),
        ((None, "tcp://127.0.0.1:1", None, 3), "topic must be a string, not 3"),
        ((None, "tcp://127.0.0.1:1", None, "\ud800"), "topic must be UTF-8 text"),
        ((None, "tcp://127.0.0.1:1", None, "x" * 256), "topic must be .* at most 255 characters"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    planner = arguments[0] or ReusePlanner()
    with pytest.raises(InvalidRequestError, match=message):
        KVEventSync(planner, *arguments[1:])


@pytest.mark.parametrize("value", ["1", -1, float("nan"), float("inf"), None])
@pytest.mark.parametrize("name", ["max_requests", "settle_s", "replay_timeout_s"])
def test_wrong_numbers_are_named(name, value):
    with pytest.raises(InvalidRequestError, match=f"^{name} must be an? (integer|number) from "):
        KVEventSync(ReusePlanner(), "tcp://127.0.0.1:1", **{name: value})


@pytest.mark.parametrize("address", ["nonsense://x", "tcp://", "tcp://a b:1", "tcp://\ud800:1"])
@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_is_none_is_named_at_the_start(name, address):
    sync = KVEventSync(ReusePlanner(), **{"endpoint": "tcp://127.0.0.1:1", name: address})
    for _ in range(2):  # a start that has failed has not begun
        with pytest.raises(InvalidRequestError, match=f"^{name} '.* cannot be used: "):
            sync.start()
    sync.stop()


@pytest.mark.parametrize("name", ["zmq", "msgspec"])
def test_a_missing_package_names_the_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[vllm-events\]"):
        KVEventSync(ReusePlanner(), "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", [1]), "plan must be a Plan, not 'plan'"),
        ((None, ["1"]), "token ids must be integers"),
        ((None, [1], [1]), "block_ends must hold an integer for each of the 2 blocks"),
        ((None, [1], [1, 2.0]), "block_ends must hold an integer for each of the 2 blocks"),
        ((None, [1], [2, 1]), "block_ends must ascend"),
    ],
)
def test_wrong_records_are_named(arguments, message, planner):
    plan = planner.plan(ContextRequest(["a", "b"]))
    sync = KVEventSync(planner, "tcp://127.0.0.1:1")
    with pytest.raises(InvalidRequestError, match=message):
        sync.record(arguments[0] or plan, *arguments[1:])
