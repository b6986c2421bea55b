"""A planner that is saved and loaded goes on where it was, and a broken file stops no service."""

import copy
import hashlib
import logging
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_logs import MemoryLog, asked, order

from ctxreuse import ReusePlanner
from ctxreuse.errors import CtxreuseError, InputFileError, InvalidRequestError
from ctxreuse.memory.tenants import Bounds, Tenants

LETTERS = "abcdef"
TENANTS = ("", "A", "\ud800")


def planned(**fields: Any) -> ReusePlanner:
    planner = ReusePlanner()
    planner.plan(asked("abc", **fields))
    return planner


def reloaded(planner: ReusePlanner, folder: Path, **options: Any) -> ReusePlanner:
    planner.save(folder / "sent")
    return ReusePlanner.load(folder / "sent", strict=True, **options)


contexts = st.builds(
    lambda letters, tenant, system: asked(letters, tenant=tenant, system=system),
    st.permutations(LETTERS).flatmap(
        lambda letters: st.integers(0, 6).map(lambda number: "".join(letters[:number]))
    ),
    st.sampled_from(TENANTS),
    st.sampled_from([None, "Be brief."]),
)
steps = st.lists(
    st.tuples(st.just("plan"), contexts, st.sampled_from(["reuse", "none", "paper"]))
    | st.tuples(st.just("batch"), st.lists(contexts, max_size=4), st.just("reuse"))
    | st.tuples(st.just("evict"), st.integers(0, 20), st.none())
    | st.tuples(st.just("trim"), st.integers(0, 20), st.integers(0, 3)),
    max_size=15,
)


def do(planner: ReusePlanner, asked_of: list[Any]) -> list[tuple[Any, int]]:
    plans: list[Any] = []
    for step, what, how in asked_of:
        if step == "plan":
            plans.append(planner.plan(what, how))
        elif step == "batch":
            plans += planner.plan_batch(what, how).plans
        elif plans:
            plan = plans[what % len(plans)]
            if step == "evict":
                planner.evict([plan.request_id], plan.request.tenant)
            else:
                planner.trim(plan.request_id, how, plan.request.tenant)
    return [(plan.messages(), plan.expected_cached_tokens) for plan in plans]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps, steps, steps, st.sampled_from([None, 300]))
def test_prompts_are_those_the_planner_before_would_send(tmp_path, first, second, third, capacity):
    before = ReusePlanner(capacity_tokens=capacity)
    do(before, first)
    after = reloaded(before, tmp_path, capacity_tokens=capacity)
    assert do(after, second) == do(before, second)
    again = reloaded(after, tmp_path, capacity_tokens=capacity)  # of what it was loaded from, too
    assert do(again, third) == do(before, third)


def test_what_it_saves_is_counted_as_the_planner_before_would_have(tmp_path):
    before = ReusePlanner()
    for letters in ("abc", "cab", "xyz", "bca"):
        before.plan(asked(letters))
    after = reloaded(before, tmp_path)
    earlier = before.savings
    for planner in (before, after):
        for letters in ("abc", "bac", "zyx", "abcx"):
            planner.plan(asked(letters))
    ours, theirs = after.savings, before.savings
    for name in ("requests", "cached_as_sent", "cached_as_retrieved"):
        assert getattr(ours, name) == getattr(theirs, name) - getattr(earlier, name) > 0


def test_requests_that_a_loaded_planner_sends_can_be_evicted_by_their_ids(tmp_path):
    after = reloaded(planned(), tmp_path)
    plan = after.plan(asked("xyz"))
    assert plan.request_id == "request-0", "ids count anew in each process"
    after.evict([plan.request_id])
    again = reloaded(after, tmp_path)
    assert again.cached_tokens(asked("xyz")) == 0
    assert again.cached_tokens(asked("abc")) > 0, "it had the same id in the process before"


