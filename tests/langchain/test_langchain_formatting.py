"""Documents as text for a prompt: what is written around each of them moves with it."""

from copy import deepcopy
from typing import Any

import pytest
from block_labels import labelled
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_document_helpers import LetterRetriever, document, documents, text_of
from langchain_model_helpers import RecordingModel, letters_in, model

from ctxreuse import ReusePlanner, Templates
from langchain_ctxreuse import ReuseChatModel, format_context

A, B, C = map(text_of, "abc")
XML = '<document source="{source}">\n{page_content}\n</document>'
SHAPES = {
    "texts": {},
    "titles": {"document_prompt": "### {source}\n\n{page_content}"},
    "XML": {"document_prompt": PromptTemplate.from_template(XML), "separator": "\n"},
    "source behind": {"document_prompt": "{page_content}\n(from {source})"},
    "rules": {"separator": "\n---\n"},
    "labels": {"labels": True},
    "titles and labels": {"document_prompt": "{source}: {page_content}", "labels": True},
    "numbers": {"label": lambda one: f"[{'abcdefgh'.index(one.page_content[0])}]"},
}


def test_documents_are_shown_as_an_application_joins_them():
    found = documents("ba")
    before = deepcopy(found)
    assert format_context(found) == f"{B}\n\n{A}"
    assert format_context(found, separator="\n") == f"{B}\n{A}"
    assert format_context(found, "({source}) {page_content}") == f"(b.txt) {B}\n\n(a.txt) {A}"
    assert format_context(found, labels=True) == labelled(B, A)
    sources = PromptTemplate.from_template("{source}")
    assert format_context(found, sources, labels=True) == labelled("b.txt", "a.txt")
    assert format_context(found, label="source") == f"b.txt {B}\n\na.txt {A}"
    twins = [document("a", page=1), document("b"), document("a", page=2)]
    assert format_context(twins) == f"{A}\n\n{B}\n\n{A}"
    assert format_context(twins, labels=True) == labelled(A, B), "once where it has a label"
    assert format_context([]) == format_context([], labels=True) == ""
    assert found == before


def test_other_words_can_be_used():
    words = Templates(label="<{id}>", block="{label}: {text}", separator="\n\n")
    shown = format_context(documents("ab"), None, "; ", labels=True, templates=words)
    assert shown == f"<id-a>: {A}; <id-b>: {B}"


@pytest.mark.parametrize("shape", SHAPES)
@examples(30)
@given(words=st.lists(st.text("abcdefgh", min_size=2, max_size=6), min_size=1, max_size=4))
def test_the_model_gets_every_document_with_what_is_written_on_it(shape, words):
    inner = RecordingModel()
    wrapped = model(inner, planner=ReusePlanner())
    options: Any = SHAPES[shape]
    separator = options.get("separator", "\n\n")
    for word in words:
        found = documents("".join(dict.fromkeys(word)))
        wrapped.invoke(f"Use these:\n\n{format_context(found, **options)}\n\nWhich?")
        text = inner.calls[-1].text.removeprefix("Use these:\n\n").removesuffix("\n\nWhich?")
        shown = sorted(format_context([one], **options) for one in found)
        body, _, ranking = text.partition("Read documents ")
        body = body.rstrip("\n")
        order = sorted(shown, key=body.index)
        assert body == separator.join(order)
        assert not ranking or order != [format_context([one], **options) for one in found]
        assert not (ranking and shape == "numbers"), "the texts have numbers of their own"


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_planned(shape, inner):
    wrapped = model(inner)
    for word in ("abc", "cab"):
        wrapped.invoke(f"{format_context(documents(word), **SHAPES[shape])}\n\nWhich?")
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc"]
    assert wrapped.prompt_statistics.planned == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_documents_with_line_breaks_at_their_ends_are_joined_as_before(shape, inner):
    options: Any = {"separator": "\n", **SHAPES[shape]}
    a, b = documents("ab")
    b.page_content = f"{b.page_content}\n"
    wrapped = model(inner)
    for found in ([a, b], [b, a]):
        wrapped.invoke(f"{format_context(found, **options)}\n\nWhich?")
    assert all(call.text.startswith(format_context([a, b], **options)) for call in inner.calls)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"documents": [document("a"), "a secret text"]}, "not one with str in it"),
        ({"documents": "a secret text"}, "takes a list of Documents, not str"),
        ({"documents": Document("a secret text")}, "takes a list of Documents, not Document"),
        ({"document_prompt": 3}, "document_prompt: it must be a prompt template"),
        ({"document_prompt": "{source}: {{page_content}}"}, "add {page_content}, or pass"),
        ({"document_prompt": "{page}: {page_content}"}, r"documents\[1\], id 'id-b', has no page"),
        ({"documents": [Document("")], "document_prompt": "{a}{page_content}"}, r"0\] has no a"),
        ({"document_prompt": "{page_content"}, "document_prompt: expected '}'"),
        ({"separator": None}, "separator"),
        ({"labels": "yes"}, "labels"),
        ({"label": "page"}, "which no field of the metadata is called"),
        ({"templates": "words"}, "templates"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(ValueError, match=said) as refusal:
        format_context(**{"documents": [document("a", page=1), document("b")], **options})
    assert "secret" not in str(refusal.value)


def test_what_only_format_context_puts_in_is_planned_on_demand(inner):
    wrapped = ReuseChatModel(inner=inner, window_s=0, find_retrieved=False)
    LetterRetriever().invoke("abcxyz")
    for word in ("abc", "cab"):
        wrapped.invoke(f"{format_context(documents(word))}\n\nWhich?")
    for word in ("xyz", "zxy"):
        wrapped.invoke("\n\n".join([*map(text_of, word), "Which?"]))
    assert [letters_in(call.text) for call in inner.calls] == ["abc", "abc", "xyz", "zxy"]
