import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from helpers import contexts_in
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_document_helpers import document, documents, letters_of, no_sockets, text_of

from ctxreuse import PAPER_TEMPLATES, ContextRequest, ReusePlanner, Templates
from ctxreuse.adapters.document_planner import RetrievedItems
from ctxreuse.context.rendering import render_turn
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from langchain_ctxreuse import ReuseCompressor, format_context
from langchain_ctxreuse.documents.document_plans import (
    LangChainDocumentPlanner,
    document_block,
)

pytestmark = pytest.mark.usefixtures("paper_words")

__all__ = ["no_sockets"]

A, B, C, D = (text_of(letter) for letter in "abcd")
TEMPLATES = replace(PAPER_TEMPLATES, label="[Doc_{id}]")


def order(*letters: str) -> str:
    return TEMPLATES.order_annotation([f"[Doc_id-{letter}]" for letter in letters])


def planned(letters: str, annotation: Any = "append", **arguments: Any) -> list[Document]:
    """Return documents sorted by letter, retrieved in the order given."""
    used = LangChainDocumentPlanner(ReusePlanner(**arguments), annotation, "Test")
    used.plan(RetrievedItems(documents("".join(sorted(letters))), "?", NO_SCOPE))
    return used.plan(RetrievedItems(documents(letters), "?", NO_SCOPE))


def second_turn(letters: str, annotation: Any = "append") -> list[Document]:
    """Return the documents of a turn behind one that showed a and b."""
    used = LangChainDocumentPlanner(ReusePlanner(), annotation, "Test")
    scope = RequestScope(conversation_id="t", history=())
    first = format_context(used.plan(RetrievedItems(documents("ab"), "?", scope)))
    scope = scope.inside(history=[{"role": "user", "content": f"{first}\n\n?"}])
    return used.plan(RetrievedItems(documents(letters), "?", scope))


@pytest.mark.parametrize("annotation", ["append", "metadata"])
def test_planned_documents_are_shown_as_the_plan_says(annotation):
    assert format_context(planned("cba", annotation)) == (
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n[Doc_id-c] {C}\n\n{order(*'cba')}"
    )


def test_no_annotation_is_shown_where_it_is_off_or_the_order_is_the_retrievers():
    assert (
        format_context(planned("cba", "off"))
        == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n[Doc_id-c] {C}"
    )
    assert format_context(planned("abc")) == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n[Doc_id-c] {C}"
    assert format_context([]) == ""
    found = planned("acb")
    assert letters_of(found[:3]) == "abc"
    assert format_context([found[0], found[1]]) == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}"


@given(contexts=st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), max_size=6))
def test_a_whole_plan_reads_as_the_core_renders_it(contexts):
    used, alone = LangChainDocumentPlanner(ReusePlanner(), "append", "Test"), ReusePlanner()
    for letters in contexts:
        plan = alone.plan(ContextRequest([document_block(one) for one in documents(letters)]))
        shown = format_context(used.plan(RetrievedItems(documents(letters), "?", NO_SCOPE)))
        assert shown == render_turn(plan.parts, plan.order_annotation, "", plan.templates)


def test_what_was_taken_away_or_changed_since_is_shown_as_it_is_now():
    a, b, c, note = planned("cba")
    shown = partial(format_context, templates=TEMPLATES)
    assert shown([a, c, note]) == f"[Doc_id-a] {A}\n\n[Doc_id-c] {C}\n\n{order(*'ca')}"
    assert shown([a, b]) == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n{order(*'ba')}"
    assert shown([b]) == f"[Doc_id-b] {B}"

    a, b, c, note = planned("cba")
    shorter = b.model_copy(update={"page_content": "b, in short"})
    assert format_context([a, shorter, c, note]) == (
        f"[Doc_id-a] {A}\n\n[Doc_id-b] b, in short\n\n[Doc_id-c] {C}\n\n{order(*'cba')}"
    )


def test_what_was_left_out_is_pointed_to_where_it_stood_and_not_forgotten_when_sorted():
    expected = f"Please refer to [Doc_id-b] in the previous conversation.\n\n[Doc_id-c] {C}"
    assert format_context(second_turn("bc")) == expected
    assert format_context(second_turn("bc", "metadata")) == expected
    first, second, note = second_turn("cbd")
    assert format_context([second, first, note], TEMPLATES) == (
        f"[Doc_id-d] {D}\n\n[Doc_id-c] {C}\n\n"
        "Please refer to [Doc_id-b] in the previous conversation."
    )


@pytest.mark.parametrize("annotation", ["append", "metadata"])
def test_where_all_blocks_are_left_out_the_text_says_where_they_stand(annotation):
    assert format_context(second_turn("ba", annotation)) == (
        "Please refer to [Doc_id-b] in the previous conversation.\n\n"
        "Please refer to [Doc_id-a] in the previous conversation."
    )


def test_documents_in_another_order_are_shown_in_it_and_can_be_planned():
    a, b, c, note = planned("cba")
    shown = format_context([c, a, b, note], TEMPLATES)
    assert shown == f"[Doc_id-c] {C}\n\n[Doc_id-a] {A}\n\n[Doc_id-b] {B}"
    [found] = contexts_in(f"Use this:\n{shown}\n\nWhich?")
    assert [block.id for block in found.blocks] == ["id-c", "id-a", "id-b"]
    shown = format_context(documents("ba"), TEMPLATES)
    assert shown == f"[Doc_id-b] {B}\n\n[Doc_id-a] {A}"
    assert len(contexts_in(shown)) == 1

    a, b, _ = planned("ba")
    c, d, _ = planned("dc")
    assert format_context([a, b, c, d], TEMPLATES) == (
        f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n[Doc_id-c] {C}\n\n[Doc_id-d] {D}"
    )


