"""An engine's cache events: the sockets that receive them, and their decoding.

Messages are numbered; missing ones can be asked for again. A message holds a batch, the array
`[time, [events], data-parallel rank]`; an event is a map with its class's name under "type" (older
versions: an array that begins with it), defaults omitted. The sender is not trusted. Unknown events
and fields are skipped, so that newer engines can be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from ctxreuse.cache.kv_events.block_tree import BlockHash, ExtraKeys
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe

_WAITING_MESSAGES = 100_000
_LARGEST_MESSAGE = 2**28
_POLL_MS = 50
_NUMBER_BYTES = 8
_LIVE_FRAMES = 3
_END = -1
_LARGEST_TOKEN = 2**63 - 1
_GROUPS = range(1 << 16)
_DEVICE = "GPU"  # vLLM's name of the memory that attention reads, on a CPU, too
_WHOLE_PROMPTS = frozenset(
    {"full_attention", "mla_attention", "sink_full_attention", "unknown", None}
)
_FIELDS: Mapping[str, Sequence[str]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}


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


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks came into the cache; fields as `EngineBlocks.stored` takes them."""

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    extra_keys: tuple[ExtraKeys, ...] | None = None
    group: int = 0
    whole_prompts: bool = True


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the cache."""

    block_hashes: tuple[BlockHash, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """All blocks left the cache."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one step of the engine.

    Attributes:
        events: Those that could be read, in order.
        skipped: How many could not, or tell of other memory than the device's.
    """

    events: tuple[CacheEvent, ...]
    skipped: int = 0


def decode_batch(payload: bytes) -> EventBatch | None:
    """Read a batch of events.

    Args:
        payload: The message's bytes.

    Returns:
        The batch; None if the bytes do not hold one.

    Raises:
        MissingExtraError: `msgspec` is not installed.
    """
    try:
        import msgspec
    except ImportError as error:
        raise MissingExtraError("KVEventSync", "vllm-events") from error
    try:
        decoded = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError):  # msgspec.DecodeError is a ValueError
        return None
    raw = decoded.get("events") if isinstance(decoded, dict) else None
    if isinstance(decoded, list) and len(decoded) > 1:
        raw = decoded[1]
    if not isinstance(raw, list):
        return None
    events = [_event(one) for one in raw]
    known = tuple(event for event in events if event is not None)
    return EventBatch(known, len(events) - len(known))


def _event(raw: Any) -> CacheEvent | None:
    """Return an event; None if it cannot be used."""
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        raw = {"type": raw[0], **dict(zip(_FIELDS.get(raw[0], ()), raw[1:], strict=False))}
    if not isinstance(raw, dict):
        return None
    kind = raw.get("type")
    if kind == "AllBlocksCleared":
        return CacheCleared()
    medium, group = raw.get("medium"), raw.get("group_idx") or 0
    hashes = _hashes(raw.get("block_hashes"))
    is_here = medium is None or (isinstance(medium, str) and medium.upper() == _DEVICE)
    if not is_here or raw.get("locality") == "REMOTE" or not _is_integer(group, len(_GROUPS)):
        return None
    if hashes is None:
        return None
    if kind == "BlockRemoved":
        return BlocksRemoved(hashes, group)
    return _stored(raw, hashes, group) if kind == "BlockStored" else None


def _stored(
    raw: Mapping[str, Any], hashes: tuple[BlockHash, ...], group: int
) -> BlocksStored | None:
    parent, tokens, size = raw.get("parent_block_hash"), raw.get("token_ids"), raw.get("block_size")
    if not (parent is None or _is_hash(parent)) or not _is_integer(size):
        return None
    if not isinstance(tokens, list) or not all(map(_is_integer, tokens)):
        return None
    kind, extra = raw.get("kv_cache_spec_kind"), raw.get("extra_keys")
    adapter = raw.get("lora_name")
    if extra is None and isinstance(adapter, str):
        # engines that do not tell what else is hashed do tell the adapter
        extra = [[adapter]] * len(hashes)
    if not (extra is None or (isinstance(extra, list) and all(map(_are_keys, extra)))):
        return None
    return BlocksStored(
        hashes,
        parent,
        tuple(tokens),
        size,
        None if extra is None else tuple(map(_frozen_keys, extra)),
        group,
        whole_prompts=(isinstance(kind, str) or kind is None) and kind in _WHOLE_PROMPTS,
    )


def _hashes(value: Any) -> tuple[BlockHash, ...] | None:
    return tuple(value) if isinstance(value, list) and all(map(_is_hash, value)) else None


def _is_hash(value: Any) -> bool:
    return isinstance(value, (bytes, int)) and not isinstance(value, bool)


def _is_integer(value: Any, end: int = _LARGEST_TOKEN) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _are_keys(value: Any) -> bool:
    """Return whether a block's extra keys are None, or plain values and flat lists of them."""
    if value is None:
        return True
    if not isinstance(value, list):
        return False
    flat = [item for key in value for item in (key if isinstance(key, list) else [key])]
    return all(item is None or isinstance(item, (str, bytes, int, float)) for item in flat)


def _frozen_keys(value: Any) -> ExtraKeys:
    if not value:
        return None
    return tuple(tuple(key) if isinstance(key, list) else key for key in value)
