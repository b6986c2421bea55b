"""Streams of cache events that break off, lie or lose something: calls go on, and profit again."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from fault_programs import PROGRAMS, Client, Program
from kv_event_helpers import Publisher, TellingCache
from shared_logs import until

from ctxreuse import ReusePlanner
from ctxreuse.cache import KVEventSync
from ctxreuse.serving.emulation.word_tokenizer import ENGINE_TOKENIZER, chat_markup


class Telling:
    """An engine's cache, and where it tells what it holds."""

    def __init__(self) -> None:
        self.cache = TellingCache(10_000, 16)
        self.publisher = Publisher()
        self.is_lost = False

    def served(self, messages: Any) -> None:
        self.cache.serve(ENGINE_TOKENIZER.ids(chat_markup(messages)))
        events = self.cache.take_events()
        if events:
            self.publisher.publish(events, lost=self.is_lost)

    def restart(self) -> None:
        """Have another engine come up at the same addresses."""
        ports = self.publisher.ports
        self.publisher.close()
        self.publisher = Publisher(ports=ports)
        self.cache = TellingCache(10_000, 16)


@contextmanager
def restarted(telling: Telling, sync: KVEventSync) -> Iterator[None]:
    telling.restart()
    yield
    telling.publisher.wait_for_subscriber()


@contextmanager
def away(telling: Telling, sync: KVEventSync) -> Iterator[None]:
    """The engine answers, and tells nothing."""
    telling.publisher.close()
    silent: Any = SimpleNamespace(last=-1, publish=lambda *_, **__: None)
    publisher, telling.publisher = telling.publisher, silent
    yield
    telling.publisher = Publisher(ports=publisher.ports)
    telling.cache = TellingCache(10_000, 16)
    telling.publisher.wait_for_subscriber()


@contextmanager
def garbage(telling: Telling, sync: KVEventSync) -> Iterator[None]:
    for payload in (b"", b"\xff" * 1_000, b"\x91" * 50_000, b"\x93\x01\x02"):
        telling.publisher.publish(payload)
    yield


@contextmanager
def lost(telling: Telling, sync: KVEventSync) -> Iterator[None]:
    telling.is_lost = True
    telling.publisher._kept = telling.publisher._kept.__class__(maxlen=0)
    yield
    telling.is_lost = False


@contextmanager
def our_fault(telling: Telling, sync: KVEventSync) -> Iterator[None]:
    requests = sync._listener.requests
    apply = requests.apply
    requests.apply = None
    yield
    until(lambda: sync.stats.faults > 0)
    requests.apply = apply


class Fault(NamedTuple):
    begin: Callable[[Telling, KVEventSync], AbstractContextManager[None]]
    count: str


FAULTS = {
    "a new engine": Fault(restarted, "restarts"),
    "away": Fault(away, "restarts"),
    "garbage": Fault(garbage, "skipped"),
    "lost messages": Fault(lost, "losses"),
    "a fault of ours": Fault(our_fault, "faults"),
    "none": Fault(lambda telling, sync: nullcontext(), "events"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
@pytest.mark.parametrize("name", FAULTS)
def test_calls_go_on_as_without_us_and_profit_again(kind, name, caplog):
    planner, telling = ReusePlanner(), Telling()
    ours, plain = PROGRAMS[kind](planner), PROGRAMS[kind](None)
    ours.engine.served = telling.served
    endpoints = telling.publisher.endpoint, telling.publisher.replay_endpoint
    with KVEventSync(planner, *endpoints, settle_s=0.5) as sync:
        telling.publisher.wait_for_subscriber()
        if isinstance(ours, Client):
            ours.events = sync
        assert ours.ask("abc") == plain.ask("abc")
        followed(ours, telling, sync)
        assert ours.order("cab") == "abc"
        with FAULTS[name].begin(telling, sync):
            for letters in ("bca", "def", "fed"):
                assert ours.ask(letters) == plain.ask(letters)
        for word in ("uvw", "xyz"):  # the first message behind a gap tells that there is one
            assert ours.order(word) == word
            followed(ours, telling, sync)
        assert ours.order("zyx") == "xyz", "what the engine holds by now is used"
        assert getattr(sync.stats, FAULTS[name].count) > 0
        lines = [one.getMessage() for one in caplog.records if one.name == "ctxreuse"]
        warned = [line for line in lines if "event handling failed" in line]
        assert len(warned) == (name == "a fault of ours")
        assert ours.faults == 0
    telling.publisher.close()


def followed(program: Program, telling: Telling, sync: KVEventSync) -> None:
    """Wait until what was published is applied, and what was recorded is judged."""
    until(lambda: sync.stats.last_seq == telling.publisher.last)
    assert sync.settle(20)
