"""Entries of a shared log as bytes: each comes back as it was, and nothing else passes for one."""

import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.blocks import BlockKey
from ctxreuse.memory.sent_log import EditEntry, LostEntry, SentEntry
from ctxreuse.sharing.entries import UnreadableEntryError, decode, encode

digests = st.binary(min_size=16, max_size=16)
WRITER = b"a writer"


TENANT = bytes(16).hex()
tenants = digests.map(bytes.hex)


@st.composite
def sent(draw: st.DrawFn) -> SentEntry:
    keys = draw(st.lists(digests.map(BlockKey), unique=True, max_size=6))
    number = len(keys)
    tokens = draw(st.lists(st.integers(1, 2**32 - 1), min_size=number, max_size=number))
    return SentEntry(
        request_id=draw(digests),
        tenant=draw(tenants),
        system=draw(st.none() | digests),
        keys=tuple(keys),
        tokens=tuple(tokens),
        ranks=tuple(draw(st.permutations(range(number)))),
        is_labelled=draw(st.booleans()),
        front_tokens=draw(st.integers(0, 2**32 - 1)),
        marks=tuple(sorted(draw(st.sets(st.integers(0, number), max_size=4)))),
        time_s=draw(st.none() | st.floats(0, 1e12, allow_nan=False)),
        is_alone=draw(st.booleans()),
    )


def sent_with(*keys: bytes, **fields: Any) -> SentEntry:
    number = len(keys)
    given = {"tokens": (1,) * number, "ranks": tuple(range(number)), **fields}
    return SentEntry(request_id=bytes(16), tenant=TENANT, keys=tuple(map(BlockKey, keys)), **given)


lost = st.builds(LostEntry, digests, tenants, st.none() | st.integers(0, 2**40))
edits = st.builds(EditEntry, digests, tenants, st.binary())
entries = sent() | lost | edits


@given(entries, st.integers(0, 2**64 - 1))
def test_an_entry_comes_back_as_it_was(entry, number):
    assert decode(encode(WRITER, number, entry)) == (WRITER, number, entry)


@given(sent())
def test_the_blocks_come_back_in_the_retrievers_order(entry):
    retrieved = list(entry.as_retrieved())
    assert [retrieved.index(key) for key in entry.keys] == list(entry.ranks)
    assert set(retrieved) == set(entry.keys)


@given(st.binary(max_size=200))
def test_garbage_is_no_entry(garbage):
    with pytest.raises(UnreadableEntryError):
        decode(garbage)


@given(entries, st.data())
def test_a_damaged_entry_is_none(entry, data):
    written = bytearray(encode(WRITER, 1, entry))
    at = data.draw(st.integers(1, len(written) - 1))  # the first byte is the version
    written[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(UnreadableEntryError, match="damaged"):
        decode(bytes(written))


def test_another_version_says_what_to_do():
    body = b"\x08" + encode(WRITER, 1, LostEntry(bytes(16), TENANT, None))[1:-4]
    with pytest.raises(UnreadableEntryError, match=r"version 8.*one version of ctxreuse"):
        decode(body + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize(
    "entry",
    [
        sent_with(marks=(1,)),
        sent_with(marks=(0, 0)),
        sent_with(time_s=float("inf")),
        sent_with(time_s=-1.0),
        sent_with(b"k" * 16, b"k" * 16),
        sent_with(b"k" * 16, ranks=(1,)),
    ],
)
def test_what_no_planner_sends_is_no_entry(entry):
    with pytest.raises(UnreadableEntryError):
        decode(encode(WRITER, 1, entry))
