"""A service of several worker processes that answers questions from documents.

Each process has a planner; they tell each other through one log what they have sent, so that the
engine sees one order, and a process that starts again goes on where it was.

    ENGINE_URL=http://127.0.0.1:8000/v1 uvicorn app:app --workers 4 --port 8080

ENGINE_URL is the engine's address. SENT_LOG is the file of the log, on a disk of this machine
(sent.sqlite without it), or the URL of a Redis server for services on several machines, which need
one SENT_LOG_SECRET. ENGINE_KEY and SALT_KEY are the engine's key and a secret for tenants.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

from ctxreuse import ContextBlock, ContextRequest, CtxreuseError, Plan, ReusePlanner
from ctxreuse.errors import EngineError
from ctxreuse.serving import EngineClient
from ctxreuse.sharing import RedisLog, SharedLog, SQLiteLog

DOCUMENTS = {
    "seine": "The Seine is a river in northern France. It flows through Paris to the Channel. ",
    "loire": "The Loire is the longest river of France. It flows through Nantes to the Atlantic. ",
    "tiber": "The Tiber is a river in Italy. It flows through Rome to the Tyrrhenian Sea. ",
    "tagus": "The Tagus is a river in Spain and Portugal. It flows through Lisbon to the sea. ",
}


def sent_log() -> SharedLog:
    """Return the log of what was sent: in a Redis server if SENT_LOG is a URL, else in a file."""
    place = os.environ.get("SENT_LOG", "sent.sqlite")
    if "://" in place:
        return RedisLog(place, secret=os.environ["SENT_LOG_SECRET"])
    return SQLiteLog(place)


planner = ReusePlanner(shared_log=sent_log())


class Question(BaseModel):
    """What a user asks."""

    text: str


class Answer(BaseModel):
    """The answer, and what it cost."""

    text: str
    documents: list[str]
    prompt_tokens: int | None
    cached_tokens: int | None
    worker: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Learn what was sent before this process began, and keep one client for all requests."""
    await asyncio.to_thread(planner.catch_up, 10)
    app.state.client = EngineClient(
        os.environ["ENGINE_URL"],
        api_key=os.environ.get("ENGINE_KEY", "EMPTY"),
        planner=planner,
        timeout_s=60,
        cache_salt="tenant",
        salt_key=os.environ.get("SALT_KEY", ""),
    )
    async with app.state.client:
        yield


app = FastAPI(lifespan=lifespan)


def retrieve(question: str, most: int = 3) -> list[ContextBlock]:
    """Return the documents that share most words with a question; yours is a vector search."""
    words = set(question.lower().replace("?", "").split())

    def shared(name: str) -> int:
        return len(words & set(DOCUMENTS[name].lower().replace(".", "").split()))

    best = sorted(DOCUMENTS, key=shared, reverse=True)[:most]
    return [ContextBlock(id=name, text=DOCUMENTS[name] * 20) for name in best]


def planned(request: ContextRequest) -> Plan:
    """Plan a request; if planning itself has a fault, send the documents as they were retrieved."""
    try:
        return planner.plan(request)
    except CtxreuseError:
        raise  # the request is wrong
    except Exception as error:
        logging.warning("planning failed with %s; sent as retrieved", type(error).__name__)
        return ReusePlanner().plan(request, strategy="none")


@app.post("/ask")
async def ask(question: Question, x_tenant: Annotated[str, Header()] = "") -> Answer:
    """Answer a question. Take the tenant from your authentication; here a gateway sets a header."""
    blocks = retrieve(question.text)
    # no date, user or session here: nothing behind it would be found again
    request = ContextRequest(
        blocks, question.text, system="Answer from the documents.", tenant=x_tenant
    )
    plan = planned(request)
    try:
        done = await app.state.client.complete(plan, max_tokens=200)
    except EngineError as error:
        raise HTTPException(503, "the engine does not answer") from error
    return Answer(
        text=done.text,
        documents=[str(block.id) for block in plan.blocks],
        prompt_tokens=done.prompt_tokens,
        cached_tokens=done.cached_tokens,
        worker=os.getpid(),
    )


@app.get("/ready")
async def ready() -> dict[str, int]:
    """Say whether requests may be sent here: whether the engine answers, and how sharing goes."""
    try:
        await app.state.client.check_health()
    except EngineError as error:
        raise HTTPException(503, "the engine does not answer") from error
    sharing = planner.sharing
    return {"worker": os.getpid(), "taken_in": sharing.taken_in, "log_faults": sharing.faults}


@app.get("/live")
async def live() -> dict[str, int]:
    """Say that this process runs, whatever the engine does."""
    return {"worker": os.getpid()}