def test_a_planned_text_is_left_alone_also_where_its_beginning_was_rendered_without_a_plan():
    assert format_context(documents("ab"), TEMPLATES) == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}"
    text = format_context(planned("ba"))
    assert text == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}\n\n{order(*'ba')}"
    [found] = contexts_in(f"Use this:\n{text}\n\nWhich?")
    assert found.blocks == ()


def test_two_documents_with_one_text_are_shown_once_unless_one_was_changed():
    used = LangChainDocumentPlanner(ReusePlanner(), "append", "Test")
    twins = [document("a", page=1), document("a", page=2), document("b")]
    found = used.plan(RetrievedItems(twins, "?", NO_SCOPE))
    assert len(found) == 3
    assert format_context(found) == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}"
    twins = [document("a", page=1), document("a", page=2)]
    one, other = used.plan(RetrievedItems(twins, "?", NO_SCOPE))
    changed = other.model_copy(update={"page_content": "now another"})
    shown = format_context([one, changed], TEMPLATES)
    assert shown == f"[Doc_id-a] {A}\n\n[Doc_id-a] now another"


def test_plans_survive_json_and_documents_are_not_changed():
    found = planned("cba")
    again = [Document(**json.loads(json.dumps(one.model_dump(exclude={"type"})))) for one in found]
    assert format_context(again) == format_context(found)

    found = planned("cba")
    before = deepcopy(found)
    format_context(found)
    format_context(found[::-1])
    assert found == before


def test_other_words_can_be_used():
    templates = Templates(
        label="<{id}>", order="Best first: {order}.", order_separator=" > ", separator="\n"
    )
    a, b, c, note = planned("cba", templates=templates)
    assert format_context([a, b, c, note], templates) == (
        f"<id-a> {A}\n<id-b> {B}\n<id-c> {C}\nBest first: <id-c> > <id-b> > <id-a>."
    )
    assert format_context([a, c], templates) == (
        f"<id-a> {A}\n<id-c> {C}\nBest first: <id-c> > <id-a>."
    )


OVERLAP = "this sentence stands at the end of one chunk and at the start of the next"
CHUNKS = [
    Document("First of all, " + "x" * 300 + OVERLAP, id="1"),
    Document(OVERLAP + " and goes on" + "y" * 300, id="2"),
]


def chunks() -> list[Document]:
    used = LangChainDocumentPlanner(ReusePlanner(trim_overlaps=True), "append", "Test")
    return used.plan(RetrievedItems(CHUNKS, "?", NO_SCOPE))


def test_overlaps_are_left_out_as_the_plan_says_with_the_history_too():
    first, second = CHUNKS
    assert format_context(chunks()) == (
        f"[Doc_1] {first.page_content}\n\n"
        f"[Doc_2] (continues [Doc_1]) {second.page_content[len(OVERLAP) :]}"
    )

    used = LangChainDocumentPlanner(ReusePlanner(trim_overlaps=True), "append", "Test")
    scope = RequestScope(conversation_id="t", history=())
    first = format_context(used.plan(RetrievedItems(CHUNKS[:1], "?", scope)))
    scope = scope.inside(history=[{"role": "user", "content": first}])
    second = used.plan(RetrievedItems(CHUNKS[1:], "?", scope))
    assert format_context(second) == (
        f"[Doc_2] (continues [Doc_1]) {CHUNKS[1].page_content[len(OVERLAP) :]}"
    )
    changed = second[0].model_copy(update={"page_content": "another text" * 20})
    assert format_context([changed]) == f"[Doc_2] {changed.page_content}"


def test_an_overlap_is_shown_where_the_chunk_before_was_taken_away_or_changed():
    first, second = chunks()
    assert format_context([second]) == f"[Doc_2] {second.page_content}"
    changed = first.model_copy(update={"page_content": "changed"})
    assert format_context([changed, second]) == (
        f"[Doc_1] changed\n\n[Doc_2] {second.page_content}"
    )
    changed = second.model_copy(update={"page_content": "changed " + second.page_content})
    assert format_context([first, changed]) == (
        f"[Doc_1] {first.page_content}\n\n[Doc_2] {changed.page_content}"
    )


def test_it_can_stand_in_a_chain():
    compressor = ReuseCompressor()
    chain = (
        RunnableLambda(documents)
        | (lambda found: compressor.compress_documents(found, "?"))
        | partial(format_context, templates=TEMPLATES)
    )
    assert chain.invoke("ab") == f"[Doc_id-a] {A}\n\n[Doc_id-b] {B}"


@pytest.mark.parametrize("wrong", ["a secret text", None, Document("a secret text"), 3])
def test_something_that_is_no_list_of_documents_is_refused(wrong):
    with pytest.raises(ValueError, match="takes a list of Documents, not") as refusal:
        format_context(wrong)
    assert "secret" not in str(refusal.value)


def test_a_list_with_something_else_in_it_is_refused():
    with pytest.raises(ValueError, match="not one with str in it"):
        format_context([document("a"), "a secret text"])
