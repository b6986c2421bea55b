"""Retriever and postprocessor: the application's own nodes, in planned order, and no more."""

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from adapter_conformance import AdapterConformance
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.schema import (
    ImageNode,
    IndexNode,
    MediaResource,
    MetadataMode,
    Node,
    NodeWithScore,
    QueryBundle,
    TextNode,
)
from llamaindex_helpers import LetterRetriever, letter_nodes

from ctxreuse import ReusePlanner
from llamaindex_ctxreuse import ReusePostprocessor, ReuseRetriever
from llamaindex_ctxreuse.nodes.run_nodes import AnnotationNode

KINDS = ("postprocessor", "retriever")


def letters(nodes: Sequence[NodeWithScore]) -> str:
    return "".join(node.text[0] for node in nodes)


class Given(BaseRetriever):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, list[NodeWithScore]] = {}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.nodes[query_bundle.query_str]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        await asyncio.sleep(0)
        return self.nodes[query_bundle.query_str]


class Driven:
    def __init__(self, kind: str, planner: Any = None, **options: Any) -> None:
        self._inner = Given()
        self.component: Any = ReusePostprocessor(planner=planner, **options)
        if kind == "retriever":
            self.component = ReuseRetriever(self._inner, planner=planner, **options)

    @property
    def faults(self) -> int:
        return int(self.component.faults)

    def run(self, nodes: list[NodeWithScore], query: str = "q?") -> list[NodeWithScore]:
        if isinstance(self.component, ReusePostprocessor):
            return self.component.postprocess_nodes(nodes, query_str=query)
        return self.component.retrieve(self._named(nodes, query))

    async def arun(self, nodes: list[NodeWithScore], query: str = "q?") -> list[NodeWithScore]:
        if isinstance(self.component, ReusePostprocessor):
            return await self.component.apostprocess_nodes(nodes, query_str=query)
        return await self.component.aretrieve(self._named(nodes, query))

    def _named(self, nodes: list[NodeWithScore], query: str) -> str:
        query = f"{query} {len(self._inner.nodes)}"
        self._inner.nodes[query] = nodes
        return query


class OfNodes(AdapterConformance):
    kind: str

    def adapter(self, planner: Any) -> Driven:
        return Driven(self.kind, planner)

    def items(self, word: str) -> list[NodeWithScore]:
        """Return nodes of which no two have one id: LlamaIndex's own retriever drops such ones."""
        nodes = letter_nodes(word)
        for place, one in enumerate(nodes):
            one.node.id_ = f"{place}"
        return nodes

    def text_of(self, item: NodeWithScore) -> str:
        return item.text


class TestReusePostprocessor(OfNodes):
    kind = "postprocessor"


class TestReuseRetriever(OfNodes):
    kind = "retriever"


@pytest.mark.parametrize("kind", KINDS)
class TestBoth:
    def test_the_ranking_is_one_more_node_for_who_asks_for_it(self, kind):
        driven = Driven(kind, annotation=True)
        assert letters(driven.run(letter_nodes("abc"))) == "abc", "nothing was moved"
        nodes = letter_nodes("dba")
        for node in nodes:
            node.node.metadata |= {"file": f"{node.node.node_id}.txt"}
            node.node.excluded_llm_metadata_keys = ["file"]
        nodes[0].node.metadata["only here"] = 1
        *planned, last = driven.run(nodes)
        places = ", ".join(str(1 + letters(planned).index(one)) for one in "dba")
        assert last.text == f"Read documents {places} first."
        assert isinstance(last.node, AnnotationNode)
        assert last.score == min(one.score for one in nodes)
        assert last.metadata == {"file": "", "source": ""}
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert last.node.get_content(mode) == last.text
        again = driven.run([*planned, last])
        assert letters(again[:-1]) == letters(planned)
        assert sum(isinstance(one.node, AnnotationNode) for one in again) == 1

    def test_repeats_are_left_out_for_who_asks_for_it(self, kind):
        twice = [
            NodeWithScore(node=TextNode(text=one.text), score=score)
            for one, score in zip(letter_nodes("aba"), (0.9, 0.8, 0.7), strict=True)
        ]
        assert letters(Driven(kind).run(twice)) == "aba"
        [first, second] = Driven(kind, drop_repeats=True).run(twice)
        assert (first, second) == (twice[0], twice[1])

    @pytest.mark.parametrize("option", ["annotation", "drop_repeats"])
    def test_options_of_another_kind_are_refused(self, kind, option):
        with pytest.raises(ValueError, match=option):
            Driven(kind, **{option: "append"})

    @pytest.mark.parametrize("mode", ["everything", None])
    def test_a_metadata_mode_that_is_none_is_refused(self, kind, mode):
        with pytest.raises(ValueError, match=r"MetadataMode\.LLM"):
            Driven(kind, metadata_mode=mode)


