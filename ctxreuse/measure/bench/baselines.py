"""Policies of others that a benchmark compares: the frameworks', and the published contextpilot."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.measure.plugins import (
    BASELINES,
    NotInstalledError,
    naming_what_is_missing,
    registered,
)
from ctxreuse.measure.replay.policies import Policy, Reorder, ReorderedTrace
from ctxreuse.measure.traces.trace_files import TraceRequest

_PROGRAM = Path(__file__).with_name("contextpilot_program.py")
_LONGEST_ERROR = 300

ReorderBlocks: TypeAlias = Callable[[Sequence[ContextBlock]], Sequence[ContextBlock]]


def framework_policies(missing: list[str]) -> Iterator[Policy]:
    """Yield the frameworks' own orders, such as `LongContextReorder`."""
    for name, entry in registered(BASELINES).items():
        title = name.replace(".", " ")
        try:
            with naming_what_is_missing():
                reorder = entry.load()()
        except NotInstalledError as error:
            missing.append(f"{title} took no part: pip install {error.package}")
            continue
        yield Policy(title, "none", "online", reorder=_each(reorder))


def _each(reorder_blocks: ReorderBlocks) -> Reorder:
    def reorder(trace: Sequence[TraceRequest], deduplicate: bool) -> ReorderedTrace:
        started = time.perf_counter()
        requests = [replace(one, blocks=tuple(reorder_blocks(one.blocks))) for one in trace]
        planning_s = time.perf_counter() - started
        return ReorderedTrace(requests, 1e3 * planning_s / max(1, len(trace)))

    return reorder


class PublishedContextPilot:
    """Orders traces with the package `contextpilot`, in a process of its own interpreter."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._known: dict[tuple[bool, bool, tuple[object, ...]], ReorderedTrace] = {}

    def policies(self) -> list[Policy]:
        """Return its two policies: online, and as a batch."""
        return [
            Policy(
                f"contextpilot, {name}", "none", "online", reorder=partial(self._reordered, batch)
            )
            for name, batch in (("online", False), ("batch", True))
        ]

    def _reordered(
        self, batch: bool, trace: Sequence[TraceRequest], deduplicate: bool
    ) -> ReorderedTrace:
        key = (batch, deduplicate, tuple((one.request_id, len(one.blocks)) for one in trace))
        if key not in self._known:
            self._known[key] = self._order(trace, batch, deduplicate)
        return self._known[key]

    def _order(
        self, trace: Sequence[TraceRequest], batch: bool, deduplicate: bool
    ) -> ReorderedTrace:
        numbers: dict[bytes, int] = {}
        blocks: list[ContextBlock] = []
        requests = []
        for traced in trace:
            for block in traced.blocks:
                if numbers.setdefault(block.key, len(blocks)) == len(blocks):
                    blocks.append(block)
            conversation = traced.conversation_id
            requests.append(
                {
                    "blocks": [numbers[block.key] for block in traced.blocks],
                    "conversation": None if conversation is None else str(conversation),
                }
            )
        question = {"batch": batch, "deduplicate": deduplicate, "requests": requests}
        answer = self._run(question)
        reordered, wrong = [], 0
        for place in _checked_execution(answer["execution"], len(trace)):
            traced, given = trace[place], requests[place]["blocks"]
            order = answer["orders"][place]
            if Counter(order) == Counter(given):
                ordered = tuple(blocks[number] for number in order)
                reordered.append(replace(traced, blocks=ordered, ranked=traced.blocks))
            else:
                wrong += 1
                reordered.append(traced)
        return ReorderedTrace(reordered, 1e3 * answer["seconds"] / max(1, len(trace)), wrong)

    def _run(self, question: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "answer.json"
            try:
                done = subprocess.run(
                    [self._python, str(_PROGRAM), str(file)],
                    input=json.dumps(question),
                    capture_output=True,
                    text=True,
                    check=False,
                )
            except OSError as error:
                raise InvalidRequestError(
                    f"--contextpilot-python {describe(self._python)}: {error.strerror}"
                ) from error
            if done.returncode or not file.exists():
                last = done.stderr.strip().rpartition("\n")[2][-_LONGEST_ERROR:]
                raise InvalidRequestError(
                    f"--contextpilot-python {describe(self._python)} ended with exit code "
                    f"{done.returncode} ({last}); it needs the package contextpilot"
                )
            answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return answer


def _checked_execution(execution: list[int], requests: int) -> list[int]:
    """Return the order to run requests in; those that it lacks are added at the end."""
    known = dict.fromkeys(place for place in execution if 0 <= place < requests)
    return [*known, *(place for place in range(requests) if place not in known)]
