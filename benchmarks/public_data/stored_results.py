"""Results as JSON, read by the types of their fields; errors name the place and the remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

from ctxreuse.context.checks import checked_kind
from ctxreuse.context.files import FilePath, read_whole, write_text
from ctxreuse.errors import InputFileError, InvalidRequestError, describe
from ctxreuse.measure.replay.explain_plan import TREE_DEPTH, TreeNode
from ctxreuse.measure.replay.simulate import RunBill, RunResult
from ctxreuse.measure.results.prices import Prices
from ctxreuse.measure.results.results import Results
from ctxreuse.measure.traces.json_lines import LARGEST
from ctxreuse.rules.cache_rules import DEFAULT_CACHE, CacheRules, TimeToLive

Check: TypeAlias = Callable[[str, Any], Any]
"""From the place of a value, for errors, and the value to what it stands for."""

Readers: TypeAlias = Mapping[Any, Check]
"""How some types are read, whatever their fields."""


def read_stored(path: FilePath) -> dict[str, Any]:
    """Return the JSON object of a results file."""
    checked_kind("path", path, (str, os.PathLike), "a path")
    text = read_whole(path)
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path}: no JSON: {describe(str(error))}") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise InputFileError(f"{path}: no results in format {FORMAT}; measure again")
    return stored


FORMAT = 1
"""The number of the format that is written and read."""


def write_results(results: Results, path: str | Path) -> None:
    """Write results as JSON."""
    values = asdict(replace(results, runs=(), prices=None))
    values["runs"] = list(map(run_json, results.runs))
    values["prices"] = None if results.prices is None else results.prices.as_json()
    if all(run.bill is None for run in results.runs):
        del values["cache"], values["output_tokens"]
    if not results.keep_best:
        del values["keep_best"]
    write_text(path, json.dumps({"format": FORMAT, **values}) + "\n")


def run_json(run: RunResult) -> dict[str, Any]:
    """Return what a file holds of a run: fields that are compared."""
    names = (one.name for one in fields(run) if one.compare and one.name != "bill")
    bill = {} if run.bill is None else {"bill": asdict(run.bill)}
    return {name: getattr(run, name) for name in names} | bill


def read_results(path: FilePath) -> Results:
    """Read a file of `write_results`."""
    stored = read_stored(path)
    cache = profile(f"{path}: cache", stored["cache"]) if "cache" in stored else DEFAULT_CACHE
    readers = {
        **readers_of(cache),
        CacheRules: lambda place, value: cache,
        Prices: lambda place, value: _prices(cache, place, value),
    }
    results: Results = read_fields(Results, str(path), stored, readers)
    if results.prefill_tokens_per_s == 0:
        fail(f"{path}: prefill_tokens_per_s", 0, "more than 0")
    return results


def read_as(kind: Any, place: str, value: Any, readers: Readers) -> Any:
    """Return a value as one of a type."""
    if kind in readers:
        return readers[kind](place, value)
    if kind in _SCALARS:
        return _SCALARS[kind](place, value)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:  # with None, behind one other type
        return None if value is None else read_as(parts[0], place, value, readers)
    if origin is Literal:
        return value if value in parts else fail(place, value, f"one of {', '.join(parts)}")
    if origin is tuple:
        is_open = parts[-1] is Ellipsis
        if not isinstance(value, list) or not (is_open or len(value) == len(parts)):
            fail(place, value, "a list" if is_open else f"a list of {len(parts)}")
        kinds = repeat(parts[0], len(value)) if is_open else parts
        entries = enumerate(zip(kinds, value, strict=True))
        return tuple(read_as(one, f"{place}[{n}]", entry, readers) for n, (one, entry) in entries)
    if origin is Mapping:
        pairs = json_object(place, value).items()
        return {name: read_as(parts[1], f"{place}: {name}", one, readers) for name, one in pairs}
    return read_fields(kind, place, value, readers)


def read_fields(kind: Any, place: str, value: Any, readers: Readers) -> Any:
    """Return a JSON object as a dataclass; fields that are not compared are in no file."""
    given, hints = json_object(place, value), get_type_hints(kind)
    known = {}
    for one in fields(kind):
        if one.name in given and one.compare:
            where = f"{place}: {one.name}"
            known[one.name] = read_as(hints[one.name], where, given[one.name], readers)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise InputFileError(f"{place}: {one.name} is missing; write the results again")
    return kind(**known)


# values


def fail(place: str, value: Any, words: str) -> NoReturn:
    """Say what a value should be."""
    raise InputFileError(f"{place} is {describe(value)}; it must be {words}")


def json_object(place: str, value: Any) -> dict[str, Any]:
    """Return a JSON object."""
    return value if isinstance(value, dict) else fail(place, value, "an object")


def text(place: str, value: Any) -> str:
    """Return a string."""
    return value if isinstance(value, str) else fail(place, value, "a string")


def number(place: str, value: Any) -> float:
    """Return a finite number from 0."""
    if type(value) not in (int, float) or not 0 <= value <= LARGEST:
        fail(place, value, "a finite number from 0, of at most 100 digits")
    return float(value)


def boolean(place: str, value: Any) -> bool:
    """Return true or false."""
    return value if isinstance(value, bool) else fail(place, value, "true or false")


def integer(place: str, value: Any) -> int:
    """Return an integer from 0 that numbers of any kind can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        fail(place, value, "an integer from 0, of at most 100 digits")
    return value


