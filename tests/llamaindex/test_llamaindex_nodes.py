import asyncio
import pickle
from collections.abc import Sequence
from threading import Thread, current_thread
from typing import Any

import pytest
from adapter_conformance import AdapterConformance, FaultyPlanner, Retrieved, Shown, documents
from block_labels import label
from helpers import contexts_in
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.postprocessor import LongContextReorder
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
from llamaindex_helpers import LetterRetriever, labelled, letter_nodes, letter_text

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReusePostprocessor, ReuseRetriever, format_context
from llamaindex_ctxreuse.nodes.node_plans import AnnotationNode

pytestmark = pytest.mark.usefixtures("paper_words")


def letters(nodes: Sequence[NodeWithScore]) -> str:
    return "".join(node.text[0] for node in nodes)


def shown(nodes: Sequence[NodeWithScore]) -> list[Shown]:
    found = []
    for scored in nodes:
        mark = scored.metadata.get("ctxreuse", {})
        is_annotation = isinstance(scored.node, AnnotationNode)
        found.append(
            Shown(
                id=None if is_annotation else scored.node_id,
                text=scored.text,
                source=scored.metadata.get("source"),
                rank=mark.get("rank"),
                label=mark.get("label"),
                plan=mark.get("plan"),
                is_annotation=is_annotation,
            )
        )
    return found


def nodes_of(retrieved: Sequence[Retrieved]) -> list[NodeWithScore]:
    return [
        NodeWithScore(
            node=TextNode(id_=one.id, text=one.text, metadata={"source": one.source}),
            score=1 / (1 + rank),
        )
        for rank, one in enumerate(retrieved)
    ]