class TestIdentityAndRank:
    def test_identity_is_the_text_with_the_metadata_that_is_rendered(self):
        def order(mode: MetadataMode) -> str:
            postprocessor = ReusePostprocessor(metadata_mode=mode)
            postprocessor.postprocess_nodes(letter_nodes("abc"))
            again = letter_nodes("cba")
            for one in again:
                one.node.metadata["source"] = "moved"
                one.node.id_ = "another id"
            return letters(postprocessor.postprocess_nodes(again))

        assert order(MetadataMode.LLM) == order(MetadataMode.ALL) == "cba", "other texts"
        assert order(MetadataMode.NONE) == "abc", "the same texts as before"

    def test_images_and_other_media_pass_through_whole_and_no_text_stands_for_one(self):
        caption = "a caption " * 50
        text = NodeWithScore(node=TextNode(text=caption), score=0.5)
        image = NodeWithScore(node=ImageNode(text=caption, image_url="http://x/a.png"), score=0.5)
        media = Node(id_="m", image_resource=MediaResource(url="http://x/b.png"))
        link = IndexNode(id_="l", text="see there", index_id="there")
        given = [NodeWithScore(node=one, score=0.5) for one in (media, link)]
        kept = ReusePostprocessor(drop_repeats=True).postprocess_nodes([text, image, *given])
        assert sorted(map(id, kept)) == sorted(map(id, [text, image, *given]))

    @pytest.mark.parametrize(
        ("scores", "ranking"),
        [
            ([0.1, 0.3, 0.2], "2, 3, 1"),
            ([0.3, 0.2, 0.1], None),
            ([0.1, 0.2, 0.3], None),  # distances: less is nearer
            ([0.2, 0.2, 0.2], None),
            ([None, None, None], None),
            ([None, 0.1, 0.2], "1, 3, 2"),
            ([0.1, None, 0.2], "3, 2, 1"),
            ([float("nan"), 0.1, 0.2], "1, 3, 2"),
        ],
    )
    def test_higher_scores_rank_first_and_the_others_keep_their_places(self, scores, ranking):
        postprocessor = ReusePostprocessor(annotation=True)
        postprocessor.postprocess_nodes(letter_nodes("abc"))
        nodes = letter_nodes("abc")
        for one, score in zip(nodes, scores, strict=True):
            one.score = score
        planned = postprocessor.postprocess_nodes(nodes)
        said = [] if ranking is None else [f"Read documents {ranking} first."]
        assert [one.text for one in planned[3:]] == said
        assert letters(planned[:3]) == "abc"


class TestPostprocessor:
    def test_without_a_planner_all_share_that_of_the_process(self):
        for word in ("abc", "cba"):
            planned = ReusePostprocessor(planner=None).postprocess_nodes(letter_nodes(word))
            assert letters(planned) == "abc"
            assert letters(ReuseRetriever(LetterRetriever(), planner=None).retrieve(word)) == "abc"
        postprocessor = ReusePostprocessor(annotation=True)
        again = pickle.loads(pickle.dumps(postprocessor))
        assert isinstance(postprocessor.planner, ReusePlanner), "the original keeps its own"
        assert again.planner is not postprocessor.planner
        assert again.annotation is True
        assert letters(again.postprocess_nodes(letter_nodes("ab"))) == "ab"

    def test_it_is_serialized_by_its_name_and_settings(self):
        postprocessor = ReusePostprocessor(drop_repeats=True, metadata_mode=MetadataMode.NONE)
        data = postprocessor.to_dict()
        assert data == {
            "annotation": False,
            "drop_repeats": True,
            "metadata_mode": "none",
            "class_name": "ReusePostprocessor",
        }
        again = ReusePostprocessor.from_dict(data)
        assert (again.drop_repeats, again.metadata_mode) == (True, MetadataMode.NONE)

    def test_an_unknown_argument_is_refused_and_a_query_may_be_missing(self):
        with pytest.raises(ValueError, match="anotation"):
            ReusePostprocessor(anotation=True)
        assert letters(ReusePostprocessor().postprocess_nodes(letter_nodes("ab"))) == "ab"
        assert ReusePostprocessor().postprocess_nodes([]) == []


class TestRetriever:
    def test_the_events_show_nodes_as_retrieved_and_as_planned(self):
        debug = LlamaDebugHandler(print_trace_on_end=False)
        retriever = ReuseRetriever(LetterRetriever(CallbackManager([debug])))
        retriever.retrieve("abc")
        debug.flush_event_logs()
        retriever.retrieve("cba")
        ended = [
            letters(end.payload["nodes"]) for _, end in debug.get_event_pairs(CBEventType.RETRIEVE)
        ]
        assert sorted(ended) == ["abc", "cba"]

    async def test_what_the_retriever_inside_raises_reaches_the_caller(self):
        class Broken(BaseRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                raise LookupError("no store")

        retriever = ReuseRetriever(Broken())
        with pytest.raises(LookupError, match="no store"):
            retriever.retrieve("q")
        with pytest.raises(LookupError, match="no store"):
            await retriever.aretrieve("q")
        assert retriever.faults == 0

    async def test_the_retriever_inside_is_awaited_not_blocked_on(self):
        class Slow(BaseRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                raise AssertionError("the synchronous way was taken")

            async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                await release.wait()
                return letter_nodes("a")

        release = asyncio.Event()
        task = asyncio.create_task(ReuseRetriever(Slow()).aretrieve("q"))
        await asyncio.sleep(0)
        release.set()
        assert letters(await task) == "a"

    def test_links_prompts_and_careless_classes_inside_will_do(self):
        class Linking(BaseRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                there = letter_nodes("b")[0].node
                link = IndexNode(text="link", index_id="there", obj=there)
                return [*letter_nodes("a"), NodeWithScore(node=link, score=0.3)]

        assert letters(ReuseRetriever(Linking()).retrieve("q")) == "ab"

        class Careless(BaseRetriever):
            def __init__(self) -> None:
                pass

            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                return letter_nodes("ab")

        assert letters(ReuseRetriever(Careless()).retrieve("q")) == "ab"
        assert ReuseRetriever(LetterRetriever()).get_prompts() == {}
        assert isinstance(ReuseRetriever(LetterRetriever()).retriever, LetterRetriever)

    @pytest.mark.parametrize("retriever", [None, "retriever", object()])
    def test_a_retriever_that_is_none_is_refused(self, retriever):
        with pytest.raises(ValueError, match="retriever must be a LlamaIndex BaseRetriever"):
            ReuseRetriever(retriever)
