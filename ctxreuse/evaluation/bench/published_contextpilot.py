"""The published `contextpilot` package as a contender, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.errors import InvalidRequestError, describe
from ctxreuse.evaluation.bench.baselines import Contender, OrderedContexts
from ctxreuse.evaluation.replay.policies import Policy
from ctxreuse.evaluation.traces.trace_files import TraceRequest

_PROGRAM = Path(__file__).with_name("contextpilot_program.py")
_LAST_WORDS = 300


class PublishedContextPilot:
    """Orders traces with the package that an interpreter has.

    Its orders are sent through the same planner as all others, with the retriever's ranking told,
    and what a conversation shows already left out as everywhere.

    Args:
        python: The interpreter.
    """

    def __init__(self, python: str) -> None:
        self._python = python
        self._known: dict[tuple[bool, bool, tuple[object, ...]], OrderedContexts] = {}

    def contenders(self) -> list[Contender]:
        """Return it online and as a batch."""
        return [
            Contender(
                Policy(f"contextpilot, {name}", "none", "online"), partial(self._arranged, batch)
            )
            for name, batch in (("online", False), ("batch", True))
        ]

    def _arranged(
        self, batch: bool, trace: Sequence[TraceRequest], deduplicate: bool
    ) -> OrderedContexts:
        key = (batch, deduplicate, tuple((one.request_id, len(one.blocks)) for one in trace))
        if key not in self._known:
            self._known[key] = self._order(trace, batch, deduplicate)
        return self._known[key]

    def _order(
        self, trace: Sequence[TraceRequest], batch: bool, deduplicate: bool
    ) -> OrderedContexts:
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
        asked = {"batch": batch, "deduplicate": deduplicate, "requests": requests}
        answer = self._ask(asked)
        arranged, wrong = [], 0
        for place in _checked_execution(answer["execution"], len(trace)):
            traced, given = trace[place], requests[place]["blocks"]
            order = answer["orders"][place]
            if Counter(order) == Counter(given):
                ordered = tuple(blocks[number] for number in order)
                arranged.append(replace(traced, blocks=ordered, ranked=traced.blocks))
            else:
                wrong += 1
                arranged.append(traced)
        return OrderedContexts(arranged, 1e3 * answer["seconds"] / max(1, len(trace)), wrong)

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "answer.json"
            try:
                ended = subprocess.run(
                    [self._python, str(_PROGRAM), str(file)],
                    input=json.dumps(asked),
                    capture_output=True,
                    text=True,
                    check=False,
                )
            except OSError as error:
                raise InvalidRequestError(
                    f"--peer-python {describe(self._python)}: {error.strerror}"
                ) from error
            if ended.returncode or not file.exists():
                last = ended.stderr.strip().rpartition("\n")[2][-_LAST_WORDS:]
                raise InvalidRequestError(
                    f"--peer-python {describe(self._python)} ended with exit code "
                    f"{ended.returncode} ({last}); it needs the package contextpilot"
                )
            answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return answer


def _checked_execution(execution: list[int], requests: int) -> list[int]:
    """Return the order to run requests in, those added at the end that it lacks."""
    known = dict.fromkeys(place for place in execution if 0 <= place < requests)
    return [*known, *(place for place in range(requests) if place not in known)]
