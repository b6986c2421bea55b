"""The same as a Celery worker, for answers that nobody waits for.

    celery -A tasks worker --pool=prefork --concurrency=4

Celery loads this module once and forks its workers. The planner may be made before the fork: each
child goes on with a planner, a log and connections of its own. The client belongs to an event loop,
so a task that uses asyncio makes it where its loop runs.
"""

import asyncio
import os
from typing import Any

from celery import Celery, signals

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.serving import EngineClient, dispatch
from ctxreuse.sharing import RedisLog, SharedLog, SQLiteLog

app = Celery("tasks", broker=os.environ.get("BROKER_URL", "redis://127.0.0.1:6379/0"))
app.conf.result_backend = os.environ.get("RESULT_URL", "redis://127.0.0.1:6379/1")


def sent_log() -> SharedLog:
    """Return the log of what was sent, by the same variables as in app.py."""
    place = os.environ.get("SENT_LOG", "sent.sqlite")
    if "://" in place:
        return RedisLog(place, secret=os.environ["SENT_LOG_SECRET"])
    return SQLiteLog(place)


planner = ReusePlanner(shared_log=sent_log())


@signals.worker_process_init.connect
def catch_up(**_: Any) -> None:
    """Learn in each child what was sent before."""
    planner.catch_up(10)


@app.task
def answer(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer questions that are known together, in the order that the cache likes best.

    Args:
        questions: Each with `text` and `documents`, a list of `id` and `text`, best first.
    """
    return asyncio.run(_answer(questions))


async def _answer(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    requests = [
        ContextRequest([ContextBlock(**one) for one in question["documents"]], question["text"])
        for question in questions
    ]
    batch = await asyncio.to_thread(planner.plan_batch, requests)  # a large one takes seconds
    async with EngineClient(os.environ["ENGINE_URL"], planner=planner) as client:
        outcomes = await dispatch(client, batch, max_tokens=200)
    # in the order of the questions, with one that failed as its error
    return [
        {"error": type(one.error).__name__}
        if one.completion is None
        else {"text": one.completion.text, "cached_tokens": one.completion.cached_tokens}
        for one in outcomes
    ]
