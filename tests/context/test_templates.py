import dataclasses
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.blocks import ContextBlock
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, PAPER_TEMPLATES, Templates
from ctxreuse.errors import InvalidRequestError

plain_words = st.text(st.characters(exclude_characters="{}"), max_size=5)
one_line = plain_words.filter(lambda words: "\n" not in words)


def test_the_default_words_are_short():
    words = DEFAULT_TEMPLATES
    assert words.order_annotation(["2", "1", "3"]) == "Read documents 2, 1, 3 first."
    assert words.order_annotation(["[MZPN]", *"162534"]) == "Read documents [MZPN], 1, 6 first."
    assert words.location_annotations(["[MZPN]"]) == ["See also [MZPN] above."]
    assert words.location_annotations(["[MZPN]", "[KZLN]"]) == [
        "See also [MZPN], [KZLN] above.",
        "",
    ]
    assert words.location_annotations([]) == []
    assert (words.before_text("[MZPN]"), words.after_text) == ("[MZPN] ", "")
    assert words.separator == "\n\n"
    assert words.order_position == "before_question"
    assert words.is_plain


def test_the_papers_words_name_every_block():
    words = PAPER_TEMPLATES
    labels = [words.label_of(ContextBlock(id=n, text=f"Text {n}.")) for n in range(5)]
    assert all(re.fullmatch(r"\[Doc_[A-Z]{4}\]", label) for label in labels)
    assert words.order_annotation(labels) == (
        "Please read the context in the following priority order: "
        f"{' > '.join(labels)} and answer the question."
    )
    assert words.location_annotations(labels[:2]) == [
        f"Please refer to {labels[0]} in the previous conversation.",
        f"Please refer to {labels[1]} in the previous conversation.",
    ]
    assert not words.is_plain


@pytest.mark.parametrize(
    ("blocks", "tokens"), [(1, 6), (2, 9), (3, 12), (4, 12), (1_000, 12)], ids=str
)
def test_words_on_an_order_have_about_as_many_tokens_as_tokenizers_count(blocks, tokens):
    assert DEFAULT_TEMPLATES.order_tokens(blocks) == tokens


@pytest.mark.parametrize(
    "words",
    [DEFAULT_TEMPLATES, PAPER_TEMPLATES, Templates(label="[{id}]")],
    ids=["short", "papers", "ids"],
)
def test_words_on_other_blocks_are_known_from_what_is_no_such_words(words):
    labels = [words.label_of(ContextBlock(id=text, text=text)) for text in "abc"]
    said = [
        words.order_annotation(labels),
        words.order_annotation(["2", "1", "3"]),
        *words.location_annotations(labels),
        words.outdated_annotation(*labels[:2]),
        words.outdated_annotation(labels[0]),
        words.quoted_outdated("Alice lives\nin Porto. " * 20),
    ]
    assert all(words.is_annotation(one) for one in said if one)
    others = ["Alice lives in Porto.", *(f"{one} And more." for one in said), f"So: {said[0]}"]
    others += [f"Read documents {', '.join(labels * 20)}", f"See also {', '.join(labels * 20)}"]
    assert not any(map(words.is_annotation, others))


@given(st.text(), st.sampled_from([None, 1, "1", "a"]))
def test_a_label_is_made_from_the_text_alone_or_is_the_id(text, block_id):
    block = ContextBlock(id=block_id, text=text)
    assert re.fullmatch("\\[[A-Z]{4}\\]", DEFAULT_TEMPLATES.label_of(block))
    assert DEFAULT_TEMPLATES.label_of(block) == DEFAULT_TEMPLATES.label_of(ContextBlock(text=text))
    assert Templates(label="<{id}>").label_of(block) == f"<{block.id}>"


def test_labels_are_the_same_in_every_process():
    blocks = [ContextBlock(id=n, text=f"Text {n}.") for n in range(3)]
    assert list(map(DEFAULT_TEMPLATES.label_of, blocks)) == ["[EWSB]", "[RAFG]", "[OUBV]"]


