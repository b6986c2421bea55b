"""An engine's cache that tells what it stores and removes, as vLLM 0.32 does."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from threading import Lock, Thread
from typing import Any

import msgspec
import zmq

from ctxreuse.cache.kv_events.block_tree import PromptBlocks
from ctxreuse.cache.kv_events.engine_blocks import EngineBlocks

Event = dict[str, Any]


class TellingCache:
    """vLLM's block pool (`v1/core/block_pool.py`), one request at a time.

    A full block is told when it is cached, each physical copy of it; removed ones when they are
    taken for something else. Blocks without a hash are taken first.

    Args:
        blocks: How many there are.
        block_size: Tokens of each.
        reports: Whether blocks that a request found are told, too (`kv_cache_report_mode`).
    """

    def __init__(self, blocks: int, block_size: int, *, reports: bool = False) -> None:
        self.block_size = block_size
        self.events: list[Event] = []
        self._reports = reports
        self._free = OrderedDict.fromkeys(range(blocks))
        self._hash_of: dict[int, bytes] = {}
        self._copies: dict[bytes, OrderedDict[int, None]] = {}

    def take_events(self) -> list[Event]:
        """Return what has happened since this was last asked."""
        events, self.events = self.events, []
        return events

    def serve(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Run a prompt; return how many of its tokens were cached."""
        size, tokens = self.block_size, list(tokens)
        needed = -(-len(tokens) // size)
        if needed > len(self._free):
            return 0
        hashes = self._hashes(tokens, salt)
        held = []
        for content in hashes[: max(0, len(tokens) - 1) // size]:
            if content not in self._copies:
                break
            held.append(next(iter(self._copies[content])))
        hits = len(held)
        for block in held:
            del self._free[block]
        if hits and self._reports:
            self._tell_stored(hashes[:hits], None, tokens[: hits * size], salt)
        held += [self._take() for _ in range(needed - hits)]
        if len(hashes) > hits:
            parent = hashes[hits - 1] if hits else None
            self._tell_stored(hashes[hits:], parent, tokens[hits * size : len(hashes) * size], salt)
        for block, content in zip(held[hits:], hashes[hits:], strict=False):
            self._hash_of[block] = content
            self._copies.setdefault(content, OrderedDict())[block] = None
        for block in reversed(held):
            self._free[block] = None
        for block in held:
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)
        return hits * size

    def holds(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Return how many leading tokens of a prompt are cached, in whole blocks."""
        held = 0
        for content in self._hashes(list(tokens), salt):
            if content not in self._copies:
                break
            held += self.block_size
        return held

    def reset(self) -> None:
        self._hash_of.clear()
        self._copies.clear()
        self.events.append({"type": "AllBlocksCleared"})

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._copies[content][block]
            if not self._copies[content]:
                del self._copies[content]
            self.events.append(
                {"type": "BlockRemoved", "block_hashes": [content], "medium": "GPU", "group_idx": 0}
            )
        return block

    def _tell_stored(
        self, hashes: list[bytes], parent: bytes | None, tokens: list[int], salt: str | None
    ) -> None:
        extra: list[Any] = [None] * len(hashes)
        if salt is not None and parent is None:
            extra[0] = [salt]
        self.events.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": self.block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": extra if any(extra) else None,
                "group_idx": 0,
            }
        )

    def _hashes(self, tokens: list[int], salt: str | None) -> list[bytes]:
        hashes, parent = [], b"" if salt is None else salt.encode()
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            content = repr(tokens[end - self.block_size : end]).encode()
            parent = hashlib.sha256(parent + b"|" + content).digest()
            hashes.append(parent)
        return hashes


def held_tokens(
    blocks: EngineBlocks,
    token_ids: Sequence[int],
    cache_salt: str | None = None,
    lora: str | None = None,
) -> int:
    """Return how many leading tokens of a prompt an engine holds, without following it."""
    salts = () if cache_salt is None or not blocks._knows_salts else (cache_salt,)
    adapters = () if lora is None else (lora,)
    prompt = PromptBlocks(array("q", token_ids), adapters + salts, adapters)
    return blocks._readable([tree._walk(prompt, None, 0) for tree in blocks._trees.values()])


def encoded(events: Sequence[Event]) -> bytes:
    """Return a batch of events as vLLM encodes it, which leaves out what is None by default."""
    told = [
        {name: value for name, value in one.items() if (name, value) != ("extra_keys", None)}
        for one in events
    ]
    return msgspec.msgpack.encode([1.5, told, 0])


class Publisher:
    """vLLM's `ZmqEventPublisher` on the loopback, with a hand on what gets lost.

    Args:
        topic: The topic of its messages.
        ports: The ports of an earlier publisher that this one replaces.
        connect: An endpoint to connect to instead of binding one.
        keeps: How many messages it keeps for replays.
        with_topic: Whether replayed messages carry the topic.
    """

    def __init__(
        self,
        topic: str = "kv",
        ports: tuple[int, int] | None = None,
        connect: str | None = None,
        keeps: int = 10_000,
        *,
        with_topic: bool = True,
    ) -> None:
        self._topic = topic.encode()
        self._with_topic = with_topic
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self._next = 0
        self._lock = Lock()
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.XPUB)  # a PUB that tells who subscribes
        self._replays = self._context.socket(zmq.ROUTER)
        for socket in (self._live, self._replays):
            socket.setsockopt(zmq.LINGER, 0)
        if connect is not None:
            self._live.connect(connect)
        live, replays = ports or (0, 0)
        self.ports = (
            self._bound(self._live, live) if connect is None else 0,
            self._bound(self._replays, replays),
        )
        self._is_open = True
        self._thread = Thread(target=self._answer, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    @property
    def last(self) -> int:
        return self._next - 1

    def publish(self, events: Sequence[Event] | bytes, *, lost: bool = False) -> None:
        """Send events, or bytes that should be some; a lost message is kept for replays only."""
        payload = events if isinstance(events, bytes) else encoded(events)
        with self._lock:
            number = self._next
            self._next += 1
            self._kept.append((number, payload))
        if not lost:
            self.send(self._topic, number.to_bytes(8, "big"), payload)

    def send(self, *frames: bytes) -> None:
        self._live.send_multipart(frames)

    def begin_anew(self) -> None:
        """Count from 0 again, as a new process does, on the same connection."""
        with self._lock:
            self._kept.clear()
            self._next = 0

    def wait_for_subscriber(self) -> None:
        assert self._live.poll(10_000), "nobody subscribes"
        self._live.recv()

    def close(self) -> None:
        """Vanish, as a process that is killed."""
        self._is_open = False
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self.close()

    def _answer(self) -> None:
        while self._is_open:
            if not self._replays.poll(5):
                continue
            client, empty, start = self._replays.recv_multipart()
            assert empty == b""
            with self._lock:
                kept = list(self._kept)
            for number, payload in kept:
                if number >= int.from_bytes(start, "big"):
                    self._reply(client, self._topic, number.to_bytes(8, "big"), payload)
            self._reply(client, b"", (-1).to_bytes(8, "big", signed=True), b"")

    def _reply(self, client: bytes, topic: bytes, *frames: bytes) -> None:
        topics = [topic] if self._with_topic else []
        self._replays.send_multipart([client, b"", *topics, *frames])

    @staticmethod
    def _bound(socket: Any, port: int) -> int:
        if not port:
            return int(socket.bind_to_random_port("tcp://127.0.0.1"))
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port
