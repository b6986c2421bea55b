"""The workflow engine inside LlamaIndex, and LlamaIndex's models inside the engine."""

import asyncio
import runpy
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.llms import ChatMessage, ChatResponse, MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import QueryBundle, TextNode
from llamaindex_helpers import LetterRetriever, RecordingLLM
from workflow_engines import BLOCKS, engine_of, plain_ids, plain_search, shown

from ctxreuse import request_context
from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow import CallableRetriever, StageError, WorkflowEngine
from llamaindex_ctxreuse import (
    LlamaIndexLLM,
    RetrieverStage,
    SpeculativeRAGQueryEngine,
    WorkflowRetriever,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llamaindex_workflow.py"


def ids(nodes: Any) -> list[str]:
    return [one.node.node_id for one in nodes]


class TestRetriever:
    async def test_it_finds_what_faiss_finds_however_it_is_asked(self):
        retriever = WorkflowRetriever(engine_of(), k=3)
        queries = [f"question {number}" for number in range(8)]
        wanted = [plain_ids(query, 3) for query in queries]
        found = await asyncio.gather(*(retriever.aretrieve(query) for query in queries))
        assert [ids(one) for one in found] == wanted
        inside = asyncio.gather(*(asyncio.to_thread(retriever.retrieve, one) for one in queries))
        assert [ids(one) for one in await inside] == wanted
        assert ids(retriever.retrieve(queries[0])) == wanted[0]

    async def test_a_node_has_the_blocks_id_and_text_and_a_score_that_cut_offs_understand(self):
        nearest, second = await WorkflowRetriever(engine_of(), k=2).aretrieve("red apples")
        block = plain_search("red apples", 1)[0]
        assert (nearest.node.node_id, nearest.text) == (block.id, block.text)
        assert nearest.score is not None
        assert second.score is not None
        cut_off = SimilarityPostprocessor(similarity_cutoff=(nearest.score + second.score) / 2)
        assert cut_off.postprocess_nodes([nearest, second]) == [nearest]

    async def test_the_users_nodes_are_copied(self):
        store = {
            block.id: TextNode(id_=str(block.id), text=block.text, metadata={"pages": [7]})
            for block in BLOCKS
        }
        retriever = WorkflowRetriever(engine_of(), k=1, node_of=store.__getitem__)
        [found] = await retriever.aretrieve("red apples")
        assert found.node.metadata == {"pages": [7]}
        found.node.metadata["pages"].append(8)
        assert store[found.node.node_id].metadata == {"pages": [7]}

    async def test_another_retriever_is_asked_by_name_and_what_is_no_node_is_refused(self):
        words = CallableRetriever(lambda query, k: [query] * k)
        engine = WorkflowEngine(retriever={"words": words})
        [found] = await WorkflowRetriever(engine, retriever="words", k=1).aretrieve("red")
        assert (found.text, found.score) == ("red", None)
        retriever = WorkflowRetriever(engine_of(), node_of=lambda name: "text")
        with pytest.raises(InvalidRequestError, match="node_of must return a node, not str"):
            retriever.retrieve("red")

    async def test_it_stands_in_a_query_engine_and_the_context_says_tenant_and_session(self):
        llm = RecordingLLM()
        engine = RetrieverQueryEngine.from_args(WorkflowRetriever(engine_of(), k=2), llm=llm)
        response = await engine.aquery("red")
        assert (str(response), ids(response.source_nodes)) == ("answer 1", plain_ids("red", 2))
        assert "\n\n".join(block.text for block in plain_search("red", 2)) in llm.prompts[0]

        engine = engine_of(speculation="always")
        query_engine = SpeculativeRAGQueryEngine(WorkflowRetriever(engine), llm=RecordingLLM())
        for tenant in ("t1", "t2", "t1"):
            with request_context(tenant=tenant, conversation_id="c1"):
                await asyncio.to_thread(query_engine.query, "red")
        assert engine.metrics().speculation.committed == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"engine": None}, "engine must be a WorkflowEngine, not None"),
            ({"k": 0}, "k must be an integer from 1, not 0"),
            ({"node_of": {}}, "node_of must be a function from a block's id to a node"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments, message):
        with pytest.raises(InvalidRequestError, match=message):
            WorkflowRetriever(**{"engine": engine_of(), **arguments})


