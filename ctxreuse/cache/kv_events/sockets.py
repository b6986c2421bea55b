"""Sockets that receive an engine's cache events: published, and replayed on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe

_WAITING_MESSAGES = 100_000
_LARGEST_MESSAGE = 2**28
_POLL_MS = 50
_NUMBER_BYTES = 8
_LIVE_FRAMES = 3
_END = -1


class Received(NamedTuple):
    """A message: its number in the sender's sequence, and what it holds."""

    number: int
    payload: bytes


class EventSockets:
    """Receives numbered messages; asks for missing ones again.

    A message is `[topic, number, payload]`, the number in 8 bytes, the first byte the highest. A
    replay is asked for with a DEALER that sends `["", number]`; the messages from that number on
    come back, and a last one with the number -1. Not thread-safe.

    Args:
        endpoint: Where messages are published.
        replay_endpoint: Where replays are asked for; None if that is not possible.
        topic: Messages of other topics are skipped.
        bind: Whether the sender connects.
        replay_timeout_s: Seconds to wait for the next replayed message.

    Raises:
        InvalidRequestError: wrong type, or not an address to connect to.
        MissingExtraError: `pyzmq` is not installed.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        *,
        bind: bool,
        replay_timeout_s: float,
    ) -> None:
        for name, address in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
            is_listening = bind and name == "endpoint"
            if address is None and name == "replay_endpoint":
                continue
            if not isinstance(address, str) or "://" not in address:
                raise InvalidRequestError(
                    f"{name} must be an address such as 'tcp://127.0.0.1:5557', not "
                    f"{describe(address)}"
                )
            if "*" in address and not is_listening:
                raise InvalidRequestError(
                    f"{name} {describe(address)} is what the engine binds; "
                    "give the address to connect to, such as 'tcp://127.0.0.1:5557'"
                )
        try:
            import msgspec  # noqa: F401 - used for the payloads, but better missed here
            import zmq
            import zmq.utils.monitor
        except ImportError as error:
            raise MissingExtraError("KVEventSync", "vllm-events") from error
        self._zmq: Any = zmq
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic.encode()
        self._bind = bind
        self._replay_timeout_s = replay_timeout_s
        self._context: Any = None
        self._live: Any = None
        self._monitor: Any = None
        self._poller: Any = None
        self.skipped = 0
        """How many messages were of another topic, or broken."""

    @property
    def can_replay(self) -> bool:
        """Whether missing messages can be asked for."""
        return self._replay_endpoint is not None

    def open(self) -> None:
        """Subscribe.

        Raises:
            InvalidRequestError: the endpoint cannot be used.
        """
        zmq = self._zmq
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
        self._live.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
        self._live.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._monitor = self._live.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._live, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            if self._bind:
                self._live.bind(self._endpoint)
            else:
                self._live.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise InvalidRequestError(
                f"endpoint {describe(self._endpoint)} cannot be used: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Close all sockets."""
        if self._context is not None:
            self._live.disable_monitor()
            self._context.destroy(linger=0)
            self._context = None

    def wait(self, milliseconds: int) -> None:
        """Wait until something has come."""
        self._poller.poll(milliseconds)

    def sender_is_gone(self) -> bool:
        """Return whether the connection was lost since this was last asked."""
        zmq, gone = self._zmq, False
        while self._monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self._monitor)
            gone = gone or event["event"] == zmq.Event.DISCONNECTED
        return gone

    def received(self, most: int | None = None) -> Iterator[Received]:
        """Yield the messages that have come, without waiting for others.

        Args:
            most: How many at most.
        """
        taken = 0
        while (most is None or taken < most) and self._live.poll(0):
            frames = self._live.recv_multipart()
            taken += 1
            message = _message(frames) if frames[0] == self._topic else None
            if message is None or len(frames) != _LIVE_FRAMES or message.number < 0:
                self.skipped += 1
            else:
                yield message

    def replayed(self, start: int, is_wanted: Callable[[], bool]) -> Iterator[Received]:
        """Ask for the messages from a number on; yield those that come.

        Args:
            start: The first one that is missing.
            is_wanted: Whether to go on waiting.
        """
        zmq = self._zmq
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
            dealer.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", start.to_bytes(_NUMBER_BYTES, "big")])
            patience = self._replay_timeout_s
            while is_wanted() and patience > 0:
                if not dealer.poll(_POLL_MS):
                    patience -= _POLL_MS / 1000
                    continue
                patience = self._replay_timeout_s
                message = _message(dealer.recv_multipart())
                if message is None:
                    self.skipped += 1
                elif message.number == _END:
                    return
                else:
                    yield message


def _message(frames: list[bytes]) -> Received | None:
    """Return a message from its last two frames: older versions replay without the topic."""
    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return Received(int.from_bytes(frames[-2], "big", signed=True), frames[-1])
