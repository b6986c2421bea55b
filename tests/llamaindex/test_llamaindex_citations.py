"""Programs that show sources: a label in an answer names the nodes that have it."""

import pytest
from block_labels import label
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ToolCallBlock,
)
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llamaindex_helpers import letter_nodes, letter_text

from ctxreuse import Templates
from ctxreuse.errors import InvalidRequestError
from llamaindex_ctxreuse import cited_nodes

A, B, C = (label(letter_text(letter)) for letter in "abc")
CALL = ToolCallBlock(tool_name="cite", tool_kwargs={"sources": [A]})


def test_a_label_names_its_node_in_every_form_of_an_answer():
    nodes = letter_nodes("cab")
    for said, cited in ((f"It is so {B}, as {C} says.", "bc"), (f"See [{A[1:-1]}; {C[1:]}", "ac")):
        answers = [
            said,
            CompletionResponse(text=said),
            ChatResponse(message=ChatMessage(role="assistant", content=said)),
        ]
        for answer in answers:
            found = cited_nodes(answer, nodes, metadata_mode=MetadataMode.NONE)
            assert [one.node.node_id for one in found] == [f"id-{letter}" for letter in cited]
    assert cited_nodes(ChatResponse(message=ChatMessage(blocks=[CALL])), nodes) == []


def test_the_metadata_that_the_model_was_shown_is_part_of_what_a_label_names():
    nodes = letter_nodes("ab")
    shown = label(f"source: b.txt\n\n{letter_text('b')}")
    assert cited_nodes(shown, nodes) == nodes[1:]
    assert cited_nodes(shown, nodes, metadata_mode=MetadataMode.NONE) == []


def test_nodes_that_share_a_label_are_cited_together():
    nodes = [NodeWithScore(node=TextNode(id_=name, text="the same")) for name in "xy"]
    assert cited_nodes(label("the same"), nodes) == nodes
    assert cited_nodes("(y)", nodes, templates=Templates(label="[{id}]")) == nodes[1:]


def test_wrong_arguments_are_named():
    with pytest.raises(InvalidRequestError, match="cited_nodes takes a list of NodeWithScore"):
        cited_nodes(A, "nodes")
    with pytest.raises(InvalidRequestError, match="not 7"):
        cited_nodes(7, letter_nodes("a"))
