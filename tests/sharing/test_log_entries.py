"""Entries of a shared log as bytes: each comes back as it was, and nothing else passes for one."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.blocks import BlockKey
from ctxreuse.planning.sharing import LostEntry, Marking, RatioEntry, SentEntry
from ctxreuse.sharing.entries import UnreadableEntryError, decode, encode

digests = st.binary(min_size=16, max_size=16)
WRITER = b"a writer"

OF_VERSION_2 = (
    "020161207772697465720500000000000000757575757575757575757575757575757474747474747474747474747474"
    "747401010173737373737373737373737373737373020000006161616161616161616161616161616162626262626262"
    "626262626262626262070000002c0100000100000000000000d31418fd",
    "020261207772697465720600000000000000757575757575757575757575757575757474747474747474747474747474"
    "747402000000000000009be22b17",
)


@st.composite
def markings(draw: st.DrawFn, blocks: int) -> Marking:
    marks = draw(st.sets(st.integers(0, blocks), max_size=4))
    now = draw(st.none() | st.floats(0, 1e12, allow_nan=False))
    return Marking(tuple(sorted(marks)), draw(st.integers(0, 2**32 - 1)), now, draw(st.booleans()))


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
        draw(st.booleans()),
        draw(st.none() | markings(number)),
    )


lost = st.builds(LostEntry, digests, digests, st.none() | st.integers(0, 2**40))
sums = st.floats(0, 1e9, allow_nan=False)
ratios = st.tuples(st.floats(0.25, 4), sums, sums, sums, sums, sums | sums.map(lambda sum_: -sum_))
entries = sent() | lost | st.builds(RatioEntry, digests, st.none() | digests, ratios)


@given(entries, st.integers(0, 2**64 - 1))
def test_an_entry_comes_back_as_it_was(entry, number):
    assert decode(encode(WRITER, number, entry)) == (WRITER, number, entry)


@given(sent())
def test_the_blocks_come_back_in_the_retrievers_order(entry):
    retrieved = list(entry.as_retrieved())
    assert [retrieved.index(key) for key in entry.keys] == list(entry.ranks)
    assert set(retrieved) == set(entry.keys)


def test_entries_without_marks_are_those_of_the_earlier_version():
    keys = BlockKey(b"a" * 16), BlockKey(b"b" * 16)
    told = b"s" * 16, keys, (7, 300), (1, 0), True, True
    sent = SentEntry(b"u" * 16, b"t" * 16, *told)
    lost = LostEntry(b"u" * 16, b"t" * 16, 2)
    for number, (entry, written) in enumerate(zip((sent, lost), OF_VERSION_2, strict=True), 5):
        assert encode(WRITER, number, entry).hex() == written
        assert decode(bytes.fromhex(written)) == (WRITER, number, entry)


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


def test_a_newer_version_says_what_to_do():
    body = b"\x04" + encode(WRITER, 1, LostEntry(bytes(16), bytes(16), None))[1:-4]
    with pytest.raises(UnreadableEntryError, match=r"version 4.*one version of ctxreuse"):
        decode(body + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize(
    "entry",
    [
        RatioEntry(bytes(16), None, (5.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
        RatioEntry(bytes(16), None, (2.0, 1.0, 1.0, 1.0, float("nan"), 1.0)),
        RatioEntry(bytes(16), None, (2.0, -1.0, 1.0, 1.0, 1.0, 1.0)),
        *(
            SentEntry(bytes(16), bytes(16), None, (), (), (), False, False, marking)
            for marking in (
                Marking((1,), 0, None, True),
                Marking((0, 0), 0, None, True),
                Marking((), 0, float("inf"), True),
                Marking((), 0, -1.0, True),
            )
        ),
        SentEntry(bytes(16), bytes(16), None, (BlockKey(b"k" * 16),) * 2, (1, 1), (0, 1), False),
        SentEntry(bytes(16), bytes(16), None, (BlockKey(b"k" * 16),), (1,), (1,), False),
        SentEntry(bytes(16), bytes(16), None, (BlockKey(b"k" * 16),), (0,), (0,), False),
    ],
)
def test_what_no_planner_sends_is_no_entry(entry):
    with pytest.raises(UnreadableEntryError):
        decode(encode(WRITER, 1, entry))