@pytest.mark.parametrize("request_id", [10**5_000, True, "\ud800", "x" * 10_000], ids=range(4))
def test_any_id_of_a_request_can_be_saved_and_evicted(tmp_path, request_id):
    for planner in (ReusePlanner(), ReusePlanner(shared_log=MemoryLog())):
        planner.plan(asked("abc", request_id=request_id))
        assert planner.evict([request_id]).requests == 1
    planner = planned(request_id=request_id)
    planner.evict([request_id])
    assert reloaded(planner, tmp_path).cached_tokens(asked("abc")) == 0


@pytest.mark.parametrize("strict", [False, True])
def test_a_file_that_is_not_there_is_an_error_unless_it_may_be_missing(tmp_path, caplog, strict):
    """A wrong path would else cost all that was saved, unseen."""
    path, how = tmp_path / "sent", {"strict": strict, "annotate": False}
    with pytest.raises(InputFileError, match=r"there is no file .*missing_ok=True"):
        ReusePlanner.load(path, **how)
    with caplog.at_level(logging.INFO):
        planner = ReusePlanner.load(path, missing_ok=True, **how)
    assert planner.statistics().requests == 0
    assert "starts empty" in caplog.text
    assert planner.plan(asked("abc")).blocks
    assert order(reloaded(planner, tmp_path).plan(asked("cab"))) == "abc"


def test_settings_are_those_of_the_new_process(tmp_path):
    after = reloaded(planned(), tmp_path, annotate=False, capacity_tokens=10_000)
    plan = after.plan(asked("cab"))
    assert (order(plan), plan.order_annotation) == ("abc", None)


def test_copies_and_siblings_of_a_loaded_planner_have_seen_nothing(tmp_path):
    after = reloaded(planned(), tmp_path)
    for one in (copy.copy(after), after.sibling(), pickle.loads(pickle.dumps(after))):
        assert one.cached_tokens(asked("abc")) == 0


def test_the_files_are_for_their_owner_and_hold_no_text(tmp_path):
    planner = planned(tenant="a tenant", system="a system text", request_id="an id of it")
    planner.save(tmp_path / "sent")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sent", "sent.key"]
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = (tmp_path / "sent").read_bytes()
    block = asked("a").blocks[0]
    for text in (b"says", b"a tenant", b"a system text", b"aaaa", b"an id", block.key):
        assert text not in content


def test_what_is_saved_is_bounded_and_a_tenant_with_less_loses_nothing(tmp_path):
    planner = ReusePlanner()
    bounds = Bounds(logged_blocks=40)
    planner._planning._tenants = Tenants(None, bounds)
    planner.plan(asked("abc", tenant="small"))
    for number in range(50):
        planner.plan(asked(f"{LETTERS[number % 6]}xyz", tenant="large"))
    part = planner.statistics().parts["logged_blocks"]
    assert (36 <= part.entries <= 40, part.bound) == (True, 40)
    after = reloaded(planner, tmp_path)
    assert after.cached_tokens(asked("abc", tenant="small")) > 0
    assert 0 < after.statistics().requests < 15


