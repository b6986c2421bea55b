import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _with_a_loop_that_is_closed() -> Iterator[None]:
    """LlamaIndex's synchronous methods make a loop where a thread has none, and leave it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()
