"""Copying, deep-copying and pickling what applications hold."""

import asyncio
import copy
import copyreg
import itertools
import pickle
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest
from chain_helpers import documents
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import MockLLM
from llamaindex_helpers import LetterRetriever, letter_nodes, letter_text

from chain_of_agents import ChainOfAgents
from chain_of_agents.agent_memory import AgentMemory
from ctxreuse import ContextRequest, ReusePlanner, Templates
from ctxreuse.cache import BlockLevelCache, CapacityTracker, KVEventSync, PrefixCacheSimulator
from ctxreuse.errors import InvalidRequestError
from ctxreuse.measure.traces.recording import TraceRecorder
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool
from ctxreuse.workflow import (
    END,
    START,
    EmulatedLLM,
    WorkflowEngine,
    WorkflowGraph,
    hyde,
    irg,
    multistep,
)
from langchain_ctxreuse import (
    LangChainLLM,
    RetrieverStage,
    ReuseChatModel,
    ReuseCompressor,
    ReuseMiddleware,
    ReuseRetriever,
    WorkflowRetriever,
    WorkflowRunnable,
    format_context,
)
from llamaindex_ctxreuse import ReuseChatEngine, ReuseLLM, ReuseMemoryBlock, ReusePostprocessor
from llamaindex_ctxreuse import ReuseRetriever as ReuseNodeRetriever
from llamaindex_ctxreuse import WorkflowRetriever as WorkflowNodeRetriever
from llamaindex_ctxreuse import format_context as format_nodes
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}
REQUEST = ContextRequest(["one text", "another text"], "Which?")


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    "again", [*COPIES.values(), ReusePlanner.sibling], ids=[*COPIES, "sibling"]
)
@pytest.mark.parametrize("mode", ["active", "shadow"])
def test_a_copied_planner_has_the_same_settings_and_has_seen_nothing(again, mode):
    templates = Templates(label="<{letters}>")
    planner = ReusePlanner(
        alpha=0.5,
        token_counter=words,
        capacity_tokens=1_000,
        templates=templates,
        deduplicate=False,
        annotate=False,
        labels=True,
        cache="anthropic",
        keep_best=True,
        mode=mode,
    )
    planner.plan(REQUEST)
    copied = again(planner)
    assert copied.statistics().requests == 0
    assert (copied._settings, copied._mode) == (planner._settings, mode)
    assert copied.count_tokens("three words here") == 3
    assert copied.templates == templates
    assert copied.plan(REQUEST).request_id == "request-0"
    assert planner.statistics().requests == 1


@pytest.fixture
def no_iterator_is_copied(monkeypatch: Any) -> None:
    """Refuse what Python 3.12 warns of and 3.14 refuses itself."""

    def refuse(iterator: Any) -> Any:
        raise TypeError(f"a copy holds an {type(iterator)}")

    for kind in (itertools.count, itertools.chain, itertools.islice, itertools.accumulate):
        monkeypatch.setitem(copyreg.dispatch_table, kind, refuse)


def used_cache() -> BlockLevelCache:
    cache = BlockLevelCache(100)
    cache.serve([b"a", b"b"], [3, 4])
    return cache


@pytest.mark.usefixtures("no_iterator_is_copied")
@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "make",
    [
        used_cache,
        PrefixCacheSimulator,
        lambda: EmulatedLLM(str),
        lambda: ReuseChatModel(inner=FakeListChatModel(responses=["Yes."])),
        lambda: ReuseLLM(inner=MockLLM()),
        lambda: ReusePlanner().conversation("c"),
        lambda: CapacityTracker(ReusePlanner(), 100),
    ],
    ids=range(7),
)
def test_no_copy_holds_an_iterator_that_python_no_longer_copies(again, make):
    one = make()
    assert type(again(one)) is type(one)


def test_a_copied_cache_goes_on_where_the_original_is():
    one = used_cache()
    for again in COPIES.values():
        assert again(one).serve([b"a", b"b"], [3, 4]).cached_tokens == 7


DEEP = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "model_copy(deep=True)": lambda one: one.model_copy(deep=True),
}
EVERY_COPY = {"copy": copy.copy, "model_copy": lambda one: one.model_copy(), **DEEP}
TEMPLATES = Templates(label="<{letters}>")
QUESTION = {"question": "Which?", "documents": documents(3), "conversation_id": "c"}


