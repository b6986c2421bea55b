import sys
import time
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_event_helpers import Publisher, TellingCache, encoded
from tokenizers import Tokenizer as Tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, Templates
from ctxreuse.cache import EngineBlocks, KVEventSync, block_ends
from ctxreuse.cache.kv_events.held_requests import HeldRequests
from ctxreuse.cache.kv_events.sequence import Arrival, EventSequence
from ctxreuse.cache.kv_events.wire_format import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    decode_batch,
)
from ctxreuse.cache.prompt_ends import estimated_ends
from ctxreuse.errors import InvalidRequestError, MissingExtraError
from ctxreuse.index.radix_tree import IndexStatistics
from ctxreuse.serving.emulation.emulated_engine import chat_markup, word_tokens

NOTHING = IndexStatistics()
CLEARED = {"type": "AllBlocksCleared"}


class Application:
    """Plans, sends and records requests; the engine's events go to a publisher."""

    def __init__(self, publisher, blocks=1000, block_size=4, planner=None):
        self.planner = planner or ReusePlanner()
        self.publisher = publisher
        self.engine = TellingCache(blocks, block_size)
        self.sent = []

    def send(self, letters, sync=None, *, lost=False, **fields):
        """Send a request whose blocks are named by letters, some forty tokens each."""
        blocks = [ContextBlock(id=name, text=f"{name} " * 20, tokens=40) for name in letters]
        plan = self.planner.plan(ContextRequest(blocks, f"{len(self.sent)} is which?", **fields))
        tokens = word_tokens(chat_markup(plan.messages()))
        salt = plan.request.tenant or None
        self.engine.serve(tokens, salt)
        events = self.engine.take_events()
        if events and self.publisher is not None:
            self.publisher.publish(events, lost=lost)
        ends = block_ends(plan, lambda text: len(word_tokens(text)), chat_markup)
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
            for node in state.index.nodes():  # parents first
                before = above.get(id(node.parent), ())
                above[id(node)] = before + node.run
                for end in range(1, len(node.run) + 1):
                    paths.add((tenant, before + node.run[:end]))
        return paths


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@contextmanager
def following(planner, publisher, *, replays=True, **options):
    """A sync that has subscribed and knows what can be replayed."""
    replay_endpoint = publisher.replay_endpoint if replays else None
    options = {"clock": Clock(), **options}
    with KVEventSync(planner, publisher.endpoint, replay_endpoint, **options) as sync:
        publisher.wait_for_subscriber()
        assert sync.settle()
        yield sync


def caught_up(sync, publisher):
    """Wait until the sync has applied all that was published; return its statistics."""
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


def test_the_index_holds_what_the_engine_holds_after_evictions(publisher):
    app = Application(publisher, blocks=60)
    with following(app.planner, publisher) as sync:
        for context in ("abc", "abd", "ef", "abc", "gh", "ij", "abd", "kl", "m", "ef"):
            app.send(context, sync)
            caught_up(sync, publisher)
            assert app.index_paths() == app.held_paths()
    assert len(app.held_paths()) < 13
    assert sync.stats.gaps == sync.stats.losses == sync.stats.restarts == sync.stats.skipped == 0


@settings(max_examples=10)
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


def test_tenants_are_followed_by_their_salt(publisher):
    app = Application(publisher, blocks=20)
    with following(app.planner, publisher) as sync:
        for tenant in ("one", "two", "one"):
            app.send("ab", sync, tenant=tenant)
            caught_up(sync, publisher)
            assert app.index_paths() == app.held_paths()
    assert {tenant for tenant, _ in app.held_paths()} == {"one"}


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


def test_no_message_is_applied_twice_though_it_comes_live_and_replayed(publisher):
    with following(ReusePlanner(), publisher) as sync:
        for number in range(6):
            publisher.publish([CLEARED], lost=number in (1, 3))
        stats = caught_up(sync, publisher)
    assert (stats.batches, stats.events, stats.gaps, stats.losses) == (6, 6, 1, 0)


