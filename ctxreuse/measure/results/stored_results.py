"""Checks all that a results file holds, once, so that whatever comes out can be shown.

Each part has the type, the range and the length that `Results.write` gives it; else the error names
the file, the place in it, the value and what would be right. Unknown fields are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar, get_args

from ctxreuse.context.cache_profile import CacheProfile, TimeToLive
from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import FilePath, read_whole
from ctxreuse.errors import InputFileError, InvalidRequestError, describe
from ctxreuse.measure.replay.estimate import TraceSummary
from ctxreuse.measure.replay.explain_plan import TREE_DEPTH, TreeNode
from ctxreuse.measure.replay.policies import TraceMode
from ctxreuse.measure.replay.run_result import Part, RunBill, RunResult
from ctxreuse.measure.traces.json_lines import LARGEST
from ctxreuse.planning.plan import Strategy

FORMAT = 1
"""The number of the format that is written and read."""

_Value = TypeVar("_Value")
Check: TypeAlias = Callable[[str, Any], _Value]
"""From the place of a value, for errors, and the value to what it stands for."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A JSON object of a results file, and its place."""

    place: str
    fields: dict[str, Any]

    def get(self, name: str, check: Check[_Value], default: Any = ...) -> _Value:
        """Return a field's value."""
        if name not in self.fields and default is ...:
            raise InputFileError(f"{self.place}: {name} is missing; write the results again")
        return check(f"{self.place}: {name}", self.fields.get(name, default))


def read_stored(path: FilePath) -> Stored:
    """Return the JSON object of a results file."""
    checked_kind("path", path, (str, os.PathLike), "a path")
    text = read_whole(path)
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: no JSON: {describe(str(error))}") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise InputFileError(
            f"{path}: no results in format {FORMAT}; write them with "
            "`ctxreuse estimate TRACE --results FILE`"
        )
    return Stored(str(path), stored)


# Values


def text(place: str, value: Any) -> str:
    """Return a string."""
    return value if isinstance(value, str) else _fail(place, value, "a string")


def boolean(place: str, value: Any) -> bool:
    """Return true or false."""
    return value if isinstance(value, bool) else _fail(place, value, "true or false")


