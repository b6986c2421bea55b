import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.context.rendering import SHORTEST_OVERLAP, repeated_length

pytestmark = pytest.mark.usefixtures("paper_words")

SHARED = "This sentence stands at the end of one chunk and opens the next one. "
FIRST = ContextBlock(id=1, text="The first chunk. " + SHARED)
SECOND = ContextBlock(id=2, text=SHARED + "The second chunk.")
OTHER = ContextBlock(id=3, text="Something else.")


def contents(planner, *contexts):
    return [planner.plan(ContextRequest(blocks, "Q?"), "none").content for blocks in contexts]


def test_the_repeated_beginning_is_counted_in_characters():
    assert repeated_length(FIRST.text, SECOND.text) == len(SHARED)
    assert repeated_length(SECOND.text, FIRST.text) == 0
    assert repeated_length("x" * 100, "x" * 100) == 99
    assert repeated_length("a" * SHORTEST_OVERLAP, "a" * SHORTEST_OVERLAP + "b") == SHORTEST_OVERLAP
    assert repeated_length("a" * 39, "a" * 39 + "b") == 0
    assert repeated_length("a" * 1_000_000, "a" * 999_999 + "b") == 4_000


@given(st.text(), st.text(min_size=40), st.text(min_size=1))
def test_what_is_left_out_stands_at_the_end_of_the_earlier_text(before, shared, after):
    length = repeated_length(before + shared, shared + after)
    assert length == 0 or length >= SHORTEST_OVERLAP
    assert (before + shared).endswith((shared + after)[:length])
    assert length < len(shared + after)


def test_an_overlap_is_shown_whole_by_default_and_where_it_comes_first():
    (content,) = contents(ReusePlanner(), [FIRST, SECOND])
    assert content == f"[Doc_1] {FIRST.text}\n\n[Doc_2] {SECOND.text}\n\nQ?"
    (content,) = contents(ReusePlanner(trim_overlaps=True), [SECOND, FIRST])
    assert content == f"[Doc_2] {SECOND.text}\n\n[Doc_1] {FIRST.text}\n\nQ?"


def test_only_the_rendering_leaves_the_repeated_part_out_and_common_first_bytes_stay():
    planner = ReusePlanner(trim_overlaps=True)
    plan = planner.plan(ContextRequest([FIRST, SECOND], "Q?"))
    assert plan.blocks == (FIRST, SECOND)
    assert plan.content == (
        f"[Doc_1] {FIRST.text}\n\n[Doc_2] (continues [Doc_1]) The second chunk.\n\nQ?"
    )
    alone, both = contents(planner, [FIRST, SECOND], [FIRST, SECOND, OTHER])
    assert both.startswith(alone.removesuffix("Q?"))


def test_what_repeats_an_earlier_turn_is_left_out_and_never_referred_to():
    chat = ReusePlanner(trim_overlaps=True).conversation("c")
    chat.plan([FIRST], "One?")
    chat.record("Yes.")
    assert chat.plan([SECOND], "Two?").content == (
        "[Doc_2] (continues [Doc_1]) The second chunk.\n\nTwo?"
    )

    chat = ReusePlanner(trim_overlaps=True).conversation("c")
    chat.plan([FIRST, SECOND], "One?")
    chat.record("Yes.")
    plan = chat.plan([SECOND, FIRST], "Two?")
    assert plan.references == (1,)
    assert plan.blocks == (SECOND,)


def test_a_block_is_compared_with_the_64_texts_before_it():
    planner = ReusePlanner(trim_overlaps=True)
    for between, is_shortened in ((63, True), (64, False)):
        others = [ContextBlock(id=f"o{n}", text=f"Other {n}.") for n in range(between)]
        (content,) = contents(planner, [FIRST, *others, SECOND])
        assert ("(continues [Doc_1])" in content) == is_shortened
        assert content.count(SHARED) == 2 - is_shortened
