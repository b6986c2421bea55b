"""Tests that are coroutines, run in an event loop whose clock jumps instead of waiting."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from virtual_clock import run_in_virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


def run_by(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Return a decorator that has a function run the coroutine that a test is."""

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def tested(*arguments: Any, **options: Any) -> None:
            run(test(*arguments, **options))

        return tested

    return decorate


virtual_time = run_by(run_in_virtual_time)
