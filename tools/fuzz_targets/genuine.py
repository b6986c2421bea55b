"""Genuine objects of this package and good arguments, between which hostile ones are put."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import httpx
import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langgraph.store.memory import InMemoryStore
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import BaseRetriever as NodeRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from prometheus_client import CollectorRegistry

import langchain_ctxreuse as for_langchain
import llamaindex_ctxreuse as for_llamaindex
from chain_of_agents import ChainOfAgents
from ctxreuse import (
    CacheRules,
    ContextBlock,
    ContextRequest,
    Conversation,
    Plan,
    ReusePlanner,
    Templates,
    cache_profile,
)
from ctxreuse.cache import (
    BlockLevelCache,
    CapacityTracker,
    KVEventSync,
    PrefixCacheMetrics,
    PrefixCacheSimulator,
)
from ctxreuse.cache.provider_cache import ProviderCache
from ctxreuse.cache.telemetry import PlannerCollector
from ctxreuse.context.blocks import BlockId
from ctxreuse.context.rendering import DEFAULT_TEMPLATES
from ctxreuse.context.reported_usage import ReportedMiss, reported_miss
from ctxreuse.measure.replay.policies import OURS_ONLINE
from ctxreuse.measure.replay.simulate import Replay, Run, RunResult
from ctxreuse.measure.results.measured_savings import EstimateConfig
from ctxreuse.measure.results.results import Results
from ctxreuse.measure.traces.recording import PromptRecorder, TraceRecorder
from ctxreuse.measure.traces.sent_calls import SentCall
from ctxreuse.measure.traces.trace_files import TraceRequest
from ctxreuse.pipeline.memory_planner import MemoryContext
from ctxreuse.planning.savings import PlanningTime
from ctxreuse.rules.billed_tokens import BilledTokens
from ctxreuse.serving import EmulatedEngine, EngineClient, EnginePool
from ctxreuse.sharing import RedisLog, SQLiteLog
from ctxreuse.workflow import (
    END,
    START,
    CallableRetriever,
    Documents,
    EmulatedLLM,
    FusedRetriever,
    Graph,
    HotTier,
    IVFIndex,
    KeywordRetriever,
    LangChainEmbedder,
    OpenAILLM,
    State,
    TfidfEmbedder,
    ThroughputTable,
    VectorRetriever,
    WordLlamaEmbedder,
    WorkflowEngine,
    WorkflowGraph,
    one_shot,
)
from fuzz_targets.files import written_results
from mem0_ctxreuse import AsyncReuseMemory, ReuseMemory

_TEXTS = [f"{name} flows through {city}" for name, city in zip("abcd", "wxyz", strict=True)]
_CORPUS = '{"id": "a", "text": "The Tagus flows through Lisbon."}\n'
_TRACE = '{"request_id": "r", "query": "Which?", "blocks": ["a"]}\n'
_QUERIES = '{"id": "q", "question": "Which?"}\n'
_MESSAGES = [{"role": "user", "content": "Which?"}]


class _Documents(BaseRetriever):
    def _get_relevant_documents(self, query: str, **others: Any) -> list[Document]:
        return [Document(words) for words in _TEXTS]


class _Nodes(NodeRetriever):
    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=words), score=0.5) for words in _TEXTS]


class _Memories:
    def search(self, query: str, **others: Any) -> Any:
        return {"results": [{"id": words, "memory": words} for words in _TEXTS]}


class _AsyncMemories:
    async def search(self, query: str, **others: Any) -> Any:
        return _Memories().search(query)


def _request() -> ContextRequest:
    return ContextRequest(["one", ContextBlock(id="a", text="two")], "Which?", request_id="r")


def _planner() -> ReusePlanner:
    planner = ReusePlanner()
    planner.plan(_request())
    return planner


def _conversation() -> Conversation:
    chat = ReusePlanner().conversation("c")
    chat.plan(["one"], "Which?")
    return chat


def _http() -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=EmulatedEngine().transport())


def _client() -> EngineClient:
    return EngineClient("http://a/v1", planner=_planner(), http_client=_http(), backoff_s=0)


def _pool() -> EnginePool:
    return EnginePool({"a": _client, "b": _client}, backoff_s=0, window_s=0)


@cache
def _faiss_index() -> Any:
    vectors = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(4), 4, 4)
    index.cp.min_points_per_centroid = 1
    index.train(vectors)
    index.add(vectors)
    return index


def _index() -> IVFIndex:
    return IVFIndex(_faiss_index())


def _words() -> list[str]:
    return ["Tagus flows Lisbon", "Seine Paris town"] * 3


@cache
def _tfidf() -> TfidfEmbedder:
    return TfidfEmbedder(_words(), 4)


def _blocks(count: int) -> list[ContextBlock]:
    return [ContextBlock(id=number, text=f"text {number}") for number in range(count)]


def _vector_retriever() -> VectorRetriever:
    return VectorRetriever(_index(), _blocks(64), _embedder())


def _embedder() -> LangChainEmbedder:
    return LangChainEmbedder(DeterministicFakeEmbedding(size=4), dimension=4)


def _file(name: str, content: str) -> str:
    Path(name).write_text(content)
    return name


def _keywords() -> KeywordRetriever:
    return KeywordRetriever([ContextBlock(text=words) for words in _TEXTS])


def _finder() -> CallableRetriever:
    return CallableRetriever(lambda query, k: _TEXTS[:k])


def _chain() -> for_langchain.SpeculativeRAGChain:
    return for_langchain.SpeculativeRAGChain(
        retriever=for_langchain.WorkflowRetriever(engine=_engine()),
        prompt=ChatPromptTemplate.from_template("{context} {input}"),
        llm=_chat_model(),
    )


def _model() -> EmulatedLLM:
    return EmulatedLLM(lambda messages: "Yes.")


def _engine() -> WorkflowEngine:
    return WorkflowEngine(_model(), _finder())


def _started(graph: Graph) -> State:
    return State({**graph.defaults, "input": "Which?"})


def _corpus() -> dict[BlockId, ContextBlock]:
    return {number: ContextBlock(id=number, text=words) for number, words in enumerate(_TEXTS)}


def _trace() -> list[TraceRequest]:
    blocks = tuple(_corpus().values())
    return [
        TraceRequest("r", "Which?", blocks, "c"),
        TraceRequest("s", "And?", blocks[::-1], "c", 1),
    ]


def _recorded() -> str:
    _file("corpus.jsonl", _CORPUS)
    return _file("trace.jsonl", _TRACE)


def _run_result() -> RunResult:
    return Replay(_trace(), _corpus()).measure(Run(OURS_ONLINE, _trace()))


_MISS = {"diagnostics": {"cache_miss_reason": {"type": "system_changed"}}}


OBJECTS: dict[type, Callable[[], Any]] = {
    AsyncReuseMemory: lambda: AsyncReuseMemory(_AsyncMemories()),
    BilledTokens: lambda: BilledTokens(10, 90, {"30m": 100}),
    BlockLevelCache: BlockLevelCache,
    ProviderCache: lambda: ProviderCache(cache_profile("anthropic")),
    CacheRules: lambda: cache_profile("openai"),
    MemoryContext: lambda: MemoryContext("one", None, _request(), _planner().plan(_request())),
    CallableRetriever: _finder,
    CapacityTracker: lambda: CapacityTracker(_planner(), 1_000),
    ChainOfAgents: lambda: ChainOfAgents(FakeListChatModel(responses=["None."] * 40), 2),
    Conversation: _conversation,
    EmulatedEngine: EmulatedEngine,
    EmulatedLLM: _model,
    EngineClient: _client,
    EnginePool: _pool,
    FusedRetriever: lambda: FusedRetriever({"words": _keywords(), "finder": _finder()}),
    HotTier: lambda: HotTier(_index(), 10_000),
    IVFIndex: _index,
    KVEventSync: lambda: KVEventSync(_planner(), "tcp://127.0.0.1:1"),
    KeywordRetriever: _keywords,
    LangChainEmbedder: _embedder,
    OpenAILLM: lambda: OpenAILLM(_client()),
    Plan: lambda: _planner().plan(_request()),
    PlannerCollector: lambda: PlannerCollector(_planner()),
    PlanningTime: PlanningTime,
    ReportedMiss: lambda: reported_miss(_MISS),
    PrefixCacheSimulator: PrefixCacheSimulator,
    PromptRecorder: lambda: PromptRecorder(TraceRecorder("recorded")),
    Results: lambda: written_results(),
    ReuseMemory: lambda: ReuseMemory(_Memories()),
    for_langchain.ReuseStore: lambda: for_langchain.ReuseStore(InMemoryStore()),
    ReusePlanner: _planner,
    RedisLog: lambda: RedisLog("unix:///nowhere/redis.sock", secret="a secret of 22 signs."),
    SQLiteLog: lambda: SQLiteLog("sent.sqlite"),
    State: lambda: _started(one_shot().compile()),
    Templates: Templates,
    TfidfEmbedder: _tfidf,
    ThroughputTable: lambda: ThroughputTable([1, 2], [1.0, 2.0], [[1.0, 2.0], [2.0, 3.0]]),
    TraceRecorder: lambda: TraceRecorder("recorded"),
    VectorRetriever: _vector_retriever,
    WordLlamaEmbedder: WordLlamaEmbedder,
    WorkflowEngine: _engine,
    WorkflowGraph: lambda: WorkflowGraph(name="g"),
    for_langchain.LangChainLLM: lambda: for_langchain.LangChainLLM(_chat_model()),
    for_langchain.RetrieverStage: lambda: for_langchain.RetrieverStage(_Documents()),
    for_langchain.SpeculativeRAGChain: lambda: _chain(),
    for_langchain.WorkflowRetriever: lambda: for_langchain.WorkflowRetriever(engine=_engine()),
    for_langchain.WorkflowRunnable: lambda: for_langchain.WorkflowRunnable(_engine(), one_shot()),
    for_llamaindex.LlamaIndexLLM: lambda: for_llamaindex.LlamaIndexLLM(MockLLM()),
    for_llamaindex.RetrieverStage: lambda: for_llamaindex.RetrieverStage(_Nodes()),
    for_llamaindex.ReuseChatEngine: lambda: for_llamaindex.ReuseChatEngine(_Nodes(), MockLLM()),
    for_llamaindex.SpeculativeRAGQueryEngine: (
        lambda: for_llamaindex.SpeculativeRAGQueryEngine(
            for_llamaindex.WorkflowRetriever(_engine()), llm=MockLLM()
        )
    ),
}
"""What methods are called on."""


def _chat_model() -> FakeListChatModel:
    return FakeListChatModel(responses=["Yes."] * 10)


VALID: dict[str, Callable[[], Any]] = {
    "BilledTokens.bill.profile": lambda: cache_profile("openai"),
    "CacheRules.readable.tokens": lambda: 5,
    "BlockLevelCache.serve.blocks": lambda: [b"one", b"two"],
    "BlockLevelCache.serve.tokens": lambda: [3, 4],
    "CapacityTracker.from_metrics.metrics": lambda: PrefixCacheMetrics(
        0, 0, block_size=16, num_gpu_blocks=100
    ),
    "CapacityTracker.capacity_tokens": lambda: 1_000,
    "ChainOfAgents.input": lambda: {"question": "Which?", "documents": list(_TEXTS)},
    "ChainOfAgents.inputs": lambda: [{"question": "Which?", "documents": list(_TEXTS)}],
    "SQLiteLog.entries": lambda: [b"one", b"two"],
    "SQLiteLog.position": lambda: "1-0123456789ABCDEF",
    "SQLiteLog.name": lambda: "engine",
    "RedisLog.url": lambda: "unix:///nowhere/redis.sock",
    "RedisLog.secret": lambda: "a secret of at least 16 bytes",
    "RedisLog.name": lambda: "engine",
    "Templates.label": lambda: "[BCDF]",
    "Templates.old": lambda: "[BCDF]",
    "Templates.labels": lambda: ["[BCDF]"],
    "Graph.edges": lambda: one_shot().compile().edges,
    "Graph.nodes": lambda: one_shot().compile().nodes,
    "Graph.defaults": dict,
    "workflow.Graph.inputs": lambda: ["input"],
    "workflow.Graph.answer": lambda: "answer",
    "cited_documents.answer": lambda: "Yes [BCDF].",
    "cited_nodes.answer": lambda: "Yes [BCDF].",
    "State.node": lambda: "search",
    "State.writes": lambda: {"docs": Documents(_TEXTS)},
    "State.visited": lambda: ["search"],
    "HotTier.note.clusters": lambda: [0, 1],
    "measure.trace": _trace,
    "measure_savings.asked": lambda: EstimateConfig(trace=_recorded()),
    "EstimateConfig.trace": lambda: _recorded(),
    "BenchConfig.recording": lambda: _recorded(),
    "measure.corpus": _corpus,
    "measure.runs": lambda: [_run_result()],
    "measure.results": written_results,
    "ChainOfAgents.llm": lambda: _chat_model(),
    "SpeculativeRAGChain.llm": lambda: _chat_model(),
    "SpeculativeRAGChain.prompt": lambda: ChatPromptTemplate.from_template("{context} {input}"),
    "SpeculativeRAGChain.input": lambda: {"input": "Which?"},
    "SpeculativeRAGChain.retriever": lambda: for_langchain.WorkflowRetriever(engine=_engine()),
    "WorkflowRetriever.inputs": lambda: ["Which?"],
    "IVFIndex.scan.clusters": lambda: [0, 1],
    "IVFIndex.vectors_of.clusters": lambda: [0],
    "IVFIndex.vectors_of.ids": lambda: _index().ids_of(0)[:1],
    "load.path": lambda: (
        _file("corpus.jsonl", _CORPUS) and _file("queries.jsonl", _QUERIES) and "."
    ),
    "read_corpus.path": lambda: _file("corpus.jsonl", _CORPUS),
    "read_titles.path": lambda: _file("corpus.jsonl", _CORPUS),
    "read_trace.path": lambda: _file("trace.jsonl", ""),
    "ReusePlanner.evict_tokens.tokens": lambda: 5,
    "ReusePlanner.load.missing_ok": lambda: True,
    "ReusePlanner.trim.blocks": lambda: 1,
    "ReusePlanner.block_tokens.blocks": lambda: _blocks(2),
    "ReusePlanner.report_usage.plans": lambda: [_planner().plan(_request())],
    "ReusePlanner.report_usage.prompt_tokens": lambda: 9,
    "ReusePlanner.note_without_context.prompts": lambda: 1,
    "PlannerCollector.planners": lambda: {"a": _planner()},
    "PlannerCollector.pools": lambda: None,
    "PlannerCollector.register.registry": lambda: CollectorRegistry(),
    "read_call.fields": lambda: {"system": "Help.", "tools": [{"name": "search"}], "model": "m"},
    "reported_miss.response": lambda: dict(_MISS),
    "Plan.explain.response": lambda: dict(_MISS),
    "lint.cache": lambda: cache_profile("anthropic"),
    "record.sent": lambda: SentCall(model="m", tools=("search#1",)),
    "record.marks": lambda: [0],
    "RetrieverStage.retriever": lambda: _Documents(),
    "langchain_ctxreuse.ReuseRetriever.retriever": lambda: _Documents(),
    "llamaindex_ctxreuse.RetrieverStage.retriever": lambda: _Nodes(),
    "llamaindex_ctxreuse.ReuseRetriever.retriever": lambda: _Nodes(),
    "llamaindex_ctxreuse.ReuseChatEngine.retriever": lambda: _Nodes(),
    "llamaindex_ctxreuse.LlamaIndexLLM.llm": lambda: MockLLM(),
    "llamaindex_ctxreuse.ReuseChatEngine.from_defaults.retriever": lambda: _Nodes(),
    "llamaindex_ctxreuse.ReuseChatEngine.from_defaults.llm": lambda: MockLLM(),
    "llamaindex_ctxreuse.ReuseChatEngine.llm": lambda: MockLLM(),
    "SpeculativeRAGQueryEngine.llm": lambda: MockLLM(),
    "SpeculativeRAGQueryEngine.retriever": lambda: for_llamaindex.WorkflowRetriever(_engine()),
    "AsyncReuseMemory.memory": lambda: _AsyncMemories(),
    "ReuseStore.store": lambda: InMemoryStore(),
    "EnginePool.name": lambda: "a",
    "EnginePool.engine": lambda: "http://c/v1",
    "IVFIndex.index": lambda: _faiss_index(),
    "TfidfEmbedder.texts": _words,
    "VectorRetriever.blocks": lambda: _blocks(64),
    "VectorRetriever.prepare.k": lambda: [3],
    "add_generation.prompt": lambda: "{docs} {input}",
    "answer": lambda: lambda messages: "Yes.",
    "arriving": lambda: 1.0,
    "workflow.ThroughputTable.arriving": lambda: [1.0, 2.0],
    "arriving_runs": lambda: 1.0,
    "capacity_bytes": lambda: 10_000,
    "cluster": lambda: 1,
    "completed": lambda: [[1.0, 2.0], [2.0, 3.0]],
    "endpoint": lambda: "tcp://127.0.0.1:1",
    "folder": lambda: "recorded",
    "function": lambda: len,
    "generation": lambda: ThroughputTable([1, 2], [1.0, 2.0], [[1.0, 2.0], [2.0, 3.0]]),
    "retrieval": lambda: ThroughputTable([1, 2], [1.0, 2.0], [[1.0, 2.0], [2.0, 3.0]]),
    "ids_a": lambda: ["a", "b"],
    "ids_b": lambda: ["b", "c"],
    "inner": lambda: _chat_model(),
    "llamaindex_ctxreuse.ReuseLLM.inner": lambda: MockLLM(),
    "memory_bytes": lambda: [1, 2],
    "nprobe": lambda: 2,
    "prompt_tokens": lambda: 5,
    "cached_tokens": lambda: 2,
    "references": lambda: ["yes", "no"],
    "Conversation.record.answer": lambda: "Yes.",
    "scores": lambda: [0.5, 1.0],
    "search": lambda: lambda query, k: list(_TEXTS),
    "source": lambda: START,
    "summary": lambda: "It was so.",
    "target": lambda: END,
    "prompt_token_ids": lambda: list(range(8)),
    "block_size": lambda: 4,
    "total_bytes": lambda: 3,
    "SpeculativeRAGChain.inputs": lambda: [{"input": "Which?"}],
    "WorkflowRunnable.inputs": lambda: [{"input": "Which?"}],
    "base_url": lambda: "http://engine/v1",
    "blocks": lambda: ["one", "two"],
    "cache": BlockLevelCache,
    "client": _client,
    "conversation_id": lambda: "c",
    "documents": lambda: [Document(words) for words in _TEXTS],
    "dimension": lambda: 4,
    "embedder": _embedder,
    "embeddings": lambda: DeterministicFakeEmbedding(size=4),
    "engine": _engine,
    "engines": lambda: {"a": _client},
    "graph": one_shot,
    "history": lambda: list(_MESSAGES),
    "http_client": _http,
    "id": lambda: "a",
    "ids": lambda: [1, 2],
    "index": _index,
    "input": lambda: "Which?",
    "inputs": lambda: {"input": "Which?"},
    "jobs": lambda: [(one_shot(), "Which?")],
    "k": lambda: 2,
    "llm": _model,
    "memory": _Memories,
    "edit_of.message": lambda: bytes(16),
    "note_edit.messages": lambda: [bytes(16)],
    "note_edit.edit": lambda: b"[null, [], [], []]",
    "message": lambda: "Which?",
    "messages": lambda: list(_MESSAGES),
    "model": _chat_model,
    "name": lambda: "search",
    "nodes": lambda: _Nodes().retrieve("Which?"),
    "params": dict,
    "path": lambda: "written",
    "plan": lambda: _planner().plan(_request()),
    "planner": _planner,
    "plans": lambda: [_planner().plan(_request())],
    "prompt": lambda: _planner().plan(_request()),
    "queries": lambda: ["Which?"],
    "query": lambda: "Which?",
    "query_bundle": lambda: "Which?",
    "question": lambda: "Which?",
    "recorder": lambda: TraceRecorder("records"),
    "request": _request,
    "request_id": lambda: "r",
    "request_ids": lambda: ["r"],
    "requests": lambda: [_request()],
    "retriever": _finder,
    "retrievers": lambda: {"words": _keywords(), "finder": _finder()},
    "rows": lambda: [0, 0],
    "state": lambda: _started(one_shot().compile()),
    "strategy": lambda: "reuse",
    "templates": lambda: DEFAULT_TEMPLATES,
    "tenant": lambda: "",
    "text": lambda: "The Tagus flows through Lisbon.",
    "texts": lambda: list(_TEXTS),
    "tokens": lambda: [1, 2, 3],
    "vectors": lambda: np.ones((1, 4), np.float32),
}
"""Good arguments by the end of the call's name with the parameter's; of several the longest."""


def key_of(call: str, name: str) -> str | None:
    """Return the key of a good argument for a parameter; None if there is none."""
    parts = [*call.split("."), name]
    keys = [".".join(parts[start:]) for start in range(len(parts))]
    within = [f"{part}.{name}" for part in reversed(parts[:-1])]
    return next((key for key in (*keys[:-1], *within, name) if key in VALID), None)
