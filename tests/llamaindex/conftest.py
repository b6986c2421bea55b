import asyncio
import inspect
from collections.abc import Iterator

import pytest
import pytest_socket


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
