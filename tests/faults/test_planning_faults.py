"""Faults in planning, counting and tracing: programs go on as they do without us."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fault_programs import ALL_PROGRAMS, Broken, assert_profits, broken

from ctxreuse import ReusePlanner

ASKED = ("abc", "cab", "bca", "abc")


class Switch:
    """A function of the user's that fails while it is told to."""

    def __init__(self) -> None:
        self.is_on = False

    def check(self) -> None:
        if self.is_on:
            raise LookupError("says: a text of a user's document")

    def count_tokens(self, text: str) -> int:
        self.check()
        return len(text) // 4

    def tenant_class(self, tenant: str) -> str:
        self.check()
        return "all"

    def planned(self, *_: Any) -> None:
        self.check()

    answered = planned


@contextmanager
def switched(switch: Switch) -> Iterator[None]:
    switch.is_on = True
    yield
    switch.is_on = False


Begin = Callable[[ReusePlanner, Switch], Any]
FAULTS: dict[str, tuple[dict[str, str], Begin]] = {
    "planning": ({}, lambda planner, switch: broken(planner, "_planning")),
    "counting": ({}, lambda planner, switch: broken(planner, "_meter")),
    "token counter": ({"token_counter": "count_tokens"}, lambda planner, switch: switched(switch)),
    "tenant class": ({"tenant_class": "tenant_class"}, lambda planner, switch: switched(switch)),
    "tracing": ({"tracing": ""}, lambda planner, switch: switched(switch)),
}
"""What fails: the planner's settings with methods of a `Switch`, and how the fault begins."""


def planner_with(settings: dict[str, str], switch: Switch) -> ReusePlanner:
    given = {name: getattr(switch, one) if one else switch for name, one in settings.items()}
    return ReusePlanner(**given)


@pytest.mark.parametrize("kind", ALL_PROGRAMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_goes_on_as_without_us_and_profits_again(kind, fault, caplog):
    settings, begin = FAULTS[fault]
    switch = Switch()
    wrapped = ALL_PROGRAMS[kind](planner_with(settings, switch))
    plain, planner = ALL_PROGRAMS[kind](None), wrapped.planner
    assert planner is not None
    with caplog.at_level(logging.WARNING), begin(planner, switch):
        for letters in ASKED:
            assert wrapped.ask(letters) == plain.ask(letters)
    lines = [one.getMessage() for one in caplog.records if one.name == "ctxreuse"]
    is_told = kind != "planner and client" or fault not in ("planning", "token counter")
    # what a retriever orders is not counted
    is_told &= kind != "LangChain chain, its retriever" or fault not in ("counting", "tenant class")
    assert lines or not is_told
    assert len(lines) == len(set(lines)), "each part says it once"
    assert "says: " not in caplog.text
    if fault in ("planning", "token counter"):  # what was sent as given was not planned
        assert not planner.prompt_records.counts().get("planned")
    caplog.clear()
    assert_profits(wrapped)
    assert not caplog.records


@pytest.mark.parametrize("kind", ALL_PROGRAMS)
def test_where_the_engine_fails_too_its_error_is_what_it_is_without_us(kind):
    """An answered prompt, or one that failed, is taken back: that may fail as planning does."""
    ours, plain = ALL_PROGRAMS[kind](ReusePlanner()), ALL_PROGRAMS[kind](None)
    assert ours.planner is not None

    def break_planner(request: Any) -> None:
        ours.planner._planning = Broken()
        raise httpx.ConnectError("no", request=request)

    def fail(request: Any) -> None:
        raise httpx.ConnectError("no", request=request)

    ours.engine.fault, plain.engine.fault = break_planner, fail
    assert ours.ask("abc") == plain.ask("abc")
    ours.engine.fault = plain.engine.fault = None
    assert ours.ask("cab") == plain.ask("cab")