class DrivenPostprocessor:
    def __init__(self, planner: Any, annotation: Any) -> None:
        self._postprocessor = ReusePostprocessor(planner=planner, annotation=annotation)
        self._given: list[tuple[list[NodeWithScore], list[NodeWithScore]]] = []

    @property
    def faults(self) -> int:
        return self._postprocessor.faults

    def run(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        nodes = self._remembered(retrieved)
        return shown(self._postprocessor.postprocess_nodes(nodes, query_str=query))

    async def arun(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        nodes = self._remembered(retrieved)
        return shown(await self._postprocessor.apostprocess_nodes(nodes, query_str=query))

    def inputs_are_untouched(self) -> bool:
        return all(nodes == copies for nodes, copies in self._given)

    def _remembered(self, retrieved: Sequence[Retrieved]) -> list[NodeWithScore]:
        nodes = nodes_of(retrieved)
        self._given.append((nodes, [one.model_copy(deep=True) for one in nodes]))
        return nodes


class NodesConform(AdapterConformance):
    def test_append_puts_the_annotation_behind_the_documents(self) -> None:
        """No node holds it: see test_llamaindex_synthesis."""
        adapter = self.adapter(ReusePlanner(), "append")
        adapter.run(documents("abc"), "q?")
        assert [one.is_annotation for one in adapter.run(documents("dba"), "q?")] == [False] * 3

    def test_the_papers_words_say_which_labels_the_documents_have(self) -> None:
        """They stand where the other words do: see test_llamaindex_synthesis."""


class TestReusePostprocessor(NodesConform):
    def adapter(self, planner: Any, annotation: Any = "metadata") -> DrivenPostprocessor:
        return DrivenPostprocessor(planner, annotation)


class FixedRetriever(BaseRetriever):
    """Retrieves, for each query, what the test says; keeps it to see whether it is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, list[NodeWithScore]] = {}
        self.copies: dict[str, list[NodeWithScore]] = {}

    def holds(self, retrieved: Sequence[Retrieved]) -> str:
        query = f"q{len(self.nodes)}"
        self.nodes[query] = nodes_of(retrieved)
        self.copies[query] = [one.model_copy(deep=True) for one in self.nodes[query]]
        return query

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.nodes[query_bundle.query_str]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        await asyncio.sleep(0)
        return self.nodes[query_bundle.query_str]


class DrivenRetriever:
    def __init__(self, planner: Any, annotation: Any) -> None:
        self._inner = FixedRetriever()
        self._retriever = ReuseRetriever(self._inner, planner=planner, annotation=annotation)

    @property
    def faults(self) -> int:
        return self._retriever.faults

    def run(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        return shown(self._retriever.retrieve(self._inner.holds(retrieved)))

    async def arun(self, retrieved: Sequence[Retrieved], query: str) -> list[Shown]:
        return shown(await self._retriever.aretrieve(self._inner.holds(retrieved)))

    def inputs_are_untouched(self) -> bool:
        return self._inner.nodes == self._inner.copies


class TestReuseRetriever(NodesConform):
    def adapter(self, planner: Any, annotation: Any = "metadata") -> DrivenRetriever:
        return DrivenRetriever(planner, annotation)


class TestPlannedNodes:
    def test_scores_stay_with_their_nodes_if_they_have_any(self):
        postprocessor = ReusePostprocessor()
        postprocessor.postprocess_nodes(letter_nodes("abc"))
        planned = postprocessor.postprocess_nodes(letter_nodes("dba"))
        assert [(one.text[0], one.score) for one in planned] == [
            ("a", 0.8),
            ("b", 0.9),
            ("d", 1.0),
        ]

        postprocessor = ReusePostprocessor()
        for word in ("abc", "dba"):
            nodes = [NodeWithScore(node=one.node) for one in letter_nodes(word)]
            planned = postprocessor.postprocess_nodes(nodes)
        assert [one.score for one in planned] == [None] * 3

        [node] = letter_nodes("a")
        planned = ReusePostprocessor().postprocess_nodes(
            [node, NodeWithScore(node=node.node, score=0.2)]
        )
        assert [one.score for one in planned] == [1, 0.2]
        assert {one.metadata["ctxreuse"]["label"] for one in planned} == {"[Doc_id-a]"}

    def test_the_text_that_models_and_embeddings_see_is_unchanged(self):
        [before] = letter_nodes("a")
        [after] = ReusePostprocessor().postprocess_nodes([before])
        for mode in (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE):
            assert after.node.get_content(mode) == before.node.get_content(mode)
        assert "ctxreuse" in after.metadata

    def test_identity_is_the_text_with_the_metadata_that_is_rendered(self):
        def plans_of(mode: MetadataMode) -> list[str]:
            planner = ReusePlanner()
            postprocessor = ReusePostprocessor(planner=planner, metadata_mode=mode)
            postprocessor.postprocess_nodes(letter_nodes("abc"))
            again = letter_nodes("cba")
            for one in again:
                one.node.metadata["source"] = "moved"
            return [one.text[0] for one in postprocessor.postprocess_nodes(again)[:3]]

        assert plans_of(MetadataMode.LLM) == ["c", "b", "a"], "other texts than before"
        assert plans_of(MetadataMode.NONE) == ["a", "b", "c"], "the same texts as before"

    def test_the_annotation_has_the_metadata_names_of_the_nodes_and_shows_none(self):
        planner = ReusePlanner()
        history = sent_history(planner, "ab")
        nodes = letter_nodes("ba")
        for node in nodes:
            node.node.metadata |= {"file": f"{node.node.node_id}.txt"}
            node.node.excluded_llm_metadata_keys = ["file", "only here"]
        nodes[0].node.metadata["only here"] = 1
        with request_context(conversation_id="c", history=history):
            postprocessor = ReusePostprocessor(planner=planner)
            [annotation] = postprocessor.postprocess_nodes(nodes)
        assert isinstance(annotation.node, AnnotationNode)
        assert annotation.metadata["file"] == ""
        assert "only here" not in annotation.metadata
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert annotation.node.get_content(mode) == annotation.text

    def test_without_a_planner_each_makes_its_own_as_in_another_process(self):
        for word in ("abc", "cba"):
            planned = ReusePostprocessor(planner=None).postprocess_nodes(letter_nodes(word))
            assert letters(planned) == word
            assert letters(ReuseRetriever(LetterRetriever(), planner=None).retrieve(word)) == word

        postprocessor = ReusePostprocessor(annotation="metadata")
        again = pickle.loads(pickle.dumps(postprocessor))
        assert isinstance(postprocessor.planner, ReusePlanner), "the original keeps its own"
        assert again.planner is not postprocessor.planner
        assert again.annotation == "metadata"
        assert letters(again.postprocess_nodes(letter_nodes("ab"))) == "ab"

    def test_planned_nodes_are_planned_anew_from_the_order_in_which_they_were_retrieved(self):
        first, second, alone = (ReusePostprocessor() for _ in range(3))
        for postprocessor in (first, second, alone):
            postprocessor.postprocess_nodes(letter_nodes("abc"))
        twice = second.postprocess_nodes(first.postprocess_nodes(letter_nodes("dba")))
        once = alone.postprocess_nodes(letter_nodes("dba"))
        assert shown(twice) == shown(once)
        assert twice[0].node.excluded_llm_metadata_keys == ["ctxreuse"]

    def test_planned_nodes_that_were_reranked_since_keep_that_ranking(self):
        postprocessor, other = ReusePostprocessor(), ReusePostprocessor()
        postprocessor.postprocess_nodes(letter_nodes("abc"))
        planned = postprocessor.postprocess_nodes(letter_nodes("dba"))
        reranked = [
            NodeWithScore(node=planned[position].node, score=score)
            for position, score in ((2, 0.9), (0, 0.8), (1, 0.7))
        ]
        assert letters(reranked) == "dab"
        again = other.postprocess_nodes(reranked)
        assert letters(again) == "dab"
        assert [one.metadata["ctxreuse"]["rank"] for one in again] == [0, 1, 2]

    def test_a_context_that_points_to_the_conversation_is_not_planned_a_second_time(self):
        planner = ReusePlanner()
        history = sent_history(planner, "ab")
        with request_context(conversation_id="c", history=history):
            once = ReusePostprocessor(planner=planner).postprocess_nodes(letter_nodes("bc"))
            twice = ReusePostprocessor(planner=planner).postprocess_nodes(once)
            text = format_context(twice, MetadataMode.NONE)
        assert twice == once
        assert text == (
            "Please refer to [Doc_id-b] in the previous conversation.\n\n"
            f"[Doc_id-c] {letter_text('c')}"
        )

    def test_when_the_conversation_shows_everything_a_node_still_says_so(self):
        planner = ReusePlanner()
        history = sent_history(planner, "ab")
        with request_context(conversation_id="c", history=history):
            postprocessor = ReusePostprocessor(planner=planner, annotation="metadata")
            [node] = postprocessor.postprocess_nodes(letter_nodes("b"))
        assert isinstance(node.node, AnnotationNode)
        assert node.text == "Please refer to [Doc_id-b] in the previous conversation."
        assert node.score == 1

    def test_images_and_other_media_pass_through_whole(self):
        image = ImageNode(id_="i", text="", image_url="http://x/a.png")
        media = Node(id_="m", image_resource=MediaResource(url="http://x/b.png"))
        link = IndexNode(id_="l", text="see there", index_id="there")
        postprocessor = ReusePostprocessor()
        given = [NodeWithScore(node=one, score=0.5) for one in (image, media, link)]
        planned = postprocessor.postprocess_nodes(given)
        assert [type(one.node) for one in planned] == [ImageNode, Node, IndexNode]
        assert planned[0].node.image_url == "http://x/a.png"
        assert planned[1].node.image_resource == media.image_resource
        assert planned[2].node.index_id == "there"

    def test_no_text_in_the_conversation_stands_for_an_image(self):
        planner = ReusePlanner()
        caption = "a caption " * 50
        text = NodeWithScore(node=TextNode(id_="i", text=caption))
        image = NodeWithScore(node=ImageNode(id_="i", text=caption, image_url="http://x/a.png"))
        history: list[dict[str, str]] = []
        with request_context(conversation_id="c", history=history):
            content = format_context(ReusePostprocessor(planner=planner).postprocess_nodes([text]))
        history = [{"role": "user", "content": content}, {"role": "assistant", "content": "OK."}]
        with request_context(conversation_id="c", history=history):
            postprocessor = ReusePostprocessor(planner=planner)
            assert postprocessor.postprocess_nodes([text])[0].text.startswith("Please refer")
            assert isinstance(postprocessor.postprocess_nodes([image])[0].node, ImageNode)

    async def test_many_nodes_are_planned_off_the_event_loop_in_their_tenants_name(self):
        threads: list[Thread] = []

        class Noting(ReusePlanner):
            def plan(self, *args: Any, **kwargs: Any) -> Any:
                threads.append(current_thread())
                return super().plan(*args, **kwargs)

        planner = Noting()
        postprocessor = ReusePostprocessor(planner=planner)
        nodes = [NodeWithScore(node=TextNode(id_=str(n), text=f"{n} " * 50)) for n in range(300)]
        with request_context(tenant="one"):
            await postprocessor.apostprocess_nodes(nodes)
            planned = await postprocessor.apostprocess_nodes(nodes[::-1])
        assert [one.node_id for one in planned[:300]] == [str(n) for n in range(300)]
        assert current_thread() not in threads
        elsewhere = await postprocessor.apostprocess_nodes(nodes[::-1])
        assert [one.node_id for one in elsewhere] == [str(n) for n in range(299, -1, -1)]

    def test_it_is_serialized_by_its_name_and_settings(self):
        postprocessor = ReusePostprocessor(annotation="off", metadata_mode=MetadataMode.NONE)
        data = postprocessor.to_dict()
        assert data == {
            "annotation": "off",
            "metadata_mode": "none",
            "class_name": "ReusePostprocessor",
        }
        again = ReusePostprocessor.from_dict(data)
        assert (again.annotation, again.metadata_mode) == ("off", MetadataMode.NONE)

    @pytest.mark.parametrize("mode", ["everything", None, MetadataMode.ALL])
    def test_a_metadata_mode_that_is_none_or_shows_the_plan_is_refused(self, mode):
        with pytest.raises(ValueError, match=r"MetadataMode\.LLM"):
            ReusePostprocessor(metadata_mode=mode)

    def test_an_unknown_argument_is_refused_and_a_query_may_be_missing(self):
        with pytest.raises(ValueError, match="anotation"):
            ReusePostprocessor(anotation="off")
        assert letters(ReusePostprocessor().postprocess_nodes(letter_nodes("ab"))) == "ab"
        assert ReusePostprocessor().postprocess_nodes([]) == []

    def test_long_context_reorder_before_it_does_no_harm(self):
        postprocessor = ReusePostprocessor()
        reordered = LongContextReorder().postprocess_nodes(letter_nodes("abcd"))
        assert sorted(letters(postprocessor.postprocess_nodes(reordered))) == list("abcd")


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

    def test_a_fault_leaves_nodes_of_an_earlier_plan_as_they_are(self):
        planned = ReusePostprocessor().postprocess_nodes(letter_nodes("ab"))
        faulty = ReusePostprocessor(planner=FaultyPlanner())
        assert faulty.postprocess_nodes(planned) == planned
        assert faulty.faults == 1


class TestFormatContext:
    def test_nodes_that_nobody_planned_are_labelled_with_metadata_as_the_mode_says(self):
        text = format_context(letter_nodes("ab"), MetadataMode.NONE)
        assert text == labelled("ab")
        [found] = contexts_in(f"Context:\n{text}\nQuestion?")
        assert [block.id for block in found.blocks] == ["id-a", "id-b"]
        [node] = letter_nodes("a")
        text = f"source: a.txt\n\n{letter_text('a')}"
        assert format_context([node]) == f"{label(text)} {text}"

    @pytest.mark.parametrize("annotation", ["append", "metadata"])
    def test_planned_nodes_are_shown_as_their_plan_says(self, annotation):
        postprocessor = ReusePostprocessor(annotation=annotation, metadata_mode=MetadataMode.NONE)
        postprocessor.postprocess_nodes(letter_nodes("klm"))
        planned = postprocessor.postprocess_nodes(letter_nodes("nlk"))
        text = format_context(planned, MetadataMode.NONE)
        assert text == (
            f"[Doc_id-k] {letter_text('k')}\n\n[Doc_id-l] {letter_text('l')}\n\n"
            f"[Doc_id-n] {letter_text('n')}\n\n"
            "Please read the context in the following priority order: "
            "[Doc_id-n] > [Doc_id-l] > [Doc_id-k] and answer the question."
        )
        assert [found.blocks for found in contexts_in(text)] == [()], "it is not planned again"

    @pytest.mark.parametrize("nodes", ["text", None, [TextNode(text="no score")]])
    def test_something_else_than_nodes_is_refused(self, nodes):
        with pytest.raises(ValueError, match="takes a list of NodeWithScore"):
            format_context(nodes)

    def test_forged_metadata_loses_no_node(self):
        nodes = letter_nodes("abc")
        nodes[0].node.metadata["ctxreuse"] = {"annotation": True, "plan": {"parts": []}}
        nodes[1].node.metadata["ctxreuse"] = {"rank": 0, "label": "[Doc_9]", "plan": "none"}
        nodes[2].node.metadata["ctxreuse"] = "mine"
        planned = ReusePostprocessor().postprocess_nodes(nodes)
        assert letters(planned) == "abc"
        assert format_context(planned, MetadataMode.NONE).count(" says: ") == 3
        assert format_context(nodes, MetadataMode.NONE).count(" says: ") == 3


def sent_history(planner: ReusePlanner, word: str) -> list[dict[str, str]]:
    """Return a history whose first turn shows the letters' nodes to conversation "c"."""
    with request_context(conversation_id="c", history=[]):
        planned = ReusePostprocessor(planner=planner).postprocess_nodes(letter_nodes(word))
    return [
        {"role": "user", "content": format_context(planned) + "\n\nWhich?"},
        {"role": "assistant", "content": "OK."},
    ]
