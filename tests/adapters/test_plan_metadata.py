import json
from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner
from ctxreuse.adapters.formatting import format_documents
from ctxreuse.adapters.plan_metadata import (
    METADATA_KEY,
    DocumentPosition,
    Overlap,
    PlannedDocument,
    believed,
    document_metadata,
    left_out_words,
    plan_of,
    position_of,
    positions_as_planned,
    retrievers_order,
)
from ctxreuse.context.rendering import DEFAULT_TEMPLATES, Templates
from ctxreuse.planning.plan import Plan
from langchain_ctxreuse import ReuseCompressor, format_context
from llamaindex_ctxreuse import ReusePostprocessor
from mem0_ctxreuse import ReuseMemory

pytestmark = pytest.mark.usefixtures("paper_words")

TEMPLATES = Templates(label="[Doc_{id}]")
PLAN = {"parts": [["[Doc_1]", "a"], ["[Doc_2]", "b"]], "order_annotation": None}


def carrying(text: str, carried: Any) -> PlannedDocument:
    return PlannedDocument(ContextBlock(id=text, text=text), {METADATA_KEY: carried})


def moved_plan() -> Plan:
    """Return a plan that sends "b" behind "a", though it was ranked first."""
    planner = ReusePlanner()
    texts = {name: f"{name} " * 40 for name in "abc"}
    blocks = {name: ContextBlock(id=name, text=text) for name, text in texts.items()}
    planner.plan(ContextRequest([blocks["a"], blocks["b"]], "?"))
    plan = planner.plan(ContextRequest([blocks["b"], blocks["a"], blocks["c"]], "?"))
    assert [block.id for block in plan.blocks] == ["a", "b", "c"]
    return plan


def second_turn(tenant: str = "", conversation: str = "c", left_out: str = "a") -> PlannedDocument:
    """Return the document "b" of a turn that leaves out what the turn before shows."""
    planner = ReusePlanner()
    old, new = (ContextBlock(id=name, text=f"{name} " * 40) for name in (left_out, "b"))

    def planned(blocks: list[ContextBlock], history: list[dict[str, str]]) -> Plan:
        whose = {"tenant": tenant, "conversation_id": conversation}
        return planner.plan(ContextRequest(blocks, "?", history=history, **whose))

    shown = planned([old], []).messages()
    plan = planned([old, new], shown)
    assert plan.references == (left_out,)
    metadata = document_metadata(plan, with_order=True)
    return PlannedDocument(new, {METADATA_KEY: metadata.position(1, "[Doc_b]")})


def planned_documents() -> list[PlannedDocument]:
    plan = moved_plan()
    metadata = document_metadata(plan, with_order=True)
    rank_of = {"b": 0, "a": 1, "c": 2}
    documents = [
        PlannedDocument(block, {METADATA_KEY: metadata.position(rank_of[str(block.id)], label)})
        for block, label in zip(plan.blocks, plan.labels, strict=True)
    ]
    return [*documents, carrying("words", metadata.annotation("words"))]


def test_plan_metadata_is_json_which_the_documents_of_a_plan_share():
    documents = planned_documents()
    again = [PlannedDocument(one.block, json.loads(json.dumps(one.metadata))) for one in documents]
    for document, read_back in zip(believed(documents), believed(again), strict=True):
        assert position_of(read_back.metadata) == position_of(document.metadata)
        assert plan_of(read_back.metadata) == plan_of(document.metadata) is not None

    given = planned_documents()
    first, second, *_ = believed(given)
    assert plan_of(first.metadata) is plan_of(second.metadata)
    assert ["plan" in one.metadata[METADATA_KEY] for one in given] == [True, False, False, False]
    assert given[0].metadata[METADATA_KEY]["plan"] == plan_of(first.metadata)


def test_what_documents_carry_grows_with_their_number():
    def size(number: int) -> int:
        blocks = [ContextBlock(id=f"document {n:04}", text=f"text {n:04}") for n in range(number)]
        plan = ReusePlanner().plan(ContextRequest(blocks, "?"))
        metadata = document_metadata(plan, with_order=True)
        return len(json.dumps([metadata.position(0, "[Doc_1]") for _ in range(number)]))

    assert size(400) < 4.1 * size(100)


def test_the_retrievers_order_is_found_again_in_one_plan_without_the_annotation():
    documents = planned_documents()
    assert retrievers_order(documents) == [1, 0, 2]
    assert retrievers_order(documents[1:]) == [0, 1]
    assert retrievers_order([documents[2], documents[0], documents[1]]) == [0, 1, 2], "reranked"
    assert retrievers_order([]) == []
    *_, annotation = planned_documents()
    assert annotation.is_annotation
    assert not PlannedDocument(ContextBlock(text="other"), annotation.metadata).is_annotation

    first, other = (
        planned_documents()[0],
        carrying("b", {"rank": 1, "label": "[Doc_2]", "plan": PLAN}),
    )
    assert positions_as_planned([first]) == [position_of(first.metadata)]
    assert positions_as_planned([first, other]) is None
    assert positions_as_planned([]) is None


