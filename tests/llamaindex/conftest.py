import asyncio
import inspect
from collections.abc import Iterator

import pytest
import pytest_socket
from llamaindex_helpers import RecordingLLM
from served_engines import served  # noqa: F401  # a fixture

from llamaindex_ctxreuse import ReuseLLM


@pytest.fixture(autouse=True)
def _without_network() -> Iterator[None]:
    pytest_socket.disable_socket(allow_unix_socket=True)
    yield
    pytest_socket.enable_socket()


@pytest.fixture(autouse=True)
def _with_a_loop_that_is_closed(
    request: pytest.FixtureRequest, _without_network: None
) -> Iterator[None]:
    """LlamaIndex's synchronous methods make a loop where a thread has none, and leave it open."""
    if inspect.iscoroutinefunction(request.function):
        yield
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def inner() -> RecordingLLM:
    """Return an LLM that keeps what it was sent, to be wrapped."""
    return RecordingLLM()


@pytest.fixture
def llm(inner: RecordingLLM) -> ReuseLLM:
    """Return a wrapper of `inner` that waits for no other calls."""
    return ReuseLLM(inner=inner, window_s=0)
