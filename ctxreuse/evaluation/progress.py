"""How measurements tell of their progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[], object]]]
"""From a task's name and its number of steps to a context whose value is called once a step."""


def no_progress(task: str, steps: int) -> AbstractContextManager[Callable[[], object]]:
    """Show nothing."""
    return nullcontext(lambda: None)
