"""An engine's cache events: the sockets that receive them, and their decoding.

A message holds a batch, `[time, [events], data-parallel rank]`; an event is a map with its class's
name under "type" (older versions: an array that begins with it), defaults omitted. The sender is
not trusted; unknown events and fields are skipped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from ctxreuse.cache.kv_events.block_tree import BlockHash, ExtraKeys
from ctxreuse.context.tokens import well_formed
from ctxreuse.errors import InvalidRequestError, MissingExtraError, describe

_WAITING_MESSAGES = 50
"""In a socket; those that are behind wait at the sender, which has its own bound."""
_LARGEST_MESSAGE = 2**22
"""In bytes: a step of half a million tokens. A sender of a larger one is disconnected."""
_MOST_REPLAYED = 200_000
_LONGEST_TOPIC = 255
"""ZeroMQ keeps topics in a tree of bytes, which it frees by recursion: long ones crash it."""
_NUMBER_BYTES = 8
_LIVE_FRAMES = 3
_END = -1  # the number behind the last message of a replay, which `["", number]` asks for
_LARGEST_TOKEN = 2**63 - 1
_LONGEST_HASH = 64  # in bytes; vLLM's are of SHA-256, which has 32
_MOST_GROUPS = 1 << 16
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


@dataclass
class EventSockets:
    """Receives `[topic, number (8 bytes, big-endian), payload]`; asks for missing ones again."""

    endpoint: str
    replay_endpoint: str | None  # where missing messages can be asked for
    topic: str
    bind: bool
    replay_timeout_s: float
    counts: Counter[str]

    def __post_init__(self) -> None:
        addresses: dict[str, object] = {"endpoint": self.endpoint}
        if self.replay_endpoint is not None:
            addresses["replay_endpoint"] = self.replay_endpoint
        for name, address in addresses.items():
            if not isinstance(address, str) or "://" not in address:
                raise InvalidRequestError(
                    f"{name} must be an address such as 'tcp://127.0.0.1:5557', not "
                    f"{describe(address)}"
                )
            if "*" in address and not (self.bind and name == "endpoint"):
                raise InvalidRequestError(
                    f"{name} {describe(address)} is what the engine binds; "
                    "give the address to connect to, such as 'tcp://127.0.0.1:5557'"
                )
        if well_formed(self.topic) != self.topic or len(self.topic) > _LONGEST_TOPIC:
            raise InvalidRequestError(
                f"topic must be UTF-8 text of at most {_LONGEST_TOPIC} characters, not "
                f"{describe(self.topic)}"
            )
        try:
            import msgspec  # noqa: F401 - used for the payloads, but better missed here
            import zmq
            import zmq.utils.monitor
        except ImportError as error:
            raise MissingExtraError("KVEventSync", "vllm-events") from error
        self._zmq: Any = zmq
        self._context: Any = None
        self.replay: PendingReplay | None = None  # that was asked for and has not ended

    def open(self) -> None:
        """Subscribe."""
        zmq = self._zmq
        self._context = zmq.Context()
        self._live: Any = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
        self._live.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
        self._live.setsockopt(zmq.SUBSCRIBE, self.topic.encode())
        self._monitor = self._live.get_monitor_socket(zmq.Event.DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._live, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._use(self._live.bind if self.bind else self._live.connect, "endpoint", self.endpoint)

    def _use(self, connect: Callable[[str], object], name: str, address: str | None) -> None:
        try:
            connect(address or "")
        except (self._zmq.ZMQError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                f"{name} {describe(address)} cannot be used: "
                f"{getattr(error, 'strerror', 'not UTF-8')}; "
                "give one such as 'tcp://127.0.0.1:5557'"
            ) from error

    def reconnect(self) -> None:
        """Connect anew: ZeroMQ does not, after it has refused a message that is too large."""
        if self.bind:
            return  # the sender connects
        with suppress(self._zmq.ZMQError):  # there is no connection to end
            self._live.disconnect(self.endpoint)
        self._live.connect(self.endpoint)

    def close(self) -> None:
        """Close all sockets."""
        if self._context is not None:
            self.end_replay()
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

    def received(self, most: int) -> Iterator[Received]:
        """Yield the messages that have come, without waiting for others."""
        for _ in range(most):
            if not self._live.poll(0):
                return
            frames = self._live.recv_multipart()
            message = _message(frames) if frames[0] == self.topic.encode() else None
            if message is None or len(frames) != _LIVE_FRAMES or message.number < 0:
                self.counts["skipped"] += 1
            else:
                yield message

    def begin_replay(self, start: int) -> None:
        """Ask for the messages from a number on, instead of those asked for before."""
        self.end_replay()
        zmq = self._zmq
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
        dealer.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
        self._use(dealer.connect, "replay_endpoint", self.replay_endpoint)
        dealer.send_multipart([b"", start.to_bytes(_NUMBER_BYTES, "big")])
        self._poller.register(dealer, zmq.POLLIN)
        self.replay = PendingReplay(dealer, self.replay_timeout_s)

    def end_replay(self) -> None:
        """Hear no more of a replay."""
        replay, self.replay = self.replay, None
        if replay is not None:
            self._poller.unregister(replay.socket)
            replay.socket.close(linger=0)

    def replayed(self, most: int) -> Iterator[Received]:
        """Yield the messages that have come of a replay, without waiting for others."""
        replay = self.replay
        assert replay is not None, "a replay was asked for"
        waited = time.monotonic() - replay.asked_at
        replay.waited_s += waited
        replay.idle_s = 0.0 if replay.socket.poll(0) else replay.idle_s + waited
        for _ in range(most):
            if replay.is_complete or not replay.socket.poll(0):
                break
            replay.messages += 1
            message = _message(replay.socket.recv_multipart())
            if message is None:
                self.counts["skipped"] += 1
            elif message.number == _END:
                replay.is_complete = True
            else:
                yield message
        replay.asked_at = time.monotonic()  # what the caller does with a message is no wait


@dataclass(slots=True)
class PendingReplay:
    """A replay under way: how long it was waited for, and how much has come."""

    socket: Any
    timeout_s: float
    is_complete: bool = False
    messages: int = 0
    asked_at: float = field(default_factory=time.monotonic)
    idle_s: float = 0.0
    waited_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it has come to its end, takes too long, or brings more than a sender keeps."""
        return (
            self.is_complete
            or self.idle_s >= self.timeout_s
            or self.waited_s >= 2 * self.timeout_s
            or self.messages > _MOST_REPLAYED
        )


