"""What only a constructor takes cannot be set later, where it would change nothing."""

import copy
import pickle

import pytest
from mem0_stores import AsyncFakeMemory, FakeMemory

from chain_of_agents import ChainOfAgents
from ctxreuse import ReusePlanner
from ctxreuse.cache import KVEventSync
from ctxreuse.serving import EngineClient, EnginePool
from ctxreuse.sharing import RedisLog, SQLiteLog
from langchain_ctxreuse import ReuseMiddleware
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory

URL = "http://127.0.0.1:9/v1"


MADE = {
    "ReusePlanner.capacity_tokens": ReusePlanner,
    "ReusePlanner.annotate": ReusePlanner,
    "ReusePlanner.deduplicate": ReusePlanner,
    "EngineClient.cache_salt": lambda: EngineClient(URL),
    "EngineClient.timeout_s": lambda: EngineClient(URL),
    "EnginePool.window_s": lambda: EnginePool([URL]),
    "KVEventSync.topic": lambda: KVEventSync(ReusePlanner(), "tcp://127.0.0.1:9"),
    "ReuseMiddleware.retriever": ReuseMiddleware,
    "ReuseMemory.tenant": lambda: ReuseMemory(FakeMemory()),
    "AsyncReuseMemory.tenant": lambda: AsyncReuseMemory(AsyncFakeMemory()),
    "ChainOfAgents.workers": lambda: ChainOfAgents(URL),
    "RedisLog.stream": lambda: RedisLog("redis://127.0.0.1:9", secret="s" * 32),
}


@pytest.mark.parametrize("named", MADE)
def test_a_setting_that_would_change_nothing_is_refused(named):
    made, (kind, _, name) = MADE[named](), named.partition(".")
    with pytest.raises(AttributeError, match=f"'{name}' of {kind} is set when it is made"):
        setattr(made, name, None)
    made.of_the_users_own = 1
    assert made.of_the_users_own == 1


def test_the_log_in_a_file_too(tmp_path):
    log = SQLiteLog(tmp_path / "sent.sqlite")
    with pytest.raises(AttributeError, match="'max_entries' of SQLiteLog"):
        log.max_entries = 5


def test_copies_and_subclasses_are_made_as_before():
    class Own(ReusePlanner):
        def __init__(self, kept):
            super().__init__()
            self.kept = kept

    assert Own(3).kept == 3  # a user's class may use any name that is none of ours
    for planner in (
        copy.deepcopy(ReusePlanner(annotate=False)),
        pickle.loads(pickle.dumps(ReusePlanner())),
    ):
        assert planner.plan is not None
