"""Results of estimates and benchmarks: all that a report shows, in one JSON file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import ctxreuse
from ctxreuse.errors import InputFileError, describe
from ctxreuse.evaluation.replay.estimate import TraceSummary
from ctxreuse.evaluation.replay.explain_plan import explain_plan
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.policies import Part
from ctxreuse.evaluation.replay.run_result import RunResult
from ctxreuse.evaluation.replay.sent_tree import TreeNode, sent_tree
from ctxreuse.evaluation.traces.json_lines import file_errors
from ctxreuse.evaluation.traces.trace_files import Corpus

_FORMAT = 1
_WORST = 10
_CSV = (
    "part",
    "policy",
    "deduplicated",
    "capacity_tokens",
    "k",
    "sessions",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "prefilled_tokens",
    "hit_ratio",
    "planning_ms",
    "first_token_p50_s",
    "first_token_p95_s",
    "scored",
    "f1",
    "exact_match",
    "failures",
)

Run = RunResult
"""The former name of `RunResult`."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A request of which tokens were computed again, and why; see `ctxreuse explain`."""

    request_id: str
    cause: str
    lost_tokens: int
    words: str


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured.

    Attributes:
        title: Name of what was measured.
        level: "blocks", where a block counts as its tokens, or "tokens", for whole prompts.
        trace: Summary of the trace.
        runs: Each policy with each cache; as retrieved first.
        tree: The prompts of this package's online order, as a prefix tree: its top levels.
        misses: The requests that lost most with it.
        bounds: For numbers of blocks a request: the share of the block tokens that had been sent
            before.
        settings: How it was measured, in words.
        notes: What a reader has to know.
        version: The measuring package's version.
    """

    title: str
    level: str
    trace: TraceSummary
    runs: tuple[RunResult, ...]
    tree: TreeNode
    misses: tuple[Miss, ...]
    bounds: tuple[tuple[int, float], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    version: str = ctxreuse.__version__

    @classmethod
    def of(
        cls,
        title: str,
        level: str,
        trace: TraceSummary,
        runs: Sequence[RunResult],
        shown: Sequence[PlannedRequest],
        corpus: Corpus,
        **more: Any,
    ) -> Self:
        """Return results, with the tree and the misses of one policy's prompts.

        Args:
            title: Name of what was measured.
            level: "blocks" or "tokens".
            trace: Summary of the trace.
            runs: What was measured; without their plans, which files do not hold.
            shown: The policy's plans.
            corpus: The blocks.
            **more: Further attributes.
        """
        explained = [one.explanation for one in explain_plan(shown, corpus)]
        explained.sort(key=lambda one: -one.lost_tokens)
        return cls(
            title=title,
            level=level,
            trace=trace,
            runs=tuple(run.without_plans() for run in runs),
            tree=sent_tree(shown, corpus),
            misses=tuple(
                Miss(str(one.request_id), one.cause.value, one.lost_tokens, one.words)
                for one in explained[:_WORST]
                if one.lost_tokens
            ),
            **more,
        )

    def part(self, name: str = Part.policies) -> list[RunResult]:
        """Return the runs of a part of a benchmark."""
        return [run for run in self.runs if run.part == name]

    def write(self, path: str | Path) -> None:
        """Write them as JSON.

        Raises:
            InputFileError: The file cannot be written.
        """
        runs = [run.as_json() for run in self.runs]
        fields = {"format": _FORMAT, **asdict(replace(self, runs=())), "runs": runs}
        with file_errors(path, "written"):
            Path(path).write_text(json.dumps(fields) + "\n", encoding="utf-8")

    def write_csv(self, path: str | Path) -> None:
        """Write one line a run.

        Raises:
            InputFileError: The file cannot be written.
        """
        with (
            file_errors(path, "written"),
            Path(path).open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(_CSV)
            writer.writerows(map(_csv_row, self.runs))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file of `write`.

        Raises:
            InputFileError: The file holds no results.
        """
        with file_errors(path, "read"):
            text = Path(path).read_bytes()
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputFileError(f"{path}: no JSON: {describe(str(error))}") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise InputFileError(
                f"{path}: no results in format {_FORMAT}; write them with "
                "`ctxreuse estimate TRACE --results FILE` or `ctxreuse bench`"
            )
        try:
            return cls(
                **fields
                | {
                    "trace": TraceSummary(**fields["trace"]),
                    "runs": tuple(map(RunResult.from_json, fields["runs"])),
                    "tree": TreeNode.from_json(fields["tree"]),
                    "misses": tuple(Miss(**miss) for miss in fields["misses"]),
                    "bounds": tuple((int(k), float(share)) for k, share in fields["bounds"]),
                    "settings": tuple((str(name), str(it)) for name, it in fields["settings"]),
                    "notes": tuple(map(str, fields["notes"])),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputFileError(
                f"{path}: results with a part missing or broken: {error}"
            ) from error


def _csv_row(run: RunResult) -> list[object]:
    total = run.total
    seconds = map(run.first_token_percentile_s, (50, 95)) if run.first_token_s else ()
    means = (run.mean_f1, run.mean_exact_match) if run.scores else ()
    return [
        run.part,
        run.policy,
        run.deduplicated,
        run.capacity_tokens,
        run.k,
        run.sessions,
        len(run.prompt_tokens),
        total.prompt_tokens,
        total.cached_tokens,
        total.prefilled_tokens,
        round(total.hit_ratio, 6),
        run.planning_ms,
        *([round(one, 6) for one in seconds] or (None, None)),
        len(run.scores),
        *([round(one, 6) for one in means] or (None, None)),
        run.failures,
    ]
