"""The workflow engine inside LangChain and LangGraph, and LangChain's models inside the engine."""

# no postponed annotations: LangGraph compares those of nodes

import asyncio
import runpy
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_model_helpers import RecordingModel, StreamingModel
from langchain_runs import Runs
from langchain_tests.integration_tests import RetrieversIntegrationTests
from langgraph.graph import END as GRAPH_END
from langgraph.graph import START as GRAPH_START
from langgraph.graph import StateGraph
from pydantic import ValidationError
from workflow_engines import (
    BLOCKS,
    WordEmbedder,
    corpus_index,
    corpus_retriever,
    engine_of,
    plain_ids,
    plain_search,
    shown,
)

from ctxreuse import ContextBlock, ContextRequest, ReusePlanner, request_context
from ctxreuse.errors import InvalidRequestError
from ctxreuse.workflow import (
    END,
    START,
    CallableRetriever,
    DeadlineError,
    GraphError,
    StageError,
    VectorRetriever,
    WorkflowEngine,
    WorkflowGraph,
    WorkflowOptions,
    irg,
    one_shot,
)
from langchain_ctxreuse import (
    LangChainLLM,
    RetrieverStage,
    SpeculativeRAGChain,
    WorkflowRetriever,
    WorkflowRunnable,
)

pytestmark = pytest.mark.usefixtures("paper_words")


def ids(documents: list[Document]) -> list[str | None]:
    return [one.id for one in documents]


class TestRetriever:
    async def test_it_finds_what_faiss_finds_in_batches_that_the_engine_gets_at_once(self):
        retriever = WorkflowRetriever(engine=engine_of(), k=3)
        queries = [f"question {number}" for number in range(8)]
        wanted = [plain_ids(query, 3) for query in queries]
        found = await asyncio.gather(*(retriever.ainvoke(query) for query in queries))
        assert [ids(one) for one in found] == wanted
        assert [ids(one) for one in await retriever.abatch(queries)] == wanted
        assert [ids(one) for one in retriever.batch(queries)] == wanted
        assert ids(retriever.invoke(queries[0])) == wanted[0]

        engine = engine_of(workers=1)
        WorkflowRetriever(engine=engine).batch([f"question {number}" for number in range(64)])
        metrics = engine.metrics()
        assert metrics.searches.searches == 64
        assert metrics.searches.batches < 64

    def test_a_document_has_the_blocks_id_and_text_and_its_score(self):
        blocks = [ContextBlock(id=number, text=block.text) for number, block in enumerate(BLOCKS)]
        engine = engine_of(retriever=VectorRetriever(corpus_index(), blocks, WordEmbedder()))
        [nearest, second] = WorkflowRetriever(engine=engine, k=2).invoke("red apples")
        block = plain_search("red apples", 1)[0]
        assert (f"d{nearest.id}", nearest.page_content) == (block.id, block.text)
        assert nearest.metadata["score"] > second.metadata["score"]
        assert list(nearest.metadata) == ["score"]

    def test_the_users_documents_are_copied_and_their_own_score_is_kept(self):
        store = {
            block.id: Document(block.text, id=str(block.id), metadata={"page": [7]})
            for block in BLOCKS
        }
        nearest, second = plain_ids("red apples", 2)
        store[second].metadata["score"] = "their own"
        retriever = WorkflowRetriever(engine=engine_of(), k=2, document_of=store.__getitem__)
        found = retriever.invoke("red apples")
        assert [one.metadata["page"] for one in found] == [[7], [7]]
        assert found[0].metadata["score"] < 0
        assert found[1].metadata["score"] == "their own"
        found[0].metadata["page"].append(8)
        assert store[nearest].metadata == {"page": [7]}

    async def test_the_call_may_want_another_number_and_another_retriever(self):
        retriever = WorkflowRetriever(engine=engine_of(), k=3)
        assert ids(retriever.invoke("red", k=1)) == plain_ids("red", 1)
        with pytest.raises(TypeError, match="unknown"):
            retriever.invoke("red", unknown=1)
        words = CallableRetriever(lambda query, k: [query] * k)
        engine = WorkflowEngine(retriever={"words": words})
        found = await WorkflowRetriever(engine=engine, retriever="words", k=1).ainvoke("red")
        assert [(one.page_content, one.metadata) for one in found] == [("red", {})]

    @pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
    async def test_config_and_context_say_tenant_and_session(self, way):
        class Seen(WorkflowEngine):
            async def retrieve(self, *args: Any, **kwargs: Any) -> Any:
                seen.append((kwargs["tenant"], kwargs["session"]))
                return await super().retrieve(*args, **kwargs)

        seen: list[Any] = []
        retriever = WorkflowRetriever(engine=Seen(retriever=corpus_retriever()))
        config: Any = {"configurable": {"thread_id": "c1", "tenant": "acme"}}
        with request_context(tenant="outside"):
            for one in (config, None):
                if way == "ainvoke":
                    await retriever.ainvoke("red", one)
                elif way == "invoke":
                    await asyncio.to_thread(retriever.invoke, "red", one)
                else:
                    await asyncio.to_thread(retriever.batch, ["red"], one)
        assert seen == [("acme", "c1"), ("outside", None)]

    def test_what_is_no_document_is_refused(self):
        retriever = WorkflowRetriever(engine=engine_of(), document_of=lambda name: "text")
        with pytest.raises(InvalidRequestError, match="must return a Document, not str"):
            retriever.invoke("red")


