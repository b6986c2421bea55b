"""Documents as the text of a prompt, and those that an answer cites."""

from typing import Any

import pytest
from block_labels import WAYS_TO_CITE

from ctxreuse import PAPER_TEMPLATES, ContextBlock
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.errors import InvalidRequestError
from ctxreuse.pipeline.context_finder import contexts_in
from ctxreuse.pipeline.formatting import cited_positions, joined_forms, labelled_block
from ctxreuse.pipeline.known_texts import Form, known_texts

BY_ID = Templates(label="[Doc_{id}]")
ALL_TEMPLATES = [DEFAULT_TEMPLATES, PAPER_TEMPLATES, BY_ID]
TEXTS = {letter: f"{letter.upper()} is a river that is known." for letter in "abc"}


def join(letters: str, separator: str = "\n\n", tenant: str = "", **options: Any) -> str:
    texts = [TEXTS[letter] for letter in letters]
    templates = options.pop("templates", DEFAULT_TEMPLATES)
    forms = [Form(f"Title: {letter}\n{TEXTS[letter]}") for letter in letters]
    options.setdefault("ids", list(letters))
    return joined_forms(forms, texts, separator, tenant, templates, **options)


def label_of(letter: str, templates: Templates) -> str:
    return templates.label_of(ContextBlock(id=letter, text=f"Title: {letter}\n{TEXTS[letter]}"))


def found(message: str, tenant: str = "") -> list[list[str]]:
    """Return the texts of the contexts of a message as the index sees them."""
    shown = contexts_in(known_texts(), tenant, message)
    assert shown is not None
    return [[block.text for block in one.blocks] for one in shown.contexts]


@pytest.mark.parametrize("templates", ALL_TEMPLATES)
def test_each_stands_under_its_label_once_where_that_is_asked_for(templates):
    text = join("caba", labels=True, templates=templates)
    shown = {letter: f"Title: {letter}\n{TEXTS[letter]}" for letter in "abc"}
    labels = {letter: label_of(letter, templates) for letter in "abc"}
    assert text == "\n\n".join(f"{labels[letter]} {shown[letter]}" for letter in "cab")
    assert found(text) == [[shown[letter] for letter in "cab"]], "what stands under the label"
    again = join("bc", labels=True, templates=templates)
    assert again.startswith(labels["b"]), "the same text has the same label in every prompt"


def test_the_applications_own_labels_stand_in_their_place():
    text = join("ab", own_labels=["<1>", "<2>"])
    assert text == f"<1> Title: a\n{TEXTS['a']}\n\n<2> Title: b\n{TEXTS['b']}"
    assert found(text) == [text.split("\n\n")], "with their labels: another one is another text"


def test_an_id_makes_a_block_another_one_only_where_labels_show_it():
    form = Form(TEXTS["a"])
    same = labelled_block(form, None, DEFAULT_TEMPLATES)
    assert labelled_block(form, "fresh-uuid", DEFAULT_TEMPLATES).key == same.key
    assert labelled_block(form, "x", BY_ID).key != labelled_block(form, "y", BY_ID).key


@pytest.mark.parametrize(("says", "cited"), WAYS_TO_CITE)
@pytest.mark.parametrize("templates", ALL_TEMPLATES)
def test_all_ways_to_cite_are_read_in_the_answers_order(says, cited, templates):
    labels = {letter: label_of(letter, templates) for letter in "abc"}
    names = {f"{letter}_": label.strip("[]") for letter, label in labels.items()}
    text = says.format(**labels, **names)
    for answer in (text, text.replace("_", "\\_")):  # as Markdown has it
        places = cited_positions(answer, [labels[letter] for letter in "cab"])
        assert ["cab"[place] for place in places] == list(cited)


def test_a_label_that_begins_another_ones_is_not_cited_with_it():
    labels = ["Doc_1", "Doc_12"]
    assert cited_positions("As Doc_12 says.", labels) == [1]
    assert cited_positions("(Doc_1, Doc_12)", labels) == [0, 1]


@pytest.mark.parametrize("answer", [5, None, b"a"])
def test_an_answer_of_another_type_is_refused(answer):
    with pytest.raises(InvalidRequestError, match="an answer's text"):
        cited_positions(answer, ["[x]"])
