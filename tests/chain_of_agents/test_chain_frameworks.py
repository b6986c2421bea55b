"""The chain inside LangChain, LangGraph and LlamaIndex, and their models inside the chain."""

# no postponed annotations: LangGraph compares those of nodes

import asyncio
from contextvars import ContextVar
from typing import Any, TypedDict

import pytest
from chain_helpers import InTurn, SaysModel, question
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda, RunnablePassthrough
from langchain_runs import Runs
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from llama_index.core.llms import MockLLM
from llama_index.core.schema import NodeWithScore, TextNode
from llamaindex_helpers import RecordingLLM
from openai_models import chat_openai, clients_of, openai_like

from chain_of_agents import ChainOfAgents
from ctxreuse import request_context
from ctxreuse.context.scope import current_scope
from ctxreuse.serving import EmulatedEngine

MODES = pytest.mark.parametrize("mode", ["sequential", "parallel"])


def retrieve(query: str) -> list[Document]:
    return [Document(id=f"{query}-{n}", page_content=f"{query} number {n}") for n in range(2)]


class TestLangChain:
    def test_in_an_lcel_chain_it_takes_what_a_retriever_gives(self):
        pipeline = (
            {"documents": RunnableLambda(retrieve), "question": RunnablePassthrough()}
            | ChainOfAgents(llm=SaysModel(says=lambda prompt: f"says {len(prompt)}"), workers=2)
            | StrOutputParser()
        )
        answer = pipeline.invoke("cats")
        assert answer.startswith("says ")
        assert pipeline.batch(["cats", "cats"]) == [answer, answer]
        assert "".join(pipeline.stream("cats")) == answer
        assert asyncio.run(pipeline.ainvoke("cats")) == answer

    def test_an_answer_is_a_string_for_what_comes_next_as_schemas_say(self):
        prompt = ChatPromptTemplate.from_template("Translate: {text}")
        model = SaysModel()
        chain = ChainOfAgents(llm=SaysModel(says=lambda text: "In France."))
        pipeline = chain | (lambda answer: {"text": answer}) | prompt | model
        asyncio.run(pipeline.ainvoke(question(1)))
        assert str(model.prompts[0][0].content) == "Translate: In France."
        chain = ChainOfAgents(llm=SaysModel())
        assert chain.get_input_jsonschema()["type"] == "object"
        assert chain.get_output_jsonschema() == {"title": "ChainOfAgentsOutput", "type": "string"}
        assert "ChainOfAgents" in (chain | StrOutputParser()).get_graph().draw_mermaid()

    @MODES
    @pytest.mark.parametrize("way", ["invoke", "stream", "batch"])
    def test_callbacks_see_each_agent_inside_the_chain_and_models_inside_agents(self, mode, way):
        runs = Runs()
        chain = ChainOfAgents(
            llm=SaysModel(), mode=mode, workers=2, packing="single", assignment=InTurn
        )
        config: Any = {"callbacks": [runs], "tags": ["mine"], "run_name": "reading"}
        if way == "invoke":
            chain.invoke(question(2), config)
        elif way == "stream":
            list(chain.stream(question(2), config))
        else:
            chain.batch([question(2)], config)
        assert sorted(runs.paths) == [
            "reading",
            "reading > manager",
            "reading > manager > model",
            "reading > worker 0",
            "reading > worker 0 > model",
            "reading > worker 1",
            "reading > worker 1 > model",
        ]
        assert all("mine" in tags for tags in runs.tags)
        ended = dict(runs.ended)
        for agent in ("worker 0", "manager"):
            assert ended[f"reading > {agent}"] == {"note": "A note."}
        assert ended["reading"] == "A note."
        assert runs.errors == []

    def test_callbacks_hear_of_workers_and_managers_that_fail(self):
        runs = Runs()
        model = SaysModel(says=lambda text: ValueError("no"))
        with pytest.raises(RuntimeError):
            ChainOfAgents(llm=model, workers=2, packing="single").invoke(
                question(2), {"callbacks": [runs]}
            )
        assert [error for error in runs.errors if "model" not in error] == [
            "ChainOfAgents > worker 0: ValueError",
            "ChainOfAgents > worker 1: ValueError",
            "ChainOfAgents: UnreadError",
        ]
        runs = Runs()
        model = SaysModel(says=lambda text: ValueError("no") if "Notes:" in text else "A note.")
        with pytest.raises(RuntimeError):
            ChainOfAgents(llm=model).invoke(question(1), {"callbacks": [runs]})
        assert runs.errors[1:] == [
            "ChainOfAgents > manager: ValueError",
            "ChainOfAgents: ManagerError",
        ]

    async def test_events_are_streamed_from_workers_and_manager(self):
        model = FakeListChatModel(responses=["ab"])
        chain = ChainOfAgents(llm=model, workers=1)
        events = [
            (event["event"], event["name"], len(event["parent_ids"]))
            async for event in chain.astream_events(question(1), version="v2")
        ]
        assert [event for event in events if "stream" not in event[0]] == [
            ("on_chain_start", "ChainOfAgents", 0),
            ("on_chain_start", "worker 0", 1),
            ("on_chat_model_start", "FakeListChatModel", 2),
            ("on_chat_model_end", "FakeListChatModel", 2),
            ("on_chain_end", "worker 0", 1),
            ("on_chain_start", "manager", 1),
            ("on_chat_model_start", "FakeListChatModel", 2),
            ("on_chat_model_end", "FakeListChatModel", 2),
            ("on_chain_end", "manager", 1),
            ("on_chain_end", "ChainOfAgents", 0),
        ]
        assert events.count(("on_chat_model_stream", "FakeListChatModel", 2)) == 4
        assert events.count(("on_chain_stream", "ChainOfAgents", 0)) == 3

    def test_context_variables_and_the_scope_reach_the_model_in_sync_calls(self):
        variable: ContextVar[str] = ContextVar("variable", default="none")
        seen: list[Any] = []

        def says(prompt: str) -> str:
            seen.append((variable.get(), current_scope().tenant))
            return "A note."

        chain = ChainOfAgents(llm=SaysModel(says=says))
        token = variable.set("mine")
        with request_context(tenant="acme"):
            chain.invoke(question(1))
            list(chain.stream(question(1)))
            chain.batch([question(1)])
        variable.reset(token)
        chain.invoke(question(1))
        assert set(seen[:-2]) == {("mine", "acme")}
        assert set(seen[-2:]) == {("none", None)}

    def test_bound_models_those_that_give_strings_and_fallbacks_work(self):
        bound = SaysModel().bind(stop=["x"])
        assert ChainOfAgents(llm=bound).invoke(question(1)) == "A note."
        strings = SaysModel() | StrOutputParser()
        assert ChainOfAgents(llm=strings).invoke(question(1)) == "A note."
        failing = ChainOfAgents(llm=SaysModel(says=lambda text: ValueError("no")))
        fallback: Any = RunnableLambda(lambda given: "fallback")
        safe = failing.with_fallbacks([fallback])
        assert safe.invoke(question(1)) == "fallback"

    def test_what_a_model_s_profile_says_it_holds_is_the_budget(self):
        small = SaysModel(profile={"max_input_tokens": 1_500})
        answer = ChainOfAgents(llm=small, workers=1, packing="packed").invoke(question(9))
        assert len(answer.trace.workers) > 1
        wide = SaysModel(profile={"max_input_tokens": 100_000})
        answer = ChainOfAgents(llm=wide, workers=1, packing="packed").invoke(question(9))
        assert len(answer.trace.workers) == 1


