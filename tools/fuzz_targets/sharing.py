"""What stands in shared logs and in files of saved planners."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from ctxreuse import ContextRequest, ReusePlanner
from ctxreuse.sharing import LogRead
from fuzz_targets.mutation import Target, mutated_bytes

_WAIT_S = 5.0


class _Log:
    """A log in memory."""

    secret = b"a secret"

    def __init__(self) -> None:
        self.entries: list[bytes] = []

    def append(self, entries: Sequence[bytes]) -> None:
        self.entries += entries

    def read(self, position: str, most: int) -> LogRead:
        start = int(position or 0)
        found = self.entries[start : start + most]
        return LogRead(str(start + len(found)), found)


def _request(names: str) -> ContextRequest:
    return ContextRequest([f"{name} says: {name * 200}" for name in names], "Which?")


def _planned(source: Random, planner: ReusePlanner) -> None:
    for _ in range(source.randrange(1, 5)):
        plan = planner.plan(_request("".join(source.sample("abcdef", source.randrange(6)))))
        if source.random() < 0.2:
            planner.evict([plan.request_id])


def _told(source: Random) -> list[bytes]:
    log = _Log()
    planner = ReusePlanner(shared_log=log)
    _planned(source, planner)
    assert planner.catch_up(_WAIT_S)
    entries = [mutated_bytes(one, source) if source.random() < 0.7 else one for one in log.entries]
    return source.sample(entries * 2, len(entries))


def _take_in(entries: list[bytes]) -> None:
    log = _Log()
    log.entries = list(entries)
    planner = ReusePlanner(shared_log=log)
    assert planner.catch_up(_WAIT_S)
    assert planner.sharing.taken_in + planner.sharing.unreadable <= len(entries)
    assert not planner.sharing.faults
    _goes_on(planner)


def _saved(source: Random) -> dict[str, Any]:
    planner = ReusePlanner()
    _planned(source, planner)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sent"
        planner.save(path)
        data, key = path.read_bytes(), Path(folder, "sent.key").read_bytes()
    body, check = data[:-32], data[-32:]
    if source.random() < 0.5:  # by who has the key
        body = body[:16] + mutated_bytes(body[16:], source)
        check = hashlib.blake2b(body, digest_size=32, key=key, person=b"ctxreuse sent").digest()
        return {"data": body + check, "key": key}
    return {"data": mutated_bytes(data, source), "key": key}


def _load(given: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sent"
        path.write_bytes(given["data"])
        Path(folder, "sent.key").write_bytes(given["key"])
        planner = ReusePlanner.load(path, strict=True)
        assert planner.statistics().parts["logged_blocks"].entries <= len(given["data"]) // 24
        _goes_on(planner)
        planner.save(path)


def _goes_on(planner: ReusePlanner) -> None:
    plan = planner.plan(_request("fedcba"))
    assert sorted(block.text[0] for block in plan.blocks) == list("abcdef")


TARGETS = {
    "log entries": Target(_told, _take_in),
    "saved planners": Target(_saved, _load),
}