BROKEN = {
    "empty": lambda data: b"",
    "another file": lambda data: b"{}" * 100,
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "a bit": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "newer": lambda data: data.replace(b"sent\n\x05", b"sent\n\x06", 1),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_an_error_in_the_log_and_an_empty_planner(tmp_path, caplog, how):
    path = tmp_path / "sent"
    planned().save(path)
    path.write_bytes(BROKEN[how](path.read_bytes()))
    planner = ReusePlanner.load(path)
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert str(path) in record.getMessage()
    assert "delete it" in record.getMessage()
    assert planner.statistics().requests == 0
    with pytest.raises(InputFileError, match=r"version 6" if how == "newer" else "delete it"):
        ReusePlanner.load(path, strict=True)
    planner.plan(asked("xyz"))
    assert order(reloaded(planner, tmp_path).plan(asked("zyx"))) == "xyz", "it is replaced"


@pytest.mark.parametrize("how", ["missing", "another", "short", "empty", "a folder", "a link"])
def test_a_key_that_does_not_fit_is_named(tmp_path, how):
    path, key = tmp_path / "sent", tmp_path / "sent.key"
    planned().save(path)
    key.unlink()
    if how == "a folder":
        key.mkdir()
    elif how == "a link":
        key.symlink_to(tmp_path / "elsewhere")
    elif how != "missing":
        key.write_bytes(bytes({"another": 32, "short": 5, "empty": 0}[how]))
    with pytest.raises(CtxreuseError, match=r"key"):
        ReusePlanner.load(path, strict=True)
    assert ReusePlanner.load(path).statistics().requests == 0
    assert (how == "missing") == (not os.path.lexists(key)), "none is made for a file that is there"


def test_a_loaded_planner_is_saved_with_its_own_key(tmp_path):
    after = reloaded(planned(), tmp_path)
    after.save(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere.key").read_bytes() == (tmp_path / "sent.key").read_bytes()
    assert ReusePlanner.load(tmp_path / "elsewhere").cached_tokens(asked("abc")) > 0
    ReusePlanner().save(tmp_path / "of another")
    with pytest.raises(InvalidRequestError, match="belongs to another planner"):
        after.save(tmp_path / "of another")


@pytest.mark.parametrize("path", [3, None, b"bytes", "a\0b", "\ud800", object()])
def test_what_is_no_path_is_refused(path):
    for call in (ReusePlanner().save, ReusePlanner.load):
        with pytest.raises(InvalidRequestError, match="path is"):
            call(path)


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    planner = ReusePlanner()
    with pytest.raises(InvalidRequestError, match="a folder that exists"):
        planner.save(tmp_path / "nowhere" / "sent")
    with pytest.raises(InputFileError, match="cannot be written"):
        planner.save(tmp_path)
    planner.save(tmp_path / "sent")
    kept = (tmp_path / "sent").read_bytes()
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(InputFileError, match="room"):
        planner.save(tmp_path / "sent")
    assert (tmp_path / "sent").read_bytes() == kept
    assert len(list(tmp_path.iterdir())) <= 4


def _full(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_planners_with_a_log_or_in_shadow_mode_say_what_to_do_instead(tmp_path):
    for options, words in (({"shared_log": MemoryLog()}, "catch_up"), ({"mode": "shadow"}, "mode")):
        with pytest.raises(InvalidRequestError, match=words):
            ReusePlanner(**options).save(tmp_path / "sent")
        with pytest.raises(InvalidRequestError, match=words):
            ReusePlanner.load(tmp_path / "sent", **options)
    assert not list(tmp_path.iterdir())


def written_with_the_key(path: Path, body: bytes) -> None:
    secret = (path.parent / f"{path.name}.key").read_bytes()
    check = hashlib.blake2b(body, digest_size=32, key=secret, person=b"ctxreuse sent").digest()
    path.write_bytes(body + check)


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 60))
def test_even_with_the_key_garbage_is_one_error(tmp_path, garbage, at, cut):
    path = tmp_path / "sent"
    planned().save(path)
    body = path.read_bytes()[:-32]
    at = 16 + at % (len(body) - 16)
    written_with_the_key(path, body[:at] + garbage + body[at + cut :])
    try:
        planner = ReusePlanner.load(path, strict=True)
    except InputFileError:
        return
    assert planner.statistics().requests <= 1 + len(garbage) // 50


def test_a_length_that_is_a_lie_allocates_nothing(tmp_path):
    planner, path = ReusePlanner(), tmp_path / "sent"
    planner.save(path)
    for lie in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f" + b"x" * 100, b"\0" * 4_000):
        written_with_the_key(path, path.read_bytes()[:16] + lie)
        with pytest.raises(InputFileError, match="damaged"):
            ReusePlanner.load(path, strict=True)