def test_messages_missing_for_good_empty_the_index(publisher):
    app = Application(publisher)
    with following(app.planner, publisher, replays=False) as sync:
        app.send("ab", sync)
        caught_up(sync, publisher)
        app.send("cd", sync, lost=True)
        app.send("abe", None)
        stats = caught_up(sync, publisher)
        assert app.planner.statistics() == NOTHING
    assert (stats.gaps, stats.replays, stats.losses) == (1, 0, 1)


def test_a_replay_that_has_forgotten_the_missing_messages_empties_the_index():
    with Publisher(keeps=2) as publisher:
        app = Application(publisher)
        with following(app.planner, publisher) as sync:
            app.send("ab", sync)
            caught_up(sync, publisher)
            for _ in range(3):
                publisher.publish([], lost=True)
            publisher.publish([])
            stats = caught_up(sync, publisher)
            assert app.planner.statistics() == NOTHING
    assert (stats.gaps, stats.losses, stats.last_seq) == (1, 1, 4)


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
def test_numbers_that_go_back_are_a_new_engine(publisher, missed):
    app = Application(publisher)
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


def test_a_cleared_cache_empties_the_index(publisher):
    app = Application(publisher)
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


def test_a_late_listener_without_replays_learns_from_what_is_built_upon(publisher):
    app = Application(publisher)
    app.send("ab", lost=True)
    with following(app.planner, publisher, replays=False) as sync:
        app.send("abc", sync)
        caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 120
        app.send("d", sync)
        stats = caught_up(sync, publisher)
        assert app.planner.statistics().tokens == 160
    assert (stats.gaps, stats.losses, stats.replays) == (0, 0, 0)


def test_a_late_listener_that_cannot_know_takes_it_for_not_held(publisher):
    app = Application(publisher)
    app.send("ab", lost=True)
    with following(app.planner, publisher, replays=False) as sync:
        app.send("cd", sync)
        caught_up(sync, publisher)
        plan, tokens, ends, _ = app.sent[0]
        sync.record(plan, tokens, ends)
        assert judged(sync)
        assert app.planner.statistics().tokens == 80


def test_broken_and_unknown_messages_are_passed_over(publisher):
    app = Application(publisher)
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
            patched.setattr(sync._requests, "apply", None)
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


def test_only_so_many_requests_are_followed_and_the_others_leave_the_index(publisher):
    app = Application(publisher)
    with following(app.planner, publisher, max_requests=2) as sync:
        for context in "abcd":
            app.send(context, sync)
            caught_up(sync, publisher)
        assert sync.stats.requests == 2
    assert app.planner.evict([plan.request_id for plan, *_ in app.sent]).unknown == (
        "request-0",
        "request-1",
    )


def test_a_request_without_blocks_of_its_own_is_not_followed(publisher):
    app = Application(publisher)
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


