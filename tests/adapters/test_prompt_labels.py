"""Renaming labels loses none and joins none, in whole texts and piece by piece."""

from hypothesis import example, given
from hypothesis import strategies as st

from ctxreuse import Templates
from ctxreuse.adapters.prompt_labels import PromptLabels, TextStream, renamed

ordinals = st.lists(st.integers(1, 12), max_size=6, unique=True)
texts = st.lists(
    st.sampled_from([*"[]D0,. a_\\\n<>", "Doc_", "Doc\\_", "Doc", "1", "2", "12"]),
    max_size=20,
).map("".join)
templates = st.sampled_from(["[Doc_{ordinal}]", "<{ordinal}>", "Source {ordinal}:", "{ordinal}."])


@given(ordinals, st.integers(1, 40))
def test_each_label_has_one_name_on_the_other_side(sent, number):
    labels = PromptLabels(tuple(sent))
    assert labels.given(labels.as_sent(number)) == number
    assert labels.as_sent(labels.given(number)) == number
    assert (labels.given(number) <= len(sent)) == (number in sent)


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(1, 40), st.integers(1, 40))
def test_no_two_labels_become_one(sent, one, other):
    labels = PromptLabels(tuple(sent))
    assert (labels.given(one) == labels.given(other)) == (one == other)
    assert labels.as_sent(labels.given(one)) == one


def test_naming_a_block_looks_at_few_labels():
    looked = 0

    class Counted(int):
        def __lt__(self, other: int) -> bool:
            nonlocal looked
            looked += 1
            return int(self) < other

    labels = PromptLabels(tuple(range(10_000, 0, -1)))
    labels.renames, labels.as_sent(20_000), labels.given(20_000)
    vars(labels)["_in_order"] = list(map(Counted, labels._in_order))
    vars(labels)["_free_before"] = list(map(Counted, labels._free_before))
    text = "".join(f"[Doc_{number}]" for number in range(10_001, 10_101))
    assert labels.to_given(labels.to_sent(text)) == text
    assert looked < 100 * 2 * 16


@given(ordinals, texts, templates)
def test_a_text_comes_back_as_it_was(sent, text, label):
    labels = PromptLabels(tuple(sent), Templates(label=label))
    assert labels.to_sent(labels.to_given(text)) == text
    assert labels.to_given(labels.to_sent(text)) == text


@given(ordinals, texts, templates, st.lists(st.integers(1, 5), max_size=40))
@example([2], "DDoc_1", "[Doc_{ordinal}]", [2])
def test_a_stream_shows_what_the_whole_text_shows(sent, text, label, sizes):
    labels = PromptLabels(tuple(sent), Templates(label=label))
    stream, shown, start = TextStream(labels), "", 0
    for size in [*sizes, len(text)]:
        shown += stream.feed(text[start : start + size])
        start += size
        assert labels.to_given(text).startswith(shown)
    assert shown + stream.flush() == labels.to_given(text)


def test_a_stream_keeps_back_no_more_than_a_label():
    stream = TextStream(PromptLabels((2, 1)))
    for _ in range(1_000):
        stream.feed("[Doc_")
    assert len(stream.feed("")) + len(stream.flush()) <= 5


def test_only_texts_are_renamed_and_not_without_end():
    labels = PromptLabels((2, 1))
    value = {"Doc_1": ["Doc_1", 1, None, ("Doc_2", b"Doc_1")], "deep": {"a": {"b": "Doc_2"}}}
    assert renamed(value, labels.to_given) == {
        "Doc_1": ["Doc_2", 1, None, ("Doc_1", b"Doc_1")],
        "deep": {"a": {"b": "Doc_1"}},
    }
    unchanged = {"a": ["b"]}
    assert renamed(unchanged, labels.to_given) is unchanged
    value: list[object] = ["Doc_1"]
    value.append(value)
    new = renamed(value, PromptLabels((2, 1)).to_given)
    assert new[0] == "Doc_2"
