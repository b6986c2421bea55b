"""How many examples of a property are drawn: few in `make test`, many in `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

_LEAST = 5
SOME_OR_ALL = [pytest.param(9, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
"""Of how many cases of a table a test takes one: of some in `make test`, all in the other."""


def examples(number: int, **more: Any) -> settings:
    """Return settings with as much of a number of examples as the profile in use draws of 100.

    Args:
        number: How many tell enough of a change; more of what is rare, fewer of what takes long.
        **more: Further settings.
    """
    drawn = number * settings().max_examples // 100
    return settings(max_examples=max(_LEAST, drawn), **more)


def slow_unless(names: Iterable[str], *fast: str) -> list[Any]:
    """Return parameters of a test, of which `make test` takes some and the other half the rest."""
    return [pytest.param(one, marks=() if one in fast else pytest.mark.slow) for one in names]
