"""The published package `contextpilot`, run by a Python that has it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ctxreuse.context.blocks import ContextBlock, ContextRequest
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.measure.replay.policies import MeasuredPolicy
from ctxreuse.measure.replay.simulate import Run
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.planner import ReusePlanner, Strategy
from ctxreuse.planning.plan import Plan
from ctxreuse.policy import Policy
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from public_data.peers.frameworks import PeerPolicy, ReorderedTrace

_PROGRAM = Path(__file__).with_name("contextpilot_program.py")
_LONGEST_ERROR = 300

_Rankings: TypeAlias = dict[tuple[str | int, int], Sequence[ContextBlock]]
"""By request and number of blocks: the blocks as the retriever ranked them."""


class _RankingPlanner(ReusePlanner):
    """Plans requests as they come, and says how the retriever ranked their blocks."""

    rankings: _Rankings

    def plan(
        self,
        request: ContextRequest,
        strategy: Strategy | Policy = "none",
        *,
        deduplicate: bool | None = None,
        now: float | None = None,
        primes: bool = False,
    ) -> Plan:
        """Plan one request; see `ReusePlanner.plan`."""
        plan = super().plan(request, strategy, deduplicate=deduplicate, now=now, primes=primes)
        ranked = self.rankings.get((plan.request_id, len(request.blocks)), request.blocks)
        keys = list(dict.fromkeys(block.key for block in ranked))
        sent = [block.key for block in plan.blocks]
        best = plan.templates.most_ranked
        if plan.request.history or keys[:best] == sent[:best]:
            return plan
        words = plan.templates.order_annotation([plan.label_of[key] for key in keys])
        return plan.with_order_annotation(words)


@dataclass(frozen=True)
class _PilotPolicy(PeerPolicy):
    pilot: PublishedContextPilot | None = None
    is_batch: bool = False

    def planner(
        self, *, deduplicate: bool, capacity_tokens: int | None, cache: CacheRules = DEFAULT_CACHE
    ) -> ReusePlanner:
        assert self.pilot is not None
        planner = _RankingPlanner(
            labels=self.labels(deduplicate=deduplicate),
            deduplicate=deduplicate,
            capacity_tokens=capacity_tokens,
            cache=cache,
        )
        planner.rankings = self.pilot.rankings
        return planner

    def reordered(self, run: Run) -> ReorderedTrace:
        assert self.pilot is not None
        return self.pilot.reordered(run.trace, self.is_batch, run.deduplicate)


class PublishedContextPilot:
    """Orders traces with the package, in a process of its own interpreter."""

    def __init__(self, python: str) -> None:
        self.rankings: _Rankings = {}
        self._python = python
        self._known: dict[tuple[bool, bool, tuple[object, ...]], ReorderedTrace] = {}

    def policies(self) -> list[MeasuredPolicy]:
        """Return its two policies: online, and as a batch."""
        names = (("contextpilot, online", False), ("contextpilot, batch", True))
        return [_PilotPolicy(name, "none", "online", pilot=self, is_batch=b) for name, b in names]

    def reordered(
        self, trace: Sequence[TraceRequest], is_batch: bool, deduplicate: bool
    ) -> ReorderedTrace:
        """Return a trace in the package's order; one that was asked before is known."""
        key = is_batch, deduplicate, tuple((one.request_id, len(one.blocks)) for one in trace)
        if key not in self._known:
            self._known[key] = self._order(trace, is_batch, deduplicate)
        return self._known[key]

    def _order(
        self, trace: Sequence[TraceRequest], is_batch: bool, deduplicate: bool
    ) -> ReorderedTrace:
        numbers: dict[bytes, int] = {}
        blocks: list[ContextBlock] = []
        requests: list[dict[str, Any]] = []
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
        answer = self._run({"batch": is_batch, "deduplicate": deduplicate, "requests": requests})
        reordered, wrong = [], 0
        for place in _checked_execution(answer["execution"], len(trace)):
            traced, order = trace[place], answer["orders"][place]
            if Counter(order) == Counter(requests[place]["blocks"]):
                self.rankings[traced.request_id, len(traced.blocks)] = traced.blocks
                traced = replace(traced, blocks=tuple(blocks[number] for number in order))
            else:
                wrong += 1
            reordered.append(traced)
        return ReorderedTrace(reordered, 1e3 * answer["seconds"] / max(1, len(trace)), wrong)

    def _run(self, question: Mapping[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "answer.json"
            named = f"--contextpilot-python {describe(self._python)}"
            try:
                done = subprocess.run(
                    [self._python, str(_PROGRAM), str(file)],
                    input=json.dumps(question),
                    capture_output=True,
                    text=True,
                    check=False,
                )
            except OSError as error:
                raise InvalidRequestError(f"{named}: {error.strerror}") from error
            if done.returncode or not file.exists():
                last = done.stderr.strip().rpartition("\n")[2][-_LONGEST_ERROR:]
                raise InvalidRequestError(
                    f"{named} ended with exit code {done.returncode} ({last}); it needs the "
                    "package contextpilot"
                )
            answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return answer


def _checked_execution(execution: list[int], requests: int) -> list[int]:
    """Return the order to run requests in; those that it lacks are added at the end."""
    known = dict.fromkeys(place for place in execution if 0 <= place < requests)
    return [*known, *(place for place in range(requests) if place not in known)]
