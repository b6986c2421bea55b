import pickle
from copy import deepcopy

import pytest
from adapter_conformance import FaultyPlanner
from langchain_classic.retrievers import MultiQueryRetriever
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_document_helpers import LetterRetriever, document, documents, letters_of, no_sockets
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from python_processes import python

import langchain_ctxreuse
from ctxreuse import ReusePlanner
from ctxreuse.adapters.document_planner import RetrievedItems
from ctxreuse.adapters.plan_metadata import DocumentPosition, believed, copied, position_of
from ctxreuse.context.scope import NO_SCOPE, RequestScope
from ctxreuse.errors import MissingExtraError
from langchain_ctxreuse import ReuseMiddleware, ReuseRetriever, by_rank, format_context
from langchain_ctxreuse.documents.document_plans import (
    LangChainDocumentPlanner,
    document_block,
    planned_document,
    without_plan,
)

pytestmark = pytest.mark.usefixtures("paper_words")

__all__ = ["no_sockets"]


def document_planner(
    annotation: str = "append", planner: ReusePlanner | None = None
) -> LangChainDocumentPlanner:
    return LangChainDocumentPlanner(planner or ReusePlanner(), annotation, "Test")


def planned(letters: str, annotation: str = "append") -> list[Document]:
    """Return documents in another order than the retriever's, with the annotation behind them."""
    used = document_planner(annotation)
    used.plan(RetrievedItems(documents("".join(sorted(letters))), "?", NO_SCOPE))
    found = used.plan(RetrievedItems(documents(letters), "?", NO_SCOPE))
    assert letters_of(found)[: len(letters)] == "".join(sorted(letters))
    return found


def places(found: list[Document]) -> list[DocumentPosition]:
    given = believed([planned_document(one) for one in found])
    return [place for one in given if (place := position_of(one.metadata)) is not None]


def test_exports_and_representations_say_where_they_are_defined_and_no_planner():
    assert ReuseMiddleware.__module__ == "langchain_ctxreuse.agents.middleware"
    with pytest.raises(AttributeError, match="no attribute 'ReuseNothing'"):
        langchain_ctxreuse.ReuseNothing  # noqa: B018
    assert "planner" not in repr(ReuseRetriever(retriever=LetterRetriever()))


