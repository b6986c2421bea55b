"""Decodes vLLM's cache events without trusting the sender.

A batch is the array `[time, [events], data-parallel rank]`; an event is a map with its class's name
under "type" (older versions: an array that begins with it), defaults omitted. Unknown events and
fields are skipped, so that newer engines can be followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from ctxreuse.cache.kv_events.block_tree import BlockHash, ExtraKeys
from ctxreuse.errors import MissingExtraError

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
