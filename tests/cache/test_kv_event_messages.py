"""KV cache events on the wire: their numbers, and what they say."""

import msgspec
import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from kv_event_helpers import encoded

from ctxreuse import ReusePlanner
from ctxreuse.cache.kv_events.engine_blocks import EngineBlocks, HeldRequests, RecordedRequests
from ctxreuse.cache.kv_events.event_stream import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    decode_batch,
)

CLEARED = {"type": "AllBlocksCleared"}
STORED = {
    "type": "BlockStored",
    "block_hashes": [b"x", 7],
    "parent_block_hash": b"p",
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def decoded(*events):
    return decode_batch(msgspec.msgpack.encode([1.0, list(events), 0]))


def test_events_are_read_as_vllm_writes_them():
    batch = decode_batch(
        encoded(
            [
                STORED | {"extra_keys": [[["image", 3], "salt"], None], "group_idx": 1},
                {"type": "BlockRemoved", "block_hashes": [b"x"], "medium": "GPU", "group_idx": 1},
                CLEARED,
            ]
        )
    )
    extra = ((("image", 3), "salt"), None)
    assert batch == EventBatch(
        (
            BlocksStored((b"x", 7), b"p", (1, 2, 3, 4), 2, extra, 1),
            BlocksRemoved((b"x",), 1),
            CacheCleared(),
        )
    )


def test_events_of_older_and_newer_versions_are_read():
    assert decoded(
        ["BlockStored", [b"x", 7], None, [1, 2, 3, 4], 2, None],
        ["BlockRemoved", [b"x"]],
        ["AllBlocksCleared"],
        STORED | {"something": "new"},
    ) == EventBatch(
        (
            BlocksStored((b"x", 7), None, (1, 2, 3, 4), 2),
            BlocksRemoved((b"x",)),
            CacheCleared(),
            BlocksStored((b"x", 7), b"p", (1, 2, 3, 4), 2),
        )
    )
    assert decode_batch(msgspec.msgpack.encode({"ts": 1.0, "events": [CLEARED]})) == EventBatch(
        (CacheCleared(),)
    )


def test_the_events_of_sglang_are_read():
    """Its classes are vLLM's, as arrays and later as maps; hashes are signed numbers."""
    stored = [[-5, 7], 3, [1, 2, 3, 4], 2, None]
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    later = {"type": "BlockStored", **dict(zip(names, stored, strict=True)), "medium": "GPU"}
    batch = decode_batch(
        msgspec.msgpack.encode(
            [
                1.0,
                [
                    ["BlockStored", *stored],
                    ["BlockStored", *stored, "GPU", {"cache_salt": "s"}],
                    later | {"cache_salt": "s", "session_id": "t"},
                    ["BlockRemoved", [-5], "GPU"],
                    ["AllBlocksCleared"],
                ],
                0,
            ]
        )
    )
    expected = BlocksStored((-5, 7), 3, (1, 2, 3, 4), 2)
    assert batch == EventBatch((*[expected] * 3, BlocksRemoved((-5,)), CacheCleared()))


def test_an_adapter_counts_where_the_extra_keys_are_not_told():
    batch = decoded(STORED | {"lora_name": "a"})
    assert batch.events[0].extra_keys == (("a",), ("a",))


def test_groups_that_store_parts_of_prompts_are_marked():
    kinds = ("full_attention", "sliding_window", "mamba", None)
    batch = decoded(*(STORED | {"kv_cache_spec_kind": kind} for kind in kinds))
    assert [event.whole_prompts for event in batch.events] == [True, False, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"medium": "CPU"},
        {"medium": 3},
        {"locality": "REMOTE"},
        {"type": "BlockFrozen"},
        {"block_hashes": None},
        {"block_hashes": ["x"]},
        {"block_hashes": [b"x" * 65]},
        {"block_hashes": [True]},
        {"parent_block_hash": "x"},
        {"token_ids": "1234"},
        {"token_ids": [1, -2, 3, 4]},
        {"token_ids": [1, 2.0, 3, 4]},
        {"token_ids": [1, 2**63, 3, 4]},
        {"block_size": -1},
        {"block_size": True},
        {"group_idx": "0"},
        {"group_idx": 2**20},
        {"extra_keys": "x"},
        {"extra_keys": ["x", None]},
        {"extra_keys": [[[["x"]]], None]},
    ],
)
def test_events_that_cannot_be_used_are_counted(change):
    assert decoded(STORED | change, CLEARED) == EventBatch((CacheCleared(),), skipped=1)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", ""])
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*STORED, "extra_keys", "group_idx"]), inner, max_size=5)
    ),
    max_leaves=12,
)
events = st.dictionaries(st.sampled_from([*STORED, "extra_keys", "group_idx"]), values, max_size=9)


@examples(100)
@given(st.lists(values | events.map(lambda event: STORED | event), max_size=3))
def test_no_events_break_the_reader_or_the_blocks(raw):
    batch = decoded(*raw)
    assert len(batch.events) + batch.skipped == len(raw)
    requests = HeldRequests(RecordedRequests(ReusePlanner(), 10), EngineBlocks(), 0.0)
    for event in batch.events:
        requests.apply(event)
    requests.settle(0.0)


@given(st.binary(max_size=40))
def test_no_bytes_break_the_reader(payload):
    batch = decode_batch(payload)
    assert batch is None or isinstance(batch, EventBatch)
