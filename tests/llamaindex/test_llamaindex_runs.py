"""A wrapped model alone plans what retrievers returned, whatever shows it in a prompt."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    SimilarityPostprocessor,
)
from llama_index.core.query_engine import (
    CitationQueryEngine,
    CustomQueryEngine,
    RetrieverQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle
from llama_index.core.tools import QueryEngineTool, ToolMetadata
from llamaindex_helpers import LetterRetriever, RecordingLLM, SubQuestions, letter_text
from llamaindex_llm_helpers import CHATS, say

from ctxreuse import ReusePlanner, request_context
from llamaindex_ctxreuse import ReuseLLM, ReusePostprocessor, ReuseRetriever, format_context
from llamaindex_ctxreuse.nodes import run_nodes

WORDS = "Read documents 3, 2, 1 first."
MOVED = [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE, ResponseMode.COMPACT_ACCUMULATE]
LEFT_ALONE = [
    ResponseMode.REFINE,  # a node a prompt
    ResponseMode.ACCUMULATE,
    ResponseMode.SIMPLE_SUMMARIZE,  # shows a list as Python writes it
]


def shown(letters: str, separator: str = "\n\n", *, metadata: bool = True) -> str:
    """Return the nodes of letters as an application joins them."""
    heads = [f"source: {letter}.txt\n\n" if metadata else "" for letter in letters]
    return separator.join(h + letter_text(one) for h, one in zip(heads, letters, strict=True))


def reusing(inner: Any = None, **options: Any) -> tuple[RecordingLLM, ReuseLLM]:
    inner = inner or RecordingLLM()
    return inner, ReuseLLM(inner=inner, window_s=0, **{"planner": ReusePlanner(), **options})


def engine(llm: Any, **options: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(LetterRetriever(), llm=llm, **options)


def both(program: Callable[[Any], Any], **options: Any) -> tuple[list[str], list[str], ReuseLLM]:
    """Return the prompts that a program sends by a model alone, and by the wrapped one."""
    plain = RecordingLLM()
    program(plain)
    inner, model = reusing(**options)
    program(model)
    return plain.prompts, inner.prompts, model


def asked(llm: Any, *questions: str, **options: Any) -> list[Any]:
    queries = engine(llm, **options)
    return [queries.query(one) for one in questions]


class TestQueryEngines:
    @pytest.mark.parametrize("mode", MOVED)
    def test_the_nodes_of_a_query_are_planned_by_the_model_alone(self, mode):
        plain, sent, model = both(
            lambda llm: asked(llm, "abc first?", "cba second?", response_mode=mode)
        )
        assert sent[0] == plain[0]
        assert sent[1] == plain[1].replace(shown("cba"), f"{shown('abc')}\n\n{WORDS}")
        assert model.prompt_statistics.planned == 2
        assert model.prompt_statistics.not_found == 0

    @pytest.mark.parametrize("mode", LEFT_ALONE)
    def test_prompts_that_show_no_nodes_together_are_sent_as_given(self, mode):
        plain, sent, _ = both(
            lambda llm: asked(llm, "abc first?", "cba second?", response_mode=mode)
        )
        assert sent == plain

    def test_it_can_be_switched_off(self):
        plain, sent, model = both(
            lambda llm: asked(llm, "abc first?", "cba second?"), find_retrieved=False
        )
        assert sent == plain
        assert model.prompt_statistics.not_found == 2

    def test_a_stream_is_planned_though_it_is_read_when_the_query_is_over(self):
        inner, model = reusing()
        queries = engine(model, streaming=True)
        streams = [queries.query(one) for one in ("abc first?", "cba second?")]
        assert not inner.prompts or shown("abc") in inner.prompts[0]
        answers = ["".join(one.response_gen) for one in streams]
        assert answers == ["answer 1", "answer 2"]
        assert WORDS in inner.prompts[1]

    @pytest.mark.parametrize(
        "behind", [SimilarityPostprocessor(similarity_cutoff=0.3), LongContextReorder()]
    )
    def test_what_the_prompt_shows_counts_as_the_ranking(self, behind):
        plain, sent, model = both(
            lambda llm: asked(llm, "abcd first?", "bcda second?", node_postprocessors=[behind])
        )
        assert sent[0] == plain[0]
        assert "Read documents" in sent[1]
        assert sorted(re.findall(r"(\w) says", sent[1])) == list("abcd")
        assert model.prompt_statistics.planned == 2

    def test_the_text_is_what_the_synthesizer_was_given(self):
        replace = MetadataReplacementPostProcessor(target_metadata_key="window")

        class Windows(LetterRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                found = super()._retrieve(query_bundle)
                for one in found:
                    one.node.metadata = {"window": f"around {one.text[0]}: " + one.text[0] * 300}
                    one.node.excluded_llm_metadata_keys = ["window"]
                return found

        def program(llm: Any) -> None:
            queries = RetrieverQueryEngine.from_args(
                Windows(), llm=llm, node_postprocessors=[replace]
            )
            for question in ("abc first?", "cba second?"):
                queries.query(question)

        plain, sent, model = both(program)
        assert re.findall(r"around (\w):", plain[1]) == list("cba")
        assert re.findall(r"around (\w):", sent[1]) == list("abc")
        assert model.prompt_statistics.planned == 2

    def test_parts_of_one_document_in_reading_order_stay(self):
        class Parts(LetterRetriever):
            def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
                found = super()._retrieve(query_bundle)
                for one, following in pairwise(sorted(found, key=lambda one: one.node_id)):
                    related = following.node.as_related_node_info()
                    one.node.relationships[NodeRelationship.NEXT] = related
                return found

        def program(llm: Any) -> None:
            queries = RetrieverQueryEngine.from_args(Parts(), llm=llm)
            for question in ("bcd first?", "abcd second?"):
                queries.query(question)

        plain, sent, model = both(program)
        assert sent == plain
        assert model.prompt_statistics.in_place == {"sequence": 2}


class TestOtherPrograms:
    @pytest.mark.parametrize("use_async", [False, True])
    def test_sub_questions_are_planned_and_their_answers_left_alone(self, use_async):
        def program(llm: Any) -> None:
            tool = QueryEngineTool(engine(llm), ToolMetadata("Knows letters.", "letters"))
            sub = SubQuestionQueryEngine.from_defaults(
                [tool],
                llm=llm,
                question_gen=SubQuestions("letters", "abc one?", "cba two?", "bca three?"),
                use_async=use_async,
                response_synthesizer=get_response_synthesizer(llm=llm),
                verbose=False,
            )
            sub.query("all?")

        plain, sent, model = both(program)
        assert model.prompt_statistics.planned == 3
        assert all(shown("abc") in one for one in sent[:3])
        assert sent[3] == plain[3]
        assert "Sub question: abc one?" in sent[3]

    def test_numbered_sources_stay_in_their_order(self):
        def program(llm: Any) -> None:
            cited = CitationQueryEngine(LetterRetriever(), llm=llm)
            cited.query("abc first?")
            cited.query("cba second?")

        plain, sent, _ = both(program)
        assert "Source 1:\nc says" in sent[1]
        assert sent == plain

    @pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
    @pytest.mark.parametrize("way", CHATS)
    def test_chat_engines(self, kind, way):
        def program(llm: Any) -> None:
            for question in ("abc first?", "cba second?"):
                chat = kind.from_defaults(
                    LetterRetriever(),
                    llm=llm,
                    memory=ChatMemoryBuffer.from_defaults(token_limit=10_000),
                )
                say(chat, way, question)
                say(chat, way, question)

        plain, sent, model = both(program)
        assert len(plain) == len(sent)
        moved = [one for one, other in zip(sent, plain, strict=True) if one != other]
        assert moved
        assert all(WORDS in one for one in moved)
        statistics = model.prompt_statistics
        assert statistics.planned + statistics.in_history == 4


class TestTenants:
    def test_nodes_of_another_tenant_are_text(self):
        class Careless(CustomQueryEngine):
            """Asks for one tenant with what it has retrieved for another."""

            llm: Any

            def custom_query(self, query_str: str) -> str:
                with request_context(tenant="theirs"):
                    found = LetterRetriever().retrieve(query_str)
                text = "\n\n".join(one.get_content() for one in found)
                with request_context(tenant="ours"):
                    return str(self.llm.complete(f"Context:\n{text}\n\nQuestion: {query_str}"))

        def program(llm: Any) -> None:
            for question in ("abc first?", "cba second?"):
                Careless(llm=llm).query(question)

        plain, sent, model = both(program)
        assert sent == plain
        assert model.prompt_statistics.not_found == 2


class TestOnePlan:
    @pytest.mark.parametrize("way", ["postprocessor", "retriever"])
    @pytest.mark.parametrize("is_shared", [True, False])
    def test_the_models_plan_stands_in_place_of_the_one_before_it(self, way, is_shared, planner):
        inner, model = reusing(planner=planner)
        options = {"planner": planner if is_shared else None}
        retriever: Any = LetterRetriever()
        behind: list[Any] = [ReusePostprocessor(**options)]
        if way == "retriever":
            retriever, behind = ReuseRetriever(LetterRetriever(), **options), []
        queries = RetrieverQueryEngine.from_args(retriever, llm=model, node_postprocessors=behind)
        for question in ("abc first?", "cba second?"):
            queries.query(question)
        assert f"{shown('abc')}\n\n{WORDS}" in inner.prompts[1], "ranked as retrieved"
        assert model.prompt_statistics.planned == planner.savings.requests == 2
        assert planner.statistics().requests == 2

    def test_a_prompt_is_ranked_as_its_own_retriever_has_ranked_it(self):
        inner, llm = reusing()
        retriever = ReuseRetriever(LetterRetriever(), planner=llm.planner)

        class Engine(CustomQueryEngine):
            def custom_query(self, query_str: str) -> str:
                nodes = retriever.retrieve(query_str)
                with ThreadPoolExecutor(1) as others:  # another request, meanwhile
                    others.submit(retriever.retrieve, query_str[::-1]).result()
                return llm.complete(f"{format_context(nodes, '# {content}')}\n\n{query_str}").text

        for letters in ("abcd", "dbca", "cadb"):
            Engine().query(letters)
            places = [inner.prompts[-1].index(letter_text(one)) for one in letters]
            best = ", ".join(str(sorted(places).index(one) + 1) for one in places[:3])
            assert (f"Read documents {best} first." in inner.prompts[-1]) is (letters != "abcd")

    @pytest.mark.parametrize("use_async", [False, True])
    def test_a_retriever_inside_of_a_fusion_leaves_its_ranking_alone(self, use_async):
        def plain() -> BaseRetriever:
            return LetterRetriever(change=lambda all_: [NodeWithScore(node=n.node) for n in all_])

        def fused(*retrievers: BaseRetriever) -> list[str]:
            fusion = QueryFusionRetriever(
                list(retrievers),
                llm=MockLLM(),
                num_queries=1,
                similarity_top_k=9,
                use_async=use_async,
                mode="simple",
            )
            fusion.retrieve("abcd first?")
            found = fusion.retrieve("dcba second?")
            return [one.node.node_id for one in found]

        def ours() -> BaseRetriever:
            return ReuseRetriever(plain())

        assert fused(ours(), ours()) == fused(plain(), plain())

    def test_one_around_a_fusion_plans(self):
        inside = QueryFusionRetriever(
            [ReuseRetriever(LetterRetriever()), LetterRetriever()],
            llm=MockLLM(),
            num_queries=1,
            similarity_top_k=9,
            use_async=False,
        )
        outside = ReuseRetriever(inside)
        outside.retrieve("abc first?")
        found = outside.retrieve("cba second?")
        assert [one.node_id for one in found] == ["id-a", "id-b", "id-c"]


class TestWhatIsKept:
    def test_nothing_is_kept_when_runs_are_over(self):
        before = len(run_nodes._HANDLER._calls)
        _, model = reusing()
        asked(model, "abc first?", "cba second?")
        asyncio.run(engine(model).aquery("abc third?"))
        _, broken = reusing(RecordingLLM(fails=lambda prompt: ConnectionError("gone")))
        with pytest.raises(ConnectionError):
            asked(broken, "abc first?")
        assert len(run_nodes._HANDLER._calls) == before

    def test_calls_whose_end_nobody_tells_of_are_forgotten(self, monkeypatch):
        handler = run_nodes._RunHandler()
        monkeypatch.setattr(run_nodes, "_MOST_CALLS", 10)
        arguments = __import__("inspect").signature(lambda: None).bind()
        for number in range(100):
            handler.span_enter(f"call-{number}", arguments)
        assert len(handler._calls) == 10
