import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.context.rendering import DEFAULT_TEMPLATES, PAPER_TEMPLATES, Templates
from ctxreuse.errors import InvalidRequestError

plain_words = st.text(st.characters(exclude_characters="{}"), max_size=5)
no_digit_first = plain_words.filter(lambda words: not words[:1].isdigit())


def test_the_default_words_are_short():
    words = DEFAULT_TEMPLATES
    assert words.block_label(2) == "[Doc_2]"
    assert words.order_annotation(["[Doc_2]", "[Doc_1]", "[Doc_3]"]) == (
        "Read documents 2, 1, 3 first."
    )
    assert words.order_annotation([f"[Doc_{n}]" for n in (7, 1, 6, 2, 5, 3, 4)]) == (
        "Read documents 7, 1, 6 first."
    )
    assert words.location_annotation("[Doc_1]") == "See also [Doc_1] above."
    assert words.location_annotations(["[Doc_2]", "[Doc_1]"]) == [
        "See also [Doc_2], [Doc_1] above.",
        "",
    ]
    assert words.location_annotations([]) == []
    assert words.legend_annotation(["[Doc_1]", "[Doc_2]"]) == (
        "The documents above are [Doc_1], [Doc_2], in this order."
    )
    assert (words.before_text("[Doc_1]"), words.after_text) == ("[Doc_1] ", "")
    assert words.legend_annotation([f"[Doc_{n}]" for n in range(9, 14)]) == (
        "The documents above are [Doc_9] to [Doc_13], in this order."
    )
    assert words.separator == "\n\n"
    assert words.order_position == "before_question"
    assert words.is_plain


def test_the_papers_words_name_every_block():
    words = PAPER_TEMPLATES
    labels = [f"[Doc_{n}]" for n in (7, 1, 6, 2, 5, 3, 4)]
    assert words.order_annotation(labels) == (
        "Please read the context in the following priority order: [Doc_7] > [Doc_1] > [Doc_6] > "
        "[Doc_2] > [Doc_5] > [Doc_3] > [Doc_4] and answer the question."
    )
    assert words.location_annotations(labels[:2]) == [
        "Please refer to [Doc_7] in the previous conversation.",
        "Please refer to [Doc_1] in the previous conversation.",
    ]
    assert words.with_legend("(best first)", ["[Doc_1]", "[Doc_2]"]) == (
        "The documents above are [Doc_1], [Doc_2], in this order. (best first)"
    )
    assert DEFAULT_TEMPLATES.with_legend("(best first)", ["[Doc_1]"]) == "(best first)"
    assert not words.is_plain


@pytest.mark.parametrize(
    ("blocks", "tokens"), [(1, 6), (2, 9), (3, 12), (4, 12), (1_000, 12)], ids=str
)
def test_words_on_an_order_have_about_as_many_tokens_as_tokenizers_count(blocks, tokens):
    assert DEFAULT_TEMPLATES.order_tokens(blocks) == tokens


@pytest.mark.parametrize("words", [DEFAULT_TEMPLATES, PAPER_TEMPLATES], ids=["short", "papers"])
def test_words_on_other_blocks_are_known_from_what_is_no_such_words(words):
    labels = ["[Doc_2]", "[Doc_11]"]
    said = [
        words.order_annotation(labels),
        *words.location_annotations(labels),
        words.outdated_annotation("[Doc_2]", "[Doc_3]"),
        words.outdated_annotation("[Doc_2]"),
        words.quoted_outdated("Alice lives\nin Porto. " * 20),
    ]
    assert all(words.is_annotation(one) for one in said if one)
    others = ["Alice lives in Porto.", *(f"{one} And more." for one in said), f"So: {said[0]}"]
    assert not any(map(words.is_annotation, others))


@given(no_digit_first, no_digit_first, st.lists(st.integers(1, 10**17)))
def test_labels_tell_their_ordinals(before, after, ordinals):
    words = Templates(label=f"{before}{{ordinal}}{after}")
    assert words.label_ordinals(words.block_labels(ordinals)) == ordinals


@pytest.mark.parametrize("label", ["[Doc_0]", "[Doc_1", "Doc_1", ""])
def test_what_is_no_label_has_no_ordinal(label):
    with pytest.raises(InvalidRequestError, match="is no label"):
        DEFAULT_TEMPLATES.label_ordinals(["[Doc_1]", label])


@pytest.mark.parametrize(
    "labels",
    [
        ["[Doc_1]", "[Doc_2]", "[Doc_3]", "[Doc_5]", "[Doc_4]"],
        ["[Doc_1]", "[Doc_2]", "[Doc_3]", "[Doc_4]", "[Doc_6]"],
        ["[Doc_1]", "[Doc_1]", "[Doc_1]", "[Doc_1]", "[Doc_1]"],
        ["#1", "#2", "#3", "#4", "#5"],
        ["[Doc_01]", "[Doc_2]", "[Doc_3]", "[Doc_4]", "[Doc_5]"],
    ],
)
def test_labels_that_are_not_numbered_on_are_named_one_by_one(labels):
    assert ", ".join(labels) in DEFAULT_TEMPLATES.legend_annotation(labels)