def test_it_can_be_started_and_stopped_again(publisher):
    app = Application(publisher)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p", "tcp://127.0.0.1:1"), "planner must be a ReusePlanner, not 'p'"),
        ((None, "127.0.0.1:1"), "endpoint must be an address such as"),
        ((None, None), "endpoint must be an address such as"),
        (
            (None, "tcp://*:5557"),
            r"endpoint 'tcp://\*:5557' \(str\) is what the engine binds; give",
        ),
        (
            (None, "tcp://127.0.0.1:1", "tcp://*:5558"),
            "replay_endpoint .* is what the engine binds",
        ),
        ((None, "tcp://127.0.0.1:1", None, 3), "topic must be a string, not 3"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    planner = arguments[0] or ReusePlanner()
    with pytest.raises(InvalidRequestError, match=message):
        KVEventSync(planner, *arguments[1:])


def test_wrong_numbers_are_named():
    with pytest.raises(InvalidRequestError, match="max_requests must be an integer from 1, not 0"):
        KVEventSync(ReusePlanner(), "tcp://127.0.0.1:1", max_requests=0)


def test_an_endpoint_that_is_none_is_named_at_the_start():
    sync = KVEventSync(ReusePlanner(), "nonsense://x")
    with pytest.raises(InvalidRequestError, match=r"endpoint 'nonsense://x'.* cannot be used: "):
        sync.start()
    sync.stop()


@pytest.mark.parametrize("name", ["zmq", "msgspec"])
def test_a_missing_package_names_the_extra(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ctxreuse\[vllm-events\]'"):
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
def test_wrong_records_are_named(arguments, message):
    planner = ReusePlanner()
    plan = planner.plan(ContextRequest(["a", "b"]))
    sync = KVEventSync(planner, "tcp://127.0.0.1:1")
    with pytest.raises(InvalidRequestError, match=message):
        sync.record(arguments[0] or plan, *arguments[1:])


def test_block_ends_are_where_the_rendered_prompt_says():
    planner = ReusePlanner()
    history = [
        {"role": "user", "content": "Hi [Doc_1] one two"},
        {"role": "assistant", "content": "?"},
    ]
    plans = [
        planner.plan(ContextRequest(["one two", "three"], "Which?", system="Be brief.")),
        planner.plan(ContextRequest(["one two", "three"], "Which?", history=history)),
        planner.plan(ContextRequest([], "Which?")),
    ]

    def count(text):
        return len(word_tokens(text))

    for plan in plans:
        rendered = chat_markup(plan.messages())
        expected = [
            count(rendered[: rendered.rindex(block.text) + len(block.text)])
            for block in plan.blocks
        ]
        assert block_ends(plan, count, chat_markup) == expected
        prompt_tokens = count(rendered)
        estimated = estimated_ends(plan, prompt_tokens)
        assert estimated == sorted(estimated)
        assert len(estimated) == len(expected)
        assert all(end <= prompt_tokens for end in estimated)


class Tokenizer:
    """A tokenizer with a chat template, as transformers has them."""

    def __init__(self, template):
        self._template = template

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return word_tokens(text)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return self._template(messages)


def test_the_tokenizers_own_template_is_used_and_may_strip_messages():
    planner = ReusePlanner(templates=Templates(block="  {label} {text}"))
    plan = planner.plan(ContextRequest(["one two ", "three\ud800"], "Which? \n"))
    rendered = "<u>[Doc_1] one two \n\n  [Doc_2] three?\n\nWhich?</u>"
    tokenizer = Tokenizer(lambda messages: f"<u>{messages[0]['content'].strip()}</u>")
    assert block_ends(plan, tokenizer) == [
        len(word_tokens(rendered[: rendered.index("two ") + 4])),
        len(word_tokens(rendered[: rendered.index("three?") + 6])),
    ]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (len, "has no chat template; pass render="),
        (Tokenizer(lambda messages: "something else"), "does not hold the plan's message as it is"),
        (3, "token_counter must be a function or a tokenizer, not 3"),
    ],
)
def test_a_prompt_in_which_the_blocks_cannot_be_found_is_said_so(tokenizer, message):
    plan = ReusePlanner().plan(ContextRequest(["one"], "Which?"))
    with pytest.raises(InvalidRequestError, match=message):
        block_ends(plan, tokenizer)