class State(TypedDict, total=False):
    question: str
    documents: list[Any]
    answer: str


class TestLangGraph:
    def test_in_a_node_a_thread_is_a_conversation(self):
        model = SaysModel()
        chain = ChainOfAgents(llm=model)

        def read(state: State, config: RunnableConfig) -> State:
            return {"answer": chain.invoke(dict(state), config)}

        building = StateGraph(State)
        building.add_node("read", read)
        building.add_edge(START, "read")
        building.add_edge("read", END)
        graph = building.compile(checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "t"}}
        for _ in range(2):
            state = graph.invoke(question(1), config)
            assert state["answer"] == "A note."
        assert [len(prompt) for prompt in model.prompts] == [2, 2, 4, 4]
        graph.invoke(question(1), {"configurable": {"thread_id": "other"}})
        assert [len(prompt) for prompt in model.prompts[4:]] == [2, 2]
        assert graph.get_state(config).values["answer"] == "A note."


class TestLlamaIndex:
    @MODES
    def test_an_llm_reads_nodes(self, mode):
        llm = RecordingLLM()
        nodes = [
            NodeWithScore(node=TextNode(id_="n1", text="one"), score=0.9),
            TextNode(id_="n2", text="two", metadata={"source": "hidden"}),
        ]
        chain = ChainOfAgents(llm=llm, mode=mode, workers=2, packing="single", assignment=InTurn)
        answer = chain.invoke({"question": "Q?", "documents": nodes})
        assert answer == "answer 3"
        assert [one.documents for one in answer.trace.workers] == [("n1",), ("n2",)]
        assert str(llm.chats[0][1].content).startswith("one\n\n")
        assert "hidden" not in str(llm.chats)
        assert "".join(chain.stream({"question": "Q?", "documents": nodes})) == "answer 6"

    def test_the_mock_llm_answers_and_what_an_llm_says_it_holds_is_the_budget(self):
        chain = ChainOfAgents(llm=MockLLM(max_tokens=3))
        answer = chain.invoke(question(2))
        assert answer == "text text text"
        assert "".join(chain.stream(question(2))) == "text text text"
        chain = ChainOfAgents(llm=RecordingLLM(context_window=1_500), workers=1, packing="packed")
        assert len(chain.invoke(question(9)).trace.workers) > 1


@MODES
@pytest.mark.parametrize("model", [chat_openai, openai_like])
def test_usage_of_a_model_of_openais_lands_in_the_trace(mode, model):
    engine = EmulatedEngine(answer="A note.")
    llm = model(*clients_of(engine.transport()))
    chain = ChainOfAgents(llm=llm, mode=mode, workers=2, packing="single", assignment=InTurn)
    asyncio.run(chain.ainvoke(question(2)))
    answer = asyncio.run(chain.ainvoke({**question(2), "question": "Other?"}))
    lengths = [len(engine.prompt_tokens(body["messages"])) for body in engine.requests[-3:]]
    assert [step.prompt_tokens for step in answer.trace.steps] == lengths
    assert [step.completion_tokens for step in answer.trace.steps] == [3, 3, 3]
    assert all(
        0.7 * n < (s.cached_tokens or 0)
        for n, s in zip(lengths[:2], answer.trace.workers, strict=True)
    )
    assert "".join(chain.stream(question(2))) == "A note."


def test_sync_calls_to_a_model_object_share_one_event_loop_so_its_connections_live_on():
    loops: list[asyncio.AbstractEventLoop] = []

    def says(prompt: str) -> str:
        loops.append(asyncio.get_running_loop())
        return "A note."

    model = SaysModel(says=says)
    chain = ChainOfAgents(llm=model)
    chain.invoke(question(1))
    chain.batch([question(1)] * 2)
    list(chain.stream(question(1)))
    ChainOfAgents(llm=model).invoke(question(1))
    assert len(set(loops)) == 1
    assert not loops[0].is_closed()