@given(st.integers(1, 300))
def test_a_label_holds_its_ordinal(ordinal):
    assert DEFAULT_TEMPLATES.block_label(ordinal) == f"[Doc_{ordinal}]"


def test_every_template_can_be_replaced():
    words = Templates(
        label="#{ordinal}",
        block="<doc {label}>{text}</doc>",
        order="Best first: {order}.",
        order_separator=", ",
        location="See {label}.",
        legend="({labels})",
        overlap="... {label} ",
    )
    assert words.block_label(12) == "#12"
    assert (words.before_text("#1"), words.after_text) == ("<doc #1>", "</doc>")
    assert words.order_annotation(["#2", "#1"]) == "Best first: #2, #1."
    assert words.location_annotation("#2") == "See #2."
    assert words.legend_annotation(["#1", "#2", "#3"]) == "(#1, #2, #3)"
    assert words.overlap_annotation("#2") == "... #2 "


def test_what_looks_like_a_field_in_a_label_or_text_is_not_filled_in():
    words = replace(PAPER_TEMPLATES, label="%s{ordinal}\\1", block="{label}: {text}")
    assert words.block_label(1) == "%s1\\1"
    assert words.before_text("%s1\\1") == "%s1\\1: "
    assert words.order_annotation(["{order}", "{label}"]) == (
        "Please read the context in the following priority order: "
        "{order} > {label} and answer the question."
    )
    assert words.legend_annotation(["{labels}", "%s"]) == (
        "The documents above are {labels}, %s, in this order."
    )


@pytest.mark.parametrize(
    ("name", "template", "fields"),
    [
        ("label", "[Doc]", "{ordinal}"),
        ("label", "", "{ordinal}"),
        ("label", "{ordinal}{ordinal}", "{ordinal}"),
        ("label", "{number}{ordinal}", "{ordinal}"),
        ("label", "{ordinal}{", "{ordinal}"),
        ("label", "}{ordinal}", "{ordinal}"),
        ("block", "{text}", "{label} then {text}"),
        ("block", "{text} {label}", "{label} then {text}"),
        ("block", "{label} {text} {text}", "{label} then {text}"),
        ("block", "{label} {label} {text}", "{label} then {text}"),
        ("order", "Read in order.", "{order} or {numbers}"),
        ("order", "{{order}}", "{order} or {numbers}"),
        ("order", "{order}: {numbers}", "{order} or {numbers}"),
        ("location", "Please refer to {ordinal}.", "{label} or {labels}"),
        ("legend", "Above: {label}.", "{labels}"),
        ("legend", "Above.", "{labels}"),
        ("legend", "{labels} and {labels}", "{labels}"),
        ("overlap", "(continued) ", "{label}"),
    ],
)
def test_a_template_without_its_fields_or_with_others_is_refused(name, template, fields):
    with pytest.raises(InvalidRequestError) as caught:
        Templates(**{name: template})
    assert str(caught.value) == (
        f"template {name} is {template!r} (str); it must hold {fields}, "
        f"{'' if ' or ' in fields else 'each '}once, and no other braces"
    )


@pytest.mark.parametrize("name", ["label", "block", "order", "location", "legend"])
def test_a_template_that_is_no_string_is_refused(name):
    with pytest.raises(InvalidRequestError, match=rf"template {name} is None \(NoneType\)"):
        Templates(**{name: None})


def test_templates_have_known_positions_and_cannot_be_changed_later():
    with pytest.raises(InvalidRequestError) as caught:
        Templates(order_position="last")
    assert str(caught.value) == (
        "order_position is 'last' (str); choose 'before_question' or 'after_question'"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT_TEMPLATES.label = "({ordinal})"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[Doc_1] > [Doc_23]", ["1", "23"]),
        ("[Doc_1][Doc_2]", ["1", "2"]),
        ("[Doc_0] [Doc_01] [Doc_-1] [Doc_] [Doc_1 ] [doc_1] [Doc_x]", []),
        ("[Doc_999999999999999999]", ["999999999999999999"]),
        ("[Doc_" + "9" * 19 + "]", []),
        ("[Doc_" + "9" * 1_000_000 + "]", []),
        ("[Doc_\u0661]", []),  # an Arabic digit, which int() would take
        ("[[Doc_7]]", ["7"]),
    ],
    ids=range(8),
)
def test_the_label_pattern_finds_ordinals_of_at_most_18_digits(text, found):
    assert DEFAULT_TEMPLATES.label_pattern.findall(text) == found


@given(plain_words, no_digit_first, st.integers(1, 10**18 - 1))
def test_the_label_pattern_finds_every_label_whatever_the_template(before, after, ordinal):
    words = Templates(label=before + "{ordinal}" + after)
    found = words.label_pattern.search(words.block_label(ordinal))
    assert found
    assert (found.group(), int(found[1])) == (words.block_label(ordinal), ordinal)


def test_the_label_pattern_finds_a_label_with_a_digit_behind_its_ordinal():
    words = Templates(label="D{ordinal}0")
    assert words.label_pattern.findall("D10 and D20") == ["1", "2"]