def integer(place: str, value: Any) -> int:
    """Return an integer from 0 that numbers of any kind can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        _fail(place, value, "an integer from 0, of at most 100 digits")
    return value


def number(place: str, value: Any) -> float:
    """Return a finite number from 0."""
    if isinstance(value, float) and 0 <= value <= LARGEST:
        return value
    if not isinstance(value, int):
        _fail(place, value, "a finite number from 0")
    return float(integer(place, value))


def positive(place: str, value: Any) -> float:
    """Return a finite number above 0."""
    return known if (known := number(place, value)) else _fail(place, value, "more than 0")


def share(place: str, value: Any) -> float:
    """Return a number from 0 to 1."""
    return known if (known := number(place, value)) <= 1 else _fail(place, value, "from 0 to 1")


def optional(check: Check[_Value]) -> Check[_Value | None]:
    """Return a check that lets null through."""
    return lambda place, value: None if value is None else check(place, value)


def one_of(*names: str) -> Check[str]:
    """Return a check for one of some names."""
    words = f"one of {', '.join(names)}"
    return lambda place, value: value if value in names else _fail(place, value, words)


def each(check: Check[_Value]) -> Check[tuple[_Value, ...]]:
    """Return a check for a list whose entries all pass a check."""

    def checked(place: str, value: Any) -> tuple[_Value, ...]:
        entries = value if isinstance(value, list) else _fail(place, value, "a list")
        return tuple(check(f"{place}[{number}]", entry) for number, entry in enumerate(entries))

    return checked


def row(*checks: Check[Any]) -> Check[tuple[Any, ...]]:
    """Return a check for a list with one entry a check."""

    def checked(place: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(checks):
            _fail(place, value, f"a list of {len(checks)}")
        pairs = enumerate(zip(checks, value, strict=True))
        return tuple(check(f"{place}[{number}]", entry) for number, (check, entry) in pairs)

    return checked


def stored_object(place: str, value: Any) -> Stored:
    """Return a JSON object."""
    return Stored(place, value if isinstance(value, dict) else _fail(place, value, "an object"))


def _fail(place: str, value: Any, words: str) -> NoReturn:
    raise InputFileError(f"{place} is {describe(value)}; it must be {words}")


# What results consist of


def cache(place: str, value: Any) -> CacheProfile:
    """Return the rules of a cache."""
    stored = stored_object(place, value)
    given = {one.name: stored.fields[one.name] for one in fields(CacheProfile) if one.name in value}
    lives = stored.get(
        "times_to_live", each(lambda place, value: stored_object(place, value).fields)
    )
    try:
        given["times_to_live"] = tuple(TimeToLive(**one) for one in lives)
        return CacheProfile(**given)
    except (InvalidRequestError, TypeError) as error:
        raise InputFileError(f"{place}: no cache profile: {describe(str(error))}") from error


def run_bill(place: str, value: Any, cache: CacheProfile | None = None) -> RunBill:
    """Return what a hosted cache charges for a run."""
    stored = stored_object(place, value)
    written = stored_object(f"{place}: written", stored.fields.get("written"))
    lives = [one.name for one in cache.times_to_live] if cache is not None else written.fields
    if not set(lives) >= written.fields.keys():
        _fail(f"{place}: written", list(written.fields), f"for times to live of {lives}")
    return RunBill(
        {life: written.get(life, integer) for life in written.fields},
        stored.get("never_read", integer),
        stored.get("pays_from", optional(integer)),
    )


def summary(place: str, value: Any) -> TraceSummary:
    """Return the summary of a trace."""
    stored = stored_object(place, value)
    numbers = {one.name: stored.get(one.name, integer) for one in fields(TraceSummary)}
    if numbers["repeated_tokens"] > numbers["block_tokens"]:
        raise InputFileError(
            f"{place}: repeated_tokens is {numbers['repeated_tokens']}; "
            f"it must be at most block_tokens, {numbers['block_tokens']}"
        )
    return TraceSummary(**numbers)


def tree(place: str, value: Any) -> TreeNode:
    """Return a prefix tree."""
    return _node(place, value, TREE_DEPTH)


def _node(place: str, value: Any, levels: int) -> TreeNode:
    stored = stored_object(place, value)
    if not levels and stored.fields.get("children"):  # before they are looked at: they may nest on
        raise InputFileError(f"{place}: children: it must have none {TREE_DEPTH} blocks deep")
    children = stored.get("children", each(lambda place, value: _node(place, value, levels - 1)))
    node = TreeNode(
        name=stored.get("name", text),
        requests=stored.get("requests", integer),
        sent_tokens=stored.get("sent_tokens", integer),
        children=children,
        label=stored.get("label", text, ""),
    )
    for name in ("requests", "sent_tokens"):
        if sum(getattr(child, name) for child in children) > getattr(node, name):
            raise InputFileError(
                f"{place}: {name} is {getattr(node, name)}; it must be at least its children's"
            )
    return node


def run_result(place: str, value: Any, cache: CacheProfile | None = None) -> RunResult:
    """Return what a policy reached; with a cache, only what it can have charged."""
    stored = stored_object(place, value)
    run = RunResult(
        policy=stored.get("policy", text),
        strategy=stored.get("strategy", one_of(*get_args(Strategy))),
        mode=stored.get("mode", one_of(*get_args(TraceMode))),
        deduplicated=stored.get("deduplicated", boolean),
        capacity_tokens=stored.get("capacity_tokens", optional(integer)),
        planning_ms=stored.get("planning_ms", number),
        prompt_tokens=stored.get("prompt_tokens", each(integer)),
        cached_tokens=stored.get("cached_tokens", each(integer)),
        part=stored.get("part", text, Part.policies),
        k=stored.get("k", optional(integer), None),
        sessions=stored.get("sessions", optional(integer), None),
        workers=stored.get("workers", integer, 1),
        request_ids=stored.get("request_ids", each(text), []),
        first_token_s=stored.get("first_token_s", each(number), []),
        answers=stored.get("answers", each(text), []),
        failures=stored.get("failures", integer, 0),
        word_tokens=stored.get("word_tokens", integer, 0),
        bill=stored.get("bill", optional(partial(run_bill, cache=cache)), None),
    )
    _check_lengths(place, run)
    return run


def _check_lengths(place: str, run: RunResult) -> None:
    requests = len(run.prompt_tokens)
    answered = requests if run.request_ids or run.first_token_s else 0
    lists: Sequence[tuple[str, Sequence[object], int]] = (
        ("cached_tokens", run.cached_tokens, requests),
        ("request_ids", run.request_ids, answered),
        ("first_token_s", run.first_token_s, answered),
        ("answers", run.answers, answered if run.answers else 0),
    )
    for name, values, length in lists:
        if len(values) != length:
            raise InputFileError(
                f"{place}: {name} has {len(values):,} entries; it must have {length:,}, as "
                "prompt_tokens has"
            )
    for number, (prompt, cached) in enumerate(
        zip(run.prompt_tokens, run.cached_tokens, strict=True)
    ):
        if cached > prompt:
            raise InputFileError(
                f"{place}: cached_tokens[{number}] is {cached}; it must be at most {prompt}, "
                "the tokens of its prompt"
            )
    if run.billed.uncached < 0:
        raise InputFileError(
            f"{place}: bill: written is {run.billed.written_tokens} tokens; it must be at most "
            "those of the prompts that are not cached"
        )
