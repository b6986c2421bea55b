"""Results of estimates and benchmarks: all that a report shows, in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import ctxreuse
from ctxreuse.errors import InputFileError, describe
from ctxreuse.evaluation.replay.estimate import TraceSummary
from ctxreuse.evaluation.replay.explain_plan import explain_plan
from ctxreuse.evaluation.replay.plan_file import PlannedRequest
from ctxreuse.evaluation.replay.sent_tree import TreeNode, sent_tree
from ctxreuse.evaluation.results.runs import POLICIES_PART, Run
from ctxreuse.evaluation.traces.trace_files import Corpus

_FORMAT = 1
_WORST = 10


@dataclass(frozen=True, slots=True)
class Miss:
    """A request that was computed in part again, and why; see `ctxreuse explain`."""

    request_id: str
    cause: str
    lost_tokens: int
    words: str


@dataclass(frozen=True, slots=True)
class Results:
    """What was measured.

    Attributes:
        title: What of.
        level: "blocks", where a block counts as its tokens, or "tokens", for whole prompts.
        trace: What was replayed.
        runs: Each policy with each cache; as retrieved first.
        tree: What this package's online order sent, as a prefix tree: its top levels.
        misses: The requests that lost most with it.
        bounds: For numbers of blocks a request: the share of the block tokens that had been sent
            before.
        settings: How it was measured, in words.
        notes: What a reader has to know.
        version: Of the package that measured.
    """

    title: str
    level: str
    trace: TraceSummary
    runs: tuple[Run, ...]
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
        runs: Sequence[Run],
        shown: Sequence[PlannedRequest],
        corpus: Corpus,
        **more: Any,
    ) -> Self:
        """Return results, with the tree and the misses of what one policy sent.

        Args:
            title: What was measured.
            level: "blocks" or "tokens".
            trace: What was replayed.
            runs: What came of it.
            shown: What the policy sent.
            corpus: The blocks.
            **more: Attributes that these do not say.
        """
        explained = [one.explanation for one in explain_plan(shown, corpus)]
        explained.sort(key=lambda one: -one.lost_tokens)
        return cls(
            title=title,
            level=level,
            trace=trace,
            runs=tuple(runs),
            tree=sent_tree(shown, corpus),
            misses=tuple(
                Miss(str(one.request_id), one.cause.value, one.lost_tokens, one.words)
                for one in explained[:_WORST]
                if one.lost_tokens
            ),
            **more,
        )

    def part(self, name: str = POLICIES_PART) -> list[Run]:
        """Return the runs of a part of a benchmark."""
        return [run for run in self.runs if run.part == name]

    def write(self, path: str | Path) -> None:
        """Write them as JSON.

        Raises:
            InputFileError: If the file cannot be written.
        """
        try:
            Path(path).write_text(
                json.dumps({"format": _FORMAT, **asdict(self)}) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise InputFileError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read what `write` has written.

        Raises:
            InputFileError: If the file holds no results.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputFileError(f"{path}: cannot be read: {error.strerror}") from error
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
                    "runs": tuple(map(Run.from_json, fields["runs"])),
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
