"""Copying, deep-copying and pickling what applications hold."""

import copy
import copyreg
import itertools
import pickle
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from llama_index.core.llms import MockLLM

from ctxreuse import ContextRequest, ReusePlanner, Templates
from ctxreuse.cache import BlockLevelCache, CapacityTracker, KVEventSync, PrefixCacheSimulator
from ctxreuse.errors import InvalidRequestError
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool
from ctxreuse.workflow import EmulatedLLM, WorkflowEngine
from langchain_ctxreuse import ReuseChatModel
from llamaindex_ctxreuse import ReuseLLM

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}
REQUEST = ContextRequest(["one text", "another text"], "Which?")


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("mode", ["active", "shadow"])
def test_a_copied_planner_has_the_same_settings_and_has_seen_nothing(again, mode):
    templates = Templates(label="<{letters}>")
    planner = ReusePlanner(
        alpha=0.5,
        token_counter=words,
        capacity_tokens=1_000,
        templates=templates,
        annotate=False,
        mode=mode,
    )
    planner.plan(REQUEST)
    copied = again(planner)
    assert copied.statistics().requests == 0
    assert copied._settings.alpha == 0.5
    assert copied._settings.capacity_tokens == 1_000
    assert copied.count_tokens("three words here") == 3
    assert copied.templates == templates
    assert copied.plan(REQUEST).request_id == "request-0"
    assert planner.statistics().requests == 1


@pytest.fixture
def no_iterator_is_copied(monkeypatch: Any) -> None:
    """Refuse what Python 3.12 warns of and 3.14 refuses itself."""

    def refuse(iterator: Any) -> Any:
        raise TypeError(f"a copy holds an {type(iterator)}")

    for kind in (itertools.count, itertools.chain, itertools.islice, itertools.accumulate):
        monkeypatch.setitem(copyreg.dispatch_table, kind, refuse)


def used_cache() -> BlockLevelCache:
    cache = BlockLevelCache(100)
    cache.serve([b"a", b"b"], [3, 4])
    return cache


@pytest.mark.usefixtures("no_iterator_is_copied")
@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "make",
    [
        used_cache,
        PrefixCacheSimulator,
        lambda: EmulatedLLM(str),
        lambda: ReuseChatModel(inner=FakeListChatModel(responses=["Yes."])),
        lambda: ReuseLLM(inner=MockLLM()),
        lambda: ReusePlanner().conversation("c"),
        lambda: CapacityTracker(ReusePlanner(), 100),
    ],
    ids=range(7),
)
def test_no_copy_holds_an_iterator_that_python_no_longer_copies(again, make):
    one = make()
    assert type(again(one)) is type(one)


def test_a_copied_cache_goes_on_where_the_original_is():
    one = used_cache()
    for again in COPIES.values():
        assert again(one).serve([b"a", b"b"], [3, 4]).cached_tokens == 7


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "one",
    [
        EngineClient("http://a", "m"),
        EnginePool("http://a", "m"),
        EmulatedEngine(),
        KVEventSync(ReusePlanner(), "tcp://127.0.0.1:1"),
        WorkflowEngine(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_holds_connections_or_threads_says_that_each_process_makes_its_own(again, one):
    message = f"{type(one).__name__} cannot be copied or pickled, .*; make one in each process"
    with pytest.raises(InvalidRequestError, match=message):
        again(one)
