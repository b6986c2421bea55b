"""Runs of a benchmark that are kept in a file as they end, so that a stopped one goes on there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ctxreuse.context.files import bounded_lines, file_errors
from ctxreuse.errors import BatchTooLargeError, InputFileError
from ctxreuse.measure.replay.simulate import Run, RunResult
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules
from public_data.stored_results import run_json, run_result

Kept: TypeAlias = RunResult | BatchTooLargeError
_Key: TypeAlias = tuple[object, ...]


class KeptRuns:
    """Keeps the results of runs in a file of JSON lines, each as soon as it is there."""

    def __init__(
        self, path: Path, benchmark: Mapping[str, object], cache: CacheRules = DEFAULT_CACHE
    ) -> None:
        self.path, self._cache = path, cache
        self._name = hashlib.blake2b(
            json.dumps(benchmark, sort_keys=True, default=str).encode(), digest_size=16
        ).hexdigest()
        self._runs: dict[_Key, Kept] = dict(self._stored())
        if not self._runs:
            self._append({"benchmark": self._name}, os.O_TRUNC)

    def __len__(self) -> int:
        """Return how many runs are kept."""
        return len(self._runs)

    def get(self, run: Run) -> Kept | None:
        """Return what a run has come to; None if it is not known."""
        return self._runs.get(_key(run))

    def put(self, run: Run, result: Kept) -> None:
        """Keep what a run has come to."""
        self._runs[_key(run)] = result
        key = list(_key(run))
        if isinstance(result, RunResult):
            self._append({"key": key, "run": run_json(result), "notes": result.notes})
        else:
            self._append({"key": key, "too_large": str(result)})

    def _append(self, line: Mapping[str, Any], flags: int = os.O_APPEND) -> None:
        with file_errors(self.path, "written"):
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(b"\n" + json.dumps(line).encode())  # half a line ends here

    def _stored(self) -> Iterator[tuple[_Key, Kept]]:
        if not self.path.is_file():
            return
        with file_errors(self.path, "read"), open(self.path, "rb") as stream:
            is_same = False
            for line in bounded_lines(stream, self.path):
                try:
                    fields = json.loads(line)
                    if "benchmark" in fields:
                        is_same = fields["benchmark"] == self._name
                    elif is_same and "run" in fields:
                        run = run_result(str(self.path), fields["run"], self._cache)
                        notes = tuple(map(str, fields["notes"]))
                        yield tuple(fields["key"]), replace(run, notes=notes)
                    elif is_same:
                        yield tuple(fields["key"]), BatchTooLargeError(fields["too_large"])
                except (ValueError, TypeError, KeyError, RecursionError, InputFileError):
                    continue  # half of a line, or another program's; the run is measured again


def _key(run: Run) -> _Key:
    part, policy = str(run.part), run.policy.name
    return part, policy, run.deduplicate, run.capacity_tokens, run.k, run.sessions
