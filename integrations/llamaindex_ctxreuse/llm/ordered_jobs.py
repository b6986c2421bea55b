"""Jobs that start in the order given, some at a time, progress bar or not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from ctxreuse.errors import InvalidRequestError, describe

_Result = TypeVar("_Result")
Job = Callable[[], Awaitable[_Result]]


async def run_in_order(
    jobs: Sequence[Job[_Result]],
    workers: int,
    progress: str | None = None,
    return_exceptions: bool = False,
) -> list[_Result | Exception]:
    """Return the results of jobs that were started in order.

    Args:
        jobs: Functions that start a job.
        workers: How many run at a time.
        progress: What the progress bar says; None shows none.
        return_exceptions: Whether a failed job's exception becomes its result. Else the first one
            is raised, running jobs are cancelled, and the others never start.
    """
    results: dict[int, _Result | Exception] = {}
    waiting = iter(enumerate(jobs))
    with tqdm(total=len(jobs), desc=progress, disable=progress is None) as bar:

        async def work(mine: Iterator[tuple[int, Job[_Result]]]) -> None:
            for position, job in mine:  # shared: each takes the next one
                try:
                    results[position] = await job()
                except Exception as error:
                    if not return_exceptions:
                        raise
                    results[position] = error
                bar.update()

        tasks = [asyncio.ensure_future(work(waiting)) for _ in range(min(workers, len(jobs)))]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
    return [results[position] for position in range(len(jobs))]


def checked_workers(workers: object) -> int:
    """Return the number of workers if it is one.

    Raises:
        InvalidRequestError: If it is no integer from 1.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InvalidRequestError(f"workers must be an integer from 1, not {describe(workers)}")
    return workers