PROMPT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]


class TestModel:
    async def test_an_llm_streams_its_pieces(self):
        llm = RecordingLLM(answer="Yes.")
        pieces = [piece async for piece in LlamaIndexLLM(llm).stream(PROMPT, {"seed": 1})]
        assert "".join(piece.text for piece in pieces) == "Yes."
        assert all(piece.tokens == 1 for piece in pieces)
        assert [(one.role.value, one.content) for one in llm.chats[0]] == [
            ("system", "Be short."),
            ("user", "Who?"),
        ]
        assert llm.options == [{"seed": 1}]

    @pytest.mark.parametrize(
        ("told", "last"),
        [(9, [("", 7)])]
        + [(wrong, []) for wrong in (-5, "ten", float("nan"), 1e400, True, [3], {"a": 1})],
    )
    async def test_what_usage_says_besides_comes_at_the_end_if_it_can_be_right(self, told, last):
        class Thinking(RecordingLLM):
            async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
                async def chunks() -> Any:
                    for delta, tokens in (("Yes", None), ("", None), (".", None), ("", told)):
                        usage = SimpleNamespace(completion_tokens=tokens)
                        raw = None if tokens is None else SimpleNamespace(usage=usage)
                        yield ChatResponse(message=ChatMessage("Yes."), delta=delta, raw=raw)

                return chunks()

        pieces = [tuple(piece) async for piece in LlamaIndexLLM(Thinking()).stream(PROMPT, {})]
        assert pieces == [("Yes", 1), (".", 1), *last]

    async def test_leaving_a_stream_early_leaves_the_llms(self):
        left: list[bool] = []

        class Endless(RecordingLLM):
            async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
                async def pieces() -> Any:
                    try:
                        async for chunk in await RecordingLLM(answer="Yes.").astream_chat(messages):
                            yield chunk
                        await asyncio.Event().wait()
                    finally:
                        left.append(True)

                return pieces()

        async with aclosing(LlamaIndexLLM(Endless()).stream(PROMPT, {})) as pieces:
            async for _ in pieces:
                break
        assert left == [True]

    @pytest.mark.parametrize("wrong", [None, "gpt", MockLLM])
    def test_what_is_no_llm_is_refused(self, wrong):
        with pytest.raises(InvalidRequestError, match="llm must be a LlamaIndex LLM"):
            LlamaIndexLLM(wrong)


def linked(llm: Any = None, **arguments: Any) -> SpeculativeRAGQueryEngine:
    """Return a query engine over an engine that guesses whenever there is a last search."""
    retriever = WorkflowRetriever(engine_of(speculation="always"), k=2)
    return SpeculativeRAGQueryEngine(
        retriever, llm=llm or RecordingLLM(answer="Yes, so."), **arguments
    )


def metrics_of(query_engine: SpeculativeRAGQueryEngine) -> Any:
    return query_engine._retriever.engine.metrics()