_SCALARS: dict[type, Check] = {str: text, bool: boolean, int: integer, float: number}


# what results consist of


def readers_of(cache: CacheRules) -> Readers:
    """Return how parts of results are read that have been measured with a cache of some rules."""
    return {
        TreeNode: partial(_tree, TREE_DEPTH),
        RunBill: partial(_run_bill, cache),
        RunResult: lambda place, value: run_result(place, value, cache),
    }


def profile(place: str, value: Any) -> CacheRules:
    """Return the rules of a cache."""
    given = json_object(place, value)
    known = {one.name: given[one.name] for one in fields(CacheRules) if one.name in given}
    lives = read_as(
        tuple[dict[str, Any], ...], f"{place}: times_to_live", given.get("times_to_live"), _OBJECTS
    )
    try:
        known["times_to_live"] = tuple(TimeToLive(**one) for one in lives)
        return CacheRules(**known)
    except (InvalidRequestError, TypeError) as error:
        raise InputFileError(f"{place}: no cache profile: {describe(str(error))}") from error


_OBJECTS: Readers = {dict[str, Any]: json_object}


def _prices(cache: CacheRules, place: str, value: Any) -> Prices:
    told: Prices = read_fields(Prices, place, value, {})
    return replace(Prices.of(place, told.as_json(), cache), derived=told.derived)


def _run_bill(cache: CacheRules, place: str, value: Any) -> RunBill:
    bill: RunBill = read_fields(RunBill, place, value, {})
    lives = [one.name for one in cache.lives]
    if not set(lives) >= bill.written.keys():
        fail(f"{place}: written", list(bill.written), f"for times to live of {lives}")
    return bill


def _tree(levels: int, place: str, value: Any) -> TreeNode:
    if not levels and json_object(place, value).get("children"):  # before they are looked at
        raise InputFileError(f"{place}: children: it must have none {TREE_DEPTH} blocks deep")
    node: TreeNode = read_fields(TreeNode, place, value, {TreeNode: partial(_tree, levels - 1)})
    return node


def run_result(place: str, value: Any, cache: CacheRules) -> RunResult:
    """Return what a policy reached with a cache of some rules."""
    readers = {RunBill: partial(_run_bill, cache)}
    run: RunResult = read_fields(RunResult, place, value, readers)
    requests = len(run.prompt_tokens)
    answered = requests if run.request_ids or run.first_token_s else 0
    for name, length in (
        ("cached_tokens", requests),
        ("request_ids", answered),
        ("first_token_s", answered),
        ("answers", answered if run.answers else 0),
    ):
        if len(getattr(run, name)) != length:
            raise InputFileError(
                f"{place}: {name} has {len(getattr(run, name)):,} entries; it must have "
                f"{length:,}, as prompt_tokens has"
            )
    for number_, (prompt, cached) in enumerate(
        zip(run.prompt_tokens, run.cached_tokens, strict=True)
    ):
        if cached > prompt:
            raise InputFileError(
                f"{place}: cached_tokens[{number_}] is {cached}; it must be at most {prompt}, "
                "the tokens of its prompt"
            )
    if run.billed.uncached < 0:
        raise InputFileError(
            f"{place}: bill: written is {run.billed.written_tokens} tokens; it must be at most "
            "those of the prompts that are not cached"
        )
    return run