def real_tokenizer(*, pads=0):
    """A tokenizer of `tokenizers`: a token a word and mark, in one alphabet of words."""
    vocabulary = {"?": 0, "[PAD]": 1}
    tokenizer = Tokenizers(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    if pads:
        tokenizer.enable_padding(length=pads, pad_id=1, pad_token="[PAD]")
    return tokenizer


class Counting:
    """A tokenizer of `tokenizers` that tells how often and what it encodes."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.encoded = []

    encode_batch = None

    def encode(self, text, add_special_tokens):
        self.encoded.append(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return chat_markup(messages)


class Fast:
    """A fast tokenizer as `transformers` has them: numbers alone, or a mapping with offsets."""

    is_fast = True

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.calls = 0

    def encode(self, text, add_special_tokens):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def __call__(self, text, add_special_tokens, return_offsets_mapping):
        assert (add_special_tokens, return_offsets_mapping) == (False, True)
        self.calls += 1
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}


@pytest.mark.parametrize("pads", [0, 400])
def test_a_prompt_is_encoded_once_by_a_tokenizer_that_tells_where_its_tokens_are(pads):
    plan = ReusePlanner().plan(
        ContextRequest([f"Bl\u00f6ck {number}: \U0001f600 one, two." for number in range(15)], "?")
    )
    plain = real_tokenizer()
    expected = block_ends(
        plan, lambda text: len(plain.encode(text, add_special_tokens=False)), chat_markup
    )
    counting, fast = Counting(real_tokenizer(pads=pads)), Fast(real_tokenizer(pads=pads))
    assert block_ends(plan, counting) == expected
    assert counting.encoded == [chat_markup(plan.messages())]
    assert block_ends(plan, fast, chat_markup) == expected
    assert fast.calls == 1


def test_a_token_over_the_end_of_a_block_belongs_to_it():
    class Offsets:
        encode_batch = None

        def __init__(self, *offsets):
            self.offsets = list(offsets)

        def encode(self, text, add_special_tokens):
            return self

        def __len__(self):
            return 7

    planner = ReusePlanner(templates=Templates(block="{label}{text}"))
    plan = planner.plan(ContextRequest(["abcd"], "e"))
    assert plan.content == "[Doc_1]abcd\n\ne"  # the block ends at character 11
    for offsets, end in (
        ([(0, 10), (10, 13), (13, 14)], 2),
        ([(0, 11), (11, 14)], 1),
        ([(0, 0), (0, 9), (9, 9), (9, 11), (11, 11), (11, 14)], 4),
        ([(0, 0)], 0),
        ([(11, 14), (0, 11)], 7),  # not in the text's order: the beginnings are counted
    ):
        assert block_ends(plan, Offsets(*offsets), lambda m: m[0]["content"]) == [end]


def test_numbers_say_what_a_message_is():
    sequence = EventSequence()
    seen = []
    for number, replayed in (
        (4, 4),
        (5, None),
        (8, 9),
        (9, None),
        (10, None),
        (10, None),
        (2, None),
    ):
        arrival = sequence.arrive(number)
        seen.append(arrival.name)
        sequence.applied = number if replayed is None else replayed
    assert seen == ["FIRST", "NEXT", "AFTER_GAP", "KNOWN", "NEXT", "RESTARTED", "RESTARTED"]
    sequence.reset()
    assert (sequence.applied, sequence.arrive(1)) == (None, Arrival.FIRST)


STORED = {
    "type": "BlockStored",
    "block_hashes": [b"x", 7],
    "parent_block_hash": b"p",
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def decoded(*events):
    return decode_batch(msgspec.msgpack.encode([1.0, list(events), 0]))


def test_events_are_read_as_vllm_writes_them():
    batch = decode_batch(
        encoded(
            [
                STORED | {"extra_keys": [[["image", 3], "salt"], None], "group_idx": 1},
                {"type": "BlockRemoved", "block_hashes": [b"x"], "medium": "GPU", "group_idx": 1},
                CLEARED,
            ]
        )
    )
    extra = ((("image", 3), "salt"), None)
    assert batch == EventBatch(
        (
            BlocksStored((b"x", 7), b"p", (1, 2, 3, 4), 2, extra, 1),
            BlocksRemoved((b"x",), 1),
            CacheCleared(),
        )
    )


def test_events_of_older_and_newer_versions_are_read():
    assert decoded(
        ["BlockStored", [b"x", 7], None, [1, 2, 3, 4], 2, None],
        ["BlockRemoved", [b"x"]],
        ["AllBlocksCleared"],
        STORED | {"something": "new"},
    ) == EventBatch(
        (
            BlocksStored((b"x", 7), None, (1, 2, 3, 4), 2),
            BlocksRemoved((b"x",)),
            CacheCleared(),
            BlocksStored((b"x", 7), b"p", (1, 2, 3, 4), 2),
        )
    )
    assert decode_batch(msgspec.msgpack.encode({"ts": 1.0, "events": [CLEARED]})) == EventBatch(
        (CacheCleared(),)
    )


def test_an_adapter_counts_where_the_extra_keys_are_not_told():
    batch = decoded(STORED | {"lora_name": "a"})
    assert batch.events[0].extra_keys == (("a",), ("a",))


def test_groups_that_store_parts_of_prompts_are_marked():
    kinds = ("full_attention", "sliding_window", "mamba", None)
    batch = decoded(*(STORED | {"kv_cache_spec_kind": kind} for kind in kinds))
    assert [event.whole_prompts for event in batch.events] == [True, False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"medium": "CPU"},
        {"medium": 3},
        {"locality": "REMOTE"},
        {"type": "BlockFrozen"},
        {"block_hashes": None},
        {"block_hashes": ["x"]},
        {"block_hashes": [True]},
        {"parent_block_hash": "x"},
        {"token_ids": "1234"},
        {"token_ids": [1, -2, 3, 4]},
        {"token_ids": [1, 2.0, 3, 4]},
        {"token_ids": [1, 2**63, 3, 4]},
        {"block_size": -1},
        {"block_size": True},
        {"group_idx": "0"},
        {"group_idx": 2**20},
        {"extra_keys": "x"},
        {"extra_keys": ["x", None]},
        {"extra_keys": [[[["x"]]], None]},
    ],
)
def test_events_that_cannot_be_used_are_counted(change):
    assert decoded(STORED | change, CLEARED) == EventBatch((CacheCleared(),), skipped=1)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", ""])
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*STORED, "extra_keys", "group_idx"]), inner, max_size=5)
    ),
    max_leaves=12,
)
events = st.dictionaries(st.sampled_from([*STORED, "extra_keys", "group_idx"]), values, max_size=9)


@settings(max_examples=100)
@given(st.lists(values | events.map(lambda event: STORED | event), max_size=3))
def test_no_events_break_the_reader_or_the_blocks(raw):
    batch = decoded(*raw)
    assert len(batch.events) + batch.skipped == len(raw)
    requests = HeldRequests(ReusePlanner(), EngineBlocks(), 10, 0.0)
    for event in batch.events:
        requests.apply(event)
    requests.settle(0.0)


@given(st.binary(max_size=40))
def test_no_bytes_break_the_reader(payload):
    batch = decode_batch(payload)
    assert batch is None or isinstance(batch, EventBatch)


def test_a_tokenizer_makes_the_ends_exact_unless_its_template_changes_the_text():
    planner = ReusePlanner()
    plan = planner.plan(ContextRequest(["one two", "three"], "Which?"))
    tokens = word_tokens(chat_markup(plan.messages()))
    exact = block_ends(plan, Tokenizer(chat_markup))
    changing = Tokenizer(lambda messages: "something else")
    for tokenizer, ends in (
        (Tokenizer(chat_markup), exact),
        (changing, estimated_ends(plan, len(tokens))),
        (None, estimated_ends(plan, len(tokens))),
    ):
        sync = KVEventSync(planner, "tcp://127.0.0.1:1", tokenizer=tokenizer)
        sync.record(plan, tokens)
        assert sync._recorded[0].block_ends == ends


def test_estimated_ends_allow_for_words_of_the_template_before_the_messages():
    planner = ReusePlanner()
    blocks = [f"{letter} " * 300 for letter in "abcd"]
    plan = planner.plan(ContextRequest(blocks, "Which?", system="Be brief."))
    for words in (0, 10, 50):
        before = "template " * words

        def render(messages, before=before):
            return before + chat_markup(messages)

        exact = block_ends(plan, lambda text: len(word_tokens(text)), render)
        tokens = len(word_tokens(render(plan.messages())))
        estimated = estimated_ends(plan, tokens)
        assert all(real <= late <= tokens for real, late in zip(exact, estimated, strict=True))
