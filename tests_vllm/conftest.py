"""Servers for the tests: one with a large cache, one that has to evict.

`CTXREUSE_BASE_URL` names a server that is there already, for the tests that leave servers as they
are; the others start their own in `.venv-vllm`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from engine import Engine  # noqa: E402 - the tools have to be on the path
from vllm_environment import HOME  # noqa: E402
from vllm_process import (  # noqa: E402
    LOCAL_SOCKETS,
    Server,
    ServerOptions,
    find,
    free_port,
    start,
    stop,
)

SMALL_CACHE_TOKENS = 6_144


@pytest.fixture(scope="session", autouse=True)
def no_event_loop_is_left() -> Iterator[None]:
    """Close the event loops that libraries and plugins open in the main thread and leave."""
    yield
    for one in gc.get_objects():
        if isinstance(one, asyncio.BaseEventLoop) and not (one.is_closed() or one.is_running()):
            one.close()


@pytest.fixture(autouse=True)
def event_loop_of_the_thread() -> Iterator[None]:
    """Give each test an event loop that is closed: LlamaIndex takes or makes one and leaves it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    loop.close()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of public traces."""
    folder = os.environ.get("CTXREUSE_DATA")
    if not folder:
        pytest.skip("CTXREUSE_DATA names no folder with traces")
    return Path(folder)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A server whose cache holds everything that a test sends."""
    given = os.environ.get("CTXREUSE_BASE_URL")
    if given:
        yield Engine(given)
        return
    with running(ServerOptions(port=free_port())) as server:
        yield Engine(server.base_url)


@pytest.fixture(scope="session")
def small_server_options() -> Iterator[ServerOptions]:
    """The options of a server that has to evict and publishes cache events, and that runs."""
    options = ServerOptions(
        model="tiny",  # hits do not depend on weights
        port=free_port(),
        kv_cache_tokens=SMALL_CACHE_TOKENS,
        kv_events=LOCAL_SOCKETS,
    )
    with running(options):
        yield options


@pytest.fixture
def small_server(small_server_options: ServerOptions) -> Server:
    """The server behind `small_engine`; a test may kill it and start it again."""
    return start(small_server_options)


@pytest.fixture
def small_engine(small_server: Server) -> Engine:
    """A server with a cache of a few prompts."""
    return Engine(small_server.base_url)


@contextmanager
def running(options: ServerOptions) -> Iterator[Server]:
    """Run a server as long as the block does, however often a test restarts it."""
    if not (HOME / "installed").exists():
        pytest.skip("vLLM is not installed here: make vllm")
    server = start(options)
    try:
        yield server
    finally:
        current = find(options.port)
        if current is not None:
            stop(current)
