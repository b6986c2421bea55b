"""How cases are collected, and how what they return becomes lines of a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from ctxreuse.pipeline.known_texts import known_texts

Case = Callable[[], Any]

_WIDTH = 100
_RUN = re.compile(r"(.)\1{19,}")


class Cases(dict[str, Case]):
    """The cases of an area by their names; an instance decorates them.

    Attributes:
        slow: The names of those that `--quick` leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow: set[str] = set()

    def __call__(self, case: Case) -> Case:
        """Add a case under its function's name; it begins without texts of cases before it."""

        @wraps(case)
        def alone() -> Any:
            known_texts().forget_all()
            return case()

        self[case.__name__] = alone
        return case

    def takes_long(self, case: Case) -> Case:
        """Add a case that takes seconds."""
        self.slow.add(case.__name__)
        return self(case)


def digest(value: Any) -> str:
    """Return some hexadecimal digits that stand for a text, or for any JSON value."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def as_json(value: Any) -> str:
    """Return a case's value as JSON; equal values give equal texts and no others do."""
    return _laid_out(_readable(value), "")


def _laid_out(value: Any, indent: str) -> str:
    """Return JSON with what fits on a line on one."""
    short = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or len(indent + short) <= _WIDTH:
        return short
    deeper = indent + " "
    if isinstance(value, list):
        items = [_laid_out(one, deeper) for one in value]
        begin, end = "[]"
    else:
        items = [f"{json.dumps(name)}: {_laid_out(one, deeper)}" for name, one in value.items()]
        begin, end = "{}"
    inside = ",\n".join(deeper + one for one in items)
    return f"{begin}\n{inside}\n{indent}{end}"


def _readable(value: Any) -> Any:
    """Return a JSON value with texts cut at line ends, and one letter's long runs counted.

    A text of several lines becomes a list that begins with "|".
    """
    if isinstance(value, str):
        short = _RUN.sub(lambda run: f"{run[1]}<x{len(run[0])}>", value)
        lines = short.split("\n")
        return short if len(lines) == 1 else ["|", *lines]
    if isinstance(value, dict):
        return {_checked_name(name): _readable(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(one) for one in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"a case returned {type(value).__name__}, which is no JSON")


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a case returned an object with the name {name!r}, which is no text")
    return name