class Found(BaseRetriever):
    """Finds two documents that are long enough to be planned."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(letter_text("a")), Document(letter_text("b"))]


class Echo(FakeListChatModel):
    temperature: float = 0.0

    def _call(self, *args: Any, **kwargs: Any) -> str:
        return str(kwargs.get("temperature", self.temperature))


class Notes:
    def __init__(self) -> None:
        self.queries: list[str] = []

    def search(self, query: str, **options: Any) -> dict[str, Any]:
        self.queries.append(query)
        return {"results": [{"id": n, "memory": letter_text(n)} for n in "ab"]}


class AsyncNotes:
    async def search(self, query: str, **options: Any) -> dict[str, Any]:
        return Notes().search(query)


def fake() -> FakeListChatModel:
    return FakeListChatModel(responses=["Yes."])


def planner() -> ReusePlanner:
    return ReusePlanner(templates=TEMPLATES)


def engine() -> WorkflowEngine:
    return WorkflowEngine(LangChainLLM(fake()), RetrieverStage(Found()))


def is_long(state: Any) -> str:
    return "search" if len(state["query"]) > 5 else END


def routed_graph() -> WorkflowGraph:
    graph = WorkflowGraph(inputs=("query",), defaults={"seen": []})
    graph.add_retrieval("search", query="{query}", k=1, max_visits=2, otherwise=END)
    graph.add_generation("answer", prompt="{docs} {query}", params={"max_tokens": 3})
    graph.add_edge(START, "search").add_edge("search", "answer")
    return graph.add_edge("answer", is_long, targets=["search", END])


def ask_engine(one: Any) -> list[str]:
    return [str(one.chat("ab Which?")), str(asyncio.run(one.achat("bc And?")))]


def of_block(one: Any) -> str:
    return asyncio.run(one.aget([ChatMessage(role="user", content="ab Which?")]))


def memories(one: Any) -> Any:
    found = one.search("Which?", filters={"user_id": "alice"})
    found = found if isinstance(found, dict) else asyncio.run(found)
    assert one.faults == 0
    return found["results"]


COMPONENTS = {
    "ReuseChatModel": (
        lambda: ReuseChatModel(inner=fake(), planner=planner()),
        lambda one: one.invoke(f"{format_context(Found().invoke('q'))}\n\nWhich?").text,
    ),
    "ReuseRetriever": (
        lambda: ReuseRetriever(retriever=Found(), planner=planner()),
        lambda one: [document.page_content for document in one.invoke("Which?")],
    ),
    "ReuseCompressor": (
        lambda: ReuseCompressor(planner=planner()),
        lambda one: [d.page_content for d in one.compress_documents(Found().invoke("q"), "Which?")],
    ),
    "ReuseMiddleware": (
        lambda: ReuseMiddleware(planner=planner(), retriever=Found()),
        lambda one: (
            create_agent(fake(), middleware=[one])
            .invoke({"messages": [HumanMessage("Which?")]})["messages"][0]
            .text
        ),
    ),
    "ReuseLLM": (
        lambda: ReuseLLM(inner=MockLLM(), planner=planner()),
        lambda one: one.complete(f"{format_nodes(letter_nodes('ab'))}\n\nWhich?").text,
    ),
    "ReusePostprocessor": (
        lambda: ReusePostprocessor(planner=planner()),
        lambda one: [n.text for n in one.postprocess_nodes(letter_nodes("ab"), query_str="Which?")],
    ),
    "ReuseNodeRetriever": (
        lambda: ReuseNodeRetriever(LetterRetriever(), planner=planner()),
        lambda one: [node.text for node in one.retrieve("ab Which?")],
    ),
    "ReuseChatEngine": (
        lambda: ReuseChatEngine(LetterRetriever(), MockLLM(), planner=planner()),
        ask_engine,
    ),
    "ReuseMemoryBlock of mem0": (
        lambda: ReuseMemoryBlock(memory=Notes(), planner=planner(), filters={"user_id": "alice"}),
        of_block,
    ),
    "ReuseMemoryBlock of a retriever": (
        lambda: ReuseMemoryBlock(memory=LetterRetriever(), planner=planner()),
        of_block,
    ),
    "ReuseMemory": (lambda: ReuseMemory(Notes(), planner=planner()), memories),
    "AsyncReuseMemory": (lambda: AsyncReuseMemory(AsyncNotes(), planner=planner()), memories),
    "ChainOfAgents": (
        lambda: ChainOfAgents(llm=fake(), workers=2, planner=planner()),
        lambda one: str(one.invoke(QUESTION)),
    ),
    "ChainOfAgents of LlamaIndex": (
        lambda: ChainOfAgents(llm=MockLLM(max_tokens=2), workers=2, planner=planner()),
        lambda one: str(asyncio.run(one.ainvoke(QUESTION))),
    ),
    "a LangChain chain": (
        lambda: ChatPromptTemplate.from_template("{q}") | ReuseChatModel(inner=fake()),
        lambda one: one.invoke({"q": "Which?"}).text,
    ),
    "with_config": (
        lambda: ReuseChatModel(inner=fake()).with_config(configurable={"tenant": "t"}),
        lambda one: one.invoke("Which?").text,
    ),
    "configurable_fields": (
        lambda: ReuseChatModel(inner=Echo(responses=[])).configurable_fields(
            inner=ConfigurableField(id="inner")
        ),
        lambda one: (
            one.invoke(
                "Which?", {"configurable": {"inner": Echo(responses=[], temperature=0.5)}}
            ).text
        ),
    ),
    "a graph that is built": (
        routed_graph,
        lambda one: asyncio.run(engine().run(one, "a longer query")).visited,
    ),
    "a compiled graph": (
        lambda: routed_graph().compile(),
        lambda one: asyncio.run(engine().run(one, "a longer query")).visited,
    ),
    **{
        make.__name__: (make, lambda one: asyncio.run(engine().run(one, "Which?")).answer)
        for make in (hyde, irg, multistep)
    },
}
CASES = [
    pytest.param(make, use, again, id=f"{name}, {way}")
    for name, (make, use) in COMPONENTS.items()
    for way, again in EVERY_COPY.items()
    if not way.startswith("model_copy") or hasattr(make(), "model_copy")
]


@pytest.mark.parametrize(("make", "use", "again"), CASES)
def test_a_copy_does_what_the_original_does_whether_or_not_that_was_used_before(make, use, again):
    unused, used = make(), make()
    wanted = use(used)
    assert use(again(unused)) == use(unused) == wanted
    assert type(again(used)) is type(used)
    assert use(again(used)) == wanted or isinstance(used, ReuseChatEngine)  # it is one turn further


@pytest.mark.parametrize("again", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("name", [name for name in COMPONENTS if name.startswith("Reuse")])
def test_a_copy_has_a_planner_of_its_own_with_the_same_settings(name, again):
    make, use = COMPONENTS[name]
    one = make()
    assert planner_of(copy.copy(one)) is planner_of(one)
    if again is DEEP["model_copy(deep=True)"] and not hasattr(one, "model_copy"):
        again = copy.deepcopy
    copied = again(one)
    planners = [planner_of(copied), planner_of(one)]
    before = [planner.statistics() for planner in planners]
    use(copied)
    assert planners[0].templates == TEMPLATES
    assert planners[0].statistics() != before[0]
    assert planners[1].statistics() == before[1]


def planner_of(component: Any) -> ReusePlanner:
    holders = [component]
    for _ in range(2):
        holders += [part for one in holders for part in getattr(one, "__dict__", {}).values()]
    found = (getattr(one, name, None) for one in holders for name in ("planner", "_planner"))
    return next(one for one in found if isinstance(one, ReusePlanner))


@pytest.mark.parametrize("again", [copy.copy, *DEEP.values()][:3], ids=["copy", *DEEP][:3])
def test_a_chat_engine_and_its_copy_go_on_by_themselves_and_each_shows_all_that_was_found(again):
    one = ReuseChatEngine(LetterRetriever(), MockLLM())
    one.chat("ab Which?")
    copied = again(one)
    one.chat("bc And?")
    copied.chat("bd And?")
    one.chat("d Then?")
    copied.chat("c Then?")
    for engine_, questions in ((one, ["ab", "bc", "d"]), (copied, ["ab", "bd", "c"])):
        sent = "".join(message.content or "" for message in engine_.chat_history[::2])
        assert all(letter_text(letter) in sent for letter in "abcd")
        said = [message.content[:2].strip() for message in engine_.said[::2]]
        assert said == questions
        assert engine_.faults == 0


def test_copies_of_memory_blocks_and_graphs_go_on_by_themselves():
    for memory in (Notes(), LetterRetriever()):
        block = ReuseMemoryBlock(memory=memory)
        for again in DEEP.values():
            of_block(again(block))
        assert memory.queries == []

    one = routed_graph()
    before = one.draw()
    copied = copy.copy(one).add_generation("more", prompt="{query}").add_edge("more", END)
    assert copied.draw() != before
    assert one.draw() == before
    for again in (copy.copy, copy.deepcopy, DEEP["pickle"]):
        parts = again(AgentMemory(3, 400)).parts
        bounds = parts["conversations"].bound, parts["conversation_characters"].bound
        assert bounds == (3, 400)


def test_a_chain_of_agents_is_copied_without_the_calls_in_flight_and_without_its_memory():
    has_answered, has_begun, goes_on = Event(), Event(), Event()

    class Waiting(FakeListChatModel):
        def _call(self, *args: Any, **kwargs: Any) -> str:
            if has_answered.is_set():
                has_begun.set()
                goes_on.wait(30)
            return "Yes."

        def __deepcopy__(self, memo: Any) -> FakeListChatModel:
            return fake()

    chain = ChainOfAgents(llm=Waiting(responses=[]), workers=2, concurrency=1)
    chain.invoke({**QUESTION, "conversation_id": "other"})
    has_answered.set()
    thread = Thread(target=lambda: chain.invoke(QUESTION))
    thread.start()
    has_begun.wait(30)
    copied = copy.deepcopy(chain)
    assert str(copied.invoke(QUESTION)) == "Yes."  # the one place is free
    goes_on.set()
    thread.join()
    assert chain.end_conversation("other")
    assert not copied.end_conversation("other")


def test_a_planner_that_cannot_be_pickled_is_left_out_as_llamaindex_does_and_that_is_logged(caplog):
    planner = ReusePlanner(token_counter=lambda text: 1, templates=TEMPLATES)
    for one in (ReuseLLM(inner=MockLLM(), planner=planner), ReusePostprocessor(planner=planner)):
        caplog.clear()
        copied = pickle.loads(pickle.dumps(one))
        assert copied.planner.templates == Templates()
        [message] = caplog.messages
        assert message.startswith(f"the planner of {type(one).__name__} cannot be pickled (")
        assert one.planner is planner


def test_components_that_are_pickled_together_share_their_planner_again():
    planner = ReusePlanner()
    both = (
        ReuseLLM(inner=MockLLM(), planner=planner),
        ReusePostprocessor(planner=planner),
        ReuseChatModel(inner=fake(), planner=planner),
    )
    llm, postprocessor, model = pickle.loads(pickle.dumps(both))
    assert llm.planner is postprocessor.planner is model.planner is not planner


HELD: dict[str, Any] = {
    "EngineClient": lambda folder: EngineClient("http://a", "m"),
    "EnginePool": lambda folder: EnginePool("http://a", "m"),
    "EmulatedEngine": lambda folder: EmulatedEngine(),
    "KVEventSync": lambda folder: KVEventSync(ReusePlanner(), "tcp://127.0.0.1:1"),
    "WorkflowEngine": lambda folder: WorkflowEngine(),
    "TraceRecorder": TraceRecorder,
}
ON_ENGINES = [WorkflowRetriever, WorkflowNodeRetriever, partial(WorkflowRunnable, graph=hyde())]


@pytest.mark.parametrize("way", COPIES)
def test_what_holds_connections_threads_or_files_says_that_each_process_makes_its_own(
    way, tmp_path
):
    made = [(name, make(tmp_path)) for name, make in HELD.items()]
    if way != "copy":  # which shares the engine
        made += [("WorkflowEngine", make(engine=engine())) for make in ON_ENGINES]
    for name, one in made:
        message = f"{name} cannot be copied or pickled, .*; make one in each process"
        with pytest.raises(InvalidRequestError, match=message):
            COPIES[way](one)


def test_calls_with_configured_fields_share_the_planner():
    model = ReuseChatModel(inner=fake())
    configurable = model.configurable_fields(strategy=ConfigurableField(id="strategy"))
    for strategy in ("reuse", "none", "paper"):
        prompt = f"{format_context(Found().invoke('q'))}\n\n{strategy}?"
        configurable.invoke(prompt, {"configurable": {"strategy": strategy}})
    assert model.planner.statistics().requests == 3
