"""The tool that starts servers finds them again, and refuses what cannot work."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from vllm_environment import SetupError
from vllm_process import (
    HOST,
    LOCAL_SOCKETS,
    Server,
    ServerOptions,
    find,
    free_port,
    is_healthy,
    kill,
    running_servers,
    start,
    stop,
)


def test_a_second_start_finds_the_running_server(small_server: Server) -> None:
    assert start(small_server.options) == small_server
    assert find(small_server.options.port) == small_server
    assert small_server in list(running_servers())
    assert is_healthy(small_server)


def test_a_server_with_other_options_is_not_taken_for_it(small_server: Server) -> None:
    with pytest.raises(SetupError, match="a server with other options runs at"):
        start(replace(small_server.options, block_size=64))


def test_ending_a_server_that_is_gone_leaves_its_successor_alone(small_server: Server) -> None:
    gone = Server(2**22 + 1, small_server.options)  # no process has so high a number
    kill(gone)
    stop(gone)
    assert find(small_server.options.port) == small_server


def test_a_port_that_something_else_has_is_refused() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port} is taken .* CTXREUSE_BASE_URL"):
            start(ServerOptions(port=port))
        assert find(port) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (ServerOptions(block_size=16), "block size 16: attention on CPUs needs a multiple of 32"),
        (
            ServerOptions(kv_cache_tokens=63),
            "a KV cache of 63 tokens is less than two blocks of 32",
        ),
    ],
)
def test_a_cache_that_cannot_work_is_refused(options: ServerOptions, problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        start(replace(options, port=free_port()))


def test_requests_are_no_longer_than_the_cache() -> None:
    assert ServerOptions(kv_cache_tokens=6_150).blocks == 192
    assert ServerOptions(kv_cache_tokens=6_150).longest_request == 191 * 32
    assert ServerOptions(max_model_len=100).longest_request == 100


def test_subscribers_connect_to_where_the_server_publishes() -> None:
    options = ServerOptions(kv_events=5557)
    assert options.events_endpoint == "tcp://127.0.0.1:5557"
    assert options.replay_endpoint == "tcp://127.0.0.1:5558"
    local = ServerOptions(port=8123, kv_events=LOCAL_SOCKETS)
    assert (local.events_endpoint or "").endswith("/8123.events")
    assert ServerOptions().events_endpoint is None