def _message(frames: list[bytes]) -> Received | None:
    """Return a message from its last two frames: older versions replay without the topic."""
    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return Received(int.from_bytes(frames[-2], "big", signed=True), frames[-1])


class BlocksStored(NamedTuple):
    """Blocks came into the cache, behind a parent.

    Without `whole_prompts` they are some of those behind it, of layers that look back so many
    tokens.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    extra_keys: tuple[ExtraKeys, ...] | None = None
    group: int = 0
    whole_prompts: bool = True
    window: int = 1


class BlocksRemoved(NamedTuple):
    """Blocks left the cache."""

    block_hashes: tuple[BlockHash, ...]
    group: int = 0


class CacheCleared(NamedTuple):
    """All blocks left the cache."""


CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | CacheCleared


class EventBatch(NamedTuple):
    """The events of one step of the engine."""

    events: tuple[CacheEvent, ...]
    skipped: int = 0  # could not be read, or tell of other memory than the device's


def decode_batch(payload: bytes) -> EventBatch | None:
    """Return the batch of events in a message; None if it holds none."""
    import msgspec

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
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        raw = {"type": raw[0], **dict(zip(_FIELDS.get(raw[0], ()), raw[1:], strict=False))}
    if not isinstance(raw, dict):
        return None
    kind = raw.get("type")
    if kind == "AllBlocksCleared":
        return CacheCleared()
    medium, group = raw.get("medium"), raw.get("group_idx") or 0
    hashes = raw.get("block_hashes")
    is_here = medium is None or (isinstance(medium, str) and medium.upper() == _DEVICE)
    if not is_here or raw.get("locality") == "REMOTE" or not _is_integer(group, _MOST_GROUPS):
        return None
    if not isinstance(hashes, list) or not all(map(_is_hash, hashes)):
        return None
    if kind == "BlockRemoved":
        return BlocksRemoved(tuple(hashes), group)
    return _stored(raw, tuple(hashes), group) if kind == "BlockStored" else None


def _stored(
    raw: Mapping[str, Any], hashes: tuple[BlockHash, ...], group: int
) -> BlocksStored | None:
    parent, tokens, size = raw.get("parent_block_hash"), raw.get("token_ids"), raw.get("block_size")
    if not (parent is None or _is_hash(parent)) or not _is_integer(size):
        return None
    if not isinstance(tokens, list) or not all(map(_is_integer, tokens)):
        return None
    kind, extra = raw.get("kv_cache_spec_kind"), raw.get("extra_keys")
    adapter, window = raw.get("lora_name"), raw.get("kv_cache_spec_sliding_window")
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
        window=window if _is_integer(window) and window else 1,
    )


def _is_hash(value: Any) -> bool:
    if isinstance(value, bytes):
        return len(value) <= _LONGEST_HASH
    return isinstance(value, int) and not isinstance(value, bool)


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