class TestRetrieverInLangChainsOwnSuite(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> Any:
        def workflow_retriever(k: int = 4) -> BaseRetriever:
            return WorkflowRetriever(engine=engine_of(), k=k)

        return workflow_retriever

    @property
    def retriever_query_example(self) -> str:
        return "red apples"


class TestModel:
    @pytest.mark.parametrize(("more", "last"), [(9, [("", 9)]), (-50, [])])  # no such count
    async def test_a_chat_model_streams_its_pieces_and_what_usage_says_besides(self, more, last):
        class Thinking(StreamingModel):
            async def _astream(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
                async for chunk in super()._astream(messages, *args, **kwargs):
                    if chunk.message.usage_metadata:
                        chunk.message.usage_metadata["output_tokens"] += more
                    yield chunk

        prompt = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Yes."}]
        model = Thinking()
        pieces = [tuple(piece) async for piece in LangChainLLM(model).stream(prompt, {"seed": 1})]
        assert pieces == [("Y", 1), ("e", 1), ("s", 1), (".", 1), *last]
        assert model.calls[0].messages == [SystemMessage("Be short."), HumanMessage("Yes.")]
        assert model.calls[0].arguments["seed"] == 1

    async def test_a_model_that_does_not_stream_and_one_that_is_bound_answer_too(self):
        model = RecordingModel()
        llm = LangChainLLM(model.bind(stop=["x"]).with_config(tags=["mine"]))
        prompt = [{"role": "user", "content": "Yes."}]
        assert [tuple(piece) async for piece in llm.stream(prompt, {})] == [("Yes.", 1)]
        assert model.calls[0].arguments["stop"] == ["x"]

    async def test_leaving_a_stream_early_leaves_the_models(self):
        class Endless(StreamingModel):
            async def _astream(self, *args: Any, **kwargs: Any) -> Any:
                try:
                    while True:
                        yield next(super()._stream([HumanMessage("abc")]))
                        await asyncio.sleep(0)
                finally:
                    left.append(True)

        left: list[bool] = []
        async with aclosing(LangChainLLM(Endless()).stream([], {})) as pieces:
            async for piece in pieces:
                assert piece.text == "a"
                break
        await asyncio.sleep(0)
        assert left == [True]


PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Use:\n{context}"), ("human", "Question: {input}")]
)


def linked(planner: Any = None, prompt: Any = PROMPT, **arguments: Any) -> SpeculativeRAGChain:
    """Return a chain over an engine that guesses whenever there is a last search."""
    engine = WorkflowEngine(
        retriever=corpus_retriever(), planner=planner, options=WorkflowOptions(speculation="always")
    )
    model = arguments.pop("llm", None) or StreamingModel()
    retriever = WorkflowRetriever(engine=engine, k=2)
    return SpeculativeRAGChain(retriever=retriever, prompt=prompt, llm=model, **arguments)


def model_of(chain: SpeculativeRAGChain) -> Any:
    return chain._llm


def speculation_of(chain: SpeculativeRAGChain) -> tuple[int, int]:
    counters = chain._retriever.engine.metrics().speculation
    return counters.launched, counters.committed


class TestSpeculativeRAGChain:
    async def test_the_output_is_that_of_a_retrieval_chain_however_it_is_asked(self):
        chain = linked()
        wanted = ["red", plain_ids("red", 2), "Question: red"]
        outputs = [
            await chain.ainvoke("red"),
            await chain.ainvoke({"input": "red"}),
            await asyncio.to_thread(chain.invoke, "red"),
            (await asyncio.to_thread(chain.batch, ["red", "blue"]))[0],
            (await chain.abatch(["red", "blue"], {"max_concurrency": 1}))[0],
        ]
        for output in outputs:
            assert list(output) == ["input", "context", "answer"]
            assert [output["input"], ids(output["context"]), output["answer"]] == wanted

    async def test_a_planner_orders_the_documents_of_the_prompt_but_not_of_the_output(self):
        planner = ReusePlanner(token_counter=len)
        chain = linked(planner)
        found = plain_search("red", 2)
        for _ in range(2):  # so that it stands in front again
            planner.plan(ContextRequest(found[1:], "Which?"))
        output = await chain.ainvoke("red")
        assert ids(output["context"]) == plain_ids("red", 2)
        system = model_of(chain).calls[0].messages[0].content
        assert system.startswith(
            f"Use:\n[Doc_{found[1].id}] {found[1].text}\n\n"
            f"[Doc_{found[0].id}] {found[0].text}\n\nPlease read the context"
        )

    @pytest.mark.parametrize("is_async", [False, True])
    async def test_a_stream_gives_inputs_documents_and_the_answer_as_it_comes(self, is_async):
        chain = linked()
        if is_async:
            parts = [part async for part in chain.astream({"input": "red"})]
        else:
            parts = await asyncio.to_thread(lambda: list(chain.stream({"input": "red"})))
        first, second, *rest = parts
        assert first == {"input": "red"}
        assert ids(second["context"]) == plain_ids("red", 2)
        assert rest == [{"answer": letter} for letter in "Question: red"]
        assert sum(parts[1:], parts[0]) == await chain.ainvoke("red")

    async def test_further_variables_reach_the_prompt_and_the_output(self):
        prompt = ChatPromptTemplate.from_messages(
            [
                ("system", "Answer in {language}. Use {context}"),
                MessagesPlaceholder("history"),
                ("human", "{input}"),
            ]
        )
        chain = linked(prompt=prompt)
        history = [HumanMessage("Hello."), AIMessage("Hi.")]
        given = {"input": "red", "language": "Welsh", "history": history}
        output = await chain.ainvoke(given)
        assert {key: output[key] for key in given} == given
        assert output["answer"] == "red"
        assert model_of(chain).calls[0].messages == [
            SystemMessage(f"Answer in Welsh. Use {shown('red')}"),
            *history,
            HumanMessage("red"),
        ]
        with pytest.raises(InvalidRequestError, match="the input lacks 'history', 'language'"):
            await chain.ainvoke("red")

    async def test_a_wrong_guess_changes_nothing(self):
        runs = Runs()
        chain = linked()
        config: Any = {"configurable": {"thread_id": "c1"}, "callbacks": [runs]}
        await chain.ainvoke("red", config)
        output = await chain.ainvoke("completely other words", config)
        assert speculation_of(chain) == (1, 0)
        assert ids(output["context"]) == plain_ids("completely other words", 2)
        assert model_of(chain).calls[-1].messages[0].content == (
            f"Use:\n{shown('completely other words')}"
        )
        answers = [what for path, what in runs.ended if path == "SpeculativeRAGChain > model"]
        assert answers[-1] == "Question: completely other words"

    @pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke"])
    async def test_callbacks_see_the_search_and_the_model_inside_the_chain(self, way):
        runs = Runs()
        chain = linked(name="ask")
        config: Any = {"callbacks": [runs]}
        if way == "ainvoke":
            await chain.ainvoke("red", config)
        elif way == "invoke":
            await asyncio.to_thread(chain.invoke, "red", config)
        else:
            await asyncio.to_thread(lambda: list(chain.stream("red", config)))
        assert [path for path, _ in runs.ended] == ["ask > WorkflowRetriever", "ask > model", "ask"]
        assert ids(runs.ended[0][1]) == plain_ids("red", 2)
        assert runs.ended[-1][1]["answer"] == "Question: red"

    async def test_in_a_chain_its_answer_can_be_picked_and_streamed(self):
        chain = linked().pick("answer") | StrOutputParser()
        assert "".join([part async for part in chain.astream("red")]) == "Question: red"
        assert chain.batch(["red", "blue"]) == ["Question: red", "Question: blue"]

    async def test_an_empty_answer_is_one(self):
        chain = linked(prompt=ChatPromptTemplate.from_template("{input}{context}\n"))
        assert (await chain.ainvoke("red"))["answer"] == ""
        assert [part async for part in chain.astream("red")][-1] == {"answer": ""}

    async def test_a_failing_model_fails_the_call_with_its_error_as_the_cause(self):
        runs = Runs()
        chain = linked(llm=StreamingModel(failing=lambda text: LookupError("no such model")))
        with pytest.raises(StageError, match="no such model") as caught:
            await chain.ainvoke("red", {"callbacks": [runs]})
        assert isinstance(caught.value.__cause__, LookupError)
        assert runs.errors[-1] == "SpeculativeRAGChain: StageError"
        [error] = await chain.abatch(["red"], return_exceptions=True)
        assert isinstance(error, StageError)

    async def test_who_stops_reading_early_ends_the_run(self):
        class Endless(StreamingModel):
            async def _astream(self, *args: Any, **kwargs: Any) -> Any:
                yield next(super()._stream([HumanMessage("abc")]))
                await asyncio.Event().wait()

        chain = linked(llm=Endless())
        parts: Any = chain.astream("red")
        async with aclosing(parts):
            async for part in parts:
                if "answer" in part:
                    break
        metrics = chain._retriever.engine.metrics()
        assert (metrics.cancelled, metrics.in_flight) == (1, 0)

    def test_a_langchain_retriever_is_linked_through_an_engine(self):
        found = RunnableLambda(lambda query: [Document("one"), Document("two")])
        engine = WorkflowEngine(retriever=RetrieverStage(found))
        retriever = WorkflowRetriever(engine=engine)
        chain = SpeculativeRAGChain(retriever=retriever, prompt=PROMPT, llm=StreamingModel())
        assert [one.page_content for one in chain.invoke("red")["context"]] == ["one", "two"]

    async def test_a_query_that_is_no_string_is_refused(self):
        with pytest.raises(
            InvalidRequestError, match="'input' must be a string, for it is searched"
        ):
            await linked().ainvoke({"input": 3})


def answering() -> Any:
    """Return a model that answers with the last line of its prompt."""
    return LangChainLLM(StreamingModel())


def asked(**arguments: Any) -> WorkflowGraph:
    """Return a graph that searches, and asks with a question of its own at the end."""
    graph = WorkflowGraph(inputs=("question",), name="ask", **arguments)
    graph.add_retrieval("search", query="{question}", k=2, output="docs")
    graph.add_generation("answer", prompt="Use {docs}.\nQuestion: {question}")
    graph.add_edge(START, "search").add_edge("search", "answer").add_edge("answer", END)
    return graph


class TestRunnable:
    async def test_it_returns_the_answer_however_it_is_asked(self):
        runnable = WorkflowRunnable(engine_of(answering()), asked())
        wanted = "Question: red"
        assert await runnable.ainvoke("red") == wanted
        assert await runnable.ainvoke({"question": "red", "something": "else"}) == wanted
        assert await asyncio.to_thread(runnable.invoke, "red") == wanted
        assert await runnable.abatch(["red", "blue"]) == [wanted, "Question: blue"]
        assert await asyncio.to_thread(runnable.batch, ["red"] * 3) == [wanted] * 3
        assert [part async for part in runnable.astream("red")] == list(wanted)
        parts = await asyncio.to_thread(lambda: list(runnable.stream("red")))
        assert parts == list(wanted)
        assert (runnable.get_name(), runnable.OutputType) == ("ask", Any)

    async def test_chosen_outputs_come_as_a_dict_with_langchains_documents(self):
        store = {block.id: Document(block.text, metadata={"page": 7}) for block in BLOCKS}
        for document_of, metadata in ((None, {}), (store.__getitem__, {"page": 7})):
            runnable = WorkflowRunnable(
                engine_of(answering()), asked(), outputs=["docs", "answer"], document_of=document_of
            )
            assert runnable.OutputType == dict[str, Any]
            output = await runnable.ainvoke("red")
            assert list(output) == ["docs", "answer"]
            texts = [block.text for block in plain_search("red", 2)]
            assert [(one.page_content, one.metadata) for one in output["docs"]] == [
                (text, metadata) for text in texts
            ]
            assert [part async for part in runnable.astream("red")] == [output]

    async def test_it_is_a_node_of_langgraph(self):
        class Asking(TypedDict, total=False):
            question: str
            mood: str
            docs: list[Document]
            answer: str

        builder: Any = StateGraph(Asking)
        engine = engine_of(answering())
        builder.add_node("rag", WorkflowRunnable(engine, asked(), outputs=["docs", "answer"]))
        builder.add_node("shout", lambda state: {"answer": state["answer"].upper()})
        builder.add_edge(GRAPH_START, "rag")
        builder.add_edge("rag", "shout")
        builder.add_edge("shout", GRAPH_END)
        graph = builder.compile()
        runs = Runs()
        config: Any = {"callbacks": [runs], "configurable": {"thread_id": "c1"}}
        state = await graph.ainvoke({"question": "red", "mood": "good"}, config)
        assert (state["answer"], state["mood"]) == ("QUESTION: RED", "good")
        assert ids(state["docs"]) == plain_ids("red", 2)
        assert "LangGraph > rag > ask > search" in runs.paths
        again = await asyncio.to_thread(graph.invoke, {"question": "red", "mood": "good"}, config)
        assert again == state

    @pytest.mark.parametrize("way", ["invoke", "stream", "batch"])
    def test_callbacks_see_nodes_and_models_inside_the_run(self, way):
        runs = Runs()
        runnable = WorkflowRunnable(engine_of(answering()), asked())
        config: Any = {"callbacks": [runs], "run_name": "mine"}
        if way == "invoke":
            runnable.invoke("red", config)
        elif way == "stream":
            list(runnable.stream("red", config))
        else:
            runnable.batch(["red"], config)
        assert sorted(runs.paths) == ["mine", "mine > answer", "mine > model", "mine > search"]
        ended = dict(runs.ended)
        assert ids(ended["mine > search"]["docs"]) == plain_ids("red", 2)
        assert ended["mine > answer"] == {"answer": "Question: red"}
        assert ended["mine"] == "Question: red"

    async def test_callbacks_hear_of_nodes_that_fail(self):
        runs = Runs()
        failing = LangChainLLM(StreamingModel(failing=lambda text: LookupError("none")))
        runnable = WorkflowRunnable(engine_of(failing), asked())
        with pytest.raises(StageError, match="none"):
            await runnable.ainvoke("red", {"callbacks": [runs]})
        assert runs.errors == [
            "ask > model: LookupError",
            "ask > answer: StageError",
            "ask: StageError",
        ]

    async def test_pieces_that_may_not_be_the_answer_are_held_back(self):
        engine = engine_of(answering())
        rounds = WorkflowRunnable(engine, irg(k=1, rounds=2))
        whole = await rounds.ainvoke("red")
        assert [part async for part in rounds.astream("red")] == [whole]

        beside = asked(answer="answer")
        beside.add_function("look", lambda state: "looked")
        beside.add_edge("search", "look").add_edge("look", END)
        parts = [part async for part in WorkflowRunnable(engine, beside).astream("red")]
        assert parts == ["Question: red"]

        count = WorkflowGraph(inputs=("x",)).add_function("double", lambda state: 2 * state["x"])
        count.add_edge(START, "double").add_edge("double", END)
        assert [part async for part in WorkflowRunnable(engine, count).astream(4)] == [8]

    async def test_config_says_tenant_and_session(self):
        engine = engine_of(answering(), speculation="always")
        runnable = WorkflowRunnable(engine, asked())
        for thread in ("c1", "c2", "c1"):
            await runnable.ainvoke("red", {"configurable": {"thread_id": thread}})
        assert engine.metrics().speculation.committed == 1
        await runnable.ainvoke("red", {"configurable": {"thread_id": "c1", "tenant": "acme"}})
        assert engine.metrics().speculation.committed == 1

    async def test_a_batch_stops_at_the_first_error_or_returns_it(self):
        model = StreamingModel(failing=lambda text: LookupError() if "blue" in text else None)
        engine = engine_of(LangChainLLM(model))
        runnable = WorkflowRunnable(engine, asked())
        good, bad = await runnable.abatch(["red", "blue"], return_exceptions=True)
        assert (good, type(bad)) == ("Question: red", StageError)
        with pytest.raises(StageError):
            await runnable.abatch(["blue", "red"])
        assert engine.metrics().in_flight == 0
        assert await runnable.abatch([]) == []

    async def test_a_run_has_a_deadline_and_inputs_that_the_engine_does_not_take_for_itself(self):
        async def never(query: str, k: int) -> list[str]:
            await asyncio.Event().wait()
            return []

        engine = engine_of(answering(), CallableRetriever(never))
        with pytest.raises(DeadlineError):
            await WorkflowRunnable(engine, asked(), deadline_s=0.001).ainvoke("red")
        graph = WorkflowGraph(inputs=("input", "tenant")).add_function("one", lambda state: 1)
        graph.add_edge(START, "one").add_edge("one", END)
        with pytest.raises(GraphError, match="has the input 'tenant', which the engine's"):
            WorkflowRunnable(engine_of(), graph)


RIGHT: dict[Any, Any] = {
    WorkflowRetriever: lambda: {"engine": engine_of()},
    LangChainLLM: dict,
    SpeculativeRAGChain: lambda: {
        "retriever": WorkflowRetriever(engine=engine_of()),
        "prompt": PROMPT,
        "llm": StreamingModel(),
    },
    WorkflowRunnable: lambda: {"engine": engine_of(), "graph": one_shot()},
}
WRONG: dict[Any, list[tuple[type[Exception], dict[str, Any], str]]] = {
    WorkflowRetriever: [
        (ValidationError, {"engine": None}, "WorkflowEngine"),
        (ValidationError, {"k": 0}, "greater than or equal to 1"),
        (ValidationError, {"document_of": {}}, "pass its __getitem__"),
        (ValidationError, {"unknown": 1}, "Extra inputs"),
    ],
    LangChainLLM: [
        (InvalidRequestError, {"model": one}, "llm must be a LangChain chat model")
        for one in (None, "gpt", StrOutputParser(), FakeListChatModel)
    ],
    SpeculativeRAGChain: [
        (InvalidRequestError, {"retriever": RunnableLambda(len)}, "must be a WorkflowRetriever"),
        (InvalidRequestError, {"prompt": "text"}, "must be a prompt template, not 'text'"),
        (
            InvalidRequestError,
            {"prompt": ChatPromptTemplate.from_template("{docs}")},
            "no variable 'context' for the documents, only 'docs'; write {context} in it",
        ),
        (InvalidRequestError, {"llm": "gpt"}, "llm must be a LangChain chat model"),
    ],
    WorkflowRunnable: [
        (InvalidRequestError, {"engine": "e"}, "engine must be a WorkflowEngine, not 'e'"),
        (InvalidRequestError, {"document_of": 1}, "document_of must be a function"),
        (GraphError, {"graph": "g"}, "graph must be a WorkflowGraph, not 'g'"),
        (GraphError, {"outputs": ["x"]}, "'x' .str., which nothing writes; choose among 'docs'"),
        (GraphError, {"outputs": "docs"}, "outputs must be a list of keys, not 'docs'"),
    ],
}


@pytest.mark.parametrize("made", WRONG)
def test_wrong_arguments_are_refused(made):
    for error, arguments, message in WRONG[made]:
        with pytest.raises(error, match=message):
            made(**RIGHT[made]() | arguments)


def test_the_example_runs_without_a_server(monkeypatch, capsys):
    example = Path(__file__).resolve().parents[2] / "examples" / "langchain_workflow.py"
    monkeypatch.delenv("CTXREUSE_BASE_URL", raising=False)
    runpy.run_path(str(example), run_name="__main__")
    seine, rome, *answers = capsys.readouterr().out.splitlines()
    assert seine.startswith("1. ['The Seine flows through Paris into the English Channel.'")
    assert rome.startswith("1. ['Rome is the capital of Italy.'")
    assert answers == [
        "2. The Seine flows through Paris.",
        "2. The Seine flows through Paris.",
        "3. The Seine flows through Paris. (2 documents)",
    ]
