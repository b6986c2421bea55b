"""Entries of a shared log as bytes: each comes back as it was, and nothing else passes for one."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.blocks import BlockKey
from ctxreuse.planning.sharing import Entry, LostEntry, SentEntry
from ctxreuse.sharing.entries import UnreadableEntryError, decode, encode

digests = st.binary(min_size=16, max_size=16)
WRITER = b"a writer"


@st.composite
def sent(draw: st.DrawFn) -> SentEntry:
    keys = draw(st.lists(digests.map(BlockKey), unique=True, max_size=6))
    number = len(keys)
    weights = draw(st.lists(st.integers(1, 2**32 - 1), min_size=number, max_size=number))
    return SentEntry(
        draw(digests),
        draw(digests),
        draw(st.none() | digests),
        tuple(keys),
        tuple(weights),
        tuple(draw(st.permutations(range(number)))),
        draw(st.booleans()),
    )


lost = st.builds(LostEntry, digests, digests, st.none() | st.integers(0, 2**40))


@given(sent() | lost, st.integers(0, 2**64 - 1))
def test_an_entry_comes_back_as_it_was(entry: Entry, number: int) -> None:
    assert decode(encode(WRITER, number, entry)) == (WRITER, number, entry)


@given(sent())
def test_the_blocks_come_back_in_the_retrievers_order(entry: SentEntry) -> None:
    retrieved = list(entry.as_retrieved())
    assert [retrieved.index(key) for key in entry.keys] == list(entry.ranks)
    assert set(retrieved) == set(entry.keys)


@given(st.binary(max_size=200))
def test_garbage_is_no_entry(garbage: bytes) -> None:
    with pytest.raises(UnreadableEntryError):
        decode(garbage)


@given(sent() | lost, st.data())
def test_a_damaged_entry_is_none(entry: Entry, data: st.DataObject) -> None:
    written = bytearray(encode(WRITER, 1, entry))
    at = data.draw(st.integers(1, len(written) - 1))  # the first byte is the version
    written[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(UnreadableEntryError, match="damaged"):
        decode(bytes(written))


def test_a_newer_version_says_what_to_do() -> None:
    body = b"\x04" + encode(WRITER, 1, LostEntry(bytes(16), bytes(16), None))[1:-4]
    with pytest.raises(UnreadableEntryError, match=r"version 4.*one version of ctxreuse"):
        decode(body + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize(
    "entry",
    [
        SentEntry(bytes(16), bytes(16), None, (BlockKey(b"k" * 16),) * 2, (1, 1), (0, 1), False),
        SentEntry(bytes(16), bytes(16), None, (BlockKey(b"k" * 16),), (1,), (1,), False),
        SentEntry(bytes(16), bytes(16), None, (BlockKey(b"k" * 16),), (0,), (0,), False),
    ],
)
def test_what_no_planner_sends_is_no_entry(entry: SentEntry) -> None:
    with pytest.raises(UnreadableEntryError):
        decode(encode(WRITER, 1, entry))
