"""Results of estimates and benchmarks: all that a report shows, in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import ctxreuse
from ctxreuse.cache import CacheUsage
from ctxreuse.errors import InputFileError, describe
from ctxreuse.evaluation.estimate import TraceSummary
from ctxreuse.evaluation.explain import explain_plan
from ctxreuse.evaluation.outcomes import Outcome
from ctxreuse.evaluation.sent_tree import TreeNode, sent_tree
from ctxreuse.evaluation.traces import Corpus

_FORMAT = 1
_WORST = 10


@dataclass(frozen=True, slots=True)
class Run:
    """One policy, once through the requests.

    Attributes:
        policy: Its name.
        strategy: The planner's strategy.
        mode: "online" or "offline".
        deduplicated: Whether blocks that a conversation shows already were left out.
        capacity_tokens: What the cache held; None is unlimited.
        planning_ms: Planning time a request, in milliseconds.
        prompt_tokens: Tokens of each request, in the order in which they ran.
        cached_tokens: Those of them that came from the cache.
    """

    policy: str
    strategy: str
    mode: str
    deduplicated: bool
    capacity_tokens: int | None
    planning_ms: float
    prompt_tokens: tuple[int, ...]
    cached_tokens: tuple[int, ...]

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        """Return the result of a simulated run."""
        return cls(
            policy=outcome.policy.name,
            strategy=outcome.policy.strategy,
            mode=outcome.policy.mode,
            deduplicated=outcome.deduplicated,
            capacity_tokens=outcome.capacity_tokens,
            planning_ms=round(outcome.planning_ms, 4),
            prompt_tokens=tuple(usage.prompt_tokens for usage in outcome.usages),
            cached_tokens=tuple(usage.cached_tokens for usage in outcome.usages),
        )

    @property
    def usages(self) -> list[CacheUsage]:
        """What each request found in the cache."""
        return list(map(CacheUsage, self.prompt_tokens, self.cached_tokens))

    @property
    def total(self) -> CacheUsage:
        """The usage of all requests together."""
        return CacheUsage(sum(self.prompt_tokens), sum(self.cached_tokens))


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
        version: Of the package that measured.
    """

    title: str
    level: str
    trace: TraceSummary
    runs: tuple[Run, ...]
    tree: TreeNode
    misses: tuple[Miss, ...]
    version: str = ctxreuse.__version__

    @classmethod
    def of(
        cls,
        title: str,
        level: str,
        trace: TraceSummary,
        outcomes: Sequence[Outcome],
        corpus: Corpus,
    ) -> Self:
        """Return the results of an estimate.

        The tree and the misses are those of this package's online order with an unlimited cache.
        """
        shown = [
            one
            for one in outcomes
            if (one.policy.strategy, one.policy.mode) == ("reuse", "online")
            and one.capacity_tokens is None
        ][-1]
        explained = [one.explanation for one in explain_plan(shown.planned, corpus)]
        explained.sort(key=lambda one: -one.lost_tokens)
        return cls(
            title=title,
            level=level,
            trace=trace,
            runs=tuple(map(Run.of, outcomes)),
            tree=sent_tree(shown.planned, corpus),
            misses=tuple(
                Miss(str(one.request_id), one.cause.value, one.lost_tokens, one.words)
                for one in explained[:_WORST]
                if one.lost_tokens
            ),
        )

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
        except ValueError as error:
            raise InputFileError(f"{path}: no JSON: {describe(str(error))}") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise InputFileError(
                f"{path}: no results in format {_FORMAT}; write them with "
                "`ctxreuse estimate TRACE --results FILE`"
            )
        try:
            return cls(
                **fields
                | {
                    "trace": TraceSummary(**fields["trace"]),
                    "runs": tuple(map(_run, fields["runs"])),
                    "tree": TreeNode.from_json(fields["tree"]),
                    "misses": tuple(Miss(**miss) for miss in fields["misses"]),
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputFileError(
                f"{path}: results with a part missing or broken: {error}"
            ) from error


def _run(fields: dict[str, Any]) -> Run:
    tokens = {name: tuple(fields[name]) for name in ("prompt_tokens", "cached_tokens")}
    return Run(**fields | tokens)
