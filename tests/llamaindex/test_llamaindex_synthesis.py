"""What query engines show of planned nodes, and what other parts of LlamaIndex see of them."""

import asyncio
import pickle
import re
from copy import deepcopy
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.memory import Memory
from llama_index.core.postprocessor import (
    LLMRerank,
    LongContextReorder,
    MetadataReplacementPostProcessor,
    PrevNextNodePostprocessor,
    SimilarityPostprocessor,
)
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    ResponseMode,
    get_response_synthesizer,
)
from llama_index.core.schema import (
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llamaindex_helpers import LetterRetriever, ListChatStore, RecordingLLM, letter_nodes

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReusePostprocessor, ReuseRetriever, by_rank, format_context
from llamaindex_ctxreuse.nodes import synthesis

pytestmark = pytest.mark.usefixtures("paper_words")

WORDS = (
    "Please read the context in the following priority order: 3 > 2 > 1 and answer the question."
)
TOGETHER = [
    ResponseMode.COMPACT,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.SIMPLE_SUMMARIZE,
    ResponseMode.COMPACT_ACCUMULATE,
]
ONE_BY_ONE = [ResponseMode.REFINE, ResponseMode.ACCUMULATE]


def letters(nodes: Any) -> str:
    return "".join(one.text[0] for one in nodes)


def engine(llm: Any, *behind: Any, retriever: bool = False, **options: Any) -> RetrieverQueryEngine:
    """Return a query engine whose nodes are planned, with postprocessors behind ours."""
    planned: list[Any] = [] if retriever else [ReusePostprocessor()]
    found: Any = ReuseRetriever(LetterRetriever()) if retriever else LetterRetriever()
    return RetrieverQueryEngine.from_args(
        found, llm=llm, node_postprocessors=[*planned, *behind], **options
    )


def moved(llm: Any, *behind: Any, **options: Any) -> tuple[Any, list[str]]:
    """Return the response to a question whose nodes were moved, and the prompts that it took."""
    asked = engine(llm, *behind, **options)
    asked.query("abc first?")
    first = len(llm.prompts)
    return asked.query("cba second?"), llm.prompts[first:]


class TestSourceNodes:
    @pytest.mark.parametrize("retriever", [True, False])
    @pytest.mark.parametrize("mode", [*TOGETHER, *ONE_BY_ONE])
    def test_they_are_what_was_retrieved_and_nothing_else(self, mode, retriever):
        response, _ = moved(RecordingLLM(), response_mode=mode, retriever=retriever)
        assert [one.node_id for one in response.source_nodes] == ["id-a", "id-b", "id-c"]

    def test_by_rank_returns_them_best_first(self):
        response, _ = moved(RecordingLLM())
        assert letters(by_rank(response.source_nodes)) == "cba"
        assert letters(by_rank(response.source_nodes)[:1]) == "c"

    def test_what_is_shown_changes_no_node(self):
        response, _ = moved(RecordingLLM())
        plain = {one.node_id: one for one in letter_nodes("cba")}
        for one in response.source_nodes:
            before = plain[one.node_id]
            assert one.score == before.score
            for mode in (MetadataMode.LLM, MetadataMode.EMBED, MetadataMode.NONE):
                assert one.node.get_content(mode) == before.node.get_content(mode)
            blocks = before.node.get_content_blocks(MetadataMode.LLM)
            assert one.node.get_content_blocks(MetadataMode.LLM) == blocks

    def test_they_are_written_and_read_as_any_nodes(self):
        response, _ = moved(RecordingLLM())
        for one in response.source_nodes:
            again = NodeWithScore(node=TextNode.from_dict(one.node.to_dict()), score=one.score)
            assert again == one
            assert one == again
            assert again.to_dict() == one.to_dict()
            assert one != NodeWithScore(node=one.node, score=7)
            assert one != "text"
            for copy in (pickle.loads(pickle.dumps(one)), deepcopy(one), one.model_copy()):
                assert copy == one
            assert one.class_name() == "NodeWithScore"


class TestWords:
    @pytest.mark.parametrize("mode", TOGETHER)
    @pytest.mark.parametrize("retriever", [True, False])
    async def test_a_call_that_shows_all_nodes_says_their_ranking_behind_them(
        self, mode, retriever
    ):
        llm = RecordingLLM()
        asked = engine(llm, retriever=retriever, response_mode=mode)
        asked.query("abc first?")
        asked.query("cba second?")
        await asked.aquery("cba third?")
        assert WORDS not in llm.prompts[0]
        for prompt in llm.prompts[1:]:
            assert prompt.count(WORDS) == 1
            assert prompt.index("c says") < prompt.index(WORDS)

    def test_streamed_answers_get_them_too(self):
        llm = RecordingLLM()
        asked = engine(llm, streaming=True)
        for query in ("abc first?", "cba second?"):
            assert "".join(asked.query(query).response_gen).startswith("answer")
        assert WORDS in llm.prompts[1]

    def test_multimodal_engines_get_them_too(self):
        llm = RecordingLLM()
        synthesizer = get_response_synthesizer(llm=llm, multimodal=True)
        asked = RetrieverQueryEngine(
            LetterRetriever(), synthesizer, node_postprocessors=[ReusePostprocessor()]
        )
        asked.query("abc first?")
        asked.query("cba second?")
        texts = ["".join(b.text for m in chat for b in m.blocks) for chat in llm.chats]
        assert texts[0].count(WORDS) == 0
        assert texts[1].count(WORDS) == 1
        assert texts[1].index("c says") < texts[1].index(WORDS)

    @pytest.mark.parametrize("mode", ONE_BY_ONE)
    async def test_calls_that_show_one_node_each_say_no_ranking(self, mode):
        llm = RecordingLLM()
        _, prompts = moved(llm, response_mode=mode)
        assert len(prompts) == 3, "a call for each node"
        assert not any("priority order" in prompt for prompt in prompts)
        await engine(llm, response_mode=mode).aquery("cba third?")
        assert not any("priority order" in prompt for prompt in llm.prompts)

    @pytest.mark.parametrize(
        ("mode", "window"), [("compact", 900), ("tree_summarize", 330), ("compact_accumulate", 330)]
    )
    def test_a_context_that_is_split_over_calls_says_no_ranking(self, mode, window):
        llm = RecordingLLM(context_window=window, num_output=50)
        _, prompts = moved(llm, response_mode=ResponseMode(mode))
        assert len(prompts) > 1
        assert not any("priority order" in prompt for prompt in prompts)

    @pytest.mark.parametrize("annotation", ["metadata", "off"])
    def test_other_annotation_modes_say_nothing(self, annotation):
        llm = RecordingLLM()
        asked = RetrieverQueryEngine.from_args(
            LetterRetriever(),
            llm=llm,
            node_postprocessors=[ReusePostprocessor(annotation=annotation)],
        )
        asked.query("abc first?")
        asked.query("cba second?")
        assert not any("priority order" in prompt for prompt in llm.prompts)

    def test_chat_engines_get_them_too(self):
        llm = RecordingLLM()
        chat = ContextChatEngine.from_defaults(
            retriever=LetterRetriever(),
            llm=llm,
            memory=Memory.from_defaults(chat_store=ListChatStore()),
            node_postprocessors=[ReusePostprocessor()],
        )
        chat.chat("abc first?")
        chat.chat("cba second?")
        assert WORDS in llm.prompts[1]

    async def test_questions_at_the_same_time_get_their_own(self):
        llm = RecordingLLM()
        asked = engine(llm)
        asked.query("abc first?")
        await asyncio.gather(*(asked.aquery(f"{word} next?") for word in ("cba", "bca", "cab")))
        said = {
            re.search(r"\w+ next", prompt)[0]: re.findall(r"order: (.*) and", prompt)
            for prompt in llm.prompts[1:]
        }
        assert said == {
            "cba next": ["3 > 2 > 1"],
            "bca next": ["2 > 3 > 1"],
            "cab next": ["3 > 1 > 2"],
        }

    def test_a_synthesizer_that_is_called_by_hand_gets_them(self):
        llm, postprocessor = RecordingLLM(), ReusePostprocessor()
        postprocessor.postprocess_nodes(letter_nodes("abc"))
        nodes = postprocessor.postprocess_nodes(letter_nodes("cba"))
        synthesizer = get_response_synthesizer(llm=llm)
        synthesizer.synthesize("Which?", nodes)
        synthesizer.synthesize("Which?", nodes[:2], additional_source_nodes=nodes[2:])
        assert WORDS in llm.prompts[0]
        assert "order: 2 > 1 and" in llm.prompts[1]

    def test_a_synthesizer_that_cannot_be_told_answers_without_and_the_log_says_so(self, caplog):
        llm = RecordingLLM()
        synthesizer = get_response_synthesizer(
            llm=llm, response_mode=ResponseMode.SIMPLE_SUMMARIZE, multimodal=True
        )
        asked = RetrieverQueryEngine(
            LetterRetriever(), synthesizer, node_postprocessors=[ReusePostprocessor()]
        )
        before = synthesis._HANDLER.faults
        for query in ("abc first?", "cba second?", "cba third?"):
            assert str(asked.query(query)).startswith("answer")
        assert synthesis._HANDLER.faults == before + 2

    def test_a_synthesizer_of_ones_own_is_shown_no_ranking(self):
        class Own(BaseSynthesizer):
            """Shows texts as nobody can know from outside."""

            def _get_prompts(self) -> dict[str, Any]:
                return {}

            def _update_prompts(self, prompts: Any) -> None:
                pass

            def get_response(self, query_str: str, text_chunks: Any, **options: Any) -> str:
                return "|".join(text_chunks)

            async def aget_response(self, query_str: str, text_chunks: Any, **options: Any) -> str:
                return self.get_response(query_str, text_chunks)

        asked = RetrieverQueryEngine(
            LetterRetriever(),
            Own(llm=RecordingLLM(), prompt_helper=PromptHelper()),
            node_postprocessors=[ReusePostprocessor()],
        )
        asked.query("abc first?")
        answer = str(asked.query("cba second?"))
        assert answer.count(" says: ") == 3
        assert "priority order" not in answer


class TestBehindUs:
    def test_a_cut_off_leaves_words_on_what_is_left_but_for_one(self):
        llm = RecordingLLM()
        _, [prompt] = moved(llm, SimilarityPostprocessor(similarity_cutoff=0.85))
        assert "priority order: 2 > 1 and" in prompt
        _, [prompt] = moved(RecordingLLM(), SimilarityPostprocessor(similarity_cutoff=0.95))
        assert "priority order" not in prompt

    def test_nodes_that_others_stand_between_get_no_words_that_are_false(self):
        store, next_one = SimpleDocumentStore(), letter_nodes("x")[0].node
        store.add_documents([next_one])

        class Linked(LetterRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                nodes = super()._retrieve(query_bundle)
                for one in nodes:
                    if one.node_id == "id-b":
                        related = next_one.as_related_node_info()
                        one.node.relationships[NodeRelationship.NEXT] = related
                return nodes

        llm = RecordingLLM()
        asked = RetrieverQueryEngine.from_args(
            Linked(),
            llm=llm,
            node_postprocessors=[ReusePostprocessor(), PrevNextNodePostprocessor(docstore=store)],
        )
        asked.query("abc first?")
        response = asked.query("cba second?")
        assert letters(response.source_nodes) == "abxc"
        assert "priority order" not in llm.prompts[1]

    def test_texts_that_were_replaced_keep_the_words_and_moved_nodes_get_none(self):
        _, [prompt] = moved(RecordingLLM(), MetadataReplacementPostProcessor("source"))
        assert "\nc.txt\n" in prompt
        assert WORDS in prompt
        response, [prompt] = moved(RecordingLLM(), LongContextReorder())
        assert letters(response.source_nodes) != "abc"
        assert "priority order" not in prompt

    def test_a_reranker_judges_documents_alone(self):
        judge = RecordingLLM(answer="Doc: 3, Relevance: 9\nDoc: 1, Relevance: 8")
        llm = RecordingLLM()
        response, [prompt] = moved(llm, LLMRerank(llm=judge, top_n=2))
        assert letters(response.source_nodes) == "ca"
        assert not any("priority order" in one for one in judge.prompts)
        assert "priority order" not in prompt, "the reranker's order is the ranking"

    @pytest.mark.parametrize("mode", [MetadataMode.NONE, MetadataMode.LLM])
    def test_citations_number_documents_alone(self, mode):
        llm = RecordingLLM()
        asked = CitationQueryEngine.from_args(
            LetterRetriever(),
            retriever=LetterRetriever(),
            llm=llm,
            node_postprocessors=[ReusePostprocessor()],
            metadata_mode=mode,
        )
        asked.query("abc first?")
        response = asked.query("cba second?")
        assert len(response.source_nodes) == 3
        assert "Source 4" not in llm.prompts[1]
        assert "priority order" not in llm.prompts[1]


@examples(60)
@given(
    ranking=st.permutations("abcdef"),
    shown=st.lists(st.integers(0, 7), unique=True, min_size=1),
    in_order=st.booleans(),
)
def test_whatever_is_dropped_moved_or_put_between_the_words_are_true(ranking, shown, in_order):
    """A prompt says how its nodes rank, by their places; or nothing."""
    llm, postprocessor = RecordingLLM(), ReusePostprocessor()
    postprocessor.postprocess_nodes(letter_nodes("abcdef"))
    planned = postprocessor.postprocess_nodes(letter_nodes("".join(ranking)))
    others = [NodeWithScore(node=one.node) for one in letter_nodes("xy")]
    nodes = [[*planned, *others][number] for number in (sorted(shown) if in_order else shown)]
    get_response_synthesizer(llm=llm).synthesize("Which?", nodes)
    [prompt] = llm.prompts
    order = re.search(r"priority order: (.*) and answer", prompt)
    if order is None:
        as_ranked = letters(nodes) == "".join(one for one in ranking if one in letters(nodes))
        is_moved = [n for n in shown if n < 6] != sorted(n for n in shown if n < 6)
        assert as_ranked or max(shown) > 5 or (is_moved and not in_order)
        return
    best = [letters(nodes)[int(place) - 1] for place in order[1].split(" > ")]
    assert best == [one for one in ranking if one in letters(nodes)]


class TestLeftOut:
    @pytest.mark.parametrize("mode", [*TOGETHER, *ONE_BY_ONE])
    def test_every_synthesizer_says_where_left_out_nodes_stand(self, mode):
        planner, llm = ReusePlanner(), RecordingLLM()
        with request_context(conversation_id="c", history=[]):
            planned = ReusePostprocessor(planner=planner).postprocess_nodes(letter_nodes("ab"))
        history = [
            {"role": "user", "content": format_context(planned) + "\n\nWhich?"},
            {"role": "assistant", "content": "OK."},
        ]
        asked = RetrieverQueryEngine.from_args(
            LetterRetriever(),
            llm=llm,
            node_postprocessors=[ReusePostprocessor(planner=planner)],
            response_mode=mode,
        )
        with request_context(conversation_id="c", history=history):
            response = asked.query("bca next?")
            assert letters(response.source_nodes) == "c"
            assert "Please refer to [Doc_id-b] in the previous conversation." in llm.prompts[-1]
            assert "Please refer to [Doc_id-a] in the previous conversation." in llm.prompts[-1]
            assert len(llm.prompts) == 1
            response = asked.query("ab next?")
        assert "Please refer to [Doc_id-b] in the previous conversation." in llm.prompts[-1]


class TestByScore:
    def test_reordering_before_us_does_not_make_the_second_best_the_worst(self):
        llm = RecordingLLM()
        asked = RetrieverQueryEngine.from_args(
            LetterRetriever(),
            llm=llm,
            node_postprocessors=[LongContextReorder(), ReusePostprocessor()],
        )
        asked.query("abcd first?")
        asked.query("dcba second?")
        assert "priority order: 4 > 3 > 2 > 1 and" in llm.prompts[1]

    @pytest.mark.parametrize(
        ("scores", "ranking"),
        [
            ([0.1, 0.3, 0.2], "bca"),
            ([0.2, 0.2, 0.2], "abc"),
            ([None, None, None], "abc"),
            ([None, 0.1, 0.2], "acb"),
            ([0.1, None, 0.2], "cba"),
            ([float("nan"), 0.1, 0.2], "acb"),
            ([0.1, 0.2, 0.1], "bac"),
        ],
    )
    def test_higher_scores_rank_first_and_the_others_keep_their_places(self, scores, ranking):
        nodes = [
            NodeWithScore(node=one.node, score=score)
            for one, score in zip(letter_nodes("abc"), scores, strict=True)
        ]
        planned = ReusePostprocessor().postprocess_nodes(nodes)
        ranks = {one.metadata["ctxreuse"]["rank"]: one.text[0] for one in planned}
        assert "".join(ranks[rank] for rank in range(3)) == ranking
        assert letters(by_rank(nodes)) == ranking


def test_by_rank_leaves_nodes_that_nobody_planned_or_scored_as_they_are():
    nodes = [NodeWithScore(node=one.node) for one in letter_nodes("cab")]
    assert by_rank(nodes) == nodes
    assert by_rank([]) == []


@pytest.mark.parametrize("nodes", ["text", None, [ChatMessage(content="no node")]])
def test_by_rank_refuses_something_else(nodes):
    with pytest.raises(ValueError, match="by_rank takes a list of NodeWithScore"):
        by_rank(nodes)
