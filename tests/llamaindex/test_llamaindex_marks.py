"""A node's mark is no part of what frameworks compare, hash or show."""

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llamaindex_helpers import letter_nodes

from ctxreuse import ReusePlanner
from llamaindex_ctxreuse import ReusePostprocessor, ReuseRetriever, format_context


def planned() -> list[NodeWithScore]:
    postprocessor = ReusePostprocessor(annotation="metadata")
    postprocessor.postprocess_nodes(letter_nodes("abc"), query_str="?")
    return postprocessor.postprocess_nodes(letter_nodes("cab"), query_str="?")


def test_a_planned_node_is_equal_to_the_one_retrieved():
    found = planned()
    retrieved = {one.node.node_id: one.node for one in letter_nodes("abc")}
    assert [one.node.node_id for one in found] == ["id-a", "id-b", "id-c"]
    for one in found:
        other = retrieved[one.node.node_id]
        assert one.node.hash == other.hash
        assert one.node.metadata == other.metadata
        assert "ctxreuse" in one.node.metadata
    ranked = [one.metadata["ctxreuse"]["label"] for one in (found[2], *found[:2])]
    assert f"Read documents {', '.join(ranked)} first." in format_context(found)
    again = [NodeWithScore(node=TextNode.from_dict(one.node.to_dict())) for one in found]
    assert format_context(again) == format_context(found)


def test_retrievers_are_fused_as_without_plans():
    class Letters(BaseRetriever):
        def __init__(self, letters: str) -> None:
            self.letters = letters
            super().__init__()

        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return letter_nodes(self.letters)

    def fused(*retrievers: BaseRetriever) -> list[str]:
        fusion = QueryFusionRetriever(
            list(retrievers), llm=MockLLM(), num_queries=1, similarity_top_k=9, use_async=False
        )
        return sorted(one.node.node_id for one in fusion.retrieve("?"))

    plain = Letters("abcd"), Letters("dcbe")
    planner = ReusePlanner()
    first, second = (ReuseRetriever(one, planner=planner, annotation="metadata") for one in plain)
    wanted = [f"id-{letter}" for letter in "abcde"]
    assert fused(*plain) == fused(first, second) == fused(first, plain[1]) == wanted