def test_so_it_is_where_two_documents_have_the_same_label():
    planner = ReusePlanner(templates=DEFAULT_TEMPLATES)
    a, b, c = (ContextBlock(id=str(number), text=f"{number} " * 40) for number in (143, 1, 310))
    assert DEFAULT_TEMPLATES.label_of(a) == DEFAULT_TEMPLATES.label_of(c)
    for blocks in ([a, b, c], [c, b, a]):
        plan = planner.plan(ContextRequest(blocks, "?"))
        metadata = document_metadata(plan, with_order=True)
        documents = [
            PlannedDocument(
                one, {METADATA_KEY: metadata.position(blocks.index(one), plan.label_of[one.key])}
            )
            for one in plan.blocks
        ]
    assert plan.blocks == (a, b, c)
    assert retrievers_order(documents) == [2, 1, 0]


@pytest.mark.parametrize(
    "carried",
    [
        "text",
        {},
        {"annotation": True, "plan": PLAN},
        {"annotation": "words", "plan": PLAN},
        {"rank": 0, "label": "[Doc_1]"},
        {"rank": 0, "label": "[Doc_1]", "plan": {}},
        {"rank": 0, "label": "[Doc_1]", "plan": {"parts": "ab"}},
        {"rank": 0, "label": "[Doc_1]", "plan": {"parts": [1]}},
        {"rank": 0, "label": "[Doc_1]", "plan": {"parts": [["[Doc_1]"]]}},
        {"rank": 0, "label": "[Doc_1]", "plan": {"parts": [[{}, 1]]}},
        {"rank": 0, "label": "[Doc_1]", "plan": {"parts": [["[Doc_1]", []]]}},
        {"rank": 0, "label": "[Doc_1]", "plan": {"parts": [["[Doc_1]", 1, None]]}},
        {"rank": 0, "label": "[Doc_1]", "plan": {"parts": [], "order_annotation": 7}},
        {"rank": "0", "label": "[Doc_1]", "plan": PLAN},
        {"rank": 0, "label": ["[Doc_1]"], "plan": PLAN},
    ],
)
def test_metadata_that_is_not_valid_changes_nothing(carried):
    document = carrying("text", carried)
    assert positions_as_planned(believed([document])) is None
    assert retrievers_order([document]) == [0]
    assert format_documents([document], TEMPLATES) == "[Doc_text] text"


@pytest.mark.parametrize("overlap", [None, 3, {}, {"characters": 3}, {"characters": "3"}])
def test_an_overlap_that_is_not_valid_leaves_nothing_out(overlap):
    document = carrying("text", {"rank": 0, "label": "[Doc_1]", "plan": PLAN, "overlap": overlap})
    assert positions_as_planned(believed([document])) is None
    assert format_documents([document], TEMPLATES) == "[Doc_text] text"


def test_an_overlap_is_read_back_and_words_on_left_out_documents_have_to_stay():
    said = {"characters": 2, "label": "[Doc_1]", "digest": "00"}
    carried = {"rank": 1, "label": "[Doc_2]", "plan": PLAN, "overlap": said}
    assert position_of({METADATA_KEY: carried}) == DocumentPosition(
        1, "[Doc_2]", PLAN, Overlap(2, "[Doc_1]", "00")
    )
    words = "Please refer to [Doc_a] in the previous conversation."
    document = second_turn()
    assert left_out_words([document, document]) == [words]
    assert retrievers_order([document]) is None


def test_templates_of_another_type_are_refused():
    with pytest.raises(ValueError, match="templates must be Templates, not 'x'"):
        format_documents([], "x")


@pytest.mark.parametrize("depth", [1_000, 100_000])
@pytest.mark.parametrize("nest", [lambda inner: {"plan": inner}, lambda inner: [inner]])
def test_metadata_that_nests_too_deeply_is_ignored_in_every_framework(depth, nest):
    deep: Any = {}
    for _ in range(depth):
        deep = nest(deep)
    texts, metadata = ["one " * 40, "two " * 40], {METADATA_KEY: {"plan": deep}}
    one, two = (DEFAULT_TEMPLATES.label_of(ContextBlock(text=text)) for text in texts)
    labelled = f"{one} {texts[0]}\n\n{two} {texts[1]}"

    documents = [Document(text, metadata=metadata) for text in texts]
    assert format_context(documents) == labelled
    compressed = ReuseCompressor().compress_documents(documents, "Which?")
    assert [document.page_content for document in compressed] == texts

    hidden = {"metadata": metadata, "excluded_llm_metadata_keys": [METADATA_KEY]}
    nodes = [NodeWithScore(node=TextNode(text=text, **hidden)) for text in texts]
    postprocessor = ReusePostprocessor()
    planned = postprocessor.postprocess_nodes(nodes, query_str="Which?")
    assert [node.text for node in planned] == texts
    assert postprocessor.faults == 0

    class Notes:
        def search(self, query: str) -> dict[str, Any]:
            return {"results": [{"id": text, "memory": text} for text in texts], **metadata}

    memory = ReuseMemory(Notes())
    assert memory.messages("Which?")[0]["content"] == (
        f"[Doc_{texts[0]}] {texts[0]}\n\n[Doc_{texts[1]}] {texts[1]}\n\nWhich?"
    )

    assert memory.faults == 0