def test_documents_need_langchain_core_only():
    code = (
        "import sys; sys.modules['langchain'] = sys.modules['langgraph'] = None\n"
        "from langchain_ctxreuse import ReuseRetriever, ReuseCompressor, format_context\n"
        "try:\n"
        "    from langchain_ctxreuse import ReuseMiddleware\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = python(code)
    assert run.stdout == f"{MissingExtraError('ReuseMiddleware', 'langchain')}\n"


def test_a_missing_langchain_names_the_pip_command():
    code = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "try:\n"
        "    import langchain_ctxreuse\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = python(code)
    assert run.stdout == f"{MissingExtraError('langchain_ctxreuse', 'langchain')}\n"


def test_a_documents_identity_is_its_id_and_text():
    assert document_block(Document("text", id="d")).id == "d"
    assert document_block(Document("text")).key == document_block(Document("text")).key
    assert (
        document_block(Document("text", id="d")).key != document_block(Document("new", id="d")).key
    )


def test_only_planned_documents_where_the_plan_put_them_go_back_to_the_retrievers_order():
    found = planned("cba")
    assert planned_document(found[-1]).is_annotation
    assert without_plan(found) == documents("cba")
    assert without_plan(found[1:]) == documents("cb"), "also where some were taken away"
    a, b, c, _ = planned("cba")
    assert without_plan([b, a, c]) == documents("bac")
    a, b, _ = planned("ba")
    d, e, _ = planned("ed")
    assert without_plan([a, d, b, e]) == documents("adbe")
    a, b, _ = planned("ba")
    assert without_plan([a, document("x"), b]) == documents("axb")


def test_a_plan_that_left_something_out_is_not_made_anew():
    used = document_planner()
    conversation = RequestScope(conversation_id="t", history=())
    used.plan(RetrievedItems(documents("ab"), "?", conversation))
    history = ({"role": "user", "content": f"[Doc_id-a] {document('a').page_content}\n\n?"},)
    found = used.plan(RetrievedItems(documents("ca"), "?", conversation.inside(history=history)))
    assert letters_of(found) == "cP", "P: Please refer to [Doc_id-a]"
    assert without_plan(found) is None
    assert document_planner().plan(RetrievedItems(found, "?", NO_SCOPE)) == found


def test_planning_twice_gives_one_plan_and_changes_nothing_but_the_request():
    found = planned("cba")
    again = document_planner(planner=ReusePlanner()).plan(RetrievedItems(found, "?", NO_SCOPE))
    assert letters_of(again) == "cba", "another planner, so the order as retrieved"
    assert [place.rank for place in places(again)] == [0, 1, 2]
    assert not any(planned_document(one).is_annotation for one in again)

    used = document_planner()
    for letters in ("abc", "cba"):
        once = used.plan(RetrievedItems(documents(letters), "?", NO_SCOPE))
        twice = used.plan(RetrievedItems(once, "?", NO_SCOPE))
        assert [one.page_content for one in twice] == [one.page_content for one in once]
        assert [place.rank for place in places(twice)] == [place.rank for place in places(once)]


def test_metadata_under_our_name_that_is_not_valid_is_not_taken_for_a_plan():
    for mark in ("text", {}, {"plan": 3}, {"plan": {}}, {"rank": 0, "label": "x", "plan": None}):
        found = Document("text", metadata={"ctxreuse": mark})
        [seen] = believed([planned_document(found)])
        assert position_of(seen.metadata) is None
        assert not seen.is_annotation
        assert without_plan([found]) == [Document("text")]


def test_off_mode_keeps_the_annotation_out_of_the_metadata_and_a_fault_leaves_the_plan():
    found = planned("cba", "off")
    assert [place.plan["order_annotation"] for place in places(found)] == [None] * 3
    found = planned("cba")
    faulty = document_planner(planner=FaultyPlanner())
    assert faulty.plan(RetrievedItems(found, "?", NO_SCOPE)) == found
    assert faulty.faults == 1


def test_a_mark_does_not_change_what_makes_documents_equal():
    found = planned("cba")
    for one in (*found[:3], *planned("bca")[:3]):
        [other] = [other for other in documents("abc") if other.id == one.id]
        assert one == other
        assert other == one
        assert one.metadata == other.metadata
        assert str(one.metadata) == str(other.metadata)
        assert one != document(one.id[-1], source="another")
    assert "ctxreuse" in repr(found[0].metadata)


def test_planned_documents_can_be_copied_and_stored():
    found = planned("cba")
    shown = format_context(found)
    assert "priority order" in shown
    serializer = JsonPlusSerializer()
    for again in (
        deepcopy(found),
        pickle.loads(pickle.dumps(found)),
        serializer.loads_typed(serializer.dumps_typed(found)),
        [Document(**one.model_dump()) for one in found],
    ):
        assert again == found
        assert format_context(again) == shown


def test_documents_that_several_planned_queries_found_are_merged_as_without_plans():
    def merged(retriever: BaseRetriever) -> list[str]:
        queries = RunnableLambda(lambda _: ["abc", "bca", "cbd"])
        many = MultiQueryRetriever(retriever=retriever, llm_chain=queries)
        return sorted(one.page_content[0] for one in many.invoke("?"))

    planned = ReuseRetriever(retriever=LetterRetriever(), annotation="metadata")
    assert merged(planned) == merged(LetterRetriever()) == list("abcd")


def test_copied_shares_no_dict_or_list():
    handle = object()
    metadata = {"a": [{"b": [1]}], "handle": handle}
    copy = copied(metadata)
    assert copy == metadata
    copy["a"][0]["b"].append(2)
    assert metadata["a"] == [{"b": [1]}]
    assert copy["handle"] is handle


@pytest.mark.parametrize("annotation", ["append", "metadata", "off"])
def test_by_rank_returns_planned_documents_best_first(annotation):
    found = planned("dba", annotation)
    assert letters_of(found[:3]) == "abd"
    assert letters_of(by_rank(found)) == "dba"
    assert letters_of(by_rank(found[1:])) == "db"
    assert letters_of(by_rank(found)[:1]) == "d"
    assert {one.id for one in by_rank(found)} == {"id-a", "id-b", "id-d"}


def test_by_rank_leaves_documents_as_they_are_that_nobody_planned_or_somebody_moved():
    found = planned("dba")
    assert letters_of(by_rank([found[1], found[0], found[2]])) == "bad"
    assert letters_of(by_rank(documents("cab"))) == "cab"
    assert by_rank([]) == []
    with pytest.raises(ValueError, match="by_rank takes a list of Documents"):
        by_rank("text")
