"""Which of the single calls that run at the same time waits for which."""

import pytest

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.pipeline import leader_first
from ctxreuse.pipeline.leader_first import CallInFlight, CallsInFlight, PrefixUse


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wait that nobody ends fail by its length: a minute."""
    monkeypatch.setattr(leader_first, "LONGEST_WAIT_S", 60.0)


def use(*keys: str, marks: tuple[int, ...] = (2,), root: str = "r") -> PrefixUse:
    return PrefixUse(root, tuple(keys), marks)


def waits(call: CallInFlight) -> bool:
    """Return whether a call of another thread would wait."""
    return call._waits_for(object()) is not None


@pytest.mark.parametrize(
    "other",
    [
        use("a", "c"),
        use("a", "b", marks=(1,)),
        use("a", "b", marks=()),
        use("a", "b", root="of another system text or tenant"),
    ],
)
def test_what_reads_nothing_of_another_does_not_wait(other):
    calls = CallsInFlight()
    calls.enter(use("a", "b"))
    assert not waits(calls.enter(other))


async def test_calls_made_by_the_leader_itself_or_in_its_task_do_not_wait_for_it():
    calls = CallsInFlight()
    leader = calls.enter(use("a", "b"))
    await leader.wait(blocks=True)
    inside = calls.enter(use("a", "b"))
    await inside.wait(blocks=True)  # in the same thread: it would wait for a minute
    assert waits(calls.enter(use("a", "b")))
    calls = CallsInFlight()
    await calls.enter(use("a", "b")).wait()
    await calls.enter(use("a", "b")).wait()


def test_nobody_waits_for_a_leader_that_has_not_begun_for_long(monkeypatch):
    monkeypatch.setattr(leader_first, "LONGEST_WAIT_S", 0.0)
    calls = CallsInFlight()
    calls.enter(use("a", "b"))
    assert not waits(calls.enter(use("a", "b")))


def test_system_texts_are_prefixes_too():
    calls = CallsInFlight()
    leader = calls.enter(use("a", marks=(0,)))
    assert waits(calls.enter(use("b", marks=(0, 1))))
    leader.begin()
    assert not waits(calls.enter(use("c", marks=(0, 1))))


def test_plans_say_what_they_read_and_write():
    blocks = [ContextBlock(id=one, text=one, tokens=600) for one in "abc"]
    for cache, lengths in (("vllm", None), ("openai-before-5.6", (2, 3)), ("anthropic", ())):
        found = PrefixUse.of(ReusePlanner(cache=cache).plan(ContextRequest(blocks, "Which?")))
        assert (None if found is None else found.lengths) == lengths
    later = ContextRequest(blocks, "Which?", history=[{"role": "user", "content": "Hello."}])
    assert PrefixUse.of(ReusePlanner(cache="anthropic").plan(later)) is None
    by_hand = ReusePlanner().plan(ContextRequest(blocks, "Which?"))
    waiting = PrefixUse.of(by_hand, waits=True)
    assert waiting is not None
    assert waiting.lengths == (1, 2, 3)
