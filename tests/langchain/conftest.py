from collections.abc import Iterator

import pytest
import pytest_socket
from caching_server import CachingServer, caching_server
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_model_helpers import RecordingModel


@pytest.fixture(autouse=True)
def no_network() -> None:
    """No test reaches a network, only this machine; the plugin takes the guard away again."""
    pytest_socket.socket_allow_hosts(["127.0.0.1"], allow_unix_socket=True)


@pytest.fixture
def global_cache() -> Iterator[None]:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


@pytest.fixture
def inner() -> RecordingModel:
    """Return a model that keeps what it was sent, to be wrapped."""
    return RecordingModel()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[CachingServer]:
    """Run a provider whose cache is emulated: Anthropic, or whom a parameter names."""
    with caching_server(getattr(request, "param", "anthropic")) as server:
        yield server