class TestSpeculativeRAGQueryEngine:
    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("streaming", [False, True])
    async def test_it_answers_with_its_sources_in_all_four_ways(self, is_async, streaming):
        query_engine = linked(streaming=streaming)

        def query() -> tuple[Any, str]:
            response = query_engine.query("red")
            return response, str(response)

        if is_async:
            response: Any = await query_engine.aquery("red")
            text = await response._async_str() if streaming else str(response)
        else:
            response, text = await asyncio.to_thread(query)
        assert text == "Yes, so."
        assert ids(response.source_nodes) == plain_ids("red", 2)
        assert response.metadata == {name: {} for name in plain_ids("red", 2)}
        assert type(response).__name__ == (
            ("AsyncStreamingResponse" if is_async else "StreamingResponse")
            if streaming
            else "Response"
        )

    async def test_the_model_is_shown_the_users_template_with_the_documents_in_it(self):
        llm = RecordingLLM()
        template = ChatPromptTemplate(
            [
                ChatMessage("Use:\n{context_str}", role="system"),
                ChatMessage("Question: {query_str}", role="user"),
            ]
        )
        query_engine = linked(llm)
        query_engine.update_prompts({"text_qa_template": template})
        assert query_engine.get_prompts() == {"text_qa_template": template}
        await query_engine.aquery("red")
        assert [one.content for one in llm.chats[0]] == [f"Use:\n{shown('red')}", "Question: red"]

    async def test_a_chat_model_gets_llamaindexs_default_template_and_another_a_completion(self):
        llm = RecordingLLM()
        await linked(llm).aquery("red")
        assert shown("red") in llm.prompts[0]
        assert "prior knowledge" in llm.prompts[0]
        llm = RecordingLLM(is_chat_model=False)
        template = PromptTemplate("{context}|{q}", template_var_mappings=_NAMES)
        response = await linked(llm, text_qa_template=template).aquery("red")
        assert (str(response), llm.prompts) == ("answer 1", [f"{shown('red')}|red"])

    async def test_a_right_guess_is_not_asked_again_and_a_wrong_one_changes_nothing(self):
        llm = RecordingLLM(answer="Yes.")
        query_engine = linked(llm)
        with request_context(conversation_id="c1"):
            first = await query_engine.aquery("red")
            again = await query_engine.aquery("red")
            assert ids(again.source_nodes) == ids(first.source_nodes)
            assert (metrics_of(query_engine).speculation.committed, len(llm.prompts)) == (1, 2)
            other = await query_engine.aquery("completely other words")
        assert metrics_of(query_engine).speculation.launched == 2
        assert metrics_of(query_engine).speculation.committed == 1
        assert ids(other.source_nodes) == plain_ids("completely other words", 2)
        assert shown("completely other words") in llm.prompts[-1]

    async def test_callbacks_hear_of_query_and_retrieval(self):
        debug = LlamaDebugHandler(print_trace_on_end=False)
        query_engine = linked(callback_manager=CallbackManager([debug]))
        await query_engine.aquery("red")
        [[_, found]] = debug.get_event_pairs(CBEventType.RETRIEVE)
        assert found.payload is not None
        assert ids(found.payload["nodes"]) == plain_ids("red", 2)
        assert len(debug.get_event_pairs(CBEventType.QUERY)) == 1

    async def test_it_retrieves_without_an_answer_and_from_llamaindexs_retrievers_too(self):
        query_engine = linked()
        assert ids(await query_engine.aretrieve(QueryBundle("red"))) == plain_ids("red", 2)
        assert ids(query_engine.retrieve(QueryBundle("red"))) == plain_ids("red", 2)
        engine = WorkflowEngine(retriever=RetrieverStage(LetterRetriever()))
        query_engine = SpeculativeRAGQueryEngine(WorkflowRetriever(engine), llm=RecordingLLM())
        response = await query_engine.aquery("ab which?")
        assert ids(response.source_nodes) == ["id-a", "id-b"]

    @pytest.mark.parametrize("streaming", [False, True])
    async def test_a_failing_model_fails_the_query_with_its_error_as_the_cause(self, streaming):
        query_engine = linked(
            RecordingLLM(fails=lambda text: LookupError("no such model")), streaming=streaming
        )

        async def text() -> str:
            response: Any = await query_engine.aquery("red")
            return await response._async_str() if streaming else str(response)

        with pytest.raises(StageError, match="no such model") as caught:
            await text()
        assert isinstance(caught.value.__cause__, LookupError)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"retriever": LetterRetriever()}, "must be a WorkflowRetriever"),
            ({"llm": "gpt"}, "llm must be a LlamaIndex LLM"),
            ({"text_qa_template": "text"}, "must be a prompt template, not 'text'"),
            ({"text_qa_template": PromptTemplate("{q}")}, "has no variable context_str"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments, message):
        right = {"retriever": WorkflowRetriever(engine_of()), "llm": RecordingLLM()}
        with pytest.raises(InvalidRequestError, match=message):
            SpeculativeRAGQueryEngine(**{**right, **arguments})


_NAMES = {"context_str": "context", "query_str": "q"}


def test_the_example_runs_without_a_server(monkeypatch, capsys):
    monkeypatch.delenv("CTXREUSE_BASE_URL", raising=False)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines] == ["1.", "1.", "2.", "3."]
    assert lines[0].endswith("The Seine flows through Paris into the English Channel.")
    assert lines[2:] == [
        "2. Question: Which river flows through Paris? (2 nodes)",
        "3. The Seine flows through Paris. (4 stages)",
    ]