def test_what_looks_like_a_field_in_a_label_or_text_is_not_filled_in():
    words = replace(PAPER_TEMPLATES, label="%s{id}\\1", block="{label}: {text}")
    assert words.label_of(ContextBlock(id="{id}", text="")) == "%s{id}\\1"
    assert words.before_text("%s{text}\\1") == "%s{text}\\1: "
    assert words.order_annotation(["{order}", "{label}"]) == (
        "Please read the context in the following priority order: "
        "{order} > {label} and answer the question."
    )
    assert words.outdated_annotation("{label}", "{old}") == "{old} replaces {label}."
    with pytest.raises(InvalidRequestError, match=r"label must be a string, not 0\.0 \(float\)"):
        words.outdated_annotation("{label}", 0.0)


@pytest.mark.parametrize(
    ("name", "template", "fields"),
    [
        ("label", "[Doc]", "{letters} or {id}"),
        ("label", "", "{letters} or {id}"),
        ("label", "{letters}{letters}", "{letters} or {id}"),
        ("label", "{letters}{", "{letters} or {id}"),
        ("block", "{text}", "{label} then {text}"),
        ("block", "{text} {label}", "{label} then {text}"),
        ("block", "{label} {label} {text}", "{label} then {text}"),
        ("order", "Read in order.", "{order}"),
        ("order", "{{order}}", "{order}"),
        ("order", "{order}: {numbers}", "{order}"),
        ("location", "Please refer to {letters}.", "{label} or {labels}"),
    ],
)
def test_a_template_without_its_fields_or_with_others_is_refused(name, template, fields):
    with pytest.raises(InvalidRequestError) as caught:
        Templates(**{name: template})
    assert str(caught.value) == (
        f"template {name} is {template!r} (str); it must hold {fields}, "
        f"{'' if ' or ' in fields else 'each '}once, and no other braces"
    )


def test_templates_have_known_positions_and_cannot_be_changed_later():
    said = r"position 'last' \(str\); choose one of 'before_question', 'after_question'$"
    with pytest.raises(InvalidRequestError, match=said):
        Templates(order_position="last")
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_TEMPLATES.label = "({letters})"


@pytest.mark.parametrize(
    ("text", "begin", "anywhere"),
    [
        ("[BCDF] one\n\n[GHJK] two", ["[BCDF]", "[GHJK]"], ["[BCDF]", "[GHJK]"]),
        (
            "[BCDF] one\n[GHJK] two [LMNP] three",
            ["[BCDF]", "[GHJK]"],
            ["[BCDF]", "[GHJK]", "[LMNP]"],
        ),
        ("See [BCDF].\n[GHJK]", [], ["[BCDF]", "[GHJK]"]),
        ("[bcd] [bcdfg] [Bcdf] [bcda] [bc\ndf] [1234] [Doc_1] bcdf", [], []),
        ("[[BCDF]] one", [], ["[BCDF]"]),
        ("[" + "b" * 1_000_000 + "]", [], []),
    ],
    ids=range(6),
)
def test_labels_are_found_where_blocks_begin_and_anywhere(text, begin, anywhere):
    assert DEFAULT_TEMPLATES.label_pattern.findall(text) == begin
    assert DEFAULT_TEMPLATES.inner_pattern.findall(text) == anywhere


@given(one_line, one_line, st.sampled_from(["{letters}", "{id}"]), st.integers(0, 9), st.text())
def test_every_label_is_found_where_its_block_begins(before, after, field, name, text):
    words = Templates(label=before + field + after, block="<{label}>{text}", separator=" | ")
    label = words.label_of(ContextBlock(id=name, text=text))
    for begin in ("", "Look.\n", "Look. | "):
        found = words.label_pattern.search(f"{begin}<{label}>{text}", len(begin))
        assert found
        assert (found.start(), found[1]) == (len(begin), label)
