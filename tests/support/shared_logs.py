"""Logs for tests of planners that share one, and what these tests ask and wait for."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ctxreuse import ContextRequest, Plan, ReusePlanner
from ctxreuse.sharing import LogRead, SharedLog

WAIT_S = 20


def asked(letters: str, **fields: Any) -> ContextRequest:
    """Return a request for blocks of about 50 tokens."""
    return ContextRequest([f"{letter} says: {letter * 200}" for letter in letters], **fields)


def order(plan: Plan) -> str:
    return "".join(block.text[0] for block in plan.blocks)


def sharing(log: SharedLog, number: int = 2, **settings: Any) -> list[ReusePlanner]:
    return [ReusePlanner(shared_log=log, **settings) for _ in range(number)]


def caught_up(*planners: ReusePlanner) -> None:
    for _ in range(2):  # one may tell while another one reads
        assert all(planner.catch_up(WAIT_S) for planner in planners)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


class MemoryLog:
    """A log in memory, which can be made to fail."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.error: Exception | None = None
        self.secret = b"a secret"

    def append(self, entries: Sequence[bytes]) -> None:
        if self.error is not None:
            raise self.error
        self.entries += entries

    def read(self, position: str, most: int) -> LogRead:
        if self.error is not None:
            raise self.error
        start = int(position or 0)
        found = self.entries[start : start + most]
        return LogRead(str(start + len(found)), found)
